"""Two ways to form sums in the order of a tree with the same bits: small ones side by side, large ones in passes apart.

Knows `vnode.runtime.small_sums` and `vnode.analysis.separate_sums`. References: additions one by one in NumPy, the step
that is not virtualized, the same step with the other way, and a scan by hand.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from tests.zoo import compare
from vnode.operators import Monoid
from vnode.runtime import small_sums
from vnode.runtime.node_loops import Sum
from vnode.runtime.tree import Tree
from vnode.step import pipeline

WIDTH, LAYERS = 192, 4


@pytest.mark.quickly
@pytest.mark.parametrize("monoid", [Monoid.SUM, Monoid.PROD, Monoid.MAX])
@pytest.mark.parametrize(("leaves", "lane"), [(1, 1), (2, 1), (5, 1), (8, 1), (13, 1), (24, 1), (64, 1), (10, 3)])
def test_levels_are_added_as_the_tree_says(leaves: int, lane: int, monoid: Monoid) -> None:
    """All blocks of a level at once, the last of them filled up, give what additions one by one do, in every bit."""
    rng = np.random.default_rng(leaves)
    pieces = rng.normal(size=(leaves, 7)).astype(np.float32)
    pieces[:, 0], pieces[:, 1] = -0.0, np.where(np.arange(leaves) % 2, -0.0, 0.0)
    tree = Tree.from_lanes(leaves, lane)
    add = {Monoid.SUM: np.add, Monoid.PROD: np.multiply, Monoid.MAX: np.maximum}[monoid]
    (want,) = tree.fold([(i, i + 1) for i in range(leaves)]).fold_values(list(pieces), add)
    if monoid is Monoid.SUM:
        want = want + np.float32(0)  # as if it had begun with a zero
    found = small_sums.add_by_levels(Sum(monoid, (7,), np.dtype(np.float32)), jnp.asarray(pieces), tree)
    bits = [np.asarray(each).view(np.uint32) for each in (found, want)]
    zeros = 2 if monoid is Monoid.MAX else 0  # of which either may be the larger
    np.testing.assert_array_equal(bits[0][zeros:], bits[1][zeros:])


def regression(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def six_updates(params: Any, batch: Any) -> Any:
    """Updates of all examples, each with the gradients' norm, and how many examples are far off: an exact sum."""

    def update(params: Any, _: None) -> Any:
        loss, slope = jax.value_and_grad(regression)(params, batch)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(slope)))
        far = jnp.sum(jnp.abs(batch[1]) > 1.0)
        return jax.tree.map(lambda p, g: p - 0.3 * g / jnp.maximum(norm, 0.5), params, slope), (loss, far)

    return jax.lax.scan(update, params, None, length=6)


def arguments(nodes: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"a": jax.random.normal(keys[0], (8, 5)), "b": jax.random.normal(keys[1], (5, 1))}
    return params, (jax.random.normal(keys[2], (2 * nodes, 8)), jax.random.normal(keys[3], (2 * nodes, 1)))


