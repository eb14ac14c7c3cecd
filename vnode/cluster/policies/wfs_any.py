"""Elastic weighted fair sharing with any share: as VirtualFlow's, without powers of two.

Knows priorities, demands and the shares before. Must not know speeds, nor time. Needs nodes that are shared unevenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vnode.cluster.jobs import Jobs
from vnode.cluster.policies.increments import top_up
from vnode.cluster.policies.wfs import admitted


def wfs_any(now: float, jobs: Jobs, devices: int) -> np.ndarray:
    """Elastic weighted fair sharing with shares of any size; no running job is stopped."""
    return admitted(jobs, devices, weighted_shares)


def weighted_shares(priorities: Sequence[float], demands: Sequence[int], devices: int) -> list[int]:
    """Shares in proportion to priorities, at most the demands and at least 1, in whole devices.

    The next device goes to the job whose share is smallest for its priority, counted to the middle of that device
    (Webster's method of apportionment).

    Args:
      priorities: of the jobs, in the order of arrival.
      demands: the most that each may have.
      devices: at least as many as jobs.

    Example:
      >>> weighted_shares([1, 5, 10], [8, 8, 8], 8)
      [1, 2, 5]
    """
    if not len(demands):
        return []
    weight, most = np.array(priorities, float), np.array(demands)
    counts = np.arange(1, most.max() + 1)
    gains = np.concatenate([np.zeros((len(weight), 1)), weight[:, None] / (counts - 0.5)], axis=1)
    order = np.lexsort((np.arange(len(weight)), -weight))
    return top_up(gains, np.ones(len(weight), np.int64), most, devices, order).tolist()
