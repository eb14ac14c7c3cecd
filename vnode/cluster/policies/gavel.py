"""Gavel's policies: time shares of jobs on kinds of devices, that know how fast a job is on each, or do not.

Knows speeds by kind, scales, weights and what remains. Must not know rounds.

Narayanan et al., Heterogeneity-aware cluster scheduling policies for deep learning workloads, OSDI 2020, section 4.
Each has two forms. The aware one reads speeds; the agnostic one takes all kinds for equally fast.

    max_min     the least throughput, as a part of that at a proportional share of all kinds, is the largest
    ftf         the largest ratio of the time to the end to that at an equal part of the cluster is the smallest
    makespan    all jobs end as soon as they can end together
    fifo        jobs in the order of arrival, each on one kind
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vnode.cluster.kind_jobs import MixedJobs
from vnode.cluster.policies.time_shares import largest_least_level

Allocation = Callable[[MixedJobs], np.ndarray]
"""``allocate(jobs) -> x``: ``[jobs, kinds]`` parts of the time."""

PRECISION = 1e-7
"""Relative, of the ratio that finish-time fairness searches."""


def max_min(jobs: MixedJobs, aware: bool) -> np.ndarray:
    """Largest least throughput, relative to a proportional share, for each device and weight."""
    speed = jobs.speed if aware else np.ones_like(jobs.speed)
    return largest_least_level(max_min_levels(jobs, speed), jobs.scale, jobs.devices)[0]


def max_min_levels(jobs: MixedJobs, speed: np.ndarray) -> np.ndarray:
    """By how much each job's level rises with its time on a kind."""
    proportional = speed @ (jobs.devices / jobs.devices.sum())
    return speed * (jobs.scale / jobs.priority / proportional)[:, None]


def makespan(jobs: MixedJobs, aware: bool) -> np.ndarray:
    """All jobs end as soon as they can end together."""
    return largest_least_level(known_speeds(jobs, aware) / jobs.remaining[:, None], jobs.scale, jobs.devices)[0]


def finish_time_fairness(jobs: MixedJobs, aware: bool) -> np.ndarray:
    """Smallest largest ratio of a job's time from arrival to end to that at an equal part of the cluster."""
    speed = known_speeds(jobs, aware)
    alone = jobs.isolated + jobs.remaining / isolated_speed(jobs, speed)
    low, high = float((jobs.age / alone).max()), None
    ratio = max(2 * low, 1.0)
    best = None
    while high is None or high - low > PRECISION * high:
        needed = jobs.remaining / np.maximum(ratio * alone - jobs.age, 1e-12)  # units per second
        x, level = largest_least_level(speed / needed[:, None], jobs.scale, jobs.devices)
        if level >= 1:
            high, best = ratio, x
        else:
            low = ratio
        ratio = 2 * ratio if high is None else (low + high) / 2
    assert best is not None
    return best


def isolated_speed(jobs: MixedJobs, speed: np.ndarray) -> np.ndarray:
    """Units per second of each job at an equal part of every kind."""
    part = jobs.devices / (len(jobs) * jobs.scale[:, None])
    return (speed * part / np.maximum(part.sum(1, keepdims=True), 1.0)).sum(1)


def fifo(jobs: MixedJobs, aware: bool) -> np.ndarray:
    """Jobs in the order of arrival, each on the kind where it is fastest, or on the first that is free."""
    x, left = np.zeros_like(jobs.speed), jobs.devices.copy()
    for job in np.argsort(jobs.rank).tolist():
        fits = (left >= jobs.scale[job]) & (jobs.speed[job] > 0)
        if not fits.any():
            break
        stays = not aware and jobs.kind[job] >= 0 and fits[jobs.kind[job]]
        kind = int(jobs.kind[job]) if stays else int(np.argmax(np.where(fits, jobs.speed[job] if aware else 1.0, -1.0)))
        x[job, kind] = 1.0
        left[kind] -= jobs.scale[job]
    return x


def known_speeds(jobs: MixedJobs, aware: bool) -> np.ndarray:
    """Speeds; to those who do not tell kinds apart, that on the fastest kind everywhere."""
    return jobs.speed if aware else np.repeat(jobs.speed.max(1, keepdims=True), jobs.speed.shape[1], axis=1)


RULES = {"gavel_fifo": fifo, "gavel_max_min": max_min, "gavel_ftf": finish_time_fairness, "gavel_makespan": makespan}

NAMES = [name + form for name in RULES for form in ("", "_aware")]


def allocation(name: str) -> Allocation | None:
    """The policy of a name, ``_aware`` at its end for the form that reads speeds; None if there is none.

    >>> allocation("gavel_max_min_aware") is not None, allocation("fifo")
    (True, None)
    """
    aware = name.endswith("_aware")
    rule = RULES.get(name.removesuffix("_aware"))
    return None if rule is None else lambda jobs: rule(jobs, aware)
