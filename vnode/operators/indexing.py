"""Indexing operators: gathers, scatters and dynamic slices.

Knows jax's dimension numbers, and the older form of batched indexing that writes the batch into the indices. Must not
know the other uses of indices.

An indexed dimension is `LookedUp`: a copy may have some of its places. Dimensions of the index array are independent of
each other: in a gather each gives elements of the result. In a scatter each contributes a term, so there the scatter's
monoid reduces them.
A dimension that a window covers fully is not indexed, whatever the parameters say: only the index zero is in bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.lax import GatherScatterMode

from vnode.operators.constant_folding import Atom, known_value
from vnode.operators.description import (
    NOTHING,
    Algebra,
    Dim,
    Factors,
    OperatorDescription,
    Positions,
    Role,
    Sizes,
)
from vnode.operators.monoid import Monoid
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE, LookedUp, Reduced, Split

FIRST = (frozenset({0}),)

INDICES = {1: Role.INDEX}


def looked_up(dtype: Any) -> Split:
    """The split of a dimension that is read by index: results of copies are combined."""
    if not (dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
        return WHOLE  # keys have no zero
    return LookedUp(Monoid.OR if dtype == np.bool_ else Monoid.SUM)


@rule("gather")
def gather(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    result_shape = eqn.outvars[0].aval.shape
    indices = f.dims(indices_shape)
    f.change(*indices[-1], split=WHOLE)
    result: list[Dim] = [()] * len(result_shape)
    batch = [d for d in range(len(result_shape)) if d not in numbers.offset_dims]
    for d, dim in zip(batch, indices[:-1], strict=True):
        result[d] = dim
    operand: list[Dim] = [()] * len(operand_shape)
    for d, e in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand[d] = indices[e]
    offsets = iter(numbers.offset_dims)
    windows: list[int] = []
    columns: dict[int, int] = {}  # for looked-up factors, the column of the index array with their place
    for d, n in enumerate(operand_shape):
        if d in numbers.operand_batching_dims:
            continue
        operand[d] = (f.new(n),)
        if d in numbers.collapsed_slice_dims:
            split = looked_up(eqn.outvars[0].aval.dtype) if d in numbers.start_index_map else WHOLE
            f.change(*operand[d], split=split)
            if isinstance(split, LookedUp):
                columns[operand[d][0]] = numbers.start_index_map.index(d)
            continue
        e = next(offsets)
        if result_shape[e] == n:
            result[e] = operand[d]
            windows.append(d)
        else:
            f.change(*operand[d], split=WHOLE)
            result[e] = (f.new(result_shape[e], WHOLE),)

    def resized(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        shape = d.operand_shape(0, sizes)
        slices = [shape[k] if k in windows else n for k, n in enumerate(e.params["slice_sizes"])]
        return {**e.params, "slice_sizes": tuple(slices)}

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """A copy with some of the places finds zero for the others; the first copy answers for places out of bounds."""
        params = resized(d, e, sizes)
        cut = {columns[factor]: (factor, positions[factor]()[0]) for factor in columns if factor in positions}
        value, index = operands
        if not cut:
            return [e.primitive.bind(value, index, **params)]
        own, here, valid, at_first = index, True, True, True
        for column, (factor, start) in cut.items():
            place, last = index[..., column], d.sizes[factor] - 1
            if params["mode"] == GatherScatterMode.FILL_OR_DROP:
                valid &= are_in_bounds(place, last)
            place = clamp_indices(place, last, start.dtype)
            here &= (place >= start) & (place < start + sizes[factor])
            place = jnp.clip(place - start, 0, sizes[factor] - 1)
            own = own.at[..., column].set(place.astype(index.dtype))
            at_first &= start == 0
        result = e.primitive.bind(value, own, **{**params, "unique_indices": False, "indices_are_sorted": False})
        along = tuple(k for k in range(result.ndim) if k not in params["dimension_numbers"].offset_dims)
        here, valid = (
            lax.broadcast_in_dim(jnp.broadcast_to(x, index.shape[:-1]), result.shape, along) for x in (here, valid)
        )
        nothing = jnp.zeros((), result.dtype)
        beyond = jnp.where(at_first, out_of_bounds_value(params["fill_value"], result.dtype), nothing)
        return [jnp.where(valid, jnp.where(here, result, nothing), beyond)]

    return OperatorDescription(
        factors=f.all,
        operands=(tuple(operand), indices),
        results=(tuple(result),),
        linear=FIRST if fills_with_zero_or_nan(eqn) else (),
        algebra=Algebra.MOVES,
        roles=INDICES,
        resize=resized,
        emit=emit,
    )


def out_of_bounds_value(fill_value: Any, dtype: Any) -> Any:
    """The value that a gather gives for out-of-bounds reads, a scalar of type `dtype`."""
    if fill_value is not None:
        return jnp.asarray(fill_value, dtype)
    if jnp.issubdtype(dtype, np.inexact):
        return jnp.asarray(np.nan, dtype)
    if dtype == np.bool_:
        return jnp.asarray(True)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if jnp.issubdtype(dtype, np.signedinteger) else info.max, dtype)


def fills_with_zero_or_nan(eqn: JaxprEqn) -> bool:
    """Whether the out-of-bounds value may be summed over parts: others must not be added once per part."""
    if eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    if fill is None:
        return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))
    return bool(np.isnan(fill) or fill == 0)


SCATTERS = {
    "scatter": None,
    "scatter-add": Monoid.SUM,
    "scatter-sub": Monoid.SUM,
    "scatter-mul": Monoid.PROD,
    "scatter-min": Monoid.MIN,
    "scatter-max": Monoid.MAX,
}
"""The monoid that combines updates at the same place; None where one of them stays."""


def neutral_update(name: str, dtype: Any) -> Any:
    """An update that changes no bit of any element it is combined with; None if there is none."""
    monoid, floats = SCATTERS[name], jnp.issubdtype(dtype, jnp.inexact)
    if monoid is None or (monoid is Monoid.PROD and jnp.issubdtype(dtype, jnp.complexfloating)):
        return None  # 1 + 0j changes the sign of zeros
    zero = name == "scatter-add" and floats  # for floats 0 + -0 is 0, so only -0 is neutral
    return jnp.asarray(-np.zeros((), dtype) if zero else monoid.identity(dtype), dtype)


def overwrites(eqn: JaxprEqn) -> bool:
    """Whether a plain scatter overwrites with its updates; with a function of its own it modifies the operand."""
    update = eqn.params.get("update_jaxpr")
    return update is None or (not update.eqns and update.outvars == [update.invars[1]])


@rule(*SCATTERS)
def scatter(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    monoid = SCATTERS[eqn.primitive.name]
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape, updates_shape = (atom.aval.shape for atom in eqn.invars)
    indices = f.dims(indices_shape)
    f.change(*indices[-1], split=WHOLE, counted=False)
    updates: list[Dim] = [()] * len(updates_shape)
    terms = [d for d in range(len(updates_shape)) if d not in numbers.update_window_dims]
    for d, dim in zip(terms, indices[:-1], strict=True):
        updates[d] = dim
    operand: list[Dim] = [()] * len(operand_shape)
    for d, e in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        operand[d] = indices[e]
    windows = iter(numbers.update_window_dims)
    columns: dict[int, int] = {}  # for looked-up factors, the column of the index array with their place
    for d, n in enumerate(operand_shape):
        if d in numbers.operand_batching_dims:
            continue
        operand[d] = (f.new(n),)
        if d in numbers.inserted_window_dims:
            searched = d in numbers.scatter_dims_to_operand_dims
            f.change(*operand[d], split=LookedUp() if searched else WHOLE, counted=False)
            if searched:
                columns[operand[d][0]] = numbers.scatter_dims_to_operand_dims.index(d)
            continue
        e = next(windows)
        if updates_shape[e] == n:
            updates[e] = operand[d]
        else:
            f.change(*operand[d], split=WHOLE, counted=False)
            updates[e] = (f.new(updates_shape[e], WHOLE),)
    kept = {factor for dim in operand for factor in dim}
    combined = {factor for d in terms for factor in updates[d]} - kept
    f.change(*combined, split=WHOLE if monoid is None else Reduced(monoid))

    def resized(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        if all(sizes[factor] == d.sizes[factor] for factor in combined):
            return e.params
        # a part's terms may include padding, whose values are undefined
        return {**e.params, **UNORDERED}

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """A copy with some of the places drops updates of others, by an out-of-bounds index.

        A single index stays in bounds. XLA would make a slice of it, merge this with the slice that cut the operand,
        and clamp the start to the bounds of the uncut array: outside of the copy's operand. So the dropped update is
        neutral instead, or goes to one more place, which is sliced away.
        """
        params = resized(d, e, sizes)
        cut = {columns[factor]: (factor, positions[factor]()[0]) for factor in columns if factor in positions}
        value, index, update = operands
        if not cut:
            return [e.primitive.bind(value, index, update, **params)]
        numbers, clips = params["dimension_numbers"], params["mode"] == GatherScatterMode.CLIP
        ((some, (_, first)), *_) = cut.items()
        within, places, alone = list[Any](), list[Any](), math.prod(index.shape[:-1]) == 1
        for column, dimension in enumerate(numbers.scatter_dims_to_operand_dims):
            factor, start = cut.get(column, (None, 0))
            full = value.shape[dimension] if factor is None else d.sizes[factor]
            last = full - updated_extent(numbers, dimension, value.shape, update.shape)
            place = clamp_indices(index[..., column], last, first.dtype) - start
            if not clips:
                within.append(are_in_bounds(index[..., column], last))
            if factor is not None:
                within.append((place >= 0) & (place < sizes[factor]))
                place = place % sizes[factor] if alone else place
            places.append(place)
        drops = {**params, "mode": GatherScatterMode.FILL_OR_DROP, **UNORDERED}
        here = functools.reduce(jnp.logical_and, within)
        nothing = neutral_update(e.primitive.name, update.dtype) if alone else None
        if nothing is not None:
            update = jnp.where(lax.broadcast_in_dim(here, update.shape, terms), update, nothing)
            return [e.primitive.bind(value, jnp.stack(places, -1), update, **drops)]
        dimension = numbers.scatter_dims_to_operand_dims[some]
        own = value.shape[dimension]
        places[some] = jnp.where(here, places[some], own)
        if not alone:
            return [e.primitive.bind(value, jnp.stack(places, -1), update, **drops)]
        # a place for the dropped updates
        value = lax.concatenate([value, lax.slice_in_dim(value, 0, 1, axis=dimension)], dimension)
        result = e.primitive.bind(value, jnp.stack(places, -1), update, **drops)
        return [lax.slice_in_dim(result, 0, own, axis=dimension)]

    linear = {0, 2} if monoid is Monoid.SUM or (monoid is None and overwrites(eqn)) else set()
    return OperatorDescription(
        factors=f.all,
        operands=(tuple(operand), indices, tuple(updates)),
        results=(tuple(operand),),
        linear=(frozenset(linear),) if linear else (),
        algebra=Algebra.MOVES if monoid is None and overwrites(eqn) else NOTHING,
        roles=INDICES if monoid is None else {0: Role.ONCE, **INDICES},
        resize=resized,
        emit=emit,
        widen=with_wide_update,
    )


UNORDERED = {"unique_indices": False, "indices_are_sorted": False}


def updated_extent(numbers: Any, dimension: int, shape: Sequence[int], update: Sequence[int]) -> int:
    """The number of places of a dimension that one update covers."""
    if dimension in numbers.inserted_window_dims or dimension in numbers.operand_batching_dims:
        return 1
    windows = [d for d in range(len(shape)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    return update[numbers.update_window_dims[windows.index(dimension)]]


def with_wide_update(params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The parameters of a scatter in another type; its function of two elements is traced again."""
    if params["update_jaxpr"] is None:
        return dict(params)
    update = jaxpr_as_fun(ClosedJaxpr(params["update_jaxpr"], params["update_consts"]))
    traced = jax.make_jaxpr(lambda *elements: update(*elements)[0])(*[jax.ShapeDtypeStruct((), dtype)] * 2)
    return {**params, "update_jaxpr": traced.jaxpr, "update_consts": tuple(traced.consts)}


