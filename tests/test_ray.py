"""Workers that Ray starts end with the bits of one process, whatever happens to actors and nodes.

Knows `launch`, Ray, process numbers, and scripts in `tests.programs`. Must not know what workers tell one another.
Without Ray (`pip install 'vnode[ray]'`, which the tests' own extra leaves out for its size) nothing here runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import jobs
from tests.programs.chaos_of_workers import ENVIRONMENT, SCRIPT, reference
from vnode.workers import job_registry
from vnode.workers.launch import Job, launch

pytest.importorskip("ray")
pytestmark = [pytest.mark.thorough, pytest.mark.quickly]
DEADLINE = 300.0
until = functools.partial(jobs.until, seconds=DEADLINE)


@pytest.fixture(autouse=True)
def _own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of tests are not those of the user, nor is the Ray."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@contextlib.contextmanager
def started(asked: dict[str, Any], workers: int, **more: Any) -> Iterator[Job]:
    """A job, which is killed in the end if it has not ended."""
    job = launch(str(SCRIPT), workers, backend="ray", arguments=[json.dumps(asked)], env=ENVIRONMENT, **more)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.kill()
        job.process.wait(DEADLINE)


def parent(pid: int) -> int:
    """The process that has started another one: of a worker's, the actor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ended(out: Path) -> dict[str, Any]:
    """The step, hash and losses that the last worker has written."""
    (left,) = [json.loads(path.read_text()) for path in out.glob("*.json")]
    return left


def lost(job: Job) -> list[str]:
    return [each["why"] for each in job.events if each["event"] == "lost"]


def test_an_actor_that_dies_is_a_lost_worker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two workers, one's actor is killed, its process goes with it, another one joins; then one worker is left."""
    slow, out = tmp_path / "slow", tmp_path / "out"
    slow.touch()
    out.mkdir()
    asked = {"model": "plain", "steps": 1500, "slow": str(slow), "out": str(out)}
    expected = reference(asked, tmp_path)
    with started(asked, 2) as job:
        until(job, lambda: job.step, "the first step")
        first = job.workers
        assert not strangers(job.pid)
        os.kill(parent(first[0]["pid"]), signal.SIGKILL)
        until(job, lambda: lost(job), "a loss")
        until(job, lambda: job_registry.started(first[0]["pid"]) is None, "its process ends")
        until(job, lambda: len(job.workers) == 2 and job.workers[0]["pid"] != first[0]["pid"], "a replacement")
        job.resize(1)
        until(job, lambda: len(job.workers) == 1, "one worker")
        slow.unlink()
        assert job.wait(DEADLINE) == 0
    left = ended(out)
    assert (left["step"], left["hash"]) == (1500, expected["hash"])
    assert dict(left["losses"]).items() <= dict(expected["losses"]).items()
    assert "done: 1500 steps" in capfd.readouterr().out and len(lost(job)) == 1


def strangers(pid: int) -> list[str]:
    """Addresses beside loopback at which a process, or one that it has started, listens."""
    family, said = {pid}, subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in said.splitlines()[1:]]
    for _ in pairs:
        family |= {child for child, parent in pairs if parent in family}
    sockets = set()
    for each in family:
        with contextlib.suppress(OSError):
            sockets |= {
                os.readlink(fd)[8:-1] for fd in Path(f"/proc/{each}/fd").iterdir() if "socket" in os.readlink(fd)
            }
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets and not fields[1].startswith(LOOPBACK):
                found.append(fields[1])
    return found


LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
"""127.0.0.1, also as an address of IPv6, and ::1, as the kernel writes them."""


def test_jobs_that_share_a_ray(tmp_path: Path) -> None:
    """A scheduler that decides, and a Ray that places: two jobs on three workers end with their own bits."""
    from vnode.cluster import Submission, run

    program = str(Path(__file__).parent / "programs" / "paced_job.py")

    def command(steps: int, seed: int, pace: str) -> list[str]:
        return ["python", program, str(steps), str(seed), pace, pace]

    submitted = [
        Submission(command=command(300, 1, "0.05"), workers=(1, 3), name="first"),
        Submission(command=command(40, 2, "0.05"), workers=(1, 3), name="second", arrival=20),
    ]
    found = run(submitted, 3, "max_min", state=tmp_path / "cluster.db", backend="ray")
    assert [job["state"] for job in found.jobs.values()] == ["succeeded", "succeeded"], found.jobs
    for name, asked in zip(found.jobs, submitted, strict=True):
        alone = subprocess.run(
            [sys.executable, *command(int(asked.command[2]), int(asked.command[3]), "0")[1:]],
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.output(name).split("hash ")[-1].split() == alone.stdout.split("hash ")[-1].split()
