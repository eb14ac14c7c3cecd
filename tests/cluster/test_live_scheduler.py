"""A scheduler in this process, turn by turn; its supervisors are written down, and never started.

Knows `Scheduler`. Must not start processes.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import queue
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_live import home  # noqa: F401
from vnode import cli
from vnode.cluster.live import scheduler as module
from vnode.cluster.live.event_store import read_records
from vnode.cluster.live.job_book import Book, LiveJob
from vnode.cluster.live.job_outcome import outcome
from vnode.cluster.live.scheduler import Scheduler, Setup
from vnode.cluster.live.socket_server import request
from vnode.cluster.live.submission import Submission
from vnode.cluster.live.supervised_job import Report, Supervised
from vnode.errors import ClusterError, WorkerError
from vnode.files import is_no_room
from vnode.workers import detached, job_registry, start_job


class Absent:
    """A supervisor of which nothing is heard unless a test says it."""

    def __init__(self, job: str, attempt: int, folder: Path, report, *_: object) -> None:
        self.job, self.attempt, self.folder, self.report, self.serial = job, attempt, folder, report, 0

    def want(self, *_: object) -> None: ...

    def stop(self, why: str) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Turned:
    """A scheduler with one device, of which a test makes each turn."""

    def __init__(self, state: Path, devices: int = 1) -> None:
        self.said: list[str] = []
        self.scheduler = Scheduler(state, Setup(devices=list(map(str, range(devices)))), self.said.append)

    def submit(self, **options) -> str:
        facts = Submission(**{"command": ["true"], "rigid": True, "env": {}, "directory": "/", **options}).facts()
        return self.scheduler.submit({"job": json.loads(json.dumps(facts))})

    def turn(self) -> None:
        self.scheduler.queue.put(("nothing", lambda: None))  # nothing is waited for
        self.scheduler.turn()


@pytest.fixture
def state(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    monkeypatch.setattr(module, "Supervised", Absent)
    monkeypatch.setattr(module, "start", lambda *_: None)
    return home / "cluster.db"


@pytest.fixture
def turned(state: Path) -> Iterator[Turned]:
    found = Turned(state)
    yield found
    found.scheduler.close()


def test_bytes_that_are_no_utf_8_reach_the_job_and_its_name_can_be_shown(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, folders and variables of Linux are bytes, and Python has surrogates for those that are no UTF-8."""
    started: list[tuple] = []
    monkeypatch.setattr(module, "start", lambda *given: started.append(given))
    raw = os.fsdecode(b"caf\xe9")
    folder = state.parent / raw
    folder.mkdir()
    turned = Turned(state)
    turned.submit(name=raw, command=["sh", raw], env={"X": raw}, directory=str(folder))
    for _ in range(2):
        turned.turn()
    (_, spec, directory, env, _) = started[0]
    assert (spec["command"], directory, env) == (["sh", raw], str(folder), {"X": raw})
    assert spec["name"] == "caf?" and "job 1 (caf?): starts on 1: job 1 (caf?) with priority 1 arrived" in turned.said
    assert not turned.scheduler.changed, "the table of jobs is written"
    assert turned.scheduler.status({"job": raw})["name"] == "caf?", "it is found by the name that its user gave it"
    turned.scheduler.close()
    again = Turned(state)
    assert again.scheduler.book.jobs["1"].submission.command == ["sh", raw]
    again.scheduler.close()
    assert Book(read_records(state)).jobs["1"].state == "running"


