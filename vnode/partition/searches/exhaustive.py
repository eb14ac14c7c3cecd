"""A small problem -> its best assignment, found by costing every one; tests compare other searches with it.

Knows problems. Must not know any shortcut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.problem import Array, Cost, Problem
from vnode.partition.searches.solution import Solution, Watch, run_search

MOST = 20_000_000
"""The most assignments that are costed one by one."""

AT_ONCE = 65_536


def exhaustive(
    problem: Problem,
    *,
    cost: Cost | None = None,
    candidates: Sequence[Sequence[int] | Array] = (),
) -> Solution:
    """Costs every assignment and returns the best.

    Args:
      problem: a problem with at most `MOST` assignments.
      cost: the cost of an assignment; by default the problem's sum.
      candidates: assignments that are costed first.

    Returns:
      The best assignment; its lower bound is its cost.

    Raises:
      MemoryLimitError: no assignment fits.
      SearchError: there are too many assignments.

    Example:
      >>> solution = exhaustive(Problem((np.array([4.0, 2.0, 3.0]),)))
      >>> solution.strategies, solution.gap
      (array([1]), 0.0)
    """
    total = math.prod(problem.sizes)
    if total > MOST:
        raise SearchError(f"there are {total:.3g} assignments; at most {MOST:,} are looked at one by one")

    def body(watch: Watch) -> str:
        for first in range(0, total, AT_ONCE):
            numbers = np.arange(first, min(first + AT_ONCE, total))
            several = np.stack(np.unravel_index(numbers, problem.sizes), axis=1) if problem.operators else [[]]
            several = np.asarray(several, np.int64)
            watch.evaluations += len(several)
            if cost is not None:
                for each in several:
                    watch.offer(each)
                continue
            costs = problem.costs(several)
            if problem.bounded:
                most = problem.footprints(several).max(axis=1, initial=0)
                watch.offer(several[most.argmin()])
                costs = np.where(most <= problem.limit * (1 + 1e-9), costs, np.inf)
            best = int(costs.argmin())
            if costs[best] < np.inf:
                watch.offer(several[best])
        if watch.best is None and watch.smallest < math.inf and watch.smallest > problem.limit:
            raise problem.nothing_fits(watch.smallest)
        watch.lower_bound = watch.cost
        return ""

    return run_search(problem, "exhaustive", body, cost=cost, candidates=candidates)
