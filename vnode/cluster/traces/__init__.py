"""Turns files of jobs, of several formats, into jobs.

read("jobs.json")         # VirtualFlow's published runs, or a list of jobs of our own
read("workload-6.csv")    # Pollux's, with the measured times of its applications beside it
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vnode.cluster.traces import gavel_traces, pollux, virtualflow, vnode_trace
from vnode.cluster.traces.job_trace import Trace, text_of
from vnode.errors import ClusterError


def read(
    path: str | os.PathLike[str],
    run: str | None = None,
    *,
    throughputs: str | os.PathLike[str] | None = None,
    kinds: Sequence[str] = (),
) -> Trace:
    """Reads a trace; its format is found by what stands in it.

    Args:
      path: of the file.
      run: which of several traces in it; by default the last.
      throughputs: the file of Gavel's throughputs, for a trace of Gavel's.
      kinds: of devices, for a trace of Gavel's.

    Raises:
      ClusterError: it cannot be read; the message names file, place and field.
    """
    path = Path(path)
    if is_database(path):
        from vnode.cluster.live.history import trace_of

        trace = trace_of(path)
        check(trace, path)
        return trace
    text = text_of(path)
    if throughputs is not None:
        source = Path(throughputs)
        trace = gavel_traces.read(text, str(path), parsed(text_of(source), source), str(source), list(kinds))
    elif pollux.is_workload(text):
        trace = pollux.read(text, path)
    elif not text.lstrip().startswith(("{", "[")) and "\t" in text:
        remedies = ["--throughputs FILE --devices v100=4,p100=4, or read(..., throughputs=..., kinds=[...])"]
        raise ClusterError(f"{path} looks like a trace of Gavel's; it needs throughputs.", remedies=remedies)
    else:
        trace = of_json(parsed(text, path), path, run)
    check(trace, path)
    return trace


def is_database(path: Path) -> bool:
    """Whether a file is a scheduler's, or another database of SQLite."""
    try:
        with open(path, "rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except OSError:
        return False


def of_json(found: Any, path: Path, run: str | None) -> Trace:
    """A trace of one of the formats in JSON.

    Raises:
      ClusterError: it cannot be read.
    """
    if isinstance(found, dict) and "traces" in found and "samples_per_s" in found:
        return virtualflow.read_mixed(found, str(path), run)
    if isinstance(found, dict) and "gpus" in found and ("jobs" in found or "runs" in found):
        return virtualflow.read(found, str(path), run)
    if isinstance(found, dict) and "jobs" in found:
        return vnode_trace.read(found, path)
    example = '{"devices": 8, "jobs": [{"id": "a", "arrival": 0, "steps": 100, "step_seconds": {"1": 4.0, "8": 0.7}}]}'
    raise ClusterError(f"{path} is not a trace of jobs in a format that vnode knows.", remedies=[f"write {example}"])


def check(trace: Trace, path: Path) -> None:
    """Looks at what must hold of any trace.

    Raises:
      ClusterError: it has no jobs, or two have one name.
    """
    if not trace.jobs:
        raise ClusterError(f"{path} has no jobs")
    seen: dict[str, int] = {}
    for index, job in enumerate(trace.jobs):
        if job.id in seen:
            raise ClusterError(f"{path}: jobs {seen[job.id]} and {index}, counted from 0, are both called {job.id!r}")
        seen[job.id] = index


def parsed(text: str, path: Path) -> Any:
    """JSON.

    Raises:
      ClusterError: it is none.
    """
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise ClusterError(f"{path}, line {error.lineno}: no JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{path}: no JSON: {error}") from error


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which no field occurs twice.

    Raises:
      ValueError: one does; the first would be lost.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found
