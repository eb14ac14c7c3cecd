"""Turns the records of an ended supervisor into the outcome of its job: ended, or pending again.

Knows exit codes, events of workers, tracebacks. Must not know schedulers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vnode.cluster.live.event_log import Record
from vnode.cluster.live.job_book import LiveJob

OFTEN, WHILE = 3, 600.0
"""The most restarts of a job within so many seconds, if nobody has asked it to make room."""

LONGEST = 4000
"""Letters of a reason, from its end: of a traceback that is the error."""

KILLED = 137
FULL = os.strerror(errno.ENOSPC)
TRACEBACK = "Traceback (most recent call last):"
LARGEST = 1 << 16
"""Bytes of a worker's errors that are looked at, from the end."""


def outcome(job: LiveJob, facts: Mapping[str, Any], folder: Path, time: float) -> Record:
    """The record of a job whose supervisor and workers are gone.

    Args:
      job: as it was.
      facts: what the supervisor left; without `code` if it was killed.
      folder: where the workers' output is.
      time: now, in seconds since 1970.
    """
    done = [each.get("step") for each in facts.get("events", []) if each["event"] in ("finished", "complete")]
    step = max(each for each in (job.step, facts.get("step"), *done) if each is not None)

    def ended(state: str, code: int, why: str = "") -> Record:
        return Record(time, "ended", job.id, {"state": state, "code": code, "why": why[-LONGEST:], "step": step})

    def retry(why: str, counts: bool = True) -> Record:
        counts = counts and not job.stopping
        recent = [each for each in job.interrupted if time - each < WHILE]
        if counts and len(recent) >= OFTEN:
            return ended("failed", facts.get("code", KILLED), f"{why}, {len(recent) + 1} times in {WHILE:g} s")
        return Record(time, "pending", job.id, {"why": why[-LONGEST:], "step": step, "counts": counts})

    if "refused" in facts:
        return ended("cancelled" if job.cancel else "failed", 2, facts["refused"])
    code = facts.get("code")
    finished = [event["why"] for event in facts.get("events", []) if event["event"] == "finished"]
    stops = [event["why"] for event in facts.get("events", []) if event["event"] == "stop"]
    completed = bool(finished) and not finished[-1]
    if code is None:
        if job.cancel:
            return ended("cancelled", KILLED)
        if "children" not in facts and not any(event["event"] == "start" for event in facts.get("events", [])):
            said = last_lines(folder.parent.parent / "err")[-5:]
            return retry("\n".join(["its supervisor did not begin", *said]), counts=not facts.get("blameless"))
        if job.submission.rigid:
            return ended("failed", KILLED, "its supervisor was killed, or could not write down how its command ended")
        return retry("its supervisor was killed; it goes on from its checkpoint")
    if job.cancel and not (completed and code == 0):
        return ended("cancelled", code)
    if stops and not (completed and code == 0) and not job.submission.rigid:
        return retry("it made room for others" if job.stopping else f"it was told to stop ({stops[-1]})")
    if code == KILLED and not facts.get("why") and not job.submission.rigid:
        return retry("its first worker was killed behind a run; it goes on from the checkpoint")
    if code == 0:
        return ended("succeeded", 0)
    why = "\n".join(part for part in (facts.get("why") or f"exit code {code}", last_error(folder)) if part)
    if FULL in why and not job.submission.rigid:
        return retry(f"a disk is full; it is begun again a few times\n{why}")
    return ended("failed", code, why)


def last_error(folder: Path) -> str:
    """The last traceback that a worker has printed, of the lowest number that has printed one; else its last lines."""
    without = ""
    numbered = {path.stem.partition("-")[2]: path for path in folder.glob("worker-*.err")}
    for _, path in sorted((int(number), path) for number, path in numbered.items() if number.isdecimal()):
        lines = last_lines(path)
        before = ["", *lines]
        places = [i for i, line in enumerate(lines) if line == TRACEBACK and not before[i].startswith("Exception ")]
        if places:  # of the script, not of a thread that its end has caught
            return end_of_error(lines[places[-1] :])
        without = without or "\n".join(lines[-10:])
    return without


def last_lines(path: Path) -> list[str]:
    """The last lines of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - LARGEST, 0))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def end_of_error(text: list[str]) -> str:
    """A traceback up to its error's message; what is printed behind it is left out.

    >>> print(end_of_error(["Traceback ...", "  File ...", "ValueError: no", "  facts", "other"]))
    Traceback ...
      File ...
    ValueError: no
      facts
    """
    lines: list[str] = []
    said = False
    for line in text:
        if said and not line.startswith(" "):
            break
        said = said or (bool(lines) and not line.startswith(" "))
        lines.append(line)
    return "\n".join(lines)
