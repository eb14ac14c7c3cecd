"""Real training on a cluster: whatever happens to jobs, scheduler and workers, each ends with the bits of itself alone.

Knows the scheduler's commands, and jobs that print a hash of their state. Must not know how they train.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_live import PROGRAMS, Served, home, served, until  # noqa: F401
from vnode.cluster.live.event_store import read_records
from vnode.cluster.live.job_book import Book
from vnode.cluster.live.policy_shares import replay
from vnode.cluster.live.socket_server import request
from vnode.cluster.live.submission import Submission
from vnode.workers import job_registry

pytestmark = [pytest.mark.thorough, pytest.mark.quickly]

PROGRAM = str(PROGRAMS / "paced_job.py")


def command(steps: int, seed: int, pace: float = 0.05) -> list[str]:
    """Of a job; that with seed 6 trains twice, and has two virtual nodes."""
    more = ["2", "2"] if seed == 6 else []
    return [sys.executable, PROGRAM, str(steps), str(seed), str(pace), str(pace), *more]


def hash_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("hash ")]


def test_jobs_that_share_workers_end_with_their_own_bits(served: Served) -> None:  # noqa: F811
    """Seven jobs on four workers, and one that is stopped for another: arrivals, another priority, a cancel, a worker
    and the scheduler killed, the scheduler begun again with a policy that stops jobs."""
    steps = {"1": 240, "2": 80, "3": 60, "4": 10**5, "5": 60, "6": 40, "7": 40}

    def submit(name: str, workers: tuple[int, int] = (1, 4), priority: float = 1) -> None:
        job = Submission(command=command(steps[name], int(name)), workers=workers, priority=priority)
        assert request("submit", job=job.facts())["answer"] == name

    served.begin("--devices", "4", "--no-page", "--policy", "max_min")
    submit("1")
    until(lambda: served.job("1")["training"] == 4, served.log, 300)
    submit("2")
    submit("3", priority=2)
    submit("4", (1, 2))
    request("priority", job="2", priority=5)
    until(lambda: (served.job("1")["step"] or 0) > 20 and served.job("2")["training"], served.log, 300)
    found = job_registry.load(served.folder / "cluster.db.jobs" / "1" / "run-1" / "job")
    assert found is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(found.workers_alive()[0], signal.SIGKILL)  # of job 1
    request("cancel", job="4", now=True)
    served.end(signal.SIGKILL)
    served.begin("--devices", "4", "--no-page", "--policy", "shortest_remaining")
    for name in ("5", "6", "7"):
        submit(name, priority=3)
    until(lambda: all(job["ended"] for job in request("queue")["answer"]["jobs"]), served.log, 400)
    states = {job["id"]: (job["state"], job["why"]) for job in request("queue")["answer"]["jobs"]}
    assert states.pop("4") == ("cancelled", "")
    assert set(states.values()) == {("succeeded", "")}, states
    for name in states:
        alone = subprocess.run(command(steps[name], int(name), 0), capture_output=True, text=True, check=True)
        shared = (served.folder / "cluster.db.jobs" / name / "out").read_text()
        assert hash_of(shared) == hash_of(alone.stdout), f"job {name}"
    records = read_records(served.state)
    assert all(dict(again.shares) == dict(record.facts["shares"]) for record, again in replay(records))
    assert Book(records).jobs["1"].attempt >= 1


def test_a_job_that_made_room_goes_on_from_its_checkpoint(home: Path) -> None:  # noqa: F811
    import vnode.cluster

    def newest(now, jobs, devices):
        first = jobs[0]
        if first.remaining < first.work:
            return {jobs[len(jobs) - 1].id: 2}
        return vnode.cluster.Decision({first.id: 2}, again=now + 0.2)  # until it has done a step

    asked = [
        Submission(command=command(120, 1), workers=2, name="first"),
        Submission(command=command(20, 2), workers=2, name="second", arrival=1),
    ]
    run = vnode.cluster.run(asked, 2, newest, state=home / "cluster.db")
    book = Book(read_records(run.state))
    stopped = [record for record in read_records(run.state) if record.kind == "pending"]
    assert book.jobs["1"].state == "succeeded" and book.jobs["1"].attempt == 2
    assert [record.facts["why"] for record in stopped] == ["it made room for others"] and stopped[0].facts["step"] > 0
    alone = subprocess.run(command(120, 1, 0), capture_output=True, text=True, check=True)
    assert hash_of(run.output("1")) == hash_of(alone.stdout)  # once: the script ended when the job made room

    folder = str(Path(run.jobs["2"]["folder"]) / "checkpoint")
    other = Submission(command=command(40, 3), workers=2, checkpoint=folder)  # its data have another seed
    refused = vnode.cluster.run([other], 2, state=home / "other.db").jobs["1"]
    assert refused["state"] == "failed" and "was made with other batches" in refused["why"]
