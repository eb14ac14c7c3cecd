"""A dimension of an array in pieces of unequal length, one for each index along an axis of a mesh.

Knows numbers of indices. Must not know meshes, arrays, nor who computes with the pieces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class UnevenSpec:
    """How a dimension of a leaf is shared out among unequal devices; stands in the place of a `PartitionSpec`.

    The dimension is cut into equal blocks, as large as fit all counts. A leaf is stored with as much room on every
    device as the one needs that has most, and computed with block by block, each device its own.

    Attributes:
      dim: the dimension.
      axis: of the mesh.
      counts: how many indices of the dimension each device has, 0 or more.

    Raises:
      ValueError: a count is no integer or negative, or there is nothing to share out.

    Example:
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
                f"UnevenSpec takes a dimension, an axis, and for each index along it a number of indices, 2 or more in "
                f"all: not {self.dim!r}, {self.axis!r}, {self.counts!r}"
            )

    @property
    def size(self) -> int:
        """How long the dimension is."""
        return sum(self.counts)

    @property
    def room(self) -> int:
        """How long it is as it is stored."""
        return max(self.counts) * len(self.counts)

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each device has; 2 or more in all."""
        common = math.gcd(*self.counts)
        if common == self.size:  # one device has all
            common = max(d for d in range(1, common // 2 + 1) if common % d == 0)
        return tuple(n // common for n in self.counts)
