"""Partial sums of devices -> totals on all devices, within a program and across programs.

Knows stacks of partial sums and folds. Must not know nodes or passes.

    3 devices hold a, b and c, of 3 elements      all-to-all:  device d has a[d], b[d] and c[d]
                                                  device d adds (a[d] + b[d]) + c[d]
                                                  all-gather:  each device has (a + b) + c

Sums that are not exact are reduced by chunks, as above: each device receives its chunk of all blocks, adds it in tree
order, and sends the result to all. Where devices hold the leaves of a full tree, groups of devices do so, then groups
of groups, and so on. Both ways send as many bytes as a ring all-reduce, if each device holds one block. With several
blocks, the first half is sent once for each.
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
"""For each sum the dimension along which devices receive parts of it; None where all devices receive the whole sum."""

MAX_BUCKET_BYTES = 1 << 20
"""The most bytes of values that share a collective, which needs their memory three times. If an eighth of all values
is less, it is that."""

MIN_BUCKET_BYTES = 32 << 10
"""Values up to so many bytes may share a collective even if that is more than an eighth of all values."""

OWN_COLLECTIVE_BYTES = 128 << 10
"""Bytes from which a value has a collective of its own: packing it would cost more than another collective."""

MAX_UNROLLED = 32
"""Number of blocks up to which additions are unrolled."""

ROUNDED_EACH = (np.float32, np.float64)
"""Types whose unrolled additions compilers round one by one. Of narrower types they keep more bits."""

SMALL = 16 << 10
"""Bytes of all of a device's blocks up to which they are not chunked: every device gathers all blocks, and adds them.
With more than `MAX_UNROLLED` devices flattened blocks are chunked all the same."""


def combine_in_any_order(sums: Sequence[Sum], totals: Sequence[Any], axis: str, parts: Parts = ()) -> list[Any]:
    """Combines the devices' totals in any order: one collective per monoid, and one for each divided total.

    A single device needs no collective.
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
    """Keeps the TPU compiler from rounding a float32 total before its all-reduce; the result has no derivative.

    It would do so if the step casts the total to bfloat16. Its propagation of bfloat16 passes barriers, and stops at
    integers. So the total's bits are combined with a zero that the compiler does not know to be zero.
    """
    return round_to_storage([total], opaque_count(0))[0] if total.dtype == jnp.float32 else total


def fold_in_order(monoid: Monoid, values: jax.Array) -> jax.Array:
    """Combines along dimension 0, in order."""
    total = values[0]
    for k in range(1, values.shape[0]):
        total = COMBINE[monoid](total, values[k])
    return total


@dataclasses.dataclass(frozen=True)
class ReductionPlan:
    """The order in which devices add their nodes' contributions, and then their sums: that of a tree.

    Attributes:
      device_folds: each device's fold over its runs.
      starts: per device, the first node of each run as a position on the device, and then the number of nodes.
      cross_device_fold: the fold of the blocks that remain on the devices.
      may_flatten: whether values may be flattened to share a collective; not if other mesh axes shard them.
      branches: branches of the tree, per level.
    """

    device_folds: tuple[Fold, ...]
    starts: tuple[tuple[int, ...], ...]
    cross_device_fold: Fold
    may_flatten: bool
    branches: tuple[int, ...]

    @functools.cached_property
    def max_depth(self) -> int:
        """The most sums that wait on a device while it forms another one."""
        return max(fold.depth for fold in self.device_folds)

    @functools.cached_property
    def max_merges(self) -> int:
        """The most blocks that join one run on a device."""
        return max(max(fold.merges, default=0) for fold in self.device_folds)

    @functools.cached_property
    def max_remaining(self) -> int:
        """The most blocks that remain on a device."""
        return max(len(fold.rest) for fold in self.device_folds)

    @functools.cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of nested device groups, innermost first, for `add_in_groups`; empty if devices cannot add in groups.

        They can if each device has one sum, the sums fill upper levels of the tree, and values may be divided.
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
        """Each device's `node_loops.Runs`: int32 ``[devices]``, ``[devices, most + 1]``, ``[devices, most]``.

        `most` is the number of runs of the device that has most.
        """
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
        counts: tuple[int, ...], lane: int, may_flatten: bool, first: int = 0, nodes: int | None = None
    ) -> ReductionPlan:
        """The plan for some devices.

        Args:
          counts: the number of nodes of each device.
          lane: the number of consecutive nodes that are added one after another; 1: the tree's own.
          may_flatten: whether values may be flattened; not if XLA shards them over other mesh axes.
          first: the number of the first device's first node.
          nodes: V; by default these devices hold all nodes.
        """
        tree = Tree.from_lanes(sum(counts) if nodes is None else nodes, lane)
        own, across = tree.folds(counts, first)
        bounds = np.cumsum([first, *counts]).tolist()
        starts = [
            (*(run[0] - start for run in tree.runs(start, stop)), stop - start)
            for start, stop in itertools.pairwise(bounds)
        ]
        return ReductionPlan(tuple(own), tuple(starts), across, may_flatten, tree.branches)


