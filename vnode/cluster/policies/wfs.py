"""Elastic weighted fair sharing, as VirtualFlow published it: shares are powers of two, by priority.

Knows priorities, demands and the shares before. Must not know speeds, nor time.

The shares of jobs that run together (`fair_shares`), and who may join them (`admitted`): arXiv 2009.09523, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vnode.cluster.jobs import Jobs


def wfs(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """Elastic weighted fair sharing (VirtualFlow): powers of two, no running job is stopped."""
    return admitted(jobs, devices, fair_shares)


Shares = Callable[[Sequence[float], Sequence[int], int], list[int]]
"""``shares(priorities, demands, devices)`` of jobs in order of arrival, of which there are as many devices at least."""


def admitted(jobs: Jobs, devices: int, shares_of: Shares) -> np.ndarray:
    """Shares of those that run, and of those that wait and may join them, in falling priority.

    A job may join unless a running job of strictly higher priority would then have less than without it, or one of them
    less than it can use. The first that may not holds up all behind it.

    Args:
      jobs: all that are there.
      devices: how many there are.
      shares_of: the rule by which those that run together share.
    """
    priority, demand, before = jobs.priority.tolist(), jobs.demand.tolist(), jobs.share.tolist()
    minimum = jobs.minimum.tolist()
    running = [int(job) for job in np.argsort(jobs.rank) if before[job]]

    def shares(members: list[int]) -> dict[int, int]:
        members = sorted(members, key=lambda job: jobs.rank[job])
        found = shares_of([priority[job] for job in members], [demand[job] for job in members], devices)
        return dict(zip(members, found, strict=True))

    accepted = shares(running)
    for job in jobs.order.tolist():
        if before[job]:
            continue
        if len(running) >= devices:
            break
        trial = shares([*running, job])
        if any(priority[other] > priority[job] and trial[other] < accepted[other] for other in running):
            break
        if any(trial[member] < minimum[member] for member in trial):
            break
        running.append(job)
        accepted = trial
    result = np.zeros(len(jobs), np.int64)
    result[list(accepted)] = list(accepted.values())
    return result


def fair_shares(priorities: Sequence[float], demands: Sequence[int], devices: int) -> list[int]:
    """The shares of jobs that run together: at most their demands, at least 1, powers of two.

    Args:
      priorities: of the jobs, in the order of arrival.
      demands: powers of two.
      devices: at least as many as jobs.

    Example:
      >>> fair_shares([1, 5], [4, 2], 4)
      [2, 2]
      >>> fair_shares([1, 5, 10], [8, 8, 8], 8)
      [2, 2, 4]
    """
    shares, left = [0] * len(demands), devices
    unsettled = list(range(len(demands)))
    while unsettled:
        total = sum(priorities[job] for job in unsettled)
        for job in unsettled:
            shares[job] = 2 ** int(math.log2(max(1.0, left * priorities[job] / total)))
        halve(shares, unsettled, priorities, left)
        full = [job for job in unsettled if shares[job] >= demands[job]]
        for job in full:
            shares[job] = demands[job]
        left -= sum(shares[job] for job in full or unsettled)
        if not full:
            break
        unsettled = [job for job in unsettled if job not in full]
    for job in sorted(range(len(demands)), key=lambda job: -priorities[job]):
        while left >= shares[job] and 2 * shares[job] <= demands[job]:
            left -= shares[job]
            shares[job] *= 2
    return shares


def halve(shares: list[int], unsettled: list[int], priorities: Sequence[float], devices: int) -> None:
    """Halves shares, those of the lowest priority first, until there are enough devices."""
    rising = sorted(unsettled, key=lambda job: priorities[job])
    while sum(shares[job] for job in unsettled) > devices:
        job = next(job for job in rising if shares[job] > 1)
        shares[job] //= 2
