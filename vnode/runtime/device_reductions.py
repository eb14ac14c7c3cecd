"""Combines what devices hold into totals that all of them hold, within a program and across programs.

Knows stacks of partial sums and folds. Must not know nodes or passes.

Sums whose order counts are reduced by chunks: where devices hold the leaves of a full tree, by groups of devices,
groups of groups and so on; elsewhere every device is sent one chunk of all, adds it in tree order, and sends the result
to all. Both are the traffic of a ring all-reduce; the first half of it once per block that a device holds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vnode.operators import Monoid
from vnode.runtime.node_loops import (
    COMBINE,
    BufferPart,
    PartialBlocks,
    Sum,
    fold_pieces,
    materialize,
    materialize_input,
    opaque_count,
    round_to_storage,
)
from vnode.runtime.tree import Fold, Tree
from vnode.spmd.resharding_collectives import reduce_scatter

Parts = Sequence[int | None]
"""For each sum the dimension along which devices are to have parts of it; None for those that all have whole."""

BUCKET = 1 << 20
"""Bytes up to which values travel together, or an eighth of all: a collective needs its values' memory three times."""

LEAST = 32 << 10
"""Bytes that may travel together however few there are in all."""

ALONE = 128 << 10
"""Bytes from which a value travels alone: packing it costs more than another collective."""

UNROLLED = 32
"""Blocks up to which additions are written out."""

ROUNDED_EACH = (np.float32, np.float64)
"""Types that additions written out are rounded to, each: compilers keep more bits of narrower ones."""

SMALL = 16 << 10
"""Bytes of a bucket up to which every device adds all of it, with one collective; not of very many devices."""


def combine_in_any_order(sums: Sequence[Sum], totals: Sequence[Any], axis: str, parts: Parts = ()) -> list[Any]:
    """Combines every device's totals in any order: one collective per monoid, and one for each that is divided.

    None for a single device.
    """
    if lax.axis_size(axis) == 1:
        return list(totals)
    results: dict[int, Any] = {}
    groups: dict[Monoid, list[int]] = {}
    for i, (s, dim) in enumerate(itertools.zip_longest(sums, parts)):
        if dim is not None:
            results[i] = reduce_scatter(totals[i], axis, dim)
        else:
            groups.setdefault(s.monoid, []).append(i)
    for monoid, members in groups.items():
        values = [totals[i] for i in members]
        match monoid:
            case Monoid.SUM:
                reduced = lax.psum(values, axis)
            case Monoid.MAX if all(jnp.issubdtype(v.dtype, jnp.integer) for v in values):
                reduced = lax.pmax(values, axis)
            case Monoid.MIN if all(jnp.issubdtype(v.dtype, jnp.integer) for v in values):
                reduced = lax.pmin(values, axis)
            case _:  # among floats, some compilers' collectives lose NaN
                reduced = [fold_in_order(monoid, lax.all_gather(value, axis)) for value in values]
        results.update(zip(members, reduced, strict=True))
    return [results[i] for i in range(len(totals))]


def read_all_bits(total: jax.Array) -> jax.Array:
    """A total all bits of which are read; it has no derivative.

    Where a total is only rounded to bfloat16, if by a cast of the step, the TPU compiler sends its pieces rounded. Its
    propagation of bfloat16 goes through barriers, and stops at integers; these are combined with a zero that it does
    not know for one, or it would leave the way there and back out.
    """
    return round_to_storage(total, opaque_count(0)) if total.dtype == jnp.float32 else total


def fold_in_order(monoid: Monoid, values: jax.Array) -> jax.Array:
    """Combines along dimension 0, in order."""
    total = values[0]
    for k in range(1, values.shape[0]):
        total = COMBINE[monoid](total, values[k])
    return total


