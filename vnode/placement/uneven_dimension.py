"""A dimension of an array in shards of unequal length, one for each index along a mesh axis.

Knows numbers of indices. Must not know meshes, arrays, nor who computes with the shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class UnevenSpec:
    """Unequal shards of a leaf's dimension; used in place of a `PartitionSpec`.

    The dimension is cut into equal blocks, the largest that divide all counts. Every device stores as many blocks as
    the fullest one needs, and computes with its own, block by block.

    Attributes:
      dim: the dimension.
      axis: the mesh axis.
      counts: the number of the dimension's indices on each device, 0 or more.

    Raises:
      ValueError: a count is negative or no integer, or fewer than two indices are shared.

    Example:
      >>> from vnode import UnevenSpec
      >>> spec = UnevenSpec(1, "model", (10, 6))
      >>> spec.size, spec.room, spec.blocks
      (16, 20, (5, 3))
    """

    dim: int
    axis: str
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = self.counts if isinstance(self.counts, Iterable) else ()
        object.__setattr__(self, "counts", tuple(int(n) if isinstance(n, np.integer) else n for n in counts))
        whole = all(isinstance(n, int) and n >= 0 for n in (self.dim, *self.counts))
        if not whole or not isinstance(self.axis, str) or sum(self.counts) < 2:
            raise ValueError(
                f"UnevenSpec takes a dimension, an axis, and a number of indices for each place along it, 2 or more "
                f"in all: not {self.dim!r}, {self.axis!r}, {self.counts!r}"
            )

    @property
    def size(self) -> int:
        """The size of the dimension."""
        return sum(self.counts)

    @property
    def room(self) -> int:
        """The stored size of the dimension."""
        return max(self.counts) * len(self.counts)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks of each device; 2 or more in all."""
        common = math.gcd(*self.counts)
        if common == self.size:  # one device has all
            common = max(d for d in range(1, common // 2 + 1) if common % d == 0)
        return tuple(n // common for n in self.counts)
