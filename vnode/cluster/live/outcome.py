"""Turns what a supervisor has left into what becomes of its job: it has ended, or is to go on later.

Knows exit codes, events of workers, tracebacks. Must not know schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vnode.cluster.live.book import LiveJob
from vnode.cluster.live.records import Record

OFTEN, WHILE = 3, 600.0
"""How often within so many seconds a job is begun again that nobody has asked to make room."""

KILLED = 137
TRACEBACK = re.compile(rb"^Traceback \(most recent call last\):$", re.MULTILINE)
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
    step = facts.get("step")
    step = job.step if step is None else step

    def ended(state: str, code: int, why: str = "") -> Record:
        return Record(time, "ended", job.id, {"state": state, "code": code, "why": why, "step": step})

    def later(why: str) -> Record:
        recent = [each for each in job.interrupted if time - each < WHILE]
        if not job.stopping and len(recent) >= OFTEN:
            return ended("failed", facts.get("code", KILLED), f"{why}, {len(recent) + 1} times in {WHILE:g} s")
        return Record(time, "pending", job.id, {"why": why, "step": step})

    if "refused" in facts:
        return ended("cancelled" if job.cancel else "failed", 2, facts["refused"])
    code = facts.get("code")
    finished = [event["why"] for event in facts.get("events", []) if event["event"] == "finished"]
    stops = [event["why"] for event in facts.get("events", []) if event["event"] == "stop"]
    done = bool(finished) and not finished[-1]
    if code is None:
        if job.cancel:
            return ended("cancelled", KILLED)
        if "pid" not in facts:
            return later("its supervisor did not begin")
        if job.submission.rigid:
            return ended("failed", KILLED, "its supervisor was killed, and its command with it")
        return later("its supervisor was killed; it goes on from its checkpoint")
    if job.cancel and not (done and code == 0):
        return ended("cancelled", code)
    if stops and not done and not job.submission.rigid:
        return later("it made room for others" if job.stopping else f"it was told to stop ({stops[-1]})")
    if code == 0:
        return ended("succeeded", 0)
    why = "\n".join(part for part in (facts.get("why") or f"exit code {code}", last_error(folder)) if part)
    return ended("failed", code, why)


def last_error(folder: Path) -> str:
    """The last traceback that a worker has printed, of the lowest number that has printed one; else its last lines."""
    last_lines = ""
    for path in sorted(folder.glob("worker-*.err"), key=lambda path: int(path.stem.partition("-")[2])):
        try:
            with open(path, "rb") as file:
                file.seek(max(path.stat().st_size - LARGEST, 0))
                text = file.read()
        except OSError:
            continue
        if found := list(TRACEBACK.finditer(text)):
            return end_of_error(text[found[-1].start() :].decode(errors="replace"))
        last_lines = last_lines or "\n".join(text.decode(errors="replace").splitlines()[-10:])
    return last_lines


def end_of_error(text: str) -> str:
    """A traceback up to its error's message; what is printed behind it is left out.

    >>> print(end_of_error("Traceback (most recent call last):\\n  File ...\\nValueError: no\\n  facts\\nother\\n"))
    Traceback (most recent call last):
      File ...
    ValueError: no
      facts
    """
    lines, said = [], False
    for line in text.splitlines():
        if said and not line.startswith(" "):
            break
        said = said or (bool(lines) and not line.startswith(" "))
        lines.append(line)
    return "\n".join(lines)
