"""Goodput: the shares of which the sum of the logarithms of all speeds is the largest.

Knows measured speeds. Must not know how much work is left.

The sum of logarithms is proportionally fair (Kelly, 1998): a device goes to the job that it makes faster by the largest
part. That is the objective of Pollux (OSDI 2021) without changes of the batch size, which would change the result.
"""

from __future__ import annotations

import numpy as np

from vnode.cluster.jobs import Jobs
from vnode.cluster.policies.increments import concave, top_up, with_first


def goodput(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """Largest sum of the logarithms of speeds; the first devices go to those that run, then by priority."""
    base = with_first(jobs, devices, jobs.order)
    most = np.where(base > 0, jobs.demand, 0)
    return top_up(jobs.from_curves(log_gains), base, most, devices, jobs.order)


def log_gains(curves: np.ndarray) -> np.ndarray:
    """By how much the logarithm of the speed rises with the n-th device, ``[curves, counts]``."""
    gains = np.zeros_like(curves)
    gains[:, 1:] = np.diff(concave(np.log(np.maximum(curves, TINY))), axis=1)
    return gains


TINY = 1e-300
"""Stands for the speed on no device, whose logarithm is no number."""
