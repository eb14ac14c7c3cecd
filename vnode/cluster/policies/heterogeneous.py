"""Shortest remaining time first on several kinds of devices, of which a job may have several at once.

Knows speeds on any mixture of kinds, and how much work is left. Must not know time.

A job counts what its speed is as a part of its best, over the square root of the time that it would still take at
that, as in `shortest_remaining`. Where there are few ways to give the devices, the best of all is taken. Otherwise
devices are given one by one to whom they help most; then they are moved or exchanged as long as that helps. Devices of
a kind that no job can use one by one are given in the least number that one can use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from vnode.cluster.jobs import Job, Jobs
from vnode.cluster.simulator import Policy

LEAST = 1e-12
"""By how much an exchange must help."""

FEW = 5000
"""Ways to give the devices up to which all are looked at."""

Counts = tuple[int, ...]
"""Devices of a job by kind."""


Worth = Callable[[Job, Mapping[str, int], Mapping[str, int]], float]
"""``worth(job, counts, devices)``: what a job's devices are worth to it, where the cluster has so many."""


def part_of_best(job: Job, counts: Mapping[str, int], devices: Mapping[str, int]) -> float:
    """The speed of a job, as a part of that alone on the cluster."""
    return job.speed_on(counts) / best_speed(job, devices)


def heterogeneous(mixes: bool = True, worth: Worth = part_of_best) -> Policy:
    """A policy for several kinds of devices.

    Args:
      mixes: whether a job may have devices of several kinds at once.
      worth: by what a job's speed counts beside that of others; others are for comparisons.
    """

    def decide(now: float, jobs: Jobs, devices: Mapping[str, int]) -> np.ndarray:
        shares = Shares(jobs, devices, mixes, worth)
        if shares.ways <= FEW:
            shares.take_best()
        else:
            shares.fill()
            while shares.improve():
                shares.fill()
        return np.array(shares.counts).reshape(len(jobs), len(devices))

    return decide


class Shares:
    """Devices of each job, by kind, given in units.

    Args:
      jobs: all that are there.
      devices: by kind.
      mixes: whether a job may have several kinds.
      worth: by what a job's speed counts.
    """

    def __init__(self, jobs: Jobs, devices: Mapping[str, int], mixes: bool, worth: Worth = part_of_best) -> None:
        self.jobs, self.kinds, self.mixes = jobs, list(devices), mixes
        self.devices, self.worth = devices, worth
        self.units = [unit(jobs, kind) for kind in self.kinds]
        self.free = [devices[kind] // size * size for kind, size in zip(self.kinds, self.units, strict=True)]
        self.counts: list[Counts] = [(0,) * len(self.kinds) for _ in range(len(jobs))]
        best = np.array([best_speed(job, devices) for job in jobs.job])
        self.weight = (1 / np.sqrt(np.maximum(jobs.remaining / best, LEAST))).tolist()
        self.known: dict[tuple[int, Counts], float] = {}
        self.order: list[int] = jobs.order.tolist()

    def value(self, job: int, counts: Counts) -> float:
        """The weighted relative speed of a job on devices."""
        if (job, counts) not in self.known:
            allowed = self.mixes or sum(count > 0 for count in counts) < 2
            asked = dict(zip(self.kinds, counts, strict=True))
            worth = self.worth(self.jobs.job[job], asked, self.devices) if allowed else 0.0
            self.known[job, counts] = worth * self.weight[job]
        return self.known[job, counts]

    def with_units(self, counts: Counts, kind: int, by: int) -> Counts:
        """Devices of a job with some units more of a kind, or fewer."""
        return tuple(count + by * self.units[k] * (k == kind) for k, count in enumerate(counts))

    @property
    def ways(self) -> int:
        """In how many ways the units can be given."""
        units = sum(count // size for count, size in zip(self.free, self.units, strict=True))
        return (len(self.jobs) + 1) ** units

    def take_best(self) -> None:
        """Gives all units in the best way; of several in the first, in the order of priority."""
        kinds = [
            kind
            for kind, (count, size) in enumerate(zip(self.free, self.units, strict=True))
            for _ in range(count // size)
        ]
        best, nobody = LEAST, len(self.jobs)
        for owners in itertools.product([*self.order, nobody], repeat=len(kinds)):
            counts: dict[int, Counts] = {}
            for kind, owner in zip(kinds, owners, strict=True):
                if owner != nobody:
                    counts[owner] = self.with_units(counts.get(owner, (0,) * len(self.kinds)), kind, 1)
            value = sum(self.value(job, each) for job, each in counts.items())
            if value > best * (1 + LEAST):
                best = value
                self.counts = [counts.get(job, (0,) * len(self.kinds)) for job in range(nobody)]

    def fill(self) -> None:
        """Gives free units to whom they help most, one by one."""
        while True:
            best, chosen = LEAST, None
            for job, kind in itertools.product(self.order, range(len(self.kinds))):
                if self.free[kind] >= self.units[kind]:
                    counts = self.with_units(self.counts[job], kind, 1)
                    gain = self.value(job, counts) - self.value(job, self.counts[job])
                    if gain > best:
                        best, chosen = gain, (job, kind)
            if chosen is None:
                return
            job, kind = chosen
            self.counts[job] = self.with_units(self.counts[job], kind, 1)
            self.free[kind] -= self.units[kind]

    def improve(self) -> bool:
        """Moves a unit from one job to another, or exchanges two, whatever helps most.

        Returns:
          Whether something did.
        """
        best, chosen = LEAST, None
        for giver, taker in itertools.permutations(self.order, 2):
            before = self.value(giver, self.counts[giver]) + self.value(taker, self.counts[taker])
            for first, second in self.exchanges(self.counts[giver], self.counts[taker]):
                gain = self.value(giver, first) + self.value(taker, second) - before
                if gain > best:
                    best, chosen = gain, {giver: first, taker: second}
        for job, counts in (chosen or {}).items():
            self.counts[job] = counts
        return chosen is not None

    def exchanges(self, giver: Counts, taker: Counts) -> list[tuple[Counts, Counts]]:
        """Lists exchanges of two jobs: one gives a unit, and may get one of another kind for it."""
        found = []
        for kind in range(len(self.kinds)):
            if giver[kind]:
                first, second = self.with_units(giver, kind, -1), self.with_units(taker, kind, 1)
                found.append((first, second))
                back = (k for k, count in enumerate(taker) if count and k != kind)
                found += [(self.with_units(first, k, 1), self.with_units(second, k, -1)) for k in back]
        return found


def unit(jobs: Jobs, kind: str) -> int:
    """The devices of a kind that are given at once: the least number that some job can use."""
    known = [job.by_kind[kind].per_second for job in jobs.job if kind in job.by_kind]
    return min((count for each in known for count, speed in enumerate(each) if speed > 0), default=1)


def best_speed(job: Job, devices: Mapping[str, int]) -> float:
    """The speed of a job alone on the cluster: on all devices, or on those of one kind if that is faster."""
    choices = [dict(devices), *({kind: count} for kind, count in devices.items())]
    return max(job.speed_on(counts) for counts in choices) or 1.0
