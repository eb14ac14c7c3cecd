"""Shape operators: the elements stay what they are and get other indices, or repeat.

Knows how the dimensions of operand and result correspond. Must not know which of them carries examples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from vnode.operators.description import (
    Algebra,
    Dim,
    Dims,
    Factor,
    Factors,
    OperatorDescription,
    Positions,
    Sizes,
    shape_resize,
)
from vnode.operators.registry import rule
from vnode.operators.splits import FREE, WHOLE, Move, Shifted

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
        factors=f.all,
        operands=(operand,),
        results=(result,),
        linear=FIRST,
        algebra=Algebra.MOVES,
        resize=shape_resize("shape"),
    )


def common_refinement(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[Dim], list[Dim], set[int]]:
    """Writes a reshape's shapes over common factors.

    Row-major order is kept. So a major or minor part that both shapes share is a factor of its own. The parts between
    them, of which neither divides the other, must be whole.

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
        dims, out = f.dims(operand, WHOLE), f.dims(result, WHOLE)
        return OperatorDescription(factors=f.all, operands=(dims,), results=(out,))
    order = eqn.params["dimensions"] or range(len(operand))  # the operand is transposed first
    sizes, ordered, out, whole = common_refinement([operand[d] for d in order], result)
    dims = dict(zip(order, ordered, strict=True))
    return OperatorDescription(
        factors=tuple(Factor(n, WHOLE if k in whole else FREE) for k, n in enumerate(sizes)),
        operands=(tuple(dims[d] for d in range(len(operand))),),
        results=(tuple(out),),
        linear=FIRST,
        algebra=Algebra.MOVES,
        resize=lambda d, e, s: {**e.params, "new_sizes": d.result_shape(0, s)},
    )


