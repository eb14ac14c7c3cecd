"""A problem and a start -> a good assignment: FlexFlow's random walk, which changes one operator at a time.

Knows problems, and that costs may come from elsewhere. Must not know equations, machines or simulators.

Source: Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks" (SysML 2019), section 6,
Metropolis-Hastings. A random operator gets a random strategy; the change is accepted with probability
``min(1, exp(beta * (cost before - cost after)))``. There are several starts. A walk ends when the second half of it
found nothing better. Here `beta` counts shares of the start's cost, so it needs no unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.descent import descend_to_limit, excess
from vnode.partition.searches.problem import SLACK, Array, Cost, Problem
from vnode.partition.searches.solution import Solution, Watch, run_search

COLD = 20.0
"""The default of `beta`, per operator."""


@runtime_checkable
class Walk(Protocol):
    """The cost of an assignment, one change after another."""

    def start(self, strategies: Array) -> float:
        """Starts from an assignment; returns its seconds."""
        ...

    def changed(self, operator: int, strategy: int) -> float:
        """The seconds if one operator had another strategy."""
        ...

    def take(self) -> None:
        """Accepts the last change."""
        ...


class LocalCost:
    """The problem's own cost: a change updates the terms of one operator and its edges."""

    def __init__(self, problem: Problem) -> None:
        finite = [each[np.isfinite(each)].sum() for each in problem.seconds]
        finite += [edge.seconds[np.isfinite(edge.seconds)].max(initial=0) for edge in problem.edges]
        never = 1e3 * (sum(finite) + 1.0)  # costs more than any assignment, but finite
        self.seconds = [np.where(np.isfinite(s), s, never) for s in problem.seconds]
        self.near = [[(j, np.where(np.isfinite(m), m, never)) for j, m in each] for each in problem.neighbours]

    def start(self, strategies: Array) -> float:
        self.chosen = strategies.tolist()
        self.total = sum(float(s[c]) for s, c in zip(self.seconds, self.chosen, strict=True))
        pairs = ((m, i, j) for i, each in enumerate(self.near) for j, m in each if i < j)
        self.total += sum(float(m[self.chosen[i], self.chosen[j]]) for m, i, j in pairs)
        return self.total

    def changed(self, operator: int, strategy: int) -> float:
        chosen, before = self.chosen, self.chosen[operator]
        own = self.seconds[operator]
        total = self.total + float(own[strategy]) - float(own[before])
        for other, moved in self.near[operator]:
            total += float(moved[strategy, chosen[other]]) - float(moved[before, chosen[other]])
        self.last = operator, strategy, total
        return total

    def take(self) -> None:
        operator, strategy, self.total = self.last
        self.chosen[operator] = strategy


class FullCost:
    """A cost function that takes a whole assignment."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost

    def start(self, strategies: Array) -> float:
        self.chosen = strategies.copy()
        return self.cost(self.chosen)

    def changed(self, operator: int, strategy: int) -> float:
        self.last = self.chosen.copy()
        self.last[operator] = strategy
        return self.cost(self.last)

    def take(self) -> None:
        self.chosen = self.last


def walk_of(cost: Cost) -> Walk:
    """A cost that is asked for one change after another."""
    return cost if isinstance(cost, Walk) else FullCost(cost)


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
    progress: bool | None = None,
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
      cost: the seconds of an assignment, in place of the problem's sum; if it is a `Walk`, it is asked for changes.
      candidates: assignments; the result is not worse than any of them that fits. `starts` are among them.
      budget: seconds after which the search ends.
      progress: whether to show a bar; by default in notebooks and on terminals.

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
    generator = np.random.default_rng(seed)
    given = [problem.checked(each) for each in starts]
    of: Walk = LocalCost(problem) if cost is None else walk_of(cost)
    cold = COLD * max(problem.operators, 1) if beta is None else beta

    def body(watch: Watch) -> str:
        drawn = [generator.integers(0, problem.sizes) for _ in range(random_starts)]
        for start in [*given, *drawn]:
            if problem.bounded and not problem.fits(start):
                start = descend_to_limit(problem, start)
            if not walk_from(problem, of, start, cold, proposals, generator, watch):
                return f"budget of {budget:g} s spent"
        return ""

    everyone = [*candidates, *given]
    return run_search(problem, "Metropolis", body, candidates=everyone, cost=cost, budget=budget, progress=progress)


def walk_from(
    problem: Problem, of: Walk, start: Array, beta: float, proposals: int, generator: np.random.Generator, watch: Watch
) -> bool:
    """Runs one walk; returns whether it ended before the budget was spent."""
    movable = np.flatnonzero(np.asarray(problem.sizes) > 1)
    chosen, now = start.copy(), of.start(start)
    unit = now if now > 0 else 1.0
    used = problem.footprints(start[None])[0]
    limit = problem.limit * (1 + SLACK)
    above = float(excess(used, limit)) if problem.bounded else 0.0
    best, since = (now if not above else math.inf), 0
    kept = chosen.copy()
    if not above and problem.cost(chosen) < math.inf:
        watch.offer(chosen, now)
    for number in range(proposals if len(movable) else 0):
        if number % 1024 == 0:
            operators = movable[generator.integers(0, len(movable), 1024)].tolist()
            draws, chances = generator.random(1024).tolist(), np.log1p(-generator.random(1024)).tolist()
            watch.show()
            if watch.left < 0:
                break
        i = operators[number % 1024]
        before, n = int(chosen[i]), problem.sizes[i]
        s = int(draws[number % 1024] * (n - 1))
        s += s >= before  # skips the present strategy
        watch.evaluations += 1
        since += 1
        after, more = used, 0.0
        if problem.bounded:
            after = used + problem.memory[i][:, s] - problem.memory[i][:, before]
            more = float(excess(after, limit))
            if more > above:
                continue
        new = of.changed(i, s)
        if more < above or new <= now or chances[number % 1024] < beta * (now - new) / unit:
            of.take()
            chosen[i], now, used, above = s, new, after, more
            if not above and now < best:
                best, since, kept = now, 0, chosen.copy()
        if since > proposals // 2:
            break
    if best < math.inf and problem.cost(kept) < math.inf:
        watch.offer(kept, of.start(kept))
    return watch.left >= 0
