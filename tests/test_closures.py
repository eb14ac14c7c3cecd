"""Steps that close over values which jax is tracing: under every transformation these are arguments, as in `jax.jit`.

Knows transformations of functions of one array. Must not know how a step is traced or emitted. The reference is the
same transformation of the same function without `virtualize`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from tests.rounding import assert_same, eighths

pytestmark = pytest.mark.quickly

X = eighths(np.random.default_rng(0).normal(size=(7, 2)))
"""Seven examples on three nodes: the last node is padded."""

W = np.array([0.5, -1.5], np.float32)
Function = Callable[[Any], Any]


def step_of(fun: Callable[..., Any], devices: int | None) -> Callable[..., Any]:
    """A step on so many devices; without virtualize if None."""
    return fun if devices is None else vnode.virtualize(fun, virtual_nodes=3).on(jax.devices()[:devices])


def parameters(devices: int | None) -> Function:
    """The model's parameters are closed over; its activation has a derivative rule of its own."""
    return lambda w: step_of(lambda s, x: (jax.nn.relu(x @ w) * s).sum() + jnp.tanh(w).sum(), devices)(2.0, X)


def greatest(devices: int | None) -> Function:
    """What is reduced over the batch is no sum."""
    return lambda w: step_of(lambda s, x: jnp.max(x @ w) * s, devices)(2.0, X)


def batch(devices: int | None) -> Function:
    """The examples themselves are closed over, and what is split are their numbers and weights."""

    def run(w: Any) -> Any:
        examples = X * w

        def loss(s: Any, rows: Any) -> Any:
            return (jnp.sin(examples[rows["number"]]).sum(-1) * rows["weight"]).sum() * s + (examples**2).mean()

        return step_of(loss, devices)(2.0, {"number": np.arange(7), "weight": np.linspace(0.0, 1.0, 7, np.float32)})

    return run


def twice(devices: int | None) -> Function:
    """An argument and a closed-over value are the same array, and a step is called with what another one returned."""

    def run(w: Any) -> Any:
        step = step_of(lambda s, x: (jnp.exp(-((x @ w) ** 2)) * (x @ s)).mean() * s, devices)
        return step(step(w, X), X).sum()

    return run


FUNCTIONS = {f.__name__: f for f in (parameters, greatest, batch, twice)}


def in_scan(f: Function) -> Function:
    def run(w: Any) -> Any:
        return jax.lax.scan(lambda carry, scale: (carry + f(w * scale), f(carry * w)), 0.5, jnp.arange(1.0, 3.0))

    return run


def in_custom_rule(f: Function) -> Function:
    @jax.custom_vjp
    def doubled(w: Any) -> Any:
        return f(w)

    doubled.defvjp(lambda w: jax.vjp(f, w), lambda back, g: jax.tree.map(lambda leaf: 2 * leaf, back(g)))
    return jax.grad(doubled)


def in_custom_jvp(f: Function) -> Function:
    @jax.custom_jvp
    def doubled(w: Any) -> Any:
        return f(w)

    doubled.defjvp(lambda primals, tangents: (f(primals[0]), 2 * jax.jvp(f, primals, tangents)[1]))
    return jax.value_and_grad(doubled)


def in_branch(f: Function) -> Function:
    return jax.grad(lambda w: jax.lax.cond(w[0] > 0, f, lambda w: w.sum(), w))


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "call": lambda f: f,
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (w + 1,)),
    "jacfwd": jax.jacfwd,
    "jacrev_of_jacfwd": lambda f: jax.jacrev(jax.jacfwd(f)),
    "linearize": lambda f: lambda w: jax.linearize(f, w)[1](w),
    "vmap": lambda f: lambda w: jax.vmap(f)(jnp.stack([w, 2 * w])),
    "vmap_of_grad": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])),
    "grad_of_vmap": lambda f: jax.grad(lambda w: jax.vmap(f)(jnp.stack([w, 2 * w])).prod()),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": in_scan,
    "grad_of_scan": lambda f: jax.grad(lambda w: in_scan(f)(w)[0]),
    "custom_vjp": in_custom_rule,
    "custom_jvp": in_custom_jvp,
    "cond": in_branch,
}

JITS: dict[str, Callable[[Callable[[Function], Function], Function], Function]] = {
    "no_jit": lambda transform, f: transform(f),
    "jit_outside": lambda transform, f: jax.jit(transform(f)),
    "jit_inside": lambda transform, f: transform(jax.jit(f)),
    "jit_both": lambda transform, f: jax.jit(transform(jax.jit(f))),
}

ALL = [
    (function, transform, jit, devices)
    for function in FUNCTIONS
    for transform in TRANSFORMS
    for jit in JITS
    for devices in (1, 2)
]
"""The whole grid."""

SAMPLE = [case for i, case in enumerate(ALL) if i % 23 == 0]
"""Twenty-three has no factor in common with the sizes of the grid, so every value of each axis is met."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("function", "transform", "jit", "devices"), ALL if os.environ.get("VNODE_TEST_ALL") else SAMPLE
)
def test_a_closed_over_value_is_an_argument(function: str, transform: str, jit: str, devices: int) -> None:
    def run(devices: int | None) -> Function:
        return JITS[jit](TRANSFORMS[transform], FUNCTIONS[function](devices))

    assert_same(run(devices)(jnp.asarray(W)), run(None), jnp.asarray(W))


def test_a_key_that_a_step_closes_over_is_compared_on_other_devices() -> None:
    """The second program is compared with the first one, constants included, while it is traced."""
    key = jax.random.key(0)
    step = vnode.virtualize(lambda w, x: (jax.random.normal(key, x.shape) * x).sum(0) + w, virtual_nodes=3)
    one, three = (step.on(jax.devices()[:devices])(W, X) for devices in (1, 3))
    np.testing.assert_array_equal(one, three)
