"""Small sums over nodes -> a buffer of all nodes' contributions, reduced once, in tree order.

Knows monoids, trees and numbers of nodes. Must not know equations or placements.

Before, a stack of partial blocks that loops inside the loop over nodes push to and merge from; then blocks are sent::

    for run in runs: push the last block; for node in run: total += piece(node); merge blocks into total
    send what remains on each device; add in tree order

After, with pieces of all sums side by side (``[nodes, elements]``)::

    for node in nodes: pieces[node] = piece(node)
    gather the pieces of all devices; add in tree order

The bits are the same, since the tree is. Where a contribution has a few KiB, the loops that keep a stack take longer
than the nodes' own computation, and a collective takes as long for all contributions as for one block. The buffer holds
one contribution per node, so this is for small sums only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vnode.operators import Monoid
from vnode.runtime.device_reductions import ROUNDED_EACH, combine_in_any_order, merge_sums
from vnode.runtime.node_loops import (
    COMBINE,
    BufferPart,
    NodeProgram,
    State,
    Sum,
    add_all,
    loop_of_nodes,
    materialize,
    round_to_storage,
    write_at,
)
from vnode.runtime.tree import Tree

LARGEST = 64 << 10
"""Bytes of all nodes' contributions up to which they are buffered; above, a stack was measured to be as fast."""


def are_small(sums: Sequence[Sum], nodes: int) -> bool:
    """Whether sums over so many nodes are formed in a buffer.

    Args:
      sums: all sums of a pass.
      nodes: V.
    """
    inexact = [s for s in sums if not s.exact]
    small = sum(s.nbytes for s in inexact) * nodes <= LARGEST
    return bool(inexact) and small and all(s.dtype in ROUNDED_EACH for s in inexact)


def sum_small(
    program: NodeProgram,
    sums: Sequence[Sum],
    count: jax.Array,
    counts: Sequence[int],
    tree: Tree,
    buffers: list[Any],
    axis: str,
) -> tuple[list[Any], list[Any]]:
    """Runs a device's nodes and reduces their contributions over all devices.

    Args:
      program: the computation of one node.
      sums: the sums; see `are_small`.
      count: this device's number of nodes, int32 scalar that the compiler does not know.
      counts: numbers of nodes of all devices, in order; together the leaves of the tree.
      tree: the order of additions.
      buffers: buffers for the values that nodes keep, ``[places, ...]``.
      axis: the mesh axis over which devices are numbered.

    Returns:
      The totals, and the values kept of each node.
    """
    exact = [s for s in sums if s.exact]
    packs = group_by_buffer(sums)

    def compute(given: list[Any], index: jax.Array) -> tuple[list[Any], list[Any]]:
        pieces, kept = program.compute(given)
        rows: list[Any] = []
        for pack in packs:
            # a node may flatten the same value for a product of its own; one device's compiler would find it only later
            rounded = round_to_storage([pieces[i].astype(sums[i].dtype) for i in pack], index)
            rows.append(jnp.concatenate([piece.reshape(-1) for piece in rounded]))
        return [piece for s, piece in zip(sums, pieces, strict=True) if s.exact], [*rows, *kept]

    sizes = [sum(math.prod(sums[i].shape) for i in pack) for pack in packs]
    places = [jnp.zeros((max(counts), size), sums[pack[0]].dtype) for pack, size in zip(packs, sizes, strict=True)]
    totals, kept = each_node(program, compute, exact, count, [*places, *buffers])
    inexact = dict[int, Any]()
    for pack, pieces in zip(packs, kept, strict=False):
        members = [sums[i] for i in pack]
        inexact.update(zip(pack, reduce_pieces(members, gather_in_node_order(pieces, counts, axis), tree), strict=True))
    return merge_sums(sums, [inexact[i] for i in sorted(inexact)], combine_in_any_order(exact, totals, axis)), kept[
        len(packs) :
    ]


def group_by_buffer(sums: Sequence[Sum]) -> list[list[int]]:
    """The positions of inexact sums that share a buffer: those of one dtype and monoid."""
    packs = dict[tuple[Any, Monoid], list[int]]()
    for i, s in enumerate(sums):
        if not s.exact:
            packs.setdefault((np.dtype(s.dtype), s.monoid), []).append(i)
    return list(packs.values())


def each_node(
    program: NodeProgram,
    compute: Callable[[list[Any], jax.Array], tuple[list[Any], list[Any]]],
    exact: Sequence[Sum],
    count: jax.Array,
    buffers: list[Any],
) -> tuple[list[Any], list[Any]]:
    """One loop over a device's nodes: the totals of exact sums, and the filled buffers.

    A node's parts and kept values pass through the loop's state: see `State`.
    """

    def body(index: jax.Array, state: State) -> State:
        pieces, kept = compute(state.parts, index)
        totals = add_all(exact, state.totals, pieces)
        parts = program.take(index + 1)
        if program.single:  # or the parts are loop-invariant, and their users are hoisted
            parts = [jnp.where(index + 1 < count, new, old) for new, old in zip(parts, state.parts, strict=True)]
        return State(parts, totals, kept, write_at(state.buffers, state.kept, index - 1))

    first = State(program.take(jnp.int32(0)), [s.identity() for s in exact], [r[0] for r in buffers], buffers)
    with jax.named_scope("nodes"):
        last = loop_of_nodes(count, [], body, first)
    return last.totals, write_at(last.buffers, last.kept, count - 1)


def gather_in_node_order(pieces: jax.Array, counts: Sequence[int], axis: str) -> jax.Array:
    """All-gathers contributions ``[nodes, elements]`` from each device's ``[most, elements]``, whose last ones are
    unused."""
    if len(counts) == 1:
        return pieces
    held, most = lax.all_gather(pieces, axis, tiled=True), max(counts)
    if min(counts) == most:
        return held
    return jnp.concatenate([held[d * most : d * most + count] for d, count in enumerate(counts)])


def reduce_pieces(sums: Sequence[Sum], pieces: jax.Array, tree: Tree) -> list[Any]:
    """Reduces contributions ``[nodes, elements]`` to totals, each materialized by itself."""
    total = add_by_levels(dataclasses.replace(sums[0], shape=pieces.shape[1:]), pieces, tree)
    sizes = [math.prod(s.shape) for s in sums]
    starts = np.cumsum([0, *sizes]).tolist()
    return materialize([BufferPart(total, s.shape, start) for s, start in zip(sums, starts, strict=False)])


def add_by_levels(s: Sum, pieces: jax.Array, tree: Tree) -> jax.Array:
    """Adds contributions ``[leaves, *shape]`` in tree order, all blocks of a level at once.

    If the last block of a level has fewer branches, it is padded with numbers that change no bit of a sum: -0.
    """
    neutral = -0.0 if s.monoid is Monoid.SUM else s.monoid.identity(s.dtype)
    for size in tree.branches:
        if len(pieces) > 1:
            filled = -(-len(pieces) // size) * size
            padding = [(0, filled - len(pieces), 0), *[(0, 0, 0)] * len(s.shape)]
            pieces = lax.pad(pieces, jnp.asarray(neutral, s.dtype), padding)
            parts = pieces.reshape(-1, size, *s.shape)
            pieces = functools.reduce(COMBINE[s.monoid], [parts[:, k] for k in range(size)])
    return s.from_zero(pieces[0])
