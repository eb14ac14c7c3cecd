"""Static policies: a job gets all that it demands, or waits; nobody who runs is touched.

Knows the order in which jobs wait. Must not know time.

    fifo              in the order of arrival
    static            in falling priority; the first that does not fit holds up all behind it (VirtualFlow's baseline)
    static_backfill   in falling priority; whoever fits may begin
"""

from __future__ import annotations

import numpy as np

from vnode.cluster.jobs import Jobs


def fifo(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """Full demands in the order of arrival; the first job that does not fit holds up all behind it."""
    return full_demands(jobs, devices, np.argsort(jobs.rank), skips=False)


def static(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """Full demands in falling priority; the first job that does not fit holds up all behind it.

    VirtualFlow's baseline (arXiv 2009.09523, section 6.4): no preemption and no backfill.
    """
    return full_demands(jobs, devices, jobs.order, skips=False)


def static_backfill(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """Full demands in falling priority; a job that does not fit is passed over."""
    return full_demands(jobs, devices, jobs.order, skips=True)


def full_demands(jobs: Jobs, devices: int, order: np.ndarray, skips: bool) -> np.ndarray:
    """The shares of jobs that run, and full demands of those that wait, in some order, as far as there are devices.

    Args:
      jobs: all that are there.
      devices: how many there are.
      order: in which waiting jobs are looked at.
      skips: whether those behind a job that does not fit are looked at, too.
    """
    shares = jobs.share.copy()
    free = devices - int(shares.sum())
    for job in order[shares[order] == 0].tolist():
        if not free:
            break
        demand = min(int(jobs.demand[job]), devices)
        if demand <= free:
            shares[job] = demand
            free -= demand
        elif not skips:
            break
    return shares