def are_in_bounds(place: Any, last: int) -> Any:
    """Whether indices of any integer type are in ``0 ... last``."""
    return (place >= 0) & (place <= min(last, np.iinfo(place.dtype).max))


def clamp_indices(place: Any, last: int, dtype: Any) -> Any:
    """Clamps indices of any integer type to ``0 ... last``, in a type that holds all of these."""
    return jnp.clip(place, 0, min(last, np.iinfo(place.dtype).max)).astype(dtype)


def pad_with_zeros(value: Any, dimension: int, count: int) -> Any:
    """Pads an array with zeros before and after its elements along a dimension."""
    config = [(count, count, 0) if d == dimension else (0, 0, 0) for d in range(value.ndim)]
    return lax.pad(value, jnp.zeros((), value.dtype), config)


@rule("dynamic_slice")
def dynamic_slice(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    split = looked_up(eqn.outvars[0].aval.dtype)
    result = list(operand)
    for d, (n, m) in enumerate(zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)):
        if n != m:
            f.change(*operand[d], split=split)
            result[d] = (f.new(m, WHOLE),)

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return {**e.params, "slice_sizes": d.result_shape(0, sizes)}

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """A copy with some of the places finds zero for the others."""
        value, *starts = operands
        cut = {i: positions[f]()[0] for i, (f,) in enumerate(operand) if result[i] != (f,) and f in positions}
        if cut:
            dtype = jnp.result_type(*cut.values())
            extents = zip(d.operand_shape(0), d.result_shape(0), strict=True)
            starts = [clamp_indices(start, n - m, dtype) for start, (n, m) in zip(starts, extents, strict=True)]
        for i, first in cut.items():
            own, m = value.shape[i], d.result_shape(0)[i]
            value = pad_with_zeros(value, i, m)
            starts[i] = jnp.clip(starts[i] - first, -m, own) + m
        return [e.primitive.bind(value, *starts, **resize(d, e, sizes))]

    return OperatorDescription(
        factors=f.all,
        operands=(operand, *((),) * (len(eqn.invars) - 1)),
        results=(tuple(result),),
        linear=FIRST,
        algebra=Algebra.MOVES,
        roles=dict.fromkeys(range(1, len(eqn.invars)), Role.INDEX),
        resize=resize,
        emit=emit,
    )


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    update = list(operand)
    for d, (n, m) in enumerate(zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)):
        if n != m:
            f.change(*operand[d], split=LookedUp())
            update[d] = (f.new(m, WHOLE),)

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """A copy with some of the places takes the part of the update that lies there."""
        value, part, *starts = operands
        there: Any = True
        for i, (n, m) in enumerate(zip(d.operand_shape(0), d.operand_shape(1), strict=True)):
            if n != m and operand[i][0] in positions:
                place = positions[operand[i][0]]()
                own, start = place.shape[0], clamp_indices(starts[i], n - m, place.dtype)
                part = pad_with_zeros(part, i, own)
                offset = jnp.clip(place[0] - start, -own, m) + own
                part = lax.dynamic_slice_in_dim(part, offset, own, i)
                inside = (place >= start) & (place < start + m)
                there &= lax.broadcast_in_dim(inside, [own if k == i else 1 for k in range(part.ndim)], (i,))
                starts[i] = jnp.zeros((), starts[i].dtype)
        if there is True:
            return [e.primitive.bind(value, part, *starts, **e.params)]
        # along other dimensions the update is a part of the copy: update in place there, then select
        placed = e.primitive.bind(value, part, *starts, **e.params)
        return [jnp.where(there, placed, value)]

    return OperatorDescription(
        factors=f.all,
        operands=(operand, tuple(update), *((),) * (len(eqn.invars) - 2)),
        results=(operand,),
        linear=(frozenset({0, 1}),),
        algebra=Algebra.MOVES,
        roles=dict.fromkeys(range(2, len(eqn.invars)), Role.INDEX),
        emit=emit,
    )


