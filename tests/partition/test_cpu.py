"""What XLA writes to memory on CPUs that no equation asks for: predicted beside what it compiles.

Memory that XLA says a compiled program takes is the reference. Must not know plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from vnode.analysis.program import inline
from vnode.partition.cost import Target, device_program, memory_of
from vnode.spmd.flow import follow
from vnode.spmd.layout import replicated


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def check(function: Callable[..., Any], *given: Any, off: float = 0.02, donated: Collection[int] = ()) -> None:
    """Temporary memory is as predicted, but for what is rounded up, and is some."""
    traced = jax.make_jaxpr(function)(*given)
    program = inline(traced.jaxpr, traced.consts)
    flow = follow(program, [replicated(len(var.aval.shape)) for var in program.inputs], {})
    said = memory_of(device_program(flow, {}, platform="cpu", donated=donated), Target.on("cpu")).temporaries
    analysis = jax.jit(function, donate_argnums=tuple(donated)).lower(*given).compile().memory_analysis()
    assert analysis is not None
    found = analysis.temp_size_in_bytes
    assert abs(said - found) <= max(off * found, 2048), (said, found)


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        ("bi,io->bo", (256, 64), (64, 128)),
        ("bo,io->bi", (256, 128), (64, 128)),  # rows for columns: as it is
        ("bi,bo->io", (256, 64), (256, 128)),
        ("bti,bto->io", (16, 32, 64), (16, 32, 128)),  # two are summed, and lead: one is copied
        ("bthk,ihk->bti", (16, 32, 8, 8), (64, 8, 8)),
        ("bto,hko->bthk", (16, 32, 64), (8, 8, 64)),
        ("bthd,bshd->bhts", (16, 32, 8, 8), (16, 32, 8, 8)),  # heads come before words: both are copied
        ("bhts,bshd->bthd", (16, 8, 32, 32), (16, 32, 8, 8)),
        ("gbh,igh->bi", (4, 16, 128), (128, 4, 128)),
        ("bij,bkj->bik", (16, 32, 64), (16, 48, 64)),
        ("bji,bjk->bik", (16, 64, 32), (16, 64, 48)),
    ],
)
def test_products_of_what_is_no_matrix_copy_it(spec: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check(lambda x, y: jnp.einsum(spec, x, y), ones(*a), ones(*b))


def test_groups_of_rows_are_multiplied_as_copies_of_all_rows() -> None:
    """Of experts that take examples from a list; going back each mask is written too, which is not predicted."""

    def loss(x: Any, w: Any, sizes: Any) -> Any:
        return jnp.mean(lax.ragged_dot(x, w, sizes) ** 2)

    given = ones(256, 64), ones(4, 64, 128), ones(4, dtype=jnp.int32)
    check(lax.ragged_dot, *given)
    check(jax.grad(loss, (0, 1)), *given, off=0.15)


def test_what_a_sum_and_others_read_is_written_for_the_sum() -> None:
    """A library sums; what is repeated for that, and for others, is an array."""

    def function(x: Any, scale: Any) -> Any:
        return (x * scale).sum(-1), (jnp.sin(x) + scale)[:, ::2]

    x = ones(16, 32, 64)
    check(function, x, ones(1, 1, 64))
    check(lambda x, scale: function(x, scale)[0], x, ones(1, 1, 64))


def test_products_that_only_a_sum_reads_are_not_written() -> None:
    check(lambda x, w: (x * jnp.tanh(x @ w)).sum(-1), ones(128, 128), ones(128, 128))
    check(lambda x, w: jnp.tanh(jnp.einsum("ji,jk->ik", x, w)).sum(-1), ones(128, 128), ones(128, 128))


@pytest.mark.parametrize("count", [3, 9])
def test_many_arrays_are_joined_apart_from_what_reads_them(count: int) -> None:
    def function(w: Any, *xs: Any) -> Any:
        return jnp.sin(jnp.concatenate([x @ w for x in xs]).T[:, ::6])

    check(function, ones(64, 64), *[ones(64, 64)] * count)


def test_what_is_padded_and_read_twice_is_written() -> None:
    def function(x: Any, i: Any) -> Any:
        part = lax.dynamic_slice(jnp.pad(x, ((0, 0), (0, 5), (0, 0))), (0, i, 0), (11, 8, 256))
        return part[:, :2] + 1, part[:, 5:] * 2

    check(function, ones(11, 27, 256), ones(dtype=jnp.int32))


def test_slices_of_what_does_not_change_are_taken_before_loops() -> None:
    """And the whole is held no longer than that."""

    def function(x: Any, w: Any, i: Any) -> Any:
        w = w @ w[:256].T

        def turn(c: Any, _: Any) -> Any:
            return jnp.tanh(c @ lax.dynamic_slice(w, (i, 0), (256, 256))), None

        return lax.scan(turn, x, None, length=5)[0]

    check(function, ones(4096, 256), ones(1024, 64), ones(dtype=jnp.int32), off=0.05)


def test_arrays_are_where_an_argument_was_until_the_result_comes() -> None:
    def function(w: Any, x: Any) -> Any:
        first = jnp.tanh(x @ w)  # nothing else reads w
        second = jnp.sin(first.T @ first)
        return (second @ first) * 2 + second, first.sum()

    check(function, ones(256, 256), ones(256, 256), donated=(0,))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_arguments_are_copied_that_may_be_read_after_their_results_are_written(layers: int) -> None:
    """What is copied later may be where one was that is copied earlier; gradients are where arguments were."""

    def function(weights: Any, x: Any) -> Any:
        inputs, h = [], x
        for w in weights:
            inputs.append(h)
            h = jnp.tanh(h @ w)
        new, back = [], h
        for w, h in zip(weights[::-1], inputs[::-1], strict=True):
            new.append(w - 0.1 * jnp.einsum("bi,bo->io", h, back))
            back = jnp.einsum("bo,io->bi", back, w)  # nothing says that it comes before the new weights are written
        return *new[::-1], back

    def flat(*given: Any) -> Any:
        return function(given[:-1], given[-1])

    check(flat, *[ones(256, 256)] * layers, ones(64, 256), donated=range(layers))


@pytest.mark.parametrize("rows", [slice(0, 128), slice(None, None, 2)])
def test_what_products_read_from_memory_others_compute_again(rows: slice) -> None:
    """So what it is made of is held as long."""

    def function(x: Any, y: Any) -> Any:
        whole = jnp.tanh(x @ y)
        part = whole[rows]
        return jnp.cos(part @ y) @ y.T * 2 + part

    check(function, ones(256, 256), ones(256, 256))


def test_what_is_made_of_several_is_not_computed_again_beside_products() -> None:
    def function(x: Any, y: Any) -> Any:
        several = jnp.abs(x @ y) * (y @ x)
        return jnp.cos(several @ y) @ y.T * 2 + several

    check(function, ones(256, 256), ones(256, 256))


@pytest.mark.parametrize("function", [jnp.sin, jnp.tan, jnp.tanh, jnp.exp, lambda x: 1 / x, lambda x: x / 3])
def test_dear_functions_are_computed_once_and_cheap_ones_where_they_are_read(function: Callable[[Any], Any]) -> None:
    def several(x: Any, y: Any, z: Any) -> Any:
        w = function(x @ y)
        return (w @ z) * 2 + w

    check(several, *[ones(256, 256)] * 3)
