"""A search's function -> its solution; with the best so far, a budget, progress and interruption, as all searches have.

Knows problems. Must not know how any search goes about it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.problem import Array, Cost, Problem
from vnode.show.progress import Display, display

STEPS = 1000
"""Into how many parts a progress bar divides the budget."""


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A strategy for each operator.

    Attributes:
      strategies: int64 ``[operators]``.
      cost: seconds.
      lower_bound: seconds below which nothing can be; 0 where the search proves nothing.
      elapsed: seconds that the search took.
      evaluations: how many assignments, or changes of one, it looked at; for the exact search how many relaxed problems
        it solved.
      how: which search, and how it ended.
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
        """By which share of its cost the solution may be above the best that there is; 0 if it is the best."""
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
    """The best assignment that a search has come upon so far.

    Attributes:
      problem: what is searched.
      best: the best assignment that fits; None so far.
      cost: its cost; infinite so far.
      lower_bound: seconds below which nothing can be, as far as is known.
      evaluations: how many were looked at.
    """

    def __init__(self, problem: Problem, cost: Cost | None, budget: float, shown: Display) -> None:
        self.problem, self.budget, self.shown = problem, budget, shown
        self.of: Cost = cost or problem.cost
        self.best: Array | None = None
        self.cost = math.inf
        self.lower_bound = 0.0
        self.evaluations = 0
        self.smallest = math.inf  # footprint of all that were offered
        self.began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - self.elapsed

    def offer(self, strategies: Array, cost: float | None = None) -> None:
        """An assignment, and what it costs if that is known."""
        if self.problem.bounded:
            footprint = self.problem.footprint(strategies)
            self.smallest = min(self.smallest, footprint)
            if not self.problem.fits(strategies):
                return
        cost = self.of(strategies) if cost is None else cost
        if cost < self.cost:
            self.best, self.cost = np.array(strategies), cost
        self.show()

    def show(self) -> None:
        """Shows how far the search is."""
        if self.shown.due:
            done = min(self.elapsed / self.budget, 1.0) if math.isfinite(self.budget) else 0.0
            self.shown.update(round(STEPS * done), f"{self.cost:.4g} s, at least {self.lower_bound:.4g} s")


def run_search(
    problem: Problem,
    how: str,
    body: Callable[[Watch], str],
    *,
    candidates: Sequence[Sequence[int] | Array] = (),
    cost: Cost | None = None,
    budget: float = math.inf,
    progress: bool | None = None,
) -> Solution:
    """Runs a search.

    Args:
      problem: what is searched.
      how: which search.
      body: goes about it: offers what it finds, and says how it ended in a few words, or none.
      candidates: assignments that nothing given is worse than, as far as they fit.
      cost: what an assignment costs, if not the problem's sum.
      budget: seconds after which it ends.
      progress: a bar; by default in notebooks and on terminals.

    Returns:
      The best assignment. After Ctrl-C it is the best so far, if there is one.

    Raises:
      MemoryLimitError: nothing was found that fits.
      SearchError: a candidate is no assignment, or no assignment has a finite cost.
    """
    if not budget > 0:
        raise SearchError(f"budget: expected seconds, not {budget}")
    given = [problem.checked(each) for each in candidates]
    with contextlib.ExitStack() as stack:
        watch = Watch(problem, cost, budget, stack.enter_context(display(progress, 0, STEPS)))
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
        raise SearchError("every choice of strategies has an infinite cost: some edge allows no two strategies")
    return Solution(
        watch.best,
        watch.cost,
        min(watch.lower_bound, watch.cost),
        watch.elapsed,
        watch.evaluations,
        f"{how}, {end}" if end else how,
        problem.footprint(watch.best),
    )