@dataclasses.dataclass(frozen=True)
class ReductionPlan:
    """How devices add what their nodes contribute, in tree order.

    Attributes:
      own: the folds of the devices, over their runs.
      starts: of each device's runs their first nodes, as positions on the device, and then how many nodes it has.
      across: the fold of what partial_blocks of them.
      flat: whether values may be flattened to travel together: not if they are sharded over other axes of the mesh.
      branches: of the tree.
    """

    device_folds: tuple[Fold, ...]
    starts: tuple[tuple[int, ...], ...]
    cross_device_fold: Fold
    may_flatten: bool
    branches: tuple[int, ...]

    @functools.cached_property
    def max_depth(self) -> int:
        """Sums that wait on any device, at most, while it forms another."""
        return max(fold.depth for fold in self.device_folds)

    @functools.cached_property
    def max_merges(self) -> int:
        """Blocks that any run is joined by on its device."""
        return max(max(fold.merges, default=0) for fold in self.device_folds)

    @functools.cached_property
    def max_remaining(self) -> int:
        """Blocks that remain on any device."""
        return max(len(fold.rest) for fold in self.device_folds)

    @functools.cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices that add at a time, then as many of such groups, and so on; if they add as a tree's upper levels do.

        So they do where each has one sum, these are one after another in the tree, and values may be divided.
        """
        devices = len(self.device_folds)
        if not self.may_flatten or any(len(fold.rest) != 1 for fold in self.device_folds):
            return ()
        one_each = [(d, d + 1) for d in range(devices)]
        for level in range(len(self.branches)):
            above = self.branches[level:]
            if (
                math.prod(above) >= devices
                and Tree(devices, above).fold(one_each).merges == self.cross_device_fold.merges
            ):
                return nested_group_sizes(devices, above)
        return ()

    @property
    def remaining_indices(self) -> list[int]:
        """Indices of the devices' remaining blocks, in order, if every device has `max_remaining` places."""
        return [d * self.max_remaining + i for d, fold in enumerate(self.device_folds) for i in range(len(fold.rest))]

    @property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each device's `node_loops.Runs`: int32 ``[devices]``, ``[devices, most + 1]``, ``[devices, most]``."""
        counts = np.array([len(fold.merges) for fold in self.device_folds], np.int32)
        most = max(counts)
        starts, merges = np.zeros((len(counts), most + 1), np.int32), np.zeros((len(counts), most), np.int32)
        for d, fold in enumerate(self.device_folds):
            starts[d, : counts[d] + 1] = self.starts[d]
            merges[d, : counts[d]] = fold.merges
        return counts, starts, merges

    @staticmethod
    @functools.lru_cache
    def from_counts(
        counts: tuple[int, ...], lane: int, one_axis: bool, first: int = 0, nodes: int | None = None
    ) -> ReductionPlan:
        """The plan for devices that hold `counts` nodes, in lanes of `lane`: all `nodes`, or some from `first` on."""
        tree = Tree.from_lanes(sum(counts) if nodes is None else nodes, lane)
        own, across = tree.folds(counts, first)
        bounds = np.cumsum([first, *counts]).tolist()
        starts = [
            (*(run[0] - start for run in tree.runs(start, stop)), stop - start)
            for start, stop in itertools.pairwise(bounds)
        ]
        return ReductionPlan(tuple(own), tuple(starts), across, one_axis, tree.branches)


def nested_group_sizes(devices: int, branches: Sequence[int]) -> tuple[int, ...]:
    """So many devices as groups of as many as a tree has branches, groups of such groups and so on; none if they do not
    fill these."""
    sizes = []
    for size in branches:
        if devices > 1:
            sizes.append(min(devices, size))
            devices, rest = divmod(devices, sizes[-1])
            if rest:
                return ()
    return tuple(sizes)


def reduce_all_nodes(
    sums: Sequence[Sum],
    rest: PartialBlocks,
    exact: Sequence[Any],
    plan: ReductionPlan,
    axis: str,
    parts: Parts = (),
) -> list[Any]:
    """Combines what `node_loops.reduce_in_tree_order` leaves on the devices, which hold all nodes.

    Args:
      sums: what is added.
      rest: what partial_blocks of sums that are not exact.
      exact: the totals of those that are.
      plan: how devices add.
      axis: of the mesh, over which devices are numbered.
      parts: which totals are divided among the devices.

    Returns:
      The totals of all.
    """
    blocks, exact = reduce_to_blocks(sums, rest, exact, plan, axis, parts)
    return merge_sums(sums, [block for (block,) in blocks], exact)


