"""A timeline -> a trace file for viewers with zoom: https://ui.perfetto.dev, chrome://tracing.

Knows the JSON of Chrome's trace events ("Trace Event Format", complete events and metadata). Must not know how a
timeline was found, nor pictures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from vnode import files
from vnode.errors import TaskGraphError

Timeline = Any
"""A `vnode.partition.simulator.timeline.Timeline`. That module imports this one, so it cannot be imported here."""

MICROSECOND = 10**6
"""Picoseconds in the format's unit of time."""


def write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes one event a line: each task once on every resource that it occupies.

    Raises:
      TaskGraphError: the file cannot be written.
    """
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events(timeline))
    files.write_text(path, f'{{"displayTimeUnit":"ns","traceEvents":[\n{lines}\n]}}\n', TaskGraphError)


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The trace's events: a thread for each used resource and one for tasks without one; then all tasks by time.

    Times are microseconds, exact to the picosecond up to a step of two hours.
    """
    graph, start, nowhere = timeline.graph, timeline.start.tolist(), len(timeline.graph.resources)
    bars = sorted((start[task], thread, task) for task, on in enumerate(graph.on) for thread in on or (nowhere,))
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "simulated step"}}
    for r in sorted({thread for _, thread, _ in bars}):
        name = graph.resources[r] if r < nowhere else "(no resource)"
        yield {"ph": "M", "pid": 0, "tid": r, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": r, "name": "thread_sort_index", "args": {"sort_index": r}}
    critical = set(timeline.critical_path.tolist())
    for begin, r, t in bars:
        label, waited = graph.label[t], begin - int(timeline.ready[t])
        args = {"task": t, "waited (us)": waited / MICROSECOND, "on the critical path": t in critical}
        yield {
            "ph": "X",
            "pid": 0,
            "tid": r,
            "name": label or f"task {t}",
            "cat": label or "task",
            "ts": begin / MICROSECOND,
            "dur": graph.duration[t] / MICROSECOND,
            "args": args,
        }
