"""Runs a cluster: takes jobs in, asks the policy who has how many devices, and tells the jobs' supervisors.

Knows the book, the file it is kept in, supervisors. Must not know how a policy decides, nor how a job resizes.

Every event is recorded before it has an effect: a scheduler may be killed at any moment, and the next one goes on.
A device is free when the supervisor of its job says that no process uses it, or when that and all workers are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vnode.cluster.live.admission import check_runs
from vnode.cluster.live.event_forms import check_form
from vnode.cluster.live.event_log import Record
from vnode.cluster.live.event_store import State
from vnode.cluster.live.job_book import Book, LiveJob, rows
from vnode.cluster.live.job_outcome import KILLED, outcome
from vnode.cluster.live.policy_shares import decide, policy_of, reasons
from vnode.cluster.live.socket_server import Door, Reply
from vnode.cluster.live.status_data import job_data, job_in, snapshot
from vnode.cluster.live.step_times import Pace
from vnode.cluster.live.submission import Submission, check_priority
from vnode.cluster.live.supervised_job import Report, Supervised, runs_elsewhere, start
from vnode.cluster.simulator import Policy
from vnode.errors import ClusterError, WorkerError
from vnode.files import is_no_room
from vnode.workers.detached import OWN
from vnode.workers.start_job import Spec

TICK = 0.1
"""Seconds between two looks at what is to be done."""

LOOK = 0.4
"""Seconds between two snapshots for the page, and how many jobs that have ended are in them."""

RECENT = 100
PART = 1000
"""Jobs in one answer."""

AGAIN = 5.0
"""Seconds after which something that failed for want of room on a disk is tried again."""

SILENCE = 120.0
"""Seconds after which a supervisor that does not answer is killed: another one goes on, from the checkpoint."""

WISHES = 10**9
"""The numbers of a scheduler's wishes begin at so many times the number of the scheduler."""

PATIENCE = 30.0
"""Seconds that a job which was cancelled has to save and end, before it is killed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a scheduler.

    Attributes:
      devices: names of the devices.
      policy: the name of the policy, or a function.
      options: `factor` and `inner` of a guarantee; `counts`: numbers of devices that a job may have.
      backend: what places workers: "processes" or "ray".
      resources: of Ray that each worker needs.
      restart: whether jobs replace all workers at each change, unless they say otherwise.
      env: variables of all workers; ``{device}`` in a value is the worker's device.
    """

    devices: Sequence[str]
    policy: str | Policy = "goodput"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    backend: str = "processes"
    resources: Mapping[str, float] | None = None
    restart: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ClusterError(f"a cluster needs one device or more, each with its own name, not {self.devices}")
        allowed = self.options.get("counts")
        if allowed and min(allowed) > len(self.devices):
            raise ClusterError(f"no job could begin: there are {len(self.devices)} devices, and counts are {allowed}")
        try:  # what no job could be started with is refused now
            Spec(command=("python",), name="", workers=1, backend=self.backend, resources=self.resources).check()
        except WorkerError as error:
            raise ClusterError(str(error)) from error

    @property
    def policy_name(self) -> str:
        """The name of the policy."""
        return self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", "policy")


