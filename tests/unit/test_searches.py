"""All searches against every assignment, looked at one by one."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.search.problems import by_hand, problems
from vnode.errors import MemoryLimitError, SearchError
from vnode.partition.searches import Edge, Problem, Solution, bisection, exact, exhaustive, metropolis
from vnode.partition.searches.elimination import Elimination

SEARCHES: dict[str, Callable[..., Solution]] = {
    "exact": exact,
    "exhaustive": exhaustive,
    "metropolis": lambda problem, **more: metropolis(problem, proposals=50, **more),
    "bisection": lambda problem, **more: bisection(problem, bits(problem), **more),
}


def bits(problem: Problem) -> list[Any]:
    """Strategies 0 to 3 as two steps."""
    return [np.array([[s // 2, s % 2] for s in range(n)]) for n in problem.sizes]


@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_exact_search_finds_the_best_and_proves_it(problem: Problem) -> None:
    best, _ = by_hand(problem)
    if math.isinf(best):
        with pytest.raises((MemoryLimitError, SearchError)):
            exact(problem)
        return
    found = exact(problem)
    assert found.cost == pytest.approx(best, abs=1e-9) and found.cost == problem.cost(found.strategies)
    assert found.gap == 0 and found.lower_bound == pytest.approx(best, abs=1e-9)
    assert problem.fits(found.strategies)


@given(problems())
@settings(max_examples=50, deadline=None)
def test_the_exhaustive_search_is_right(problem: Problem) -> None:
    best, _ = by_hand(problem)
    if math.isinf(best):
        with pytest.raises((MemoryLimitError, SearchError)):
            exhaustive(problem)
    else:
        found = exhaustive(problem)
        assert found.cost == best and found.gap == 0 and problem.fits(found.strategies)


@given(problems(infinite=False))
@settings(max_examples=60, deadline=None)
def test_what_does_not_fit_is_refused_with_the_smallest_footprint(problem: Problem) -> None:
    _, smallest = by_hand(problem)
    for limit in (smallest - 1, smallest):
        if limit < 0:
            continue
        limited = dataclasses.replace(problem, limit=limit)
        for search in (exact, exhaustive):
            if limit < smallest:
                with pytest.raises(MemoryLimitError, match=re.escape(f"{smallest:.6g} bytes, 1 too many")):
                    search(limited)
            else:
                assert search(limited).footprint <= smallest


@given(problems(), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_no_search_is_better_than_the_best(problem: Problem, seed: int) -> None:
    best, _ = by_hand(problem)
    for search in (SEARCHES["bisection"], lambda p: metropolis(p, proposals=50, seed=seed)):
        try:
            found = search(problem)
        except (MemoryLimitError, SearchError):
            continue
        assert found.cost >= best - 1e-9 and problem.fits(found.strategies) and found.lower_bound <= best
        assert found.cost == pytest.approx(problem.cost(found.strategies))


@pytest.mark.parametrize("name", SEARCHES)
@given(problem=problems(infinite=False), data=st.data())
@settings(max_examples=25, deadline=None)
def test_candidates_are_never_lost(name: str, problem: Problem, data: st.DataObject) -> None:
    candidate = [data.draw(st.integers(0, n - 1)) for n in problem.sizes]
    if problem.fits(candidate):
        assert SEARCHES[name](problem, candidates=[candidate]).cost <= problem.cost(candidate)


@given(problems(points=0, infinite=False), st.sampled_from([1, 8, 2_000_000]))
@settings(max_examples=60, deadline=None)
def test_elimination_bounds_the_least_cost(problem: Problem, entries: int) -> None:
    """With full tables it is the least cost; with tables that are too small, and divided, a lower bound."""
    best, _ = by_hand(problem)
    elimination = Elimination(problem.sizes, problem.edges, entries)
    bound, chosen = elimination.least(problem.seconds)
    assert bound <= best + 1e-9
    if elimination.exact:
        assert bound == pytest.approx(best) == problem.cost(chosen)


@given(problems(infinite=False), st.data())
@settings(max_examples=40, deadline=None)
def test_tied_operators_cost_what_they_cost_apart(problem: Problem, data: st.DataObject) -> None:
    labels = [data.draw(st.integers(0, 2)) for _ in problem.sizes]
    keys = sorted({(label, n) for label, n in zip(labels, problem.sizes, strict=True)})
    groups = [keys.index(key) for key in zip(labels, problem.sizes, strict=True)]
    tied = problem.tied(groups)
    chosen = [data.draw(st.integers(0, n - 1)) for n in tied.sizes]
    apart = [chosen[g] for g in groups]
    assert tied.cost(chosen) == problem.cost(apart) and tied.footprint(chosen) == problem.footprint(apart)


def chain(length: int = 12, size: int = 4, points: int = 0) -> Problem:
    generator = np.random.default_rng(3)
    edges = tuple(Edge(i, i + 1, generator.random((size, size))) for i in range(length - 1))
    memory = tuple(generator.random((points, size)) for _ in range(length)) if points else ()
    return Problem(tuple(generator.random(size) for _ in range(length)), edges, memory)


def test_a_walk_repeats_with_its_seed_and_takes_another_cost() -> None:
    problem = chain()
    first, again = (metropolis(problem, proposals=300, seed=5) for _ in range(2))
    assert (first.strategies == again.strategies).all() and first.evaluations == again.evaluations
    target = np.arange(12) % 4  # a cost that is not a sum over the problem's arrays
    found = metropolis(problem, proposals=4000, beta=50.0, cost=lambda s: 1.0 + float((s != target).sum()))
    assert found.cost == 1 and (found.strategies == target).all()


def test_a_walk_from_the_best_stays_there() -> None:
    best = exact(chain())
    assert metropolis(chain(), starts=[best.strategies], random_starts=0, proposals=500).cost == pytest.approx(
        best.cost
    )


def test_a_greedy_walk_only_descends() -> None:
    seen: list[float] = []
    problem = chain()

    def cost(strategies: Any) -> float:
        seen.append(problem.cost(strategies))
        return seen[-1]

    found = metropolis(problem, proposals=300, beta=math.inf, cost=cost, random_starts=1)
    assert found.cost == min(seen)


def test_a_chain_halved_without_memory_is_halved_best() -> None:
    """With one step there is nothing that later steps could regret: the dynamic program is exact."""
    problem = chain()
    single = [np.arange(4)[:, None]] * 12
    assert bisection(problem, single).cost == pytest.approx(exact(problem).cost)


def test_steps_do_not_foresee_later_ones() -> None:
    """What the first halving likes best may spoil the second: Tofu's search is not exact, by its nature."""
    times = np.array([10.0, 5.0, 6.0, 5.0, 1.0])
    steps = [np.array([[0, 0], [1, 0], [2, 0], [1, 1], [2, 1]])]
    assert bisection(Problem((times,)), steps).cost == 5 and exact(Problem((times,))).cost == 1


