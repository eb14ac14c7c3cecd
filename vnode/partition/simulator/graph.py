"""Tasks with durations, resources and dependencies -> a task graph as arrays, for the simulator.

Knows numbers and names. Must not know jaxprs, plans, machines, how a graph is made or how it is simulated.

Times are whole picoseconds, since sums of integers are exact in any order. So a timeline that is computed in another
way has the same bits. A delay of everything by one time changes nothing else. A picosecond is far below what can be
measured, and 2^62 of them are 53 days.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vnode.errors import TaskGraphError, layout_message
from vnode.show.units import several

SECOND = 10**12
"""Picoseconds in a second: the unit of all times here."""
LONGEST = 1 << 62
"""The limit of the sum of all durations, so that no time overflows."""
MOST = (1 << 31) - 1
"""The most tasks, the most dependencies, and the most places of tasks on resources."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TaskGraph:
    """Tasks with durations, resources and dependencies. `Builder` makes one conveniently.

    Rows of unequal length are stored in one array after another: task t occupies
    ``resource[resource_start[t]:resource_start[t + 1]]``, and waits for the tasks in
    ``dependency[dependency_start[t]:dependency_start[t + 1]]``. The arrays cannot be written to.

    Attributes:
      duration: picoseconds, ``int64[n]``, at least 1. So a task is ready later than all tasks that it waits for, and
        times alone decide the order of service. A task that takes no time gets 1.
      resource_start: ``int32[n + 1]``.
      resource: numbers of resources, ``int32``; a task names none twice.
      dependency_start: ``int32[n + 1]``.
      dependency: numbers of tasks, ``int32``.
      priority: ``int32[n]``. Of tasks that become ready at the same time, the smaller number is served first.
      label: number of each task's label, ``int32[n]``.
      resources: names of the resources, such as ``"gpu:0"``, ``"gpu:0 to gpu:1"``.
      labels: names of the labels, such as operators or ``"all-reduce"``.

    Raises:
      TaskGraphError: the arrays do not fit together, a duration is not positive, or the sum of durations is too long.

    Example:
      >>> graph = TaskGraph([5, 7], [0, 1, 2], [0, 0], [0, 0, 1], [0], resources=("gpu",))
      >>> graph, graph.after(1)
      (TaskGraph(2 tasks on 1 resource, 1 dependency), array([0], dtype=int32))
    """

    duration: np.ndarray
    resource_start: np.ndarray
    resource: np.ndarray
    dependency_start: np.ndarray
    dependency: np.ndarray
    priority: np.ndarray
    label: np.ndarray
    resources: tuple[str, ...]
    labels: tuple[str, ...]

    def __init__(
        self,
        duration: ArrayLike,
        resource_start: ArrayLike,
        resource: ArrayLike,
        dependency_start: ArrayLike,
        dependency: ArrayLike,
        *,
        resources: Sequence[str],
        priority: ArrayLike | None = None,
        label: ArrayLike | None = None,
        labels: Sequence[str] = ("",),
    ) -> None:
        times = durations(duration)
        n = len(times)
        fields: dict[str, Any] = {
            "duration": times,
            "resource_start": row_starts(resource_start, n, "resource_start", resource),
            "resource": bounded_integers(resource, "resource", 0, len(resources) - 1),
            "dependency_start": row_starts(dependency_start, n, "dependency_start", dependency),
            "dependency": bounded_integers(dependency, "dependency", 0, n - 1),
            "priority": zeros(n) if priority is None else bounded_integers(priority, "priority", -MOST, MOST),
            "label": zeros(n) if label is None else bounded_integers(label, "label", 0, len(labels) - 1),
            "resources": tuple(map(str, resources)),
            "labels": tuple(map(str, labels)),
        }
        for name in ("priority", "label"):
            if len(fields[name]) != n:
                raise TaskGraphError(f"{name} has {len(fields[name])} entries for {several(n, 'task')}")
        check_total(times)
        check_once(np.repeat(np.arange(n), np.diff(fields["resource_start"])), fields["resource"], len(resources))
        self._fill(fields)

    @staticmethod
    def unchecked(**fields: Any) -> TaskGraph:
        """A graph of arrays that are known to fit together; a change of a graph checks only its own arrays."""
        graph = object.__new__(TaskGraph)
        graph._fill(fields)
        return graph

    def _fill(self, fields: dict[str, Any]) -> None:
        for value in fields.values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
        self.__dict__.update(fields)

    def __len__(self) -> int:
        return len(self.duration)

    def __repr__(self) -> str:
        tasks, resources = several(len(self), "task"), several(len(self.resources), "resource")
        return f"TaskGraph({tasks} on {resources}, {several(len(self.dependency), 'dependency', 'dependencies')})"

    def on(self, task: int) -> np.ndarray:
        """The resources that a task occupies."""
        return self.resource[self.resource_start[task] : self.resource_start[task + 1]]

    def after(self, task: int) -> np.ndarray:
        """The tasks that a task waits for."""
        return self.dependency[self.dependency_start[task] : self.dependency_start[task + 1]]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that a simulation reads."""
        return (
            self.duration,
            self.priority,
            self.resource_start,
            self.resource,
            self.dependency_start,
            self.dependency,
        )

    def name(self, task: int) -> str:
        """The task's label and number, for people."""
        label = self.labels[self.label[task]]
        return f"task {task}" + (f" ({label})" if label else "")


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


