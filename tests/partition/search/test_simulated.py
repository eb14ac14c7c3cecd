"""Simulated costs: of serial parts, of changes, and what a walk finds against every assignment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.partition.search.test_steps import once, possible
from vnode.analysis.program import inline
from vnode.partition.machine import Machine
from vnode.partition.searches import as_problem, exact, exhaustive, metropolis, of_machine
from vnode.partition.searches.simulated_cost import Simulated

pytest.importorskip("numba")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mlp", "attention", "layers", "recurrent", "branches"])
def test_tasks_are_what_the_problem_counts_and_overlap(name: str) -> None:
    """All tasks one after the other take the problem's cost; a timeline takes no longer, and its busiest no less."""
    search = once(name, 1e-3)
    simulated = Simulated(search)
    for seed in range(3):
        drawn = possible(search.problem, np.random.default_rng(seed))
        seconds = simulated.start(drawn)
        assert simulated.taken.sum() == pytest.approx(search.problem.cost(drawn), rel=1e-9)
        assert simulated.timeline.busy.max() / 1e12 <= seconds * (1 + 1e-9) <= simulated.taken.sum() * (1 + 1e-6)


@pytest.mark.parametrize("name", ["mlp", "layers", "recurrent"])
def test_a_change_takes_what_it_takes_from_the_start(name: str) -> None:
    search = once(name, 1e-3)
    simulated, anew = Simulated(search), Simulated(search)
    generator = np.random.default_rng(5)
    chosen = possible(search.problem, generator)
    simulated.start(chosen)
    seen = 0
    for _ in range(60):
        i = int(generator.integers(search.problem.operators))
        s = int(generator.integers(search.problem.sizes[i]))
        other = chosen.copy()
        other[i] = s
        seconds = simulated.changed(i, s)
        assert seconds == anew.start(other)
        assert np.isfinite(seconds) == np.isfinite(search.problem.cost(other))
        if np.isfinite(seconds) and generator.random() < 0.5:
            simulated.take()
            chosen, seen = other, seen + 1
    assert seen > 5


@pytest.mark.thorough
def test_a_walk_on_the_simulated_cost_finds_the_best_of_all_and_polishes_the_exact_search() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ w
        return w - x.T @ h, h

    jaxpr = jax.make_jaxpr(step)(jnp.zeros((512, 1024)), jnp.zeros((256, 512)))
    axes = {"x": 4}
    model = of_machine(Machine.tpu("v5e:2x2"), axes)
    search = as_problem(inline(jaxpr.jaxpr, jaxpr.consts), axes, model, carried={0: 0})
    problem = search.problem
    assert 100 < np.prod(problem.sizes) < 5_000
    every = exhaustive(problem, cost=Simulated(search).start)
    best = exact(problem)
    polished = metropolis(
        problem, starts=[best.strategies], random_starts=2, proposals=1500, beta=5.0, walk=Simulated(search), seed=1
    )
    assert polished.cost <= Simulated(search).start(best.strategies)
    assert polished.cost == pytest.approx(every.cost, rel=1e-6)