def test_a_full_disk_as_a_job_ends_is_said_once_and_the_scheduler_can_be_ended(
    turned: Turned, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = turned.scheduler
    turned.submit()
    turned.turn()
    turned.turn()
    supervised = scheduler.supervised["1"]

    def append(records, rows=()) -> None:
        raise ClusterError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(scheduler.state, "append", append)
        full.setattr(module, "AGAIN", 0.0)  # it is tried in each turn
        supervised.report(Report("1", 1, "gone", facts={"pid": 1, "code": 0, "events": []}))
        for _ in range(5):
            supervised.report(Report("1", 1, "status", facts={}))  # in between, another report succeeds
            supervised.report(Report("1", 1, "begun", facts={"pid": 1, "started": None}))  # and another one fails
            turned.turn()
        assert [line for line in turned.said if "full" in line] == ["vnode: the disk is full"]
        scheduler.stop()
        scheduler.run()
    assert scheduler.book.jobs["1"].state == "running"
    turned.turn()
    assert scheduler.book.jobs["1"].state == "succeeded" and not scheduler.ends


def test_a_folder_that_is_gone_is_named_though_its_name_is_no_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO()))
    gone = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    facts = {"spec": {"command": ["true"], "devices": ["0"]}, "directory": gone, "env": {}}
    (tmp_path / detached.SPEC).write_text(json.dumps(facts))
    assert detached.main(tmp_path) == 2
    assert "cannot run in" in (tmp_path / detached.REFUSED).read_text(encoding="utf-8")


def test_a_folder_of_checkpoints_that_another_job_has_is_no_want_of_room(tmp_path: Path) -> None:
    """Else the second of two jobs with one folder is begun again for ever."""
    checkpoint = tmp_path / "checkpoint"
    first = job_registry.Entry("first", str(checkpoint), tmp_path / "first")
    with pytest.raises(WorkerError, match="a supervisor already runs a job in") as caught:
        job_registry.Entry("second", str(checkpoint), tmp_path / "second")
    assert not is_no_room(caught.value)
    first.close(0, "", None)
    job_registry.Entry("third", str(checkpoint), tmp_path / "third").close(0, "", None)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("events.jsonl", b'\xff\n[1]\n{"event": 3}\n{"event": "finished", "why": ""}\n', 0),
        ("job.json", b'{"children": [3]}', None),
        ("job.json", b"[" * 100_000, None),
        ("end.json", b"[1]", None),
        ("../refused.txt", b"no room in caf\xe9", None),
        ("worker-final.err", b"", 3),
    ],
)
def test_a_job_that_damages_its_files_is_gone_all_the_same(
    tmp_path: Path, name: str, content: bytes, code: int | None
) -> None:
    own = tmp_path / "1" / "run-1" / "job"
    own.mkdir(parents=True)
    (own / "job.json").write_text(json.dumps({"pid": 1, "children": []} | ({} if code is None else {"code": code})))
    (own / name).write_bytes(content)
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    supervised = Supervised("1", 1, own.parent, reports.put, rigid=True)
    report = reports.get(timeout=30)
    supervised.close()
    assert report.kind == "gone" and report.facts.get("code") == code
    if name == "events.jsonl":
        assert [event["why"] for event in report.facts["events"]] == [""]
    job = LiveJob("1", 0, Submission(command=["true"], rigid=True), 0.0, 1.0, 1)
    assert outcome(job, report.facts, own, 1.0).facts.get("state") != "running"


def test_an_end_whose_records_mean_nothing_frees_the_device(turned: Turned) -> None:
    turned.submit()
    turned.turn()
    turned.turn()
    turned.scheduler.supervised["1"].report(Report("1", 1, "gone", facts={"step": "three", "code": 0}))
    turned.turn()
    job = turned.scheduler.book.jobs["1"]
    assert job.state == "failed" and "cannot be read: TypeError" in job.why and not job.devices


def copied(turned: Turned, there: Path, *, known: int) -> Path:
    """A copy of a scheduler's file whose job 1 has a supervisor."""
    turned.submit()
    turned.turn()
    turned.turn()
    facts = {"pid": known, "started": job_registry.started(os.getpid())}
    turned.scheduler.supervised["1"].report(Report("1", 1, "begun", facts=facts))
    turned.turn()
    there.mkdir()
    for path in there.parent.glob("cluster.db*"):
        if path.is_file() and path.suffix != ".lock":
            shutil.copy(path, there)
    return there / "cluster.db"


