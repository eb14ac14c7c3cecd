"""Moves of a resharding -> collectives on one device's arrays, in a program that is manual over all axes.

Knows layouts and jax's collectives. Must not know equations, nor why values move.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vnode.operators import Monoid
from vnode.operators.ordering_barrier import ready_value
from vnode.operators.splits import Interval
from vnode.spmd.axis_parts import axes_of, index_at, parts_of, with_parts
from vnode.spmd.layout import Axes, Cut, Layout, count
from vnode.spmd.op_sharding import itemsize
from vnode.spmd.resharding import ORDERED, Move, combines_in_transit, plan_resharding

MUCH = 64 << 10
"""Bytes of a gathered array from which it is gathered late; the delay costs an operation on a device's shard."""

SLICED = frozenset({"cpu"})
"""Platforms on which a barrier precedes an all-to-all. There XLA slices its operand, and merges slices with equal ones
of the program. These have another layout than the other slices, so that compiling fails."""

APART: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)
"""Whether devices may be at different points of the program. Then no permute is emitted, since XLA's CPU runtime waits
for all devices in one. Other collectives synchronize the devices that take part."""

BRANCHES: contextvars.ContextVar[bool] = contextvars.ContextVar("branches", default=False)
"""Whether devices may take different branches, and different numbers of iterations."""


@contextlib.contextmanager
def devices_in_step(*, everywhere: bool, in_branches: bool) -> Iterator[None]:
    """Declares for the context which devices of the mesh are at the same point of the program.

    Args:
      everywhere: all of them, outside branches and loops with computed trip counts.
      in_branches: also inside these.
    """
    before = APART.set(APART.get() or not everywhere), BRANCHES.set(BRANCHES.get() or not in_branches)
    try:
        yield
    finally:
        APART.reset(before[0])
        BRANCHES.reset(before[1])


BY_GLOO: contextvars.ContextVar[bool] = contextvars.ContextVar("by_gloo", default=False)
"""Whether gloo runs the collectives of the traced program."""


@contextlib.contextmanager
def use_gloo_rules(by_gloo: bool) -> Iterator[None]:
    """Declares for the context whether gloo runs the collectives of the traced program."""
    token = BY_GLOO.set(by_gloo)
    try:
        yield
    finally:
        BY_GLOO.reset(token)


PLACES: contextvars.ContextVar[Mapping[str, jax.Array]] = contextvars.ContextVar("places", default=MappingProxyType({}))
"""This device's index along axes, if computed outside the program's loops."""


@contextlib.contextmanager
def with_axis_indices(axes: Axes) -> Iterator[None]:
    """Computes this device's index along axes here, for the context, including its loops.

    XLA hoists loop-invariant values out of nested loops, but not if they depend on the device's index and the inner
    loop computes that (0.10).
    """
    known = PLACES.get()
    before = PLACES.set({name: known[name] if name in known else lax.axis_index(name) for name in axes})
    try:
        yield
    finally:
        PLACES.reset(before)


def index_along(names: Sequence[str], axes: Axes | None = None) -> jax.Array:
    """The number of this device along some axes, int32 scalar: the major axis comes first.

    Args:
      names: axes, or parts of axes (`vnode.spmd.axis_parts`).
      axes: the mesh axes; needed if some names are parts.
    """
    places, parts = PLACES.get(), parts_of(axes) if axes is not None else {}
    if axes is None or not parts.keys() & {*names}:
        if not places.keys() >= {*names}:
            return lax.axis_index(tuple(names))
        axes = {name: lax.axis_size(name) for name in names}
    whole = axes_of(names, axes)
    return index_at({name: places[name] if name in places else lax.axis_index(name) for name in whole}, names, axes)


