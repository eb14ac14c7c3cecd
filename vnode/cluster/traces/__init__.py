"""Turns files of jobs, of several formats, into jobs.

read("jobs.json")    # VirtualFlow's published runs, or a list of jobs of our own
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vnode.cluster.traces import gavel, own, virtualflow
from vnode.cluster.traces.trace import Trace
from vnode.errors import ClusterError, layout_message


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
    text = text_of(path)
    if throughputs is not None:
        source = Path(throughputs)
        return gavel.read(text, str(path), parsed(text_of(source), source), str(source), list(kinds))
    if not text.lstrip().startswith(("{", "[")) and "\t" in text:
        remedies = ["--throughputs FILE --devices v100=4,p100=4, or read(..., throughputs=..., kinds=[...])"]
        raise ClusterError(
            layout_message(f"{path} looks like a trace of Gavel's; it needs throughputs.", remedies=remedies)
        )
    found = parsed(text, path)
    if isinstance(found, dict) and "traces" in found and "samples_per_s" in found:
        return virtualflow.read_mixed(found, str(path), run)
    if isinstance(found, dict) and "gpus" in found and ("jobs" in found or "runs" in found):
        return virtualflow.read(found, str(path), run)
    if isinstance(found, dict) and "jobs" in found:
        return own.read(found, str(path))
    example = '{"devices": 8, "jobs": [{"id": "a", "arrival": 0, "steps": 100, "step_seconds": {"1": 4.0, "8": 0.7}}]}'
    raise ClusterError(layout_message(f"{path} is no trace of jobs that vnode knows.", remedies=[f"write {example}"]))


def text_of(path: Path) -> str:
    """What stands in a file.

    Raises:
      ClusterError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}") from error


def parsed(text: str, path: Path) -> Any:
    """JSON.

    Raises:
      ClusterError: it is none.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"{path}, line {error.lineno}: no JSON: {error.msg}") from error
