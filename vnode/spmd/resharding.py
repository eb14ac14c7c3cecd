"""Two layouts of a value -> the collectives that reshard it, and the bytes that they move.

Knows layouts. Must not know equations, nor how collectives are implemented, nor machines.

    [x*y, -] -> [y, x], x of 2, y of 4:   permute blocks to [y*x, -];  all-to-all: x goes to dimension 1, [y, x]

A resharding is a shortest path over layouts: the sequence of the moves below by which the busiest device sends fewest
bytes, and among these one with fewest collectives. Partial values are combined, whole (all-reduce) or into blocks
(reduce-scatter). The minor axes of a dimension are dropped (all-gather) or divide another dimension (all-to-all).
Blocks go to other devices unchanged (permute), once, where they are smallest. Slicing a replicated dimension is free,
and makes later moves smaller; so it comes first, but after reductions. Reductions do not follow the cheapest path.
The order in which a collective adds may depend on its kind and on array sizes, while the size of some axes must not
change bits.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vnode.operators import Monoid
from vnode.spmd.axis_parts import (
    axes_of,
    device_groups,
    index_at,
    join_layout,
    join_names,
    split_axes,
    split_layout,
    with_parts,
)
from vnode.spmd.layout import Axes, Cut, Layout, count

ORDERED = {
    np.dtype(kind): np.dtype(bits)
    for kind, bits in ((jnp.bfloat16, "int16"), ("float16", "int16"), ("float32", "int32"), ("float64", "int64"))
}
"""Floating-point types whose bits are ordered like their values once the bits of negative numbers are inverted."""


@dataclasses.dataclass(frozen=True)
class Move:
    """One step of a resharding.

    Attributes:
      kind: ``"all-reduce"``, ``"reduce-scatter"``, ``"all-gather"``, ``"all-to-all"``, ``"permute"``; ``"cut"`` is
        local.
      axes: the axes along which devices exchange; for a permute in the mesh's order. Those of a cut may be parts of
        axes.
      dim: the dimension that gains or loses axes.
      other: for an all-to-all, the dimension that gains the axes.
      monoid: for a reduction, its monoid; for an all-gather, the monoid by which every device then combines partial
        values, None where blocks are concatenated.
      after: the resulting layout, perhaps along parts of axes (`vnode.spmd.axis_parts`).
      elements: of one device's array before the move; for a permute after it, since a device may send a part of its
        block.
      pairs: for a permute, sources and destinations by number along the axes; some devices send to themselves.
      parts: for a permute, per dimension the number of the block of the new size that each device sends, by number
        along the axes; None where blocks keep their size.
      among: the groups, by number along the axes, if not all devices along them exchange with each other.
    """

    kind: str
    axes: tuple[str, ...]
    after: Layout
    elements: int
    dim: int = 0
    other: int = 0
    monoid: Monoid | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[int, ...] | None, ...] = ()
    among: tuple[tuple[int, ...], ...] = ()

    def elements_sent(self, axes: Axes) -> float:
        """Elements that each device sends, by the algorithms that send least.

        Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience"
        (2007), section 4: the lower bounds, which rings reach.
        """
        if self.kind == "cut":
            return 0
        k = len(self.among[0]) if self.among else count(self.axes, axes)
        match self.kind:
            case "all-reduce":
                return 2 * self.elements * (k - 1) / k
            case "all-gather":
                return self.elements * (k - 1)
            case "reduce-scatter" | "all-to-all":
                return self.elements * (k - 1) / k
        return self.elements


def nests(cut: Cut, minor: tuple[str, ...], axes: Axes) -> bool:
    """Whether the blocks over further axes make up the blocks of `cut`."""
    finer = dataclasses.replace(cut, axes=(*cut.axes, *minor))
    return finer.block(axes) * count(minor, axes) == cut.block(axes)


def extends(cut: Cut | None, finer: Cut | None, axes: Axes) -> tuple[str, ...] | None:
    """The further axes by which `finer` divides the blocks of `cut`; None if it does not."""
    if finer is None:
        return () if cut is None else None
    if cut is None:
        return finer.axes
    more = finer.axes[len(cut.axes) :]
    same = (cut.outer, cut.size, cut.axes) == (finer.outer, finer.size, finer.axes[: len(cut.axes)])
    return more if same and nests(cut, more, axes) else None


def is_even(cut: Cut | None, axes: Axes) -> bool:
    """Whether a dimension is cut into equal, contiguous blocks without padding."""
    return cut is None or (cut.outer == 1 and cut.size % count(cut.axes, axes) == 0)


def combines_in_transit(monoid: Monoid, dtype: Any) -> bool:
    """Whether a collective reduces a dtype in transit; otherwise every device gathers all partial values and combines
    them.

    >>> [combines_in_transit(*each) for each in ((Monoid.MAX, "bfloat16"), (Monoid.PROD, "float32"))]
    [True, False]
    """
    kind = np.dtype(dtype)
    match monoid:
        case Monoid.SUM:
            return True
        case Monoid.MAX | Monoid.MIN:
            return kind == np.bool_ or jnp.issubdtype(kind, np.integer) or kind in ORDERED
        case Monoid.AND | Monoid.OR:
            return kind == np.bool_
    return False


def plan_resharding(
    start: Layout, end: Layout, shape: Sequence[int], axes: Axes, dtype: Any, allow_permutes: bool = True
) -> tuple[Move, ...]:
    """Plans the moves from one layout of a value to another.

    Args:
      start: the layout of the value.
      end: the wanted layout; partial over no axis over which `start` is not.
      shape: shape of the whole value.
      axes: the mesh axes.
      dtype: dtype of its elements.
      allow_permutes: whether permutes are allowed.

    Returns:
      The moves in order; their `after` has the intermediate layouts.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from vnode.spmd.layout import from_spec
      >>> axes = {"x": 2, "y": 4}
      >>> start, end = (from_spec(spec, (8, 16), axes) for spec in (P(("x", "y")), P("y", "x")))
      >>> moves = plan_resharding(start, end, (8, 16), axes, "float32")
      >>> [(move.kind, str(move.after), move.elements_sent(axes)) for move in moves]
      [('permute', '[y*x, -]', 16), ('all-to-all', '[y, x]', 8.0)]
    """
    if start == end:
        return ()
    in_transit_of = tuple(combines_in_transit(monoid, dtype) for _, monoid in start.partial)
    return _route_by_shape(start, end, tuple(shape), tuple(axes.items()), in_transit_of, allow_permutes)


def is_local(start: Layout, end: Layout, shape: Sequence[int], axes: Axes, dtype: Any) -> bool:
    """Whether a resharding sends nothing: every device has all elements that it needs.

    Args:
      start: the layout of the value.
      end: the wanted layout.
      shape: shape of the whole value.
      axes: the mesh axes.
      dtype: dtype of its elements.
    """
    return not end.partial and all(move.kind == "cut" for move in plan_resharding(start, end, shape, axes, dtype))


def finest_layout(layouts: Collection[Layout], shape: Sequence[int], axes: Axes, dtype: Any) -> Layout | None:
    """The layout from which all others are reached by slicing alone; None if there is none.

    Args:
      layouts: layouts of the value, none of them partial.
      shape: shape of the whole value.
      axes: the mesh axes.
      dtype: dtype of its elements.
    """
    return next(
        (end for end in layouts if all(is_local(start, end, shape, axes, dtype) for start in layouts)),
        None,
    )


@functools.lru_cache(maxsize=1 << 16)  # searches ask for the same reshardings very often
def _route_by_shape(
    start: Layout,
    end: Layout,
    shape: tuple[int, ...],
    axes: tuple[tuple[str, int], ...],
    in_transit_of: tuple[bool, ...],
    allow_permutes: bool,
) -> tuple[Move, ...]:
    """Plans a resharding by that of the smallest array with the same moves, so that the cache serves many shapes.

    That array lacks the dimensions that are never cut. Its evenly cut dimensions have as many indices as there are
    devices.
    """
    devices = math.prod(size for _, size in axes)
    cuts = list(zip(start.dims, end.dims, shape, strict=True))
    kept = [d for d, (before, after, _) in enumerate(cuts) if before is not None or after is not None]
    short = [devices if n and n % devices == 0 and is_plain(a, n) and is_plain(b, n) else n for a, b, n in cuts]
    times = math.prod(n for d, n in enumerate(shape) if d not in kept)
    times *= math.prod(shape[d] // short[d] for d in kept if shape[d] != short[d])

    def resized(cut: Cut | None, n: int, size: int) -> Cut | None:
        return cut if cut is None or n == size else Cut(cut.axes, 1, size)

    def shrink(layout: Layout) -> Layout:
        return Layout(tuple(resized(layout.dims[d], shape[d], short[d]) for d in kept), layout.partial)

    def restore(layout: Layout) -> Layout:
        dims: list[Cut | None] = [None] * len(shape)
        for d, cut in zip(kept, layout.dims, strict=True):
            dims[d] = resized(cut, short[d], shape[d])
        return Layout(tuple(dims), layout.partial)

    def restore_move(move: Move) -> Move:
        parts: list[tuple[int, ...] | None] = [None] * len(shape)
        for d, each in zip(kept, move.parts, strict=False):
            parts[d] = each
        dim, other = (kept[d] if kept else 0 for d in (move.dim, move.other))
        elements, parts_of_all = move.elements * times, tuple(parts) if move.parts else ()
        return dataclasses.replace(
            move, after=restore(move.after), elements=elements, dim=dim, other=other, parts=parts_of_all
        )

    moves = _find_route(shrink(start), shrink(end), tuple(short[d] for d in kept), axes, in_transit_of, allow_permutes)
    return tuple(map(restore_move, moves))


def is_plain(cut: Cut | None, n: int) -> bool:
    """Whether a cut, if any, divides all of a dimension of size `n`."""
    return cut is None or (cut.outer, cut.size) == (1, n)


@functools.lru_cache(maxsize=1 << 14)
def _find_route(
    start: Layout,
    end: Layout,
    shape: tuple[int, ...],
    axes: tuple[tuple[str, int], ...],
    in_transit_of: tuple[bool, ...],
    allow_permutes: bool,
) -> tuple[Move, ...]:
    """Plans a resharding over whole axes; over parts of axes if that sends less, and permutes are allowed."""
    in_transit = {monoid: each for (_, monoid), each in zip(start.partial, in_transit_of, strict=True)}
    mesh, partial = dict(axes), [name for name, _ in start.partial]
    paths = _Paths(end, shape, mesh, in_transit, allow_permutes)
    moves = paths.cheapest(start)
    fine = split_axes(mesh, partial)
    if allow_permutes and len(fine) > len(mesh) and total_elements_sent(moves, mesh) > paths.lacks(start):
        begin, finish = (split_layout(layout, mesh, partial) for layout in (start, end))
        finer = _Paths(finish, shape, fine, in_transit, allow_permutes).cheapest(begin)
        moves = finer if total_elements_sent(finer, fine) < total_elements_sent(moves, mesh) else moves
    layouts = [start, *(move.after for move in moves)]
    return tuple(over_whole_axes(move, before, mesh) for move, before in zip(moves, layouts, strict=False))


def total_elements_sent(moves: Sequence[Move], axes: Axes) -> float:
    """Elements that each device sends in several moves."""
    return sum(move.elements_sent(axes) for move in moves)


def over_whole_axes(move: Move, before: Layout, axes: Axes) -> Move:
    """Replaces parts of axes in a move by whole axes, with explicit pairs or groups."""
    after, names = join_layout(move.after, axes), join_names(move.axes, axes)
    if move.kind == "permute":
        return complete_permute(dataclasses.replace(move, after=after), join_layout(before, axes), axes)
    if move.kind == "cut" or all(name in axes for name in names):
        return dataclasses.replace(move, axes=names, after=after)
    return dataclasses.replace(move, axes=axes_of(names, axes), after=after, among=device_groups(names, axes))


@dataclasses.dataclass(frozen=True)
class _Paths:
    """The search for the cheapest path of moves to a layout.

    Attributes:
      end: the target layout.
      shape: shape of the whole value.
      axes: the mesh axes.
      in_transit: for each monoid of a partial value whether a collective reduces it in transit.
      allow_permutes: whether permutes are allowed.
    """

    end: Layout
    shape: tuple[int, ...]
    axes: Axes
    in_transit: Mapping[Monoid, bool]
    allow_permutes: bool

    def cheapest(self, start: Layout) -> tuple[Move, ...]:
        """The path that sends fewest elements, with at most one permute, since two compose to one.

        This is A* (Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of minimum cost paths",
        1968) with `lacks` as the lower bound. Ties are broken by fewest collectives, then least memory, then no
        permute, then the first found.
        """
        devices, numbers = math.prod(self.axes.values()), itertools.count()
        # in each entry: lower bound, collectives, peak elements, permuted, number, elements sent so far, layout, path
        frontier: list[tuple[int, int, int, bool, int, int, Layout, tuple[Move, ...]]] = [
            (0, 0, 0, False, next(numbers), 0, start, ())
        ]
        done: set[tuple[Layout, bool]] = set()
        while True:
            _, collectives, peak, permuted, _, sent, layout, path = heapq.heappop(frontier)
            if layout == self.end:
                return path
            if (layout, permuted) in done:
                continue
            done.add((layout, permuted))
            for move in self.moves(layout, self.allow_permutes and not permuted):
                more = sent + round(move.elements_sent(self.axes) * devices)  # a whole number
                permutes = permuted or move.kind == "permute"
                held = max(peak, math.prod(move.after.local_shape(self.shape, self.axes)))
                key = more + self.lacks(move.after) * devices, collectives + (move.kind != "cut"), held, permutes
                heapq.heappush(frontier, (*key, next(numbers), more, move.after, (*path, move)))

    def lacks(self, at: Layout) -> int:
        """The number of elements by which a device's array must still grow: a lower bound of what it receives."""
        return max(
            0, math.prod(self.end.local_shape(self.shape, self.axes)) - math.prod(at.local_shape(self.shape, self.axes))
        )

    def moves(self, at: Layout, permutes: bool) -> Iterator[Move]:
        """The moves from a layout that a cheapest path may begin with; permutes among them if `permutes`."""
        pieces = [(name, monoid) for name, monoid in at.partial if (name, monoid) not in self.end.partial]
        if pieces:
            yield self.combination(at, pieces)
            return
        for d, before in enumerate(at.dims):
            cut = self.cut(at, d)
            if cut is not None:
                yield self.move("cut", cut.axes[len(names_of(before)) :], at, {d: cut}, dim=d)
                return
        if self.needs_gathers_only(at):
            yield next(self.gathers(at))
            return
        yield from self.gathers(at)
        for d in self.leaving_dims(at):
            yield from self.exchanges(at, d)
        if permutes:
            for after in self.arrangements(at):
                yield Move("permute", (), after, math.prod(after.local_shape(self.shape, self.axes)))

    def move(self, kind: str, names: tuple[str, ...], at: Layout, dims: Mapping[int, Cut | None], **more: Any) -> Move:
        """A move after which some dimensions are cut otherwise; reductions are applied to the partial axes in
        `names`."""
        combined = names if more.get("monoid") is not None else ()
        after = Layout(
            tuple(dims.get(d, cut) for d, cut in enumerate(at.dims)),
            tuple(piece for piece in at.partial if piece[0] not in combined),
        )
        return Move(kind, names, after, math.prod(at.local_shape(self.shape, self.axes)), **more)

    def cut(self, at: Layout, d: int) -> Cut | None:
        """A dimension cut further towards the target, along unused axes; None if it cannot be."""
        cut, target = at.dims[d], self.end.dims[d]
        more = extends(cut, target, self.axes)
        if not more:
            return None
        assert target is not None
        used = {*at.cut_axes, *(name for name, _ in at.partial)}
        free = len(list(itertools.takewhile(lambda name: name not in used, more)))
        done = len(target.axes) - len(more)
        cuts = (dataclasses.replace(target, axes=target.axes[: done + k]) for k in range(free, 0, -1))
        return next((each for each in cuts if nests(each, target.axes[len(each.axes) :], self.axes)), None)

    def leaving_dims(self, at: Layout) -> list[int]:
        """The dimensions whose cut is not on the way to their target."""
        cuts = enumerate(zip(at.dims, self.end.dims, strict=True))
        return [d for d, (cut, target) in cuts if cut is not None and extends(cut, target, self.axes) is None]

    def needs_gathers_only(self, at: Layout) -> bool:
        """Whether only all-gathers are left: any order sends the same.

        The last dimension is gathered first, as by XLA's partitioner, which gathers some results of programs.
        """
        firsts = [(next(self.shorten(at, d)), self.end.dims[d]) for d in self.leaving_dims(at)]
        wanted = self.end.cut_axes.keys()
        return all(rest == target and not wanted & {*names} for (names, rest), target in firsts)

    def kept_axes(self, at: Layout, d: int) -> tuple[str, ...]:
        cut = at.dims[d]
        assert cut is not None
        return shared_axes(cut, self.end.dims[d], self.axes)

    def shorten(self, at: Layout, d: int) -> Iterator[tuple[tuple[str, ...], Cut | None]]:
        """Minor axes that a dimension may drop, each with its remaining cut; most axes first."""
        cut = at.dims[d]
        assert cut is not None
        for length in range(len(self.kept_axes(at, d)), len(cut.axes)):
            rest = dataclasses.replace(cut, axes=cut.axes[:length]) if length else None
            if rest is None or nests(rest, cut.axes[length:], self.axes):
                yield cut.axes[length:], rest

    def lengthen(self, at: Layout, d: int, names: tuple[str, ...], out_of_order: bool = False) -> Cut | None:
        """A dimension cut further along axes; None if its blocks would be uneven, or not made up of the target's.

        None also if the target has other axes next, unless `out_of_order`: a permute then reorders the blocks.
        """
        cut, target = at.dims[d], self.end.dims[d]
        if target is None or not are_alike(cut, target):
            return None
        more = dataclasses.replace(target, axes=(*names_of(cut), *names))
        fits = is_finer(more, target, self.axes) and (out_of_order or target.axes[: len(more.axes)] == more.axes)
        return more if fits and is_even(cut, self.axes) and is_even(more, self.axes) else None

    def combination(self, at: Layout, pieces: Sequence[tuple[str, Monoid]]) -> Move:
        """The next reduction: over the first partial axis, and those after it with the same monoid.

        A sum over an axis that cuts a dimension of the target is a reduce-scatter along that axis, even where an
        all-reduce were cheaper. Collectives of different kinds may add in different orders, and the kind must not
        depend on the sizes of other axes.
        """
        monoid = pieces[0][1]
        names = tuple(name for name, _ in itertools.takewhile(lambda piece: piece[1] is monoid, pieces))
        if monoid is Monoid.SUM:
            for name, d in itertools.product(names, range(len(at.dims))):
                cut = self.lengthen(at, d, (name,), self.allow_permutes) if name in names_of(self.end.dims[d]) else None
                if cut is not None:
                    return self.move("reduce-scatter", (name,), at, {d: cut}, dim=d, monoid=monoid)
        return self.move("all-reduce" if self.in_transit[monoid] else "all-gather", names, at, {}, monoid=monoid)

    def gathers(self, at: Layout) -> Iterator[Move]:
        for d in reversed(self.leaving_dims(at)):
            for names, rest in self.shorten(at, d):
                yield self.move("all-gather", names, at, {d: rest}, dim=d)

    def exchanges(self, at: Layout, d: int) -> Iterator[Move]:
        """All-to-alls: minor axes of a dimension go to another, which needs them next."""
        for names, rest in self.shorten(at, d):
            if is_even(at.dims[d], self.axes) and is_even(rest, self.axes):
                for other in range(len(at.dims)):
                    cut = self.lengthen(at, other, names) if other != d else None
                    if cut is not None:
                        yield self.move("all-to-all", names, at, {d: rest, other: cut}, dim=d, other=other)

    def arrangements(self, at: Layout) -> Iterator[Layout]:
        """Layouts whose blocks lie in those of another layout, cut by the target's axes as far as these go.

        If there are more blocks than in the target, minor axes that no dimension needs follow, one by one; they are
        dropped later.
        """
        needs = [names_of(cut) for cut in self.end.dims]
        parts = [count(names_of(cut), self.axes) for cut in at.dims]
        cuts = list(zip(at.dims, self.end.dims, strict=True))
        fixed = {d for d, (cut, target) in enumerate(cuts) if not are_alike(cut, target)}
        long = [d for d in range(len(parts)) if d not in fixed and count(needs[d], self.axes) % parts[d]]
        taken = {name for name, _ in at.partial}
        taken.update(name for d in fixed for name in names_of(at.dims[d]))
        kept = [name for d in long for name in needs[d]]
        if taken.intersection(kept):
            return

        def followed(left: Sequence[int], free: tuple[str, ...]) -> Iterator[dict[int, tuple[str, ...]]]:
            if not left:
                yield {}
                return
            d, *others = left
            for names in minor_axes(parts[d] // math.gcd(parts[d], count(needs[d], self.axes)), free, self.axes):
                for more in followed(others, tuple(name for name in free if name not in names)):
                    yield {d: names, **more}

        for chosen in followed(long, tuple(name for name in self.axes if name not in taken and name not in kept)):
            used = taken.union(*chosen.values())
            dims: list[Cut | None] = []
            for d, (cut, target) in enumerate(cuts):
                if d in fixed:
                    dims.append(cut)
                    continue
                names = (*needs[d], *chosen[d]) if d in chosen else leading_names(needs[d], used)
                form = target if target is not None else cut
                found = dataclasses.replace(form, axes=names) if form is not None and names else None
                if not (is_finer(cut, found, self.axes) and self.is_between(found, target)):
                    break
                dims.append(found)
            else:
                after = Layout(tuple(dims), at.partial)
                if after != at:
                    yield after

    def is_between(self, cut: Cut | None, target: Cut | None) -> bool:
        """Whether the blocks of one cut make up those of another, or the reverse."""
        return is_finer(cut, target, self.axes) or is_finer(target, cut, self.axes)


def names_of(cut: Cut | None) -> tuple[str, ...]:
    """The axes that cut a dimension."""
    return cut.axes if cut is not None else ()


def leading_names(names: Sequence[str], used: Collection[str]) -> tuple[str, ...]:
    """The names before the first one that is used."""
    return tuple(itertools.takewhile(lambda name: name not in used, names))


def minor_axes(parts: int, free: Sequence[str], axes: Axes) -> Iterator[tuple[str, ...]]:
    """Axes in every order, no more than needed for their sizes to be a multiple of some number.

    >>> list(minor_axes(4, ("x", "y", "z"), {"x": 2, "y": 4, "z": 2}))
    [('x', 'y'), ('x', 'z'), ('y',), ('z', 'x'), ('z', 'y')]
    """
    if parts == 1:
        yield ()
        return
    for name in free:
        left = parts // math.gcd(parts, axes[name])
        if left < parts:
            for names in minor_axes(left, [other for other in free if other != name], axes):
                yield (name, *names)


def are_alike(cut: Cut | None, other: Cut | None) -> bool:
    """Whether two cuts divide the same part of a dimension, if both divide any."""
    return cut is None or other is None or (cut.outer, cut.size) == (other.outer, other.size)


def is_finer(cut: Cut | None, finer: Cut | None, axes: Axes) -> bool:
    """Whether the blocks of one cut make up those of another, in order, whatever their axes."""
    if cut is None:
        return True
    if finer is None or not are_alike(cut, finer):
        return False
    times, rest = divmod(count(finer.axes, axes), count(cut.axes, axes))
    return not rest and times * finer.block(axes) == cut.block(axes)


def complete_permute(move: Move, before: Layout, axes: Axes) -> Move:
    """Adds pairs to a permute: each device receives its block from one that has it, itself if possible.

    As many devices have a block as need a part of it; each sends one. In a group, the first remaining device receives
    its block from the one with most coordinates in common, and so on.
    """
    sizes, changed = with_parts(axes), [d for d, cut in enumerate(before.dims) if cut != move.after.dims[d]]
    olds, news = ([names_of(layout.dims[d]) for d in changed] for layout in (before, move.after))
    names = axes_of(list(itertools.chain(*olds, *news)), axes)
    places = list(itertools.product(*(range(axes[name]) for name in names)))

    def part(place: tuple[int, ...], along: tuple[str, ...]) -> int:
        return index_at(dict(zip(names, place, strict=True)), along, axes)

    times = [count(new, sizes) // count(old, sizes) for old, new in zip(olds, news, strict=True)]
    has, gets = ([tuple(part(place, along) for along in each) for place in places] for each in (olds, news))
    within = [tuple(index // n for index, n in zip(each, times, strict=True)) for each in gets]
    sources = {i: i for i, block in enumerate(has) if within[i] == block}
    left: dict[tuple[int, ...], list[int]] = {}
    for i, block in enumerate(has):
        if i not in sources:
            left.setdefault(block, []).append(i)
    for target, block in enumerate(within):
        if target not in sources:
            candidates = left[block]
            nearest = max(candidates, key=lambda i: sum(map(operator.eq, places[i], places[target])))
            candidates.remove(nearest)
            sources[target] = nearest
    pairs = tuple(sorted((source, target) for target, source in sources.items()))
    parts: list[tuple[int, ...] | None] = [None] * len(before.dims)
    for k, d in enumerate(changed):
        if times[k] > 1:
            parts[d] = tuple(gets[target][k] % times[k] for _, target in pairs)
    return dataclasses.replace(move, axes=names, pairs=pairs, parts=tuple(parts))


def shared_axes(cut: Cut, target: Cut | None, axes: Axes) -> tuple[str, ...]:
    """The leading axes that a cut may keep on the way to another."""
    if target is None or (cut.outer, cut.size) != (target.outer, target.size):
        return ()
    most = 0
    while cut.axes[: most + 1] == target.axes[: most + 1] and most < min(len(cut.axes), len(target.axes)):
        most += 1
    for length in range(most, 0, -1):
        first = dataclasses.replace(cut, axes=cut.axes[:length])
        if nests(first, cut.axes[length:], axes) and nests(first, target.axes[length:], axes):
            return first.axes
    return ()
