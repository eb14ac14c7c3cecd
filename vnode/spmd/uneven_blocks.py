"""Blocks of a dimension, of which devices hold different numbers: 5 here and 3 there.

Knows arrays, and how many blocks each device has. Must not know equations or programs, nor who reads the blocks.

A dimension of B equal blocks is stored as ``devices x most x block``: each device has room for as many blocks as the
one that has most, its own first. What lies behind them is zero, and nobody computes with it. So an array is divided
evenly, as all that jax stores, and work is not.
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

from vnode.errors import PartitionError, layout_message
from vnode.spmd.layout import Axes, Cut, count, cut_of


@dataclasses.dataclass(frozen=True)
class Share:
    """How many blocks of a dimension each device has.

    Attributes:
      axes: of the mesh, major to minor; their indices number the devices.
      counts: blocks of each device, 0 or more. Block 0 is the first one of the first device.

    Raises:
      PartitionError: there are fewer than two blocks, or a count is negative.

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
                layout_message(
                    f"counts {self.counts} along {', '.join(map(repr, self.axes)) or 'no axis'} are no shares.",
                    remedies=["give every device 0 blocks or more, 2 or more in all, along an axis of the mesh"],
                )
            )

    @property
    def blocks(self) -> int:
        """All of them."""
        return sum(self.counts)

    @property
    def max_blocks(self) -> int:
        """Those of the device that has most."""
        return max(self.counts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each device."""
        return tuple(itertools.accumulate(self.counts, initial=0))[:-1]

    def stored_size(self, n: int) -> int:
        """How long a dimension of `n` is as it is stored."""
        return n // self.blocks * self.max_blocks * len(self.counts)

    def cut(self, room: int, axes: Axes) -> Cut:
        """How a dimension lies that is stored with `room` elements."""
        return cut_of(self.axes, 1, room, room, axes)

    def check(self, axes: Axes, given: Sequence[int] | None = None) -> None:
        """Checks that a mesh has the axes.

        Args:
          axes: those of the mesh.
          given: the counts as the user writes them, of indices; those of blocks by default.

        Raises:
          PartitionError: it has not, or they number another number of devices.
        """
        strangers = [name for name in self.axes if name not in axes]
        if strangers or count(self.axes, axes) != len(self.counts):
            counts = self.counts if given is None else tuple(given)
            raise PartitionError(
                layout_message(
                    f"{len(counts)} counts, {counts}, do not fit the mesh along {', '.join(map(repr, self.axes))}.",
                    facts=[f"axes longer than one: {', '.join(f'{name!r} of {n}' for name, n in axes.items())}"],
                    remedies=["give one count for each index along the axes"],
                )
            )

    def from_rates(self, rates: Sequence[float], blocks: int) -> Share:
        """Blocks by speed: the counts with which the slowest device has least to do.

        Args:
          rates: how fast each device is, in any unit; all of them above 0.
          blocks: how many to share out.

        Example:
          >>> Share(("x",), (1, 1)).from_rates([197, 459], 16).counts
          (5, 11)
        """
        counts = [0] * len(rates)
        for _ in range(blocks):  # to whom would be done first with one more
            counts[min(range(len(rates)), key=lambda d: ((counts[d] + 1) / rates[d], d))] += 1
        return Share(self.axes, tuple(counts))


def store(value: Any, dim: int, share: Share) -> jax.Array:
    """An array with a dimension as it is stored in blocks.

    Args:
      value: array of shape ``[..., n, ...]``; the blocks divide n.
      dim: the dimension.
      share: the blocks.

    Returns:
      Array of shape ``[..., share.room(n), ...]``, of the same dtype.

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
    room = value.shape[dim] // len(share.counts)
    ends = [i * room + have * (room // share.max_blocks) for i, have in enumerate(share.counts)]
    pieces = [lax.slice_in_dim(value, i * room, end, axis=dim) for i, end in enumerate(ends)]
    return lax.concatenate(pieces, dim)


@functools.lru_cache(maxsize=64)
def restore_program(
    dims: tuple[int | None, ...], share: Share, sharding: NamedSharding
) -> Callable[[Sequence[Any]], list[Any]]:
    """A program that undoes `store` for several arrays, each along its dimension, or along none.

    It is one for all of them: compilers give the exchanges of a program an order, and those of several programs that
    run at a time none, so that devices may wait for each other in different ones.
    """

    def run(values: Sequence[Any]) -> list[Any]:
        return [x if dim is None else restore(x, dim, share) for x, dim in zip(values, dims, strict=True)]

    return jax.jit(run, out_shardings=sharding)


def check_divides(share: Share, shape: Sequence[int], dim: int, what: str) -> None:
    """Checks that blocks divide a dimension.

    Raises:
      PartitionError: they do not, or there is no such dimension.
    """
    if not 0 <= dim < len(shape) or shape[dim] % share.blocks:
        possible = [b for b in range(2, 65) if 0 <= dim < len(shape) and shape[dim] % b == 0]
        raise PartitionError(
            layout_message(
                f"{what} of shape {tuple(shape)} has no dimension {dim} of {share.blocks} equal blocks.",
                facts=[f"counts {share.counts}, along {', '.join(map(repr, share.axes))}"],
                remedies=[f"take as many blocks as divide it: {', '.join(map(str, possible))}"]
                if possible
                else ["name another dimension"],
            )
        )
