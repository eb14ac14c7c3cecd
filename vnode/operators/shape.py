"""Shape operators: the elements stay what they are and get other indices, or repeat.

Knows how the dimensions of operand and result correspond. Must not know which of them carries examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from vnode.operators.description import (
    Dim,
    Dims,
    Factors,
    OperatorDescription,
    Positions,
    Resize,
    Sizes,
    rule,
    shape_resize,
)

FIRST = (frozenset({0}),)


@rule("broadcast_in_dim")
def broadcast_in_dim(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    result = f.dims(eqn.outvars[0].aval.shape)
    shape = eqn.invars[0].aval.shape
    operand = tuple(
        result[d] if n == eqn.outvars[0].aval.shape[d] else ()
        for n, d in zip(shape, eqn.params["broadcast_dimensions"], strict=True)
    )
    return OperatorDescription(
        sizes=f.sizes, operands=(operand,), results=(result,), linear=FIRST, movement=True, resize=shape_resize("shape")
    )


def common_refinement(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[Dim], list[Dim], set[int]]:
    """Writes the shapes of a reshape over common factors.

    Row-major order is kept, so a major (or minor) part that both shapes share is a factor of its own; what is left
    between, where neither shape divides the other, can only be taken whole.

    Args:
      a: the operand's shape.
      b: the result's shape, with as many elements.

    Returns:
      Factor sizes, the operand's dimensions, the result's dimensions, and the factors that must be whole.

    Example:
      >>> common_refinement((6, 4), (2, 12))
      ([2, 3, 4], [(0, 1), (2,)], [(0,), (1, 2)], set())
      >>> common_refinement((5, 3), (3, 5))[3]
      {0, 1, 2, 3}
    """
    sizes: list[int] = []
    whole: set[int] = set()
    dims: tuple[list[Dim], list[Dim]] = ([() for _ in a], [() for _ in b])
    left = [[d, n] for d, n in enumerate(a) if n != 1]
    right = [[d, n] for d, n in enumerate(b) if n != 1]

    def new(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    def append(side: int, d: int, factor: int) -> None:
        dims[side][d] = (*dims[side][d], factor)

    while left and right:
        size = math.gcd(left[0][1], right[0][1])
        if size > 1:
            factor = new(size)
            for side, rest in enumerate((left, right)):
                append(side, rest[0][0], factor)
                rest[0][1] //= size
                if rest[0][1] == 1:
                    del rest[0]
            continue
        # Take the smallest block whose element counts agree; inside it only the minor end may still be shared.
        blocks = ([left.pop(0)], [right.pop(0)])
        counts = [blocks[0][0][1], blocks[1][0][1]]
        while counts[0] != counts[1]:
            side = 0 if counts[0] < counts[1] else 1
            blocks[side].append((left, right)[side].pop(0))
            counts[side] *= blocks[side][-1][1]
        minor: list[tuple[int, int, int]] = []
        while blocks[0] and blocks[1] and (size := math.gcd(blocks[0][-1][1], blocks[1][-1][1])) > 1:
            minor.append((size, blocks[0][-1][0], blocks[1][-1][0]))
            for block in blocks:
                block[-1][1] //= size
                if block[-1][1] == 1:
                    del block[-1]
        for side, block in enumerate(blocks):
            for d, n in block:
                factor = new(n)
                whole.add(factor)
                append(side, d, factor)
        for size, d, e in reversed(minor):
            factor = new(size)
            append(0, d, factor)
            append(1, e, factor)
    return sizes, dims[0], dims[1], whole


@rule("reshape")
def reshape(eqn: JaxprEqn) -> OperatorDescription:
    operand, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if 0 in operand:
        f = Factors()
        dims, out = f.dims(operand), f.dims(result)
        return OperatorDescription(
            sizes=f.sizes, operands=(dims,), results=(out,), whole=frozenset(range(len(f.sizes)))
        )
    order = eqn.params["dimensions"] or range(len(operand))  # the operand is transposed first
    sizes, ordered, out, whole = common_refinement([operand[d] for d in order], result)
    dims = dict(zip(order, ordered, strict=True))
    return OperatorDescription(
        sizes=tuple(sizes),
        operands=(tuple(dims[d] for d in range(len(operand))),),
        results=(tuple(out),),
        whole=frozenset(whole),
        linear=FIRST,
        movement=True,
        resize=lambda d, e, s: {**e.params, "new_sizes": d.result_shape(0, s)},
    )


@rule("transpose")
def transpose(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    result = tuple(operand[d] for d in eqn.params["permutation"])
    return OperatorDescription(sizes=f.sizes, operands=(operand,), results=(result,), linear=FIRST, movement=True)


@rule("squeeze")
def squeeze(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    gone = set(eqn.params["dimensions"])
    operand = tuple(() if d in gone else (f.new(n),) for d, n in enumerate(eqn.invars[0].aval.shape))
    result = tuple(dim for d, dim in enumerate(operand) if d not in gone)
    return OperatorDescription(sizes=f.sizes, operands=(operand,), results=(result,), linear=FIRST, movement=True)


@rule("concatenate")
def concatenate(eqn: JaxprEqn) -> OperatorDescription:
    """Operands of sizes 2n and n join to a dimension of 3 blocks of n; the blocks themselves cannot be split."""
    f = Factors()
    axis = eqn.params["dimension"]
    shape = eqn.outvars[0].aval.shape
    shared = (*f.dims(shape[:axis]), (), *f.dims(shape[axis + 1 :]))
    sizes = [atom.aval.shape[axis] for atom in eqn.invars]
    block = f.new(math.gcd(*sizes))
    unit = f.sizes[block]
    counts = [f.new(n // unit) if unit else f.new(1) for n in sizes]
    total = f.new(sum(f.sizes[c] for c in counts))

    def at_axis(dim: Dim) -> tuple[Dim, ...]:
        return (*shared[:axis], dim, *shared[axis + 1 :])

    return OperatorDescription(
        sizes=f.sizes,
        operands=tuple(at_axis((c, block)) for c in counts),
        results=(at_axis((total, block)),),
        whole=frozenset({*counts, total}),
        linear=(frozenset(range(len(sizes))),),
        movement=True,
    )


@rule("pad")
def pad(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand, result, whole = [], [], set()
    for n, m, config in zip(
        eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params["padding_config"], strict=True
    ):
        if tuple(config) == (0, 0, 0):
            operand.append((f.new(n),))
            result.append(operand[-1])
        else:
            operand.append((f.new(n),))
            result.append((f.new(m),))
            whole |= {*operand[-1], *result[-1]}
    return OperatorDescription(
        sizes=f.sizes,
        operands=(tuple(operand), ()),
        results=(tuple(result),),
        whole=frozenset(whole),
        linear=(frozenset({0, 1}),),
        movement=True,
    )


@rule("rev")
def rev(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    whole = frozenset(dims[d][0] for d in eqn.params["dimensions"])
    return OperatorDescription(
        sizes=f.sizes, operands=(dims,), results=(dims,), whole=whole, linear=FIRST, movement=True
    )


@rule("slice")
def slice_(eqn: JaxprEqn) -> OperatorDescription:
    """A dimension is (blocks, element) where the slice begins and ends between blocks; blocks cannot be split."""
    f = Factors()
    p = eqn.params
    operand, result, blocks, units = [], [], set(), []
    strides = p["strides"] or (1,) * len(p["start_indices"])
    shape = eqn.invars[0].aval.shape
    for n, start, limit, stride in zip(shape, p["start_indices"], p["limit_indices"], strides, strict=True):
        unit = math.gcd(n, start, limit) if stride == 1 and limit > start else 1
        units.append((f.new(unit), unit))
        have, keep = f.new(n // unit), f.new(-(-(limit - start) // (stride * unit)))
        if n // unit == 1:
            operand.append((units[-1][0],))
            result.append(operand[-1])
            blocks |= {have, keep}
            continue
        operand.append((have, units[-1][0]))
        result.append((keep, units[-1][0]))
        blocks |= {have, keep}

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        def scaled(positions: Sequence[int]) -> tuple[int, ...]:
            return tuple(k // unit * sizes[f] for k, (f, unit) in zip(positions, units, strict=True))

        starts, limits = scaled(e.params["start_indices"]), scaled(e.params["limit_indices"])
        return {**e.params, "start_indices": starts, "limit_indices": limits}

    return described_blocks(f, (tuple(operand),), (tuple(result),), blocks, resize)


def described_blocks(
    f: Factors, operands: tuple[Dims, ...], results: tuple[Dims, ...], blocks: set[int], resize: Resize
) -> OperatorDescription:
    """The description of an equation that takes blocks out of dimensions; factors that nothing has are dropped."""
    used = sorted({factor for dims in (*operands, *results) for dim in dims for factor in dim})
    new = {factor: k for k, factor in enumerate(used)}

    def renamed(dims: Dims) -> Dims:
        return tuple(tuple(new[factor] for factor in dim) for dim in dims)

    def resized(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return resize(d, e, tuple(sizes[new[k]] if k in new else n for k, n in enumerate(f.sizes)))

    return OperatorDescription(
        sizes=tuple(f.sizes[k] for k in used),
        operands=tuple(map(renamed, operands)),
        results=tuple(map(renamed, results)),
        whole=frozenset(new[k] for k in blocks if k in new),
        linear=FIRST,
        movement=True,
        resize=resized,
    )


@rule("split")
def split(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    axis = eqn.params["axis"]
    shape = eqn.invars[0].aval.shape
    unit_size = math.gcd(*eqn.params["sizes"]) or 1
    before, after = f.dims(shape[:axis]), f.dims(shape[axis + 1 :])
    unit, total = f.new(unit_size), f.new(shape[axis] // unit_size)
    parts = [f.new(n // unit_size) for n in eqn.params["sizes"]]

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return {**e.params, "sizes": tuple(n // unit_size * sizes[unit] for n in e.params["sizes"])}

    operand, results = (*before, (total, unit), *after), tuple((*before, (part, unit), *after) for part in parts)
    return described_blocks(f, (operand,), results, {total, *parts}, resize)


@rule("stack")
def stack(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    axis = eqn.params["axis"]
    dims = f.dims(eqn.invars[0].aval.shape)
    count = f.new(len(eqn.invars))
    return OperatorDescription(
        sizes=f.sizes,
        operands=(dims,) * len(eqn.invars),
        results=((*dims[:axis], (count,), *dims[axis:]),),
        whole=frozenset({count}),
        linear=(frozenset(range(len(eqn.invars))),),
        movement=True,
    )


@rule("unstack")
def unstack(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    axis = eqn.params["axis"]
    operand = f.dims(eqn.invars[0].aval.shape)
    result = (*operand[:axis], *operand[axis + 1 :])
    return OperatorDescription(
        sizes=f.sizes,
        operands=(operand,),
        results=(result,) * len(eqn.outvars),
        whole=frozenset(operand[axis]),
        linear=FIRST,
        movement=True,
    )


@rule("iota")
def iota(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    result = f.dims(eqn.outvars[0].aval.shape)
    axis = eqn.params["dimension"]

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[jax.Array]:
        shape, dtype = d.result_shape(0, sizes), e.params["dtype"]
        factor = d.results[0][axis][0]
        if factor not in positions:
            return [jax.lax.broadcasted_iota(dtype, shape, axis)]
        return [jax.lax.broadcast_in_dim(positions[factor]().astype(dtype), shape, (axis,))]

    return OperatorDescription(
        sizes=f.sizes,
        operands=(),
        results=(result,),
        positional=frozenset(result[axis]) if result else frozenset(),
        movement=True,
        emit=emit,
    )


@rule("bitcast_convert_type")
def bitcast_convert_type(eqn: JaxprEqn) -> OperatorDescription:
    """A change of width adds or takes the last dimension."""
    f = Factors()
    operand, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    shared = f.dims(min(operand, result, key=len))
    if len(operand) == len(result):
        return OperatorDescription(sizes=f.sizes, operands=(shared,), results=(shared,))
    last = f.new(max(operand, result, key=len)[-1])
    wide = (*shared, (last,))
    return OperatorDescription(
        sizes=f.sizes,
        operands=(wide if len(operand) > len(result) else shared,),
        results=(wide if len(result) > len(operand) else shared,),
        whole=frozenset({last}),
    )


@rule("tile")
def tile(eqn: JaxprEqn) -> OperatorDescription:
    """``i -> (r i)`` along every dimension."""
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    repeats = f.dims(eqn.params["reps"])

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return {**e.params, "reps": tuple(sizes[r] for (r,) in repeats)}

    return OperatorDescription(
        sizes=f.sizes,
        operands=(operand,),
        results=(tuple((*r, *i) for r, i in zip(repeats, operand, strict=True)),),
        linear=FIRST,
        movement=True,
        resize=resize,
    )
