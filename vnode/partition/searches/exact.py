"""A problem -> its best assignment, and a proof of how far any other can be below it.

Knows problems, elimination and integer programs. Must not know equations or machines.

Elimination finds the best assignment without a memory limit. If it does not fit, it is a lower bound, and the start of
a descent to an assignment that fits. Strategies are dropped that no better assignment can have, by the bound that
diffusion gives for each. An integer program solves the remaining problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vnode.partition.searches.descent import coordinate_descent, descend_to_limit
from vnode.partition.searches.diffusion import diffuse, least_more
from vnode.partition.searches.elimination import Elimination
from vnode.partition.searches.integer_program import least_memory, least_time, variables
from vnode.partition.searches.problem import SLACK, Array, Problem
from vnode.partition.searches.solution import Solution, Watch, run_search

PROVEN = 1e-9
"""A relative gap that is only rounding."""

VARIABLES = 1_500_000
"""The most variables of an integer program."""


def exact(
    problem: Problem,
    *,
    gap: float = 0.0,
    budget: float = 60.0,
    candidates: Sequence[Sequence[int] | Array] = (),
    progress: bool | None = None,
) -> Solution:
    """Finds the best assignment, or a good one with a bound on its distance from the best.

    Args:
      problem: the problem.
      gap: the search ends when the solution's gap is this or less; 0 for the best assignment.
      budget: seconds after which the search ends with the best assignment so far.
      candidates: assignments; the result is not worse than any of them that fits.
      progress: whether to show a bar; by default in notebooks and on terminals.

    Returns:
      The best assignment, with its lower bound.

    Raises:
      MemoryLimitError: no assignment fits; the message says by how much.
      SearchError: no assignment has a finite cost.

    Example:
      >>> from vnode.partition.searches.problem import Edge
      >>> move = np.array([[0.0, 3.0], [3.0, 0.0]])
      >>> times, held = np.array([4.0, 2.0]), np.array([[1.0, 2.0]])
      >>> problem = Problem((times, times), (Edge(0, 1, move),), (held, held), limit=3.0)
      >>> solution = exact(problem)  # both as strategy 1 would take 4 bytes
      >>> solution.strategies, solution.cost, solution.gap
      (array([0, 0]), 8.0, 0.0)
    """

    def body(watch: Watch) -> str:
        ended = _Exact(problem, watch, max(gap, PROVEN)).run()
        if watch.best is not None and watch.cost - watch.lower_bound <= 4 * PROVEN * watch.cost:
            watch.lower_bound = watch.cost  # they differ by rounding
        return ended

    return run_search(problem, "exact", body, candidates=candidates, budget=budget, progress=progress)


class BudgetSpent(Exception):
    """The budget is spent."""


class _Exact:
    """The state of one search."""

    def __init__(self, problem: Problem, watch: Watch, gap: float) -> None:
        self.problem, self.watch, self.gap = problem, watch, gap
        self.kept = undominated(problem)  # the strategies not yet dropped
        self.base = 0.0  # the remaining problem costs this much less than the whole problem
        self.floor = math.inf  # a lower bound for assignments with a dropped strategy

    def run(self) -> str:
        try:
            if self.problem.bounded:
                self.something_that_fits()
            rest = self.tightened()
            if self.done or rest is None:
                return "bound by diffusion"
            value, chosen = Elimination(rest.sizes, rest.edges).least(rest.seconds, self.pause)
            self.watch.evaluations += 1
            self.bound(self.base + value)
            self.offer(chosen)
            if self.done or math.isinf(self.watch.lower_bound):
                return "elimination"
            if self.tightened() is None or self.done:
                return "bound by diffusion"
            return self.integer_program()
        except BudgetSpent:
            return f"budget of {self.watch.budget:g} s spent"

    @property
    def done(self) -> bool:
        best, bound = self.watch.cost, self.watch.lower_bound
        return math.isfinite(best) and best - bound <= self.gap * best

    def pause(self) -> None:
        self.watch.show()
        if self.watch.left < 0:
            raise BudgetSpent

    def bound(self, value: float) -> None:
        """Records a lower bound for the assignments of the remaining problem."""
        self.watch.lower_bound = max(self.watch.lower_bound, min(value, self.floor))

    def offer(self, strategies: Array) -> None:
        """Offers an assignment of the remaining problem, and quick improvements of it."""
        chosen = np.array([kept[s] for kept, s in zip(self.kept, strategies, strict=True)], np.int64)
        self.watch.offer(chosen)
        if not self.problem.bounded:
            self.watch.offer(coordinate_descent(self.problem, chosen))
        elif not self.problem.fits(chosen):
            chosen = coordinate_descent(self.problem, descend_to_limit(self.problem, chosen))
            self.watch.offer(chosen)

    def something_that_fits(self) -> None:
        """Finds any assignment that fits, or proves that there is none."""
        leanest = np.array([held.sum(axis=0).argmin() for held in self.problem.memory], np.int64)
        self.watch.offer(leanest)
        if self.watch.best is not None:
            return
        found = least_memory(self.problem, self.watch.left, self.pause)
        if found.strategies is not None:
            self.watch.offer(found.strategies)
        if found.bound > self.problem.limit * (1 + SLACK) and self.watch.smallest < math.inf:
            raise self.problem.nothing_fits(self.watch.smallest)

    def tightened(self) -> Problem | None:
        """The remaining problem, less `base`, without strategies that cannot be better; None if none is left."""
        self.base, rest = diffuse(self.problem.restricted(self.kept), self.pause)
        self.bound(self.base)
        if not rest.bounded:
            self.offer(coordinate_descent(rest, np.array([s.argmin() for s in least_more(rest)], np.int64)))
        if self.watch.best is None or self.done:
            return rest
        enough = self.watch.cost * (1 - self.gap)
        self.floor = min(self.floor, enough)
        good = [np.flatnonzero(self.base + more < enough) for more in least_more(rest)]
        if not all(map(len, good)):
            self.bound(self.floor)
            return None
        self.kept = [kept[k] for kept, k in zip(self.kept, good, strict=True)]
        return rest.restricted(good)

    def integer_program(self) -> str:
        """Solves the remaining problem as an integer program."""
        rest = self.problem.restricted(self.kept)
        if variables(rest) > VARIABLES:
            return f"an integer program of {variables(rest)} variables was not tried"
        scale = self.watch.cost if math.isfinite(self.watch.cost) else 1.0
        found = least_time(rest, scale, self.gap / 2, self.watch.left, self.pause)
        self.watch.evaluations += 1
        if found.strategies is not None:
            self.offer(found.strategies)
        self.bound(found.bound)
        if self.watch.left < 0 and not self.done:
            raise BudgetSpent
        return "integer program"


def undominated(problem: Problem) -> list[Array]:
    """The strategies of each operator, without those that another equals or beats in time, memory and all edges."""
    kept = []
    for i, seconds in enumerate(problem.seconds):
        columns = [seconds[None], problem.memory[i], *(moved.T for _, moved in problem.neighbours[i])]
        every = np.concatenate(columns)  # [compared figure, strategy]
        keep = np.ones(len(seconds), bool)
        for s in np.argsort(every[0], kind="stable"):
            if not keep[s]:
                continue
            worse = (every >= every[:, s, None]).all(axis=0)
            keep &= ~worse | (np.arange(len(keep)) == s)
        kept.append(np.flatnonzero(keep))
    return kept
