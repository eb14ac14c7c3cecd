"""The file of a scheduler: what is in it stays, and who may have it.

Knows `State`, and SQLite. Must not know what records mean.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vnode.cluster.live.event_log import Record
from vnode.cluster.live.event_store import State, check_file_system, file_system_of, read_records
from vnode.cluster.live.submission import Submission
from vnode.errors import ClusterError

FACTS = {"devices": ["0"], "policy": "ä\n", "options": {}}
RECORDS = [Record(0.1 + 0.2, "began", None, FACTS), Record(2.0, "began", None, FACTS)]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    state = State(path)
    state.append(RECORDS[:1], [("1", "a", "pending", 1.0, 0, 0.5, None, None)])
    state.append(RECORDS[1:])
    assert read_records(path) == RECORDS  # while a scheduler has it
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    state.close()
    again = State(path)
    assert again.records() == RECORDS
    with pytest.raises(sqlite3.IntegrityError, match="events stay"):
        again.database.execute("UPDATE events SET kind = 'x'")
    with pytest.raises(sqlite3.IntegrityError, match="events stay"):
        again.database.execute("DELETE FROM events")
    assert again.database.execute("PRAGMA synchronous").fetchone() == (2,)
    again.close()


def test_one_scheduler_has_a_file_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    code = "import sys, time; from pathlib import Path; from vnode.cluster.live.event_store import State\n"
    code += "state = State(Path(sys.argv[1])); print('has it', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "has it\n"
    with pytest.raises(ClusterError, match=rf"another scheduler uses(.|\n)*process {other.pid}"):
        State(path)
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdout.close()
    State(path).close()


def damage_version(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()


def damage_program(path: Path) -> None:
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE mine (x)")
    database.commit()
    database.close()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_version, "version 99"),
        (damage_program, "another program"),
        (lambda path: path.write_bytes(b"no database at all, and longer than a header" * 99), "not a database"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"CREATE TABLE jobs", b"CRE\xffTE TABLE jobs")),
            "utf-8",
        ),
        (lambda path: os.truncate(path, 5000), "malformed|no such table|another program|events"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, damage, why: str) -> None:
    path = tmp_path / "cluster.db"
    State(path).close()
    damage(path)
    for opened in (State, lambda path: read_records(path)):
        with pytest.raises(ClusterError, match=why):
            opened(path)


JOB = Submission(command=["true"], env={}, directory="/").facts()


@pytest.mark.parametrize(
    ("kind", "job", "facts", "why"),
    [
        ("dance", "1", "{}", "its kind is 'dance'"),
        ("began", None, '{"devices": 3, "policy": "x", "options": {}}', "began: devices is 3"),
        ("began", None, '{"policy": "x", "options": {}}', "began: devices is missing"),
        ("began", None, "7", "its facts are 7"),
        ("began", None, "{", "Expecting"),
        ("submitted", "2", "{}", "a job cannot be read: KeyError"),
        ("submitted", "1", json.dumps(JOB), "its job is '1'"),
        ("submitted", "2", json.dumps({**JOB, "env": [1]}), "env is"),
        ("submitted", "2", json.dumps({**JOB, "command": [None]}), "command is"),
        ("priority", "1", '{"priority": null}', "priority: priority is None"),
        ("cancel", "3", "{}", "no job '3' was submitted"),
        ("cancel", None, "{}", "its job is None"),
        ("decided", None, '{"shares": {"7": 1}, "why": {}, "again": null}', "no job '7'"),
        ("measured", "1", '{"step": 1, "seconds": {"a": 1}}', "seconds is"),
        ("ended", "1", '{"state": "gone", "code": 0, "step": 0, "why": ""}', "state is 'gone'"),
    ],
)
def test_a_damaged_event_is_named_by_its_number(tmp_path: Path, kind: str, job: str, facts: str, why: str) -> None:
    path = tmp_path / "cluster.db"
    state = State(path)
    state.append([Record(0.0, "submitted", "1", JOB)])
    state.database.execute("INSERT INTO events (time, kind, job, facts) VALUES (1.0, ?, ?, ?)", (kind, job, facts))
    for opened in (state.records, lambda: read_records(path)):
        with pytest.raises(ClusterError, match=rf"not a scheduler's file.\n  event 2 is damaged: (.|\n)*{why}"):
            opened()
    state.close()


def test_a_folder_that_is_not_there_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file or directory"):
        State(tmp_path / "none" / "cluster.db")
    with pytest.raises(ClusterError, match="no file"):
        read_records(tmp_path / "none.db")


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 22 0:50 / /home rw,relatime shared:1 - nfs4 server:/home rw\n"
        "31 30 0:51 / /home/local\\040disk rw - xfs /dev/vdb rw\n"
    )
    cases = {"/": "ext4", "/home/me": "nfs4", "/homes": "ext4", "/home/local disk/x": "xfs"}
    assert {folder: file_system_of(Path(folder), str(mounts)) for folder in cases} == cases
    monkeypatch.setattr("vnode.cluster.live.event_store.file_system_of", lambda folder: "nfs4")
    with pytest.raises(ClusterError, match=r"network file system \(nfs4\)"):
        check_file_system(tmp_path)


def test_a_full_disk_writes_nothing_and_says_so(tmp_path: Path) -> None:
    state = State(tmp_path / "cluster.db")
    state.append(RECORDS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
        with pytest.raises(ClusterError, match=r"cannot be written(.|\n)*make room"):
            state.append([Record(3.0, "submitted", "2", {"text": "x" * (1 << 17)})])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert state.records() == RECORDS
    state.append(RECORDS)
    assert state.records() == RECORDS * 2
    state.close()