def durations(given: ArrayLike) -> np.ndarray:
    """Durations of tasks, checked.

    Raises:
      TaskGraphError: they are not whole numbers, or not positive.
    """
    times = bounded_integers(given, "duration", -LONGEST, LONGEST, np.int64)
    wrong = np.flatnonzero(times < 1)
    if len(wrong):
        raise TaskGraphError(
            layout_message(
                f"a task takes at least one picosecond, not {times[wrong[0]]}.",
                facts=[f"{several(len(wrong), 'duration')} of {len(times)}, the first that of task {wrong[0]}"],
                remedies=["picoseconds(seconds) rounds times up to 1; a task that only joins others takes 1"],
            )
        )
    return times


def check_total(times: np.ndarray) -> None:
    """Checks that the sum of all durations, which no timeline exceeds, does not overflow.

    Raises:
      TaskGraphError: the sum is too long.
    """
    total = float(times.sum(dtype=np.float64))
    if total >= LONGEST:
        raise TaskGraphError(
            layout_message(
                f"all tasks together take {total / SECOND:.3g} s, too long for times in picoseconds.",
                facts=[f"at most {LONGEST / SECOND:.3g} s, so that no sum overflows"],
            )
        )


def check_once(task: np.ndarray, resource: np.ndarray, resources: int) -> None:
    """Checks that no task occupies a resource twice.

    Args:
      task: the task of each place, ``int[k]``.
      resource: the resource of each place, ``int[k]``.
      resources: the number of resources.

    Raises:
      TaskGraphError: a task occupies a resource twice.
    """
    places = np.sort(task * np.int64(resources) + resource)
    twice = np.flatnonzero(places[1:] == places[:-1])
    if len(twice):
        which, where = divmod(int(places[twice[0]]), resources)
        raise TaskGraphError(f"task {which} names resource {where} twice: a task occupies a resource once")


def bounded_integers(given: ArrayLike, name: str, least: int, most: int, dtype: Any = np.int32) -> np.ndarray:
    """A new array of whole numbers within bounds.

    Raises:
      TaskGraphError: an entry is not a whole number, or out of bounds.
    """
    array = np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TaskGraphError(f"{name} must be a row of whole numbers, not {array.dtype.name}{list(array.shape)}")
    if array.size and not (least <= array.min() and array.max() <= most):
        at = np.flatnonzero((array < least) | (array > most))[0]
        raise TaskGraphError(f"{name}[{at}] is {array[at]}, where {least} to {most} would be right")
    return array.astype(dtype, order="C", copy=True)


def integers(given: ArrayLike, name: str) -> np.ndarray:
    """Whole numbers of any shape.

    Raises:
      TaskGraphError: an entry is not a whole number.
    """
    array = np.asarray(given)
    if array.size and array.dtype.kind not in "iu":
        raise TaskGraphError(f"{name} must be whole numbers, not {array.dtype.name}{list(array.shape)}")
    return array.astype(np.int64, copy=False)


def row_starts(given: ArrayLike, tasks: int, name: str, content: ArrayLike) -> np.ndarray:
    """The start of each task's row, and the end of the last row.

    Raises:
      TaskGraphError: they do not divide the content into so many rows.
    """
    size = len(np.asarray(content))
    found = bounded_integers(given, name, 0, MOST)
    if len(found) != tasks + 1 or found[0] != 0 or found[-1] != size or (np.diff(found) < 0).any():
        raise TaskGraphError(
            f"{name} must rise from 0 to {size} in {several(tasks + 1, 'entry', 'entries')}, "
            f"for {several(tasks, 'task')}"
        )
    return found


def zeros(n: int) -> np.ndarray:
    return np.zeros(n, np.int32)
