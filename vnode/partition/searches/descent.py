"""An assignment -> a better one, or one that fits: one operator changes its strategy at a time.

Knows problems. Must not know where assignments come from.
"""

from __future__ import annotations

import numpy as np

from vnode.partition.searches.problem import SLACK, Array, Problem

SWEEPS = 20
"""The most sweeps over all operators."""


def descend_to_limit(problem: Problem, strategies: Array) -> Array:
    """Changes strategies until the assignment fits: each time the change that costs least per byte saved.

    Args:
      problem: a problem with a memory limit.
      strategies: int64 ``[operators]``.

    Returns:
      The changed assignment. It may still not fit.
    """
    chosen = strategies.copy()
    limit = problem.limit * (1 + SLACK)
    used = problem.footprints(chosen[None])[0]
    for _ in range(SWEEPS):
        if (used <= limit).all():
            break
        above, found = excess(used, limit), []
        for i, held in enumerate(problem.memory):
            saved = above - excess(used[:, None] + held - held[:, chosen[i], None], limit)
            if saved.max(initial=0) <= 0:
                continue
            times = problem.marginal(i, chosen)
            with np.errstate(divide="ignore", invalid="ignore"):
                price = np.where(saved > 0, (times - times[chosen[i]]) / saved, np.inf)
            s = int(np.nan_to_num(price, nan=np.inf).argmin())
            found.append((price[s] if price[s] >= 0 else price[s] * saved[s] ** 2, i, s))
        if not found:
            break
        for _, i, s in sorted(found):
            changed = used + problem.memory[i][:, s] - problem.memory[i][:, chosen[i]]
            if excess(changed, limit) < excess(used, limit):
                chosen[i], used = s, changed
            if (used <= limit).all():
                break
    return chosen


def excess(used: Array, limit: float) -> Array:
    """The bytes above the limit, summed over all points, of footprints ``[points, ...]``."""
    return np.maximum(used - limit, 0).sum(axis=0)


def coordinate_descent(problem: Problem, strategies: Array) -> Array:
    """Gives each operator in turn its best strategy, until none improves; what fits stays within the limit.

    Args:
      problem: with a memory limit or without.
      strategies: the start, int64 ``[operators]``.
    """
    chosen = strategies.copy()
    used = problem.footprints(chosen[None])[0] if problem.bounded else None
    for _ in range(SWEEPS):
        changed = False
        for i, held in enumerate(problem.memory):
            times = problem.marginal(i, chosen)
            if used is not None:
                after = used[:, None] + held - held[:, chosen[i], None]
                worse = (after > np.maximum(problem.limit, used)[:, None]).any(axis=0)
                times = np.where(worse, np.inf, times)
                s = int(times.argmin())
                if times[s] < times[chosen[i]]:
                    used = after[:, s]
            else:
                s = int(times.argmin())
            if times[s] < times[chosen[i]]:
                chosen[i], changed = s, True
        if not changed:
            break
    return chosen
