"""Small values that nodes read, those of one shape and type together in one array.

Knows arrays and shapes. Must not know nodes, forms, placements, nor what is computed.

To read a small part of an array takes a TPU as long as to read 1 MiB (of a v5e, by its compiler: two thousand cycles of
latency), and what a node reads is read apart from what is computed of it. So a step of two inputs would wait twice for
each node.
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
"""Bytes that all nodes together read of a value that is packed: so packing it costs no more than reading it for one."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which values are packed.

    Attributes:
      groups: positions of values that go into one array, in order.
      count: of values.
    """

    groups: tuple[tuple[int, ...], ...]
    count: int

    @staticmethod
    def from_parts(parts: Sequence[jax.ShapeDtypeStruct], nodes: int) -> Packing:
        """The packing of values of which each of so many nodes reads a part.

        It depends on no number of devices: what a node computes of a part is compiled with taking it from the others.

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
        """The arrays ``[nodes, values, *part]``, of what gives the value at a position, ``[nodes, *part]``."""
        return [jnp.stack([value(i) for i in group], 1) for group in self.groups]

    def select_node(self, arrays: Sequence[Any], index: jax.Array) -> list[Any]:
        """Of each array what one node reads, ``[values, *part]``."""
        return [lax.dynamic_index_in_dim(array, index, 0, keepdims=False) for array in arrays]

    def unpack(self, alone: Sequence[Any], taken: Sequence[Any]) -> list[Any]:
        """The parts of all values in order.

        Args:
          alone: of those that are not packed.
          taken: of those that are.
        """
        parts: list[Any] = [None] * self.count
        for i, part in zip(self.unpacked, alone, strict=True):
            parts[i] = part
        for group, several in zip(self.groups, taken, strict=True):
            for k, i in enumerate(group):
                parts[i] = several[k]
        return parts