def test_a_copy_is_refused_while_a_job_of_the_original_runs(turned: Turned, tmp_path: Path) -> None:
    copy = copied(turned, tmp_path / "copy", known=os.getpid())
    before = Book(read_records(copy)).schedulers
    running = tmp_path / "cluster.db.jobs" / "1" / "run-1"
    with pytest.raises(ClusterError, match=rf"is a copy: job 1 \(true\) still runs at {running}"):
        Turned(copy)
    assert Book(read_records(copy)).schedulers == before, "nothing is written into it"


def test_a_copy_goes_on_once_nothing_runs_and_a_moved_file_while_it_runs(turned: Turned, tmp_path: Path) -> None:
    copy = copied(turned, tmp_path / "copy", known=2**22 + 1)  # no process has this number
    running = tmp_path / "cluster.db.jobs" / "1" / "run-1"
    running.mkdir(parents=True)
    with open(running / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the supervisor is there before it is known
        with pytest.raises(ClusterError, match="is a copy"):
            Turned(copy)
        moved = copy.parent / "cluster.db.jobs" / "1"
        moved.mkdir()
        running.rename(moved / "run-1")
        Turned(copy).scheduler.close()
        shutil.rmtree(moved)
    Turned(copy).scheduler.close()


def test_a_job_for_which_there_are_too_few_devices_says_so(state: Path) -> None:
    before = Turned(state, 4)
    before.submit(workers=4)
    before.scheduler.close()
    after = Turned(state, 2)
    after.turn()
    assert after.scheduler.status({"job": "1"})["why"] == "it needs 4 devices, and there are 2"
    after.scheduler.close()


def test_a_deleted_folder_of_jobs_is_made_again_with_its_owner(state: Path) -> None:
    turned = Turned(state)
    shutil.rmtree(turned.scheduler.state.jobs)
    turned.submit()
    turned.turn()
    turned.turn()
    (turned.scheduler.state.jobs / "1").mkdir()
    turned.scheduler.close()
    Turned(state).scheduler.close()


def test_a_rigid_job_that_is_cancelled_does_not_start_again(turned: Turned) -> None:
    turned.submit()
    turned.turn()
    turned.turn()
    turned.said.clear()
    turned.scheduler.cancel({"job": "1"})
    turned.turn()
    assert not turned.said
    assert turned.scheduler.book.jobs["1"].devices == ["0"]


def test_another_priority_that_cannot_be_is_named(turned: Turned) -> None:
    turned.submit()
    with pytest.raises(ClusterError, match=r"a job cannot have the priority 0.0(.|\n)*a number above 0"):
        turned.scheduler.change_priority({"job": "1", "priority": 0.0})


def test_what_places_workers_is_there_before_a_scheduler_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_job.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ClusterError, match="backend 'ray' needs Ray"):
        Setup(devices=["0"], backend="ray")
    with pytest.raises(ClusterError, match="does not know resources"):
        Setup(devices=["0"], resources={"GPU": 1})


def test_a_request_that_is_too_large_is_not_sent(turned: Turned) -> None:
    with pytest.raises(ClusterError, match=r"cannot be sent to the scheduler(.|\n)*20,000,\d* bytes, more than"):
        request("submit", str(turned.scheduler.state.path), job={"env": {"A": "x" * 20_000_000}})


def test_a_loss_that_is_no_number_is_json_all_the_same(turned: Turned, capsys: pytest.CaptureFixture[str]) -> None:
    turned.submit()
    path = turned.scheduler.state.path
    shown = turned.scheduler.status({"job": "1"}) | {"metrics": {"loss": float("nan")}}
    for name, given in (("read_cluster", ({"jobs": [shown]}, True)), ("look_at", shown)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"vnode.cluster.live.command_queue.{name}", lambda *_, given=given: given)
            more = ["1"] if name == "look_at" else []
            assert cli.main(["status" if more else "queue", "--json", "--state", str(path), *more]) == 0
        assert "NaN" not in capsys.readouterr().out
