"""Simulated costs: of serial parts, and what a walk finds against every assignment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.partition.search.test_steps import once, possible
from vnode.analysis.program import inline
from vnode.partition.machine import Machine
from vnode.partition.searches import Estimate, as_problem, exact, exhaustive, metropolis
from vnode.partition.searches.simulated_cost import DEVICE, Simulated


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mlp", "attention", "layers", "recurrent", "branches"])
def test_tasks_are_what_the_problem_counts_and_overlap(name: str) -> None:
    """All tasks one after the other take the problem's cost; a timeline takes no longer, and its busiest no less."""
    search = once(name, 1e-3)
    simulated = Simulated(search)
    for seed in range(3):
        drawn = possible(search.problem, np.random.default_rng(seed))
        seconds, taken = simulated(drawn), simulated.taken(drawn)
        assert taken.sum() == pytest.approx(search.problem.cost(drawn), rel=1e-9)
        busy = np.bincount(simulated.resource, taken)
        assert busy[DEVICE] > 0 and busy.max() <= seconds * (1 + 1e-6)
        assert seconds <= taken.sum() * (1 + 1e-6)


@pytest.mark.parametrize("name", ["mlp", "layers", "recurrent"])
def test_an_assignment_is_impossible_where_the_problem_says_so(name: str) -> None:
    search = once(name, 1e-3)
    simulated, generator = Simulated(search), np.random.default_rng(5)
    drawn = [generator.integers(0, search.problem.sizes) for _ in range(20)] + [possible(search.problem, generator)]
    finite = [np.isfinite(search.problem.cost(each)) for each in drawn]
    assert [np.isfinite(simulated(each)) for each in drawn] == finite and any(finite)


@pytest.mark.sampled(1, thorough=2)
@pytest.mark.parametrize("name", ["attention", "layers", "recurrent"])
def test_a_change_takes_the_time_of_a_full_simulation(name: str) -> None:
    """FlexFlow's delta simulation: from the first changed task on, the same times to the picosecond."""
    search = once(name, 1e-3)
    walk, generator = Simulated(search), np.random.default_rng(7)
    chosen = possible(search.problem, generator)
    assert walk(chosen) == Simulated(search)(chosen)
    finite = 0
    for number in range(40):
        operator = int(generator.integers(search.problem.operators))
        changed = chosen.copy()
        changed[operator] = generator.integers(search.problem.sizes[operator])
        seconds = walk(changed)
        assert seconds == Simulated(search)(changed)
        finite += np.isfinite(seconds)
        if number % 3 == 0:
            chosen = changed
    assert finite > 1


@pytest.mark.thorough
def test_a_walk_on_the_simulated_cost_finds_the_best_of_all_and_polishes_the_exact_search() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ w
        return w - x.T @ h, h

    jaxpr = jax.make_jaxpr(step)(jnp.zeros((512, 1024)), jnp.zeros((256, 512)))
    axes = {"x": 4}
    model = Estimate(Machine.tpu("v5e:2x2"), axes)
    search = as_problem(inline(jaxpr.jaxpr, jaxpr.consts), axes, model, carried={0: 0})
    problem = search.problem
    assert 100 < np.prod(problem.sizes) < 5_000
    every = exhaustive(problem, cost=Simulated(search))
    best = exact(problem)
    polished = metropolis(
        problem, starts=[best.strategies], random_starts=2, proposals=1500, beta=5.0, cost=Simulated(search), seed=1
    )
    assert polished.cost <= Simulated(search)(best.strategies)
    assert polished.cost == pytest.approx(every.cost, rel=1e-6)
