"""What overflows in the step as written overflows on any number of nodes, and nothing else does.

Knows 16-bit floats and small integers, and the casts that surround their sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    "in_one_of_two_branches": lambda w, x: jax.lax.cond(
        w[0] > 0, lambda: x.sum(0).astype(jnp.float32), lambda: jnp.zeros(3)
    ),
    "bytes_that_wrap_around": lambda w, x: jax.lax.reduce(
        jnp.ones((16, 3), jnp.int8) * (x > 0).astype(jnp.int8) * jnp.int8(20), jnp.int8(0), jax.lax.add, (0,)
    ).astype(jnp.int32),
}


@pytest.mark.parametrize("name", STEPS)
def test_overflow_does_not_depend_on_nodes(name: str) -> None:
    want = jax.jit(STEPS[name])(W, X)
    for nodes in (2, 16):
        got = vnode.virtualize(STEPS[name], virtual_nodes=nodes).on(jax.devices()[:1])(W, X)
        jax.tree.map(np.testing.assert_array_equal, got, want)  # multiples of 1000, or infinite


# Sums of both signs, of which a node's own may overflow although the whole does not, and the other way round


def weights_gradient(x: jax.Array, use: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """The gradient of 16-bit weights, each of which every example adds `x` to."""
    return jax.grad(lambda w: use(x, w).astype(jnp.float32).sum())(jnp.ones(x.shape[1], HALF))


def kernels_gradient(x: jax.Array) -> jax.Array:
    def loss(kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    return jax.grad(lambda kernel: loss(kernel).astype(jnp.float32).sum())(jnp.ones((1, 3, 1), HALF)).reshape(3)


def layers_gradient(x: jax.Array) -> jax.Array:
    """A loop over layers casts the weights of each."""

    def loss(ws: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda _, w: (None, x @ w.astype(HALF)), None, ws)[1].astype(jnp.float32).sum()

    return jax.grad(loss)(jnp.ones((2, 3)))


def microbatches(x: jax.Array) -> jax.Array:
    parts = x.reshape(4, -1, 3)
    return jax.lax.scan(lambda c, part: (c + jnp.ones(part.shape[0], HALF) @ part, None), jnp.zeros(3, HALF), parts)[0]


def half(value: Any) -> Any:
    """Rounded to float16, in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(value, np.float64).astype(np.float16).astype(np.float64)


def total(x: Any) -> Any:
    return half(x.sum(0))


SUMS: dict[str, tuple[Callable[[jax.Array], Any], Callable[[np.ndarray], Any], bool]] = {
    # The step, what it means, and whether XLA, too, adds in more bits than 16; otherwise it may overflow on the way.
    "sum": (lambda x: x.sum(0), total, True),
    "sum_in_16_bits": (lambda x: jax.lax.reduce(x, HALF(0), jax.lax.add, (0,)), total, False),
    "product": (lambda x: x.T @ jnp.ones(x.shape[0], HALF), total, True),
    "gradient": (lambda x: weights_gradient(x, jnp.matmul), total, True),
    "gradient_of_a_scale": (lambda x: weights_gradient(x, jnp.multiply), total, False),
    "gradient_of_two_uses": (
        lambda x: weights_gradient(x, lambda x, w: x @ w - (x + x) @ w),
        lambda x: half(total(x) - half(half(2 * x).sum(0))),
        True,
    ),
    "gradient_of_a_kernel": (kernels_gradient, total, True),
    "gradient_of_layers": (layers_gradient, lambda x: np.stack([total(x)] * 2), True),
    "halved": (lambda x: (x.T @ jnp.ones(x.shape[0], HALF)) * HALF(0.5), lambda x: half(total(x) * 0.5), True),
    "added_up": (
        lambda x: x.T @ jnp.ones(x.shape[0], HALF) @ jnp.ones(3, HALF),
        lambda x: half(total(x).sum()),
        True,
    ),
    "of_both_halves": (
        lambda x: jnp.zeros((2, 3), HALF).at[jnp.arange(x.shape[0]) % 2].add(x),
        lambda x: np.stack([total(x[::2]), total(x[1::2])]),
        False,
    ),
    "in_a_loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + x.sum(0), jnp.zeros(3, HALF)),
        lambda x: half(3 * x.sum(0)),
        False,
    ),
    "in_a_branch": (
        lambda x: jax.lax.cond(x.shape[0] > 1, lambda x: x.T @ jnp.ones(x.shape[0], HALF), lambda x: x[0], x),
        total,
        True,
    ),
    "of_microbatches": (microbatches, lambda x: half(sum(map(total, np.split(x, 4)))), False),
    "norm": (jnp.linalg.norm, lambda x: half(np.sqrt(half(half(x * x).sum()))), True),
}


