"""Results that are rounded each, whatever kernels compilers make of a program.

Knows descriptions. Must not know programs, nodes, nor who wants such results.

Compilers contract a product and a sum to one operation that rounds once, and keep more bits of narrow types, wherever
both come to be in one kernel. Which do depends on the sizes of arrays, and on what else reads them: so would the last
bits of what is computed of the same numbers on one device and, in parts, on several.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from vnode.operators.description import Algebra, OperatorDescription

NARROW = 4
"""Bytes of the narrowest type whose sums compilers round to it."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Rounds results of equations that compute single elements.

    Attributes:
      zero: uint32 scalar without a bit that is set, which compilers do not know: it is the reason not to contract.
    """

    zero: jax.Array

    @staticmethod
    def from_values(values: Sequence[Any]) -> Rounding | None:
        """A rounding in a program that is being traced; None if nothing is computed of anything.

        Args:
          values: of the program. An element of one says how often a loop doubles zero: compilers do not see through
            loops, and what is made in one is in memory for whoever reads it.
        """
        for value in values:
            if Rounding.can_use(value):
                first = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
                start = ((first != 0).astype(jnp.int32), jnp.uint32(0))
                return Rounding(lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] * 2), start)[1])
        return None

    @staticmethod
    def can_use(value: Any) -> bool:
        """Whether a value has a number of which a rounding can be made."""
        return bool(getattr(value, "size", 0)) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)

    def opaque_constant(self, constant: Any) -> Any:
        """A constant of several elements that compilers do not know for one.

        They would compute what is made of it while they compile, and round that otherwise than a device does; and only
        where they see all of it, which of parts they do not.
        """
        several = jnp.size(constant) > 1 and self.is_at_stake(constant, adds=False)
        return self.round_value(jnp.asarray(constant)) if several else constant

    def round_results(
        self, eqn: JaxprEqn, description: OperatorDescription | None, results: Sequence[Any]
    ) -> list[Any]:
        """Results of an equation, rounded before anything else is computed of them if compilers might not.

        Args:
          eqn: the equation.
          description: of it.
          results: at any sizes.
        """
        if description is None or not description.by_element or description.has(Algebra.MOVES):
            return list(results)
        adds = frozenset(range(len(eqn.invars))) in description.linear
        return [self.round_value(value) if self.is_at_stake(value, adds) else value for value in results]

    @staticmethod
    def is_at_stake(value: Any, adds: bool) -> bool:
        """Whether compilers might not round a result; sums of single elements they do."""
        dtype = getattr(value, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, np.floating) and not (adds and dtype.itemsize >= NARROW)

    def round_value(self, value: jax.Array) -> jax.Array:
        """The same value, by its bits."""
        bits = jnp.dtype(f"uint{8 * value.dtype.itemsize}")
        return lax.bitcast_convert_type(lax.bitcast_convert_type(value, bits) ^ self.zero.astype(bits), value.dtype)

    def hide_broadcast(self, spread: jax.Array) -> jax.Array:
        """A value that is one number everywhere, or along a dimension, of which compilers do not see that.

        XLA divides by such a value by multiplying with its reciprocal, or does not, depending on which other arrays
        have the same shape. The bits of each element are combined with those of its place that `zero` has, too.
        """
        if not jnp.issubdtype(spread.dtype, np.floating):
            return lax.optimization_barrier(spread) if jnp.issubdtype(spread.dtype, np.inexact) else spread
        bits = jnp.dtype(f"uint{8 * spread.dtype.itemsize}")
        places = [lax.broadcasted_iota(bits, spread.shape, d) for d, n in enumerate(spread.shape) if n > 1]
        if not places:
            return spread
        place = functools.reduce(lax.bitwise_xor, places) & self.zero.astype(bits)
        return lax.bitcast_convert_type(lax.bitcast_convert_type(spread, bits) ^ place, spread.dtype)
