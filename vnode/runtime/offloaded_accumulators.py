"""Sums that wait for others in tree order -> a stack whose lowest entries are offloaded to host memory.

Knows memory spaces and the order of a `Fold`. Must not know trees, nodes, nor who decided how many are offloaded.

The lower a sum is on the stack, the larger is its block, the longer it waits, and the more seldom it is read. It is
sent to the host when the next piece comes. It comes back in pieces, each added as it arrives, so the device needs no
buffer for all of it. Transfers run one after another. Otherwise the compiler begins all at once, and first copies
values from on-chip memory to device memory (libtpu 0.0.42).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vnode.operators.memory_spaces import DEVICE, HOST
from vnode.runtime.host_prefetch import split_for_copy
from vnode.runtime.node_loops import PartialBlocks, Pieces, Sum, loop_of_nodes, named_loop, unwritten_buffers

LEAST = 1 << 20
"""Bytes of a sum from which it may be offloaded; for smaller ones the latency of the link dominates."""

PIECE = 1 << 20
"""Bytes fetched at a time, roughly. With larger pieces a transformer's step takes more memory: 1,038 MiB with 4 MiB,
950 with 1 MiB (libtpu 0.0.42)."""


def can_offload(shape: Sequence[int], dtype: Any) -> bool:
    """Whether a sum may be offloaded: a large array of floating-point numbers.

    >>> can_offload((1024, 256), jnp.float32), can_offload((1024,), jnp.float32)
    (True, False)
    """
    large = math.prod(shape) * jnp.dtype(dtype).itemsize >= LEAST
    return large and len(shape) > 0 and jnp.issubdtype(dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class AccumulatorStack:
    """The stack of one sum's waiting blocks, in host and device memory.

    Attributes:
      sum: the sum.
      host_levels: number of the lowest entries that are on the host.
      device_levels: number of the other entries.
    """

    sum: Sum
    host_levels: int
    device_levels: int

    @staticmethod
    def for_sum(s: Sum, depth: int, most: int) -> AccumulatorStack:
        """The stack of a sum of which `depth` blocks wait, the lowest `most` of them on the host if it is large."""
        host_levels = min(depth, most) if can_offload(s.shape, s.dtype) else 0
        return AccumulatorStack(s, host_levels, depth - host_levels)

    @functools.cached_property
    def piece_layout(self) -> tuple[int, int]:
        """The dimension along which a sum is fetched in pieces (dimensions before it have size one), and their
        number."""
        return split_for_copy(self.sum.shape, jnp.dtype(self.sum.dtype).itemsize, PIECE)

    @property
    def piece_count(self) -> int:
        """The number of pieces in which a sum is fetched."""
        return self.piece_layout[1]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a piece."""
        dim, pieces = self.piece_layout
        return (*self.sum.shape[:dim], self.sum.shape[dim] // pieces, *self.sum.shape[dim + 1 :])

    def allocate(self) -> Stack:
        """Allocates the stack's buffers."""
        zero = jnp.zeros((), self.sum.dtype)
        host_zero, pieces = jax.device_put(zero, HOST), self.host_levels * self.piece_count
        host = [lax.broadcast(host_zero, (pieces, *self.piece_shape))] if self.host_levels else []
        return host, [lax.broadcast(zero, (self.device_levels, *self.sum.shape))] if self.device_levels else []

    def push(self, stack: Stack, value: Any, height: Any, after: Any) -> tuple[Stack, Any]:
        """Pushes a value.

        Args:
          stack: the stack.
          value: the new entry.
          height: number of entries, this one included, int32 scalar; zero if nothing is pushed.
          after: a non-negative number that is known only when the push may begin.

        Returns:
          The stack, and another such number, known when the push is done.
        """
        host, device = stack
        later = (after < 0).astype(jnp.int32)

        def send(turn: jax.Array, carry: Any) -> Any:
            (buffer,), turns = carry
            there = jax.device_put(value.reshape(self.piece_count, *self.piece_shape), HOST)
            at = (height - 1 + turn + later) * self.piece_count
            return [lax.dynamic_update_slice_in_dim(buffer, there, at, 0)], turns + 1

        def put(turn: jax.Array, carry: Any) -> Any:
            (buffer,), turns = carry
            at = height - 1 - self.host_levels + turn + later
            return [lax.dynamic_update_index_in_dim(buffer, value, at, 0)], turns + 1

        low = ((height > 0) & (height <= self.host_levels)).astype(jnp.int32)
        if host:
            host, after = named_loop("send", 0, low, send, (host, after))
        if device:
            device, after = named_loop("push", 0, (height > self.host_levels).astype(jnp.int32), put, (device, after))
        return (host, device), after

    def merge_from_top(self, stack: Stack, value: Any, height: Any, place: Any, after: Any) -> tuple[Any, Any]:
        """Adds the entries from the top down to a place to a value, one after another.

        Args:
          stack: the stack.
          value: the value to which they are added.
          height: number of entries.
          place: the lowest entry that joins.
          after: as for `push`.

        Returns:
          The sum, and a number as that of `push`.
        """
        host, device = stack
        later = (after < 0).astype(jnp.int32)

        def merge(turn: jax.Array, value: jax.Array) -> jax.Array:
            return self.sum.add(lax.dynamic_index_in_dim(device[0], top - turn, 0, keepdims=False), value)

        if device:
            top = height - 1 - self.host_levels
            value = named_loop("merge", 0, height - jnp.maximum(place, self.host_levels), merge, value)
        if host:
            low = jnp.minimum(height, self.host_levels)
            value, after = self.fold_host_entries(host[0], low - 1 - later, low - place, value, self.sum.add, after)
        return value, after

    def fold_host_entries(
        self, host: Any, top: Any, count: Any, value: Any, of: Callable[[Any, Any], Any], after: Any
    ) -> tuple[Any, Any]:
        """Fetches host entries piece by piece, and folds each into a value, one after another.

        One loop runs over the pieces of all entries: a compiler treats nested loops as long ones, and keeps values in
        on-chip memory only if they read them.

        Args:
          host: the buffer of the host entries.
          top: the first entry; the others lie below it.
          count: the number of entries.
          value: the value that they are folded into.
          of: maps a piece of an entry and of the value to a piece of the result.
          after: as for `push`.
        """

        def fetch(turn: jax.Array, carry: Any) -> Any:
            whole, turns = carry
            down, i = jnp.divmod(turn, self.piece_count) if self.piece_count > 1 else (turn, jnp.int32(0))
            part = lax.dynamic_index_in_dim(host, (top - down) * self.piece_count + i, 0, keepdims=False)
            part = jax.device_put(part, DEVICE)
            return lax.dynamic_update_index_in_dim(whole, of(part, whole[i]), i, 0), turns + 1

        whole = value.reshape(self.piece_count, *self.piece_shape)
        whole, after = named_loop("fetch", 0, count * self.piece_count, fetch, (whole, after))
        return whole.reshape(value.shape), after

    def read_entry(self, stack: Stack, at: int, value: Any, turns: Any) -> Any:
        """Reads an entry if `turns` is positive; otherwise returns a value of its shape."""
        host, device = stack
        if at < self.host_levels:
            return self.fold_host_entries(host[0], at, turns, value, lambda part, _: part, jnp.int32(0))[0]
        return named_loop("take", 0, turns, lambda turn, _: device[0][at - self.host_levels + turn], value)


Stack = tuple[list[Any], list[Any]]
"""One sum's entries on the host, in pieces ``[host_levels * pieces, *part]``, and on the device,
``[device_levels, *shape]``. Each list has one array, or none if there are no such entries."""


def fold_pieces_offloaded(
    pieces: Pieces,
    sums: Sequence[Sum],
    count: jax.Array,
    merges: jax.Array,
    depth: int,
    most: int,
    state: Any,
    after: Sequence[Any] = (),
    *,
    far: int,
    left: int,
) -> tuple[PartialBlocks, Any]:
    """Adds pieces in the order of a `Fold`, as `node_loops.fold_pieces` does, with offloaded entries.

    Args:
      pieces: as for `fold_pieces`.
      sums: as for `fold_pieces`.
      count: as for `fold_pieces`.
      merges: as for `fold_pieces`.
      depth: as for `fold_pieces`.
      most: not used.
      state: as for `fold_pieces`.
      after: as for `fold_pieces`.
      far: number of the lowest entries that are on the host, at least one.
      left: the most blocks that remain in the end.

    Returns:
      As `fold_pieces`; all remaining blocks are on the device.
    """
    places = [AccumulatorStack.for_sum(s, depth, far) for s in sums]

    def body(index: jax.Array, carry: Any) -> Any:
        (stacks, last, height), state = carry
        waiting, turns = [], jnp.int32(0)
        for place, stack, value in zip(places, stacks, last, strict=True):
            stack, turns = place.push(stack, value, height, turns)
            waiting.append(stack)
        piece, state = pieces(index, state, last, turns)
        low = height - merges[index]
        added, turns = [], jnp.int32(0)
        for place, stack, value in zip(places, waiting, piece, strict=True):
            value, turns = place.merge_from_top(stack, value, height, low, turns)
            added.append(value)
        return (waiting, added, low + 1), state

    begun = (
        [place.allocate() for place in places],
        unwritten_buffers([(s.shape, s.dtype) for s in sums], after),
        jnp.int32(0),
    )
    (stacks, last, height), state = loop_of_nodes(count, sums, body, (begun, state))
    if left == 1:
        return PartialBlocks(last, [], last, height), state
    several = (height > 1).astype(jnp.int32)
    first = [p.read_entry(stack, 0, value, several) for p, stack, value in zip(places, stacks, last, strict=True)]
    others = []
    for p, stack, value in zip(places, stacks, last, strict=True) if depth > 1 else ():
        there = [(height > at + 1).astype(jnp.int32) for at in range(1, depth)]
        others.append(jnp.stack([p.read_entry(stack, at + 1, value, turns) for at, turns in enumerate(there)]))
    return PartialBlocks(first, others, last, height), state
