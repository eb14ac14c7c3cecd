"""Turns a scheduler's wishes for one job into requests to its supervisor, and the answers into reports.

Knows supervisors, and how they are found. Must not know other jobs, nor why something is wanted.

    start(folder, spec)  ->  a process that outlives this one; folder/lock is held as long as it lives
    Supervised(folder)   ->  a thread that speaks with it, whoever has started it
    want(3, devices)     ->  "resize", and a report that says which devices the job still has
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vnode import files
from vnode.errors import ClusterError
from vnode.stopped import Resident
from vnode.workers import RUN, job_registry
from vnode.workers.detached import LATER, OWN, REFUSED, SPEC
from vnode.workers.supervisor import search_path
from vnode.workers.wire import Channel, WireError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOOK = 0.2
"""Seconds between two questions."""

ANSWER = 10
"""Seconds that an answer may take."""

LEAVE = 60
"""Seconds that workers of a supervisor that was killed have to save and end."""

LOCK = "lock"


@dataclasses.dataclass(frozen=True)
class Report:
    """News of a job's supervisor.

    Attributes:
      job: whose.
      attempt: the number of the supervisor.
      kind: "begun" (it is there), "status" (what it says), "refused" (it does not do what is wanted), "silent" (it does
        not answer), or "gone" (neither it nor a worker is there any more).
      serial: of the last wish that was told before.
      facts: of a status, what it says; of the end, what it left (`code`, `why`, `step`, `events`), if it left that.
    """

    job: str
    attempt: int
    kind: str
    serial: int = 0
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def start(folder: Path, spec: Mapping[str, Any], directory: str, env: Mapping[str, str], output: Path) -> Any:
    """Starts the supervisor of a job.

    Args:
      folder: of this attempt; made if it is not there.
      spec: fields of `vnode.workers.start_job.Spec`.
      directory: in which workers run.
      env: variables of the job.
      output: the folder whose files ``out`` and ``err`` take the job's output.

    Returns:
      Its process, which this one must wait for as long as it lives.

    Raises:
      ClusterError: it cannot be written down.
      OSError: the system starts no process.
    """
    for each in (output.parent, output, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    facts = {"spec": spec, "env": dict(env), "directory": directory}
    files.write_text(folder / SPEC, json.dumps(facts), ClusterError)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert fcntl is not None
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child has it, too: it is free when all have ended
        with open(output / "out", "ab") as out, open(output / "err", "ab") as err:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "vnode.workers.detached", str(folder)],
                env={**os.environ, "PYTHONPATH": search_path(), RUN: str(folder / OWN)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(lock,),
                start_new_session=True,
            )
    finally:
        os.close(lock)


def is_there(folder: Path) -> bool:
    """Whether the supervisor of an attempt is there, as the kernel says."""
    try:
        return files.is_locked(folder / LOCK)
    except FileNotFoundError:
        return False


def runs_elsewhere(folder: Path, own: Path, known: tuple[int, str | None] | None) -> bool:
    """Whether an attempt that was started in one folder still runs, and is not that of another folder.

    A folder that was moved has the supervisor's lock, which is held; a copy of it has another one, which is free.

    Args:
      folder: where it was started.
      own: where it is looked for.
      known: process number of the supervisor, and when it was started, if a scheduler has seen it.
    """
    if folder == own or is_there(own):
        return False
    alive = known is not None and job_registry.started(known[0]) == known[1] is not None
    return alive or is_there(folder) or bool(job_registry.marked(str(folder / OWN)))


class Supervised:
    """Speaks with the supervisor of one attempt, in a thread of its own, until that is gone.

    Args:
      job: its id.
      attempt: the number of the supervisor.
      folder: of the attempt.
      report: called with each report, in that thread.
      process: of the supervisor, if this process has started it.
      rigid: whether its process is ended at once when its supervisor is gone: it does not notice that itself.
      serial: of the first wish; later schedulers begin with larger ones.
      known: process number of the supervisor, and when it was started, if an earlier scheduler has seen it.
    """

    def __init__(
        self,
        job: str,
        attempt: int,
        folder: Path,
        report: Callable[[Report], None],
        process: subprocess.Popen[bytes] | None = None,
        rigid: bool = False,
        known: tuple[int, str | None] | None = None,
        serial: int = 0,
    ) -> None:
        self.job, self.attempt, self.folder, self.report, self.process = job, attempt, folder, report, process
        self.rigid, self.known = rigid, known
        self.serial = self.told = serial
        self.workers, self.devices = 0, ()
        self.asks: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.closed = self.stopped = False
        self.thread = threading.Thread(target=self.follow, name=f"vnode job {job}", daemon=True)
        self.thread.start()

    # From the scheduler

    def want(self, workers: int, devices: Sequence[str]) -> int:
        """Says how many workers the job shall have, and which devices are its own.

        Returns:
          The serial number of this wish.
        """
        with self.changed:
            if (workers, tuple(devices)) != (self.workers, self.devices):
                self.serial += 1
                self.workers, self.devices = workers, tuple(devices)
                wish = {"kind": "resize", "workers": workers, "devices": list(devices), "serial": self.serial}
                self.asks = [ask for ask in self.asks if ask["kind"] != "resize"] + [wish]
                self.changed.notify()
            return self.serial

    def stop(self, why: str) -> None:
        """Asks the run to end with a checkpoint."""
        if not self.stopped:
            self.stopped = True
            self.request({"kind": "stop", "why": why, "once": True})

    def kill(self) -> None:
        """Has all workers ended at once."""
        self.request({"kind": "kill"})

    def request(self, request: dict[str, Any]) -> None:
        """Makes a request; the same request again does nothing."""
        with self.changed:
            if request not in self.asks:
                self.asks.append(request)
                self.changed.notify()

    def kill_supervisor(self) -> None:
        """Ends the supervisor itself, which does not answer; its workers are ended then, too."""
        if self.known is not None and job_registry.started(self.known[0]) == self.known[1] is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.known[0], signal.SIGKILL)

    def close(self) -> None:
        """Speaks no more. The supervisor goes on."""
        with self.changed:
            self.closed = True
            self.changed.notify()

    # The thread

    def follow(self) -> None:
        """Speaks with the supervisor until it is gone, whatever this process lacks or its files hold meanwhile."""
        while not self.closed:
            try:
                self.follow_closely()
                return
            except Exception:  # no descriptors, or a file that the job has damaged: its end is heard of all the same
                self.report(Report(self.job, self.attempt, "silent"))
                time.sleep(1)

    def follow_closely(self) -> None:
        """Speaks with the supervisor until it is gone.

        Raises:
          OSError: the system has no room.
        """
        while not self.closed:
            there = self.is_there()  # before the files: after the end nothing is added
            found = self.found()
            if not there:
                self.bury(found)
                return
            if found is None and self.known is not None:  # its folder was deleted: it cannot be asked
                self.report(Report(self.job, self.attempt, "silent"))
                time.sleep(1)
                continue
            if found is None or "address" not in found.facts or "code" in found.facts:
                time.sleep(LOOK / 4)  # it begins, or ends
                continue
            with contextlib.suppress(FileNotFoundError):  # its token: it ends
                self.speak(found)

    def found(self) -> job_registry.Found | None:
        """The facts that the supervisor has written down; None if it has not begun, or that was deleted.

        Raises:
          OSError: it cannot be read just now: nobody is to take the job for one that has not begun.
        """
        own = self.folder / OWN
        for name in ("job.json", "events.jsonl"):
            with contextlib.suppress(FileNotFoundError), open(own / name, "rb"):
                pass
        return job_registry.load(own)

    def is_there(self) -> bool:
        """Whether the supervisor is there, as the kernel says."""
        if self.known is not None and job_registry.started(self.known[0]) == self.known[1] is not None:
            return True
        return is_there(self.folder)

    def speak(self, found: job_registry.Found) -> None:
        """Asks it what is wanted, and how it is, until it does not answer."""
        try:
            channel = Channel.connect(found.facts["address"], ANSWER)
        except OSError:
            time.sleep(LOOK)
            return
        request: dict[str, Any] | None = None
        try:
            channel.send({"kind": "control", "token": found.token})
            if self.known is None:
                self.known = found.facts["pid"], found.facts["started"]
                self.report(Report(self.job, self.attempt, "begun", facts=found.facts))
            while not self.closed:
                with self.changed:
                    if not self.asks:
                        self.changed.wait(LOOK)
                    request = self.asks.pop(0) if self.asks else None
                channel.send(request or {"kind": "status"})
                answer = channel.receive(ANSWER)
                self.told = (request or {}).get("serial", self.told)
                request = None
                kind = "refused" if answer["kind"] == "error" else "status"
                self.report(Report(self.job, self.attempt, kind, self.told, answer))
        except (OSError, WireError):
            if request is not None:
                with self.changed:  # unless something newer of its kind is wanted
                    if all(ask["kind"] != request["kind"] for ask in self.asks):
                        self.asks.insert(0, request)
            if self.is_there():
                self.report(Report(self.job, self.attempt, "silent"))
        finally:
            channel.close()

    def processes(self, found: job_registry.Found | None) -> list[int]:
        """Processes that are left of its workers."""
        return job_registry.marked(str(self.folder / OWN)) if found is None else found.processes()

    def bury(self, found: job_registry.Found | None) -> None:
        """Waits until its workers are gone, too, and reports what is left."""
        if self.process is not None:
            self.process.wait()
        at_once = self.rigid or (found is not None and "code" in found.facts)
        end = time.monotonic() + (0 if at_once else LEAVE)
        while not self.closed and (alive := self.processes(found)):
            here = Resident.this_process()
            for pid in alive:
                if time.monotonic() >= end or here._replace(pid=pid).is_stopped():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK / 4)
        if self.closed:
            return
        # Whether it began is not known of one that another scheduler started; want of room is no fault of the job.
        blameless = self.process is None or self.process.returncode == LATER
        facts: dict[str, Any] = {"blameless": blameless}
        if found is not None:
            facts |= {**found.facts, "events": found.events()}  # neither raises, whatever the files hold
            code = None if self.process is None else self.process.returncode
            if code == 0 or (self.rigid and code is not None and code >= 0 and not blameless):
                facts = {"code": code, "why": "", **facts}  # a full disk may not have taken it
        with contextlib.suppress(OSError):
            facts["refused"] = (self.folder / REFUSED).read_bytes().decode(errors="replace")
        self.report(Report(self.job, self.attempt, "gone", facts=facts))
