"""Results of equations -> results rounded one by one, whatever kernels compilers make of a program.

Knows descriptions. Must not know programs, nodes, nor who needs such results.

Compilers contract a product and a sum into one operation that rounds once, and keep more bits of narrow types, wherever
both are in one kernel. The choice depends on array sizes, and on other users of the arrays. So the last bits of the
same computation would differ between one device and several.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from vnode.operators.description import Algebra, OperatorDescription

Broadcast = Callable[[jax.Array, tuple[int, ...]], jax.Array]

NARROW = 4
"""Bytes of the narrowest type of which compilers round each sum of two elements."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Rounds results of elementwise equations.

    Attributes:
      zero: a uint32 scalar without set bits; compilers do not know its value, so they cannot contract.
    """

    zero: jax.Array

    @staticmethod
    def from_values(values: Sequence[Any]) -> Rounding | None:
        """A rounding in a traced program; None if no value can be used.

        Args:
          values: the program's values. An element of one is the trip count of a loop that doubles zero: compilers do
            not see through loops, and their results are in memory.
        """
        for value in values:
            if Rounding.can_use(value):
                first = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
                start = ((first != np.zeros((), first.dtype)).astype(jnp.int32), jnp.uint32(0))
                return Rounding(lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] * 2), start)[1])
        return None

    @staticmethod
    def can_use(value: Any) -> bool:
        """Whether a rounding can be made from a value: it has numbers."""
        return bool(getattr(value, "size", 0)) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)

    def opaque_constant(self, constant: Any) -> Any:
        """A constant array that compilers do not know as one.

        They would fold computations with it, and round these otherwise than a device does; and only where they see the
        whole constant, which is not so for shards.
        """
        several = jnp.size(constant) > 1 and self.is_at_stake(constant, adds=False)
        return self.round_value(jnp.asarray(constant)) if several else constant

    def round_results(
        self,
        eqn: JaxprEqn,
        description: OperatorDescription | None,
        results: Sequence[Any],
        broadcast: Broadcast = lax.broadcast,
    ) -> list[Any]:
        """Rounds an equation's results before their users read them, if compilers might not.

        Args:
          eqn: the equation.
          description: its description.
          results: the results, at any sizes.
          broadcast: broadcasts a scalar to a shape; a program may do so once for many results.
        """
        if description is None or not description.by_element or description.has(Algebra.MOVES):
            return list(results)
        adds = frozenset(range(len(eqn.invars))) in description.linear
        return [self.round_value(value, broadcast) if self.is_at_stake(value, adds) else value for value in results]

    @staticmethod
    def is_at_stake(value: Any, adds: bool) -> bool:
        """Whether compilers might leave a result unrounded; they do round sums of single elements."""
        dtype = getattr(value, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, np.floating) and not (adds and dtype.itemsize >= NARROW)

    def round_value(self, value: jax.Array, broadcast: Broadcast = lax.broadcast) -> jax.Array:
        """The same value, rounded by `round_by_bits`."""
        return round_by_bits(value, lambda shape, bits: broadcast(lax.convert_element_type(self.zero, bits), shape))

    def hide_origin(self, value: jax.Array) -> jax.Array:
        """Hides from compilers how a value is computed.

        XLA may divide by a value by multiplying with its reciprocal, if it is a broadcast or a root. That depends on
        other users of the value, and on which other arrays have the same shape. Each element's bits are combined with
        the index bits that `zero` has, too, so that a broadcast does not look like one.
        """
        if not jnp.issubdtype(value.dtype, np.floating):
            return lax.optimization_barrier(value) if jnp.issubdtype(value.dtype, np.inexact) else value
        return self.round_value(value, place_bits)


def round_by_bits(value: jax.Array, zeros: Callable[[tuple[int, ...], Any], jax.Array]) -> jax.Array:
    """A value, rounded by an "or" of its bits with zeros.

    An "exclusive or" would not do. Where compilers drop the equation between two roundings (``1.0 * x``), two exclusive
    ones would cancel; of two "or"s one is left.

    Args:
      value: real floating-point numbers.
      zeros: makes an array without set bits, of a shape and an unsigned dtype, that compilers do not know to be zeros.
    """
    bits = np.dtype(f"uint{8 * value.dtype.itemsize}")
    rounded = lax.bitwise_or(lax.bitcast_convert_type(value, bits), zeros(value.shape, bits))
    return lax.bitcast_convert_type(rounded, value.dtype)


def place_bits(number: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The bits of each element's indices that a number has, too; the number itself if there are no two elements."""
    places = [lax.broadcasted_iota(number.dtype, shape, d) for d, n in enumerate(shape) if n > 1]
    return functools.reduce(lax.bitwise_xor, places) & number if places else lax.broadcast(number, shape)