def convert(value: Any, start: Layout, end: Layout, shape: Sequence[int], axes: Axes) -> Any:
    """Reshards one device's array of a value.

    Args:
      value: array of the shape that `start` has on one device.
      start: the layout of the value.
      end: the wanted layout.
      shape: shape of the whole value.
      axes: the mesh axes.
    """
    before = start
    for move in moves(start, end, shape, axes, jnp.result_type(value)):
        value = carry_out(value, before, move, shape, axes)
        before = move.after
    return value


def convert_after(
    value: Any, start: Layout, end: Layout, shape: Sequence[int], axes: Axes, latest: Sequence[Any]
) -> Any:
    """As `convert`; if the device's array becomes much larger, it is gathered only once other values are ready.

    Compilers gather as early as possible, and keep the result until its use. A value that is used several times is
    gathered for each use, as in ZeRO's third stage (Rajbhandari et al., SC 2020, section 7.2.2).

    `latest`: arrays of floating-point numbers, none of them empty.
    """
    if latest and grows(start, end, shape, axes, jnp.result_type(value)):
        value = ready_value(value, *latest)
    return convert(value, start, end, shape, axes)


def grows(start: Layout, end: Layout, shape: Sequence[int], axes: Axes, dtype: Any) -> bool:
    """Whether a device has more of a value in layout `end` than in `start`, and at least `MUCH` bytes."""
    here, there = (math.prod(layout.local_shape(shape, axes)) for layout in (start, end))
    return there > here and there * itemsize(dtype) >= MUCH


def moves(start: Layout, end: Layout, shape: Sequence[int], axes: Axes, dtype: Any) -> tuple[Move, ...]:
    """The moves between two layouts; without permutes where single devices may not send to each other."""
    return plan_resharding(start, end, shape, axes, dtype, allow_permutes=not APART.get())


def carry_out(value: Any, before: Layout, move: Move, shape: Sequence[int], axes: Axes) -> Any:
    """Performs one move of a value in layout `before`."""
    axes, mesh = with_parts(axes), axes
    among = [list(group) for group in move.among] or None
    match move.kind:
        case "all-reduce" | "all-gather" if move.monoid is not None:
            return combine(value, move.axes, move.monoid)
        case "reduce-scatter":
            return reduce_scatter(value, move.axes, move.dim)
        case "all-to-all":
            pieces = lax.optimization_barrier(value) if platform() in SLICED else value
            pieces = lax.all_to_all(pieces, move.axes, move.other, move.dim, axis_index_groups=among, tiled=True)
            return lax.optimization_barrier(pieces)  # or XLA transposes it for each reader, and keeps all transposes
        case "all-gather":
            cut = before.dims[move.dim]
            assert cut is not None
            together = functools.partial(lax.all_gather, axis_name=move.axes, axis_index_groups=among, tiled=True)
            return gather(value, move.dim, cut, move.after.dims[move.dim], shape[move.dim], axes, together)
        case "permute":
            return permute(part_to_send(value, before, move, shape, axes), move.axes, {*move.pairs}, mesh)
    after = move.after.dims[move.dim]
    assert after is not None
    part = index_along(move.axes, mesh)
    return take_block(value, move.dim, before.dims[move.dim], after, shape[move.dim], axes, part)


