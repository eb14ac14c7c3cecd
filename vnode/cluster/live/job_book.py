"""Turns records into the jobs of a cluster as they are now. The same records give the same book.

Knows what each record changes. Must not know where records come from, nor what is decided.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vnode.cluster.live.event_log import Record
from vnode.cluster.live.submission import Submission

ENDED = ("succeeded", "failed", "cancelled")
"""States of a job that has ended. Before, it is pending, starting, running or resizing."""

SHOWN = 200
"""Decisions that are remembered for people."""


@dataclasses.dataclass(eq=False)
class LiveJob:
    """One job, as the records tell.

    Attributes:
      number: its place in the order of submission, from 0.
      submission: what was asked for.
      submitted: when, in seconds since 1970.
      priority: its weight now.
      limit: the most workers that it may have.
      share: the devices that the last decision gives it.
      devices: names of those that it has.
      attempt: number of its supervisor; 0 before the first.
      alive: whether that supervisor may be there.
      folder: of that supervisor, when it was started; None in records of earlier versions.
      supervisor: its process number, and when it was started, as the kernel tells; None before it has answered.
      stopping: whether it was asked to make room for others.
      cancel: whether someone wants it to end.
      trains: how many workers make steps.
      step: how many are done, at the last record of it.
      steps: of the whole run, if that is known.
      nodes: virtual nodes of its step, if they are known.
      seconds: measured seconds a step, by number of workers.
      state: see above.
      started: when it first had devices.
      ended: when it ended.
      code: its exit code.
      why: more about its state.
      interrupted: when it lost its devices without being asked to.
    """

    id: str
    number: int
    submission: Submission
    submitted: float
    priority: float
    limit: int
    share: int = 0
    devices: list[str] = dataclasses.field(default_factory=list)
    attempt: int = 0
    alive: bool = False
    folder: str | None = None
    supervisor: tuple[int, str | None] | None = None
    stopping: bool = False
    cancel: bool = False
    trains: int = 0
    step: int = 0
    steps: int | None = None
    nodes: int | None = None
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    state: str = "pending"
    started: float | None = None
    ended: float | None = None
    code: int | None = None
    why: str = ""
    interrupted: list[float] = dataclasses.field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    @property
    def keeps(self) -> bool:
        """Whether it has devices that no policy may take."""
        return self.submission.rigid and bool(self.devices) and not self.is_over

    @property
    def called(self) -> str:
        """Its number and name, for people."""
        return f"job {self.id} ({self.submission.title})"

    def row(self) -> tuple[str, str, str, float, int, float, float | None, int | None]:
        """Its row in the table of jobs."""
        name = self.submission.title
        return self.id, name, self.state, self.priority, len(self.devices), self.submitted, self.ended, self.code


class Book:
    """The jobs of a cluster.

    Attributes:
      jobs: all of them by id, in the order of submission.
      devices: names of those that there are.
      policy: the name of the policy, and its options.
      schedulers: how many have begun.
      epoch: when the first record was made.
      decisions: those that changed a share: time, job, from, to, why.
      holds: from when a job has how many devices.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.jobs: dict[str, LiveJob] = {}
        self.devices: list[str] = []
        self.policy, self.options = "", {}
        self.epoch: float | None = None
        self.began = self.last = 0.0
        self.schedulers = 0
        self.decisions: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self.holds: deque[dict[str, Any]] = deque(maxlen=100 * SHOWN)
        for record in records:
            self.add(record)

    def active(self) -> list[LiveJob]:
        """The jobs that have not ended."""
        return [job for job in self.jobs.values() if not job.is_over]

    def free(self) -> list[str]:
        """Devices that nobody has."""
        used = {name for job in self.active() for name in job.devices}
        return [name for name in self.devices if name not in used]

    def next_id(self) -> str:
        """The id of the next job."""
        return str(len(self.jobs) + 1)

    def add(self, record: Record) -> LiveJob | None:
        """Takes in a record; returns the job that it is about."""
        if self.epoch is None:
            self.epoch = record.time
        self.last = record.time
        if record.kind == "began":
            self.devices, self.policy = list(record.facts["devices"]), record.facts["policy"]
            self.options, self.began = dict(record.facts["options"]), record.time
            self.schedulers += 1
            return None
        if record.kind == "decided":
            self.decided(record)
            return None
        if record.kind == "submitted":
            submission = Submission.from_facts(record.facts)
            assert record.job is not None
            job = LiveJob(
                record.job, len(self.jobs), submission, record.time, submission.priority, submission.range[1],
                steps=submission.steps,
            )  # fmt: skip
            self.jobs[job.id] = job
            return job
        assert record.job is not None
        job = self.jobs[record.job]
        before = len(job.devices)
        getattr(self, f"take_{record.kind}")(job, record)
        if len(job.devices) != before:
            self.holds.append({"job": job.id, "time": record.time, "devices": len(job.devices)})
        if not job.is_over:
            job.state = state_of(job)
        return job

    def decided(self, record: Record) -> None:
        """Takes in a decision about shares."""
        why = record.facts["why"]
        for name, share in record.facts["shares"].items():
            job = self.jobs[name]
            if name in why:
                change = {"time": record.time, "job": name, "from": job.share, "to": share, "why": why[name]}
                self.decisions.append(change)
            job.share = share
            if not job.is_over:
                job.state = state_of(job)

    def take_priority(self, job: LiveJob, record: Record) -> None:
        """Another priority."""
        job.priority = record.facts["priority"]

    def take_cancel(self, job: LiveJob, record: Record) -> None:
        """Someone wants it to end."""
        job.cancel, job.share = True, len(job.devices) if job.keeps else 0

    def take_measured(self, job: LiveJob, record: Record) -> None:
        """Its speed."""
        job.step = record.facts["step"]
        job.seconds = {int(n): seconds for n, seconds in record.facts["seconds"].items()}

    def take_learned(self, job: LiveJob, record: Record) -> None:
        """The virtual nodes of its step, and the steps of its run."""
        job.nodes, steps = record.facts["nodes"], record.facts["steps"]
        job.steps = job.steps if steps is None else steps
        if job.nodes is not None:
            job.limit = max(min(job.limit, job.nodes), 1)

    def take_limited(self, job: LiveJob, record: Record) -> None:
        """It cannot have more workers."""
        job.limit, job.why = record.facts["workers"], record.facts["why"]

    def take_granted(self, job: LiveJob, record: Record) -> None:
        """It has more devices."""
        job.devices += record.facts["devices"]
        job.started = record.time if job.started is None else job.started

    def take_starting(self, job: LiveJob, record: Record) -> None:
        """Its supervisor is about to be there."""
        job.attempt, job.alive, job.stopping, job.trains, job.why = record.facts["attempt"], True, False, 0, ""
        job.supervisor, job.folder = None, record.facts.get("folder")

    def take_begun(self, job: LiveJob, record: Record) -> None:
        """Its supervisor is there."""
        job.supervisor = record.facts["pid"], record.facts["started"]

    def take_stopping(self, job: LiveJob, record: Record) -> None:
        """It makes room for others."""
        job.stopping, job.why = True, record.facts["why"]

    def take_holds(self, job: LiveJob, record: Record) -> None:
        """It has given devices back."""
        job.devices = [name for name in job.devices if name in record.facts["devices"]]

    def take_trains(self, job: LiveJob, record: Record) -> None:
        """So many workers make steps."""
        job.trains = record.facts["workers"]

    def take_pending(self, job: LiveJob, record: Record) -> None:
        """It has no devices any more, and is to go on later."""
        if record.facts["counts"]:
            job.interrupted.append(record.time)
        job.devices, job.alive, job.trains, job.share, job.stopping = [], False, 0, 0, False
        job.step, job.why = record.facts["step"], record.facts["why"]

    def take_ended(self, job: LiveJob, record: Record) -> None:
        """It is over."""
        job.devices, job.alive, job.trains, job.share = [], False, 0, 0
        job.state, job.code, job.why = record.facts["state"], record.facts["code"], record.facts["why"]
        job.step, job.ended = record.facts["step"], record.time


def counts_of(book: Book, job: LiveJob) -> Sequence[int]:
    """The numbers of devices that a job may have, in rising order."""
    low, high = job.submission.range
    allowed = book.options.get("counts")
    if allowed is None or job.submission.rigid:
        return range(min(low, job.limit), min(high, job.limit) + 1)
    return [count for count in allowed if min(low, job.limit) <= count <= min(high, job.limit)]


def least(book: Book, job: LiveJob) -> float:
    """The fewest devices that a job may have; infinite if it can have none."""
    counts = counts_of(book, job)
    return counts[0] if len(counts) else math.inf


def state_of(job: LiveJob) -> str:
    """The state of a job that has not ended."""
    if not job.devices:
        return "pending"
    if job.submission.rigid and job.alive:
        return "running"
    if not job.trains:
        return "starting" if not job.seconds and not job.step else "resizing" if job.alive else "starting"
    return "running" if job.trains == len(job.devices) == job.share else "resizing"


def rows(jobs: Iterable[LiveJob]) -> Sequence[Any]:
    """Rows of the table of jobs."""
    return [job.row() for job in jobs]
