"""A problem -> an assignment by Tofu's search: devices are halved again and again, each time by a dynamic program.

Knows problems, elimination, and each strategy's part in each halving. Must not know equations or machines.

Source: Wang, Huang, Li, "Supporting very large models using automatic dataflow graph partitioning" (EuroSys 2019),
section 5. A step divides every operator among two groups of devices, and knows only the choices of earlier steps. Its
dynamic program is the elimination of operators. No step considers later ones, so the result need not be the best. Tofu
does not consider memory; here memory has a price, which rises until the result fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.elimination import Elimination
from vnode.partition.searches.problem import Array, Problem
from vnode.partition.searches.solution import Solution, Watch, run_search

RAISES = 40
"""The most doublings of the price of memory."""


def bisection(
    problem: Problem,
    steps: Sequence[Array],
    *,
    candidates: Sequence[Sequence[int] | Array] = (),
    budget: float = math.inf,
) -> Solution:
    """Chooses the division of every operator for each halving of the devices, one halving after another.

    Args:
      problem: the problem.
      steps: for each operator the action of its strategies at each step, int ``[strategies, steps]``; 0 if both halves
        of the devices do the same. Of strategies with equal rows, the cheaper one is taken.
      candidates: assignments; the result is not worse than any of them that fits.
      budget: seconds after which the search ends.

    Returns:
      The assignment found; its lower bound is 0.

    Raises:
      MemoryLimitError: the search found no assignment that fits.
      SearchError: `steps` does not fit the problem.

    Example:
      >>> times = np.array([8.0, 4.0, 4.0, 2.0])  # divided by no step, by one, by the other, by both
      >>> bisection(Problem((times,)), [np.array([[0, 0], [1, 0], [0, 1], [1, 1]])]).strategies
      array([3])
    """
    count = {np.shape(each)[1:] for each in steps}
    if [len(each) for each in steps] != list(problem.sizes) or len(count) > 1 or any(len(c) != 1 for c in count):
        raise SearchError("steps: expected the action of each strategy of each operator at every step")

    def body(watch: Watch) -> str:
        price = 0.0
        total = [held.sum(axis=0) for held in problem.memory]
        for _ in range(RAISES if problem.bounded else 1):
            times = [s + price * b for s, b in zip(problem.seconds, total, strict=True)]
            chosen = halved(problem, steps, times, watch)
            watch.offer(chosen)
            if problem.fits(chosen):
                break
            if watch.left < 0:
                return f"budget of {budget:g} s spent"
            first = problem.cost(chosen) / max(float(sum(b[s] for b, s in zip(total, chosen, strict=True))), 1e-300)
            price = 2 * price or (first if math.isfinite(first) else 1.0) / 64
        return ""

    return run_search(problem, "bisection", body, candidates=candidates, budget=budget)


def halved(problem: Problem, steps: Sequence[Array], times: Sequence[Array], watch: Watch) -> Array:
    """One strategy for each operator, chosen step after step."""
    number = np.shape(steps[0])[1] if steps else 0
    within = [np.arange(n) for n in problem.sizes]
    chosen = np.zeros(problem.operators, np.int64)
    for step in range(number):
        offered = [representatives(w, does, t, step) for w, does, t in zip(within, steps, times, strict=True)]
        rest = problem.restricted(offered)
        _, best = Elimination(rest.sizes, rest.edges).least([t[o] for t, o in zip(times, offered, strict=True)])
        chosen = np.array([o[b] for o, b in zip(offered, best, strict=True)], np.int64)
        within = [w[does[w, step] == does[c, step]] for w, does, c in zip(within, steps, chosen, strict=True)]
        watch.evaluations += 1
    return chosen


def representatives(within: Array, does: Array, times: Array, step: int) -> Array:
    """For each action at a step, the fastest strategy that takes it."""
    found = []
    for choice in np.unique(does[within, step]):
        having = within[does[within, step] == choice]
        later = (does[having, step + 1 :] != 0).sum(axis=1)
        found.append(having[np.lexsort((times[having], later))[0]])
    return np.array(found)
