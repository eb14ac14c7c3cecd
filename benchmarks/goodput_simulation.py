"""Simulates a job whose hosts fail and are replaced, event by event: from lifetimes to the work that was done.

Every host has a clock of its own: it works for a random lifetime, is missing for a fixed time, and is replaced by a new
one. Lifetimes are exponential or Weibull; a loss may take the other hosts of its rack with it. The job is told of
losses and joins in the order of time, and adds up its work.

This file must not know the formulas that it checks (`benchmarks.goodput`).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Job(Protocol):
    """A job, which is told of losses and joins; `work` counts seconds at full speed."""

    work: float

    def begin(self) -> None: ...
    def lost(self, time: float) -> None: ...
    def joined(self, time: float) -> None: ...
    def until(self, time: float) -> None: ...


@dataclasses.dataclass
class Kept:
    """A job whose state stays in memory: it stalls at losses and joins, and is slower while hosts are missing.

    Attributes:
      loss: seconds of the stall of a loss.
      join: seconds of the stall of a join.
      speeds: by the number of missing hosts.
    """

    loss: float
    join: float
    speeds: Sequence[float]

    def begin(self) -> None:
        self.work = self.last = self.stalled = 0.0
        self.missing = 0

    def until(self, time: float) -> None:
        self.work += max(time - max(self.last, self.stalled), 0.0) * self.speeds[self.missing]
        self.last = time

    def lost(self, time: float) -> None:
        self.until(time)
        self.missing += 1
        self.stalled = max(self.stalled, time + self.loss)

    def joined(self, time: float) -> None:
        self.until(time)
        self.missing -= 1
        self.stalled = max(self.stalled, time + self.join)


@dataclasses.dataclass
class Restarted:
    """A job that goes back to its last checkpoint at every loss.

    Attributes:
      stall: seconds from a loss until it works again; another loss begins it again.
      every: seconds of work between checkpoints.
      save: seconds of a checkpoint.
    """

    stall: float
    every: float
    save: float

    def begin(self) -> None:
        self.work = self.started = 0.0

    def until(self, time: float) -> None:
        """Moves what is saved by now into `work`."""
        saved = max(math.floor((time - self.started) / (self.every + self.save)), 0)
        self.work += saved * self.every
        self.started += saved * (self.every + self.save)

    def lost(self, time: float) -> None:
        self.until(time)
        self.started = time + self.stall

    def joined(self, time: float) -> None:
        del time


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts that fail and are replaced.

    Attributes:
      count: while none is missing.
      lifetime: mean seconds until one is lost.
      replace: seconds from a loss until another host is there.
      shape: of the Weibull distribution of lifetimes; 1 is exponential.
      together: the share of failures that take all hosts of a rack; a host is lost as often as without.
      rack: the number of hosts in a rack.
    """

    count: int
    lifetime: float
    replace: float
    shape: float = 1.0
    together: float = 0.0
    rack: int = 8

    @property
    def scale(self) -> float:
        """Of the distribution of a host's own clock, since others of its rack take it with them as well."""
        own = self.lifetime * (1 + self.together * (min(self.rack, self.count) - 1))
        return own / math.gamma(1 + 1 / self.shape)

    def lifetimes(self, rng: np.random.Generator) -> float:
        """Seconds until a new host fails."""
        return self.scale * rng.weibull(self.shape)

    def remaining(self, rng: np.random.Generator) -> np.ndarray:
        """Seconds until hosts fail that have been at work for long: lifetimes, each met at a random moment."""
        met = rng.gamma(1 + 1 / self.shape, size=self.count) ** (1 / self.shape)
        return rng.random(self.count) * self.scale * met

    def neighbours(self, host: int) -> range:
        """The hosts of a host's rack."""
        first = host // self.rack * self.rack
        return range(first, min(first + self.rack, self.count))


def simulate(job: Job, hosts: Hosts, *, failures: int = 300, repeat: int = 16, seed: int = 0) -> tuple[float, float]:
    """Simulates a job several times.

    Args:
      job: is told what happens.
      hosts: of the job.
      failures: lost hosts to expect in each repetition.
      repeat: repetitions.
      seed: of the random numbers.

    Returns:
      The mean of work divided by time, and its standard error.
    """
    begin = 20 * hosts.replace  # by then as many hosts are missing as ever
    end = begin + failures * hosts.lifetime / hosts.count
    values = [_once(job, hosts, begin, end, np.random.default_rng([seed, i])) for i in range(repeat)]
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(repeat))


def _once(job: Job, hosts: Hosts, begin: float, end: float, rng: np.random.Generator) -> float:
    """Work divided by time between two moments."""
    clock = [0] * hosts.count  # how often a host was lost or replaced; even: it is there, odd: it is missing
    events = [(time, host, 0) for host, time in enumerate(hosts.remaining(rng))]
    heapq.heapify(events)
    before: float | None = None
    job.begin()
    while True:
        time, host, number = heapq.heappop(events)
        if before is None and time >= begin:
            job.until(begin)
            before = job.work
        if before is not None and time >= end:
            job.until(end)
            return (job.work - before) / (end - begin)
        if number != clock[host]:
            continue  # it was lost with its rack
        if number % 2:
            clock[host] += 1
            job.joined(time)
            heapq.heappush(events, (time + hosts.lifetimes(rng), host, clock[host]))
            continue
        rack = hosts.together and rng.random() < hosts.together
        for victim in hosts.neighbours(host) if rack else (host,):
            if clock[victim] % 2 == 0:
                clock[victim] += 1
                job.lost(time)
                heapq.heappush(events, (time + hosts.replace, victim, clock[victim]))
