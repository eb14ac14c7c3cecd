"""Turns jobs of this machine into folders (token, address, events, output), and a folder of checkpoints into its job.

Knows files and process numbers. Must not know what workers do.

    $XDG_RUNTIME_DIR/vnode/jobs/7f3a.../   job.json  token  events.jsonl  keeper.err  worker-0.out  worker-0.err
    runs/7/vnode.job                       names that folder, and is locked as long as the supervisor lives
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

from vnode import files
from vnode.errors import WorkerError
from vnode.stopped import Resident
from vnode.workers import RUN
from vnode.workers.actions import Record

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LINK = "vnode.job"
"""The file in a folder of checkpoints that names its job."""

END, ROOM = "end.json", 4096
"""The file of a job that has bytes on the disk from its beginning, for how it ended where the disk is full by then."""

KEPT = 20
"""Jobs that have ended whose events and output are kept."""

LEAVE_SECONDS = 60
"""Seconds of waiting for the workers of a killed supervisor."""

STOPPED_SECONDS = 1
"""Seconds that a worker may be stopped, as by SIGSTOP, before it counts as lost."""


def home() -> Path:
    """The folder of all jobs of this user on this machine; made if it is not there.

    Raises:
      WorkerError: somebody else could read or write it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    top = Path(runtime) / "vnode" if runtime else Path(tempfile.gettempdir()) / f"vnode-{user()}"
    return private(top, "jobs")


def user() -> int:
    """The number of this user."""
    return os.getuid() if hasattr(os, "getuid") else 0


def private(top: Path, name: str) -> Path:
    """A folder in another one, which this user alone can read; both are made if they are not there.

    Raises:
      WorkerError: somebody else could read or write them.
    """
    folder = top / name
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in (top, folder):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user() or found.st_mode & 0o077:
                raise PermissionError(f"{path} is not a folder that only this user can read")
    except OSError as error:
        raise WorkerError(
            f"the folder {folder} cannot be used.",
            facts=[str(error)],
            remedies=["set XDG_RUNTIME_DIR to a folder of your own, of mode 0700"],
        ) from error
    return folder


@functools.cache
def boot() -> str:
    """The name of this start of the kernel; empty where it tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def started(pid: int) -> str | None:
    """When a process was started, as the kernel tells; "" where it does not tell; None if there is no such process.

    The kernel counts from its own start, which is part of the answer: after another one, numbers come again.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{fields[19]} {boot()}"
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""


def marked(mark: str) -> list[int]:
    """The processes of this host that a worker, or a supervisor, has started, and those that they have started.

    They have the variable `RUN` from it, unless they have dropped it. Nothing is found where there is no ``/proc``.

    Args:
      mark: the folder of a job, for all of its processes; or that, a slash and the number of a worker.
    """
    wanted = f"{RUN}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            variables = path.read_bytes().split(b"\0")
            if any(each == wanted or each.startswith(wanted + b"/") for each in variables):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def write_privately(path: Path, text: str) -> None:
    """Writes a new file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


@dataclasses.dataclass(frozen=True)
class Found:
    """A job as its folder tells.

    Attributes:
      folder: of the job.
      facts: pid, started, address, checkpoint, script, since; code and why once it has ended.
    """

    folder: Path
    facts: dict[str, Any]

    @property
    def runs(self) -> bool:
        """Whether its supervisor is there."""
        pid, since = self.facts.get("pid"), self.facts.get("started")
        return "code" not in self.facts and isinstance(pid, int) and started(pid) == since is not None

    @property
    def name(self) -> str:
        """Its name for users: its folder of checkpoints, or else its own folder."""
        return self.facts.get("checkpoint") or str(self.folder)

    @property
    def token(self) -> str:
        """The secret of its control channel."""
        return (self.folder / "token").read_text(encoding="utf-8")

    def workers_alive(self) -> list[int]:
        """Process numbers of its live workers."""
        return [pid for pid, since in self.facts.get("children", []) if started(pid) == since is not None]

    def processes(self) -> list[int]:
        """Process numbers of its live workers, and of processes that they have started and left."""
        return sorted({*self.workers_alive(), *marked(str(self.folder))})

    def events(self) -> list[dict[str, Any]]:
        """Its events, in order."""
        try:
            lines = (self.folder / "events.jsonl").read_bytes().splitlines()
        except OSError:
            return []
        events = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):  # the last one, while it is written; or damaged
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    events.append({"worker": None, "step": None, "why": "", **event})
        return events


def load(folder: Path) -> Found | None:
    """Reads a job's folder; None if it is none."""
    try:
        facts = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            return None
        if "code" not in facts:
            with contextlib.suppress(OSError):
                facts.update(parsed((folder / END).read_bytes()))
        for pid, _ in facts.get("children", []):
            if not isinstance(pid, int):
                return None
    except (OSError, ValueError, TypeError, RecursionError):  # TypeError: children that are no pairs
        return None
    return Found(folder, facts)


