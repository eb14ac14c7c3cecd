"""Turns a scheduler that runs, or the file of one that does not, into what is shown of a cluster.

Knows where to ask. Must not know terminals.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vnode.cluster.live.door import VARIABLE, ask, find
from vnode.errors import ClusterError


def look(state: str | None) -> tuple[dict[str, Any], bool]:
    """A cluster as it is.

    Args:
      state: the scheduler's file; None for that of the variable, or of the only scheduler that runs.

    Returns:
      The snapshot, and whether a scheduler runs.

    Raises:
      ClusterError: there is neither a scheduler nor its file.
    """
    named = state or os.environ.get(VARIABLE)
    try:
        find(state)
    except ClusterError:
        if not named or not os.path.isfile(named):
            raise
        return from_file(Path(named)), False
    return ask("queue", state)["answer"], True


def from_file(path: Path) -> dict[str, Any]:
    """A cluster as its file tells."""
    from vnode.cluster.live.book import Book
    from vnode.cluster.live.shown import snapshot
    from vnode.cluster.live.state import jobs_folder, read

    whole = Path(os.path.realpath(path))
    facts = {"state": str(whole), "folder": str(jobs_folder(whole)), "pid": None}
    return snapshot(Book(read(whole)), time.time(), facts, {}, {})
