"""64-bit values in a step while x64 is off, and sums that are rounded to fewer bits.

Knows steps and `jax.enable_x64`. Must not know how types are kept. The reference is the step as the user wrote it, and
NumPy. Large values cancel in every sum: in 32 bits nothing would be left of the others.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode

LARGE = 2.0**30
X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
X[0], X[-1] = LARGE, -LARGE


def metrics(w: Any, x: Any) -> Any:
    """Values of 64 bits of all kinds: sums, products, maxima, of each example, in a loop, after a coupling."""
    loss, slope = jax.value_and_grad(lambda w: jnp.tanh((x / (1 + jnp.abs(x))) @ w).mean())(w)
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        total = wide.sum(0)
        found = {
            "rounded": total.astype(jnp.float32),
            "wide": total,
            "then more": (total - 1.0).astype(jnp.float32),
            "product": (jnp.ones(24) @ wide).astype(jnp.float32),
            "integers": jnp.abs(x).astype(jnp.int64).sum(0) * 4,
            "largest": (x.astype(jnp.int64) * 8).max(0),
            "positive": total > 0,
            "of each": wide * 2,
            "coupled": ((wide - total) ** 2).sum(0),
            "running": jnp.cumsum(wide, 0)[-1],
            "in turns": jax.lax.fori_loop(0, 3, lambda i, a: a + wide.sum(0), jnp.zeros(4)),
            "norm": jnp.sqrt((slope.astype(jnp.float64) ** 2).sum()).astype(jnp.float32),
        }
    return w - slope, {**found, "loss": loss}


def equal(one: Any, other: Any) -> None:
    """Checks types and values."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.newest
@pytest.mark.parametrize("reduction", ["invariant", "fast"])
def test_values_of_64_bits_where_x64_is_off(reduction: str) -> None:
    w = jnp.ones(4)
    step = vnode.virtualize(metrics, virtual_nodes=8, reduction=reduction)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # jax warns where it truncates a type
        wanted = jax.jit(metrics)(w, X)
        found = [step.on(devices)(w, jnp.asarray(X)) for devices in (1, 3)]
    equal(wanted, found[0])
    np.testing.assert_allclose(found[0][1]["wide"], X.astype(np.float64).sum(0), rtol=1e-6)
    if reduction == "invariant":
        first, second = ([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(each)] for each in found)
        assert first == second


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # by jax, in the step
def test_arguments_of_64_bits_where_x64_is_off() -> None:
    with jax.enable_x64(True):
        w, x, count = jnp.eye(4), jnp.asarray(X, jnp.float64), jnp.asarray(2**40)

    def step(state: Any, x: Any) -> Any:
        w, count = state
        loss, slope = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
        return (w - slope, count + 1), (x.T @ x, loss)

    equal(jax.jit(step)((w, count), x), vnode.virtualize(step, virtual_nodes=8).on(2)((w, count), x))


def test_a_sum_is_complete_before_it_is_rounded_to_fewer_bits() -> None:
    """Sums of integers are exact in any order, so that NumPy's are the very results."""
    x = np.random.default_rng(1).integers(-8, 8, (24, 4)).astype(np.float32)
    x[0] += 2.0**20
    x[-1] -= 2.0**20
    total = x.sum(0)

    def step(state: Any, x: Any) -> Any:
        sums, ones = x.sum(0), jnp.ones(4, jnp.bfloat16)
        with jax.enable_x64(True):
            wide = x.astype(jnp.float64).sum(0)
            narrowed = wide.astype(jnp.float32), (wide + 1j).astype(jnp.complex64), wide.astype(jnp.float32).sum()
        return state, [*narrowed, sums.astype(jnp.bfloat16) @ ones, jax.lax.reduce_precision(sums, 8, 7).sum()]

    _, found = vnode.virtualize(step, virtual_nodes=8).on(2)(0, x)
    assert [each.dtype for each in found] == ["float32", "complex64", "float32", "bfloat16", "float32"]
    for one, other in zip(found, [total, total + 1j, *[total.sum()] * 3], strict=True):
        np.testing.assert_array_equal(np.asarray(one, one.dtype if one.dtype == "complex64" else np.float32), other)


def test_parts_of_bfloat16_sums_are_not_rounded() -> None:
    """Parts of 9 bits and more cancel, in loops over layers, a loop with a shared weight, a branch and a reshape."""
    x = np.random.default_rng(2).integers(101, 256, (24, 4)).astype(np.float32)
    x[12:] = -x[:12]
    x[-1] += 3
    ones, total = jnp.ones(4, jnp.bfloat16), x.sum(0)

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            values, _ = jax.lax.scan(lambda c, w: (c + x @ w, None), jnp.zeros(24, jnp.bfloat16), params["layers"])
            values = jax.lax.fori_loop(0, 2, lambda _, c: c + x @ params["shared"], values)
            values = jax.lax.cond(params["branch"][0] > 0, lambda c: c + x @ params["branch"], lambda c: c, values)
            return (values + x @ params["square"].reshape(4)).sum()

        return params, jax.grad(loss)(params)

    params = {"layers": jnp.stack([ones] * 3), "shared": ones, "branch": ones, "square": ones.reshape(2, 2)}
    step = vnode.virtualize(step, virtual_nodes=8)
    found = [step.on(devices)(params, jnp.asarray(x, jnp.bfloat16))[1] for devices in (1, 3)]
    wanted = {"layers": np.stack([total] * 3), "shared": 2 * total, "branch": total, "square": total.reshape(2, 2)}
    for each in found:
        for name, value in wanted.items():
            np.testing.assert_array_equal(np.asarray(each[name], np.float32), value, name)


def test_who_traces_later_refuses_64_bits_where_x64_is_off() -> None:
    step, arguments = vnode.virtualize(metrics, virtual_nodes=8), (jnp.ones(4), jnp.asarray(X))
    with pytest.raises(vnode.PartitionError, match="64-bit values where x64 is off"):
        vnode.partition.search(step, arguments, vnode.partition.Machine.here(jax.devices()[:2]))
    groups = [jax.devices()[:1], jax.devices()[1:3]]
    with pytest.raises(vnode.PlacementError, match="64-bit values where x64 is off"):
        step.on(vnode.Placement(8, groups=groups))(*arguments)
