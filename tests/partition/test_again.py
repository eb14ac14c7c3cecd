"""Loops that keep less for later loops: the same bits, less memory, chosen where a plan needs it.

Knows steps, machines and plans. Must not know how a program is rewritten.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import vnode
from tests.rounding import assert_same
from vnode.analysis.program import inline
from vnode.partition import Machine, Plan, search
from vnode.partition.plan.search_subject import subject_of, with_recomputation
from vnode.remat.residual_remat import loop_residuals, recompute_residuals
from vnode.step.virtual import VirtualStep

ALL = os.environ.get("VNODE_TEST_ALL") == "1"

P = PartitionSpec
ONE = Machine.gpus("P100", hosts=1, per_host=1)


def train(state: Any, batch: Any) -> Any:
    """Layers with a norm in a scan, the scale of which all layers share."""

    def loss(state: Any) -> jax.Array:
        def layer(h: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
            n = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
            h = h + jax.nn.gelu(n @ w["up"] * state["scale"]) @ w["down"]
            return h, jnp.mean(h**2)  # what is returned stays

        out, sizes = jax.lax.scan(layer, batch, state["layers"], reverse=True)
        return jnp.mean((out - batch) ** 2) + sizes.sum()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def arguments(layers: int = 3, width: int = 16, examples: int = 16) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": {
            "up": jax.random.normal(keys[0], (layers, width, 4 * width)) / width**0.5,
            "down": jax.random.normal(keys[1], (layers, 4 * width, width)) / width**0.5,
        },
        "scale": jnp.float32(1.3),
    }, jax.random.normal(keys[2], (examples, width))


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.newest
@pytest.mark.parametrize(
    ("shape", "partition"), [((1,), {}), ((2,), {}), ((2, 4), {"up$": P(None, None, "model")})], ids=str
)
def test_the_bits_are_those_of_loops_that_keep_all(shape: tuple[int, ...], partition: Any) -> None:
    """With all of it computed again, and with some."""
    state, batch = arguments()
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("vnode", "model")[: len(shape)])
    options = {"partition": partition} if partition else {}
    step = vnode.virtualize(train, virtual_nodes=4, placement=vnode.Placement(4, mesh=mesh), **options)
    kept = subject_of(step, (state, batch)).kept
    assert len(kept) > 4
    plain = step(step.put(state), batch)
    some = [
        [each for each in kept if rng.random() < 0.5] for rng in map(np.random.default_rng, (1, 2) if ALL else (1,))
    ]
    for chosen in (list(kept), *some):
        assert chosen
        less = VirtualStep(with_recomputation(step, chosen).spec, step.placement)
        got = less(less.put(state), batch)
        assert_same(got, jax.jit(train), state, batch)
        jax.tree.map(np.testing.assert_array_equal, got, plain)


@pytest.mark.thorough
def test_less_memory_is_taken() -> None:
    """Of the compiled programs: a layer keeps its beginning, where it kept several arrays four times as wide."""
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments(8, 32, 2048))
    step = vnode.virtualize(train, virtual_nodes=2, placement=vnode.Placement(2, jax.devices()[:1]))
    less = VirtualStep(with_recomputation(step, subject_of(step, args).kept).spec, step.placement)
    taken = [each.lower(*args).compile().memory_analysis().temp_size_in_bytes for each in (step, less)]
    assert taken[1] < taken[0] / 2


@pytest.mark.thorough
def test_a_plan_keeps_less_where_memory_does_not_suffice(tmp_path: Any) -> None:
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments(8, 32, 2048))
    options = {"virtual_nodes": 2, "reduction": "fast", "donate_argnums": 0}
    enough = search(train, args, ONE, memory="1GiB", **options)
    tight = search(train, args, ONE, memory=enough.figures.memory // 2, **options)
    assert not enough.recomputed and tight.recomputed and not tight.host
    assert tight.figures.memory <= enough.figures.memory // 2
    assert tight.figures.seconds < 2 * enough.figures.seconds
    assert "recomputed" in str(tight) and "recomputed" not in str(enough)
    tight.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", train, args, reduction="fast", donate_argnums=0)
    assert loaded.recomputed == tight.recomputed
    state, batch = jax.tree.map(np.asarray, arguments(8, 32, 2048))
    results = []
    for plan in (enough, loaded):
        step = plan.step(jax.devices()[:1])
        results.append(step(step.put(state), batch))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_what_others_read_is_kept() -> None:
    """What is returned, or read as a whole, is not computed again; what no loop keeps cannot be asked for."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            out, kept = jax.lax.scan(lambda h, w: ((n := jnp.tanh(h * w)), n), x, w)
            return jnp.mean(out**2), kept

        grads, kept = jax.grad(loss, has_aux=True)(w)
        return w - grads, kept

    args = jnp.ones((3, 4)), jnp.ones((8, 4))
    traced = jax.make_jaxpr(step)(*args)
    program = inline(traced.jaxpr, traced.consts)
    (scan, *_) = [k for k, eqn in enumerate(program.equations) if eqn.primitive.name == "scan"]
    returned = program.equations[scan].outvars.index(program.outputs[1])
    found = loop_residuals(program)
    assert found and (scan, returned) not in found
    with pytest.raises(vnode.PartitionError, match="are not residuals"):
        recompute_residuals(program, [(scan, returned)])
