"""Unequal shares against a fine grid of shares and every choice."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.search.test_steps import STEPS
from vnode.analysis.program import inline
from vnode.partition.machine import Kind
from vnode.partition.machine.known_kinds import kind_named
from vnode.partition.uneven_shares.accpar import Cut, Group, SharedEdge, balanced, between, shared

GRID = np.linspace(0, 1, 401)


def by_hand(cut: Cut, chosen: tuple[int, ...], x: float) -> float:
    """AccPar's times as the paper writes them: a group and its share at a time."""
    times = []
    for g, own in enumerate((x, 1 - x)):
        time = sum(c[g, s] * own + f[g, s] for c, f, s in zip(cut.compute, cut.fixed, chosen, strict=True))
        for e in cut.edges:
            always, lacking, crossing = e.seconds[g, :, chosen[e.start], chosen[e.end]]
            time += always + (1 - own) * lacking + own * (1 - own) * crossing
        times.append(time)
    return float(max(times))


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    edges = tuple(
        SharedEdge(i, i + 1, generator.random((2, 3, a, b))) for i, (a, b) in enumerate(itertools.pairwise(sizes))
    )
    speed = np.array([[1.0], [draw(st.sampled_from([1.0, 0.3, 0.05]))]])
    compute = tuple(generator.uniform(1, 9, (1, n)) * speed for n in sizes)
    return Cut(compute, tuple(generator.random((2, n)) for n in sizes), edges)


@given(cuts())
@settings(max_examples=40, deadline=None)
def test_the_share_is_the_best_for_the_strategies(cut: Cut) -> None:
    for chosen in itertools.product(*(range(c.shape[1]) for c in cut.compute)):
        share = balanced(cut, np.array(chosen))
        least = min(by_hand(cut, chosen, float(x)) for x in GRID)
        assert by_hand(cut, chosen, share) <= least + 1e-9
        assert cut.seconds(np.array(chosen), share) == pytest.approx(by_hand(cut, chosen, share))


@given(cuts())
@settings(max_examples=40, deadline=None)
def test_unequal_shares_are_never_worse_than_equal_ones(cut: Cut) -> None:
    found = shared(cut)
    chosen = tuple(found.strategies.tolist())
    assert found.seconds == pytest.approx(by_hand(cut, chosen, found.share))
    assert found.seconds <= found.equal


def twice_the_speed(kind: Kind, times: float) -> Kind:
    peak = {dtype: times * rate for dtype, rate in kind.peak.items()}
    faster = {"vector": times * kind.vector, "bandwidth": times * kind.bandwidth}
    return dataclasses.replace(kind, name=f"{kind.name} x {times}", peak=peak, **faster)


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_shares_of_a_programs_operators(name: str, speed: float) -> None:
    """With links that take nothing, by the groups' speeds; never worse than halves; as by hand."""
    step, arguments = STEPS[name]
    jaxpr = jax.make_jaxpr(step)(*arguments)
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    carried = {i: i for i in range(len(jax.tree.leaves(arguments[0])))}
    kind = twice_the_speed(kind_named("v5e"), 1.0)  # none that is calibrated, as the other
    for bandwidth in (1e30, 1e9):
        groups = [Group(kind, 2, bandwidth), Group(twice_the_speed(kind, speed), 2, bandwidth)]
        search, cut = between(program, groups, carried=carried)
        found = shared(cut)
        assert found.seconds <= found.equal * (1 + 1e-12) and np.isfinite(search.problem.cost(found.strategies))
        assert found.seconds == pytest.approx(by_hand(cut, tuple(found.strategies.tolist()), found.share))
        if bandwidth == 1e30:  # what is not divided both do; all else by speed
            assert found.share == pytest.approx(1 / (1 + speed), abs=0.06)
