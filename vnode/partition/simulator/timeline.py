"""When each task was ready, began and ended, and what follows from that.

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
    """What `simulate` found. All times are picoseconds, ``int64[n]``; the arrays cannot be written to.

    Attributes:
      graph: what was simulated.
      ready: when the last of those that a task waits for ended.
      end: when it ended.
      served: all tasks in an order in which they can be served, ``int32[n]``: after those that they wait for, and on
        each resource as they were there. Tasks on different resources stand in any order.
      idle: how long each resource has nothing to do in tasks that occupy it, ``int64[resources]``: those that stand for
        several, as loops do; None if there are no such tasks.
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
        """When each task began."""
        found = self.end - self.graph.duration
        found.setflags(write=False)
        return found

    @functools.cached_property
    def makespan(self) -> int:
        """When the last task ends."""
        return int(self.end.max(initial=0))

    @property
    def seconds(self) -> float:
        """`makespan` in seconds."""
        return self.makespan / SECOND

    @functools.cached_property
    def busy(self) -> np.ndarray:
        """How long each resource is occupied, ``int64[resources]``."""
        graph, found = self.graph, np.zeros(len(self.graph.resources), np.int64)
        np.add.at(found, graph.resource, np.repeat(graph.duration, np.diff(graph.resource_start)))
        return found

    @property
    def utilization(self) -> np.ndarray:
        """The share of the makespan for which each resource works, ``float64[resources]``: occupied, and not `idle`."""
        return (self.busy - (0 if self.idle is None else self.idle)) / max(self.makespan, 1)

    @functools.cached_property
    def critical_path(self) -> np.ndarray:
        """Tasks that follow each other without a gap from 0 to the makespan, each for the sake of the next.

        A task waits for the one before it on the path because it needs what that one does, or else because that one
        occupied a resource. Where there are several such paths, it is found from its end, and goes by the smallest
        number, dependencies first.
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

        Of what happens at the same time, what is given back comes first: who begins when another ends may have its
        memory.

        Args:
          tasks: ``int[k]``, in any order; a task may be named several times.
          at_start: bytes that are taken (or, if negative, given back) when it begins, one for all or ``int[k]``.
          at_end: likewise when it ends.

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
          path: of the JSON file.
        """
        from vnode.partition.simulator.chrome_trace import write

        write(self, path)

    def svg(self, *, resources: ArrayLike | None = None, width: int = 960) -> str:
        """Draws the timeline.

        Args:
          resources: which to show, by number; by default all that are used, up to a number that one can look at.
          width: of the picture, in pixels.

        Returns:
          An SVG picture, whole in itself.
        """
        from vnode.partition.simulator.drawing import draw

        return draw(self, resources=resources, width=width)

    def _repr_html_(self) -> str:
        return self.svg()


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """The bytes in a memory over time.

    Attributes:
      time: picoseconds, increasing, ``int64[m]``.
      bytes: held from that moment on until the next, ``int64[m]``.
    """

    time: np.ndarray
    bytes: np.ndarray

    @property
    def peak(self) -> int:
        """The most that is held at a time; 0 if nothing is."""
        return int(self.bytes.max(initial=0))
