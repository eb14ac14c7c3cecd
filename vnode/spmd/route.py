"""From one layout to another: which collectives that takes, and how many bytes they move.

Knows layouts. Must not know equations, nor how collectives are carried out.

Pieces are combined first, into blocks where the target has blocks (reduce-scatter); then what is cut elsewhere moves
(all-to-all) or is put together (all-gather); cutting what every device has costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vnode.operators import Monoid
from vnode.spmd.layout import Axes, Cut, Layout, count

ORDERED = {
    np.dtype(kind): np.dtype(bits)
    for kind, bits in ((jnp.bfloat16, "int16"), ("float16", "int16"), ("float32", "int32"), ("float64", "int64"))
}
"""Floating-point types whose bits are ordered as their values once those of negative numbers are turned around."""


@dataclasses.dataclass(frozen=True)
class Move:
    """One step from a layout to the next.

    Attributes:
      kind: ``"all-reduce"``, ``"reduce-scatter"``, ``"all-gather"``, ``"all-to-all"``; ``"cut"`` is local.
      axes: along which devices exchange.
      dim: the dimension that gets or loses axes.
      other: for an all-to-all, the dimension that the axis goes to.
      monoid: of a reduction; of an all-gather, by which every device then combines pieces, None where blocks are put
        together.
      after: the layout that is reached.
      elements: of one device's array before it.
    """

    kind: str
    axes: tuple[str, ...]
    after: Layout
    elements: int
    dim: int = 0
    other: int = 0
    monoid: Monoid | None = None

    def sent(self, axes: Axes) -> float:
        """Elements that each device sends, by the algorithms that move least.

        Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience"
        (2007), section 4: the lower bounds, which rings reach.
        """
        k = count(self.axes, axes)
        match self.kind:
            case "all-reduce":
                return 2 * self.elements * (k - 1) / k
            case "all-gather":
                return self.elements * (k - 1)
            case "reduce-scatter" | "all-to-all":
                return self.elements * (k - 1) / k
        return 0


def nests(cut: Cut, minor: tuple[str, ...], axes: Axes) -> bool:
    """Whether the blocks over further axes make up the blocks of `cut`."""
    finer = dataclasses.replace(cut, axes=(*cut.axes, *minor))
    return finer.block(axes) * count(minor, axes) == cut.block(axes)


def extends(cut: Cut | None, finer: Cut | None, axes: Axes) -> tuple[str, ...] | None:
    """The further axes over which `finer` divides the blocks of `cut`; None if it does something else."""
    if finer is None:
        return () if cut is None else None
    if cut is None:
        return finer.axes
    more = finer.axes[len(cut.axes) :]
    same = (cut.outer, cut.size, cut.axes) == (finer.outer, finer.size, finer.axes[: len(cut.axes)])
    return more if same and nests(cut, more, axes) else None


def even(cut: Cut | None, axes: Axes) -> bool:
    """Whether a dimension is cut into equal blocks of neighbours, none of which is padded."""
    return cut is None or (cut.outer == 1 and cut.size % count(cut.axes, axes) == 0)


def in_one(monoid: Monoid, dtype: Any) -> bool:
    """Whether a collective combines pieces of a type on the way; if not, every device is given all, and combines them.

    >>> in_one(Monoid.MAX, "bfloat16"), in_one(Monoid.PROD, "float32"), in_one(Monoid.AND, "int32")
    (True, False, False)
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


def route(start: Layout, end: Layout, shape: Sequence[int], axes: Axes, dtype: Any) -> tuple[Move, ...]:
    """The moves from one layout of a value to another.

    Args:
      start: how it lies.
      end: how it shall lie; partial over no axis over which it is not.
      shape: of the whole value.
      axes: of the mesh.
      dtype: of its elements.

    Returns:
      The moves in order; their `after` shows each layout on the way.
    """
    moves: list[Move] = []
    dims = list(start.dims)
    partial = dict(start.partial)

    def add(kind: str, names: tuple[str, ...], before: Layout, **more: object) -> None:
        elements = math.prod(before.local(shape, axes))
        moves.append(Move(kind, names, here(), elements, **more))  # type: ignore[arg-type]

    def here() -> Layout:
        return Layout(tuple(dims), tuple(partial.items()))

    wanted = dict(end.partial)
    for name, monoid in start.partial:
        if name in wanted:
            continue
        before = here()
        del partial[name]
        target = next((d for d, cut in enumerate(end.dims) if extends_by(dims[d], cut, name, axes)), None)
        if target is not None and monoid is Monoid.SUM and even(cut_to(dims[target], end.dims[target], name), axes):
            dims[target] = cut_to(dims[target], end.dims[target], name)
            add("reduce-scatter", (name,), before, dim=target, monoid=monoid)
        else:
            kind = "all-reduce" if in_one(monoid, dtype) else "all-gather"
            if moves and (moves[-1].kind, moves[-1].monoid) == (kind, monoid):  # several axes at once
                last = moves.pop()
                moves.append(dataclasses.replace(last, axes=(*last.axes, name), after=here()))
            else:
                add(kind, (name,), before, monoid=monoid)
    for d, target in enumerate(end.dims):
        cut = dims[d]
        if cut is None or extends(cut, target, axes) is not None:
            continue
        before = here()
        kept = shared(cut, target, axes)
        leaving = cut.axes[len(kept) :]
        rest = dataclasses.replace(cut, axes=kept) if kept else None
        other = destination(leaving, d, dims, end, axes) if even(cut, axes) and even(rest, axes) else None
        dims[d] = rest
        if other is not None:
            dims[other] = cut_to(dims[other], end.dims[other], leaving[0])
            add("all-to-all", leaving, before, dim=d, other=other)
        else:
            add("all-gather", leaving, before, dim=d)
    for d, target in enumerate(end.dims):
        if dims[d] != target:
            before, more = here(), extends(dims[d], target, axes)
            assert more is not None and target is not None
            dims[d] = target
            add("cut", more, before, dim=d)
    return tuple(moves)


def shared(cut: Cut, target: Cut | None, axes: Axes) -> tuple[str, ...]:
    """The leading axes that a cut need not give up on the way to another."""
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


def cut_to(cut: Cut | None, target: Cut | None, name: str) -> Cut:
    """A dimension's cut with one more axis, on the way to `target`."""
    assert target is not None
    return dataclasses.replace(target, axes=(*(cut.axes if cut is not None else ()), name))


def extends_by(cut: Cut | None, target: Cut | None, name: str, axes: Axes) -> bool:
    """Whether `name` is the next axis on the way from a cut to `target`."""
    more = None if target is None else extends(cut, target, axes)
    return bool(more) and more[0] == name and nests_on_the_way(cut, target, name, axes)


def nests_on_the_way(cut: Cut | None, target: Cut | None, name: str, axes: Axes) -> bool:
    assert target is not None
    first = cut_to(cut, target, name)
    return nests(first, target.axes[len(first.axes) :], axes) and (cut is None or nests(cut, (name,), axes))


def destination(leaving: tuple[str, ...], d: int, dims: Sequence[Cut | None], end: Layout, axes: Axes) -> int | None:
    """The dimension that an axis goes to when it leaves dimension `d`, if one device's share of it moves evenly."""
    if len(leaving) != 1:
        return None
    for other, target in enumerate(end.dims):
        if other != d and extends_by(dims[other], target, leaving[0], axes):
            first = cut_to(dims[other], target, leaving[0])
            if even(dims[other], axes) and even(first, axes):
                return other
    return None
