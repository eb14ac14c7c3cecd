"""A scheduler and its commands, with workers that train nothing.

Knows the command line, processes. Must not know jax.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vnode.cluster
from vnode import cli
from vnode.cluster.live.event_store import read_records
from vnode.cluster.live.job_book import Book
from vnode.cluster.live.socket_server import request, socket_of
from vnode.cluster.live.submission import Submission
from vnode.errors import ClusterError, WorkerError
from vnode.workers import job_registry

PROGRAMS = Path(__file__).parents[1] / "programs"
WORKER = str(PROGRAMS / "fake_worker.py")


def counting(steps: int, rate: int = 50, **options) -> list[str]:
    """The command of an elastic job that counts steps by the clock."""
    return [sys.executable, WORKER, json.dumps({"steps": steps, "rate": rate, "nodes": 8, **options})]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets of this test's own, and a folder to work in."""
    with tempfile.TemporaryDirectory(prefix="vn-", dir="/tmp") as runtime:  # a socket's path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.delenv("VNODE_CLUSTER", raising=False)
        monkeypatch.chdir(tmp_path)
        yield tmp_path


class Served:
    """A scheduler in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "cluster.db"
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, *more: str) -> None:
        command = [sys.executable, "-m", "vnode", "cluster", "serve", "--state", str(self.state), *more]
        with open(self.folder / "serve.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: self.process is None or self.process.poll() is not None or self.answers(), self.log)

    def answers(self) -> bool:
        try:
            request("queue", str(self.state))
        except ClusterError:
            return False
        return True

    def log(self) -> str:
        return (self.folder / "serve.log").read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def job(self, name: str) -> dict:
        return next(job for job in request("queue", str(self.state))["answer"]["jobs"] if job["id"] == name)


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    found = Served(home)
    yield found
    if found.process is not None and found.process.poll() is None:
        for job in request("queue", str(found.state))["answer"]["jobs"]:
            if job["ended"] is None:
                request("cancel", str(found.state), job=job["id"], now=True)
        until(lambda: all(job["ended"] for job in request("queue", str(found.state))["answer"]["jobs"]), found.log)
        found.end()


def until(found: Callable[[], object], what: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def test_the_commands(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    """One scheduler is used as people use it, ended, asked for, begun again."""

    def vnode(*arguments: str, code: int = 0) -> tuple[str, str]:
        capfd.readouterr()
        assert cli.main([*arguments]) == code
        return capfd.readouterr()

    assert "no scheduler runs" in vnode("queue", code=1)[1]
    served.begin("--devices", "4", "--no-page", "--policy", "max_min", "--env", "MINE=gpu{device}")
    refused = vnode("cluster", "serve", "--devices", "4", "--state", str(served.state), code=2)[1]
    assert "another scheduler uses" in refused
    assert (
        "no policy 'nice'"
        in vnode("cluster", "serve", "--devices", "4", "--state", "b.db", "--policy", "nice", code=2)[1]
    )

    long = vnode("submit", "--name", "long", "--workers", "1:4", "--", *counting(10**6))[0]
    assert long == "1\n"
    assert "never runs here" in vnode("submit", "--workers", "5:9", "--", "true", code=2)[1]
    assert "its command is []" in vnode("submit", code=2)[1]
    until(lambda: served.job("1")["state"] == "running", served.log)
    assert served.job("1")["devices"] == ["0", "1", "2", "3"]

    says = "echo $MINE $VNODE_DEVICE; echo to stderr >&2; sleep 0.2; exit 3"
    waited = [sys.executable, "-m", "vnode", "submit", "--wait", "--rigid", "--workers", "2", "--name", "rigid"]
    done = subprocess.run([*waited, "--", "sh", "-c", says], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "2\n") and "job 2 failed" in done.stderr
    out, err = vnode("logs", "rigid")
    first, second = re.fullmatch(r"gpu(\d),(\d) \1,\2\n", out).groups()  # pyright: ignore
    assert first != second and "to stderr" in err
    until(
        lambda: served.job("1")["devices"] == ["0", "1", "2", "3"] or len(served.job("1")["devices"]) == 4, served.log
    )

    assert vnode("submit", "--workers", "4", "--priority", "2", "--", *counting(5))[0] == "3\n"
    assert vnode("priority", "3", "9")[0] == ""
    assert "a number above 0" in vnode("priority", "3", "-1", code=1)[1]
    assert "there is no job '9'" in vnode("cancel", "9", code=1)[1]
    queue = json.loads(vnode("queue", "--json")[0])
    assert [job["priority"] for job in queue["jobs"]] == [1.0, 1.0, 9.0]
    table = vnode("queue")[0]
    assert "long" in table and "rigid" in table and "failed" in table
    assert vnode("cancel", "3")[0] == ""
    until(lambda: served.job("3")["state"] == "cancelled", served.log)
    assert "has ended: cancelled" in vnode("cancel", "3", code=1)[1]
    shown = vnode("status", "long")[0]
    assert "grown 2 -> 4" in shown and "job 2 (rigid)" in shown

    supervisor = job_registry.load(served.folder / "cluster.db.jobs" / "1" / "run-1" / "job")
    assert supervisor is not None and served.end() == 0
    assert "1 job goes on without it" in served.log()
    out, err = vnode("queue", "--state", str(served.state))
    assert "long" in out and "no scheduler runs" in err and supervisor.runs
    assert "no scheduler runs with the file" in vnode("cancel", "1", "--state", str(served.state), code=1)[1]

    served.begin("--devices", "3", "--no-page")
    assert "still uses device 3" in served.log() and served.process is not None and served.process.returncode == 2
    served.begin("--devices", "4", "--no-page", "--policy", "goodput")
    step = served.job("1")["step"]
    until(lambda: (served.job("1")["step"] or 0) > (step or 0), served.log)
    assert vnode("cancel", "long")[0] == ""
    until(lambda: served.job("1")["state"] == "cancelled", served.log)
    assert not supervisor.runs and not supervisor.workers_alive()
    assert vnode("cluster", "replay")[0].endswith(" 0 differ\n")
    figures = json.loads(vnode("cluster", "report", "--json", "--out", "page")[0])["goodput"]
    assert len(figures["jobs"]) == 3 and (served.folder / "page" / "index.html").exists()


def test_a_worker_has_its_own_device_and_a_killed_one_gives_it_to_the_next(served: Served) -> None:
    """Against what the kernel says of the processes that are there."""
    served.begin("--devices", "a,b,c", "--no-page", "--policy", "max_min")
    for count in (3, 2):
        command = counting(10**6, nodes=count)
        request("submit", job=Submission(command=command, workers=(1, 3), name=f"of-{count}").facts())

    def devices() -> dict[int, str]:
        found = {}
        for name in ("1", "2"):
            job = job_registry.load(served.folder / "cluster.db.jobs" / name / "run-1" / "job")
            for pid in job.workers_alive() if job else []:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    found[pid] = next((v.decode()[13:] for v in variables if v.startswith(b"VNODE_DEVICE=")), "")
        return found

    def settled() -> bool:
        there = [served.job(name) for name in ("1", "2")]
        used = devices()
        assert len(set(used.values())) == len(used), used  # at no time has a device two processes
        return all(job["state"] == "running" for job in there) and len(used) == 3

    until(settled, served.log)
    victim = next(iter(devices()))
    os.kill(victim, signal.SIGKILL)
    until(lambda: victim not in devices(), served.log)
    until(settled, served.log)
    request("cancel", job="1", now=True)
    until(lambda: served.job("1")["state"] == "cancelled", served.log)
    until(lambda: served.job("2")["state"] == "running", served.log)
    assert len(served.job("2")["devices"]) == 2  # it has two virtual nodes
    assert sorted(devices().values()) == sorted(served.job("2")["devices"])


def test_a_supervisor_that_is_killed_is_replaced_when_its_workers_are_gone(served: Served) -> None:
    served.begin("--devices", "2", "--no-page")
    request("submit", job=Submission(command=counting(10**6), workers=(1, 2)).facts())
    until(lambda: served.job("1")["state"] == "running", served.log)
    first = job_registry.load(served.folder / "cluster.db.jobs" / "1" / "run-1" / "job")
    assert first is not None
    workers = first.workers_alive()
    os.kill(first.facts["pid"], signal.SIGKILL)
    until(lambda: Book(read_records(served.state)).jobs["1"].attempt == 2, served.log)
    assert not [pid for pid in workers if job_registry.started(pid)]
    until(lambda: served.job("1")["state"] == "running", served.log)
    second = job_registry.load(served.folder / "cluster.db.jobs" / "1" / "run-2" / "job")
    assert second is not None
    os.kill(second.facts["pid"], signal.SIGTERM)  # as at a shutdown: it goes on later
    until(lambda: Book(read_records(served.state)).jobs["1"].attempt == 3, served.log)


def test_the_socket_is_for_its_user_and_takes_nonsense(served: Served) -> None:
    served.begin("--devices", "2", "--no-page")
    path = socket_of(served.state)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(nonsense)
    for each in (
        {"kind": "dance"},
        {"kind": "submit"},
        {"kind": "submit", "job": {"command": 3}},
        {"kind": "status"},
    ):
        with pytest.raises(ClusterError, match=r"does not know 'dance'|cannot be read"):
            request(each.pop("kind"), str(served.state), **each)
    assert request("queue")["answer"]["jobs"] == []


def test_a_policy_may_stop_a_job_and_a_failure_harms_no_other(home: Path) -> None:
    """Three jobs by a function of the user's: the second stops the first, the third fails."""

    def last_first(now, jobs, devices):
        return {job.id: job.demand if job.id == max(row.id for row in jobs) else 0 for job in jobs}

    said: list[str] = []
    asked = [
        Submission(command=counting(200), workers=2, name="first"),
        Submission(command=counting(10), workers=2, name="second", arrival=2.5),
        Submission(command=[sys.executable, "-c", "raise KeyError('mine')"], workers=1, arrival=2.6),
    ]
    run = vnode.cluster.run(asked, 2, last_first, state=home / "cluster.db", say=said.append)
    assert [job["state"] for job in run.jobs.values()] == ["succeeded", "succeeded", "failed"]
    assert run.jobs["3"]["why"].endswith("KeyError: 'mine'")
    assert any("stops: job 2 (second) with priority 1 arrived" in line for line in said)
    book = Book(read_records(run.state))
    assert book.jobs["1"].attempt == 2 and not book.jobs["1"].interrupted
    figures = run.result.figures()
    assert len(figures["jobs"]) == 3 and 0 < figures["utilisation_allocated"] <= 1
    with pytest.raises(ClusterError, match="never runs here"):
        vnode.cluster.run([Submission(command=["true"], workers=3)], 2, state=home / "other.db")
    for words, policy in [("ZeroDivisionError", lambda *_: 1 // 0), ("without devices for ever", lambda *_: {})]:
        with pytest.raises(ClusterError, match=words):
            vnode.cluster.run([Submission(command=["true"], rigid=True)], 2, policy, state=home / "third.db")


@pytest.mark.parametrize("policy", ["goodput"])
def test_a_scheduler_that_is_killed_loses_no_job_and_disturbs_none(home: Path, policy: str) -> None:
    program = str(PROGRAMS / "chaos_of_scheduler.py")
    command = [sys.executable, program, "--kills", "6", "--jobs", "8", "--seed", "3", "--policy", policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def marked(folder: Path) -> list[int]:
    """Processes of jobs of a folder, by their environments."""
    return job_registry.marked(str(folder / "run-1" / "job"))


def test_what_a_job_leaves_is_ended_before_its_device_is_free(served: Served) -> None:
    """Background processes in the job's session and in their own, of a job that ends, and of one that is killed."""
    served.begin("--devices", "1", "--no-page")
    ends = "sleep 300 & setsid sleep 300 & sleep 0.3"
    for lines in (ends, f"{ends}; sleep 300"):
        request("submit", job=Submission(command=["sh", "-c", lines], rigid=True).facts())
    first, second = (served.folder / "cluster.db.jobs" / name for name in ("1", "2"))
    until(lambda: served.job("2")["state"] == "running", served.log)
    assert served.job("1")["state"] == "succeeded" and not marked(first)
    until(lambda: len(marked(second)) >= 3, served.log)
    found = job_registry.load(second / "run-1" / "job")
    assert found is not None
    os.kill(found.facts["pid"], signal.SIGKILL)  # its supervisor
    until(lambda: served.job("2")["ended"], served.log)
    assert served.job("2")["state"] == "failed" and "its supervisor was killed" in served.job("2")["why"]
    assert not marked(second)


def test_a_job_runs_where_modules_are_called_as_those_of_python(served: Served) -> None:
    """And with variables that would change the supervisor's own Python, from another user session."""
    served.begin("--devices", "1", "--no-page")
    for name in ("queue.py", "token.py", "vnode.py"):
        (served.folder / name).write_text("raise SystemExit('not this one')\n")
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "XDG_RUNTIME_DIR": str(served.folder / "other")}
    says = [sys.executable, "-m", "vnode", "submit", "--state", str(served.state), "--wait", "--rigid", "--"]
    command = [*says, "sh", "-c", "printf 'ö\\377\\n'; exit 7"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=served.folder.parent)
    assert (done.returncode, done.stdout) == (7, "1\n"), done.stderr
    job = Submission(
        command=["sh", "-c", "echo here"], rigid=True, directory=str(served.folder), env={**env, "PYTHONINSPECT": "1"}
    )
    request("submit", str(served.state), job=job.facts())
    until(lambda: served.job("2")["ended"], served.log)
    assert served.job("2")["state"] == "succeeded", served.job("2")["why"]
    output = served.folder / "cluster.db.jobs"
    assert (output / "1" / "out").read_text() == "ö\ufffd\n" and (output / "2" / "out").read_text() == "here\n"


def test_a_stopped_supervisor_can_be_cancelled_and_a_deleted_file_is_said(served: Served) -> None:
    served.begin("--devices", "1", "--no-page")
    request("submit", job=Submission(command=counting(10**6)).facts())
    until(lambda: served.job("1")["state"] == "running", served.log)
    found = job_registry.load(served.folder / "cluster.db.jobs" / "1" / "run-1" / "job")
    assert found is not None
    os.kill(found.facts["pid"], signal.SIGSTOP)
    until(lambda: "does not answer" in served.job("1")["why"], served.log)
    request("cancel", job="1", now=True)
    until(lambda: served.job("1")["state"] == "cancelled", served.log)
    assert not found.processes()
    served.state.rename(served.folder / "moved.db")
    with pytest.raises(ClusterError, match="was deleted, moved or replaced"):
        request("submit", str(served.state), job=Submission(command=["true"], rigid=True).facts())
    (served.folder / "moved.db").rename(served.state)
    request("submit", str(served.state), job=Submission(command=["true"], rigid=True).facts())
    until(lambda: served.job("2")["state"] == "succeeded", served.log)


def test_a_new_file_does_not_take_an_old_one_s_jobs(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    served.begin("--devices", "1", "--no-page")
    served.end()
    for path in served.folder.glob("cluster.db*"):
        if path.is_file():
            path.unlink()
    served.begin("--devices", "1", "--no-page")
    assert served.process is not None and served.process.returncode == 2
    assert "belongs to another scheduler's file" in served.log()


def test_how_a_job_ended_is_known_though_the_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes for it are there from the beginning."""
    entry = job_registry.Entry("job", None, tmp_path / "job")

    def full(*_: object) -> None:
        raise WorkerError("no space left on device")

    monkeypatch.setattr(job_registry.files, "write_text", full)
    entry.close(3, "why " * 5000, 7)
    found = job_registry.load(tmp_path / "job")
    assert found is not None and not found.runs
    assert (found.facts["code"], found.facts["step"], found.facts["why"][:7]) == (3, 7, "why why")
