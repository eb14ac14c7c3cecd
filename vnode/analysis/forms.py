"""A value's form on nodes (whole, slice, partial, varying), and an equation's dimensions -> the result's form.

Knows factors, dimensions and the batch. Must not know equations' primitives, passes or devices.

    x: batched(dim 0) in "ij,jk->ik"   ->   `locate`: the batch is in factor i   ->   `project`: result batched(dim 0)

The batch sits inside one dimension, as ``outer x batch x inner``. After ``concatenate([a, b])`` of two batches, `outer`
is 2. After a merge of ``(batch, time)``, `inner` is the time. A reshape keeps both, since it keeps row-major order.

A node that holds the examples ``[v * m, (v + 1) * m)`` holds `outer` runs of ``m * ratio`` elements. `ratio` is a run's
number of elements per example: a whole number after a merge, a fraction after ``reshape(B // 2, 2)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from vnode.operators.description import Dim, Dims, Sizes
from vnode.operators.monoid import Monoid


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch, whose examples are divided among the nodes.

    Attributes:
      size: examples of the global batch.
    """

    size: int


@dataclasses.dataclass(frozen=True)
class Whole:
    """Every node holds the same, full value."""

    def __str__(self) -> str:
        return "whole"


@dataclasses.dataclass(frozen=True)
class Slice:
    """A node holds its own examples along one dimension.

    Attributes:
      batch: the batch that is divided.
      dim: the dimension.
      outer: the number of consecutive runs of the batch in the dimension.
      ratio: elements of a run per example.
    """

    batch: Batch
    dim: int
    outer: int
    ratio: Fraction

    def __hash__(self) -> int:
        return hash((self.dim, self.outer))  # fast, and distinguishes most

    @property
    def grain(self) -> int:
        """A node must hold a multiple of so many examples."""
        return self.ratio.denominator

    @property
    def units(self) -> int:
        """Elements of one run, over all nodes."""
        return int(self.batch.size * self.ratio)

    def move(self, dim: int) -> Slice:
        """The same examples along another dimension."""
        return dataclasses.replace(self, dim=dim)

    def __str__(self) -> str:
        runs = f"{self.outer} x " if self.outer > 1 else ""
        per = f" x {self.ratio}" if self.ratio != 1 else ""
        return f"batched(dim {self.dim}: {runs}batch{per})"


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each node holds a piece; the reduction of the pieces by the monoid is the value."""

    monoid: Monoid

    def dtype(self, dtype: Any) -> Any:
        """The dtype of a node's piece of a value of type `dtype`: float32 for a dtype of fewer bits.

        A rounded piece leaves its error where pieces cancel. A piece of smaller range, as float16, may overflow where
        the total does not, or the reverse.
        """
        combines = self.monoid in (Monoid.SUM, Monoid.PROD) and jnp.issubdtype(dtype, jnp.floating)
        return np.dtype(np.float32 if combines and jnp.finfo(dtype).bits < 32 else dtype)

    def __str__(self) -> str:
        return f"partial({self.monoid.value})"


@dataclasses.dataclass(frozen=True)
class Varying:
    """Each node, or each iteration of a loop over examples, holds a full-shaped value of its own."""

    def __str__(self) -> str:
        return "varying"


WHOLE = Whole()
VARYING = Varying()

Form = Whole | Slice | Partial | Varying


@dataclasses.dataclass(frozen=True)
class Location:
    """The position of the batch among the factors of an equation.

    Attributes:
      batch: the batch that is divided.
      factor: the factor.
      outer: runs within the factor.
      ratio: elements of a run per example, within the factor.
    """

    batch: Batch
    factor: int
    outer: int
    ratio: Fraction

    def __hash__(self) -> int:
        return hash((self.factor, self.outer))  # as for slices


def locate(form: Slice, dims: Dims, sizes: Sizes) -> Location | None:
    """The factor that holds the batch of a sliced operand, or None if it straddles factors.

    A batch that spans several factors is located in the major one, at a coarser grain.

    Example:
      >>> form = Slice(Batch(8), 0, 1, Fraction(3))           # (batch 8 x 3)
      >>> locate(form, ((0, 1),), (8, 3))                      # reshaped to (8)(3)
      Location(batch=Batch(size=8), factor=0, outer=1, ratio=Fraction(1, 1))
      >>> locate(form, ((0, 1),), (4, 6)).ratio                # reshaped to (4)(6): pairs of examples
      Fraction(1, 2)
    """
    outer = form.outer
    dim: Dim = dims[form.dim]
    for k, factor in enumerate(dim):
        size = sizes[factor]
        if size == 0:
            return None
        if outer % size == 0:
            outer //= size
        elif size % outer == 0:
            minor = dim[k + 1 :]
            ratio = form.ratio / math.prod(sizes[f] for f in minor) if minor else form.ratio
            return Location(form.batch, factor, outer, ratio)
        else:
            return None
    return None


def project(location: Location, dims: Dims, sizes: Sizes) -> Slice | None:
    """The form of an array whose dimensions are `dims`, or None if the batch's factor is not among them."""
    for d, dim in enumerate(dims):
        if location.factor in dim:
            k = dim.index(location.factor)
            major = math.prod(sizes[f] for f in dim[:k])
            minor = dim[k + 1 :]
            ratio = location.ratio * math.prod(sizes[f] for f in minor) if minor else location.ratio
            return Slice(location.batch, d, major * location.outer, ratio)
    return None


def contains_factor(factor: int, dims: Sequence[Dim]) -> bool:
    """Whether a factor is in some dimension."""
    return any(factor in dim for dim in dims)
