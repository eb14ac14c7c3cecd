"""The room that an array takes in the memory of a TPU: whole tiles.

Knows shapes. Must not know what arrays are for.

Two dimensions lie in tiles of 8 rows of 128 elements, fewer rows if there are few, and the others around them. Which
two that are, the compiler chooses, so that little is filled up.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

LANES, SUBLANES = 128, 8
"""Elements of a row of a tile, and rows of a tile."""


def in_tiles(shape: Sequence[int]) -> int:
    """Elements for which an array has room.

    Example:
      >>> in_tiles((4096, 1000)) == 4096 * 1000  # rows of a tile along the second dimension
      True
      >>> in_tiles((11, 11, 3, 64)) == 11 * 11 * 4 * 128
      True
      >>> in_tiles(()), in_tiles((64,)), in_tiles((1000,)), in_tiles((1500,))
      (128, 128, 1024, 2048)
    """
    return of_long(tuple(sorted(n for n in shape if n > 1))) if 0 not in shape else 0


@functools.lru_cache(maxsize=4096)
def of_long(sizes: tuple[int, ...]) -> int:
    """Elements for arrays of dimensions that are longer than one."""
    if len(sizes) < 2:
        size = math.prod(sizes)
        return filled(size, min(max(power(size), LANES), LANES * SUBLANES))
    whole = math.prod(sizes)
    return min(
        whole // (lanes * rows) * filled(lanes, LANES) * filled(rows, min(power(rows), SUBLANES))
        for lanes, rows in itertools.permutations(sizes, 2)
    )


def filled(size: int, unit: int) -> int:
    """The multiple of a unit that has room for so many."""
    return -(-size // unit) * unit


def power(size: int) -> int:
    """The power of two that has room for so many."""
    return 1 << (size - 1).bit_length()
