"""A timeline -> a trace file for viewers with zoom: https://ui.perfetto.dev, chrome://tracing.

Knows the JSON of Chrome's trace events ("Trace Event Format", complete events and metadata). Must not know how a
timeline was found, nor pictures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from vnode import files
from vnode.errors import TaskGraphError

Timeline = Any
"""A `vnode.partition.simulator.timeline.Timeline`. That module imports this one, so it cannot be imported here."""

MICROSECOND = 10**6
"""Picoseconds in the format's unit of time."""


def write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes one event a line: each task once on every resource that it occupies.

    Args:
      timeline: the timeline.
      path: the path of the file.

    Raises:
      TaskGraphError: the file cannot be written.
    """
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events(timeline))
    files.write_text(path, f'{{"displayTimeUnit":"ns","traceEvents":[\n{lines}\n]}}\n', TaskGraphError)


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The trace's events: a thread for each used resource and one for tasks without one; then all tasks by time.

    Times are microseconds, exact to the picosecond up to a step of two hours.
    """
    graph = timeline.graph
    places = np.diff(graph.resource_start)
    task = np.concatenate([np.repeat(np.arange(len(graph)), places), np.flatnonzero(places == 0)])
    nowhere = len(graph.resources)
    thread = np.concatenate([graph.resource, np.full(len(task) - len(graph.resource), nowhere, np.int32)])
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "simulated step"}}
    for r in np.unique(thread).tolist():
        name = graph.resources[r] if r < nowhere else "(no resource)"
        yield {"ph": "M", "pid": 0, "tid": r, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": r, "name": "thread_sort_index", "args": {"sort_index": r}}
    critical = np.zeros(len(graph), bool)
    critical[timeline.critical_path] = True
    order = np.lexsort((thread, timeline.start[task]))
    for t, r in zip(task[order].tolist(), thread[order].tolist(), strict=True):
        label = graph.labels[graph.label[t]]
        waited = int(timeline.start[t] - timeline.ready[t])
        args = {"task": t, "waited (us)": waited / MICROSECOND, "on the critical path": bool(critical[t])}
        yield {
            "ph": "X",
            "pid": 0,
            "tid": r,
            "name": label or f"task {t}",
            "cat": label or "task",
            "ts": int(timeline.start[t]) / MICROSECOND,
            "dur": int(graph.duration[t]) / MICROSECOND,
            "args": args,
        }
