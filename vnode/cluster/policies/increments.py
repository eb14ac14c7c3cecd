"""Hands out devices one by one to whoever gains most by the next one, all at once.

Knows tables of gains. Must not know why a device is worth it.

A job's gains fall with each device that it has: they are those of the concave hull of its values, so that a job whose
speed rises at 4 devices and not at 3 is given the fourth for the mean of both. Then the devices that are given one by
one to the largest gain are the largest gains of all, and no loop is needed.

    top_up(gains, base=[1, 1, 0], devices=8)   ->   [5, 2, 1]
"""

from __future__ import annotations

import numpy as np

from vnode.cluster.jobs import Jobs


def top_up(gains: np.ndarray, base: np.ndarray, most: np.ndarray, devices: int, order: np.ndarray) -> np.ndarray:
    """Devices of each job after the rest of them was handed out.

    Args:
      gains: ``[jobs, counts]`` gain by the n-th device at index n; falling in n from `base` on. A device without a gain
        is not given.
      base: devices that each has already.
      most: devices that each may have.
      devices: how many there are.
      order: indices; equal gains go to who comes first there.

    Example:
      >>> halves = np.array([[0, 8, 4, 2, 1], [0, 3, 3, 3, 3]])
      >>> top_up(halves, np.array([0, 0]), np.array([4, 4]), 4, np.array([0, 1])).tolist()
      [2, 2]
    """
    left = devices - int(base.sum())
    if left <= 0 or not len(base):
        return base
    counts = np.arange(gains.shape[1])
    open_ = (counts > base[:, None]) & (counts <= most[:, None]) & (gains > 0)
    if int(open_.sum()) <= left:
        return base + open_.sum(1)
    gains = np.where(open_, gains, -np.inf)
    least = np.partition(gains.ravel(), gains.size - left)[gains.size - left]
    above, equal = gains > least, gains == least
    shares = base + above.sum(1)
    left -= int(above.sum())
    for job in order[equal.sum(1)[order] > 0].tolist():
        taken = min(left, int(equal[job].sum()))
        shares[job] += taken
        left -= taken
        if not left:
            break
    return shares


def concave(values: np.ndarray) -> np.ndarray:
    """The least concave function above values at 1, 2, ... devices; that at 0 stays.

    Args:
      values: ``[rows, counts]`` by count of devices, from 0 on.

    Example:
      >>> concave(np.array([[0.0, 1.0, 1.0, 1.0, 4.0]])).tolist()
      [[0.0, 1.0, 2.0, 3.0, 4.0]]
    """
    result = values.copy()
    for row, found in zip(result, values, strict=True):
        corners: list[int] = []
        for n in range(1, len(found)):
            while len(corners) > 1 and is_below(found, corners[-2], corners[-1], n):
                corners.pop()
            corners.append(n)
        row[1:] = np.interp(np.arange(1, len(found)), corners, found[corners])
    return result


def is_below(values: np.ndarray, first: int, middle: int, last: int) -> bool:
    """Whether a value is not above the line between two others."""
    rise = (values[last] - values[first]) * (middle - first)
    return bool((values[middle] - values[first]) * (last - first) <= rise)


def with_first(jobs: Jobs, devices: int, order: np.ndarray) -> np.ndarray:
    """The least devices that each job can use: for those that run, then for others in some order, while there are any.

    The first that needs more than there are holds up all behind it, so that it has its turn. Meanwhile the devices are
    for those that run.

    Args:
      jobs: all that are there.
      devices: how many there are.
      order: indices of jobs.
    """
    base = np.where(jobs.runs, jobs.minimum, 0)
    left = devices - int(base.sum())
    for job in order[~jobs.runs[order]].tolist():
        if jobs.minimum[job] > left:
            break
        base[job] = jobs.minimum[job]
        left -= int(jobs.minimum[job])
    return base
