"""What overflows in the step as written overflows on any number of nodes, and nothing else does.

Knows 16-bit floats and small integers, the casts that surround their sums, and the loops and branches around these.
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
from tests.budget import examples

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


@pytest.mark.sampled(5)
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


# Bodies that go on computing with a sum over the examples: all of it has to be there in the turn


def product(x: jax.Array) -> jax.Array:
    """The sum of the examples in 16 bits, added in 32 as XLA's matrix products are."""
    return jnp.ones(x.shape[0], HALF) @ x


def added_up(add: Callable[[Any, Any], Any], start: Any, parts: Any) -> Any:
    return jax.lax.scan(lambda total, part: (add(total, part), None), start, parts)[0]


def microbatches(x: jax.Array) -> jax.Array:
    """Every fourth example is in the same microbatch."""
    return x.reshape(-1, 4, 3).swapaxes(0, 1)


def loss_of_microbatches(x: jax.Array) -> jax.Array:
    """Layers of a checkpointed loop, whose weights are cast in each turn: their gradients are added in 32 bits."""

    def loss(w: jax.Array, part: jax.Array) -> jax.Array:
        return (part @ w.astype(HALF)).astype(jnp.float32).sum()

    total = jnp.float32(0)
    return jax.grad(lambda w: added_up(lambda c, part: c + jax.checkpoint(loss)(w, part), total, microbatches(x)))(
        jnp.ones(3)
    )


def while_loop(x: jax.Array) -> jax.Array:
    def turn(state: Any) -> Any:
        k, total = state
        return k + 1, total - product(x * k.astype(HALF)).astype(jnp.float32) * 0.5

    return jax.lax.while_loop(lambda state: state[0] < 3, turn, (jnp.int32(0), jnp.zeros(3)))[1]


def branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] == x[0, 0], lambda x: product(x).astype(jnp.float32) * 0.5, lambda x: jnp.ones(3), x)


def loop_in_a_loop(x: jax.Array) -> jax.Array:
    def outer(total: jax.Array, scale: jax.Array) -> jax.Array:
        return added_up(lambda c, part: c + product(part * scale), total, microbatches(x)) * HALF(0.5)

    return added_up(outer, jnp.zeros(3, HALF), jnp.asarray([1, -0.5], HALF))


