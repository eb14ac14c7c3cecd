"""Turns measured times of a job into its speed on any number of devices, and into the remaining work.

Knows times and steps. Must not know policies.

    measured {2: 1.0}, declared {1: 4.0, 8: 0.8}   ->   the declared curve, scaled so that it meets 1.0 at 2
"""

from __future__ import annotations

from collections.abc import Mapping

from vnode.cluster.live.job_book import LiveJob
from vnode.cluster.speeds import Speeds

FIXED = 0.1
"""The part of a step on one device that more devices do not shorten, where nothing is known: Amdahl's law."""

UNKNOWN = 100
"""Steps that are left of a run that does not say how many it has, until it has done more."""


def step_times(measured: Mapping[int, float], declared: Mapping[int, float], most: int) -> dict[int, float]:
    """Seconds a step on 1 to `most` devices.

    Between two measured numbers the time is a line over 1/n. Outside of them it is that of the nearest, times what the
    declared curve changes from there; where nothing is declared, a tenth of a step does not get shorter.

    Args:
      measured: seconds by number of devices.
      declared: seconds by number of devices, as the user said.
      most: the largest number.

    Example:
      >>> {n: round(s, 3) for n, s in step_times({2: 1.1}, {}, 4).items()}
      {1: 2.0, 2: 1.1, 3: 0.8, 4: 0.65}
    """
    shape = {n: FIXED + (1 - FIXED) / n for n in range(1, most + 1)}
    if declared:
        curve = Speeds.from_times(declared)
        shape = {n: 1 / curve.at(n) for n in range(1, most + 1)}
    known = {n: seconds for n, seconds in measured.items() if n <= most}
    if not known:
        return shape
    first, last = min(known), max(known)
    between = Speeds.from_times(known)
    return {
        n: shape[n] * known[first] / shape[first] if n < first
        else shape[n] * known[last] / shape[last] if n > last
        else 1 / between.at(n)
        for n in range(1, most + 1)
    }  # fmt: skip


def speeds_of(job: LiveJob, most: int) -> Speeds:
    """Steps per second of a job by number of devices.

    Args:
      job: as it is known.
      most: the largest number of devices that it may have.
    """
    times = step_times(job.seconds, job.submission.step_seconds, most)
    return Speeds((0.0, *(1 / times[n] for n in range(1, most + 1))))


def remaining_of(job: LiveJob) -> float:
    """Steps that are left; of a run that does not say how many it has, as many as it has done."""
    if job.steps is None:
        return float(max(job.step, UNKNOWN))
    return float(max(job.steps - job.step, 1))