@pytest.mark.parametrize("name", SEARCHES)
def test_an_interrupted_search_gives_the_best_so_far(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(6, points=1)
    problem = dataclasses.replace(problem, limit=float(problem.most[0] * 0.6))
    candidate = np.array([held[0].argmin() for held in problem.memory])
    real, calls = Problem.footprint, []

    def interrupted(self: Problem, strategies: Any) -> float:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, strategies)

    monkeypatch.setattr(Problem, "footprint", interrupted)
    found = SEARCHES[name](problem, candidates=[candidate])
    assert found.interrupted and found.cost <= problem.cost(candidate)


def test_an_interruption_without_anything_found_is_passed_on() -> None:
    def cost(_: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        metropolis(chain(), cost=cost)


def test_a_spent_budget_leaves_a_bound() -> None:
    problem = chain(40, 8, points=3)
    problem = dataclasses.replace(problem, limit=float(problem.most.max() * 0.45))
    found = exact(problem, budget=1e-9)
    assert "budget" in found.how and found.lower_bound <= found.cost and problem.fits(found.strategies)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Problem((np.array([-1.0]),)), r"seconds\[0\]"),
        (lambda: Problem((np.zeros((2, 2)),)), r"seconds\[0\]"),
        (lambda: Problem((np.zeros(2),), (Edge(0, 1, np.zeros((2, 2))),)), "no operator 1"),
        (lambda: Problem((np.zeros(2),) * 2, (Edge(0, 1, np.zeros((2, 3))),)), r"edges\[0\]"),
        (lambda: Problem((np.zeros(2),), (), (np.full((1, 2), np.nan),)), r"memory\[0\]"),
        (lambda: Problem((np.zeros(2),), limit=math.nan), "limit"),
        (lambda: exact(chain(), budget=0), "budget"),
        (lambda: exact(chain(), candidates=[[0]]), "each of 12 operators"),
        (lambda: exact(chain(), candidates=[[4] * 12]), "strategies 0 to 3, not 4"),
        (lambda: exhaustive(chain(40)), "assignments"),
        (lambda: metropolis(chain(), proposals=-1), "proposals"),
        (lambda: bisection(chain(), [np.zeros((4, 1), int)]), "steps"),
        (lambda: chain().tied([0] * 11), "groups"),
        (lambda: Problem((np.zeros(2), np.zeros(3))).tied([0, 0]), "equally many"),
        (lambda: exact(Problem((np.array([np.inf]),))), "infinite"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(SearchError, match=says):
        make()
