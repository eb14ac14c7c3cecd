"""Small values that nodes read -> one array per shape and dtype.

Knows arrays and shapes. Must not know nodes, forms, placements, nor what is computed.

Reading a small part of an array takes a TPU as long as reading 1 MiB (v5e: a latency of two thousand cycles, by its
compiler). The read of a node's inputs is compiled apart from the node's computation. So a step of two inputs would wait
twice for each node.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MOST = 1 << 20
"""Bytes of a packed value over all nodes: packing all of it then costs no more than one node's read."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """The values that are packed.

    Attributes:
      groups: positions of the values that share an array, in order.
      count: the number of values.
    """

    groups: tuple[tuple[int, ...], ...]
    count: int

    @staticmethod
    def from_parts(parts: Sequence[jax.ShapeDtypeStruct], nodes: int) -> Packing:
        """Chooses the packing of values of which each of `nodes` nodes reads a part.

        The choice does not depend on devices: a node's computation is compiled together with the unpacking.

        Example:
          >>> a, b, large = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(4, 8), (4, 8), (512, 512)])
          >>> Packing.from_parts([a, large, b, large], 8)
          Packing(groups=((0, 2),), count=4)
        """
        alike: dict[Any, list[int]] = {}
        for i, part in enumerate(parts):
            if jnp.issubdtype(part.dtype, jnp.number) and nodes * math.prod(part.shape) * part.dtype.itemsize <= MOST:
                alike.setdefault((part.shape, part.dtype), []).append(i)
        return Packing(tuple(tuple(group) for group in alike.values() if len(group) > 1), len(parts))

    @property
    def unpacked(self) -> list[int]:
        """Positions of values that are not packed."""
        packed = {i for group in self.groups for i in group}
        return [i for i in range(self.count) if i not in packed]

    def pack(self, value: Callable[[int], Any]) -> list[Any]:
        """The arrays ``[nodes, values, *part]``; `value` gives the value at a position, ``[nodes, *part]``."""
        return [jnp.stack([value(i) for i in group], 1) for group in self.groups]

    def select_node(self, arrays: Sequence[Any], index: jax.Array) -> list[Any]:
        """One node's entry of each array, ``[values, *part]``."""
        return [lax.dynamic_index_in_dim(array, index, 0, keepdims=False) for array in arrays]

    def unpack(self, alone: Sequence[Any], taken: Sequence[Any]) -> list[Any]:
        """The parts of all values, in order.

        Args:
          alone: the parts of values that are not packed.
          taken: one node's entries of the packed arrays.
        """
        parts: list[Any] = [None] * self.count
        for i, part in zip(self.unpacked, alone, strict=True):
            parts[i] = part
        for group, several in zip(self.groups, taken, strict=True):
            for k, i in enumerate(group):
                parts[i] = several[k]
        return parts