def half(value: Any) -> Any:
    """Rounded to float16, in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(value, np.float64).astype(np.float16).astype(np.float64)


def total(x: Any) -> Any:
    return half(x.sum(0))


def in_turn(add: Callable[[Any, Any], Any], parts: Any, start: Any = 0.0) -> Any:
    return functools.reduce(add, parts, start)


SUMS: dict[str, tuple[Callable[[jax.Array], Any], Callable[[np.ndarray], Any], bool]] = {
    # The step, what it means, and whether XLA, too, adds in more bits than 16; otherwise it may overflow on the way.
    "sum": (lambda x: x.sum(0), total, True),
    "sum_in_16_bits": (lambda x: jax.lax.reduce_sum(x, (0,)), total, False),
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
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + product(x), jnp.zeros(3, HALF)),
        lambda x: in_turn(lambda c, _: half(c + total(x)), range(3)),
        True,
    ),
    "in_a_branch": (
        lambda x: jax.lax.cond(x.shape[0] > 1, lambda x: x.T @ jnp.ones(x.shape[0], HALF), lambda x: x[0], x),
        total,
        True,
    ),
    "of_microbatches": (
        lambda x: added_up(lambda c, part: c + product(part), jnp.zeros(3, HALF), x.reshape(4, -1, 3)),
        lambda x: in_turn(lambda c, part: half(c + total(part)), np.split(x, 4)),
        True,
    ),
    "of_examples": (
        lambda x: added_up(lambda c, row: c + row, jnp.zeros(3, HALF), x),
        lambda x: in_turn(lambda c, row: half(c + row), x),
        True,
    ),
    "of_microbatches_in_32_bits": (
        lambda x: added_up(lambda c, part: c + product(part).astype(jnp.float32), jnp.zeros(3), microbatches(x)),
        lambda x: in_turn(lambda c, part: c + total(part), [x[k::4] for k in range(4)]),
        True,
    ),
    "there_and_back": (
        lambda x: added_up(lambda c, sign: c + product(x * sign), jnp.zeros(3, HALF), jnp.asarray([1, 1, -2], HALF)),
        lambda x: in_turn(lambda c, sign: half(c + total(half(x * sign))), [1, 1, -2]),
        True,
    ),
    "of_the_last_turn": (
        lambda x: added_up(lambda _, part: product(part).astype(jnp.float32), jnp.zeros(3), microbatches(x)),
        lambda x: total(x[3::4]),
        True,
    ),
    "stacked": (
        lambda x: jax.lax.map(lambda part: (product(part) * HALF(0.5)).astype(jnp.float32), microbatches(x)),
        lambda x: np.stack([half(total(x[k::4]) / 2) for k in range(4)]),
        True,
    ),
    "checkpointed": (
        loss_of_microbatches,
        lambda x: in_turn(lambda c, part: c + total(part), [x[k::4] for k in range(4)]),
        True,
    ),
    "while": (while_loop, lambda x: in_turn(lambda c, k: c - total(half(x * k)) / 2, range(3)), True),
    "in_a_branch_halved": (branch, lambda x: total(x) / 2, True),
    "in_a_loop_in_a_loop": (
        loop_in_a_loop,
        lambda x: in_turn(
            lambda c, s: half(in_turn(lambda c, k: half(c + total(half(x[k::4] * s))), range(4), c) / 2), [1, -0.5]
        ),
        True,
    ),
    "norm": (
        lambda x: jnp.linalg.norm(x * HALF(1 / 256)),
        lambda x: half(np.sqrt(half(half((x / 256) ** 2).sum()))),
        True,
    ),
}


def every_sum(x: jax.Array) -> dict[str, Any]:
    return {name: step(x) for name, (step, _, _) in SUMS.items()}


@functools.cache
def programs() -> tuple[Callable[[jax.Array], Any], list[Callable[[jax.Array], Any]]]:
    """The step as written, and on 1, 2 and 5 nodes, which take padding."""
    return jax.jit(every_sum), [
        vnode.virtualize(every_sum, virtual_nodes=nodes, in_axes=0).on(jax.devices()[:1]) for nodes in (1, 2, 5)
    ]


@pytest.mark.thorough
def test_finite_is_what_the_sum_is() -> None:
    """Not what each node's own is: half of them may have large numbers, and the others their negatives."""
    seen: dict[str, list[np.ndarray]] = {name: [] for name in SUMS}

    @settings(max_examples=examples(30))
    @given(st.integers(0, 2**32 - 1))
    def equal(seed: int) -> None:
        """The magnitudes of a column add up to between half and some ten times the greatest float16."""
        rng = np.random.default_rng(seed)
        sizes = rng.uniform(0.1, 1, (12, 3))
        sizes *= 65504 * 2 ** (rng.uniform(0, 3.5) + rng.uniform(-1, 0, 3)) / sizes.sum(0)
        opposed = rng.random() < 0.3
        signs = np.repeat([[1], [-1]], 6, 0) if opposed else rng.choice([-1, 1], (12, 3), p=[0.1, 0.9])
        compare(half(np.minimum(sizes, 65000) * signs), seen)

    equal()
    for name, finite in seen.items():
        share = np.concatenate(finite).mean()
        assert 0.03 < share < 0.97, f"{name} proves little: {share:.0%} of what it gives are finite"


