"""A problem -> its best assignment, and a proof of how far any other can be below it.

Knows problems, elimination and integer programs. Must not know equations or machines.

Elimination finds the best assignment without a memory limit. If it does not fit, its cost is a lower bound, and an
integer program finds the best assignment that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

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
) -> Solution:
    """Finds the best assignment, or a good one with a bound on its distance from the best.

    Args:
      problem: the problem.
      gap: the search ends when the solution's gap is this or less; 0 for the best assignment.
      budget: seconds after which the search ends with the best assignment so far.
      candidates: assignments; the result is not worse than any of them that fits.

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
        try:
            ended = best_within(problem, watch, max(gap, PROVEN))
        except BudgetSpent:
            ended = f"budget of {budget:g} s spent"
        if watch.best is not None and watch.cost - watch.lower_bound <= 4 * PROVEN * watch.cost:
            watch.lower_bound = watch.cost  # they differ by rounding
        return ended

    return run_search(problem, "exact", body, candidates=candidates, budget=budget)


class BudgetSpent(Exception):
    """The budget is spent."""


def best_within(problem: Problem, watch: Watch, gap: float) -> str:
    """Offers better and better assignments until the gap is reached; returns how that was done."""

    def pause() -> None:
        if watch.left < 0:
            raise BudgetSpent

    def is_done(strategies: Array | None, bound: float) -> bool:
        watch.evaluations += 1
        watch.lower_bound = max(watch.lower_bound, bound)
        if strategies is not None:
            watch.offer(strategies)
        return math.isinf(bound) or watch.cost - watch.lower_bound <= gap * watch.cost < math.inf

    if problem.bounded:
        find_something_that_fits(problem, watch, pause)
    bound, chosen = Elimination(problem.sizes, problem.edges).least(problem.seconds, pause)
    if is_done(chosen, bound):
        return "elimination"
    if variables(problem) > VARIABLES:
        return f"an integer program of {variables(problem)} variables was not tried"
    scale = watch.cost if math.isfinite(watch.cost) else 1.0
    found = least_time(problem, scale, gap / 2, watch.left, pause)
    if not is_done(found.strategies, found.bound):
        pause()
    return "integer program"


def find_something_that_fits(problem: Problem, watch: Watch, pause: Callable[[], None]) -> None:
    """Offers any assignment that fits, unless one is known; raises if there is none."""
    watch.offer(np.array([held.sum(axis=0).argmin() for held in problem.memory], np.int64))
    if watch.best is not None:
        return
    found = least_memory(problem, watch.left, pause)
    if found.strategies is not None:
        watch.offer(found.strategies)
    if found.bound > problem.limit * (1 + SLACK) and watch.smallest < math.inf:
        raise problem.nothing_fits(watch.smallest)
