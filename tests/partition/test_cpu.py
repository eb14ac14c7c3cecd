"""What XLA writes to memory on CPUs that no equation asks for: predicted beside what it compiles.

Memory that XLA says a compiled program takes is the reference. Must not know plans.
"""

from __future__ import annotations

from collections.abc import Callable
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


def check(function: Callable[..., Any], *given: Any, off: float = 0.02) -> None:
    """Temporary memory is as predicted, but for what is rounded up, and is some."""
    traced = jax.make_jaxpr(function)(*given)
    program = inline(traced.jaxpr, traced.consts)
    flow = follow(program, [replicated(len(var.aval.shape)) for var in program.inputs], {})
    said = memory_of(device_program(flow, {}, platform="cpu"), Target.on("cpu")).temporaries
    analysis = jax.jit(function).lower(*given).compile().memory_analysis()
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
