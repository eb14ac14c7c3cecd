"""Programs as problems: whatever is chosen, the program carried out so gives the plain step's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from vnode.analysis.program import inline
from vnode.partition.machine import Machine
from vnode.partition.search import exact
from vnode.partition.search.costs import Estimate
from vnode.partition.search.steps import Search, as_problem
from vnode.spmd.program import over_mesh

AXES = {"x": 2, "y": 4}


def mlp(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        h = jnp.tanh(x @ params["w1"] + params["b1"])
        h = jax.nn.relu(h @ params["w2"])
        return jnp.mean((h @ params["w3"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def attention(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        h = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["scale"]
        q, k, v = (jnp.einsum("bth,hnd->btnd", h, params[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("btnd,bsnd->bnts", q, k)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)
        out = x + jnp.einsum("btnd,ndh->bth", mixed, params["o"])
        out = out + jax.nn.gelu(out @ params["up"]) @ params["down"]
        return jnp.mean((out - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def convolutions(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        h = x
        for name, stride in (("c1", 1), ("c2", 2)):
            h = jax.lax.conv_general_dilated(
                h, params[name], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jax.nn.relu(h)
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = h.reshape(h.shape[0], -1) @ params["w"]
        return jnp.mean((logits - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def layers(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean((h - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def steps() -> dict[str, tuple[Callable[..., Any], Any]]:
    t = {"scale": normal(16), "q": normal(16, 4, 4), "k": normal(16, 4, 4), "v": normal(16, 4, 4), "o": normal(4, 4, 16)}
    t |= {"up": normal(16, 32) / 4, "down": normal(32, 16) / 4}
    c = {"c1": normal(3, 3, 4, 8) / 6, "c2": normal(3, 3, 8, 8) / 8, "w": normal(32, 8) / 6}
    return {
        "mlp": (
            mlp,
            ({"w1": normal(16, 32), "b1": normal(32), "w2": normal(32, 16), "w3": normal(16, 8)}, normal(8, 16), normal(8, 8)),
        ),
        "attention": (attention, (t, normal(8, 8, 16), normal(8, 8, 16))),
        "convolutions": (convolutions, (c, normal(8, 8, 8, 4), normal(8, 8))),
        "layers": (layers, ({"up": normal(3, 16, 32) / 4, "down": normal(3, 32, 16) / 4}, normal(8, 16), normal(8, 16))),
    }


STEPS = steps()


def searched(name: str, **options: Any) -> tuple[Search, list[Any], list[np.ndarray]]:
    """The problem of a step, the arrays that it is called with, and what it gives plainly."""
    step, arguments = STEPS[name]
    jaxpr = jax.make_jaxpr(step)(*arguments)
    flat = jax.tree.leaves(arguments)
    carried = {i: i for i in range(len(jax.tree.leaves(arguments[0])))}
    machine = Machine.tpu("v5e:2x4")
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    search = as_problem(program, AXES, Estimate(machine, AXES), carried=carried, **options)
    return search, flat, [np.asarray(v) for v in jax.tree.leaves(jax.jit(step)(*arguments))]


def assert_carried_out(search: Search, strategies: Any, arguments: list[Any], plain: list[np.ndarray]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(AXES))
    made = jax.jit(over_mesh(search.flow(strategies), mesh))(*arguments)
    for have, want in zip(made, plain, strict=True):
        np.testing.assert_allclose(np.asarray(have), want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", STEPS)
def test_the_best_strategies_give_the_steps_values(name: str) -> None:
    search, arguments, plain = searched(name)
    best = exact(search.problem)
    assert best.gap == 0
    assert_carried_out(search, best.strategies, arguments, plain)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STEPS)
def test_any_strategies_give_the_steps_values(name: str, seed: int) -> None:
    """Drawn at random among those that can be."""
    search, arguments, plain = searched(name, tied=bool(seed % 2))
    generator = np.random.default_rng(seed)
    drawn = [int(generator.choice(np.flatnonzero(np.isfinite(s)))) for s in search.problem.seconds]
    assert_carried_out(search, drawn, arguments, plain)
