"""Mesh axes -> parts of axes, by which blocks are divided on the way between two layouts.

Knows the sizes of axes, and layouts. Must not know moves, nor how collectives are implemented.

    {x: 2, y: 8}   ->   {x: 2, y[0]: 2, y[1]: 4}         blocks cut along y[0] can move to x

An axis is split where other axes, alone or together, have as many devices as a part of it. No layout of a program has
parts: reshardings begin and end with whole axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vnode.spmd.layout import Axes, Layout

MAX_AXES_AND_PARTS = 5
"""If axes and parts were more than these together, no axis is split: searching a resharding would take long."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an axis.

    Attributes:
      axis: the axis.
      size: number of devices along the part.
      within: the stride: the distance along the axis of two neighbours along the part.
    """

    axis: str
    size: int
    within: int

    def index(self, place: Any) -> Any:
        """The index along the part, given the index along the axis."""
        return place // self.within % self.size


def parts_of(axes: Axes) -> Mapping[str, Part]:
    """The parts of axes by name, major to minor; none of an axis that is not split.

    >>> parts_of({"x": 2, "y": 8})
    {'y[0]': Part(axis='y', size=2, within=4), 'y[1]': Part(axis='y', size=4, within=1)}
    """
    return _parts(tuple(axes.items()))


@functools.lru_cache(maxsize=1024)
def _parts(axes: tuple[tuple[str, int], ...]) -> Mapping[str, Part]:
    found: dict[str, Part] = {}
    for name, n in axes:
        others = [size for other, size in axes if other != name]
        several = itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(1, len(others) + 1))
        bounds = [1]
        for size in sorted({math.prod(each) for each in several} | {n}):
            if 1 < size <= n and n % size == 0 and size % bounds[-1] == 0:
                bounds.append(size)
        if len(bounds) > 2:
            for k, (before, bound) in enumerate(itertools.pairwise(bounds)):
                found[f"{name}[{k}]"] = Part(name, bound // before, n // bound)
    split = {part.axis for part in found.values()}
    return found if len(found) + len(axes) - len(split) <= MAX_AXES_AND_PARTS else {}


def with_parts(axes: Axes) -> Axes:
    """The axes and their parts."""
    return {**axes, **{name: part.size for name, part in parts_of(axes).items()}}


def split_axes(axes: Axes, whole: Collection[str] = ()) -> Axes:
    """Replaces split axes by their parts, in order, except the axes in `whole`."""
    sizes = with_parts(axes)
    return {name: sizes[name] for name in split_names(tuple(axes), axes, whole)}


def split_names(names: Sequence[str], axes: Axes, whole: Collection[str] = ()) -> tuple[str, ...]:
    """Replaces names of split axes by those of their parts, except the axes in `whole`."""
    parts = parts_of(axes)
    own = {name: [each for each, part in parts.items() if part.axis == name and name not in whole] for name in names}
    return tuple(itertools.chain.from_iterable(own[name] or [name] for name in names))


def split_layout(layout: Layout, axes: Axes, whole: Collection[str] = ()) -> Layout:
    """Replaces axes in a layout by their parts, except the axes in `whole`."""
    dims = [
        None if cut is None else dataclasses.replace(cut, axes=split_names(cut.axes, axes, whole))
        for cut in layout.dims
    ]
    return Layout(tuple(dims), layout.partial)


def join_names(names: Sequence[str], axes: Axes) -> tuple[str, ...]:
    """Replaces consecutive parts that make up an axis by the axis.

    >>> join_names(("y[1]", "y[0]", "y[1]", "x"), {"x": 2, "y": 4})
    ('y[1]', 'y', 'x')
    """
    parts, left, found = parts_of(axes), list(names), list[str]()
    while left:
        part = parts.get(left[0])
        own = [name for name, each in parts.items() if part is not None and each.axis == part.axis]
        if part is not None and left[: len(own)] == own:
            found.append(part.axis)
            del left[: len(own)]
        else:
            found.append(left.pop(0))
    return tuple(found)


def join_layout(layout: Layout, axes: Axes) -> Layout:
    """Replaces consecutive parts in a layout that make up an axis by the axis."""
    dims = [None if cut is None else dataclasses.replace(cut, axes=join_names(cut.axes, axes)) for cut in layout.dims]
    return Layout(tuple(dims), layout.partial)


def axes_of(names: Sequence[str], axes: Axes) -> tuple[str, ...]:
    """The axes to which some axes and parts belong, in the mesh's order."""
    parts = parts_of(axes)
    found = {parts[name].axis if name in parts else name for name in names}
    return tuple(name for name in axes if name in found)


def index_at(place: Mapping[str, Any], names: Sequence[str], axes: Axes) -> Any:
    """A device's number along some axes and parts, given its index along each axis."""
    parts, index = parts_of(axes), None
    for name in names:
        part = parts.get(name)
        own, size = (place[name], axes[name]) if part is None else (part.index(place[part.axis]), part.size)
        index = own if index is None else index * size + own
    return 0 if index is None else index


def device_groups(names: Sequence[str], axes: Axes) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that differ along some parts only, by their numbers along the parts' axes."""
    whole = axes_of(names, axes)
    parts = split_names(names, axes)
    others = [name for name in split_names(whole, axes) if name not in parts]
    found: dict[int, dict[int, int]] = {}
    for number, place in enumerate(itertools.product(*(range(axes[name]) for name in whole))):
        at = dict(zip(whole, place, strict=True))
        found.setdefault(index_at(at, others, axes), {})[index_at(at, names, axes)] = number
    return tuple(tuple(each[k] for k in sorted(each)) for each in found.values())
