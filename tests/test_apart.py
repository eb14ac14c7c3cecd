"""Nodes that barriers keep apart, and small inputs that are packed: what they compute stays, whatever the forms.

Knows steps and placements. The reference is the step that is not virtualized. On CPUs the compiler drops barriers, so
that bits are not compared here; `tests/thorough/test_scaling_on_tpus.py` says what the compiler for TPUs makes of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from tests.rounding import assert_same
from vnode.runtime import node_loops
from vnode.runtime.input_packing import MOST, Packing

pytestmark = pytest.mark.quickly


def pairs(w: jax.Array, batch: dict[str, jax.Array]) -> Any:
    """All pairs of two sides, which are kept between two passes, and a weight of each example."""

    def loss(w: jax.Array) -> jax.Array:
        a, b = jnp.tanh(batch["a"] @ w), jnp.tanh(batch["b"] @ w)
        picked = jnp.diagonal(jax.nn.log_softmax(a @ b.T))
        return -jnp.sum(picked * batch["weight"] * batch["other"]) / jnp.sum(batch["weight"])

    value, grads = jax.value_and_grad(loss)(w)
    return value, w - 0.1 * grads, batch["a"] * 2


def turned(w: jax.Array, batch: dict[str, jax.Array]) -> Any:
    """The examples are the last dimension of what is computed with, and one of two inputs is used as it is."""
    a, b = batch["a"].T, batch["b"].T
    values = jnp.tanh(w.T @ a) * jnp.tanh(w.T @ b) * batch["weight"]
    centred = values - jnp.mean(values, axis=1, keepdims=True)
    return jnp.mean(centred**2), centred


def arguments(examples: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    batch = {"a": draw(examples, 6), "b": draw(examples, 6), "weight": draw(examples) ** 2, "other": draw(examples)}
    return draw(6, 4), batch


@pytest.fixture
def with_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_loops, "KEEP_BARRIERS", frozenset({"cpu"}))


@pytest.mark.sampled(2, thorough=4)
@pytest.mark.parametrize("step", [pairs, turned])
@pytest.mark.parametrize(("examples", "nodes", "devices"), [(24, 8, 1), (24, 8, 2), (23, 5, 3), (24, 4, 4)])
@pytest.mark.usefixtures("with_barriers")
def test_the_result_stays(step, examples, nodes, devices):
    args = arguments(examples)
    placed = vnode.virtualize(step, virtual_nodes=nodes, recompute_budget=2.0).on(jax.devices()[:devices])
    text = placed.lower(*args).as_text()
    size = -(-examples // nodes)
    assert f"tensor<2x{size}x6xf32>" in text  # a node's parts of both sides
    assert_same(placed(*args), step, *args)


@pytest.mark.usefixtures("with_barriers")
def test_a_loop_in_the_step_carries_what_nodes_hold():
    """What the passes of a loop's body read is stacked by the loop or carried by it, not an argument."""

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> Any:
        def turn(w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            grads = jax.grad(lambda w: jnp.mean((batch["a"] @ w * scale - batch["b"] @ w) ** 2))(w)
            return w - 0.1 * grads, batch["a"] @ w

        return jax.lax.scan(turn, w, jnp.arange(1.0, 4.0))

    w, batch = arguments(24)
    for nodes, devices in [(8, 2), (5, 3)]:
        placed = vnode.virtualize(step, virtual_nodes=nodes).on(jax.devices()[:devices])
        assert_same(placed(w, batch), step, w, batch)


def test_what_is_packed_does_not_depend_on_anything_but_parts_and_nodes():
    small, other = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    fits = MOST // (4 * 8 * 4)
    assert Packing.from_parts([small, other, small, key, key], fits).groups == ((0, 2),)
    assert Packing.from_parts([small, other, small, other], fits).groups == ((0, 2), (1, 3))
    assert Packing.from_parts([small, small], fits + 1).groups == ()


def test_values_come_back_as_they_were():
    rng = np.random.default_rng(0)
    shapes = [(5, 2, 3), (5, 4), (5, 2, 3), (5, 4), (5, 2)]
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    packing = Packing.from_parts([jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in values], 5)
    arrays = packing.pack(values.__getitem__)
    for node in range(5):
        parts = packing.unpack(
            [values[i][node] for i in packing.unpacked], packing.select_node(arrays, jnp.int32(node))
        )
        for part, value in zip(parts, values, strict=True):
            np.testing.assert_array_equal(part, value[node])
