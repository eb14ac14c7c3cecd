"""The times of a graph's tasks -> makespan, utilization, critical path, and memory over time.

Knows a graph and times. Must not know how they were found, or how they are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import numpy as np
from numpy.typing import ArrayLike

from vnode.errors import TaskGraphError
from vnode.partition.simulator.graph import SECOND, TaskGraph, integers


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """The result of `simulate`. All times are picoseconds, ``int64[n]``; the arrays cannot be written to.

    Attributes:
      graph: the task graph.
      ready: the time at which the last of a task's dependencies ended.
      end: the time at which the task ended.
      served: all tasks in an order of service, ``int32[n]``: after their dependencies, and on each resource in the
        order in which it served them. Tasks on different resources stand in any order.
      idle: the time in which each resource waits inside tasks that occupy it, ``int64[resources]``; such tasks stand
        for several, as loops do. None if there are none.
    """

    graph: TaskGraph
    ready: np.ndarray
    end: np.ndarray
    served: np.ndarray
    idle: np.ndarray | None = None

    def __post_init__(self) -> None:
        for array in (self.ready, self.end, self.served, self.idle):
            if array is not None:
                array.setflags(write=False)

    def __repr__(self) -> str:
        return f"Timeline({len(self.graph)} tasks, {self.seconds:.6g} s)"

    @functools.cached_property
    def start(self) -> np.ndarray:
        """The time at which each task began."""
        found = self.end - self.graph.duration
        found.setflags(write=False)
        return found

    @functools.cached_property
    def makespan(self) -> int:
        """The time at which the last task ends."""
        return int(self.end.max(initial=0))

    @property
    def seconds(self) -> float:
        """`makespan` in seconds."""
        return self.makespan / SECOND

    @functools.cached_property
    def busy(self) -> np.ndarray:
        """The time for which each resource is occupied, ``int64[resources]``."""
        graph, found = self.graph, np.zeros(len(self.graph.resources), np.int64)
        np.add.at(found, graph.resource, np.repeat(graph.duration, np.diff(graph.resource_start)))
        return found

    @property
    def utilization(self) -> np.ndarray:
        """The share of the makespan for which each resource works, ``float64[resources]``: busy without `idle` time."""
        return (self.busy - (0 if self.idle is None else self.idle)) / max(self.makespan, 1)

    @functools.cached_property
    def critical_path(self) -> np.ndarray:
        """Tasks that follow each other without a gap from 0 to the makespan, each waiting for the one before.

        A task waits for the one before it because it depends on it, or else because that one occupied a resource. The
        path is traced from its end. If there are several, dependencies are preferred to resources, then smaller
        numbers.
        """
        graph = self.graph
        if not len(graph):
            return np.zeros(0, np.int64)
        owner = np.repeat(np.arange(len(graph)), np.diff(graph.resource_start))
        by_end = np.lexsort((owner, self.end[owner], graph.resource))
        owner, place, ends = owner[by_end], graph.resource[by_end], self.end[owner[by_end]]
        bounds = np.searchsorted(place, np.arange(len(graph.resources) + 1))
        task = int(np.argmax(self.end))
        path = [task]
        while self.start[task]:
            now = self.start[task]
            awaited = graph.after(task)
            causes = awaited[self.end[awaited] == now]
            if not len(causes):
                found = []
                for r in graph.on(task):
                    low, high = bounds[r], bounds[r + 1]
                    i = low + np.searchsorted(ends[low:high], now)
                    if i < high and ends[i] == now:
                        found.append(owner[i])
                causes = np.array(found)
            task = int(causes.min())
            path.append(task)
        return np.array(path[::-1])

    def memory(self, tasks: ArrayLike, at_start: ArrayLike = 0, at_end: ArrayLike = 0) -> Memory:
        """The bytes in a memory over time, if tasks allocate and free some.

        At the same moment, memory is freed before it is allocated: a task that begins when another ends may use its
        memory.

        Args:
          tasks: ``int[k]``, in any order; a task may be named several times.
          at_start: bytes that are allocated (or, if negative, freed) when the task begins, one for all or ``int[k]``.
          at_end: the same when it ends.

        Returns:
          The bytes after each such moment.

        Raises:
          TaskGraphError: there is no such task, or the shapes do not fit.

        Example:
          >>> from vnode.partition.simulator import Builder, simulate
          >>> builder = Builder(["gpu"])
          >>> forward, backward = builder.add([10, 20], on=[0])
          >>> held = simulate(builder.build()).memory([forward, backward], [64, 32], [0, -96])
          >>> held.time, held.bytes, held.peak
          (array([ 0, 10, 30]), array([64, 96,  0]), 96)
        """
        given = integers(np.reshape(tasks, -1), "tasks"), integers(at_start, "at_start"), integers(at_end, "at_end")
        try:
            found, first, last = np.broadcast_arrays(*given)
        except ValueError as error:
            raise TaskGraphError(f"tasks and bytes do not fit: {error}") from None
        if found.ndim != 1:
            raise TaskGraphError(f"bytes are one for all tasks or one for each, not of shape {found.shape}")
        if found.size and not (found.min() >= 0 and found.max() < len(self.graph)):
            raise TaskGraphError(f"there are {len(self.graph)} tasks, and no task {found.min()} to {found.max()}")
        time = np.concatenate([self.start[found], self.end[found]])
        change = np.concatenate([first, last])
        order = np.lexsort((change, time))
        moments, begins = np.unique(time[order], return_index=True)
        held = np.cumsum(change[order])
        ends = np.append(begins[1:], len(order)) - 1
        # Within a moment the level falls first and then rises, so that it is highest at its end, or was before it.
        return Memory(moments, held[ends] if len(order) else held)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline as a trace, for https://ui.perfetto.dev or chrome://tracing.

        Args:
          path: the path of the JSON file.
        """
        from vnode.partition.simulator.chrome_trace import write

        write(self, path)

    def svg(self, *, resources: ArrayLike | None = None, width: int = 960) -> str:
        """Draws the timeline.

        Args:
          resources: numbers of the resources to show; by default all used ones, up to a number that one can look at.
          width: width of the picture, in pixels.

        Returns:
          An SVG picture that loads no other file.
        """
        from vnode.partition.simulator.drawing import draw

        return draw(self, resources=resources, width=width)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div>'


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """The bytes in a memory over time.

    Attributes:
      time: picoseconds, increasing, ``int64[m]``.
      bytes: bytes from that moment on until the next, ``int64[m]``.
    """

    time: np.ndarray
    bytes: np.ndarray

    @property
    def peak(self) -> int:
        """The most bytes at a time; 0 if there are none."""
        return int(self.bytes.max(initial=0))