@pytest.mark.sampled(0, thorough=1)
@pytest.mark.parametrize("nodes", [8, 7])
def test_small_updates_in_a_loop(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits on any devices, and as with a stack of sums that wait; as the plain step up to rounding."""
    params, batch = arguments(nodes)
    step = functools.partial(vnode.virtualize, six_updates, virtual_nodes=nodes)
    found: dict[Any, Any] = {d: compare.host(step().on(jax.devices()[:d])(params, batch)) for d in (1, 2, 3, 4, nodes)}
    monkeypatch.setattr(small_sums, "LARGEST", 0)
    found["stack"] = compare.host(step().on(jax.devices()[:2])(params, batch))
    for other in found.values():
        jax.tree.map(np.testing.assert_array_equal, other, found[1])
    want = jax.jit(six_updates)(params, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found[1], compare.host(want))


def layers_loss(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def clipped(params: Any, x: jax.Array) -> Any:
    """All gradients are there before any parameter is updated."""
    loss, slope = jax.value_and_grad(layers_loss)(params, x)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in slope))
    return [w - g / jnp.maximum(norm, 1e-3) for w, g in zip(params, slope, strict=True)], loss


def by_hand(nodes: int, params: Any, x: jax.Array) -> Any:
    def node(total: Any, x: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(layers_loss)(params, x)), None

    zeros = (jnp.float32(0), [jnp.zeros_like(w) for w in params])
    (loss, slope), _ = jax.lax.scan(node, zeros, x.reshape(nodes, -1, WIDTH))
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in slope)) / nodes
    return [w - g / nodes / jnp.maximum(norm, 1e-3) for w, g in zip(params, slope, strict=True)], loss / nodes


def layers(nodes: int) -> Any:
    keys = jax.random.split(jax.random.key(1), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) * WIDTH**-0.5 for key in keys[1:]]
    return params, jax.random.normal(keys[0], (nodes, WIDTH))


def temporary(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.sampled(1, thorough=1)
@pytest.mark.parametrize(("devices", "nodes"), [(1, 16), (1, 64), (4, 16)])
def test_few_examples_and_many_parameters_take_one_gradient_more_than_by_hand(devices: int, nodes: int) -> None:
    params, x = layers(nodes)
    step = vnode.virtualize(clipped, virtual_nodes=nodes, donate_argnums=0).on(jax.devices()[:devices])
    hand = jax.jit(functools.partial(by_hand, nodes), donate_argnums=0).lower(params, x).compile()
    gradients = sum(w.nbytes for w in params)
    assert temporary(step.lower(params, x).compile()) <= temporary(hand) + gradients


@pytest.mark.sampled(0, thorough=1)
@pytest.mark.parametrize("nodes", [16, 12])
def test_passes_for_parts_of_the_sums_give_the_same_bits(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params, x = layers(nodes)
    step = functools.partial(vnode.virtualize, clipped, virtual_nodes=nodes)
    report = step().on(jax.devices()[:1]).explain(params, x)
    assert [len(p.accumulators) for p in report.passes] == [1] * (1 + LAYERS)
    assert [(p.number, p.reads) for p in report.passes] == [(0, ()), *((1 + k, (0,)) for k in range(LAYERS))]
    assert f"passes 1 to {LAYERS} only form large sums, of operands that pass 0 kept" in " ".join(str(report).split())
    found: dict[Any, Any] = {d: compare.host(step().on(jax.devices()[:d])(params, x)) for d in (1, 3, 8)}
    monkeypatch.setattr(pipeline, "separate_sums", lambda made, *_, **__: made)
    found["one pass"] = compare.host(step().on(jax.devices()[:1])(params, x))
    for other in found.values():
        jax.tree.map(np.testing.assert_array_equal, other, found[1])
    want = compare.host(jax.jit(clipped)(params, x))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found[1], want)


def table_loss(params: Any, words: jax.Array) -> jax.Array:
    """Of a table that is read and multiplied with, and of layers that a scan goes over."""
    x = params["table"][words].mean(1)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean(jax.nn.logsumexp(x @ params["table"].T, axis=-1))


@pytest.mark.thorough
def test_a_table_and_stacked_layers_are_summed_in_parts() -> None:
    """In the memory of accumulation by hand and one gradient; the same bits on devices with unequal counts of nodes."""
    rng, nodes = np.random.default_rng(2), 16
    shapes = {"table": (1024, WIDTH), "layers": (LAYERS, WIDTH, WIDTH)}
    params = {name: jnp.asarray(rng.normal(size=s) * WIDTH**-0.5, jnp.float32) for name, s in shapes.items()}
    words = jnp.asarray(rng.integers(0, 1024, (nodes, 3)), jnp.int32)
    gradient = jax.value_and_grad(table_loss)

    def by_hand(params: Any, words: jax.Array) -> Any:
        def node(total: Any, words: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, gradient(params, words)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(node, zeros, words[:, None])[0]

    most = temporary(jax.jit(by_hand).lower(params, words).compile()) + sum(w.nbytes for w in params.values())
    step = vnode.virtualize(lambda params, words: gradient(params, words), virtual_nodes=nodes)
    sums = [line for one in step.on(jax.devices()[:1]).explain(params, words).passes for line in one.accumulators]
    assert {name: sum(a.bytes for a in sums if a.name == name) for name in params} == {
        n: w.nbytes for n, w in params.items()
    }
    assert max(a.bytes for a in sums) * 4 < sum(a.bytes for a in sums)
    found = []
    for devices in (1, 3):
        compiled = step.on(jax.devices()[:devices]).lower(params, words).compile()
        assert temporary(compiled) <= most
        found.append(compare.host(compiled(params, words)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    want = compare.host(jax.jit(gradient)(params, words))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found[0], want)