def compare(x: np.ndarray, seen: dict[str, list[np.ndarray]]) -> None:
    """Every sum of `x` by every program, with what it means."""
    plain, nodes = programs()
    array = jnp.asarray(x, HALF)
    small = 4 * np.abs(x).sum() < 60000
    runs = [(plain(array), True), *((program(array), False) for program in nodes)]
    for name, (_, meaning, wide) in SUMS.items():
        with np.errstate(invalid="ignore"):
            want = np.asarray(meaning(x))
            near = [np.isfinite(meaning(x * (1 + change))) for change in (-0.02, 0.0, 0.02)]
        sure = (near[0] == near[1]) & (near[1] == near[2])
        size = 6 * np.abs(x).sum() + np.abs(x * x).sum() * (name == "norm")
        for result, as_written in runs:
            if as_written and not (wide or small):
                continue  # it overflows on the way, in some order
            got = np.asarray(result[name], np.float64)
            np.testing.assert_array_equal(np.isfinite(got)[sure], near[1][sure], name)
            finite = sure & near[1]
            assert (np.abs(got[finite] - want[finite]) <= size * 2.0**-9).all(), name
        seen[name].append(np.ravel(near[1]))


STEPS_IN_A_ROW = 20


def rescaled(state: Any, grads: Any, where: Callable[..., Any]) -> tuple[Any, Any]:
    """Dynamic loss scaling: halved where a gradient is not finite, doubled after three steps where all are."""
    w, scale, good = state
    finite = (abs(grads) < np.inf).all()
    good = where(finite, good + 1, 0)
    scale = where(finite, where(good % 3 == 0, scale * 2, scale), scale / 2)
    return (where(finite, w - grads / state[1] * 1e-3, w), scale, good), finite


def skipped(step: Callable[[Any, Any], Any], state: Any, x: Any) -> tuple[list[bool], Any]:
    """Which of some steps were, and the last weights."""
    found = []
    for _ in range(STEPS_IN_A_ROW):
        state, finite = step(state, x)
        found.append(bool(finite))
    return found, np.asarray(state[0])


