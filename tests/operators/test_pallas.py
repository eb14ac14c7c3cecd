"""Pallas kernels against their descriptions: parts of a call, evaluated apart, make up the whole call.

Knows `jax.experimental.pallas`, interpreted on CPUs. `brute_force` cuts and compares; the table says which axes are
split, so that a description that splits none would be found as well as one that splits too many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.operators.brute_force import check, instances
from vnode.operators import OperatorDescription, describe

pytestmark = pytest.mark.quickly


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def call(kernel: Callable[..., None], *shapes: tuple[int, ...], **options: Any) -> Callable[..., Any]:
    """A call of a kernel that gives arrays of some shapes."""
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def run(*operands: Any) -> Any:
        shape = results if len(results) > 1 else results[0]
        return pl.pallas_call(kernel, out_shape=shape, interpret=True, **options)(*operands)

    return run


def rows(block: int, width: int = 4) -> pl.BlockSpec:
    return pl.BlockSpec((block, width), lambda i: (i, 0))


def over_rows(kernel: Callable[..., None], n: int, block: int, operands: int = 1, **options: Any) -> Callable[..., Any]:
    """A kernel of blocks of rows ``[n, 4]``."""
    grid, specs = (-(-n // block),), [rows(block)] * operands
    return call(kernel, (n, 4), grid=grid, in_specs=specs, out_specs=rows(block), **options)


X, NUMBERS = array(12, 4), np.array([3, 0, 5, 1, 4, 2], np.int32)
KEPT = pltpu.VMEM((2, 4), jnp.float32)


# Kernels -------------------------------------------------------------------------------------------------------------


def twice(x: Any, o: Any) -> None:
    o[...] = 2 * jnp.tanh(x[...])


def normalize(x: Any, scale: Any, o: Any) -> None:
    """Rows by themselves, with a branch, a loop and a scratch-like carry in it."""
    mean = jax.lax.fori_loop(0, 4, lambda k, total: total + x[:, pl.ds(k, 1)], jnp.zeros((x.shape[0], 1))) / 4
    y = x[...] - mean

    @pl.when(scale[0, 0] > -100)
    def _() -> None:
        o[...] = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-3) * scale[...]

    @pl.when(scale[0, 0] <= -100)
    def _() -> None:
        o[...] = jnp.zeros_like(o)


def centre(x: Any, o: Any) -> None:
    o[...] = x[...] - x[...].mean(0)


def place_in_block(x: Any, o: Any) -> None:
    o[...] = x[...] + jax.lax.broadcasted_iota(jnp.float32, x.shape, 0)


def first_row_of_block(x: Any, o: Any) -> None:
    o[...] = x[...] + x[0:1, :]


def written_by_row(x: Any, o: Any, kept: Any) -> None:
    kept[0:1, :] = jnp.ones((1, 4))
    kept[1:2, :] = jnp.zeros((1, 4))
    o[...] = x[...] * kept[...]


def numbered(x: Any, o: Any) -> None:
    o[...] = x[...] * pl.program_id(0)


def numbered_in_a_loop(x: Any, o: Any) -> None:
    number = pl.program_id(0)
    o[...] = jax.lax.fori_loop(0, 2, lambda k, y: y + number + k, x[...])


def product(x: Any, w: Any, o: Any, total: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...] @ w[...]

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        o[...] = total[...]


def product_in_place(x: Any, w: Any, o: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        o[...] = jnp.zeros_like(o)

    o[...] += x[...] @ w[...]


def previous(x: Any, o: Any, kept: Any) -> None:
    """Each step gives what the one before was given."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        kept[...] = jnp.zeros_like(kept)

    o[...] = kept[...]
    kept[...] = x[...]


def count_steps(x: Any, o: Any, kept: Any) -> None:
    o[...] = x[...]
    kept[...] = kept[...] + 1


def by_length(lengths: Any, x: Any, o: Any) -> None:
    o[...] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < lengths[pl.program_id(0)], x[...], 0)


def by_next_length(lengths: Any, x: Any, o: Any) -> None:
    o[...] = x[...] * lengths[(pl.program_id(0) + 1) % 6]


def copied(scalars: Any, x: Any, o: Any) -> None:
    o[...] = x[...]


