"""Turns jobs, devices and a policy into events: when each job has how many devices, and when it ends.

Knows events and time. Must not know how a policy decides. The same input gives the same output, bit by bit.

An event is an arrival, the end of a start or of a growth, free devices, the end of a job, or a time for which the
policy asked. After arrivals, ends and such times, the policy decides about all jobs that are there. Progress is kept in
arrays, and there is one timer: the earliest of what comes next.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vnode.cluster.events import Event
from vnode.cluster.jobs import ENDED, PENDING, RESIZING, RUNNING, STARTING, Job, Jobs
from vnode.cluster.resize_costs import FREE, Costs
from vnode.errors import ClusterError, layout_message

Policy = Callable[[float, Jobs, Any], Any]
"""``decide(now, jobs, devices) -> shares``: devices by job, as an array in the order of `jobs`, or by name of job. A
policy that wants to decide again before the next event returns a `Decision`."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """Shares, and when to decide again.

    Attributes:
      shares: as a policy returns them.
      again: seconds; the policy is asked then, if no event comes first. None: not before the next event.
    """

    shares: Any
    again: float | None = None


def time_of(again: Any) -> float | None:
    """When a policy wants to decide again; None: not before the next event.

    Raises:
      ClusterError: that is no time.
    """
    if again is None:
        return None
    if not isinstance(again, numbers.Real) or math.isnan(again):
        raise ClusterError(
            f"a policy wants to decide again at {again!r}, which is no time.",
            remedies=["return Decision(shares, again=seconds), in the seconds of its argument now; or again=None"],
        )
    return None if math.isinf(again) else float(again)


class Simulator:
    """One run over time.

    Args:
      jobs: in any order.
      devices: how many there are; by kind if there are several.
      policy: decides.
      costs: how long it takes to do what is decided.
    """

    def __init__(
        self, jobs: Sequence[Job], devices: int | Mapping[str, int], policy: Policy, costs: Costs = FREE
    ) -> None:
        self.kinds = {"": devices} if isinstance(devices, int) else dict(devices)
        check(jobs, self.kinds)
        self.jobs = sorted(jobs, key=lambda job: (job.arrival, natural(job.id)))
        self.devices, self.policy, self.costs = devices, policy, costs
        shape = len(jobs), len(self.kinds)
        self.table = table_of(self.jobs, costs, self.kinds)
        self.share = self.table.share.reshape(shape)  # the same numbers
        self.runs_on = np.zeros(shape, np.int64)  # devices that make steps
        self.holds = np.zeros(shape, np.int64)  # devices that it has, or is about to have
        self.leaving = np.zeros(shape, np.int64)  # those that are to be free again
        self.rate = np.zeros(len(jobs))
        self.since = np.zeros(len(jobs))  # work before then is in `remaining`
        self.finish = np.full(len(jobs), math.inf)
        self.ready = np.full(len(jobs), math.inf)  # the end of a start or growth
        self.waits: set[int] = set()  # those that need more devices than they hold
        self.there = np.array(list(self.kinds.values()), np.int64)
        self.free = self.there.copy()
        self.releases: list[tuple[float, int, tuple[int, ...]]] = []  # when, of which job, devices are free again
        self.now, self.arrivals, self.active = 0.0, 0, np.zeros(0, np.int64)
        self.again = math.inf
        self.dirty = False
        self.events: list[Event] = []
        self.decisions = 0

    def run(self) -> None:
        """Runs to the end of the last job.

        Raises:
          ClusterError: the policy gives devices that are not there, or leaves jobs without devices for ever.
        """
        count = len(self.jobs)
        while self.arrivals < count or len(self.active):
            time = self.next_time()
            if time == math.inf:
                names = [self.jobs[i].id for i in self.active[:3]]
                raise ClusterError(
                    f"the policy leaves {len(self.active)} jobs without devices for ever: {', '.join(names)}.",
                    facts=[f"{self.free} of {self.devices} devices are free at {self.now:g} s"],
                )
            self.now = time
            self.take_arrivals()
            self.take_ends()
            self.take_ready()
            self.take_releases()
            self.give_devices()
            if self.now >= self.again:
                self.again, self.dirty = math.inf, True
            if self.dirty and self.may_decide():
                self.dirty = False
                self.decide()
                self.give_devices()

    def next_time(self) -> float:
        """When something happens next."""
        times = [self.again]
        if self.arrivals < len(self.jobs):
            times.append(float(self.table.arrival[self.arrivals]))
        if self.releases:
            times.append(self.releases[0][0])
        if len(self.active):
            times += [float(self.finish[self.active].min()), float(self.ready[self.active].min())]
        if self.dirty and not (self.costs.settles and self.waits):
            times.append(self.tick_after(self.now))
        return max(min(times), self.now)

    def tick_after(self, time: float) -> float:
        """The first time from one on at which decisions are made."""
        tick = self.costs.tick
        return math.ceil(round(time / tick, 9)) * tick if tick else time

    def may_decide(self) -> bool:
        """Whether a decision is made now."""
        if self.costs.settles and self.waits:
            return False
        return not self.costs.tick or self.tick_after(self.now) <= self.now

    # Events

    def take_arrivals(self) -> None:
        """Jobs that arrive."""
        first = self.arrivals
        while self.arrivals < len(self.jobs) and self.table.arrival[self.arrivals] <= self.now:
            self.events.append(Event(self.now, "arrived", self.arrivals))
            self.arrivals += 1
        if self.arrivals > first:
            self.active = np.concatenate([self.active, np.arange(first, self.arrivals)])
            self.dirty = True

    def take_ends(self) -> None:
        """Jobs that have done all of their work."""
        ended = self.active[self.finish[self.active] <= self.now]
        for job in ended.tolist():
            self.table.state[job], self.table.ended[job], self.table.remaining[job] = ENDED, self.now, 0.0
            self.rate[job], self.finish[job], self.ready[job] = 0.0, math.inf, math.inf
            self.waits.discard(job)
            self.share[job] = self.runs_on[job] = 0
            self.record("ended", job, self.holds[job] + self.leaving[job])
            self.let_go(job, self.holds[job].copy(), self.costs.release)
        if len(ended):
            self.active = self.active[self.table.state[self.active] != ENDED]
            self.dirty = True

    def take_ready(self) -> None:
        """Starts and growths that are over: the job makes steps on all that it holds."""
        for job in self.active[self.ready[self.active] <= self.now].tolist():
            grows = self.runs_on[job].any()
            self.ready[job] = math.inf
            self.run_on(job, self.holds[job], self.costs.growth_stall if grows else 0.0)
            self.table.state[job] = RESIZING if job in self.waits else RUNNING

    def take_releases(self) -> None:
        """Devices that are free again."""
        while self.releases and self.releases[0][0] <= self.now:
            _, job, counts = heapq.heappop(self.releases)
            self.free += counts
            self.leaving[job] -= counts
            self.record("holds", job, self.holds[job] + self.leaving[job])

    def let_go(self, job: int, counts: np.ndarray, after: float) -> None:
        """A job needs some devices no more; they are free a little later."""
        if counts.any():
            heapq.heappush(self.releases, (self.now + after, job, tuple(counts.tolist())))
            self.leaving[job] += counts
            self.holds[job] -= counts
            if not after:
                self.take_releases()

    def give_devices(self) -> None:
        """Gives free devices to those that wait for them, in falling priority."""
        if not self.waits or not self.free.any():
            return
        table = self.table
        for job in sorted(self.waits, key=lambda job: (-table.priority[job], job)):
            more = self.share[job] - self.holds[job]
            if (more > self.free).any():
                continue
            self.free -= more
            self.holds[job] += more
            self.waits.discard(job)
            self.record("holds", job, self.holds[job] + self.leaving[job])
            starts = not self.runs_on[job].any()
            if not (starts and self.ready[job] < math.inf):  # who is starting, starts on more devices
                self.ready[job] = self.now + (float(table.start[job]) if starts else self.costs.growth)
            table.state[job] = STARTING if starts else RESIZING
        self.take_ready()  # those that take no time

    def run_on(self, job: int, counts: np.ndarray, stall: float) -> None:
        """From now on, a job makes steps on so many devices, after a stall."""
        self.progress(np.array([job]))
        self.runs_on[job] = counts
        self.rate[job] = rate = self.speed_on(job, counts)
        self.since[job] = max(self.since[job], self.now) + stall
        self.finish[job] = self.since[job] + self.table.remaining[job] / rate if rate else math.inf
        self.record("runs", job, counts, stall)

    def speed_on(self, job: int, counts: np.ndarray) -> float:
        """Units of work per second of a job on devices, by kind."""
        if len(counts) > 1:
            return self.jobs[job].speed_on(dict(zip(self.kinds, counts.tolist(), strict=True)))
        return float(self.table.curves[self.table.curve[job], min(int(counts[0]), int(self.table.demand[job]))])

    def record(self, kind: str, job: int, counts: np.ndarray, stall: float = 0.0) -> None:
        """Writes an event down."""
        self.events.append(Event(self.now, kind, job, int(counts.sum()), stall))

    def progress(self, jobs: np.ndarray) -> None:
        """Takes what was done until now from what remains."""
        done = self.rate[jobs] * np.maximum(self.now - self.since[jobs], 0.0)
        self.table.remaining[jobs] = np.maximum(self.table.remaining[jobs] - done, 0.0)
        self.since[jobs] = np.maximum(self.since[jobs], self.now)

    # Decisions

    def decide(self) -> None:
        """Asks the policy, and carries out its shares.

        Raises:
          ClusterError: it gives devices that are not there, or more than a job may have.
        """
        active, table = self.active, self.table
        if not len(active):
            return
        self.progress(active)
        view = table.rows(active)
        count = self.arrivals
        view.look_back = lambda: table.rows(slice(0, count))
        decided = self.policy(self.now, view, self.devices)
        self.decisions += 1
        again = None
        if isinstance(decided, Decision):
            decided, again = decided.shares, time_of(decided.again)
        self.again = math.inf if again is None or again <= self.now else again
        shares = as_array(decided, view).reshape(len(active), len(self.kinds))
        beyond = len(self.kinds) == 1 and (shares[:, 0] > view.demand).any()
        if beyond or (shares.sum(0) > self.there).any() or (shares < 0).any():
            raise ClusterError(wrong_shares(shares.sum(1), view, int(self.there.sum())))
        for index in np.flatnonzero((shares != self.share[active]).any(1)).tolist():
            self.change(int(active[index]), shares[index])

    def change(self, job: int, share: np.ndarray) -> None:
        """A job gets another share: what it need not hold any longer goes, and it waits for what it needs besides."""
        table, costs, held = self.table, self.costs, self.holds[job].copy()
        self.record("share", job, share)
        self.share[job] = share
        kept = np.minimum(held, share)
        runs = np.minimum(self.runs_on[job], kept)
        if (runs < self.runs_on[job]).any():
            stall = costs.shrink if runs.any() else 0.0
            self.run_on(job, runs, stall)
            self.let_go(job, held - kept, stall + costs.release)
        else:  # of those that start or join, some are not needed
            self.let_go(job, held - kept, costs.release)
        if (kept == runs).all():  # nobody is about to join
            self.ready[job] = math.inf
            table.state[job] = RUNNING if runs.any() else PENDING
        if (share > held).any():
            self.waits.add(job)
            table.state[job] = RESIZING if table.state[job] == RUNNING else table.state[job]
        else:
            self.waits.discard(job)


def table_of(jobs: Sequence[Job], costs: Costs, kinds: Mapping[str, int]) -> Jobs:
    """The table of jobs that are sorted by arrival; jobs of the same speeds share a curve."""
    most = max((job.demand for job in jobs), default=1)
    numbers: dict[tuple[float, ...], int] = {}
    curve = np.array([numbers.setdefault(speeds_of(job, kinds), len(numbers)) for job in jobs], np.int64)
    curves = np.zeros((max(len(numbers), 1), most + 1))
    for speeds, number in numbers.items():
        known = speeds[: most + 1]
        curves[number, : len(known)] = known
        curves[number, len(known) :] = known[-1]
    count = len(jobs)

    def column(field: str, kind: Any) -> np.ndarray:
        return np.array([getattr(job, field) for job in jobs], kind)

    return Jobs(
        id=[job.id for job in jobs],
        rank=np.arange(count),
        arrival=column("arrival", float),
        priority=column("priority", float),
        demand=column("demand", np.int64),
        minimum=column("minimum", np.int64),
        work=column("work", float),
        start=np.array([costs.start if job.start is None else job.start for job in jobs], float),
        share=np.zeros(count if len(kinds) == 1 else (count, len(kinds)), np.int64),
        state=np.full(count, PENDING, np.int8),
        remaining=column("work", float),
        curve=curve,
        curves=curves,
        ended=np.full(count, math.nan),
        job=jobs,
    )


def speeds_of(job: Job, kinds: Mapping[str, int]) -> tuple[float, ...]:
    """The speeds of a job on devices of one kind; on several kinds there is no such curve."""
    return job.by_kind[next(iter(kinds))].per_second if len(kinds) == 1 else (0.0,)


def as_array(shares: Any, jobs: Jobs) -> np.ndarray:
    """Shares as an array in the order of a table.

    Raises:
      ClusterError: they are of jobs that are not there, or no whole numbers.
    """
    if isinstance(shares, Mapping):
        left = dict(shares)
        none = np.zeros(jobs.share.shape[1:], np.int64)
        found = np.array([left.pop(name, none) for name in jobs.id])
        if left:
            raise ClusterError(f"the policy gives devices to jobs that do not exist: {', '.join(map(str, left))}")
        shares = found
    array = np.asarray(shares)
    if array.shape != jobs.share.shape or not np.array_equal(array, np.floor(array)):
        raise ClusterError(
            f"a policy returns a whole number of devices for each of the {len(jobs)} jobs, not {array.dtype} of shape "
            f"{array.shape}"
        )
    return array.astype(np.int64)


def wrong_shares(shares: np.ndarray, jobs: Jobs, devices: int) -> str:
    """The message of shares that cannot be."""
    facts = [f"together {int(shares.sum())} of {devices} devices"]
    for index in np.flatnonzero((shares < 0) | (shares > jobs.demand))[:5].tolist():
        facts.append(f"job {jobs.id[index]}: {shares[index]}, it demands {jobs.demand[index]}")
    return layout_message("the policy gives devices that do not exist, or that a job must not use.", facts=facts)


def check(jobs: Sequence[Job], kinds: Mapping[str, int]) -> None:
    """Looks whether jobs can run at all.

    Raises:
      ClusterError: two have one name, or one needs more devices than there are, or of another kind.
    """
    if not kinds or min(kinds.values()) < 1:
        raise ClusterError(f"a cluster has at least one device of each kind, not {', '.join(map(str, kinds.values()))}")
    seen: set[str] = set()
    for job in jobs:
        if job.id in seen:
            raise ClusterError(f"two jobs are called {job.id!r}")
        seen.add(job.id)
        if job.minimum > sum(kinds.values()):
            raise ClusterError(f"job {job.id!r} needs {job.minimum} devices; there are {sum(kinds.values())}")
        if not any(kind in job.by_kind for kind in kinds):
            raise ClusterError(f"job {job.id!r} has no speed on {', '.join(kinds)}, only on {', '.join(job.by_kind)}")


def natural(name: str) -> tuple[int, int, str]:
    """Names in the order in which people count: "9" before "10".

    >>> sorted(["b", "10", "9"], key=natural)
    ['9', '10', 'b']
    """
    return (0, int(name), "") if name.isascii() and name.isdigit() and len(name) < 20 else (1, 0, name)