def nested_group_sizes(devices: int, branches: Sequence[int]) -> tuple[int, ...]:
    """Splits devices into nested groups as large as the tree's branches; empty if the devices do not fill the
    groups."""
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
    """Combines the devices' blocks after `node_loops.add_in_tree_order`; the devices hold all nodes.

    Args:
      sums: the sums.
      rest: the partial blocks of the inexact sums.
      exact: the totals of the exact sums.
      plan: how devices add.
      axis: the mesh axis over which devices are numbered.
      parts: which totals are divided among the devices.

    Returns:
      The totals of all sums.
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
    """As `reduce_all_nodes`, for devices that may hold only some of the nodes.

    Returns:
      The remaining blocks of each inexact sum, in order; the totals of exact sums.
    """
    several = list(itertools.zip_longest(sums, parts))
    inexact = [(s, dim) for s, dim in several if not s.exact]
    others = [(s, dim) for s, dim in several if s.exact]
    return (
        reduce_in_tree_order([s for s, _ in inexact], rest, plan, axis, [dim for _, dim in inexact]),
        combine_in_any_order([s for s, _ in others], exact, axis, [dim for _, dim in others]),
    )


def merge_sums(sums: Sequence[Sum], inexact: Sequence[Any], exact: Sequence[Any]) -> list[Any]:
    """Merges values of the inexact sums and of the exact sums into the order of `sums`."""
    others, rest = iter(exact), iter(inexact)
    return [next(others if s.exact else rest) for s in sums]


def combine_programs(
    sums: Sequence[Sum],
    blocks: Sequence[Sequence[Sequence[Any]]],
    exact: Sequence[Sequence[Any]],
    nodes: Sequence[int],
    lane: int,
) -> list[Any]:
    """Totals over several programs, each of which reduced some nodes.

    Args:
      sums: the sums.
      blocks: per program, in order, the result of `reduce_to_blocks` for inexact sums.
      exact: per program, the totals of exact sums.
      nodes: the number of nodes of each program.
      lane: number of consecutive nodes that are added one after another; 1: the tree's own number.

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
    """Reduces the devices' partial blocks.

    Args:
      sums: the sums, none of them exact.
      rest: this device's partial blocks.
      plan: how devices add.
      axis: the mesh axis over which devices are numbered.
      parts: which sums are divided among the devices; every device receives the others whole.

    Returns:
      For each sum the blocks that remain over all devices, in order: one block, if the devices hold all nodes.
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
            packed = PackedBlocks(blocks[i], dim, False)
            results[i] = [packed.add_chunk(sums[i].monoid, rows, plan, axis)]
    undivided = [i for i, dim in enumerate(parts) if dim is None]
    for members in buckets(sums, undivided) if plan.may_flatten else [[i] for i in undivided]:
        packed = PackedBlocks.from_values([blocks[i] for i in members], len(plan.device_folds), plan.may_flatten)
        for total in packed.add_all(sums[members[0]].monoid, rows, plan, axis):
            if plan.may_flatten and not packed.flattened:  # as a collective leaves it in memory
                results[members[0]].append(total)
                continue
            sizes = [math.prod(sums[i].shape) for i in members]
            starts = [sum(sizes[:k]) if packed.flattened else None for k in range(len(sizes))]
            places = [BufferPart(total, sums[i].shape, start) for i, start in zip(members, starts, strict=True)]
            for i, value in zip(members, materialize(places), strict=True):
                results[i].append(value)
    return results


@dataclasses.dataclass(frozen=True)
class ReceivedBlocks:
    """Blocks received from several devices.

    Attributes:
      places: per place for a block on a device, the blocks that all devices had there.
      dim: the dimension that counts the devices.
    """

    places: Sequence[jax.Array]
    dim: int = 0

    def __getitem__(self, row: int) -> jax.Array:
        """A block; the first device's blocks come first."""
        device, place = divmod(row, len(self.places))
        return lax.index_in_dim(self.places[place], device, self.dim, keepdims=False)

    def stacked(self) -> jax.Array:
        """The blocks ``[blocks, *shape]``."""
        several = jnp.stack([jnp.moveaxis(place, self.dim, 0) for place in self.places], 1)
        return several.reshape(-1, *several.shape[2:])