@rule("transpose")
def transpose(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    result = tuple(operand[d] for d in eqn.params["permutation"])
    return OperatorDescription(
        factors=f.all, operands=(operand,), results=(result,), linear=FIRST, algebra=Algebra.MOVES
    )


@rule("squeeze")
def squeeze(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    gone = set(eqn.params["dimensions"])
    operand = tuple(() if d in gone else (f.new(n),) for d, n in enumerate(eqn.invars[0].aval.shape))
    result = tuple(dim for d, dim in enumerate(operand) if d not in gone)
    return OperatorDescription(
        factors=f.all, operands=(operand,), results=(result,), linear=FIRST, algebra=Algebra.MOVES
    )


@rule("concatenate")
def concatenate(eqn: JaxprEqn) -> OperatorDescription:
    """Operands of sizes 2n and n are joined to a dimension of 3 blocks of n; their blocks move."""
    f = Factors()
    axis = eqn.params["dimension"]
    shape = eqn.outvars[0].aval.shape
    shared = (*f.dims(shape[:axis]), (), *f.dims(shape[axis + 1 :]))
    sizes = [atom.aval.shape[axis] for atom in eqn.invars]
    unit = math.gcd(*sizes)
    block = f.new(unit)
    counts = [f.new(n // unit if unit else 1) for n in sizes]
    total = f.new(sum(f.size(c) for c in counts))
    starts = [0, *itertools.accumulate(sizes)]
    tie = Shifted(
        tuple(Move(c, total, -(start // max(unit, 1))) for c, start in zip(counts, starts, strict=False)), block
    )
    f.change(*counts, total, split=tie if unit else WHOLE)

    def at_axis(dim: Dim) -> Dims:
        return (*shared[:axis], dim, *shared[axis + 1 :])

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """At each place of the result, the element of the operand that lies there."""
        if total not in positions:
            return [e.primitive.bind(*operands, **e.params)]
        place = lax.broadcast_in_dim(positions[total](), d.result_shape(0, sizes), (axis,))
        made = operands[0]
        for start, operand in zip(starts[1:], operands[1:], strict=False):
            made = lax.select(place >= start, operand, made)
        return [made]

    return OperatorDescription(
        factors=f.all,
        operands=tuple(at_axis((c, block)) for c in counts),
        results=(at_axis((total, block)),),
        linear=(frozenset(range(len(sizes))),),
        algebra=Algebra.MOVES,
        emit=emit,
    )


@rule("pad")
def pad(eqn: JaxprEqn) -> OperatorDescription:
    """A dimension is (blocks, element) where padding is whole blocks, as in the derivative of a slice: blocks move."""
    f = Factors()
    operand, result, moved = [], [], {}
    shape, configs = eqn.invars[0].aval.shape, eqn.params["padding_config"]
    for i, (n, m, (low, high, interior)) in enumerate(zip(shape, eqn.outvars[0].aval.shape, configs, strict=True)):
        unit = math.gcd(n, low, high) if interior == 0 and n and m else 1
        if (low, high, interior) == (0, 0, 0):
            operand.append((f.new(n),))
            result.append(operand[-1])
            continue
        before, after = f.new(n // unit), f.new(m // unit)
        element = f.new(unit) if unit > 1 else None
        tie = Shifted((Move(before, after, -(low // unit), spread=interior + 1),), element)
        f.change(before, after, split=tie)
        operand.append((before,) if element is None else (before, element))
        result.append((after,) if element is None else (after, element))
        moved[after] = i

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """Elements are already in place along moving dimensions; the padding value is filled in elsewhere."""
        value, padding = operands
        cut = [factor for factor in moved if factor in positions]

        def block_padding(i: int) -> tuple[int, int, int]:
            """Blocks may have fewer elements than before."""
            low, high, interior = configs[i]
            if d.results[0][i][0] in cut:
                return 0, 0, 0
            if value.shape[i] == shape[i]:
                return low, high, interior
            return low * value.shape[i] // shape[i], high * value.shape[i] // shape[i], interior

        value = e.primitive.bind(value, padding, padding_config=tuple(map(block_padding, range(len(configs)))))
        for factor in cut:
            i = moved[factor]
            low, _, interior = configs[i]
            place = positions[factor]() - low
            there = (place >= 0) & (place < shape[i] * (interior + 1)) & (place % (interior + 1) == 0)
            there = lax.broadcast_in_dim(there, value.shape, (i,))
            value = lax.select(there, value, lax.broadcast_in_dim(padding, value.shape, ()))
        return [value]

    return OperatorDescription(
        factors=f.all,
        operands=(tuple(operand), ()),
        results=(tuple(result),),
        linear=(frozenset({0, 1}),),
        algebra=Algebra.MOVES,
        emit=emit,
    )


@rule("rev")
def rev(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    result = list(operand)
    for d in eqn.params["dimensions"]:
        (before,) = operand[d]
        after = f.new(f.size(before))
        result[d] = (after,)
        f.change(before, after, split=Shifted((Move(before, after, f.size(before) - 1, -1),)))

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """Elements in the result's order stay in it."""
        rest = tuple(k for k in e.params["dimensions"] if result[k][0] not in positions)
        return [e.primitive.bind(operands[0], dimensions=rest)] if rest else [operands[0]]

    return OperatorDescription(
        factors=f.all, operands=(operand,), results=(tuple(result),), linear=FIRST, algebra=Algebra.MOVES, emit=emit
    )


@rule("slice")
def slice_(eqn: JaxprEqn) -> OperatorDescription:
    """A dimension is (blocks, element) where the slice begins and ends between blocks, which move."""
    f = Factors()
    p = eqn.params
    operand, result = [], []
    units: list[tuple[int, int]] = []
    strides = p["strides"] or (1,) * len(p["start_indices"])
    shape = eqn.invars[0].aval.shape
    for n, start, limit, stride in zip(shape, p["start_indices"], p["limit_indices"], strides, strict=True):
        unit = math.gcd(n, start, limit) if stride == 1 and limit > start else 1
        element = f.new(unit)
        units.append((element, unit))
        if n == unit and limit > start:
            operand.append((element,))
            result.append((element,))
            continue
        have, keep = f.new(n // unit), f.new(-(-(limit - start) // (stride * unit)))
        f.change(have, keep, split=Shifted((Move(have, keep, start // unit, stride),), element))
        operand.append((have, element))
        result.append((keep, element))

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        """Blocks of other sizes; all of a dimension whose elements come in the result's order."""
        starts, limits, steps = [], [], list(strides)
        for i, (element, unit) in enumerate(units):
            have, keep = operand[i][0], result[i][0]
            if have != keep and sizes[have] == sizes[keep] != d.sizes[have]:
                starts.append(0)
                limits.append(sizes[have] * sizes[element])
                steps[i] = 1
            else:
                starts.append(p["start_indices"][i] // unit * sizes[element])
                limits.append(p["limit_indices"][i] // unit * sizes[element])
        named = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
        return {**e.params, **named, "strides": tuple(steps) if e.params["strides"] else None}

    return OperatorDescription(
        factors=f.all,
        operands=(tuple(operand),),
        results=(tuple(result),),
        linear=FIRST,
        algebra=Algebra.MOVES,
        resize=resize,
    )


@rule("split")
def split(eqn: JaxprEqn) -> OperatorDescription:
    """The opposite of a concatenation."""
    f = Factors()
    axis = eqn.params["axis"]
    shape = eqn.invars[0].aval.shape
    unit_size = math.gcd(*eqn.params["sizes"]) or 1
    before, after = f.dims(shape[:axis]), f.dims(shape[axis + 1 :])
    unit, total = f.new(unit_size), f.new(shape[axis] // unit_size)
    parts = [f.new(n // unit_size) for n in eqn.params["sizes"]]
    starts = itertools.accumulate(parts, lambda start, part: start + f.size(part), initial=0)
    tie = Shifted(tuple(Move(total, part, start) for part, start in zip(parts, starts, strict=False)), unit)
    f.change(total, *parts, split=tie)

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return {**e.params, "sizes": tuple(sizes[part] * sizes[unit] for part in parts)}

    return OperatorDescription(
        factors=f.all,
        operands=((*before, (total, unit), *after),),
        results=tuple((*before, (part, unit), *after) for part in parts),
        linear=FIRST,
        algebra=Algebra.MOVES,
        resize=resize,
    )


@rule("stack")
def stack(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    axis = eqn.params["axis"]
    dims = f.dims(eqn.invars[0].aval.shape)
    count = f.new(len(eqn.invars), WHOLE)
    return OperatorDescription(
        factors=f.all,
        operands=(dims,) * len(eqn.invars),
        results=((*dims[:axis], (count,), *dims[axis:]),),
        linear=(frozenset(range(len(eqn.invars))),),
        algebra=Algebra.MOVES,
    )


@rule("unstack")
def unstack(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    axis = eqn.params["axis"]
    operand = f.dims(eqn.invars[0].aval.shape)
    f.change(*operand[axis], split=WHOLE)
    result = (*operand[:axis], *operand[axis + 1 :])
    return OperatorDescription(
        factors=f.all,
        operands=(operand,),
        results=(result,) * len(eqn.outvars),
        linear=FIRST,
        algebra=Algebra.MOVES,
    )


@rule("iota")
def iota(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    result = f.dims(eqn.outvars[0].aval.shape)
    axis = eqn.params["dimension"]
    f.change(*result[axis], positional=True)

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[jax.Array]:
        shape, dtype = d.result_shape(0, sizes), e.params["dtype"]
        factor = d.results[0][axis][0]
        if factor not in positions:
            return [jax.lax.broadcasted_iota(dtype, shape, axis)]
        return [jax.lax.broadcast_in_dim(positions[factor]().astype(dtype), shape, (axis,))]

    return OperatorDescription(factors=f.all, operands=(), results=(result,), algebra=Algebra.MOVES, emit=emit)


@rule("bitcast_convert_type")
def bitcast_convert_type(eqn: JaxprEqn) -> OperatorDescription:
    """A change of width adds or takes the last dimension."""
    f = Factors()
    operand, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    shared = f.dims(min(operand, result, key=len))
    if len(operand) == len(result):
        return OperatorDescription(factors=f.all, operands=(shared,), results=(shared,))
    last = f.new(max(operand, result, key=len)[-1], WHOLE)
    wide = (*shared, (last,))
    return OperatorDescription(
        factors=f.all,
        operands=(wide if len(operand) > len(result) else shared,),
        results=(wide if len(result) > len(operand) else shared,),
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
        factors=f.all,
        operands=(operand,),
        results=(tuple((*r, *i) for r, i in zip(repeats, operand, strict=True)),),
        linear=FIRST,
        algebra=Algebra.MOVES,
        resize=resize,
    )