def jobs() -> list[Found]:
    """The jobs of this user on this machine, the newest first; those that have ended included."""
    found = [job for path in home().iterdir() if (job := load(path)) is not None]
    return sorted(found, key=lambda job: str(job.facts.get("since")), reverse=True)


def find(target: str | os.PathLike[str]) -> Found:
    """The running job of a folder of checkpoints, a job's folder or a process number.

    Raises:
      WorkerError: there is none.
    """
    name = os.fspath(target)
    running = [job for job in jobs() if job.runs]
    whole = os.path.realpath(name)
    for job in running:
        if name == str(job.facts["pid"]) or whole in (os.path.realpath(job.name), os.path.realpath(job.folder)):
            return job
    facts = [f"process {job.facts['pid']}: {job.name}" for job in running] or ["there is none in another folder either"]
    raise WorkerError(
        f"no job is running in {name!r}.",
        facts=facts,
        remedies=["give the folder of checkpoints or the process number, as `vnode runs` lists them"],
    )


def real_path(folder: str) -> str:
    """A folder of checkpoints by the name that all processes use: without links, unless it is a URL.

    >>> real_path("gs://bucket/runs/7")
    'gs://bucket/runs/7'
    """
    return folder if "://" in folder else os.path.realpath(folder)


class Entry:
    """A job's own folder, as long as it runs.

    Args:
      script: what it runs, for those who look.
      checkpoint: its folder of checkpoints, if it has one.
      folder: the job's own, which is made; by default one among the jobs of this user.

    Raises:
      WorkerError: another supervisor has that folder, or it cannot be written.
    """

    def __init__(self, script: str, checkpoint: str | None, folder: Path | None = None) -> None:
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        own = folder is None  # it is deleted some time after the job
        self.folder = home() / f"{since[:19].replace(':', '')}-{uuid.uuid4().hex[:8]}" if folder is None else folder
        self.checkpoint = None if checkpoint is None else real_path(checkpoint)
        pid = os.getpid()
        self.facts: dict[str, Any] = {
            "pid": pid,
            "started": started(pid),
            "host": socket.gethostname(),
            "since": since,
            "script": script,
            "checkpoint": self.checkpoint,
        }
        self.lock: int | None = None
        if self.checkpoint is not None and "://" not in self.checkpoint:
            self.claim(Path(self.checkpoint))
        try:
            self.begin()
        except OSError as error:
            raise WorkerError(
                f"the job's folder {self.folder} cannot be written.",
                facts=[str(error)],
                remedies=["make room there", "or set XDG_RUNTIME_DIR to a folder with room"] if own else [],
            ) from error
        if own:
            clean()

    def begin(self) -> None:
        """Makes the folder, with room for the report of the job's end.

        Raises:
          OSError: it cannot be written.
        """
        self.folder.mkdir(mode=0o700)
        (self.folder / END).write_bytes(b" " * ROOM)
        self.token = secrets.token_hex(32)
        write_privately(self.folder / "token", self.token)
        self.log: TextIO = open(self.folder / "events.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.save()

    @property
    def token_file(self) -> Path:
        """Where workers read the token."""
        return self.folder / "token"

    def claim(self, checkpoint: Path) -> None:
        """Makes this supervisor the only one of a folder of checkpoints."""
        try:
            checkpoint.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(checkpoint / LINK, os.O_RDWR | os.O_CREAT, 0o644)
            if not take_lock(self.lock):
                raise running_error(checkpoint)  # without a cause: EAGAIN of a lock is no want of room
            wait_for_workers(parsed(os.read(self.lock, 1 << 16)), checkpoint)
            os.ftruncate(self.lock, 0)
            said = {**self.facts, "job": str(self.folder)}
            os.pwrite(self.lock, json.dumps(said).encode(), 0)
        except WorkerError:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise WorkerError(
                f"cannot write to the folder of checkpoints {checkpoint}.",
                facts=[files.failure_reason(error)],
                remedies=["give --checkpoint a folder that this process may write to"],
            ) from error

    def save(self, **facts: Any) -> None:
        """Writes down what the folder says of the job."""
        self.facts.update(facts)
        files.write_text(self.folder / "job.json", json.dumps(self.facts, indent=1), WorkerError)

    def event(self, record: Record) -> dict[str, Any]:
        """Writes an event down; returns it as it stands in the file."""
        said = {
            "time": round(time.time(), 3),
            "event": record.event,
            "worker": record.worker,
            "step": record.step,
            "why": record.why,
        }
        with contextlib.suppress(OSError):  # a full disk stops no training
            self.log.write(json.dumps(said) + "\n")
        return said

    def close(self, code: int, why: str, step: int | None) -> None:
        """The job has ended."""
        ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            self.save(code=code, why=why, step=step, ended=ended)
        except (OSError, WorkerError):  # a full disk: what is there may still be written over
            said = {"code": code, "why": why[: ROOM // 8], "step": step, "ended": ended}
            with contextlib.suppress(OSError), open(self.folder / END, "r+b") as file:
                file.write(json.dumps(said).encode()[:ROOM])
        with contextlib.suppress(OSError):
            self.log.close()
        with contextlib.suppress(OSError):
            self.token_file.unlink()
        self.release()

    def release(self) -> None:
        """Gives the folder of checkpoints back."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def take_lock(descriptor: int) -> bool:
    """Locks an open file until it is closed; False if another process has locked it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def parsed(text: bytes) -> dict[str, Any]:
    """The facts in a link file; empty if it is empty or something else."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def wait_for_workers(before: dict[str, Any], checkpoint: Path) -> None:
    """Waits for the workers of a supervisor that was killed: they may still save to the same folder.

    One that is stopped will not, and the others wait for it: it is killed, as its supervisor would have done.

    Raises:
      WorkerError: they do not end.
    """
    job = load(Path(before["job"])) if "job" in before else None
    end = time.monotonic() + LEAVE_SECONDS
    stopped: dict[int, float] = {}
    while job is not None and (left := job.workers_alive()):
        here = Resident.this_process()
        stopped = {pid: stopped.get(pid, time.monotonic()) for pid in left if here._replace(pid=pid).is_stopped()}
        for pid, since in stopped.items():
            if time.monotonic() - since > STOPPED_SECONDS:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise WorkerError(
                f"workers of an earlier job still write to {checkpoint}.",
                facts=[f"its supervisor {before['pid']} is gone; processes {' '.join(map(str, left))} are there"],
                remedies=[f"end them: kill -9 {' '.join(map(str, left))}", "or use another folder"],
            )
        time.sleep(0.1)


def running_error(checkpoint: Path) -> WorkerError:
    """The error of a folder that another supervisor holds."""
    try:
        facts = json.loads((checkpoint / LINK).read_text(encoding="utf-8"))
        pid, host, since = facts["pid"], facts["host"], facts["since"]
    except (OSError, ValueError, KeyError):
        pid, host, since = "?", "?", "?"
    return WorkerError(
        f"a supervisor already runs a job in {checkpoint}.",
        facts=[f"process {pid} on {host} since {since}"],
        remedies=[
            f"ask it for other workers: vnode workers {checkpoint} N",
            f"end it with a checkpoint: kill {pid}",
            "or use another folder",
        ],
    )


def clean() -> None:
    """Deletes the folders of jobs that ended longest ago."""
    for job in [job for job in jobs() if not job.runs and not job.workers_alive()][KEPT:]:
        shutil.rmtree(job.folder, ignore_errors=True)
