"""Turns a running scheduler, or the file of one that does not run, into a snapshot of a cluster.

Knows where to ask. Must not know terminals.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vnode.cluster.live.socket_server import VARIABLE, find, request
from vnode.cluster.live.status_data import job_in
from vnode.errors import ClusterError


def read_cluster(state: str | None, last: int | None = None) -> tuple[dict[str, Any], bool]:
    """Reads the snapshot of a cluster.

    Args:
      state: the scheduler's file; None for that of the variable, or of the only scheduler that runs.
      last: how many jobs that have ended are wanted; None for all.

    Returns:
      The snapshot, and whether a scheduler runs.

    Raises:
      ClusterError: there is neither a scheduler nor its file.
    """
    if not runs(state):
        return from_file(Path(str(state or os.environ[VARIABLE]))), False
    if last is not None:
        return request("queue", state, last=last)["answer"], True
    found = request("queue", state, last=0)["answer"]
    jobs: list[dict[str, Any]] = []
    while part := request("queue", state, first=len(jobs))["answer"]["jobs"]:
        jobs += part
    return {**found, "jobs": jobs}, True


def look_at(state: str | None, job: str) -> dict[str, Any]:
    """One job, and what was decided about it.

    Args:
      state: as `read_cluster` returns it.
      job: its id or name.

    Raises:
      ClusterError: there is none, or neither a scheduler nor its file.
    """
    if runs(state):
        return request("status", state, job=job)["answer"]
    found = from_file(Path(str(state or os.environ[VARIABLE])))
    shown = job_in(found, job)
    return {**shown, "decisions": [each for each in found["decisions"] if each["job"] == shown["id"]]}


def runs(state: str | None) -> bool:
    """Whether the scheduler that is meant runs; if not, its file is there.

    Raises:
      ClusterError: it is not.
    """
    named = state or os.environ.get(VARIABLE)
    try:
        find(state)
    except ClusterError:
        if not named or not os.path.isfile(named):
            raise
        return False
    return True


def from_file(path: Path) -> dict[str, Any]:
    """A cluster as its file tells."""
    from vnode.cluster.live.event_store import jobs_folder, read_records
    from vnode.cluster.live.job_book import Book
    from vnode.cluster.live.status_data import snapshot

    whole = Path(os.path.realpath(path))
    facts = {"state": str(whole), "folder": str(jobs_folder(whole)), "pid": None}
    return snapshot(Book(read_records(whole)), time.time(), facts, {}, {})
