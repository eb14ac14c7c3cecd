"""What overflows in the step as written overflows on any number of nodes, and nothing else does.

Knows 16-bit floats and small integers, and the casts that surround their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode

HALF = jnp.float16
X = jnp.full((16, 3), 8000.0, HALF)
W = jnp.ones(3, jnp.float32)


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(lambda w: (x @ w.astype(HALF)).astype(jnp.float32).sum())(w)


def tied(w: jax.Array, x: jax.Array) -> jax.Array:
    """The weight is cast at each use: two sums of 16 bits are added in 32."""
    return jax.grad(lambda w: ((x @ w.astype(HALF)) + (x @ (2 * w).astype(HALF))).astype(jnp.float32).sum())(w)


def skipping(w: jax.Array, x: jax.Array) -> Any:
    grads = gradient(w, x)
    finite = jnp.isfinite(grads).all()
    return jnp.where(finite, w - 0.1 * grads, w), finite


STEPS: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "cast_after_the_sum": lambda w, x: x.sum(0).astype(jnp.float32) * 0.5,
    "cast_before_the_sum": lambda w, x: x.astype(jnp.float32).sum(0),
    "cast_before_and_after": lambda w, x: x.astype(jnp.float32).sum(0).astype(HALF).astype(jnp.float32),
    "scaled_after_the_sum": lambda w, x: (x.sum(0) * HALF(0.1)).astype(jnp.float32),
    "negated": lambda w, x: (-x.sum(0)).astype(jnp.float32),
    "product_of_matrices": lambda w, x: (x.T @ x).astype(jnp.float32),
    "gradient": gradient,
    "gradient_of_two_uses": tied,
    "skipped_update": skipping,
    "bytes_that_wrap_around": lambda w, x: jax.lax.reduce(
        jnp.ones((16, 3), jnp.int8) * (x > 0).astype(jnp.int8) * jnp.int8(20), jnp.int8(0), jax.lax.add, (0,)
    ).astype(jnp.int32),
}


@pytest.mark.parametrize("name", STEPS)
def test_overflow_does_not_depend_on_nodes(name: str) -> None:
    want = jax.jit(STEPS[name])(W, X)
    for nodes in (2, 16):
        got = vnode.virtualize(STEPS[name], virtual_nodes=nodes).on(jax.devices()[:1])(W, X)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-3), got, want)