def reduce_scatter(value: Any, axes: Any, dim: int, groups: Sequence[Sequence[int]] | None = None) -> Any:
    """Reduce-scatters a value, adding in any order.

    With gloo (CPUs of several processes) this is an all-to-all and additions: gloo's reduce-scatter overwrites data not
    sent yet. From some megabytes on, parts of sums were occasionally wrong, without an error
    (https://github.com/jax-ml/jax/issues/40830, jaxlib 0.10 to 0.12).

    Args:
      value: ``[..., n, ...]`` on each device.
      axes: the mesh axis, or several, along which devices differ.
      dim: the dimension of size `n`, a multiple of the number of devices that add.
      groups: groups of devices that add among themselves; None for one group.

    Returns:
      ``[..., n / devices, ...]``
    """
    named = None if groups is None else [list(group) for group in groups]
    if not BY_GLOO.get():
        return lax.psum_scatter(value, axes, scatter_dimension=dim, axis_index_groups=named, tiled=True)
    size = lax.axis_size(axes) if named is None else len(named[0])
    # the parts have a dimension of their own, or compilers first change the layout of the whole value
    parts = value.reshape(*value.shape[:dim], size, value.shape[dim] // size, *value.shape[dim + 1 :])
    parts = lax.all_to_all(parts, axes, dim, dim, axis_index_groups=named, tiled=True)
    return functools.reduce(lax.add, [lax.index_in_dim(parts, part, dim, keepdims=False) for part in range(size)])


def platform() -> str:
    """The platform that the program is compiled for, if its mesh has one."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or ""


def part_to_send(value: Any, before: Layout, move: Move, shape: Sequence[int], axes: Axes) -> Any:
    """The part of this device's block that it sends in a permute."""
    for d, (parts, after) in enumerate(zip(move.parts, move.after.dims, strict=True)):
        if parts is not None:
            assert after is not None
            part = jnp.asarray(parts, jnp.int32)[index_along(move.axes)]
            value = take_block(value, d, before.dims[d], after, shape[d], axes, part)
    return value


def combine(value: Any, names: tuple[str, ...], monoid: Monoid) -> Any:
    """All-reduces partial values along axes. A sum of -0 and -0 may be +0."""
    if not combines_in_transit(monoid, value.dtype):
        pieces = lax.all_gather(value, names)
        result = pieces[0]
        for piece in range(1, pieces.shape[0]):
            result = monoid.combine(result, pieces[piece])
        return result.astype(value.dtype)
    if monoid is Monoid.SUM:
        return lax.psum(value, names)
    if value.dtype in ORDERED:  # among floats, some all-reduces lose NaN
        return from_ordered_bits(combine(to_ordered_bits(value, monoid), names, monoid), value.dtype)
    most = lax.pmin if monoid in (Monoid.AND, Monoid.MIN) else lax.pmax
    return most(value.astype(jnp.int8), names).astype(np.bool_) if value.dtype == np.bool_ else most(value, names)


def to_ordered_bits(value: Any, monoid: Monoid) -> Any:
    """Maps floats to integers in the same order; NaN becomes the value that the monoid (maximum or minimum) selects."""
    bits = lax.bitcast_convert_type(value, ORDERED[value.dtype])
    least, greatest = (jnp.iinfo(bits.dtype).min, jnp.iinfo(bits.dtype).max)
    nan = greatest if monoid is Monoid.MAX else least
    return jnp.where(jnp.isnan(value), jnp.asarray(nan, bits.dtype), jnp.where(bits < 0, bits ^ greatest, bits))


def from_ordered_bits(bits: Any, dtype: Any) -> Any:
    """Undoes `to_ordered_bits`: the extreme integers become NaN."""
    return lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits), dtype)


def open_dim(value: Any, dim: int, cut: Cut | None, n: int, axes: Axes) -> Any:
    """Reshapes a dimension to ``outer``, one device's block, ``inner``."""
    assert cut is not None
    shape, inner = value.shape, n // (cut.outer * cut.size)
    return value.reshape(*shape[:dim], cut.outer, cut.block(axes), inner, *shape[dim + 1 :])


def close_dim(value: Any, dim: int) -> Any:
    """Undoes `open_dim`."""
    shape = value.shape
    return value.reshape(*shape[:dim], math.prod(shape[dim : dim + 3]), *shape[dim + 3 :])


def gather(
    value: Any, dim: int, cut: Cut, rest: Cut | None, n: int, axes: Axes, put_together: Callable[..., Any]
) -> Any:
    """All-gathers the blocks of a dimension, all of them or those over the minor axes."""
    size = cut.size if rest is None else rest.block(axes)
    if cut.outer == 1 and n == cut.size:
        together = put_together(value, axis=dim)
        return lax.slice_in_dim(together, 0, size, axis=dim) if together.shape[dim] != size else together
    parts = put_together(open_dim(value, dim, cut, n, axes), axis=dim + 1)
    return close_dim(lax.slice_in_dim(parts, 0, size, axis=dim + 1), dim)


