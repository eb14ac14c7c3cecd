"""Turns the arrivals so far into the schedule that static priority would have made of them.

Knows demands, priorities and how long jobs take on all that they demand. Must not know what they really have.

The past of the schedule does not depend on later arrivals. So it is kept as it was at the last arrival, and only what
follows from there is computed again: its cost does not grow with the jobs that have ended.
"""

from __future__ import annotations

import heapq

import numpy as np

from vnode.cluster.jobs import Jobs
from vnode.cluster.policies.shortest_remaining import speed_at_demand


class VirtualStatic:
    """Static priority without backfill, beside what really happens.

    Args:
      devices: how many there are.
      release: seconds from the end of a job until its devices are free.

    Attributes:
      starts: when each job would have its devices, by rank.
      ends: when it would end.
      least_start: the fewest seconds that a start takes.
    """

    def __init__(self, devices: int, release: float) -> None:
        self.devices, self.release = devices, release
        self.known = 0
        self.free = [(0.0, devices)]  # since when devices are free, or will be: they are promised before
        self.busy: list[tuple[float, int]] = []  # when a job ends, and how many devices it has
        self.waiting: list[tuple[float, int]] = []  # priority, falling, and rank
        self.facts: list[tuple[float, float, int, float]] = []  # arrival, priority, demand, seconds of each job
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.least_start = float("inf")

    def is_beginning_of(self, arrived: Jobs, devices: int) -> bool:
        """Whether it knows the first of the jobs that have arrived, and no others."""
        known = self.facts[-1:] and self.facts[-1][:3]
        if devices != self.devices or self.known > len(arrived):
            return False
        last = self.known - 1
        return not known or known == (arrived.arrival[last], arrived.priority[last], min(arrived.demand[last], devices))

    def learn(self, arrived: Jobs) -> None:
        """Takes in the jobs that have arrived since, and plans ahead as if no more came.

        Args:
          arrived: all jobs that have arrived, in the order of their ranks.
        """
        if len(arrived) == self.known:
            return
        new = slice(self.known, len(arrived))
        jobs = arrived.rows(new)
        self.least_start = min(self.least_start, float(jobs.start.min()))
        seconds = jobs.start + jobs.work / speed_at_demand(jobs, self.devices)
        columns = (jobs.arrival, jobs.priority, np.minimum(jobs.demand, self.devices), seconds)
        for arrival, priority, most, time in zip(*(column.tolist() for column in columns), strict=True):
            if self.facts and arrival > self.facts[-1][0]:  # those that arrive together are looked at together
                self.begin(self.facts[-1][0])
            self.advance(arrival)
            rank = len(self.facts)
            self.facts.append((arrival, priority, most, time))
            self.starts.append(float("inf"))
            self.ends.append(float("inf"))
            heapq.heappush(self.waiting, (-priority, rank))
        self.begin(self.facts[-1][0])
        self.known = len(arrived)
        kept = self.free.copy(), self.busy.copy(), self.waiting.copy()
        self.advance(float("inf"))
        self.free, self.busy, self.waiting = kept

    def advance(self, until: float) -> None:
        """Lets time pass to an arrival, which itself comes first."""
        while self.busy and self.busy[0][0] < until:
            now = self.busy[0][0]
            while self.busy and self.busy[0][0] <= now:
                self.free.append((now + self.release, heapq.heappop(self.busy)[1]))
            self.begin(now)

    def begin(self, now: float) -> None:
        """Begins those that wait, in falling priority, up to the first that does not fit."""
        while self.waiting:
            rank = self.waiting[0][1]
            _, _, demand, seconds = self.facts[rank]
            if demand > sum(count for _, count in self.free):
                return
            heapq.heappop(self.waiting)
            start = max(now, self.take_devices(demand))
            self.starts[rank], self.ends[rank] = start, start + seconds
            heapq.heappush(self.busy, (start + seconds, demand))

    def take_devices(self, count: int) -> float:
        """Takes devices, those first that are free first; returns when all of them are."""
        self.free.sort()
        while True:
            since, there = self.free.pop(0)
            if there > count:
                self.free.insert(0, (since, there - count))
            if there >= count:
                return since
            count -= there
