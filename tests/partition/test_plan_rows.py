"""Plans for devices of several kinds: rows have as many nodes as they are fast, and the step stays what it is."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.partition.mixed import mixed, slower
from tests.partition.test_plan import example
from tests.rounding import assert_same
from vnode.partition import Machine, Plan, search
from vnode.partition.plan.replica_shares import fastest_shares

V5E = Machine.tpu("v5e:2x4")


FAST, SLOW = slower(V5E, "TPU fast", 4000), slower(V5E, "TPU slow", 8000)


@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.7]), min_size=1, max_size=4), st.integers(1, 12))
def test_no_other_shares_are_done_earlier(seconds: list[float], nodes: int) -> None:
    """Against all of them."""
    found = fastest_shares(seconds, nodes, 1)
    assert sum(found) == nodes
    least = 1 if nodes >= len(seconds) else 0
    others = (c for c in itertools.product(range(least, nodes + 1), repeat=len(seconds)) if sum(c) == nodes)
    best = min(max(n * each for n, each in zip(counts, seconds, strict=True)) for counts in others)
    if least:
        assert max(n * each for n, each in zip(found, seconds, strict=True)) == pytest.approx(best)


@given(st.lists(st.floats(0.5, 4.0), min_size=1, max_size=6), st.integers(1, 60), st.sampled_from([2, 4]))
def test_lanes_stay_whole(seconds: list[float], nodes: int, lane: int) -> None:
    counts = fastest_shares(seconds, nodes, lane)
    assert sum(counts) == nodes
    starts = [sum(counts[:r]) for r in range(len(counts))]
    assert all(start % lane == 0 for start, n in zip(starts, counts, strict=True) if n)


@pytest.mark.thorough
@pytest.mark.quickly
@pytest.mark.parametrize("name", ["mlp", pytest.param("layers", marks=pytest.mark.sweep)])
def test_fast_devices_have_more_nodes(name: str, tmp_path: Path) -> None:
    step, (state, batch) = example(name)
    # So that what is computed once, which shares do not help, decides nothing.
    four = Machine.tpu("v5e:2x2")
    quick, crawling = slower(four, "TPU fast", 4000), slower(four, "TPU slow", 12000)
    machine = mixed(four, [quick] * 2 + [crawling] * 2)
    plan = search(step, (state, batch), machine, virtual_nodes=16)
    assert len(plan.machine.kinds) == 2
    assert plan.mesh["vnode"] > 1
    assert max(plan.counts) > min(plan.counts)
    assert "rows" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", step, (state, batch))
    assert loaded.counts == plan.counts
    planned = loaded.step(jax.devices()[:4])
    assert planned.placement.counts == plan.counts
    assert_same(planned(planned.put(state), batch), jax.jit(step), state, batch)
    slow = search(step, (state, batch), mixed(four, [crawling] * 4), virtual_nodes=16)
    fast = search(step, (state, batch), mixed(four, [quick] * 4), virtual_nodes=16)
    assert fast.figures.seconds <= plan.figures.seconds <= slow.figures.seconds


@pytest.mark.quickly
@pytest.mark.parametrize("kind", ["numbers", "keys"])
def test_results_of_each_example_are_put_together_from_unequal_rows(kind: str) -> None:
    """A row with few nodes has few examples' results, and all rows need those of all."""

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        seen = jnp.tanh(x @ weights)
        each = seen - seen.mean() if kind == "numbers" else jax.vmap(jax.random.key)(jnp.arange(len(x)))
        return weights + seen.sum(), each, seen @ seen.sum(0)

    rng = np.random.default_rng(0)
    weights, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5), (12, 3)))
    machine = mixed(V5E, [FAST] * 4 + [SLOW] * 4)
    plan = search(step, (weights, x), machine, virtual_nodes=12, recompute_budget=float("inf"))
    assert max(plan.counts) > min(plan.counts)
    found, expected = plan.step()(weights, x), step(weights, x)
    if kind == "keys":
        found, expected = ((a, jax.random.key_data(b), c) for a, b, c in (found, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.thorough
def test_a_plan_for_unequal_devices_is_no_slower_than_one_for_slow_devices() -> None:
    """Equal shares are among what is tried: unequal ones leave several sums on a device, for the same bits."""
    step, args = example("mlp")
    fast, slow = slower(V5E, "TPU fast", 1000), slower(V5E, "TPU slow", 2000)
    plan = search(step, args, mixed(V5E, [fast] * 4 + [slow] * 4), virtual_nodes=16)
    assert plan.figures.seconds <= search(step, args, mixed(V5E, [slow] * 8), virtual_nodes=16).figures.seconds


@pytest.mark.thorough
def test_bits_are_those_of_equal_devices() -> None:
    step, (state, batch) = example("mlp")
    machine = mixed(V5E, [FAST] * 4 + [SLOW] * 4)
    uneven = dataclasses.replace(search(step, (state, batch), machine, virtual_nodes=16), records={}, specs={})
    assert uneven.mesh == {"vnode": 8}
    even = dataclasses.replace(uneven, counts=(2,) * 8)
    results = [planned(planned.put(state), batch) for planned in (uneven.step(), even.step())]
    jax.tree.map(np.testing.assert_array_equal, *results)
