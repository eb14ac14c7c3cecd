"""A problem and a start -> a good assignment: FlexFlow's random walk, which changes one operator at a time.

Knows problems, and that costs may come from elsewhere. Must not know equations, machines or simulators.

Source: Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks" (SysML 2019), section 6,
Metropolis-Hastings. A random operator gets a random strategy; the change is accepted with probability
``min(1, exp(beta * (cost before - cost after)))``. There are several starts. A walk ends when the second half of it
found nothing better. Here `beta` counts shares of the start's cost, so it needs no unit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.problem import SLACK, Array, Cost, Problem
from vnode.partition.searches.solution import Solution, Watch, run_search

COLD = 20.0
"""The default of `beta`, per operator."""


def metropolis(
    problem: Problem,
    *,
    starts: Sequence[Sequence[int] | Array] = (),
    random_starts: int = 1,
    proposals: int = 100_000,
    beta: float | None = None,
    seed: int = 0,
    cost: Cost | None = None,
    candidates: Sequence[Sequence[int] | Array] = (),
    budget: float = math.inf,
) -> Solution:
    """Walks through assignments at random, seldom to a worse one.

    Args:
      problem: the problem. With a memory limit, changes to an assignment that does not fit are refused.
      starts: assignments to start from: data parallel, an expert's split, another search's result.
      random_starts: the number of further starts, drawn at random.
      proposals: the most changes that each walk tries.
      beta: how seldom a change for the worse is accepted: one that costs a share x more than the walk's start is
        accepted with probability ``exp(-beta * x)``. By default 20 for each operator.
      seed: the seed of all random draws.
      cost: the seconds of an assignment, in place of the problem's sum.
      candidates: assignments; the result is not worse than any of them that fits. `starts` are among them.
      budget: seconds after which the search ends.

    Returns:
      The best assignment met; its lower bound is 0.

    Raises:
      MemoryLimitError: the search met no assignment that fits.
      SearchError: an argument makes no sense.

    Example:
      >>> metropolis(Problem((np.array([4.0, 2.0, 3.0]),)), proposals=100).strategies
      array([1])
    """
    if proposals < 0 or random_starts < 0 or (beta is not None and not beta >= 0):
        raise SearchError("proposals, random_starts and beta must be 0 or more")
    rng = random.Random(seed)
    given = [problem.checked(each) for each in starts]
    cold = COLD * max(problem.operators, 1) if beta is None else beta

    def body(watch: Watch) -> str:
        drawn = [np.array([rng.randrange(n) for n in problem.sizes], np.int64) for _ in range(random_starts)]
        for start in [*given, *drawn]:
            walk_from(problem, start, cold, proposals, rng, watch)
            if watch.left < 0:
                return f"budget of {budget:g} s spent"
        return ""

    everyone = [*candidates, *given]
    return run_search(problem, "Metropolis", body, candidates=everyone, cost=cost, budget=budget)


def walk_from(problem: Problem, start: Array, beta: float, proposals: int, rng: random.Random, watch: Watch) -> None:
    """Walks from one start, and offers each assignment that is the best so far and fits."""
    limit = problem.limit * (1 + SLACK)

    def excess(used: Array) -> float:
        return float(np.maximum(used - limit, 0).sum())

    movable = [i for i, n in enumerate(problem.sizes) if n > 1]
    chosen, now = start.copy(), watch.of(start)
    unit = now if 0 < now < math.inf else 1.0
    used = problem.footprints(start[None])[0]
    above, best, since = excess(used), math.inf, 0
    for _ in range(proposals + 1):
        if not above and now < best:
            best, since = now, 0
            watch.offer(chosen, now)
        since += 1
        if not movable or since > max(proposals // 2, 1) or watch.left < 0:
            break
        i = rng.choice(movable)
        s = (chosen[i] + rng.randrange(1, problem.sizes[i])) % problem.sizes[i]  # never the present strategy
        after = used + problem.memory[i][:, s] - problem.memory[i][:, chosen[i]]
        more = excess(after)
        if more > above:
            continue
        watch.evaluations += 1
        changed = chosen.copy()
        changed[i] = s
        new = watch.of(changed)
        if more < above or new <= now or rng.random() < math.exp(beta * (now - new) / unit):
            chosen, now, used, above = changed, new, after, more