def with_batching_dims(
    eqn: JaxprEqn, definition: Callable[[Var], JaxprEqn | None], constant: Callable[[Var], Any]
) -> list[JaxprEqn] | None:
    """Rewrites indices that contain batch positions so that the batch is a dimension of its own.

    ``x[jnp.arange(B), i]`` gathers at the index pairs ``(0, i[0]), (1, i[1]), ...``, which looks as if every example
    read every other. Where a column of the index array is proved to equal the position in the array, it goes, and the
    operand's dimension becomes a batching dimension, as in ``jnp.take_along_axis``. Call it on every gather and scatter
    before the batch is followed, on equations from which calls have been inlined.

    Args:
      eqn: any equation.
      definition: the equation that defines a variable; None for arguments and constants. Inside a loop's body it may
        look through the body's operands at what the loop is given, if that is the same in every iteration.
      constant: the value of a variable that the jaxpr closes over, or None.

    Returns:
      Equations that replace `eqn`, the last one defining the same variable; None if nothing is rewritten. The others
      compute the remaining columns of the index array.
    """
    if eqn.primitive.name != "gather" and eqn.primitive.name not in SCATTERS:
        return None
    names = GATHER_NAMES if eqn.primitive.name == "gather" else SCATTER_NAMES
    numbers = eqn.params["dimension_numbers"]
    inserted, indexed, batching, indices_batching = (getattr(numbers, name) for name in names)
    operand_shape = eqn.invars[0].aval.shape
    indices = eqn.invars[1]
    shape = indices.aval.shape
    pairs = dict(zip(batching, indices_batching, strict=True))
    columns = index_columns(indices, definition)
    kept = []
    for column, d in zip(columns, indexed, strict=True):
        value = None
        if d in inserted:
            value = known_value(column.atom, definition, constant)
        axis = (
            None if value is None else position_axis(column.read_from(value), shape, operand_shape[d], pairs.values())
        )
        if axis is None:
            kept.append((column, d))
        else:
            pairs[d] = axis
    if len(kept) == len(columns):
        return None

    made, remaining = join_columns(eqn, [column for column, _ in kept])
    ordered = sorted(pairs)
    changed = (
        tuple(d for d in inserted if d not in pairs),
        tuple(d for _, d in kept),
        tuple(ordered),
        tuple(pairs[d] for d in ordered),
    )
    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(**dict(zip(names, changed, strict=True))),
        "indices_are_sorted": False,
    }
    return [*made, eqn.replace(invars=[eqn.invars[0], remaining, *eqn.invars[2:]], params=params)]