def reduce_to_blocks(
    sums: Sequence[Sum],
    rest: PartialBlocks,
    exact: Sequence[Any],
    plan: ReductionPlan,
    axis: str,
    parts: Parts = (),
) -> tuple[list[list[Any]], list[Any]]:
    """The same for devices that may hold only some of the nodes.

    Returns:
      Of every sum that is not exact the blocks that remain, in order; of those that are, the totals.
    """
    several = list(itertools.zip_longest(sums, parts))
    inexact = [(s, dim) for s, dim in several if not s.exact]
    others = [(s, dim) for s, dim in several if s.exact]
    return (
        reduce_in_tree_order([s for s, _ in inexact], rest, plan, axis, [dim for _, dim in inexact]),
        combine_in_any_order([s for s, _ in others], exact, axis, [dim for _, dim in others]),
    )


def merge_sums(sums: Sequence[Sum], inexact: Sequence[Any], exact: Sequence[Any]) -> list[Any]:
    """Something of every sum, given that of those that are not exact and of those that are."""
    others, rest = iter(exact), iter(inexact)
    return [next(others if s.exact else rest) for s in sums]


def combine_programs(
    sums: Sequence[Sum],
    blocks: Sequence[Sequence[Sequence[Any]]],
    exact: Sequence[Sequence[Any]],
    nodes: Sequence[int],
    lane: int,
) -> list[Any]:
    """Totals of what programs for some nodes each have left.

    Args:
      sums: what is added.
      blocks: of each program, in order, what `reduce_to_blocks` gave.
      exact: likewise.
      nodes: how many each program has.
      lane: consecutive nodes that are added one after another, if not those of a tree.

    Returns:
      The totals.
    """
    rest = [s for s in sums if not s.exact]
    _, fold = Tree.from_lanes(sum(nodes), lane).folds(nodes)
    sums_of_all: list[Any] = []
    if rest:
        columns = [jnp.stack([block for program in blocks for block in program[i]]) for i in range(len(rest))]
        rows = range(len(fold.merges))
        totals = [
            add_blocks(s, ReceivedBlocks([column]), rows, fold)[0] for s, column in zip(rest, columns, strict=True)
        ]
        sums_of_all = materialize([BufferPart(value, s.shape) for value, s in zip(totals, rest, strict=True)])
    others = [s for s in sums if s.exact]
    return merge_sums(
        sums,
        sums_of_all,
        [fold_in_order(s.monoid, jnp.stack(column)) for s, *column in zip(others, *exact, strict=True)],
    )


def reduce_in_tree_order(
    sums: Sequence[Sum], rest: PartialBlocks, plan: ReductionPlan, axis: str, parts: Parts
) -> list[list[Any]]:
    """Adds what partial_blocks on the devices.

    Args:
      sums: what is added, none of them exact.
      rest: what partial_blocks on this device.
      plan: how.
      axis: of the mesh, over which devices are numbered.
      parts: which sums are divided among the devices; all others every device is given whole.

    Returns:
      Of each sum the blocks that remain of all devices, in order: one, if these hold all nodes.
    """
    count = len(plan.cross_device_fold.rest)
    if not sums:
        return []
    if len(plan.device_folds) == 1:
        return rest.split(count)
    rows = plan.remaining_indices
    blocks = rest.split(plan.max_remaining)
    results: list[list[Any]] = [[] for _ in sums]
    for i, dim in enumerate(parts):
        if dim is not None:
            parcel = PackedBlocks(blocks[i], dim, False)
            results[i] = [parcel.add_chunk(sums[i].monoid, rows, plan, axis)]
    together = [i for i, dim in enumerate(parts) if dim is None]
    for members in buckets(sums, together) if plan.may_flatten else [[i] for i in together]:
        parcel = PackedBlocks.from_values([blocks[i] for i in members], len(plan.device_folds), plan.may_flatten)
        for total in parcel.add_all(sums[members[0]].monoid, rows, plan, axis):
            if plan.may_flatten and not parcel.flattened:  # as a collective leaves it in memory
                results[members[0]].append(total)
                continue
            sizes = [math.prod(sums[i].shape) for i in members]
            starts = [sum(sizes[:k]) if parcel.flattened else None for k in range(len(sizes))]
            places = [BufferPart(total, sums[i].shape, start) for i, start in zip(members, starts, strict=True)]
            for i, value in zip(members, materialize(places), strict=True):
                results[i].append(value)
    return results


