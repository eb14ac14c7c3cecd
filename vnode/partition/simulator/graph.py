"""Tasks with durations, resources and dependencies -> a task graph, for the simulator.

Knows numbers and names. Must not know jaxprs, plans, machines, or how a graph is simulated.

Times are whole picoseconds, since sums of integers are exact in any order. A picosecond is far below what can be
measured, and 2^62 of them are 53 days.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from vnode.errors import TaskGraphError
from vnode.show.units import several

SECOND = 10**12
"""Picoseconds in a second: the unit of all times here."""
LONGEST = 1 << 62
"""The limit of the sum of all durations, so that no time overflows."""


class TaskGraph:
    """Tasks with durations, resources and dependencies. Tasks are numbered in the order in which they are added.

    Args:
      resources: names of the resources that tasks occupy, such as ``"gpu:0"``, ``"gpu:0 to gpu:1"``. Tasks overlap only
        on different resources.

    Attributes:
      duration: picoseconds of each task, at least 1. So a task is ready later than all tasks that it waits for, and
        times alone decide the order of service.
      on: the resources that each task occupies, by number.
      after: the tasks that each task waits for.
      label: each task's label, such as an operator or ``"all-reduce"``.

    Example:
      >>> graph = TaskGraph(["gpu", "link"])
      >>> first, second = (graph.add(picoseconds, on=[0], label="layer") for picoseconds in (10, 20))
      >>> graph.add(5, on=[1], after=[first, second], label="send")
      2
      >>> graph
      TaskGraph(3 tasks on 2 resources, 2 dependencies)
    """

    def __init__(self, resources: Sequence[str]) -> None:
        self.resources = tuple(map(str, resources))
        self.duration: list[int] = []
        self.on: list[tuple[int, ...]] = []
        self.after: list[tuple[int, ...]] = []
        self.label: list[str] = []

    def add(self, duration: int, on: Sequence[int] = (), *, after: Sequence[int] = (), label: str = "") -> int:
        """Adds a task.

        Args:
          duration: picoseconds, at least 1.
          on: the resources that the task occupies; a task without resources only takes time.
          after: the tasks that it waits for, which are in the graph already.
          label: the task's label.

        Returns:
          The task's number.

        Raises:
          TaskGraphError: there is no such resource or task, the duration is not positive, or the task names a resource
            twice.
        """
        number = len(self)
        if not 1 <= duration < LONGEST:
            raise TaskGraphError(f"a task takes from 1 to {LONGEST} picoseconds, not {duration}")
        for what, found, count in (("resource", on, len(self.resources)), ("task", after, number)):
            for each in found:
                if not 0 <= each < count:
                    raise TaskGraphError(f"{what} {each} is not known: there are {count} so far, from 0")
        if len(set(on)) < len(on):
            raise TaskGraphError(f"task {number} names a resource twice, of {list(on)}")
        self.duration.append(int(duration))
        self.on.append(tuple(on))
        self.after.append(tuple(after))
        self.label.append(label)
        return number

    def __len__(self) -> int:
        return len(self.duration)

    def __repr__(self) -> str:
        tasks, resources = several(len(self), "task"), several(len(self.resources), "resource")
        return f"TaskGraph({tasks} on {resources}, {several(sum(map(len, self.after)), 'dependency', 'dependencies')})"


def picoseconds(seconds: ArrayLike) -> np.ndarray:
    """Times for a task graph: the nearest whole picoseconds, at least one.

    Args:
      seconds: times in seconds, 0 or more.

    Returns:
      ``int64`` of the same shape.

    Raises:
      TaskGraphError: a time is negative, infinite or not a number, or longer than a graph may take.

    Example:
      >>> picoseconds([1.5e-6, 0.0])
      array([1500000,       1])
    """
    times = np.asarray(seconds, np.float64) * SECOND
    wrong = ~((times >= 0) & (times < LONGEST))
    if wrong.any():
        raise TaskGraphError(f"a task takes from 0 to {LONGEST / SECOND:.3g} seconds, not {times[wrong][0] / SECOND}")
    return np.maximum(np.rint(times).astype(np.int64), 1)