def add_blocks(s: Sum, held: ReceivedBlocks, rows: Sequence[int], fold: Fold) -> list[Any]:
    """Adds blocks that are in memory, in tree order; users of the result must not be compiled together with it.

    An addition whose result has no other use in a kernel is correctly rounded, as long as the kernel rounds each one.
    Compilers keep more bits of types narrower than these.

    Args:
      s: the sum.
      held: the blocks.
      rows: the blocks that are added, in order.
      fold: the order of additions.

    Returns:
      The blocks that remain.
    """
    if len(rows) == 1:
        return [held[rows[0]]]
    if len(rows) <= MAX_UNROLLED and s.dtype in ROUNDED_EACH:
        return [s.from_zero(b) for b in fold.fold_values([held[row] for row in rows], COMBINE[s.monoid])]
    order, blocks = jnp.asarray(rows, jnp.int32), held.stacked()

    def piece(index: jax.Array, state: None, spent: list[Any], after: jax.Array) -> tuple[list[Any], None]:
        return [lax.dynamic_index_in_dim(blocks, order[index], 0, keepdims=False)], state

    merges = jnp.asarray(fold.merges, jnp.int32)
    with jax.named_scope("blocks"):
        left, _ = fold_pieces(piece, [s], opaque_count(len(rows)), merges, fold.depth, max(fold.merges), None)
    return left.split(len(fold.rest))[0]