def every_sum(x: jax.Array) -> dict[str, Any]:
    return {name: step(x) for name, (step, _, _) in SUMS.items()}


@functools.cache
def programs() -> tuple[Callable[[jax.Array], Any], list[Callable[[jax.Array], Any]]]:
    """The step as written, and on 1, 2 and 5 nodes, which take padding."""
    return jax.jit(every_sum), [
        vnode.virtualize(every_sum, virtual_nodes=nodes, in_axes=0).on(jax.devices()[:1]) for nodes in (1, 2, 5)
    ]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(1.0, 4.8))
def test_finite_is_what_the_sum_is(seed: int, opposed: bool, most: float) -> None:
    """Not what each node's own is: half of them may have large numbers, and the others their negatives."""
    rng = np.random.default_rng(seed)
    sizes = 10 ** rng.uniform(most - 1, most, (12, 3))
    signs = np.repeat([[1.0], [-1.0]], 6, 0) if opposed else rng.choice([-1, 1, 1], (12, 3))
    x = half(sizes * signs)
    plain, nodes = programs()
    array = jnp.asarray(x, HALF)
    small = 4 * np.abs(x).sum() < 60000
    runs = [(plain(array), True), *((program(array), False) for program in nodes)]
    for name, (_, meaning, wide) in SUMS.items():
        want = np.asarray(meaning(x))
        near = [np.isfinite(meaning(x * (1 + change))) for change in (-0.02, 0.0, 0.02)]
        sure = (near[0] == near[1]) & (near[1] == near[2])
        size = np.abs(x).sum() + np.abs(x * x).sum() * (name == "norm")
        for result, as_written in runs:
            if as_written and not (wide or small):
                continue  # it overflows on the way, in some order
            got = np.asarray(result[name], np.float64)
            np.testing.assert_array_equal(np.isfinite(got)[sure], near[1][sure], name)
            finite = sure & near[1]
            assert (np.abs(got[finite] - want[finite]) <= size * 2.0**-9).all(), name


def test_loss_scaling_skips_the_same_steps() -> None:
    """Twenty steps whose scale is halved where the gradient overflows, and doubled after three where it does not."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)) + np.repeat([[3.0], [-3.0]], 6, 0), jnp.float32)

    def step(state: Any, x: jax.Array) -> Any:
        w, scale, good = state
        grads = jax.grad(lambda w: ((x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32) * scale).sum())(w)
        finite = jnp.isfinite(grads).all()
        good = jnp.where(finite, good + 1, 0)
        scale = jnp.where(finite, jnp.where(good % 3 == 0, scale * 2, scale), scale / 2)
        return (jnp.where(finite, w - grads / scale * 1e-3, w), scale, good), finite

    def skipped(step: Callable[[Any, jax.Array], Any]) -> list[bool]:
        state, found = (W, jnp.float32(2**16), jnp.int32(0)), []
        for _ in range(20):
            state, finite = step(state, x)
            found.append(bool(finite))
        return found

    want = skipped(jax.jit(step))
    assert {*want} == {True, False}
    for nodes in (1, 2, 4):
        assert skipped(vnode.virtualize(step, virtual_nodes=nodes).on(jax.devices()[:1])) == want
