"""Slices of an array -> the elements' numbers, as random generators count them.

Knows shapes. Must not know keys, nor how the numbers are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vnode.operators.elementwise import high_product


def counters(shape: Sequence[int], positions: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The row-major index of every element of a slice of an array, as the high and low word of 64 bits.

    Args:
      shape: shape of the whole array.
      positions: for each dimension the global indices in the slice.

    Returns:
      Two uint32 arrays of the slice's shape.
    """
    local = tuple(p.shape[0] for p in positions)
    high, low = jnp.zeros(local, jnp.uint32), jnp.zeros(local, jnp.uint32)
    for d, position in enumerate(positions):
        stride = math.prod(shape[d + 1 :])
        index = jax.lax.broadcast_in_dim(position.astype(jnp.uint32), local, (d,))
        lower = jnp.uint32(stride & 0xFFFFFFFF)
        term = index * lower
        low = low + term
        if math.prod(shape) > 1 << 32:
            upper = index * jnp.uint32(stride >> 32) + high_product(index, lower)
            high = high + upper + (low < term).astype(jnp.uint32)
    return high, low