def added(x: Any, y: Any, o: Any) -> None:
    o[...] = x[...] + y[...]


def squared(x: Any, o: Any) -> None:
    o[...] = x[...] ** 2


def sums(
    add: Callable[..., None], *, first: Any = 0.0, last: Callable[[Any], Any] = lambda y: y
) -> Callable[..., None]:
    """A kernel that adds up blocks of rows ``[2, 4]`` in scratch memory, axis 0 being the only one."""

    def kernel(x: Any, o: Any, total: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            total[...] = jnp.full_like(total, first)

        add(x, total)

        @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
        def _() -> None:
            o[...] = last(total[...])

    return kernel


def add_squares(x: Any, total: Any) -> None:
    total[...] += x[...] * x[...]


def add_exponentials(x: Any, total: Any) -> None:
    total[...] += jnp.exp(x[...])


def add_quotients(x: Any, total: Any) -> None:
    total[...] += x[...] / jnp.abs(x[...])


def add_by_number(x: Any, total: Any) -> None:
    total[...] += x[...] * pl.program_id(0)


def add_some(x: Any, total: Any) -> None:
    @pl.when(x[0, 0] > 0)
    def _() -> None:
        total[0:1, :] += x[0:1, :]


def decay(x: Any, total: Any) -> None:
    total[...] = 0.5 * total[...] + x[...]


def add_what_is_there(x: Any, total: Any) -> None:
    total[...] += x[...] * total[...]


def add_elsewhere(x: Any, total: Any) -> None:
    total[0:1, :] = total[1:2, :] + x[0:1, :]


def greatest(x: Any, total: Any) -> None:
    total[...] = jnp.maximum(total[...], x[...])


def count(x: Any, total: Any) -> None:
    total[...] += 1.0


def added_after(x: Any, o: Any, total: Any) -> None:
    """The last term is not in the result."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    o[...] = total[...]
    total[...] += x[...]


def handed_on_each_time(x: Any, o: Any, total: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...]
    o[...] = total[...]


def never_begun(x: Any, o: Any) -> None:
    o[...] += x[...]


def normalize_backward(x: Any, g: Any, dx: Any, ds: Any) -> None:
    """The gradient of rows, and of what all rows are scaled by."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        ds[...] = jnp.zeros_like(ds)

    r = jax.lax.rsqrt((x[...] ** 2).mean(-1, keepdims=True) + 1e-3)
    dx[...] = g[...] * r
    ds[...] += (x[...] * r * g[...]).sum(0, keepdims=True)


def squares_and_sums(x: Any, g: Any, dx: Any, ds: Any) -> None:
    """The sum is linear in neither operand."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        ds[...] = jnp.zeros_like(ds)

    dx[...] = x[...]
    ds[...] += (x[...] * x[...] * g[...] * g[...]).sum(0, keepdims=True)


def rows_and_sums(kernel: Callable[..., None]) -> Callable[..., Any]:
    one = pl.BlockSpec((1, 4), lambda i: (0, 0))
    return call(kernel, (12, 4), (1, 4), grid=(6,), in_specs=[rows(2)] * 2, out_specs=[rows(2), one])


def summed(kernel: Callable[..., None], scratch: bool = True) -> Callable[..., Any]:
    """Of blocks of rows one result ``[2, 4]``."""
    options: Any = {"scratch_shapes": [KEPT]} if scratch else {}
    return call(
        kernel, (2, 4), grid=(6,), in_specs=[rows(2)], out_specs=pl.BlockSpec((2, 4), lambda i: (0, 0)), **options
    )


def matrices(kernel: Callable[..., None], scratch: bool, **options: Any) -> Callable[..., Any]:
    """A product ``[12, 4] x [4, 12]`` in blocks."""
    if scratch:
        options["scratch_shapes"] = [pltpu.VMEM((4, 2), jnp.float32)]
    specs = [pl.BlockSpec((4, 2), lambda i, j, k: (i, k)), pl.BlockSpec((2, 2), lambda i, j, k: (k, j))]
    out = pl.BlockSpec((4, 2), lambda i, j, k: (i, j))
    return call(kernel, (12, 12), grid=(3, 6, 2), in_specs=specs, out_specs=out, **options)


def with_scalars(kernel: Callable[..., None], index_map: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of rows ``[6, 4]`` that is given one number for each."""
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(6,),
        in_specs=[pl.BlockSpec((1, 4), index_map)],
        out_specs=pl.BlockSpec((1, 4), lambda i, s: (i, 0)),
    )
    return call(kernel, (6, 4), grid_spec=grid)