class Scheduler:
    """One scheduler, which has a state file.

    Args:
      state: the file; made if it is not there.
      setup: how it does it.
      say: called with each line for people.

    Attributes:
      book: the jobs.
      shown: the last snapshot, for the page.

    Raises:
      ClusterError: another scheduler has the file, or it cannot be used; or the policy is not known.
    """

    def __init__(self, state: Path, setup: Setup, say: Callable[[str], None] | None = None) -> None:
        self.setup, self.say = setup, say or say_on_stderr
        self.policy()  # or it is not known
        self.state = State(state)
        try:
            self.book = Book(self.state.records())
            self.check_devices()
            self.check_original()
            self.queue: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
            self.ends: dict[str, Report] = {}  # of jobs, which could not be written down
            self.supervised: dict[str, Supervised] = {}
            self.paces: dict[str, Pace] = {}
            self.said: dict[str, Mapping[str, Any]] = {}
            self.causes: list[str] = []
            self.again: float | None = None
            self.dirty, self.ended = True, False
            self.cancelled: dict[str, float] = {}
            self.silent: dict[str, float] = {}  # supervisors that do not answer, since when
            self.troubles: dict[str, tuple[str, float]] = {}
            self.changed: dict[str, LiveJob] = {}
            self.state.renew(rows(self.book.jobs.values()))
            facts = {"devices": list(setup.devices), "policy": setup.policy_name, "options": dict(setup.options)}
            self.record(Record(self.now(), "began", None, facts))
            if self.book.active():
                self.causes.append(f"a scheduler began, with {len(setup.devices)} devices")
            self.door = Door(self.state.path, self.take_request)
            self.state.write_holder(pid=os.getpid(), socket=str(self.door.path))
        except BaseException:
            self.state.close()
            raise
        for job in self.book.active():
            if job.alive:
                self.supervise(job)
        self.looked, self.shown = 0.0, self.snapshot(RECENT)

    def check_devices(self) -> None:
        """Looks whether the devices that jobs have are still there.

        Raises:
          ClusterError: some are not.
        """
        for job in self.book.active():
            if gone := [name for name in job.devices if name not in self.setup.devices]:
                raise ClusterError(
                    f"{job.called} still uses device {gone[0]}, which this scheduler was not given.",
                    facts=[f"devices before: {', '.join(self.book.devices)}"],
                    remedies=["start the scheduler with its earlier devices, and cancel the job or wait for it"],
                )

    def check_original(self) -> None:
        """Looks whether a job of this file runs in a folder of another one: then this file is a copy.

        The supervisor answers to the scheduler of the other file, and uses devices that this one would give away.

        Raises:
          ClusterError: one does.
        """
        for job in self.book.active():
            if (
                job.alive
                and job.folder is not None
                and runs_elsewhere(Path(job.folder), self.attempt(job), job.supervisor)
            ):
                raise ClusterError(
                    f"{self.state.path} is a copy: {job.called} still runs at {job.folder}.",
                    facts=["it belongs to the scheduler of the file that was copied"],
                    remedies=["start the scheduler with that file", "or cancel its jobs there, and copy it again"],
                )

    def policy(self) -> Policy:
        """The policy, for one decision.

        Raises:
          ClusterError: there is none of its name.
        """
        chosen = self.setup.policy
        return policy_of(chosen, self.setup.options) if isinstance(chosen, str) else chosen

    def now(self) -> float:
        """The time, which does not go back."""
        return max(time.time(), self.book.last)

    # The loop

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Runs until it is closed, or until a condition holds.

        Args:
          until: asked after each turn.
        """
        while not self.ended and not until():
            self.turn()

    def turn(self) -> None:
        """Handles all new events."""
        for what, event in self.news():
            with self.logging_failures(what):
                event()
        for report in list(self.ends.values()):
            if self.may_try(named(report)):
                with self.logging_failures(named(report)):
                    self.hear(report)
        if (self.dirty or (self.again is not None and self.now() >= self.again)) and self.may_try("decide"):
            with self.logging_failures("decide"):
                self.decide()
        for job in sorted(self.book.active(), key=lambda job: (-job.priority, job.number)):
            if self.may_try(job.id):
                with self.logging_failures(job.id):
                    self.carry_out(job)
        if self.changed:
            with contextlib.suppress(ClusterError):  # the table is made anew when a scheduler begins
                self.state.append([], rows(self.changed.values()))
                self.changed = {}
        if time.monotonic() - self.looked >= LOOK:
            self.looked = time.monotonic()
            with self.logging_failures("snapshot"):
                self.shown = self.snapshot(RECENT)

    def news(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The events that are there, after a short wait for the first; those that they cause are of the next turn."""
        with contextlib.suppress(queue.Empty):
            yield self.queue.get(timeout=TICK)
            for _ in range(self.queue.qsize()):
                yield self.queue.get_nowait()

    def may_try(self, what: str) -> bool:
        """Whether something has not failed just before."""
        return time.monotonic() >= self.troubles.get(what, ("", 0.0))[1]

    @contextlib.contextmanager
    def logging_failures(self, what: str) -> Any:
        """Logs why an action failed, as on a full disk; it is tried again some time later.

        Args:
          what: the id of a job, or a name of the action: a failure is said once until that action succeeds.
        """
        try:
            yield
            self.troubles.pop(what, None)
        except Exception as error:  # whatever it is: the other jobs go on, and who cancels one is heard
            known = isinstance(error, ClusterError | OSError)
            text = str(error) if known else f"{type(error).__name__}: {error} (a defect of vnode; please report it)"
            if what in self.book.jobs:
                text = f"{self.book.jobs[what].called}: {text}"
            if all(text != before for before, _ in self.troubles.values()):  # a full disk stops several actions
                self.say(f"vnode: {text}")
            self.troubles[what] = text, time.monotonic() + AGAIN

    def stop(self) -> None:
        """Ends the scheduler. Jobs go on. A handler of signals may call it."""
        self.ended = True

    def close(self) -> None:
        """Lets another scheduler have the file."""
        self.door.close()
        for supervised in self.supervised.values():
            supervised.close()
        self.state.close()

    # Records

    def record(self, *records: Record) -> None:
        """Writes records down, and takes them in.

        Raises:
          ClusterError: they cannot be written; nothing is changed then.
        """
        self.state.append(records)
        for record in records:
            if (job := self.book.add(record)) is not None:
                self.changed[job.id] = job

    def note(self, job: LiveJob, kind: str, **facts: Any) -> None:
        """Writes one record of a job down."""
        self.record(Record(self.now(), kind, job.id, facts))

    # Requests

    def take_request(self, request: Mapping[str, Any], reply: Reply) -> None:
        """Takes a request from the thread of a connection."""
        self.queue.put(("request", lambda: self.answer(request, reply)))

    def answer(self, request: Mapping[str, Any], reply: Reply) -> None:
        """Answers a request."""
        try:
            kind = request["kind"]
            handlers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
                "submit": self.submit,
                "queue": self.queue_of,
                "status": self.status,
                "priority": self.change_priority,
                "cancel": self.cancel,
            }
            if kind not in handlers:
                raise ClusterError(f"this scheduler does not know {kind!r}: it may run another version of vnode.")
            found = handlers[kind](request)
        except ClusterError as error:
            reply({"kind": "error", "text": str(error)})
        except Exception as error:
            reply({"kind": "error", "text": f"the request cannot be read: {type(error).__name__}: {error}"})
        else:
            reply({"kind": "ok", "answer": found})

    def job_of(self, request: Mapping[str, Any]) -> LiveJob:
        """The job that a request is about.

        Raises:
          ClusterError: there is none.
        """
        return self.book.jobs[job_in(self.snapshot(), str(request["job"]))["id"]]

    def queue_of(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The cluster: jobs that have not ended, and the `last` that have; or some of all jobs, from the `first` on."""
        first = request.get("first")
        if first is None:
            return self.snapshot(request.get("last"))
        jobs = [self.show(job) for job in list(self.book.jobs.values())[first : first + PART]]
        return {"jobs": jobs}

    def status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One job, and what was decided about it."""
        job = self.job_of(request)
        return {**self.show(job), "decisions": [each for each in self.book.decisions if each["job"] == job.id]}

    def submit(self, request: Mapping[str, Any]) -> str:
        """Takes a job in; its id is returned once it is on the disk."""
        submission = Submission.from_facts(request["job"])
        submission.__post_init__()
        check_runs(submission, len(self.setup.devices), self.setup.options.get("counts"), self.setup.backend)
        name = self.book.next_id()
        self.record(Record(self.now(), "submitted", name, submission.facts()))
        job = self.book.jobs[name]
        self.note_cause(f"{job.called} with priority {job.priority:g} arrived")
        return name

    def change_priority(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Gives a job another priority."""
        job, priority = self.job_of(request), request["priority"]
        check_priority(priority)
        self.check_there(job)
        if priority != job.priority:
            self.note(job, "priority", priority=priority)
            self.note_cause(f"the priority of {job.called} is {priority:g} now")
        return self.show(job)

    def cancel(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ends a job."""
        job = self.job_of(request)
        self.check_there(job)
        if not job.cancel:
            self.note(job, "cancel")
            self.note_cause(f"{job.called} was cancelled")
        if request.get("now"):
            self.cancelled[job.id] = 0.0
        return self.show(job)

    def check_there(self, job: LiveJob) -> None:
        """Refuses to change a job that has ended.

        Raises:
          ClusterError: it has.
        """
        if job.is_over:
            raise ClusterError(f"{job.called} has ended: {job.state}.")

    def note_cause(self, cause: str) -> None:
        """Records a cause for which the policy decides anew."""
        self.causes.append(cause)
        self.dirty = True

    # News of supervisors

    def supervise(self, job: LiveJob, process: Any = None) -> Supervised:
        """Speaks with the supervisor of a job from now on."""
        self.paces[job.id] = Pace(job.seconds, job.step)
        self.said.pop(job.id, None)
        take = lambda report: self.queue.put((named(report), lambda: self.hear(report)))  # noqa: E731
        rigid = job.submission.rigid
        folder, serial = self.attempt(job), self.book.schedulers * WISHES
        supervised = Supervised(job.id, job.attempt, folder, take, process, rigid, job.supervisor, serial)
        self.supervised[job.id] = supervised
        return supervised

    def attempt(self, job: LiveJob, number: int | None = None) -> Path:
        """The folder of a job's supervisor: of the last one, or of a number."""
        return self.state.jobs / job.id / f"run-{job.attempt if number is None else number}"

    def hear(self, report: Report) -> None:
        """Takes in news of a supervisor."""
        job = self.book.jobs[report.job]
        if report.kind == "gone":
            self.ends.pop(job.id, None)
        if job.attempt != report.attempt or job.is_over or not job.alive:
            return
        if report.kind != "silent":
            self.silent.pop(job.id, None)
        if report.kind == "gone":
            self.take_end(job, report)
        elif report.kind == "silent":
            self.silent.setdefault(job.id, time.monotonic())
        elif report.kind == "begun":
            self.note(job, "begun", pid=report.facts["pid"], started=report.facts["started"])
        elif report.kind == "status":
            self.take_status(job, report)
        elif report.kind == "refused":
            self.take_refusal(job, report)

    def take_status(self, job: LiveJob, report: Report) -> None:
        """Takes in how a job is."""
        said = report.facts
        self.said[job.id] = said
        if job.submission.rigid:
            return
        members, step = len(said["workers"]), said["step"]
        trains = members if step is not None and step >= 0 else 0
        if job.steps is not None and step is not None and step >= job.steps:
            trains = job.trains  # the rest of the script
        self.paces[job.id].observe(time.monotonic(), trains, step)
        nodes, steps = said["virtual_nodes"], job.steps if said["steps"] is None else said["steps"]
        if nodes and (nodes, steps) != (job.nodes, job.steps):
            limit = job.limit
            self.note(job, "learned", nodes=nodes, steps=steps)
            if job.limit < limit:
                self.note_cause(f"{job.called} has {job.nodes} virtual nodes")
        if trains != job.trains:
            self.note(job, "trains", workers=trains, step=step or 0)
        held = said["devices"]
        if report.serial == self.supervised[job.id].serial and held is not None and set(job.devices) - set(held):
            self.note(job, "holds", devices=[name for name in job.devices if name in held])

    def take_refusal(self, job: LiveJob, report: Report) -> None:
        """A supervisor does not do what is wanted: the job keeps the workers that it has."""
        text = str(report.facts["text"])
        if report.serial == self.supervised[job.id].serial and not job.submission.rigid:
            workers = max(job.trains, 1)
            if workers < job.limit:
                self.note(job, "limited", workers=workers, why=text)
                self.note_cause(f"{job.called} stays at {workers}: {text.splitlines()[0]}")

    def take_end(self, job: LiveJob, report: Report) -> None:
        """The supervisor and all workers of a job are gone."""
        supervised, made_room = self.supervised[job.id], job.stopping
        try:
            self.measure(job)
            self.record(self.outcome_of(job, report))
        except Exception:
            self.ends[job.id] = report  # it is not written down: again, some time later
            raise
        if self.supervised.get(job.id) is supervised:
            del self.supervised[job.id]
        self.cancelled.pop(job.id, None)
        if not job.is_over and not made_room:  # whatever ended it may still be so
            self.troubles[job.id] = "", time.monotonic() + AGAIN
        self.note_cause(f"{job.called} {job.state if job.is_over else 'has no workers'}")
        if job.is_over:
            self.say(f"{job.called}: {job.state}" + (f" (exit code {job.code})" if job.code else ""))
        with contextlib.suppress(OSError):
            for path in (self.attempt(job) / OWN).glob("programs*"):
                shutil.rmtree(path, ignore_errors=True)

    def outcome_of(self, job: LiveJob, report: Report) -> Record:
        """The record of a job that is gone: whatever its files hold, its devices are free."""
        try:
            record = outcome(job, report.facts, self.attempt(job) / OWN, self.now())
            check_form(record)
            return record
        except Exception as error:
            why = f"the records of its end cannot be read: {type(error).__name__}: {error}"
            state = "cancelled" if job.cancel else "failed"
            facts = {"state": state, "code": KILLED, "why": why, "step": job.step}
            return Record(self.now(), "ended", job.id, facts)

    # Decisions

    def measure(self, job: LiveJob) -> None:
        """Writes down how fast a job is, if that has changed."""
        pace = self.paces.get(job.id)
        if pace is not None and (pace.seconds != job.seconds or pace.step != job.step):
            seconds = {str(n): seconds for n, seconds in pace.seconds.items()}
            self.note(job, "measured", step=pace.step, seconds=seconds)

    def decide(self) -> None:
        """Asks the policy, and writes down what it decides."""
        for job in self.book.active():
            self.measure(job)
        moment = self.now()
        decided = decide(self.book, self.policy(), moment)
        why = reasons(self.book, decided.shares, self.causes)
        facts = {"shares": dict(decided.shares), "again": decided.again, "why": why}
        self.record(Record(moment, "decided", None, facts))
        self.again, self.dirty, self.causes = decided.again, False, []
        for name, line in why.items():
            self.say(f"{self.book.jobs[name].called}: {line}")

    def carry_out(self, job: LiveJob) -> None:
        """Carries out the decision about a job, as far as there are devices."""
        supervised = self.supervised.get(job.id)
        silent = self.silent.get(job.id)
        given_up = silent is not None and time.monotonic() > silent + SILENCE and not job.submission.rigid
        if supervised is not None and given_up:
            self.say(f"{job.called}: its supervisor has not answered for {SILENCE:g} s, and is killed")
            self.silent.pop(job.id)
            supervised.kill_supervisor()
        elif job.cancel:
            self.end(job, supervised)
        elif job.alive and supervised is None:
            self.begin(job)  # it could not be before, for want of room
        elif supervised is None:
            if job.share and len(free := self.book.free()) >= job.share:
                moment = self.now()
                granted = Record(moment, "granted", job.id, {"devices": free[: job.share]})
                number = job.attempt + 1
                facts = {"attempt": number, "folder": str(self.attempt(job, number))}
                self.record(granted, Record(moment, "starting", job.id, facts))
                self.begin(job)
        elif job.submission.rigid:
            return
        elif not job.share:
            if not job.stopping:
                self.note(job, "stopping", why="other jobs need its devices")
            supervised.stop("other jobs need its devices")
        elif not job.stopping:
            more = job.share - len(job.devices)
            if more > 0 and len(free := self.book.free()) >= more:
                self.note(job, "granted", devices=free[:more])
            if more <= 0 or len(job.devices) == job.share:
                supervised.want(job.share, job.devices)

    def begin(self, job: LiveJob) -> None:
        """Starts the supervisor of a job.

        Raises:
          ClusterError: it cannot be written down, or started; it is tried again later.
        """
        submission, folder = job.submission, self.state.jobs / job.id
        spec: dict[str, Any] = {
            "command": list(submission.command),
            "name": submission.title,
            "workers": len(job.devices),
            "backend": self.setup.backend,
            "resources": self.setup.resources,
            "min_workers": submission.range[0],
            "max_workers": submission.range[1],
            "devices": list(job.devices),
            "env": dict(self.setup.env),
            "rigid": submission.rigid,
        }
        if not submission.rigid:
            spec["stop_ends_script"] = True
            spec["restart"] = self.setup.restart if submission.restart is None else submission.restart
            spec["checkpoint"] = submission.checkpoint or str(folder / "checkpoint")
        try:
            self.state.check_folder()
            process = start(self.attempt(job), spec, submission.directory, submission.env, folder)
        except (ClusterError, OSError) as error:
            if is_no_room(error):
                raise
            self.note(job, "ended", state="failed", code=2, why=f"it cannot be started: {error}", step=job.step)
            self.note_cause(f"{job.called} failed")
        else:
            self.supervise(job, process)

    def end(self, job: LiveJob, supervised: Supervised | None) -> None:
        """Has a job end that was cancelled: with a checkpoint, or after a while without."""
        if supervised is None:
            self.note(job, "ended", state="cancelled", code=None, why="", step=job.step)
        elif job.id not in self.cancelled:
            self.cancelled[job.id] = time.monotonic() + PATIENCE
            supervised.stop("cancelled")
        elif time.monotonic() >= self.cancelled[job.id]:
            supervised.kill()
            if job.id in self.silent:
                supervised.kill_supervisor()

    # Snapshots

    def facts(self) -> dict[str, Any]:
        """Facts of this scheduler."""
        return {"state": str(self.state.path), "folder": str(self.state.jobs), "pid": os.getpid()}

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """The cluster as plain data, with the last of the jobs that have ended."""
        found = snapshot(self.book, self.now(), self.facts(), self.said, self.paces, last)
        for job in found["jobs"] if self.silent else ():
            if job["id"] in self.silent:
                job["why"] = "its supervisor does not answer"
        return found

    def show(self, job: LiveJob) -> dict[str, Any]:
        """A job as plain data."""
        found = job_data(job, self.state.jobs, self.said.get(job.id, {}), self.paces.get(job.id), self.book)
        return {**found, "why": "its supervisor does not answer"} if job.id in self.silent else found


def named(report: Report) -> str:
    """The name of a report's action: a failure of it is not forgotten when another report is taken in."""
    return f"{report.kind} of job {report.job}"


def say_on_stderr(line: str) -> None:
    """Prints a line for people, unless their terminal is gone."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