def take_block(value: Any, dim: int, before: Cut | None, after: Cut, n: int, axes: Axes, part: jax.Array) -> Any:
    """Slices one block out of a larger one."""
    block = after.block(axes)
    parts = count(after.axes, axes) // (count(before.axes, axes) if before is not None else 1)
    have, inner = after.size if before is None else before.block(axes), n // (after.outer * after.size)
    whole = value.reshape(*value.shape[:dim], after.outer, have, inner, *value.shape[dim + 1 :])
    missing = block * parts - have
    if missing:
        whole = extend_dim(whole, dim + 1, 0, missing)
    start = part * block
    return close_dim(lax.dynamic_slice_in_dim(whole, start, block, axis=dim + 1), dim)


def extend_dim(value: Any, dim: int, before: int, behind: int) -> Any:
    """Pads a dimension with undefined values."""
    if not before and not behind:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return jnp.take(
            value, np.clip(np.arange(-before, value.shape[dim] + behind), 0, value.shape[dim] - 1), axis=dim
        )
    config = [(before, behind, 0) if d == dim else (0, 0, 0) for d in range(value.ndim)]
    return lax.pad(value, jnp.zeros((), value.dtype), config)


def fetch(
    value: Any,
    dim: int,
    cut: Cut,
    lies_cut: bool,
    n: int,
    intervals: Sequence[Interval],
    fill: Any,
    axes: Axes,
) -> Any:
    """Fetches the indices of a dimension that each device needs from wherever they are.

    Args:
      value: one device's array.
      dim: the dimension.
      cut: the axes that number the parts, and the cut of the dimension, if it is cut.
      lies_cut: whether `value` is the device's block of the dimension; otherwise every device has all of it.
      n: size of the whole dimension.
      intervals: the indices that each part needs, as consecutive intervals.
      fill: a scalar for indices that do not exist; None for any value.
      axes: the mesh axes.

    Returns:
      The device's array with the indices that it needs along the dimension.
    """
    block = cut.block(axes) if lies_cut else cut.size
    shape = value.shape
    inner = n // (cut.outer * cut.size)
    value = value.reshape(*shape[:dim], cut.outer, block, inner, *shape[dim + 1 :])
    have = block if lies_cut else None
    pieces = [_fetch_one(value, dim + 1, cut, have, each, fill, axes) for each in intervals]
    return close_dim(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=dim + 1), dim)


def _fetch_one(value: Any, dim: int, cut: Cut, block: int | None, interval: Interval, fill: Any, axes: Axes) -> Any:
    """As `fetch`, for one interval along an opened dimension; `block` is None if every device has all indices."""
    parts = len(interval.starts)
    index = np.stack([interval.indices(i, cut.size) for i in range(parts)])  # [part, element], -1 for none
    there = index >= 0
    if block is None:
        base = np.zeros(parts, int)
        near = value
    else:
        near, base = _neighbourhood(value, dim, cut.axes, block, index, axes)
    me = index_along(cut.axes)
    own = np.where(there, index - base[:, None], 0)
    result = _select(near, dim, own, there, me)
    if fill is not None and not there.all():
        mask = jnp.asarray(there)[me]
        mask = lax.broadcast_in_dim(mask, result.shape, (dim,))
        result = jnp.where(mask, result, jnp.asarray(fill, result.dtype))
    return result