@dataclasses.dataclass(frozen=True)
class ReceivedBlocks:
    """Blocks that several devices sent.

    Attributes:
      places: of each place for a block on a device, those that all devices had there.
      dim: which dimension of them counts the devices.
    """

    places: Sequence[jax.Array]
    dim: int = 0

    def __getitem__(self, row: int) -> jax.Array:
        """A block; those of the first device come first."""
        device, place = divmod(row, len(self.places))
        return lax.index_in_dim(self.places[place], device, self.dim, keepdims=False)

    def stacked(self) -> jax.Array:
        """The blocks ``[blocks, *shape]``."""
        several = jnp.stack([jnp.moveaxis(place, self.dim, 0) for place in self.places], 1)
        return several.reshape(-1, *several.shape[2:])


def add_blocks(s: Sum, held: ReceivedBlocks, rows: Sequence[int], fold: Fold) -> list[Any]:
    """Adds blocks that are in memory, in tree order; what is made of the result must not be compiled with it.

    Additions of numbers that nothing else is computed of are exact to the last bit in any kernel, as long as it rounds
    each: compilers keep more bits of narrower ones than these have.

    Args:
      s: what is added.
      held: the blocks.
      rows: which of them, in order.
      fold: how.

    Returns:
      The blocks that remain.
    """
    if len(rows) == 1:
        return [held[rows[0]]]
    if len(rows) <= UNROLLED and s.dtype in ROUNDED_EACH:
        return [s.from_zero(b) for b in fold.fold_values([held[row] for row in rows], COMBINE[s.monoid])]
    order, blocks = jnp.asarray(rows, jnp.int32), held.stacked()

    def piece(index: jax.Array, state: None, spent: list[Any], after: jax.Array) -> tuple[list[Any], None]:
        return [lax.dynamic_index_in_dim(blocks, order[index], 0, keepdims=False)], state

    merges = jnp.asarray(fold.merges, jnp.int32)
    with jax.named_scope("blocks"):
        left, _ = fold_pieces(piece, [s], opaque_count(len(rows)), merges, fold.depth, max(fold.merges), None)
    return left.split(len(fold.rest))[0]


