"""Decisions are taken once: a later pass does not compute again what an earlier one picked from or counted.

Compilers may round the same computation differently in two loops. Here they surely do: `wobble` gives another last
bits every time that vnode emits it, and its argument in the un-virtualized step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir

import vnode
from tests.rounding import assert_same
from vnode.operators import Factors, OperatorDescription, register

pytestmark = pytest.mark.quickly

BATCH = 8
wobble_p = Primitive("wobble")
wobble_p.def_impl(lambda x: x)
wobble_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(wobble_p, mlir.lower_fun(lambda x: x, multiple_results=False))
turns = itertools.count()


@register(wobble_p)
def wobbles(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    f.change(*dims[0], positional=True)

    def emit(description: Any, eqn: Any, operands: Any, sizes: Any, positions: Any) -> list[Any]:
        turn = next(turns)
        return [operands[0] * (1 + turn * (-1) ** turn * 1e-5)]

    return OperatorDescription(factors=f.all, operands=(dims,), results=(dims,), emit=emit)


def wobble(x: jax.Array) -> jax.Array:
    """The identity, with the identity's derivative; rounded differently in every pass."""
    still = jax.lax.stop_gradient(x)
    return x + (wobble_p.bind(still) - still)


def loss(w: Any, x: Any) -> Any:
    return wobble(jnp.tanh(x @ w).sum(axis=1))


def worst(w: Any, x: Any) -> Any:
    return loss(w, x).max()


def best(w: Any, x: Any) -> Any:
    return loss(w, x).reshape(2, -1).T.min()


def worst_of_features_then_examples(w: Any, x: Any) -> Any:
    return wobble(x @ w).max(axis=1).max()


def above_the_median(w: Any, x: Any) -> Any:
    losses = loss(w, x)
    return jnp.where(losses >= jnp.median(jax.lax.stop_gradient(losses)), losses, 0).sum()


def nearest_to_the_greatest(w: Any, x: Any) -> Any:
    losses = loss(w, x)
    return jnp.sqrt(losses.max() - losses + 0.0).sum() * 1e-3 + losses.sum()


def all_but_the_worst(w: Any, x: Any) -> Any:
    losses = loss(w, x)
    return jnp.where(jnp.arange(BATCH) == jnp.argmax(losses), 0, losses).sum()


STEPS = [worst, best, worst_of_features_then_examples, above_the_median, all_but_the_worst]


def data() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((3, 4)), jnp.float32), jnp.asarray(
        rng.standard_normal((BATCH, 3)), jnp.float32
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("fun", STEPS, ids=lambda fun: fun.__name__)
def test_gradients_find_what_was_picked(fun: Callable[..., Any], nodes: int) -> None:
    step = jax.value_and_grad(fun)
    want, want_gradient = step(*data())
    assert np.abs(want_gradient).max() > 0.1
    got, gradient = vnode.virtualize(step, virtual_nodes=nodes, recompute_budget=10.0)(*data())
    np.testing.assert_allclose(got, want, rtol=1e-2)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-2, atol=1e-2)


def test_differences_to_the_greatest_are_not_negative() -> None:
    value = vnode.virtualize(nearest_to_the_greatest, virtual_nodes=4, recompute_budget=10.0)(*data())
    assert np.isfinite(value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_what_was_counted_is_what_is_used(nodes: int) -> None:
    def step(threshold: Any, x: Any) -> Any:
        chosen = (wobble(x) >= threshold).astype(jnp.float32)
        share = chosen / jnp.maximum(chosen.sum(), 1)
        return share.cumsum()[-1], chosen.sum()  # the cumsum makes nodes read the count

    virtual = vnode.virtualize(step, virtual_nodes=nodes, recompute_budget=10.0)
    for _ in range(3):
        jax.clear_caches()
        next(turns)
        share, count = virtual(jnp.float32(1), jnp.ones(BATCH))
        assert (share, count) in ((1, BATCH), (0, 0)), "chosen in one pass, not in the other"


def test_a_softmax_over_the_batch_keeps_nothing() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.nn.logsumexp(x @ w @ jnp.ones((4, 512)), axis=0).sum()

    gradient = jax.grad(step)
    virtual = vnode.virtualize(gradient, virtual_nodes=4, recompute_budget=10.0).on(jax.devices()[:2])
    jaxpr = jax.make_jaxpr(virtual)(*data())
    assert f"[{BATCH // 4},512]" in str(jaxpr)
    assert not any(f"{shape}" in str(jaxpr) for shape in (f"[{BATCH},512]", f"[4,{BATCH // 4},512]"))
    assert_same(virtual(*data()), gradient, *data())
