"""A search's function -> its solution; gives every search a best so far, a budget and interruption.

Knows problems. Must not know how any search works.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.problem import Array, Cost, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A strategy for each operator.

    Attributes:
      strategies: int64 ``[operators]``.
      cost: seconds.
      lower_bound: no assignment costs less; 0 where the search proves nothing. Seconds.
      elapsed: seconds that the search took.
      evaluations: how many assignments, or changes of one, the search costed; for the exact search the number of
        relaxed problems that it solved.
      how: the search's name, and how it ended.
      footprint: the most bytes at any point.
    """

    strategies: Array
    cost: float
    lower_bound: float
    elapsed: float
    evaluations: int
    how: str
    footprint: float = 0.0

    @property
    def gap(self) -> float:
        """The share of its cost by which the solution may be above the best; 0 if it is the best."""
        return max(0.0, 1 - self.lower_bound / self.cost) if self.cost > 0 else 0.0

    @property
    def cut_short(self) -> bool:
        """Whether the search ended because its budget was spent."""
        return self.how.endswith("spent")

    @property
    def interrupted(self) -> bool:
        """Whether the search was stopped by Ctrl-C."""
        return self.how.endswith("interrupted")


class Watch:
    """The best assignment that a search has found so far.

    Attributes:
      problem: the problem.
      best: the best assignment that fits; None before the first.
      cost: its cost; infinite before the first.
      lower_bound: the best known lower bound of the cost, seconds.
      evaluations: the number of assignments costed.
    """

    def __init__(self, problem: Problem, cost: Cost | None, budget: float) -> None:
        self.problem, self.budget = problem, budget
        self.of: Cost = cost or problem.cost
        self.best: Array | None = None
        self.cost = math.inf
        self.lower_bound = 0.0
        self.evaluations = 0
        self.smallest = math.inf  # the smallest footprint of all offered assignments
        self.began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - self.elapsed

    def offer(self, strategies: Array, cost: float | None = None) -> None:
        """Offers an assignment, with its cost if that is known."""
        if self.problem.bounded:
            footprint = self.problem.footprint(strategies)
            self.smallest = min(self.smallest, footprint)
            if not self.problem.fits(strategies):
                return
        cost = self.of(strategies) if cost is None else cost
        if cost < self.cost:
            self.best, self.cost = np.array(strategies), cost


def run_search(
    problem: Problem,
    how: str,
    body: Callable[[Watch], str],
    *,
    candidates: Sequence[Sequence[int] | Array] = (),
    cost: Cost | None = None,
    budget: float = math.inf,
) -> Solution:
    """Runs a search.

    Args:
      problem: the problem.
      how: the search's name.
      body: the search itself: offers assignments, and returns how it ended in a few words, or none.
      candidates: assignments; the result is not worse than any of them that fits.
      cost: the cost of an assignment; by default the problem's sum.
      budget: seconds after which the search ends.

    Returns:
      The best assignment. After Ctrl-C it is the best so far, if there is one.

    Raises:
      MemoryLimitError: the search found no assignment that fits.
      SearchError: a candidate is no assignment, or no assignment has a finite cost.
    """
    if not budget > 0:
        raise SearchError(f"budget: expected seconds, not {budget}")
    given = [problem.checked(each) for each in candidates]
    watch = Watch(problem, cost, budget)
    try:
        for each in given:
            watch.offer(each)
        end = body(watch)
    except KeyboardInterrupt:
        if watch.best is None:
            raise
        end = "interrupted"
    if watch.best is None:
        if watch.smallest < math.inf:
            raise problem.nothing_fits(watch.smallest, proven=False)
        raise SearchError("every assignment has an infinite cost: some edge has no possible pair of strategies")
    return Solution(
        watch.best,
        watch.cost,
        min(watch.lower_bound, watch.cost),
        watch.elapsed,
        watch.evaluations,
        f"{how}, {end}" if end else how,
        problem.footprint(watch.best),
    )