def by_maps(*maps: Callable[..., Any], shapes: list[tuple[int, ...]], grid: tuple[int, ...]) -> Callable[..., Any]:
    """Rows of several operands, of which each step has one, numbered by some maps; the last map is the result's."""

    def block(shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (None,) * (len(shape) - 2) + (1, shape[-1])

    specs = [pl.BlockSpec(block(shape), index_map) for shape, index_map in zip(shapes, maps, strict=True)]
    kernel = added if len(shapes) == 3 else squared
    return call(kernel, shapes[-1], grid=grid, in_specs=specs[:-1], out_specs=specs[-1])


def parallel(*words: Any) -> Any:
    return pltpu.CompilerParams(dimension_semantics=words)


KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], set[str]]] = {
    # Rows that are independent within blocks may be cut anywhere.
    "rows": (over_rows(twice, 12, 2), (X,), {"0.0"}),
    "rows that do not fill the last block": (over_rows(twice, 11, 4), (X[:11],), {"0.0"}),
    "rows beside what all share": (
        call(
            normalize, (12, 4), grid=(6,), in_specs=[rows(2), pl.BlockSpec((1, 4), lambda i: (0, 0))], out_specs=rows(2)
        ),
        (X, array(1, 4, seed=1)),
        {"0.0"},
    ),
    # Others are cut between blocks.
    "blocks": (over_rows(centre, 12, 2), (X,), {"0.0"}),
    "blocks that are not full": (over_rows(centre, 11, 2), (X[:11],), set()),
    "a place in a block": (over_rows(place_in_block, 12, 2), (X,), {"0.0"}),
    "a place in a block that is not full": (over_rows(place_in_block, 11, 2), (X[:11],), set()),
    "a row for all": (over_rows(first_row_of_block, 11, 2), (X[:11],), set()),
    "rows of scratch": (over_rows(written_by_row, 11, 2, scratch_shapes=[KEPT]), (X[:11],), set()),
    "no grid": (call(twice, (12, 4)), (X,), set()),
    # What a step knows of its place.
    "a program id": (over_rows(numbered, 12, 2), (X,), set()),
    "a program id in a loop": (over_rows(numbered_in_a_loop, 12, 2), (X,), set()),
    "a program id of another axis": (
        call(
            numbered,
            (2, 12, 4),
            grid=(2, 6),
            in_specs=[pl.BlockSpec((1, 2, 4), lambda i, j: (i, j, 0))],
            out_specs=pl.BlockSpec((1, 2, 4), lambda i, j: (i, j, 0)),
        ),
        (array(2, 12, 4),),
        {"0.1"},
    ),
    "a program id under vmap": (jax.vmap(over_rows(numbered, 12, 2)), (array(6, 12, 4),), {"0.0"}),
    # What steps leave for others.
    "a product": (matrices(product, True), (X, array(4, 12)), {"0.0", "0.1+", "1.0+", "1.1"}),
    "a product in place": (matrices(product_in_place, False), (X, array(4, 12)), {"0.0", "0.1+", "1.0+", "1.1"}),
    "products": (
        jax.vmap(matrices(product, True)),
        (array(6, 12, 4), array(6, 4, 12)),
        {"0.0", "0.1", "0.2+", "1.0", "1.1+", "1.2"},
    ),
    "products by one": (
        jax.vmap(matrices(product, True), (0, None)),
        (array(6, 12, 4), array(4, 12)),
        {"0.0", "0.1", "0.2+", "1.0+", "1.1"},
    ),
    "what a step left": (over_rows(previous, 12, 2, scratch_shapes=[KEPT]), (X,), set()),
    "what a step left under vmap": (
        jax.vmap(over_rows(previous, 12, 2, scratch_shapes=[KEPT])),
        (array(6, 12, 4),),
        {"0.0"},
    ),
    "what no step reads, perhaps": (over_rows(count_steps, 12, 2, scratch_shapes=[KEPT]), (X,), set()),
    "what no step reads, its author says": (
        over_rows(count_steps, 12, 2, scratch_shapes=[KEPT], compiler_params=parallel("parallel")),
        (X,),
        {"0.0"},
    ),
    "cores together": (over_rows(centre, 12, 2, compiler_params=parallel("core_parallel")), (X,), set()),
    "a sum over steps": (
        call(
            product_in_place,
            (4, 2),
            grid=(1, 1, 6),
            in_specs=[pl.BlockSpec((4, 2), lambda i, j, k: (0, k)), pl.BlockSpec((2, 2), lambda i, j, k: (k, 0))],
            out_specs=pl.BlockSpec((4, 2), lambda i, j, k: (0, 0)),
        ),
        (array(4, 12), array(12, 2)),
        {"0.1+", "1.0+"},
    ),
    "a sum": (summed(sums(add_squares)), (X,), {"0.0+"}),
    "a sum where some are": (summed(sums(add_some)), (X,), {"0.0+"}),
    "a sum that is handed on at each step": (summed(handed_on_each_time), (X,), {"0.0+"}),
    "rows, and a sum of them": (rows_and_sums(normalize_backward), (X, array(12, 4, seed=1)), {"0.0", "1.0"}),
    "rows, and a sum of squares": (rows_and_sums(squares_and_sums), (X, array(12, 4, seed=1)), set()),
    "a sum that begins with one": (summed(sums(add_squares, first=1.0)), (X,), set()),
    "a mean": (summed(sums(add_squares, last=lambda y: y / 6)), (X,), set()),
    "a sum of what padding would be in": (summed(sums(add_exponentials)), (X,), set()),
    "a sum of what padding would spoil": (summed(sums(add_quotients)), (X,), set()),
    "a count of steps": (summed(sums(count)), (X,), set()),
    "a sum by numbers": (summed(sums(add_by_number)), (X,), set()),
    "a sum that decays": (summed(sums(decay)), (X,), set()),
    "a product of sums": (summed(sums(add_what_is_there)), (X,), set()),
    "a sum of other places": (summed(sums(add_elsewhere)), (X,), set()),
    "a maximum": (summed(sums(greatest)), (X,), set()),
    "a sum without its last term": (summed(added_after), (X,), set()),
    "a sum with others' steps between": (
        call(
            sums(add_squares),
            (2, 8),
            grid=(6, 2),
            in_specs=[pl.BlockSpec((2, 4), lambda k, i: (k, i))],
            out_specs=pl.BlockSpec((2, 4), lambda k, i: (0, i)),
            scratch_shapes=[KEPT],
        ),
        (array(12, 8),),
        set(),
    ),
    # Scalars that are there before.
    "lengths": (with_scalars(by_length, lambda i, s: (i, 0)), (NUMBERS, X[:6]), {"0.0", "1.0"}),
    "others' lengths": (with_scalars(by_next_length, lambda i, s: (i, 0)), (NUMBERS, X[:6]), set()),
    "rows by number": (with_scalars(copied, lambda i, s: (s[i], 0)), (NUMBERS, X[:6]), {"0.0"}),
    "rows by others' numbers": (with_scalars(copied, lambda i, s: (s[5 - i], 0)), (NUMBERS, X[:6]), set()),
    # Maps.
    "heads in groups": (
        by_maps(
            lambda h: (h, 0), lambda h: (h // 2, 0), lambda h: (h, 0), shapes=[(12, 4), (6, 4), (12, 4)], grid=(12,)
        ),
        (X, array(6, 4)),
        {"0.0", "1.0"},
    ),
    "two axes in one": (
        by_maps(lambda b, h: (b * 2 + h, 0), lambda b, h: (b, h, 0), shapes=[(12, 4), (6, 2, 4)], grid=(6, 2)),
        (X,),
        {"0.0"},
    ),
    "one axis in two": (
        by_maps(lambda g: (g, 0), lambda g: (g // 2, g % 2, 0), shapes=[(12, 4), (6, 2, 4)], grid=(12,)),
        (X,),
        {"0.0"},
    ),
    "backwards": (by_maps(lambda i: (11 - i, 0), lambda i: (i, 0), shapes=[(12, 4), (12, 4)], grid=(12,)), (X,), set()),
    "the minor axis first": (
        by_maps(lambda b, h: (h * 6 + b, 0), lambda b, h: (b, h, 0), shapes=[(12, 4), (6, 2, 4)], grid=(6, 2)),
        (X,),
        {"0.0"},
    ),
    "a row for every step": (
        by_maps(lambda i: (0, 0), lambda i: (i, 0), lambda i: (i, 0), shapes=[(1, 4), (12, 4), (12, 4)], grid=(12,)),
        (array(1, 4), X),
        {"1.0"},
    ),
    "on a diagonal": (
        by_maps(lambda i: (i, i, 0), lambda i: (i, 0), shapes=[(6, 6, 4), (6, 4)], grid=(6,)),
        (array(6, 6, 4),),
        set(),
    ),
    # Operands whose memory a result takes.
    "in place": (over_rows(added, 12, 2, 2, input_output_aliases={1: 0}), (X, array(12, 4, seed=1)), {"0.0", "1.0"}),
    "in the place of all": (
        call(
            added,
            (12, 4),
            grid=(12,),
            in_specs=[rows(1), pl.BlockSpec((12, 4), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((12, 4), lambda i: (0, 0)),
            input_output_aliases={1: 0},
        ),
        (X, X),
        set(),
    ),
}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", KERNELS)
def test_parts_make_up_the_whole(name):
    fun, args, expected = KERNELS[name]
    (instance,) = instances(fun, *args, of=frozenset({"pallas_call"}))
    assert split_dimensions(check(instance)) == expected


def split_dimensions(description: OperatorDescription) -> set[str]:
    """The operands' dimensions along which a call is split, as ``operand.dimension``; with a plus where it adds up."""
    return {
        f"{i}.{d}" + "+" * (dim[0] in description.reduced)
        for i, dims in enumerate(description.operands)
        for d, dim in enumerate(dims)
        if any(factor not in description.whole for factor in dim)
    }


def test_a_sum_that_never_begins_is_none():
    """Its result is added to what was there before: nobody knows what."""
    (eqn,) = pallas_calls(summed(never_begun, scratch=False), X)
    assert split_dimensions(described(eqn)) == set()


def test_grids_of_unknown_size_and_kernels_with_effects():
    def dynamic(n: Any, x: Any) -> Any:
        return call(twice, (12, 4), grid=(n,), in_specs=[rows(2)], out_specs=rows(2))(x)

    (eqn,) = pallas_calls(dynamic, np.int32(6), X)
    assert split_dimensions(described(eqn)) == set()
    effects = pltpu.CompilerParams(has_side_effects=True)
    (eqn,) = pallas_calls(over_rows(twice, 12, 2, compiler_params=effects), X)
    assert split_dimensions(described(eqn)) == set()


def test_work_is_that_of_all_steps_or_what_the_author_says():
    (eqn,) = pallas_calls(over_rows(twice, 12, 2), X)
    assert described(eqn).operations.operations == 2 * 12 * 4 and described(eqn).operations.transcendental == 12 * 4
    estimate = pl.CostEstimate(flops=2400, transcendentals=12, bytes_accessed=7)
    (eqn,) = pallas_calls(over_rows(twice, 12, 2, cost_estimate=estimate), X)
    assert described(eqn).operations.operations == 2400
    d = described(eqn)
    assert d.emit is not None
    emit = d.emit
    part = jax.make_jaxpr(lambda x: emit(d, eqn, [x], (6, *d.sizes[1:]), {}))(X[:6])
    (eqn,) = [each for each in part.jaxpr.eqns if each.primitive.name == "pallas_call"]
    assert eqn.params["cost_estimate"].flops == 1200 and eqn.params["grid_mapping"].grid == (3,)


def described(eqn: Any) -> OperatorDescription:
    description = describe(eqn)
    assert description is not None
    return description


def pallas_calls(fun: Callable[..., Any], *args: Any) -> list[Any]:
    pending, found = [jax.make_jaxpr(fun)(*args).jaxpr], []
    while pending:
        for eqn in pending.pop().eqns:
            if eqn.primitive.name == "pallas_call":
                found.append(eqn)
            elif hasattr(inner := getattr(eqn.params.get("jaxpr"), "jaxpr", eqn.params.get("jaxpr")), "eqns"):
                pending.append(inner)
    return found
