"""Sums that wait for others in tree order, the lowest of a stack in the host's memory.

Knows memory spaces and the order of a `Fold`. Must not know trees, nodes, nor who decided how many are there.

The lower a sum is on the stack, the larger is the block that it stands for, and the longer it waits; it is written and
read seldom. It goes to the host when the next piece comes, and comes back part by part, each added when it is there, so
that the device has no room for it. Sums are sent one after another: what is written from memory on the chip is copied
to the device's memory before, for each sum at once otherwise (libtpu 0.0.42).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vnode.runtime.away import pieces_of
from vnode.runtime.loops import PartialBlocks, Sum, loop_of_nodes, named_loop

LEAST = 1 << 20
"""Bytes of a sum from which it may be on the host: smaller ones take less than the latency of the link saves."""


def can_be_far(shape: Sequence[int], dtype: Any) -> bool:
    """Whether a sum may wait on the host: a large array of real numbers.

    >>> can_be_far((1024, 256), jnp.float32), can_be_far((1024,), jnp.float32), can_be_far((1024, 256), jnp.complex64)
    (True, False, False)
    """
    large = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return large.size * large.dtype.itemsize >= LEAST and jnp.issubdtype(dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where what waits of one sum is.

    Attributes:
      sum: the sum.
      far: how many of the lowest are on the host.
      near: how many others there may be.
      pieces: in which one comes back from the host.
    """

    sum: Sum
    far: int
    near: int
    pieces: int

    @staticmethod
    def of(s: Sum, depth: int, far: int) -> Place:
        """That of a sum, of which so many wait, and so many of these may be on the host."""
        far = min(depth, far) if can_be_far(s.shape, s.dtype) else 0
        return Place(s, far, depth - far, pieces_of(s.shape, jnp.dtype(s.dtype).itemsize)[1] if far else 1)

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a piece; dimensions before the one that is cut are of one element."""
        dim, pieces = pieces_of(self.sum.shape, jnp.dtype(self.sum.dtype).itemsize)
        return (*self.sum.shape[:dim], self.sum.shape[dim] // pieces, *self.sum.shape[dim + 1 :])

    def begun(self) -> Stack:
        """Room for what waits."""
        zero = jnp.zeros((), self.sum.dtype)
        there = jax.device_put(zero, jax.memory.Space.Host)
        far = [lax.broadcast(there, (self.far * self.pieces, *self.part))] if self.far else []
        return far, [lax.broadcast(zero, (self.near, *self.sum.shape))] if self.near else []

    def pushed(self, stack: Stack, value: Any, height: Any, after: Any) -> tuple[Stack, Any]:
        """A value on top of others.

        Args:
          stack: what waits.
          value: what is to wait too.
          height: how many wait, with this one: int32 scalar; zero if there is none.
          after: a number that is not negative, and known only when this is to begin.

        Returns:
          What waits, and another such number: it is known when this is done.
        """
        far, near = stack
        later = (after < 0).astype(jnp.int32)

        def send(turn: jax.Array, carry: Any) -> Any:
            (buffer,), turns = carry
            there = jax.device_put(value.reshape(self.pieces, *self.part), jax.memory.Space.Host)
            at = (height - 1 + turn + later) * self.pieces
            return [lax.dynamic_update_slice_in_dim(buffer, there, at, 0)], turns + 1

        def put(turn: jax.Array, carry: Any) -> Any:
            (buffer,), turns = carry
            at = height - 1 - self.far + turn + later
            return [lax.dynamic_update_index_in_dim(buffer, value, at, 0)], turns + 1

        low = ((height > 0) & (height <= self.far)).astype(jnp.int32)
        if far:
            far, after = named_loop("send", 0, low, send, (far, after))
        if near:
            near, after = named_loop("push", 0, (height > self.far).astype(jnp.int32), put, (near, after))
        return (far, near), after

    def merged(self, stack: Stack, value: Any, height: Any, place: Any) -> Any:
        """Those from the top down to a place, added to a value one after another.

        Args:
          stack: what waits.
          value: what they are added to.
          height: how many wait.
          place: the lowest that joins.
        """
        far, near = stack

        def merge(turn: jax.Array, value: jax.Array) -> jax.Array:
            return self.sum.add(lax.dynamic_index_in_dim(near[0], top - turn, 0, keepdims=False), value)

        def fetch(turn: jax.Array, value: jax.Array) -> jax.Array:
            return self.fetched(far[0], low - 1 - turn, value, self.sum.add)

        if near:
            top = height - 1 - self.far
            value = named_loop("merge", 0, height - jnp.maximum(place, self.far), merge, value)
        if far:
            low = jnp.minimum(height, self.far)
            value = named_loop("fetch", 0, low - place, fetch, value)
        return value

    def fetched(self, far: Any, at: Any, value: Any, of: Callable[[Any, Any], Any]) -> Any:
        """What becomes, part by part, of one on the host and a value."""

        def one(i: jax.Array, value: jax.Array) -> jax.Array:
            part = lax.dynamic_index_in_dim(far, at * self.pieces + i, 0, keepdims=False)
            part = jax.device_put(part, jax.memory.Space.Device)
            return lax.dynamic_update_index_in_dim(value, of(part, value[i]), i, 0)

        cut = value.reshape(self.pieces, *self.part)
        return lax.fori_loop(0, self.pieces, one, cut).reshape(value.shape)

    def taken(self, stack: Stack, at: int, value: Any, turns: Any) -> Any:
        """One of those that wait, if there are any turns; else a value of its shape."""
        far, near = stack
        if at < self.far:
            return named_loop(
                "fetch", 0, turns, lambda _, value: self.fetched(far[0], at, value, lambda part, _: part), value
            )
        return named_loop("take", 0, turns, lambda turn, _: near[0][at - self.far + turn], value)


Stack = tuple[list[Any], list[Any]]
"""Of one sum, if there is any: what waits on the host, in pieces ``[far * pieces, *part]``; on the device ``[near,
*shape]``."""


def stacked_far(
    pieces: Callable[[jax.Array, Any, jax.Array], tuple[list[Any], Any]],
    sums: Sequence[Sum],
    count: jax.Array,
    merges: jax.Array,
    depth: int,
    most: int,
    state: Any,
    *,
    far: int,
    left: int,
) -> tuple[PartialBlocks, Any]:
    """Adds pieces in the order of a `Fold`, as `loops.stacked` does, with what waits on the host.

    Args:
      pieces: as there.
      sums: as there.
      count: as there.
      merges: as there.
      depth: as there.
      most: as there.
      state: as there.
      far: how many of the lowest that wait are on the host, at least one.
      left: how many blocks remain in the end, at most.

    Returns:
      As there: all that remains is on the device.
    """
    places = [Place.of(s, depth, far) for s in sums]

    def body(index: jax.Array, carry: Any) -> Any:
        (stacks, last, height), state = carry
        waiting, turns = [], jnp.int32(0)
        for place, stack, value in zip(places, stacks, last, strict=True):
            stack, turns = place.pushed(stack, value, height, turns)
            waiting.append(stack)
        piece, state = pieces(index, state, turns)
        low = height - merges[index]
        several = zip(places, waiting, piece, strict=True)
        piece = [place.merged(stack, value, height, low) for place, stack, value in several] if most else piece
        return (waiting, piece, low + 1), state

    begun = [place.begun() for place in places], [s.identity() for s in sums], jnp.int32(0)
    (stacks, last, height), state = loop_of_nodes(count, sums, body, (begun, state))
    if left == 1:
        return PartialBlocks(last, [], last, height), state
    several = (height > 1).astype(jnp.int32)
    first = [p.taken(stack, 0, value, several) for p, stack, value in zip(places, stacks, last, strict=True)]
    others = [
        jnp.stack([p.taken(stack, at, value, (height > at + 1).astype(jnp.int32)) for at in range(1, depth)])
        for p, stack, value in zip(places, stacks, last if depth > 1 else [], strict=False)
    ]
    return PartialBlocks(first, others, last, height), state
