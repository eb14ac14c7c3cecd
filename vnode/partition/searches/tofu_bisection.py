"""Tofu's search: devices are halved again and again, and for each halving a dynamic program divides every operator.

Knows problems, elimination, and what each strategy does at each halving. Must not know equations or machines.

Source: Wang, Huang, Li, "Supporting very large models using automatic dataflow graph partitioning" (EuroSys 2019),
section 5: a step divides every operator among two groups of devices, all that is known being what earlier steps chose;
the program goes through the operators in order, with the choices of those that still have readers as its state.
Later steps are not thought of, so the result need not be the best. Memory is not in it either; here it gets a price,
which is raised until the result fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.elimination import Elimination
from vnode.partition.searches.problem import Array, Problem
from vnode.partition.searches.solution import Solution, Watch, run_search

STATES = 2_000_000
"""Of the dynamic program at a time; beyond it operators' readers choose for themselves."""

RAISES = 40
"""How often the price of memory is doubled at most."""


def bisection(
    problem: Problem,
    steps: Sequence[Array],
    *,
    candidates: Sequence[Sequence[int] | Array] = (),
    budget: float = math.inf,
    progress: bool | None = None,
) -> Solution:
    """Chooses what each halving of the devices divides, one halving after another.

    Args:
      problem: its operators in the order of the program.
      steps: for each operator what its strategies do at each step, int ``[strategies, steps]``; 0 for nothing: both
        halves of the devices do the same. Equal rows mean the cheaper strategy.
      candidates: assignments that the result is not worse than, as far as they fit.
      budget: seconds after which it ends.
      progress: a bar; by default in notebooks and on terminals.

    Returns:
      What was found; it proves nothing.

    Raises:
      MemoryLimitError: nothing was found that fits.
      SearchError: `steps` does not fit the problem.

    Example:
      >>> times = np.array([8.0, 4.0, 4.0, 2.0])  # nothing, one step, the other, both
      >>> bisection(Problem((times,)), [np.array([[0, 0], [1, 0], [0, 1], [1, 1]])]).strategies
      array([3])
    """
    count = {np.shape(each)[1:] for each in steps}
    if [len(each) for each in steps] != list(problem.sizes) or len(count) > 1 or any(len(c) != 1 for c in count):
        raise SearchError("steps: expected what each strategy of each operator does at every step")

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

    return run_search(problem, "bisection", body, candidates=candidates, budget=budget, progress=progress)


def halved(problem: Problem, steps: Sequence[Array], times: Sequence[Array], watch: Watch) -> Array:
    """One strategy for each operator, by one step after another."""
    number = np.shape(steps[0])[1] if steps else 0
    within = [np.arange(n) for n in problem.sizes]
    order = range(problem.operators)
    chosen = np.zeros(problem.operators, np.int64)
    for step in range(number):
        offered = [representatives(w, does, t, step) for w, does, t in zip(within, steps, times, strict=True)]
        rest = problem.restricted(offered)
        elimination = Elimination(rest.sizes, rest.edges, STATES, order)
        _, best = elimination.least([t[o] for t, o in zip(times, offered, strict=True)], watch.show)
        chosen = np.array([o[b] for o, b in zip(offered, best, strict=True)], np.int64)
        within = [w[does[w, step] == does[c, step]] for w, does, c in zip(within, steps, chosen, strict=True)]
        watch.evaluations += 1
    return chosen


def representatives(within: Array, does: Array, times: Array, step: int) -> Array:
    """For each thing that can be done at a step, the strategy that does it and then least."""
    found = []
    for choice in np.unique(does[within, step]):
        having = within[does[within, step] == choice]
        later = (does[having, step + 1 :] != 0).sum(axis=1)
        found.append(having[np.lexsort((times[having], later))[0]])
    return np.array(found)
