"""Shortest remaining time first, among jobs that many devices do not make much faster.

Knows speeds, and how much work is left. Must not know priorities but to settle ties.

A device is worth what it adds to a job's speed, as a part of the speed on all that the job demands, over the square
root of the time that the job would still take on that. With linear speeds a short job gets all that it demands, as by
shortest remaining time first, which has the least mean completion time on one machine (Schrage, 1968). Where further
devices help little, others get them. A job that runs keeps what it needs at least: starting again would cost more.
"""

from __future__ import annotations

import numpy as np

from vnode.cluster.jobs import Jobs
from vnode.cluster.policies.increments import concave, top_up


def shortest_remaining(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """Devices where they speed up most what ends soonest."""
    base, most = np.where(jobs.runs, jobs.minimum, 0), jobs.demand.copy()
    gains, order = gains_by_remaining(jobs, devices), by_remaining(jobs, devices)
    while True:
        shares = top_up(gains, base, most, devices, order)
        short = (shares > 0) & (shares < jobs.minimum)
        if not short.any():
            return shares
        first = int(order[short[order]][0])  # it has what it needs at least, or nothing
        if base.sum() + jobs.minimum[first] <= devices:
            base[first] = jobs.minimum[first]
        else:
            most[first] = 0


def gains_by_remaining(jobs: Jobs, devices: int) -> np.ndarray:
    """The gain of each job by its n-th device, ``[jobs, counts]``."""
    full = speed_at_demand(jobs, devices)
    return jobs.from_curves(gains_of) / (full * np.sqrt(np.maximum(jobs.remaining / full, TINY)))[:, None]


def gains_of(curves: np.ndarray) -> np.ndarray:
    """By how much the n-th device makes a job faster, on the concave hull from no device on."""
    shifted = np.concatenate([np.zeros((len(curves), 1)), curves], axis=1)
    gains = np.zeros_like(curves)
    gains[:, 1:] = np.diff(concave(shifted)[:, 1:], axis=1)
    return gains


def by_remaining(jobs: Jobs, devices: int) -> np.ndarray:
    """Indices of jobs in rising time that they would still take, then by arrival and name."""
    return np.lexsort((jobs.rank, jobs.remaining / speed_at_demand(jobs, devices)))


def speed_at_demand(jobs: Jobs, devices: int) -> np.ndarray:
    """The speed of each job on all that it demands, or on all that there are; the best below where that is 0."""
    best, count = jobs.from_curves(best_below), np.minimum(jobs.demand, devices)
    return np.maximum(best[np.arange(len(jobs)), count], TINY)


def best_below(curves: np.ndarray) -> np.ndarray:
    """The best speed on at most so many devices."""
    return np.maximum.accumulate(curves, axis=1)


TINY = 1e-12