def add_in_groups(s: Sum, value: jax.Array, dim: int, sizes: Sequence[int], axis: str, whole: bool = True) -> jax.Array:
    """Adds a block of each device in the order of a tree, and gives all of them the sum, or each its own part of it.

    Within groups, groups of groups, and so on, each device adds its part of what it had, in order, down to its chunk.
    Gathers come back the same way; or each chunk is sent to the device that it belongs to, as the first division is by
    the last digit of a device's number. A sum of two is the tree's, whichever is added to the other: a reduce-scatter.

    Args:
      s: what is added.
      value: the device's block.
      dim: its dimension that is divided, a multiple of the devices.
      sizes: members of a group at each level; their product is the number of devices.
      axis: of the mesh, over which they are numbered.
      whole: whether devices are to have all of the sum.
    """
    levels, stride = [], 1
    devices = math.prod(sizes)
    for size in sizes:
        firsts = [d for d in range(devices) if d // stride % size == 0]
        levels.append([[d + k * stride for k in range(size)] for d in firsts])
        stride *= size
    for members in levels:
        size = len(members[0])
        if size == 2:
            value = reduce_scatter(value, axis, dim, members)
            continue
        # A dimension of their own for the parts, or compilers bring the whole into another layout first.
        parts = value.reshape(*value.shape[:dim], size, value.shape[dim] // size, *value.shape[dim + 1 :])
        parts = lax.all_to_all(parts, axis, dim, dim, axis_index_groups=members, tiled=True)
        value = functools.reduce(lax.add, [lax.index_in_dim(parts, k, dim, keepdims=False) for k in range(size)])
    value = s.from_zero(value)
    if not whole:
        chunks = np.arange(devices).reshape(sizes).transpose().reshape(-1)  # that devices have: digits in reverse
        return lax.ppermute(value, axis, list(enumerate(chunks.tolist())))
    for members in reversed(levels):
        value = lax.all_gather(value, axis, axis=dim, axis_index_groups=members, tiled=True)
    return value


@dataclasses.dataclass(frozen=True)
class PackedBlocks:
    """Blocks of values that travel together.

    Attributes:
      blocks: a device's own, one for each place.
      dim: the dimension along which devices take chunks; None if each takes all.
      flat: whether the values are one after another in one dimension.
    """

    blocks: Sequence[jax.Array]
    dim: int | None
    flattened: bool

    @staticmethod
    def from_values(values: Sequence[Sequence[jax.Array]], devices: int, flat: bool) -> PackedBlocks:
        """Packs the blocks of each value; those of a single one as they are, if devices can take chunks of them."""
        blocks = values[0]
        fitting = [d for d, n in enumerate(blocks[0].shape) if n % devices == 0]
        if len(values) == 1 and len(blocks) * blocks[0].nbytes > SMALL and (fitting or not flat):
            return PackedBlocks(blocks, fitting[0] if fitting else None, False)
        if flat:
            blocks = [jnp.concatenate(list(map(jnp.ravel, column))) for column in zip(*values, strict=True)]
        if len(blocks) * blocks[0].nbytes <= SMALL and (devices <= UNROLLED or not flat):
            return PackedBlocks(blocks, None, flat)
        return PackedBlocks([jnp.pad(block, (0, -block.size % devices)) for block in blocks], 0, True)

    def add_all(self, monoid: Monoid, rows: Sequence[int], plan: ReductionPlan, axis: str) -> list[Any]:
        """The sums that remain of all devices' blocks, of which `rows` count."""
        s = Sum(monoid, self.blocks[0].shape, self.blocks[0].dtype)
        if plan.group_sizes and monoid is Monoid.SUM and self.dim is not None and s.dtype in ROUNDED_EACH:
            return [add_in_groups(s, self.blocks[0], self.dim, plan.group_sizes, axis)]
        held = self.exchange_chunks(axis)
        parts = add_blocks(dataclasses.replace(s, shape=held[0].shape), held, rows, plan.cross_device_fold)
        return [self.gather_chunks(part, axis) for part in parts]

    def add_chunk(self, monoid: Monoid, rows: Sequence[int], plan: ReductionPlan, axis: str) -> Any:
        """The same of all nodes' blocks, of which each device is given its chunk only."""
        s = Sum(monoid, self.blocks[0].shape, self.blocks[0].dtype)
        assert self.dim is not None
        if plan.group_sizes and s.dtype in ROUNDED_EACH:
            return add_in_groups(s, self.blocks[0], self.dim, plan.group_sizes, axis, whole=False)
        held = self.exchange_chunks(axis)
        (total,) = add_blocks(dataclasses.replace(s, shape=held[0].shape), held, rows, plan.cross_device_fold)
        return materialize_input(total)

    def exchange_chunks(self, axis: str) -> ReceivedBlocks:
        """All devices' blocks of this device's chunk."""
        several = range(len(self.blocks))
        if self.dim is None:
            held = lax.all_gather(jnp.stack(self.blocks), axis)
            return ReceivedBlocks([held[:, i] for i in several])
        # A dimension of their own for the chunks, or compilers bring the whole into another layout first.
        dim, shape, devices = self.dim, self.blocks[0].shape, lax.axis_size(axis)
        apart = (*shape[:dim], devices, shape[dim] // devices, *shape[dim + 1 :])
        chunks = [block.reshape(apart) for block in self.blocks]
        if self.flattened:  # these are copies already
            held = lax.all_to_all(jnp.stack(chunks, 1), axis, 0, 0, tiled=True)
            return ReceivedBlocks([held[:, i] for i in several])
        return ReceivedBlocks([lax.all_to_all(each, axis, dim, dim, tiled=True) for each in chunks], dim)

    def gather_chunks(self, chunk: jax.Array, axis: str) -> jax.Array:
        """The whole from every device's chunk."""
        return chunk if self.dim is None else lax.all_gather(chunk, axis, axis=self.dim, tiled=True)


def buckets(sums: Sequence[Sum], numbers: Sequence[int]) -> list[list[int]]:
    """Which of some values travel together: small ones of one dtype and monoid, up to `BUCKET` bytes."""
    limit = max(LEAST, min(BUCKET, sum(sums[i].nbytes for i in numbers) // 8))
    result: list[list[int]] = []
    filling: dict[tuple[Any, Monoid], tuple[int, list[int]]] = {}
    for i in numbers:
        s = sums[i]
        if s.nbytes >= ALONE:
            result.append([i])
            continue
        used, members = filling.get((s.dtype, s.monoid), (0, []))
        if not members or used + s.nbytes > limit:
            used, members = 0, []
            result.append(members)
        members.append(i)
        filling[(s.dtype, s.monoid)] = (used + s.nbytes, members)
    return result