GATHER_NAMES = ("collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims")
SCATTER_NAMES = (
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)


class Column:
    """Column `offset` of the last dimension, of size `width`, of `atom`."""

    def __init__(self, atom: Atom, offset: int, width: int) -> None:
        self.atom, self.offset, self.width = atom, offset, width

    def read_from(self, value: np.ndarray) -> np.ndarray:
        """The column in a value of `atom` that is shrunk to size one where it does not vary."""
        return value if value.shape[-1] == 1 else value[..., self.offset : self.offset + 1]


def index_columns(indices: Atom, definition: Callable[[Var], JaxprEqn | None]) -> list[Column]:
    """The columns of an index array, each as a variable with as few columns as possible."""
    made = None if isinstance(indices, Literal) else definition(indices)
    pieces: Sequence[Atom] = (indices,)
    last = len(indices.aval.shape) - 1
    if made is not None and made.primitive.name == "concatenate" and made.params["dimension"] == last:
        pieces = made.invars
    return [Column(piece, offset, piece.aval.shape[-1]) for piece in pieces for offset in range(piece.aval.shape[-1])]


def position_axis(value: np.ndarray, shape: Sequence[int], size: int, taken: Any) -> int | None:
    """The dimension of an index array along which a column of it counts from zero to `size`, if there is one."""
    for axis, n in enumerate(shape[:-1]):
        if n != size or axis in taken or any(k != 1 for d, k in enumerate(value.shape) if d != axis):
            continue
        if np.array_equal(np.ravel(value), np.arange(n)):
            return axis
    return None