def test_loss_scaling_skips_the_same_steps() -> None:
    """Twenty steps whose scale is halved where the gradient overflows, and doubled after three where it does not."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)) + np.repeat([[3.0], [-3.0]], 6, 0), jnp.float32)

    def step(state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda w: ((x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32) * state[1]).sum())(state[0])
        return rescaled(state, grads, jnp.where)

    start = (W, jnp.float32(2**16), jnp.int32(0))
    want, _ = skipped(jax.jit(step), start, x)
    assert {*want} == {True, False}
    for nodes in (1, 2, 4):
        assert skipped(vnode.virtualize(step, virtual_nodes=nodes).on(jax.devices()[:1]), start, x)[0] == want


@pytest.mark.thorough
def test_gradient_accumulation_skips_the_same_steps() -> None:
    """Gradients of microbatches are summed in float16 and added up in float32: two nodes' sums are half of a turn's."""
    rng = np.random.default_rng(0)
    x = half(rng.normal(size=(4, 10, 3)) * 0.1 + rng.choice([1, -1], (4, 1, 3)) * rng.uniform(1, 2, (4, 1, 3)))

    def loss(w: jax.Array, part: jax.Array, scale: jax.Array) -> jax.Array:
        return ((part @ w).astype(jnp.float32) * scale).sum()

    def step(state: Any, x: jax.Array) -> Any:
        def turn(total: jax.Array, part: jax.Array) -> jax.Array:
            return total + jax.grad(loss)(state[0].astype(HALF), part, state[1]).astype(jnp.float32)

        return rescaled(state, added_up(turn, jnp.zeros(3), x), jnp.where)

    def by_hand(state: Any, x: np.ndarray) -> Any:
        return rescaled(state, in_turn(lambda c, part: c + half((half(state[1]) * part).sum(0)), x), np.where)

    with np.errstate(invalid="ignore"):
        want, weights = skipped(by_hand, (np.ones(3), 2.0**12, 0), x)
    assert 3 <= sum(want) <= STEPS_IN_A_ROW - 3
    start = (W, jnp.float32(2**12), jnp.int32(0))
    runs: list[Callable[[Any, Any], Any]] = [jax.jit(step)]
    for nodes, devices in ((1, 1), (2, 1), (2, 2), (5, 3)):
        virtual = vnode.virtualize(step, virtual_nodes=nodes, in_axes=(None, 1))
        runs.append(virtual.on(jax.devices()[:devices]))
    for run in runs:
        found, last = skipped(run, start, jnp.asarray(x, HALF))
        assert found == want
        np.testing.assert_allclose(last, weights, rtol=1e-3)


def loops_with_passes(step: Callable[..., Any], *args: Any) -> int:
    return len(vnode.virtualize(step, virtual_nodes=2, in_axes=0).explain(*args).nested)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2], ids=str)
def test_only_what_can_overflow_takes_passes_inside(dtype: Any) -> None:
    """A sum whose range is small, with which the body goes on computing; not if a cast is the last that it does."""
    x = jnp.ones((8, 3), dtype)
    small = jnp.finfo(dtype).maxexp < 128

    def of(body: Callable[[Any, Any], Any], carried: Any = jnp.float32) -> Callable[[Any], Any]:
        def sums(x: jax.Array) -> jax.Array:
            return jax.lax.dot_general(jnp.ones(x.shape[0], dtype), x, (((0,), (0,)), ((), ())))

        def step(x: jax.Array) -> Any:
            return jax.lax.scan(lambda c, s: body(c, sums(x * s)), jnp.zeros(3, carried), jnp.ones(2, dtype))

        return step

    def scales_of_layers(x: jax.Array) -> jax.Array:
        def loss(scales: jax.Array) -> jax.Array:
            h, _ = jax.lax.scan(lambda h, scale: (h * scale.astype(dtype), None), x, scales)
            return h.astype(jnp.float32).sum()

        return jax.grad(loss)(jnp.ones((2, 3)))

    def branch(other: float) -> Callable[[Any], Any]:
        def step(x: jax.Array) -> Any:
            def sums(x: jax.Array) -> jax.Array:
                return jax.lax.reduce_sum(x, (0,)).astype(jnp.float32)

            return jax.lax.cond(True, sums, lambda x: jnp.full(3, other), x)

        return step

    computing: list[Callable[[Any], Any]] = [
        of(lambda c, g: (c + g.astype(jnp.float32), None)),
        of(lambda c, g: (c + g, None), dtype),
        of(lambda c, g: (g.astype(jnp.float32), None)),
        of(lambda c, g: (c, (g * g.dtype.type(0.5)).astype(jnp.float32))),
        of(lambda c, g: (c, g.astype(jnp.float32).sum())),
        branch(1.0),
    ]
    assert [loops_with_passes(step, x) for step in computing] == [int(small)] * len(computing)
    moving: list[Callable[[Any], Any]] = [
        of(lambda c, g: (c, g)),
        of(lambda c, g: (c, g.astype(jnp.float32)[None, ::-1])),
        of(lambda c, g: (g, c), dtype),
        branch(0.0),
        scales_of_layers,
    ]
    assert [loops_with_passes(step, x) for step in moving] == [0] * len(moving)


def test_a_cast_sum_that_a_loop_starts_from() -> None:
    """The loop must not be given nodes' pieces of it: they are finite where the sum is not."""

    def step(x: jax.Array) -> jax.Array:
        start = product(x).astype(jnp.float32)
        return added_up(lambda c, s: c + (x.astype(jnp.float32) * s).sum(0), start, jnp.arange(2.0))

    for nodes in (1, 2, 5):
        got = vnode.virtualize(step, virtual_nodes=nodes, in_axes=0).on(jax.devices()[:1])(X)
        np.testing.assert_array_equal(got, jax.jit(step)(X))
        assert np.isinf(got).all()
