"""Node program -> loop over a device's nodes: their sums, and the values kept of each node.

Knows monoids and numbers of nodes. Must not know equations, placements, or how devices are combined.

    program(position) -> pieces, kept         ->        for position in range(count):
                                                            totals += pieces;  buffers[position] = kept

In tree order, an addition must not be fused with the producers of its operands or the users of its result. Otherwise
compilers contract and vectorize it differently where the program around it differs. So additions are loops of their
own, with a trip count known at run time only; a loop with trip count one would be inlined.
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
from vnode.operators.separate_rounding import round_by_bits

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
"""Platforms whose compilers allocate a loop's accumulators long before the loop begins, unless their initial values
depend on a value that is computed late."""

LARGE = 64 << 10
"""Bytes of sums from which no compiler treats the loop over nodes as a small one."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A reduction over nodes.

    Attributes:
      monoid: how the nodes' contributions combine.
      shape: shape of the value.
      dtype: dtype of the accumulator.
    """

    monoid: Monoid
    shape: tuple[int, ...]
    dtype: Any

    @property
    def exact(self) -> bool:
        """Whether the result does not depend on the order of contributions."""
        return not jnp.issubdtype(self.dtype, jnp.inexact)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def identity(self) -> jax.Array:
        """The initial value of a sum."""
        return lax.broadcast(jnp.asarray(self.monoid.identity(self.dtype), self.dtype), self.shape)

    def identity_ordered_after(self, number: jax.Array) -> jax.Array:
        """The initial value, not written before a real number is known."""
        scalar = jnp.asarray(self.monoid.identity(self.dtype), self.dtype)
        return lax.broadcast(lax.select(opaque_zero(number) == 0, scalar, jnp.ones_like(scalar)), self.shape)

    def from_zero(self, total: Any) -> Any:
        """A total as if its first piece had been added to +0, as loops over runs and some collectives do: never -0."""
        if self.monoid is not Monoid.SUM:
            return total
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            return lax.complex(*(jnp.where(part == 0, 0, part) for part in (lax.real(total), lax.imag(total))))
        return jnp.where(total == 0, jnp.zeros((), self.dtype), total)

    def add(self, total: Any, piece: Any) -> Any:
        return COMBINE[self.monoid](total, lax.convert_element_type(piece, self.dtype))


@dataclasses.dataclass(frozen=True)
class NodeProgram:
    """The computation of one node.

    Attributes:
      take: maps a node's position on its device to its number and its parts of batched values.
      compute: maps these to the node's contributions and the values that it keeps.
      single: whether there is at most one node, so that `take` gives the same for every position.
      barriers: whether barriers keep the compiler from fusing `compute` with operations before or after it.
    """

    take: Callable[[jax.Array], list[Any]]
    compute: Callable[[list[Any]], tuple[list[Any], list[Any]]]
    single: bool
    barriers: bool = False

    def __call__(self, index: jax.Array) -> tuple[list[Any], list[Any]]:
        return self.compute(self.take(index))


def add_all(sums: Sequence[Sum], totals: Sequence[Any], pieces: Sequence[Any]) -> list[Any]:
    return [s.add(total, piece) for s, total, piece in zip(sums, totals, pieces, strict=True)]


def identities_or_totals(sums: Sequence[Sum], begins: jax.Array, totals: Sequence[Any]) -> list[Any]:
    """The initial values if the sums begin here; otherwise the totals so far.

    The loop that adds a piece needs no pass over memory for this; zeros written beforehand would need one.
    """
    spread = functools.cache(functools.partial(lax.broadcast, begins))
    identity = functools.cache(lambda monoid, shape, dtype: Sum(monoid, shape, dtype).identity())
    several = zip(sums, totals, strict=True)
    return [lax.select(spread(s.shape), identity(s.monoid, s.shape, np.dtype(s.dtype)), total) for s, total in several]


def scan_nodes(program: NodeProgram, sums: Sequence[Sum], waves: int) -> tuple[list[Any], list[Any]]:
    """Scans a known number of nodes; returns the totals, and the kept values of all nodes, stacked.

    Positions are counted, not read from an array: reading one number takes a TPU as long as reading 1 MiB.
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
    """As `scan_nodes` with a run-time trip count, where devices hold different numbers of nodes; fills `buffers`."""

    def body(index: jax.Array, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        pieces, kept = program(index)
        return add_all(sums, state[0], pieces), write_at(state[1], kept, index)

    return named_loop("nodes", 0, count, body, ([s.identity() for s in sums], buffers))


def scan_skipping_padding(
    program: NodeProgram, sums: Sequence[Sum], count: jax.Array, waves: int, buffers: list[Any]
) -> tuple[list[Any], list[Any]]:
    """As `scan_nodes` with the fullest device's trip count; nodes that do not exist are skipped."""

    def run_node(totals: list[Any], index: jax.Array) -> tuple[list[Any], list[Any]]:
        pieces, kept = program(index)
        return add_all(sums, totals, pieces), kept

    def body(totals: list[Any], index: jax.Array) -> tuple[list[Any], list[Any]]:
        return lax.cond(index < count, run_node, lambda totals, _: (totals, [r[0] for r in buffers]), totals, index)

    return lax.scan(body, [s.identity() for s in sums], jnp.arange(waves, dtype=jnp.int32))


def write_at(buffers: list[Any], values: list[Any], index: jax.Array) -> list[Any]:
    """Writes values at an index of buffers ``[places, ...]``, if there are any."""
    return [lax.dynamic_update_index_in_dim(r, value, index, 0) for r, value in zip(buffers, values, strict=False)]


Pieces = Callable[[jax.Array, Any, list[Any], jax.Array], tuple[list[Any], Any]]
"""Maps a position, the state, buffers that may be overwritten, and a number that is known once they may be, to one
contribution per sum and the next state; see `fold_pieces`."""


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

    Each entry of the stack is a buffer, to which a block is added in place; a piece is copied to a free entry only. The
    last piece of the device with most pieces needs no entry.

    Args:
      pieces: maps a position, the state, the buffers of the coming contributions, and a non-negative number that is
        known only when these are stored, to one contribution per sum and the next state.
      sums: the sums.
      count: the number of pieces, int32 scalar.
      merges: int32 ``[at least count]``, as in `Fold`.
      depth: the most blocks that wait while another piece comes.
      most: the most blocks that join one piece.
      state: passed from piece to piece.
      after: values that must be ready before the first piece, if any; the sums' buffers are not allocated before.

    Returns:
      The partial blocks and the final state.
    """
    none = jnp.int32(0)

    def run_if(name: str, level: int, there: jax.Array, into: list[Any], of: Callable[[list[Any]], list[Any]]) -> Any:
        return named_loop(f"{name}_{level}", 0, there.astype(jnp.int32), lambda _, held: of(held), into)

    def merge_stack(stack: list[list[Any]], piece: list[Any], height: jax.Array, joined: jax.Array) -> list[list[Any]]:
        """The stack after a piece on top of `height` blocks is merged with `joined` of them."""
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
    """The partial blocks of each sum, from the bottom of the stack up.

    Attributes:
      first: for each sum the lowest block, a buffer of its own; its users must not be compiled together with a slice.
      others: for each sum the other blocks of the stack; empty if there are none.
      last: for each sum the block above the stack, if there is one.
      height: the number of blocks.
    """

    first: list[Any]
    others: Sequence[Any]
    last: list[Any]
    height: jax.Array

    def split(self, count: int) -> list[list[Any]]:
        """For each sum `count` blocks, one by one; blocks beyond `height` have undefined values."""
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
    """Adds the nodes' contributions in tree order.

    The nodes of a run are added one after another into one accumulator, as they are computed. So a node's contribution
    needs memory no longer than in any gradient accumulation.

    Args:
      program: the computation of one node.
      sums: the sums.
      runs: this device's runs of nodes.
      depth: the most blocks that wait while another run comes.
      most: the most blocks that join one run.
      buffers: buffers for the values that nodes keep.
      fold: adds the runs, as `fold_pieces` does.
      after: values before which no memory for sums is allocated; see `fold_pieces`.

    Returns:
      The partial blocks of inexact sums, the totals of exact sums, and the kept values.
    """
    ordered = [i for i, s in enumerate(sums) if not s.exact]
    others = [i for i, s in enumerate(sums) if s.exact]
    exact = [sums[i] for i in others]
    rest = [sums[i] for i in ordered]
    nodes = runs.starts[runs.count]

    def node(index: jax.Array, state: State) -> tuple[list[Any], State]:
        # the position is passed too, or a single node's computation would be hoisted out of the loop
        given = lax.optimization_barrier((program.take(index), index))[0] if program.barriers else state.parts
        pieces, kept = program.compute(given)
        totals = add_all(exact, state.totals, [pieces[i] for i in others])
        pieces = round_to_storage([lax.convert_element_type(pieces[i], sums[i].dtype) for i in ordered], index)
        if program.barriers:
            return pieces, State([], totals, [], write_at(state.buffers, lax.optimization_barrier(kept), index))
        parts = program.take(index + 1)
        if program.single:  # or the parts are loop-invariant, and their users are hoisted
            parts = [jnp.where(index + 1 < nodes, new, old) for new, old in zip(parts, state.parts, strict=True)]
        return pieces, State(parts, totals, kept, write_at(state.buffers, state.kept, index - 1))

    def run(number: jax.Array, state: State, spent: list[Any], after: jax.Array) -> tuple[list[Any], State]:
        start = runs.starts[number]
        if program.single:  # its contribution is the total, and needs no further memory
            pieces, state = node(start, state)
            return [s.from_zero(piece) for s, piece in zip(rest, pieces, strict=True)], state

        def body(k: jax.Array, carry: tuple[list[Any], State]) -> tuple[list[Any], State]:
            pieces, state = node(start + k, carry[1])
            return add_all(rest, identities_or_totals(rest, k == 0, carry[0]), pieces), state

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
      count: the number of runs, int32 scalar that the compiler does not know.
      starts: per run the position of its first node on the device, and finally the number of nodes, int32 ``[at least
        the runs and one]``.
      merges: per run, int32 ``[at least the runs]``, as in `Fold`.
    """

    count: jax.Array
    starts: jax.Array
    merges: jax.Array


def round_to_storage(pieces: Sequence[jax.Array], index: jax.Array) -> list[jax.Array]:
    """Rounds contributions as if they were stored, also where the loop that computes them adds them to sums.

    Otherwise a compiler would contract a multiplication with that addition, or keep more bits than the dtype has; for
    the first contribution of a run, which is added later, it would not. No compiler sees through an operation on the
    bits with a number that is zero because no position is negative.

    Args:
      pieces: a node's contributions to inexact sums.
      index: a node's position, int32 scalar, not negative.
    """
    zero = index < 0

    @functools.cache
    def zeros(shape: tuple[int, ...], bits: Any) -> jax.Array:
        return lax.broadcast(lax.convert_element_type(zero, bits), shape)

    def rounded(piece: jax.Array) -> jax.Array:
        if jnp.issubdtype(piece.dtype, jnp.complexfloating):
            return lax.complex(rounded(lax.real(piece)), rounded(lax.imag(piece)))
        return round_by_bits(piece, zeros)

    return [rounded(piece) for piece in pieces]


class State(NamedTuple):
    """The loop state that passes from node to node in tree order.

    A node's inputs and kept values pass from one iteration to the next. Otherwise the compiler would fuse the node's
    computation with slices of, and updates to, buffers whose sizes depend on the device. The node's number passes too,
    or the compiler would replace it by the loop counter where there is one device.

    Attributes:
      parts: number and parts of the iteration's node.
      totals: totals of exact sums.
      kept: values kept of the previous node.
      buffers: buffers for the values that all nodes keep.
    """

    parts: list[Any]
    totals: list[Any]
    kept: list[Any]
    buffers: list[Any]


def named_loop(name: str, start: Any, stop: Any, body: Callable[[jax.Array, Any], Any], init: Any) -> Any:
    """A loop with a run-time trip count, with a name in profiles and compiled programs."""
    with jax.named_scope(name):
        return lax.fori_loop(start, stop, body, init)


def loop_of_nodes(
    count: Any, sums: Sequence[Sum], body: Callable[[jax.Array, Any], Any], init: Any, after: Any = 0
) -> Any:
    """A loop with a run-time trip count in which nodes contribute to sums, compiled alike for any number of nodes.

    It does not begin, nor overwrite its initial values, before the non-negative number `after` is known.

    XLA's CPU backend compiles a loop that touches less than about 1 KiB as one function, and contracts and vectorizes
    its instructions differently. The bytes touched depend on the number of nodes. A loop that sorts is never treated
    so.
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
    """A trip count that the compiler does not know."""
    return lax.optimization_barrier(jnp.asarray(count, jnp.int32))


def opaque_zero(number: jax.Array) -> jax.Array:
    """Zero that depends on a number, and that no compiler knows to be zero: of 32 bits no 64 are set.

    >>> [int(opaque_zero(jnp.asarray(x))) for x in (0.0, -1.5, jnp.nan, 7, -1)]
    [0, 0, 0, 0, 0]
    """
    bits = lax.bitcast_convert_type(number.astype(jnp.float32), jnp.int32)
    return lax.shift_right_logical(lax.population_count(bits), jnp.int32(6))


class BufferPart(NamedTuple):
    """Where a value lies: a whole buffer, or elements of a flat one from `start` on."""

    buffer: Any
    shape: tuple[int, ...]
    start: int | None = None


def element_of(values: Sequence[Any]) -> jax.Array | None:
    """An element of the first value that has one and is real; None if there is none."""
    real = (v for v in values if jnp.size(v) and any(jnp.issubdtype(jnp.result_type(v), kind) for kind in REAL))
    return next((jnp.ravel(v)[0] for v in real), None)


def unwritten_buffer(shape: tuple[int, ...], dtype: Any, after: Sequence[Any]) -> jax.Array:
    """A buffer whose elements are all written before they are read.

    It is filled with an element of `after`, if there are any values. Zeros would be shared by all buffers; compilers
    keep them, and a copy for each buffer, live for the whole program.
    """
    element = element_of(after) if any(jnp.issubdtype(dtype, kind) for kind in REAL) else None
    return jnp.zeros(shape, dtype) if element is None else jnp.broadcast_to(element.astype(dtype), shape)


def unwritten_buffers(
    shapes: Sequence[tuple[tuple[int, ...], Any]], after: Sequence[Any], number: jax.Array | None = None
) -> list[jax.Array]:
    """Buffers that are written before they are read, and not allocated before a value is ready.

    Nothing is written: a branch returns them that is always taken, which compilers do not know.

    Args:
      shapes: shapes and dtypes.
      after: values; the first one is waited for. If there are none, or the buffers are small, nothing is waited for.
      number: non-negative int32 that compilers do not know. XLA's CPU backend writes something to each buffer. If it
        were the same number, it would write one buffer and copy it to the others. If it were a constant of each, it
        would compile code for each. So a barrier makes as many numbers of this one.
    """

    def empty(_: Any) -> list[jax.Array]:
        return [lax.empty(*each) for each in shapes]

    def each(number: jax.Array) -> list[jax.Array]:
        unlike = lax.optimization_barrier([number] * len(shapes))
        return [lax.full(shape, value, dtype) for value, (shape, dtype) in zip(unlike, shapes, strict=True)]

    def never(_: Any) -> list[jax.Array]:  # different from `empty`, or the branches would be merged
        return [lax.dynamic_update_slice(e, jnp.ones([1] * e.ndim, e.dtype), [0] * e.ndim) for e in empty(None)]

    large = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes) >= LARGE
    element = element_of(after) if large else None
    if element is None and number is not None:
        return lax.platform_dependent(number, cpu=each, default=empty)
    return empty(None) if element is None else lax.cond(opaque_zero(element) == 0, empty, never, None)


def materialize(places: Sequence[BufferPart]) -> list[Any]:
    """Copies values in a loop with trip count one, so that their users are compiled apart from their producers."""

    def body(turn: jax.Array, _: list[Any]) -> list[Any]:  # the compiler does not know that `turn` is zero
        return [
            place.buffer
            if place.start is None
            else lax.dynamic_slice_in_dim(place.buffer, place.start + turn, math.prod(place.shape)).reshape(place.shape)
            for place in places
        ]

    begun = [unwritten_buffer(place.shape, place.buffer.dtype, [place.buffer]) for place in places]
    return named_loop("materialized", 0, opaque_count(1), body, begun)


def as_row_major(value: jax.Array) -> jax.Array:
    """Gives a large array a row-major layout, as arguments have.

    Totals have the layout of the nodes' contributions. A state that they update would first be copied to that layout,
    all of it, and the copy kept until the update (seen with the TPU compiler).
    """
    large = value.ndim > 1 and value.size * value.dtype.itemsize >= LARGE
    return with_layout_constraint(value, Layout(tuple(range(value.ndim)))) if large else value


def materialize_input(value: jax.Array, barriers: bool = False) -> jax.Array:
    """Materializes a value, so that its users read it from memory."""
    return lax.optimization_barrier(value) if barriers else materialize([BufferPart(value, value.shape)])[0]
