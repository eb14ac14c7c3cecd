"""Loops over the nodes of one device: what each adds to the accumulators, and what each keeps.

Knows monoids and numbers of nodes. Must not know equations, placements, or how devices are combined.

In tree order, an addition must not be fused into what makes its operands or uses its result, or compilers contract and
vectorize it differently where the program around it differs. Additions are loops of their own for that reason, of a
length that is known at run time only: a loop of known length one would be merged into its surroundings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from vnode.operators import Monoid

COMBINE = {
    Monoid.SUM: lax.add,
    Monoid.PROD: lax.mul,
    Monoid.MAX: lax.max,
    Monoid.MIN: lax.min,
    Monoid.AND: lax.bitwise_and,
    Monoid.OR: lax.bitwise_or,
    Monoid.XOR: lax.bitwise_xor,
}


REAL = (jnp.floating, jnp.integer, jnp.bool_)

KEEP_BARRIERS = frozenset({"tpu"})
"""Platforms whose compilers keep `lax.optimization_barrier` until they have fused; others drop it before."""

ROOM_EARLY = frozenset({"tpu"})
"""Platforms whose compilers take memory for what a loop adds up long before it begins, if that waits for nothing."""

LARGE = 64 << 10
"""Bytes of sums from which no compiler takes the loop over nodes for a small one."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A value that nodes contribute to.

    Attributes:
      monoid: how contributions combine.
      shape: of the value.
      dtype: in which they are combined.
    """

    monoid: Monoid
    shape: tuple[int, ...]
    dtype: Any

    @property
    def exact(self) -> bool:
        """Whether the order of contributions cannot show."""
        return not jnp.issubdtype(self.dtype, jnp.inexact)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def identity(self) -> jax.Array:
        """What a sum begins with."""
        return lax.broadcast(jnp.asarray(self.monoid.identity(self.dtype), self.dtype), self.shape)

    def identity_ordered_after(self, number: jax.Array) -> jax.Array:
        """The same, which is not written before a real number is there."""
        scalar = jnp.asarray(self.monoid.identity(self.dtype), self.dtype)
        return lax.broadcast(lax.select(opaque_zero(number) == 0, scalar, jnp.ones_like(scalar)), self.shape)

    def from_zero(self, total: Any) -> Any:
        """A total as if its first piece had been added to +0, as in `fold_pieces` and by some collectives: never -0."""
        if self.monoid is not Monoid.SUM:
            return total
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            return lax.complex(*(jnp.where(part == 0, 0, part) for part in (lax.real(total), lax.imag(total))))
        return jnp.where(total == 0, jnp.zeros((), self.dtype), total)

    def add(self, total: Any, piece: Any) -> Any:
        return COMBINE[self.monoid](total, lax.convert_element_type(piece, self.dtype))

    def identity_or_total(self, begins: jax.Array, total: Any) -> Any:
        """What a sum begins with, if it does; otherwise the total so far.

        In the loop that adds a piece to it, this takes no pass over memory, as zeros that are written before it do.
        """
        return lax.select(jnp.broadcast_to(begins, total.shape), self.identity(), total)


@dataclasses.dataclass(frozen=True)
class NodeProgram:
    """What is done for one node.

    Attributes:
      take: from a node's position on its device to its number and its parts of batched values.
      compute: from these to the node's contributions and what it keeps.
      single: whether there is one node at most, so that `take` gives the same whatever the position.
      barriers: whether barriers keep the compiler from fusing `compute` with anything before or behind it.
    """

    take: Callable[[jax.Array], list[Any]]
    compute: Callable[[list[Any]], tuple[list[Any], list[Any]]]
    single: bool
    barriers: bool = False

    def __call__(self, index: jax.Array) -> tuple[list[Any], list[Any]]:
        return self.compute(self.take(index))


def add_all(sums: Sequence[Sum], totals: Sequence[Any], pieces: Sequence[Any]) -> list[Any]:
    return [s.add(total, piece) for s, total, piece in zip(sums, totals, pieces, strict=True)]


def scan_nodes(program: NodeProgram, sums: Sequence[Sum], waves: int) -> tuple[list[Any], list[Any]]:
    """Totals of a known number of nodes, and what each keeps, stacked.

    Positions are counted, not read from an array: to read one number takes a TPU as long as to read a MiB.
    """

    def body(carry: tuple[jax.Array, list[Any]], _: None) -> tuple[tuple[jax.Array, list[Any]], list[Any]]:
        index, totals = carry
        pieces, kept = program(index)
        return (index + 1, add_all(sums, totals, pieces)), kept

    (_, totals), kept = lax.scan(body, (jnp.int32(0), [s.identity() for s in sums]), None, length=waves)
    return totals, kept


def loop_over_nodes(
    program: NodeProgram, sums: Sequence[Sum], count: jax.Array, buffers: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The same where devices hold different numbers of nodes: of run-time length, and `buffers` for what nodes keep."""

    def body(index: jax.Array, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        pieces, kept = program(index)
        return add_all(sums, state[0], pieces), write_at(state[1], kept, index)

    return named_loop("nodes", 0, count, body, ([s.identity() for s in sums], buffers))


def scan_skipping_padding(
    program: NodeProgram, sums: Sequence[Sum], count: jax.Array, waves: int, buffers: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The same with as many turns as the fullest device needs, skipping those of nodes that are not there."""

    def run_node(totals: list[Any], index: jax.Array) -> tuple[list[Any], list[Any]]:
        pieces, kept = program(index)
        return add_all(sums, totals, pieces), kept

    def body(totals: list[Any], index: jax.Array) -> tuple[list[Any], list[Any]]:
        return lax.cond(index < count, run_node, lambda totals, _: (totals, [r[0] for r in buffers]), totals, index)

    return lax.scan(body, [s.identity() for s in sums], jnp.arange(waves, dtype=jnp.int32))


def write_at(buffers: list[Any], values: list[Any], index: jax.Array) -> list[Any]:
    """Writes values to a place in buffers ``[places, ...]``, if there are any."""
    return [lax.dynamic_update_index_in_dim(r, value, index, 0) for r, value in zip(buffers, values, strict=False)]


Pieces = Callable[[jax.Array, Any, list[Any], jax.Array], tuple[list[Any], Any]]
"""What comes at a position: see `fold_pieces`."""


def fold_pieces(
    pieces: Pieces,
    sums: Sequence[Sum],
    count: jax.Array,
    merges: jax.Array,
    depth: int,
    most: int,
    state: Any,
    after: Sequence[Any] = (),
) -> tuple[PartialBlocks, Any]:
    """Adds pieces in the order of a `Fold`.

    Each place of the stack is a buffer of its own, to which a block is added where it lies; a piece is copied only to
    a place that is free. The last piece of the device that has most of them needs no place besides.

    Args:
      pieces: from a position, the state, what is in the memory of the contributions that come, and a number that is not
        negative and known only when all of it is put away, to a contribution per sum and the next state.
      sums: what is added.
      count: how many pieces there are, int32 scalar.
      merges: int32 ``[at least count]``, as in `Fold`.
      depth: blocks that wait while another piece comes.
      most: blocks that any piece is joined by.
      state: passed from piece to piece.
      after: values without which no piece comes, if any: there is no memory for sums before they are there.

    Returns:
      The partial blocks, and the last state.
    """
    none = jnp.int32(0)

    def run_if(name: str, level: int, there: jax.Array, into: list[Any], of: Callable[[list[Any]], list[Any]]) -> Any:
        return named_loop(f"{name}_{level}", 0, there.astype(jnp.int32), lambda _, held: of(held), into)

    def merge_stack(stack: list[list[Any]], piece: list[Any], height: jax.Array, joined: jax.Array) -> list[list[Any]]:
        """The stack after a piece came on top of `height` blocks, of which so many join it."""
        stack, place = list(stack), height - joined
        for level in range(depth):
            stack[level] = run_if("push", level, (joined == 0) & (height == level), stack[level], lambda _: piece)
            if most:
                there = (joined > 0) & (height == level + 1)
                stack[level] = run_if("merge", level, there, stack[level], lambda held: add_all(sums, held, piece))
        for level in range(depth - 1, 0, -1) if most > 1 else ():
            there, upper = (place < level) & (level < height), stack[level]
            add = functools.partial(lambda upper, held: add_all(sums, held, upper), upper)
            stack[level - 1] = run_if("close", level, there, stack[level - 1], add)
        return stack

    def body(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        (stack, last, height), state = carry
        piece, state = pieces(index, state, last, none)
        return (merge_stack(stack, piece, height, merges[index]), piece, height - merges[index] + 1), state

    places = unwritten_buffers([(s.shape, s.dtype) for s in sums] * (depth + 1), after, count)
    several = [places[i * len(sums) : (i + 1) * len(sums)] for i in range(depth + 1)]
    (stack, last, height), state = loop_of_nodes(count, sums, body, ((several[:-1], several[-1], none), state))
    others = [list(column) for column in zip(*stack[1:], strict=True)] if depth > 1 else []
    return PartialBlocks(stack[0] if depth else last, others, last, height), state


class PartialBlocks(NamedTuple):
    """The partial blocks of pieces that were added: of each sum some blocks, the lowest of a stack first.

    Attributes:
      first: of each sum the first block, a buffer of its own: what reads it must not be compiled with a slice.
      others: of each sum those that the stack holds above it; nothing if it holds none.
      last: of each sum the block above the stack, if there is one.
      height: how many there are in all.
    """

    first: list[Any]
    others: Sequence[Any]
    last: list[Any]
    height: jax.Array

    def split(self, count: int) -> list[list[Any]]:
        """Of each sum so many blocks, one by one; if there are fewer, the rest is anything."""
        between = self.others or [[]] * len(self.first)
        columns = zip(self.first, between, self.last, strict=True)
        return [
            [first, *(rest[i] for i in range(min(len(rest), count - 1))), last][:count] for first, rest, last in columns
        ]


def add_in_tree_order(
    program: NodeProgram,
    sums: Sequence[Sum],
    runs: Runs,
    depth: int,
    most: int,
    buffers: list[Any],
    fold: Callable[..., tuple[PartialBlocks, Any]] = fold_pieces,
    after: Sequence[Any] = (),
) -> tuple[PartialBlocks, list[Any], list[Any]]:
    """Adds what nodes contribute in the order of a tree.

    The nodes of a run are added one after another as they are computed, into one sum. A node's piece of it needs no
    memory of its own for longer than in any accumulation.

    Args:
      program: of a node.
      sums: what nodes contribute to.
      runs: of this device's nodes.
      depth: blocks that wait while another run comes.
      most: blocks that any run is joined by.
      buffers: for what nodes keep.
      fold: adds runs, as `fold_pieces` does.

    Returns:
      The partial blocks of the sums that are not exact, the totals of those that are, and what is kept.
    """
    ordered = [i for i, s in enumerate(sums) if not s.exact]
    others = [i for i, s in enumerate(sums) if s.exact]
    exact = [sums[i] for i in others]
    rest = [sums[i] for i in ordered]
    nodes = runs.starts[runs.count]

    def node(index: jax.Array, state: State) -> tuple[list[Any], State]:
        # With its position, or what is computed of a single node leaves the loop.
        given = lax.optimization_barrier((program.take(index), index))[0] if program.barriers else state.parts
        pieces, kept = program.compute(given)
        totals = add_all(exact, state.totals, [pieces[i] for i in others])
        pieces = [round_to_storage(pieces[i].astype(sums[i].dtype), index) for i in ordered]
        if program.barriers:
            return pieces, State([], totals, [], write_at(state.buffers, lax.optimization_barrier(kept), index))
        parts = program.take(index + 1)
        if program.single:  # or the parts never change, and what is computed of them leaves the loop
            parts = [jnp.where(index + 1 < nodes, new, old) for new, old in zip(parts, state.parts, strict=True)]
        return pieces, State(parts, totals, kept, write_at(state.buffers, state.kept, index - 1))

    def run(number: jax.Array, state: State, spent: list[Any], after: jax.Array) -> tuple[list[Any], State]:
        start = runs.starts[number]
        if program.single:  # what it contributes is the total, and takes no memory besides
            pieces, state = node(start, state)
            return [s.from_zero(piece) for s, piece in zip(rest, pieces, strict=True)], state

        def body(k: jax.Array, carry: tuple[list[Any], State]) -> tuple[list[Any], State]:
            pieces, state = node(start + k, carry[1])
            totals = [s.identity_or_total(k == 0, total) for s, total in zip(rest, carry[0], strict=True)]
            return add_all(rest, totals, pieces), state

        with jax.named_scope("run"):
            return loop_of_nodes(runs.starts[number + 1] - start, rest, body, (spent, state), after)

    begun = [] if program.barriers else program.take(jnp.int32(0))
    first = State(begun, [s.identity() for s in exact], [] if program.barriers else [r[0] for r in buffers], buffers)
    with jax.named_scope("nodes"):
        remaining, last = fold(run, rest, runs.count, runs.merges, depth, most, first, after)
    kept = last.buffers if program.barriers else write_at(last.buffers, last.kept, nodes - 1)
    return remaining, last.totals, kept


class Runs(NamedTuple):
    """A device's nodes, as runs that are added one after another.

    Attributes:
      count: of runs, int32 scalar that the compiler does not know.
      starts: of each run the position of its first node on the device, and then how many nodes there are, int32
        ``[at least the runs and one]``.
      merges: of each run, int32 ``[at least the runs]``, as in `Fold`.
    """

    count: jax.Array
    starts: jax.Array
    merges: jax.Array


def round_to_storage(piece: jax.Array, index: jax.Array) -> jax.Array:
    """A piece as it is in memory, also where it is added to something by the loop that makes it.

    A compiler would else contract a multiplication and that addition, or keep more bits of the piece than its type has:
    where the same piece is the first of a run, and is added later, it would not. No compiler looks through an
    operation on the bits with a number that is zero because no position is negative.

    Args:
      piece: a node's, inexact.
      index: the position of a node, int32 scalar, not negative.
    """
    if jnp.issubdtype(piece.dtype, jnp.complexfloating):
        return lax.complex(round_to_storage(lax.real(piece), index), round_to_storage(lax.imag(piece), index))
    bits = jnp.dtype(f"uint{8 * piece.dtype.itemsize}")
    zero = lax.convert_element_type(index < 0, bits)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(piece, bits) ^ zero, piece.dtype)


class State(NamedTuple):
    """What goes from node to node in tree order.

    What a node reads and what it keeps pass from one turn to the next, or the compiler would fuse the node's own
    computation with slicing them from, and writing them to, buffers whose size depends on the device. So does its
    number, or the compiler would know it for a count of turns where there is one device.

    Attributes:
      parts: number and parts of the node whose turn it is.
      totals: of exact sums.
      kept: by the node before.
      buffers: for what all nodes of the device keep.
    """

    parts: list[Any]
    totals: list[Any]
    kept: list[Any]
    buffers: list[Any]


def named_loop(name: str, start: Any, stop: Any, body: Callable[[jax.Array, Any], Any], init: Any) -> Any:
    """A loop of run-time length that is recognized in profiles and compiled programs."""
    with jax.named_scope(name):
        return lax.fori_loop(start, stop, body, init)


def loop_of_nodes(
    count: Any, sums: Sequence[Sum], body: Callable[[jax.Array, Any], Any], init: Any, after: Any = 0
) -> Any:
    """A loop of run-time length in which nodes contribute to sums, compiled alike however many a device holds.

    It does not begin, nor write over what it begins with, before a number is known that is not negative, `after`.

    XLA's CPU backend compiles a loop that touches less than a KiB or so as one function, in which it contracts and
    vectorizes other instructions together than elsewhere; and how much is touched depends on the number of nodes. A
    loop that sorts is never taken for such a one.
    """
    count = jnp.asarray(count, jnp.int32)

    def by_sorting(index: jax.Array, count: jax.Array) -> jax.Array:
        return lax.sort(jnp.stack([index, count]))[0] < count

    def has_more_nodes(carry: tuple[jax.Array, Any]) -> jax.Array:
        if sum(s.nbytes for s in sums) >= LARGE:
            return carry[0] < count
        return lax.platform_dependent(carry[0], count, cpu=by_sorting, default=lax.lt)

    begin = (jnp.asarray(after, jnp.int32) < 0).astype(jnp.int32)
    return lax.while_loop(has_more_nodes, lambda carry: (carry[0] + 1, body(*carry)), (begin, init))[1]


def opaque_count(count: Any) -> jax.Array:
    """A number of turns that the compiler cannot know."""
    return lax.optimization_barrier(jnp.asarray(count, jnp.int32))


def opaque_zero(number: jax.Array) -> jax.Array:
    """Zero, which is there when a number is, and which no compiler knows to be zero: of 32 bits no 64 are set.

    >>> [int(opaque_zero(jnp.asarray(x))) for x in (0.0, -1.5, jnp.nan, 7, -1)]
    [0, 0, 0, 0, 0]
    """
    bits = lax.bitcast_convert_type(number.astype(jnp.float32), jnp.int32)
    return lax.shift_right_logical(lax.population_count(bits), jnp.int32(6))


class BufferPart(NamedTuple):
    """Where a value is: the whole of a buffer, or elements of a flat one from `start` on."""

    buffer: Any
    shape: tuple[int, ...]
    start: int | None = None


def element_of(values: Sequence[Any]) -> jax.Array | None:
    """An element of the first of some values that has one, a real number; None if there is none."""
    real = (v for v in values if jnp.size(v) and any(jnp.issubdtype(jnp.result_type(v), kind) for kind in REAL))
    return next((jnp.ravel(v)[0] for v in real), None)


def unwritten_buffer(shape: tuple[int, ...], dtype: Any, after: Sequence[Any]) -> jax.Array:
    """A buffer whose elements are written before they are read.

    It is filled with an element of the values that whoever fills it reads, if there are any: zeros would be those of
    all buffers, and compilers hold them, and a copy for each buffer, from the beginning to the end of the program.
    """
    element = element_of(after) if any(jnp.issubdtype(dtype, kind) for kind in REAL) else None
    return jnp.zeros(shape, dtype) if element is None else jnp.broadcast_to(element.astype(dtype), shape)


def unwritten_buffers(
    shapes: Sequence[tuple[tuple[int, ...], Any]], after: Sequence[Any], number: jax.Array | None = None
) -> list[jax.Array]:
    """Buffers that are written before they are read, for which there is no memory before a value is there.

    Nothing is written: they are what a branch has that is taken whatever the value is, and compilers do not know it.

    Args:
      shapes: with dtypes.
      after: values, of which the first is waited for; if there are none, or little memory is asked for, nothing is.
      number: int32, not negative, unknown to compilers. XLA's CPU backend writes zeros to buffers; by a number it
        writes them to each buffer, instead of to one that it copies to the others.
    """

    def empty(_: Any) -> list[jax.Array]:
        return [lax.empty(*each) for each in shapes]

    def each(number: jax.Array) -> list[jax.Array]:
        return [lax.broadcast((number < -i).astype(dtype), shape) for i, (shape, dtype) in enumerate(shapes)]

    def never(_: Any) -> list[jax.Array]:  # something else, or the branches were taken for one
        return [lax.dynamic_update_slice(e, jnp.ones([1] * e.ndim, e.dtype), [0] * e.ndim) for e in empty(None)]

    large = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes) >= LARGE
    element = element_of(after) if large else None
    if element is None and number is not None:
        return lax.platform_dependent(number, cpu=each, default=empty)
    return empty(None) if element is None else lax.cond(opaque_zero(element) == 0, empty, never, None)


def materialize(places: Sequence[BufferPart]) -> list[Any]:
    """Copies values in a loop of one turn, so that what reads them is compiled apart from what made them."""

    def body(turn: jax.Array, _: list[Any]) -> list[Any]:  # the turn is zero, which the compiler does not know
        return [
            place.buffer
            if place.start is None
            else lax.dynamic_slice_in_dim(place.buffer, place.start + turn, math.prod(place.shape)).reshape(place.shape)
            for place in places
        ]

    begun = [unwritten_buffer(place.shape, place.buffer.dtype, [place.buffer]) for place in places]
    return named_loop("materialized", 0, opaque_count(1), body, begun)


def as_row_major(value: jax.Array) -> jax.Array:
    """A large array that lies in memory row by row, as arguments do.

    Totals lie as what nodes contribute; a state that is updated by them would be copied to that order before anything
    else, all of it, and the copy held up to the update (seen of the compiler for TPUs).
    """
    large = value.ndim > 1 and value.size * value.dtype.itemsize >= LARGE
    return with_layout_constraint(value, Layout(tuple(range(value.ndim)))) if large else value


def materialize_input(value: jax.Array, barriers: bool = False) -> jax.Array:
    """A value that what reads it finds in memory."""
    return lax.optimization_barrier(value) if barriers else materialize([BufferPart(value, value.shape)])[0]