def join_columns(eqn: JaxprEqn, columns: Sequence[Column]) -> tuple[list[JaxprEqn], Atom]:
    """Equations that concatenate `columns`, with their result (beside the indices of `eqn`)."""
    made: list[JaxprEqn] = []

    def add(primitive: Any, operands: list[Atom], width: int, params: dict[str, Any]) -> Var:
        aval = operands[0].aval
        result = Var(aval.update(shape=(*aval.shape[:-1], width)))
        made.append(eqn.replace(primitive=primitive, invars=operands, outvars=[result], params=params))
        return result

    def part(atom: Atom, start: int, stop: int) -> Var:
        shape = atom.aval.shape
        bounds = {
            "start_indices": (*(0,) * (len(shape) - 1), start),
            "limit_indices": (*shape[:-1], stop),
            "strides": None,
        }
        return add(jax.lax.slice_p, [atom], stop - start, bounds)

    atoms: list[Atom] = [
        column.atom if column.width == 1 else part(column.atom, column.offset, column.offset + 1) for column in columns
    ]
    if len(atoms) == 1:
        return made, atoms[0]
    if not atoms:
        return made, part(eqn.invars[1], 0, 0)
    dimension = len(eqn.invars[1].aval.shape) - 1
    return made, add(jax.lax.concatenate_p, atoms, len(atoms), {"dimension": dimension})
