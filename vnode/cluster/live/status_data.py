"""Turns a book, and statuses of supervisors, into plain data for commands and for the page.

Knows what people look at. Must not know terminals, nor HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vnode.cluster.live.job_book import Book, LiveJob, counts_of
from vnode.cluster.live.step_times import Pace
from vnode.cluster.live.submission import printable
from vnode.errors import ClusterError

LONGEST = 200
"""Letters of each part of a command that are shown, and how many parts."""


def snapshot(
    book: Book,
    time: float,
    facts: Mapping[str, Any],
    said: Mapping[str, Mapping[str, Any]],
    paces: Mapping[str, Pace],
    last: int | None = None,
) -> dict[str, Any]:
    """A cluster as plain data.

    Args:
      book: the jobs.
      time: now, in seconds since 1970.
      facts: of the scheduler: state, pid.
      said: by job, the last status of its supervisor.
      paces: by job, how fast it is.
      last: how many jobs that have ended are shown, and how many changes of devices for each; None for all.
    """
    folder, free = Path(facts["folder"]), book.free()
    ended = [job for job in book.jobs.values() if job.is_over]
    left_out = set() if last is None else {job.id for job in ended[: max(len(ended) - last, 0)]}
    jobs = [job for job in book.jobs.values() if job.id not in left_out]
    history = [change for change in book.holds if change["job"] not in left_out]
    return {
        "cluster": {
            "devices": book.devices,
            "free": free,
            "policy": book.policy,
            "state": facts["state"],
            "pid": facts["pid"],
            "began": book.began,
            "now": time,
        },
        "jobs": [job_data(job, folder, said.get(job.id, {}), paces.get(job.id), book) for job in jobs],
        "decisions": list(book.decisions),
        "history": history,
    }


def job_data(job: LiveJob, folder: Path, said: Mapping[str, Any], pace: Pace | None, book: Book) -> dict[str, Any]:
    """A job as plain data.

    Args:
      job: as the records tell.
      folder: of all jobs' output.
      said: the last status of its supervisor.
      pace: how fast it is, if it is known.
      book: of all jobs.
    """
    alive = job.alive and not job.is_over
    speed = None
    if alive and pace is not None and (seconds := pace.seconds.get(job.trains)):
        speed = 1 / seconds
    return {
        "id": job.id,
        "name": job.submission.title,
        "state": job.state,
        "priority": job.priority,
        "workers": list(job.submission.range),
        "rigid": job.submission.rigid,
        "share": job.share,
        "devices": job.devices,
        "training": None if job.submission.rigid else job.trains,
        "step": max(job.step, pace.step if pace else 0) or None,
        "steps": job.steps,
        "steps_per_second": speed,
        "metrics": dict(said.get("metrics") or {}),
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended,
        "code": job.code,
        "why": job.why or reason_to_wait(job, book),
        "command": shortened(job.submission.command),
        "folder": str(folder / job.id),
    }


def shortened(command: Sequence[str]) -> list[str]:
    """A command without the rest of long texts."""
    parts = [part if len(part) <= LONGEST else f"{part[:LONGEST]}..." for part in command[:LONGEST]]
    return parts if len(command) <= LONGEST else [*parts, "..."]


def reason_to_wait(job: LiveJob, book: Book) -> str:
    """Why a job has no devices; empty if it has some, or has ended."""
    if job.state != "pending" or job.devices:
        return ""
    if job.share:
        return f"waits for {job.share} devices: {len(book.free())} are free, others are about to be"
    counts = counts_of(book, job)
    if not counts:
        low, high = job.submission.range
        return f"it needs {low}:{high} devices, and jobs have {', '.join(map(str, book.options['counts']))}"
    if counts[0] > len(book.devices):
        return f"it needs {counts[0]} devices, and there are {len(book.devices)}"
    return f"the policy gives the devices to other jobs; it needs {counts[0]}"


def job_in(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A job of a snapshot, by its id, or by its name if only one that has not ended has it, or the last that had it.

    Raises:
      ClusterError: there is none.
    """
    jobs = [job for job in found["jobs"] if job["id"] == name]
    if not jobs:
        called = [job for job in found["jobs"] if job["name"] == printable(name)]
        jobs = [job for job in called if job["ended"] is None] or called[-1:]
    if len(jobs) != 1:
        several = "several jobs are called" if jobs else "there is no job"
        facts = [f"{job['id']}: {job['name']}, {job['state']}" for job in jobs]
        raise ClusterError(
            f"{several} {printable(name[:80])!r}.",
            facts=facts or [f"there are {len(found['jobs'])} jobs"],
            remedies=["see their ids: vnode queue"],
        )
    return jobs[0]


def to_json(data: Any) -> str:
    """JSON that browsers and other programs read: numbers that are not finite become text.

    >>> to_json({"loss": float("nan"), "best": [1.5, float("inf")]})
    '{"loss": "nan", "best": [1.5, "inf"]}'
    """
    try:
        return json.dumps(data, allow_nan=False)
    except ValueError:
        return json.dumps(without_nan(data), allow_nan=False)


def without_nan(data: Any) -> Any:
    """The same data, with text in place of numbers that are not finite."""
    if isinstance(data, dict):
        return {key: without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_nan(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
