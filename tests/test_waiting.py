"""Sums that wait on the host: the same bits as where none does, whatever the order that they come in.

Knows folds, how they are carried out, and steps. The reference is the same fold of numbers by NumPy, and of steps the
un-virtualized one, and the virtualized one whose sums all wait on devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vnode
from tests.budget import examples
from tests.rounding import assert_same
from vnode.operators import Monoid
from vnode.runtime import offloaded_accumulators
from vnode.runtime.node_loops import Sum, fold_pieces, opaque_count
from vnode.runtime.stack_on_chip import fold_pieces_on_chip
from vnode.runtime.tree import Tree
from vnode.step.virtual import VirtualStep


@pytest.fixture
def every_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums may wait on the host too, in small pieces."""
    monkeypatch.setattr(offloaded_accumulators, "LEAST", 1)
    monkeypatch.setattr(offloaded_accumulators, "PIECE", 64)


@st.composite
def folds(draw: st.DrawFn) -> tuple[Any, int]:
    """The fold of a range of a tree's leaves, and a number of sums on the host."""
    leaves = draw(st.integers(2, 40))
    branches = [2]
    while np.prod(branches) < leaves:
        branches.append(draw(st.integers(2, 4)))
    start = draw(st.integers(0, leaves - 1))
    stop = draw(st.integers(start + 1, leaves))
    fold = Tree(leaves, tuple(branches)).fold([(i, i + 1) for i in range(start, stop)])
    return fold, draw(st.integers(1, 4))


WAYS = {"host": offloaded_accumulators.fold_pieces_offloaded, "places": fold_pieces, "chip": fold_pieces_on_chip}


@settings(max_examples=examples(40))
@given(
    case=folds(), shape=st.sampled_from([(3,), (8, 4), (1, 6, 5), (2, 1)]), seed=st.integers(0, 9), more=st.booleans()
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quickly
@pytest.mark.usefixtures("every_sum")
def test_blocks_are_those_of_the_fold(way, case, shape, seed, more):
    """Also where another device holds one more of them."""
    fold, far = case
    sums = [
        Sum(Monoid.SUM, shape, jnp.dtype("float32")),
        Sum(Monoid.MAX, (5,), jnp.dtype("float32")),
        Sum(Monoid.SUM, (), jnp.dtype("float32")),  # not an array: never on the host
        Sum(Monoid.SUM, (4,), jnp.dtype("complex64")),
    ]
    count = len(fold.merges)
    generator = np.random.default_rng(seed)
    given = [np.asarray(generator.normal(size=(count, *s.shape)), s.dtype) for s in sums]

    def piece(index: Any, state: Any, spent: Any, after: Any) -> Any:
        return [jax.lax.dynamic_index_in_dim(g, index, 0, keepdims=False) for g in map(jnp.asarray, given)], state

    @jax.jit
    def run() -> Any:
        merges = jnp.asarray(fold.merges, jnp.int32)
        left = len(fold.rest)
        most = max(fold.merges)
        options = {"far": far, "left": left} if way == "host" else {}
        blocks, _ = WAYS[way](piece, sums, opaque_count(count), merges, fold.depth + more, most, None, **options)
        return blocks.split(left), blocks.height

    found, height = run()
    for values, s, columns in zip(given, sums, found, strict=True):
        add = np.maximum if s.monoid is Monoid.MAX else np.add
        wanted = fold.fold_values(list(values), add)
        for value, block in zip(wanted, columns, strict=True):
            assert np.asarray(block).tobytes() == np.asarray(value).tobytes()
    assert int(height) == len(fold.rest)


def train(state: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def arguments(examples: int) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    state = {
        "a": jax.random.normal(keys[0], (16, 32)) / 4,
        "b": jax.random.normal(keys[1], (32, 32)) / 6,
        "c": jax.random.normal(keys[2], (32, 16)) / 6,
    }
    return state, jax.random.normal(keys[3], (examples, 16))


def with_far(step: Any, far: int) -> Any:
    """A step with so many waiting sums on the host."""
    plan = dataclasses.replace(step.spec.plan, host_accumulators=far)
    return VirtualStep(dataclasses.replace(step.spec, plan=plan), step.placement)


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [3, 16])
@pytest.mark.usefixtures("every_sum")
def test_the_bits_of_a_step_stay(nodes):
    args = arguments(40)  # of 16 nodes the last two have padding only
    base = vnode.virtualize(train, virtual_nodes=nodes)
    wanted = base.on(jax.devices()[:1])(*args)
    assert_same(wanted, train, *args)
    for devices, far in [(1, 1), (1, 2), (2, 1), (3, 2)]:
        found = with_far(base, far).on(jax.devices()[:devices])(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (devices, far)
