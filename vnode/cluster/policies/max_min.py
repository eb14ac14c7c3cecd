"""Max-min fairness: the job that is worst off, for its priority, is as well off as it can be; then the next one.

Knows speeds and priorities. Must not know how much work is left.

A job is as well off as its share of full speed (its speed over that with all demanded devices), over its priority.
"""

from __future__ import annotations

import numpy as np

from vnode.cluster.jobs import Jobs
from vnode.cluster.policies.increments import top_up, with_first
from vnode.cluster.policies.shortest_remaining import speed_at_demand


def max_min(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """The next device goes to who is worst off, of those that it makes faster."""
    base = with_first(jobs, devices, jobs.order)
    if not len(jobs):
        return base
    level = jobs.speed / (speed_at_demand(jobs, devices) * jobs.priority)[:, None]
    level = np.maximum.accumulate(level, axis=1)
    before = np.zeros_like(level)
    before[:, 1:] = level[:, :-1]
    rises = level[:, -1:] > before  # some further device makes it faster
    top = float(level.max()) + 1
    most = np.where(base > 0, jobs.demand, 0)
    return top_up(np.where(rises, top - before, 0), base, most, devices, jobs.order)
