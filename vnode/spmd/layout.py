"""The layout of a value on a mesh: which axes cut which dimensions, and over which axes the value is partial.

Knows shapes and the sizes of mesh axes. Must not know equations, nor how a value is resharded.

A dimension is ``outer x size x inner``, and `size` is cut into equal blocks of consecutive indices, one for each device
along the axes. `outer` is one, unless a reshape merged dimensions. If the axes do not divide `size`, the last blocks
are padded with undefined values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from vnode.operators import Monoid
from vnode.operators.description import Dim, Sizes

Axes = Mapping[str, int]
"""The mesh axes, each with its size, in the mesh's order."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """The division of a dimension over mesh axes.

    Attributes:
      axes: the mesh axes, major to minor.
      outer: how often the cut part repeats.
      size: number of indices of the cut part.
    """

    axes: tuple[str, ...]
    outer: int
    size: int

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.outer, self.size))

    def __hash__(self) -> int:  # layouts are looked up often, and hashing what they are made of takes long
        return self._hash

    def block(self, axes: Axes) -> int:
        """The number of indices in one device's block."""
        return -(-self.size // count(self.axes, axes))


def count(names: Sequence[str], axes: Axes) -> int:
    """The number of parts into which axes divide something."""
    return math.prod(axes[name] for name in names)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a value on a mesh.

    Attributes:
      dims: for each dimension its cut; None where every device has all of it.
      partial: axes over which the value is partial, each with the monoid that combines the partial values.
    """

    dims: tuple[Cut | None, ...]
    partial: tuple[tuple[str, Monoid], ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial))

    def __hash__(self) -> int:
        return self._hash

    @property
    def cut_axes(self) -> dict[str, int]:
        """For each axis that cuts a dimension, that dimension."""
        return {name: d for d, cut in enumerate(self.dims) if cut is not None for name in cut.axes}

    @property
    def is_whole(self) -> bool:
        """Whether every device has the whole value."""
        return not self.partial and not any(self.dims)

    @property
    def without_partial(self) -> Layout:
        """The layout after partial values are combined."""
        return Layout(self.dims) if self.partial else self

    def local_shape(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """The shape of one device's array of a value of shape `shape`."""
        return tuple(
            n if cut is None else cut.outer * cut.block(axes) * (n // (cut.outer * cut.size))
            for n, cut in zip(shape, self.dims, strict=True)
        )

    def __str__(self) -> str:
        dims = ", ".join("-" if cut is None else "*".join(cut.axes) for cut in self.dims)
        return f"[{dims}]" + "".join(f" partial({monoid.value}, {name})" for name, monoid in self.partial)


def replicated(ndim: int) -> Layout:
    """The layout in which every device has the whole value."""
    return Layout((None,) * ndim)


def replicated_atom(atom: Any) -> Layout:
    """The layout in which every device has the whole of a program's value."""
    return replicated(len(getattr(atom.aval, "shape", ())))


def cut_of(names: tuple[str, ...], outer: int, size: int, n: int, axes: Axes) -> Cut:
    """The canonical cut of a dimension of size `n`: by the smallest `size` that gives the same blocks.

    >>> cut_of(("x",), 1, 8, 24, {"x": 4})  # blocks of 2 threes are blocks of 6
    Cut(axes=('x',), outer=1, size=24)
    >>> cut_of(("x",), 1, 6, 24, {"x": 4})  # of two fours each, padded: not the same as blocks of 6
    Cut(axes=('x',), outer=1, size=6)
    """
    if size == 1 or n == 0:  # the first device has all
        return Cut(names, 1, 1)
    parts, together, inner = count(names, axes), n // outer, n // (outer * size)
    block = -(-size // parts) * inner
    pieces = (p for p in range(1, inner + 1) if block % p == together % p == 0)
    piece = next(p for p in pieces if -(-(together // p) // parts) * p == block)
    return Cut(names, outer, together // piece)


def cut_along(names: tuple[str, ...], factor: int, dim: Dim, sizes: Sizes, axes: Axes) -> Cut:
    """The cut of a dimension along one of its factors."""
    outer = math.prod(sizes[f] for f in dim[: dim.index(factor)])
    return cut_of(names, outer, sizes[factor], math.prod(sizes[f] for f in dim), axes)


def from_spec(spec: Any, shape: Sequence[int], axes: Axes) -> Layout:
    """The layout of a `PartitionSpec`, over those of its axes that exist and are longer than one.

    >>> from jax.sharding import PartitionSpec
    >>> str(from_spec(PartitionSpec(None, ("data", "model")), (4, 8), {"model": 2}))
    '[-, model]'
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    dims: list[Cut | None] = []
    for n, entry in zip(shape, entries, strict=True):
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        names = tuple(name for name in names if axes.get(name, 1) > 1)
        dims.append(cut_of(names, 1, n, n, axes) if names and n > 1 else None)
    return Layout(tuple(dims))


def restrict_to_axes(axes: Axes, layout: Layout, shape: Sequence[int]) -> Layout:
    """The part of a layout that is over some axes.

    >>> from jax.sharding import PartitionSpec
    >>> both = from_spec(PartitionSpec("data", "model"), (4, 8), {"data": 2, "model": 2})
    >>> str(restrict_to_axes({"model": 2}, both, (4, 8)))
    '[-, model]'
    """
    dims: list[Cut | None] = []
    for cut, n in zip(layout.dims, shape, strict=True):
        names = tuple(name for name in cut.axes if name in axes) if cut is not None else ()
        dims.append(cut_of(names, cut.outer, cut.size, n, axes) if cut is not None and names else None)
    return Layout(tuple(dims), tuple(each for each in layout.partial if each[0] in axes))
