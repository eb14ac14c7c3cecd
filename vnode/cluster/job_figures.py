"""Turns the events of a simulated or live run into figures: completion times, waiting, utilisation, resizes.

Knows events. Must not know policies, nor how the events came about. Definitions are in the docs (cluster.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vnode.cluster.events import Event
from vnode.cluster.jobs import Job


@dataclasses.dataclass(frozen=True)
class JobFigures:
    """The figures of one job.

    Attributes:
      id: its name.
      arrival: seconds since the beginning.
      priority: its weight.
      demand: the most devices that it could have.
      first: its first share; 0 if it never had one.
      queueing: seconds from its arrival to its first devices.
      jct: seconds from its arrival to its end, its job completion time; NaN if it has not ended.
      resizes: how often its share changed after the first, before its end.
    """

    id: str
    arrival: float
    priority: float
    demand: int
    first: int
    queueing: float
    jct: float
    resizes: int


@dataclasses.dataclass(frozen=True)
class Result:
    """A run of jobs on a cluster.

    Attributes:
      jobs: in the order of their indices in the events.
      devices: how many there were.
      events: what happened, in order of time.
      policy: its name, for people.
    """

    jobs: Sequence[Job]
    devices: int
    events: Sequence[Event]
    policy: str = ""

    def of_jobs(self) -> list[JobFigures]:
        """Figures of each job."""
        shares: list[list[tuple[float, int]]] = [[] for _ in self.jobs]
        held: list[float] = [math.nan] * len(self.jobs)
        ended: list[float] = [math.nan] * len(self.jobs)
        for event in self.events:
            if event.kind == "share":
                shares[event.job].append((event.time, event.devices))
            elif event.kind == "holds" and event.devices and math.isnan(held[event.job]):
                held[event.job] = event.time
            elif event.kind == "ended":
                ended[event.job] = event.time
        return [
            JobFigures(
                job.id,
                job.arrival,
                job.priority,
                job.demand,
                shares[i][0][1] if shares[i] else 0,
                held[i] - job.arrival,
                ended[i] - job.arrival,
                max(len(shares[i]) - 1, 0),
            )
            for i, job in enumerate(self.jobs)
        ]

    @property
    def makespan(self) -> float:
        """Seconds from the beginning to the end of the last job."""
        return max((event.time for event in self.events if event.kind == "ended"), default=0.0)

    def utilisation(self, kind: str) -> float:
        """For which part of their time up to the last end devices are held ("holds"), or make steps ("runs")."""
        now = [0] * len(self.jobs)
        busy = total = last = 0.0
        for event in self.events:
            if event.kind in (kind, "ended") and event.time <= self.makespan:
                total += busy * (event.time - last)
                last = event.time
                count = 0 if event.kind == "ended" and kind == "runs" else event.devices
                busy += count - now[event.job]
                now[event.job] = count
        stalled = sum(event.stall * event.devices for event in self.events) if kind == "runs" else 0.0
        return (total - stalled) / (self.devices * self.makespan) if self.makespan else 0.0

    def figures(self) -> dict[str, Any]:
        """All figures, in seconds, fit for JSON."""
        jobs = self.of_jobs()
        times = np.array([job.jct for job in jobs if math.isfinite(job.jct)])  # of a live run some may not have ended
        queueing = [job.queueing for job in jobs if math.isfinite(job.queueing)]
        return {
            "makespan": self.makespan,
            "jct_mean": float(times.mean()) if len(times) else math.nan,
            "jct_median": float(np.median(times)) if len(times) else math.nan,
            "jct_p99": float(np.percentile(times, 99)) if len(times) else math.nan,
            "queueing_median": float(np.median(queueing)) if queueing else math.nan,
            "utilisation_allocated": self.utilisation("holds"),
            "utilisation_effective": self.utilisation("runs"),
            "resizes": sum(job.resizes for job in jobs),
            "jobs": [{name: json_value(value) for name, value in dataclasses.asdict(job).items()} for job in jobs],
        }

    def against(self, other: Result) -> np.ndarray:
        """Each job's finish time, divided by its finish time in another run: finish-time fairness to that baseline."""
        ended = {job.id: job.jct for job in other.of_jobs()}
        return np.array([job.jct / ended[job.id] for job in self.of_jobs()])

    def shares(self) -> list[list[tuple[float, float, int]]]:
        """For each job: from when, until when, how many devices it held, for pictures."""
        found: list[list[tuple[float, int]]] = [[] for _ in self.jobs]
        for event in self.events:
            if event.kind == "holds":
                found[event.job].append((event.time, event.devices))
        for times in found:
            times.append((self.makespan, 0))
        return [
            [(start, end, count) for (start, count), (end, _) in itertools.pairwise(times) if count and end > start]
            for times in found
        ]


def json_value(value: Any) -> Any:
    """A value for JSON: None in place of NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value
