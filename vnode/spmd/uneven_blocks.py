"""Array -> array stored in blocks of a dimension, of which devices hold different numbers, such as 5 and 3.

Knows arrays, and the number of blocks of each device. Must not know equations or programs, nor who reads the blocks.

    [b0 b1 b2 b3 b4 b5 b6 b7], counts (5, 3)   ->   [b0 b1 b2 b3 b4 | b5 b6 b7 0 0], an even shard for each device

A dimension of B equal blocks is stored as ``devices x most x block``: each device has room for as many blocks as the
fullest one, its own first. The rest is padding: zeros, with which no device computes. So the array is sharded evenly,
as jax requires, and the work is not.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from vnode.errors import PartitionError
from vnode.spmd.layout import Axes, Cut, count, cut_of


@dataclasses.dataclass(frozen=True)
class Share:
    """The number of blocks of a dimension that each device has.

    Attributes:
      axes: the mesh axes, major to minor; their indices number the devices.
      counts: blocks of each device, 0 or more. Block 0 is the first device's first block.

    Raises:
      PartitionError: there are fewer than two blocks, a count is negative, or there are no axes.

    Example:
      >>> share = Share(("model",), (5, 3))
      >>> share.blocks, share.max_blocks, share.starts
      (8, 5, (0, 5))
      >>> share.stored_size(64)  # 8 blocks of 8, stored as 2 x 5
      80
    """

    axes: tuple[str, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.axes or sum(self.counts) < 2 or min(self.counts) < 0:
            raise PartitionError(
                f"counts {self.counts} along {', '.join(map(repr, self.axes)) or 'no axis'} are not shares.",
                remedies=["give every device 0 blocks or more, 2 or more in all, along an axis of the mesh"],
            )

    @property
    def blocks(self) -> int:
        """The number of blocks of all devices."""
        return sum(self.counts)

    @property
    def max_blocks(self) -> int:
        """The number of blocks of the fullest device."""
        return max(self.counts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The number of each device's first block."""
        return tuple(itertools.accumulate(self.counts, initial=0))[:-1]

    def stored_size(self, n: int) -> int:
        """The stored size of a dimension of size `n`."""
        return n // self.blocks * self.max_blocks * len(self.counts)

    def cut(self, stored: int, axes: Axes) -> Cut:
        """The cut of a stored dimension of size `stored`."""
        return cut_of(self.axes, 1, stored, stored, axes)

    def check(self, axes: Axes, given: Sequence[int] | None = None) -> None:
        """Checks that a mesh has the axes.

        Args:
          axes: the mesh's axes.
          given: the counts as the user gave them, in indices; by default counts of blocks.

        Raises:
          PartitionError: the mesh lacks an axis, or has another number of devices along them.
        """
        missing = [name for name in self.axes if name not in axes]
        if missing or count(self.axes, axes) != len(self.counts):
            counts = self.counts if given is None else tuple(given)
            raise PartitionError(
                f"{len(counts)} counts, {counts}, do not fit the mesh along {', '.join(map(repr, self.axes))}.",
                facts=[f"axes longer than one: {', '.join(f'{name!r} of {n}' for name, n in axes.items())}"],
                remedies=["give one count for each index along the axes"],
            )

    def from_rates(self, rates: Sequence[float], blocks: int) -> Share:
        """A share along the same axes, with blocks by speed, so that the last device finishes as early as possible.

        Args:
          rates: each device's speed, in any unit, above 0.
          blocks: the number of blocks.

        Example:
          >>> Share(("x",), (1, 1)).from_rates([197, 459], 16).counts
          (5, 11)
        """
        counts = [0] * len(rates)
        for _ in range(blocks):  # to the device that would finish first with one more
            counts[min(range(len(rates)), key=lambda d: ((counts[d] + 1) / rates[d], d))] += 1
        return Share(self.axes, tuple(counts))


def store(value: Any, dim: int, share: Share) -> jax.Array:
    """Stores an array in blocks along a dimension.

    Args:
      value: array of shape ``[..., n, ...]``; the blocks divide n.
      dim: the dimension.
      share: the number of blocks of each device.

    Returns:
      Array of shape ``[..., share.stored_size(n), ...]``, of the same dtype.

    Example:
      >>> store(jnp.array([1, 2, 3]), 0, Share(("x",), (2, 1))).tolist()
      [1, 2, 3, 0]
    """
    block, value = value.shape[dim] // share.blocks, jnp.asarray(value)
    pieces = []
    for start, have in zip(share.starts, share.counts, strict=True):
        own = lax.slice_in_dim(value, start * block, (start + have) * block, axis=dim)
        behind = [(0, (share.max_blocks - have) * block if d == dim else 0, 0) for d in range(value.ndim)]
        pieces.append(lax.pad(own, jnp.zeros((), value.dtype), behind))
    return lax.concatenate(pieces, dim)


def restore(value: Any, dim: int, share: Share) -> jax.Array:
    """Undoes `store`.

    >>> share = Share(("x",), (2, 1))
    >>> restore(store(jnp.array([1, 2, 3]), 0, share), 0, share).tolist()
    [1, 2, 3]
    """
    part = value.shape[dim] // len(share.counts)  # of one device, padding included
    ends = [i * part + count * (part // share.max_blocks) for i, count in enumerate(share.counts)]
    pieces = [lax.slice_in_dim(value, i * part, end, axis=dim) for i, end in enumerate(ends)]
    return lax.concatenate(pieces, dim)


@functools.lru_cache(maxsize=64)
def restore_program(
    dims: tuple[int | None, ...], share: Share, sharding: NamedSharding
) -> Callable[[Sequence[Any]], list[Any]]:
    """A program that undoes `store` for several arrays, each along its dimension in `dims`, if that is not None.

    One program restores all arrays: compilers order the collectives of one program. Those of several programs that run
    concurrently have no order, so that devices could wait for each other.
    """

    def run(values: Sequence[Any]) -> list[Any]:
        return [x if dim is None else restore(x, dim, share) for x, dim in zip(values, dims, strict=True)]

    return jax.jit(run, out_shardings=sharding)


def check_divides(share: Share, shape: Sequence[int], dim: int, what: str) -> None:
    """Checks that blocks divide a dimension evenly.

    Raises:
      PartitionError: they do not, or the dimension does not exist.
    """
    if not 0 <= dim < len(shape) or shape[dim] % share.blocks:
        possible = [b for b in range(2, 65) if 0 <= dim < len(shape) and shape[dim] % b == 0]
        raise PartitionError(
            f"{what} of shape {tuple(shape)} has no dimension {dim} of {share.blocks} equal blocks.",
            facts=[f"counts {share.counts}, along {', '.join(map(repr, share.axes))}"],
            remedies=[f"take as many blocks as divide it: {', '.join(map(str, possible))}"]
            if possible
            else ["name another dimension"],
        )