def _neighbourhood(
    value: Any, dim: int, names: tuple[str, ...], block: int, index: np.ndarray, axes: Axes
) -> tuple[Any, np.ndarray]:
    """The device's block with as much of its neighbours' blocks as any device needs, and each part's first index.

    One permute per distance between blocks sends the elements that any device needs from the blocks at this distance.
    """
    parts = len(index)
    needed, pairs = needed_neighbours(index, block)
    first, last = min(needed, default=0), max(needed, default=0)
    pieces = []
    begin = 0
    for distance in range(first, last + 1):
        low, high = needed.get(distance, (0, block - 1))
        low = low if distance == first else 0
        high = high if distance == last else block - 1
        if distance == first:
            begin = low
        piece = lax.slice_in_dim(value, low, high + 1, axis=dim)
        if distance and distance in pairs:  # other blocks only lie between, and may be undefined
            piece = permute(piece, names, pairs[distance], axes)
        pieces.append(piece)
    near = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=dim)
    return near, (np.arange(parts) + first) * block + begin


def needed_neighbours(
    index: np.ndarray, block: int
) -> tuple[dict[int, tuple[int, int]], dict[int, set[tuple[int, int]]]]:
    """Per distance of blocks, the first and last element that any part needs, and the pairs of devices that exchange.

    Args:
      index: the indices that each part needs, int ``[part, element]``; -1 for none.
      block: number of indices of a block.
    """
    needed: dict[int, tuple[int, int]] = {}
    pairs: dict[int, set[tuple[int, int]]] = {}
    for part in range(len(index)):
        wanted = index[part][index[part] >= 0]
        for source in np.unique(wanted // block):
            inside = wanted[wanted // block == source] - source * block
            distance = int(source) - part
            low, high = needed.get(distance, (block, -1))
            needed[distance] = min(low, int(inside.min())), max(high, int(inside.max()))
            pairs.setdefault(distance, set()).add((int(source), part))
    return needed, pairs


def permute(value: Any, names: tuple[str, ...], pairs: Set[tuple[int, int]], axes: Axes) -> Any:
    """Permutes values between parts, ``(source, destination)``; each part receives one value.

    Where devices are at different points of the program (`APART`), all parts gather all values, and select their own.
    XLA's CPU runtime waits for all devices of the program in a permute (0.10).

    Unlike other collectives, a permute along several axes numbers devices in the order of the mesh's axes, whatever
    order is given.

    Args:
      value: one device's array.
      names: the axes that number the parts.
      pairs: sources and destinations; other parts receive undefined values.
      axes: the mesh axes.
    """
    if APART.get():
        sources = np.zeros(count(names, axes), np.int32)
        for source, destination in pairs:
            sources[destination] = source
        together = lax.all_gather(value, names)
        return lax.dynamic_index_in_dim(together, jnp.asarray(sources)[index_along(names)], 0, keepdims=False)
    ordered = [name for name in axes if name in names]
    parts = np.arange(count(names, axes)).reshape([axes[name] for name in names])
    place = parts.transpose([names.index(name) for name in ordered]).reshape(-1).argsort()
    return lax.ppermute(value, tuple(ordered), sorted((int(place[a]), int(place[b])) for a, b in pairs))


def _select(value: Any, dim: int, own: np.ndarray, there: np.ndarray, me: jax.Array) -> Any:
    """Elements ``own[part]`` along a dimension; undefined where `there` is false."""
    length = own.shape[1]
    steps = [row[ok] - np.flatnonzero(ok) for row, ok in zip(own, there, strict=True)]
    if all((s == s[0]).all() for s in steps if len(s)):  # contiguous elements stay contiguous
        starts = np.array([s[0] if len(s) else 0 for s in steps])
        before = max(0, -int(starts.min()))
        behind = max(0, int(starts.max()) + length - value.shape[dim])
        value = extend_dim(value, dim, before, behind)
        starts = starts + before
        if (starts == starts[0]).all():
            return lax.slice_in_dim(value, int(starts[0]), int(starts[0]) + length, axis=dim)
        return lax.dynamic_slice_in_dim(value, jnp.asarray(starts, jnp.int32)[me], length, axis=dim)
    return jnp.take(value, jnp.asarray(own, jnp.int32)[me], axis=dim, mode="clip")
