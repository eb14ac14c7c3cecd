"""Turns files of jobs, of several formats, into jobs.

read("jobs.json")    # VirtualFlow's published runs, or a list of jobs of our own
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vnode.cluster.costs import FREE, VIRTUALFLOW
from vnode.cluster.traces import own, virtualflow
from vnode.cluster.traces.trace import Trace
from vnode.errors import ClusterError, layout_message


def read(path: str | os.PathLike[str], run: str | None = None) -> Trace:
    """Reads a trace; its format is found by what stands in it.

    Args:
      path: of the file.
      run: which of several traces in it; by default the last.

    Raises:
      ClusterError: it cannot be read; the message names file, place and field.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}") from error
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"{path}, line {error.lineno}: no JSON: {error.msg}") from error
    if isinstance(found, dict) and "gpus" in found and ("jobs" in found or "runs" in found):
        return virtualflow.read(found, str(path), run)
    if isinstance(found, dict) and "jobs" in found:
        return own.read(found, str(path))
    raise ClusterError(
        layout_message(
            f"{path} is no trace of jobs that vnode knows.",
            remedies=['write {"devices": 8, "jobs": [{"id": "a", "arrival": 0, "demand": 4, "times": {"1": 3600}}]}'],
        )
    )


__all__ = ["FREE", "VIRTUALFLOW", "Trace", "read"]