def add_in_groups(s: Sum, value: jax.Array, dim: int, sizes: Sequence[int], axis: str, whole: bool = True) -> jax.Array:
    """Adds one block per device in tree order; gives all devices the sum, or each device its own chunk of it.

    At each level, the members of a group exchange parts of their blocks, and each adds its part in order. Groups of two
    use a reduce-scatter, since the sum of two blocks does not depend on their order. In the end each device has a
    chunk. All-gathers over the groups, outermost first, give all devices the sum. Otherwise a permute sends each chunk
    to the device that owns it: the first level divides by the last digit of a device's number.

    Args:
      s: the sum.
      value: the device's block.
      dim: the dimension that is divided; its size is a multiple of the number of devices.
      sizes: members of a group at each level; their product is the number of devices.
      axis: the mesh axis over which devices are numbered.
      whole: whether each device receives the whole sum.
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
        # the parts have a dimension of their own, or compilers first change the layout of the whole value
        parts = value.reshape(*value.shape[:dim], size, value.shape[dim] // size, *value.shape[dim + 1 :])
        parts = lax.all_to_all(parts, axis, dim, dim, axis_index_groups=members, tiled=True)
        value = functools.reduce(lax.add, [lax.index_in_dim(parts, k, dim, keepdims=False) for k in range(size)])
    value = s.from_zero(value)
    if not whole:
        chunks = np.arange(devices).reshape(sizes).transpose().reshape(-1)  # chunk of each device: digits reversed
        return lax.ppermute(value, axis, list(enumerate(chunks.tolist())))
    for members in reversed(levels):
        value = lax.all_gather(value, axis, axis=dim, axis_index_groups=members, tiled=True)
    return value


@dataclasses.dataclass(frozen=True)
class PackedBlocks:
    """Blocks of several values that share a collective.

    Attributes:
      blocks: a device's own blocks, one per place.
      dim: the dimension along which devices take chunks; None if each takes all.
      flattened: whether the values are concatenated in one dimension.
    """

    blocks: Sequence[jax.Array]
    dim: int | None
    flattened: bool

    @staticmethod
    def from_values(values: Sequence[Sequence[jax.Array]], devices: int, flat: bool) -> PackedBlocks:
        """Packs the blocks of each value; a single value stays as it is, if devices can take chunks of it."""
        blocks = values[0]
        fitting = [d for d, n in enumerate(blocks[0].shape) if n % devices == 0]
        if len(values) == 1 and len(blocks) * blocks[0].nbytes > SMALL and (fitting or not flat):
            return PackedBlocks(blocks, fitting[0] if fitting else None, False)
        if flat:
            blocks = [jnp.concatenate(list(map(jnp.ravel, column))) for column in zip(*values, strict=True)]
        if len(blocks) * blocks[0].nbytes <= SMALL and (devices <= MAX_UNROLLED or not flat):
            return PackedBlocks(blocks, None, flat)
        return PackedBlocks([jnp.pad(block, (0, -block.size % devices)) for block in blocks], 0, True)

    def add_all(self, monoid: Monoid, rows: Sequence[int], plan: ReductionPlan, axis: str) -> list[Any]:
        """Exchanges all devices' blocks and adds them in tree order.

        Args:
          monoid: of the sums.
          rows: the numbers of the blocks that exist, as `ReceivedBlocks` counts them.
          plan: how devices add.
          axis: the mesh axis over which devices are numbered.

        Returns:
          The sums that remain: one, if the devices hold all nodes.
        """
        s = Sum(monoid, self.blocks[0].shape, self.blocks[0].dtype)
        if plan.group_sizes and monoid is Monoid.SUM and self.dim is not None and s.dtype in ROUNDED_EACH:
            return [add_in_groups(s, self.blocks[0], self.dim, plan.group_sizes, axis)]
        held = self.exchange_chunks(axis)
        parts = add_blocks(dataclasses.replace(s, shape=held[0].shape), held, rows, plan.cross_device_fold)
        return [self.gather_chunks(part, axis) for part in parts]

    def add_chunk(self, monoid: Monoid, rows: Sequence[int], plan: ReductionPlan, axis: str) -> Any:
        """As `add_all` for the blocks of all nodes; each device receives its own chunk of the sum only."""
        s = Sum(monoid, self.blocks[0].shape, self.blocks[0].dtype)
        assert self.dim is not None
        if plan.group_sizes and s.dtype in ROUNDED_EACH:
            return add_in_groups(s, self.blocks[0], self.dim, plan.group_sizes, axis, whole=False)
        held = self.exchange_chunks(axis)
        (total,) = add_blocks(dataclasses.replace(s, shape=held[0].shape), held, rows, plan.cross_device_fold)
        return materialize_input(total)

    def exchange_chunks(self, axis: str) -> ReceivedBlocks:
        """All-to-all: every device's blocks of this device's chunk."""
        several = range(len(self.blocks))
        if self.dim is None:
            held = lax.all_gather(jnp.stack(self.blocks), axis)
            return ReceivedBlocks([held[:, i] for i in several])
        # the chunks have a dimension of their own, or compilers first change the layout of the whole value
        dim, shape, devices = self.dim, self.blocks[0].shape, lax.axis_size(axis)
        chunked = (*shape[:dim], devices, shape[dim] // devices, *shape[dim + 1 :])
        chunks = [block.reshape(chunked) for block in self.blocks]
        if self.flattened:  # these are copies already
            held = lax.all_to_all(jnp.stack(chunks, 1), axis, 0, 0, tiled=True)
            return ReceivedBlocks([held[:, i] for i in several])
        return ReceivedBlocks([lax.all_to_all(each, axis, dim, dim, tiled=True) for each in chunks], dim)

    def gather_chunks(self, chunk: jax.Array, axis: str) -> jax.Array:
        """All-gather: the whole value from every device's chunk."""
        return chunk if self.dim is None else lax.all_gather(chunk, axis, axis=self.dim, tiled=True)


def buckets(sums: Sequence[Sum], numbers: Sequence[int]) -> list[list[int]]:
    """Groups the values that share a collective: small values of one dtype and monoid, up to a number of bytes."""
    limit = max(MIN_BUCKET_BYTES, min(MAX_BUCKET_BYTES, sum(sums[i].nbytes for i in numbers) // 8))
    result: list[list[int]] = []
    filling: dict[tuple[Any, Monoid], tuple[int, list[int]]] = {}
    for i in numbers:
        s = sums[i]
        if s.nbytes >= OWN_COLLECTIVE_BYTES:
            result.append([i])
            continue
        used, members = filling.get((s.dtype, s.monoid), (0, []))
        if not members or used + s.nbytes > limit:
            used, members = 0, []
            result.append(members)
        members.append(i)
        filling[(s.dtype, s.monoid)] = (used + s.nbytes, members)
    return result
