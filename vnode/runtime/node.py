"""One virtual node at run time: its examples, and conversions of a value between forms inside the node.

Knows the node's index (a traced integer), the node size and forms. Must not know equations, passes or devices.

Padding: when the nodes hold more examples than the batch has, the last real example is repeated. So padding behaves
like a real example (no NaN, no endless loop that real data would not cause). It is masked where the batch is reduced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vnode.analysis.forms import Batch, Form, Location, Partial, Slice, Varying, Whole
from vnode.operators import Monoid
from vnode.operators.separate_rounding import Rounding


@dataclasses.dataclass(frozen=True)
class WholeEvaluator:
    """Evaluates whole values, identically on every device.

    Attributes:
      platform: the platform that the program is compiled for.
      rounding: rounds single elements, if compilers must not choose the rounding.
      in_memory: materializes an array, if compilers must not choose the order of sums.
    """

    platform: str
    rounding: Rounding | None = None
    in_memory: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A virtual node while its computation is emitted.

    Attributes:
      index: the node's number, int32 scalar.
      count: the number of nodes.
      node_sizes: examples per node, of each batch.
      batch: the batch that is divided; the largest, if there are several.
      platform: the platform that the program is compiled for.
      hides_divisors: whether compilers do not see how a divisor is computed.
    """

    index: jax.Array
    count: int
    node_sizes: Mapping[Batch, int]
    batch: Batch
    platform: str
    hides_divisors: bool = False

    def has_padding(self, batch: Batch) -> bool:
        """Whether the nodes hold more examples than the batch has."""
        return self.count * self.node_sizes[batch] != batch.size

    def local_size(self, batch: Batch, ratio: Fraction) -> int:
        """The number of elements of one run of a batch that a node holds."""
        return self.node_sizes[batch] * ratio.numerator // ratio.denominator  # a fraction is slow to multiply

    def global_positions(self, batch: Batch, ratio: Fraction) -> tuple[jax.Array, int]:
        """Global positions of a node's elements in one run (past the end for padding), and the run's length."""
        n = self.local_size(batch, ratio)
        return self.index * n + lax.iota(jnp.int32, n), int(batch.size * ratio)

    def factor_positions(self, location: Location) -> Callable[[], jax.Array]:
        """Global indices of a node's part of a factor, those of padding repeating the last."""

        def build() -> jax.Array:
            units, total = self.global_positions(location.batch, location.ratio)
            if self.has_padding(location.batch):
                units = jnp.minimum(units, total - 1)
            runs = lax.iota(jnp.int32, location.outer) * total
            return (runs[:, None] + units[None, :]).reshape(-1)

        return build

    def real_mask(self, location: Location) -> jax.Array:
        """Marks the indices of a node's part of a factor that belong to real examples, bool ``[outer * local]``."""
        units, total = self.global_positions(location.batch, location.ratio)
        return jnp.tile(units < total, location.outer)

    def real_examples(self) -> jax.Array:
        """The number of real examples that the node holds, at least 1, int32 scalar."""
        size = self.node_sizes[self.batch]
        return jnp.clip(self.batch.size - self.index * size, 1, size)

    def slice_whole(self, value: Any, form: Slice) -> Any:
        """The node's part of a whole value."""
        n = self.local_size(form.batch, form.ratio)
        if self.has_padding(form.batch):
            location = Location(form.batch, 0, form.outer, form.ratio)
            return jnp.take(value, self.factor_positions(location)(), axis=form.dim, mode="clip")
        shape = value.shape
        total = form.units
        runs = value.reshape(*shape[: form.dim], form.outer, total, *shape[form.dim + 1 :])
        part = lax.dynamic_slice_in_dim(runs, self.index * n, n, form.dim + 1)
        return part.reshape(*shape[: form.dim], form.outer * n, *shape[form.dim + 1 :])

    def convert(self, value: Any, source: Form, target: Form, zero: bool) -> Any:
        """Converts a value from one form to another."""
        match source, target:
            case Whole() | Varying(), Slice():
                return self.slice_whole(value, target)
            case Whole(), Partial(monoid):
                return value if zero and monoid is Monoid.SUM else self.keep_in_first_node(value, monoid)
            case Whole(), Varying():
                return value
            case Partial(monoid), Varying():
                return self.local_estimate(value, monoid)
        raise AssertionError(f"no way from {source} to {target}")

    def keep_in_first_node(self, value: Any, monoid: Monoid) -> Any:
        """The value in node 0, the monoid's identity in the others, so that it enters the reduction once."""
        value = jnp.asarray(value)
        return jnp.where(self.index == 0, value, jnp.asarray(monoid.identity(value.dtype)))

    def local_estimate(self, value: Any, monoid: Monoid) -> Any:
        """The node's own estimate of a sum over the batch, as if all examples were like its own."""
        if monoid is not Monoid.SUM:
            return value
        scale = self.batch.size / self.real_examples()
        return (value * scale).astype(value.dtype)

    def sizes(self, sizes: tuple[int, ...], location: Location | None) -> tuple[int, ...]:
        """Factor sizes of the node's copy of an equation."""
        if location is None:
            return sizes
        local = location.outer * self.local_size(location.batch, location.ratio)
        return tuple(local if f == location.factor else n for f, n in enumerate(sizes))


def mask_dim(value: Any, real: jax.Array, dim: int, major: int, fill: Any) -> Any:
    """Overwrites the padding along one dimension.

    Args:
      value: any array.
      real: bool ``[local]``, which indices of the factor are real.
      dim: the dimension that holds the factor.
      major: the product of the sizes of the factors before it in the dimension.
      fill: a scalar that overwrites the padding.

    Returns:
      The array with its padding overwritten.
    """
    size = value.shape[dim]
    minor = size // (major * real.shape[0])
    along = jnp.broadcast_to(real[None, :, None], (major, real.shape[0], minor)).reshape(size)
    shape = [1] * value.ndim
    shape[dim] = size
    return jnp.where(along.reshape(shape), value, jnp.asarray(np.asarray(fill).astype(value.dtype)))


def restore_batch_order(value: Any, form: Slice, n: int, units: int) -> Any:
    """Moves the nodes' parts of a value back to the order of the batch, without padding.

    Args:
      value: the parts of consecutive nodes, ``[nodes, ...]``.
      form: the form of each node's part.
      n: elements of a run of the batch that a node holds.
      units: elements of a run of the batch that all nodes hold, without padding.

    Returns:
      The value in the order of the batch.
    """
    nodes, *shape = value.shape
    value = value.reshape(nodes, *shape[: form.dim], form.outer, n, *shape[form.dim + 1 :])
    value = jnp.moveaxis(value, 0, form.dim + 1)
    value = value.reshape(*shape[: form.dim], form.outer, nodes * n, *shape[form.dim + 1 :])
    value = lax.slice_in_dim(value, 0, units, axis=form.dim + 1)
    return value.reshape(*shape[: form.dim], form.outer * units, *shape[form.dim + 1 :])


def leading_size(sizes: tuple[int, ...], dim: tuple[int, ...], factor: int) -> int:
    """The product of the sizes of the factors before `factor` in a dimension."""
    return math.prod(sizes[f] for f in dim[: dim.index(factor)])
