"""Columns of durations, resources and dependencies -> a task graph, or a change of one, many tasks at a time.

Knows how rows of resources and tasks are broadcast, and which new ids follow from a change. Must not know what tasks
stand for, nor when they are served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from vnode.errors import TaskGraphError, layout_message
from vnode.partition.simulator.graph import (
    MOST,
    TaskGraph,
    bounded_integers,
    check_once,
    check_total,
    durations,
    integers,
)
from vnode.show.units import several

Rows = ArrayLike | tuple[ArrayLike, ...]
"""A row of numbers for each of k new tasks: an array that is broadcast to ``(k, m)``, or several, side by side."""


class Draft:
    """New tasks and new dependencies. See `Builder` and `Edit`."""

    def __init__(self, resources: tuple[str, ...], labels: tuple[str, ...], first: int) -> None:
        self.resources = resources
        self._labels = {name: number for number, name in enumerate(labels)}
        self._first = self._next = first
        self._columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._on: list[np.ndarray] = []
        self._after: list[np.ndarray] = []
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(
        self,
        duration: ArrayLike,
        on: Rows = (),
        *,
        after: Rows = (),
        label: str | Sequence[str] = "",
        priority: ArrayLike = 0,
    ) -> np.ndarray:
        """Adds k tasks.

        Rows are broadcast as NumPy does it. With shape ``(m,)`` all tasks have the same m entries; with ``(k, 1)``
        each has one entry of its own; with ``(k, m)`` each has m of its own. An entry -1 stands for none. A tuple
        holds several such arrays, whose rows are joined.

        Args:
          duration: picoseconds, one for all or ``int[k]``.
          on: the resources that each task occupies; a task without resources only takes time.
          after: the tasks that each waits for.
          label: the task's label, one for all or one for each.
          priority: the rank among tasks that become ready at the same time, smaller first; one or ``int[k]``.

        Returns:
          The new tasks, ``int64[k]``.

        Raises:
          TaskGraphError: shapes do not fit, or there is no such resource or task.

        Example:
          >>> import numpy as np
          >>> builder = Builder(["gpu:0", "gpu:1", "link"])
          >>> halves = builder.add(10, on=np.arange(2)[:, None], label="half")
          >>> exchange = builder.add(4, on=[2], after=halves)
          >>> builder.add([3, 5], on=[[0], [1]], after=(exchange, halves[:, None]))
          array([3, 4])
        """
        one = durations(np.reshape(duration, -1))
        names = np.array([self._number(name) for name in ([label] if isinstance(label, str) else label)], np.int32)
        order = bounded_integers(np.reshape(priority, -1), "priority", -MOST, MOST)
        on_rows, after_rows = rows(on, "on"), rows(after, "after")
        sizes = {len(x) for x in (one, names, order, *on_rows, *after_rows)} - {1}
        if len(sizes) > 1:
            shapes = {"duration": [one], "label": [names], "priority": [order], "on": on_rows, "after": after_rows}
            raise TaskGraphError(
                layout_message(
                    "the arguments are for different numbers of tasks.",
                    facts=[f"{n}: {' and '.join(str(list(x.shape)) for x in found)}" for n, found in shapes.items()],
                    remedies=["one entry, or one row, for each task, or a single one for all"],
                )
            )
        k = sizes.pop() if sizes else 1
        placed = self._joined(on_rows, k, "on: resource", len(self.resources))
        awaited = self._joined(after_rows, k, "after: task", self._next)
        if placed.shape[1] > 1:
            which, column = np.nonzero(placed >= 0)
            check_once(which + self._next, placed[which, column], len(self.resources))
        self._columns.append(tuple(np.broadcast_to(x, k) for x in (one, order, names)))  # pyright: ignore
        self._on.append(placed)
        self._after.append(awaited)
        first, self._next = self._next, self._next + k
        if self._next > MOST:
            raise TaskGraphError(f"a graph has at most {MOST} tasks")
        return np.arange(first, self._next)

    def depend(self, tasks: ArrayLike, on: ArrayLike) -> None:
        """Adds dependencies.

        Args:
          tasks: the tasks that wait.
          on: the tasks that they wait for; both are broadcast against each other.

        Raises:
          TaskGraphError: there is no such task, or the shapes do not fit.

        Example:
          >>> builder = Builder(["gpu"])
          >>> a, b = builder.add([1, 1], on=[0])
          >>> builder.depend(a, b)
        """
        try:
            pair = np.broadcast_arrays(integers(tasks, "tasks"), integers(on, "on"))
        except ValueError as error:
            raise TaskGraphError(f"tasks and those they wait for do not fit: {error}") from None
        waiting, awaited = (np.reshape(x, -1) for x in pair)
        for found in (waiting, awaited):
            check_known(found, "task", self._next)
        self._pairs.append((waiting, awaited))

    def _joined(self, parts: list[np.ndarray], k: int, what: str, count: int) -> np.ndarray:
        """Rows of all parts side by side, ``int64[k, m]``."""
        for part in parts:
            check_known(part, what, count, -1)
        wide = [np.broadcast_to(part, (k, part.shape[1])) for part in parts]
        return wide[0] if len(wide) == 1 else np.concatenate([np.empty((k, 0), np.int64), *wide], axis=1)

    def _number(self, name: str) -> int:
        return self._labels.setdefault(name, len(self._labels))

    def _added(self) -> tuple[np.ndarray, ...]:
        """Durations, priorities and labels of the new tasks; their resources and dependencies as rows."""
        empty = np.zeros(0, np.int32)
        duration = np.concatenate([np.zeros(0, np.int64), *(c[0] for c in self._columns)])
        priority, label = (np.concatenate([empty, *(c[i] for c in self._columns)]) for i in (1, 2))
        return duration, priority, label, *ragged(self._on), *ragged(self._after)


class Builder(Draft):
    """Makes a task graph.

    Args:
      resources: names of the resources that tasks occupy: a device's compute stream, a link, a copy engine. Tasks
        overlap only on different resources.

    Example:
      >>> builder = Builder(["gpu", "link"])
      >>> first = builder.add([10, 20], on=[0], label="layer")
      >>> last = builder.add(5, on=[1], after=first, label="send")
      >>> builder.build()
      TaskGraph(3 tasks on 2 resources, 2 dependencies)
    """

    def __init__(self, resources: Sequence[str]) -> None:
        super().__init__(tuple(map(str, resources)), (), 0)

    def build(self) -> TaskGraph:
        """The graph of the added tasks.

        Raises:
          TaskGraphError: all durations together are too long.
        """
        duration, priority, label, resource_start, resource, dependency_start, dependency = self._added()
        check_total(duration)
        if self._pairs:
            waiting = np.concatenate(
                [np.repeat(np.arange(len(duration)), np.diff(dependency_start)), *firsts(self._pairs)]
            )
            dependency = np.concatenate([dependency, *seconds(self._pairs)])[np.argsort(waiting, kind="stable")]
            dependency_start = cumulative(np.bincount(waiting, minlength=len(duration)))
        return TaskGraph.unchecked(
            duration=duration,
            resource_start=resource_start,
            resource=resource,
            dependency_start=dependency_start,
            dependency=dependency.astype(np.int32),
            priority=priority,
            label=label,
            resources=self.resources,
            labels=tuple(self._labels) or ("",),
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Change:
    """An edited graph, and its differences from the old one.

    Attributes:
      before: the old graph.
      graph: the new graph: the kept tasks in their order, then the added ones.
      renumbered: the new number of each old task and of each added one, ``int32``; -1 if it was removed.
      removed: the old numbers of removed tasks.
      moved: the new numbers of tasks that were added, or whose dependencies changed.
      retimed: the new numbers of tasks whose duration was set.
    """

    before: TaskGraph
    graph: TaskGraph
    renumbered: np.ndarray
    removed: np.ndarray
    moved: np.ndarray
    retimed: np.ndarray

    def ids(self, tasks: ArrayLike) -> np.ndarray:
        """Numbers in the new graph.

        Args:
          tasks: numbers in the old graph, or as `Edit.add` returned them.

        Returns:
          Their numbers in the new graph, ``int32`` of the same shape; -1 for removed tasks.

        Raises:
          TaskGraphError: there was no such task.
        """
        found = integers(tasks, "tasks")
        check_known(found, "task", len(self.renumbered))
        return self.renumbered[found]

    def __repr__(self) -> str:
        gone, moved = several(len(self.removed), "task"), several(len(self.moved), "task")
        return f"Change({gone} removed, {moved} added or waiting for others, {len(self.retimed)} with another duration)"


class Edit(Draft):
    """A change to a graph, which itself stays as it is: an operator is split otherwise, a transfer takes longer.

    Tasks keep their numbers while the change is written, and added tasks get the next ones. `build` closes the gaps
    (`Change.ids`).

    Args:
      graph: the graph to change.

    Example:
      >>> builder = Builder(["gpu"])
      >>> first, second = builder.add([10, 20], on=[0])
      >>> edit = Edit(builder.build())
      >>> edit.remove(first)
      >>> faster = edit.add(6, on=[0])
      >>> edit.depend(second, faster)
      >>> change = edit.build()
      >>> change.ids([first, second, faster[0]]), change.graph.duration
      (array([-1,  0,  1], dtype=int32), array([20,  6]))
    """

    def __init__(self, graph: TaskGraph) -> None:
        super().__init__(graph.resources, graph.labels, len(graph))
        self._graph = graph
        self._gone: list[np.ndarray] = []
        self._retimed: list[tuple[np.ndarray, np.ndarray]] = []

    def remove(self, tasks: ArrayLike) -> None:
        """Removes tasks of the old graph; others no longer wait for them.

        Raises:
          TaskGraphError: there is no such task.
        """
        found = np.reshape(integers(tasks, "tasks"), -1)
        check_known(found, "task", len(self._graph))
        self._gone.append(found)

    def retime(self, tasks: ArrayLike, duration: ArrayLike) -> None:
        """Sets durations of tasks of the old graph.

        Args:
          tasks: ``int[k]``.
          duration: picoseconds, one for all or ``int[k]``.

        Raises:
          TaskGraphError: there is no such task, or a duration is not positive.
        """
        found, times = np.reshape(integers(tasks, "tasks"), -1), durations(np.reshape(duration, -1))
        check_known(found, "task", len(self._graph))
        if len(times) not in (1, len(found)):
            raise TaskGraphError(f"{several(len(times), 'duration')} for {several(len(found), 'task')}")
        self._retimed.append((found, np.broadcast_to(times, len(found))))

    def build(self) -> Change:
        """The changed graph, and its differences.

        Raises:
          TaskGraphError: a new dependency names a removed task; or the sum of durations is too long.
        """
        from vnode.partition.simulator.event_loops import rewrite

        graph, added = self._graph, self._added()
        duration = np.concatenate([graph.duration, added[0]])
        retimed = np.concatenate([np.zeros(0, np.int64), *firsts(self._retimed)])
        duration[retimed] = np.concatenate([np.zeros(0, np.int64), *seconds(self._retimed)])
        check_total(duration)
        removed = np.unique(np.concatenate([np.zeros(0, np.int64), *self._gone]))
        gone = np.zeros(len(duration), np.bool_)
        gone[removed] = True
        waiting, awaited = (
            np.concatenate([np.zeros(0, np.int64), *pick(self._pairs)]).astype(np.int32) for pick in (firsts, seconds)
        )
        for found in (added[6], waiting, awaited):
            if len(removed) and gone[found].any():
                raise TaskGraphError(f"{graph.name(found[gone[found]][0])} is removed and cannot be in a dependency")
        order = np.argsort(waiting, kind="stable")
        fields, renumbered, moved = rewrite(
            graph.arrays, graph.label, duration, gone, added[1:], waiting[order], awaited[order]
        )
        names = "duration", "priority", "label", "resource_start", "resource", "dependency_start", "dependency"
        new = TaskGraph.unchecked(
            **dict(zip(names, fields, strict=True)), resources=graph.resources, labels=tuple(self._labels)
        )
        retimed = renumbered[retimed]
        return Change(graph, new, renumbered, removed, moved, retimed[retimed >= 0])


def rows(given: Rows, name: str) -> list[np.ndarray]:
    """Arrays of rows, each ``int64[1 or k, m]``."""
    parts = [integers(part, name) for part in (given if isinstance(given, tuple) else (given,))]
    for part in parts:
        if part.ndim > 2:
            raise TaskGraphError(f"{name} has rows, of shape (m,) or (k, m), not {part.shape}")
    return [part.reshape(1, -1) if part.ndim < 2 else part for part in parts]


def check_known(found: np.ndarray, what: str, count: int, least: int = 0) -> None:
    """Checks that all numbers are known.

    Raises:
      TaskGraphError: a number is unknown.
    """
    if found.size and (found.min() < least or found.max() >= count):
        wrong = found[(found < least) | (found >= count)][0]
        raise TaskGraphError(f"{what} {wrong} is not known: there are {count} so far, from 0")


def ragged(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all parts without gaps: the start of each row, and the entries."""
    kept = [part >= 0 for part in parts]
    counts = [np.zeros(0, np.int64), *(mask.sum(axis=1) for mask in kept)]
    values = [np.zeros(0, np.int32), *(part[mask] for part, mask in zip(parts, kept, strict=True))]
    return cumulative(np.concatenate(counts)), np.concatenate(values, dtype=np.int32, casting="unsafe")


def cumulative(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def firsts(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    return [first for first, _ in pairs]


def seconds(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    return [second for _, second in pairs]
