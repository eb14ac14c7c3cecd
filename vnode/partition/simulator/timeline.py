"""The times of a graph's tasks -> makespan, utilization, and critical path.

Knows a graph and times. Must not know how they were found, or how they are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import numpy as np

from vnode.partition.simulator.graph import SECOND, TaskGraph


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """The result of `simulate`. All times are picoseconds, ``int64[n]``; the arrays cannot be written to.

    Attributes:
      graph: the task graph.
      ready: the time at which the last of a task's dependencies ended.
      end: the time at which the task ended.
      idle: the time in which each resource waits inside tasks that occupy it, ``int64[resources]``; such tasks stand
        for several, as loops do. None if there are none.
    """

    graph: TaskGraph
    ready: np.ndarray
    end: np.ndarray
    idle: np.ndarray | None = None

    def __post_init__(self) -> None:
        for array in (self.ready, self.end, self.idle):
            if array is not None:
                array.setflags(write=False)

    def __repr__(self) -> str:
        return f"Timeline({len(self.graph)} tasks, {self.seconds:.6g} s)"

    @functools.cached_property
    def start(self) -> np.ndarray:
        """The time at which each task began."""
        return self.end - np.array(self.graph.duration, np.int64)

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
        found = np.zeros(len(self.graph.resources), np.int64)
        for duration, on in zip(self.graph.duration, self.graph.on, strict=True):
            found[list(on)] += duration
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
        graph, start, end = self.graph, self.start.tolist(), self.end.tolist()
        ending = {(resource, end[task]): task for task, on in enumerate(graph.on) for resource in on}
        path = [int(np.argmax(self.end))] if end else []
        while path and start[path[-1]]:
            task, now = path[-1], start[path[-1]]
            causes = [each for each in graph.after[task] if end[each] == now]
            path.append(min(causes or [ending[on, now] for on in graph.on[task] if (on, now) in ending]))
        return np.array(path[::-1], np.int64)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline as a trace, for https://ui.perfetto.dev or chrome://tracing.

        Args:
          path: the path of the JSON file.
        """
        from vnode.partition.simulator.chrome_trace import write

        write(self, path)

    def svg(self) -> str:
        """Draws the timeline: an SVG picture that loads no other file, of all used resources up to a number."""
        from vnode.partition.simulator.drawing import draw

        return draw(self)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div>'
