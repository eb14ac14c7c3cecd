"""Batch on the host -> batch on a placement's devices: each receives its nodes' examples; only those are read.

Knows placements, and a batch as a function from row numbers to host arrays. Must not know data sets, nor the order of
examples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from vnode.data.forms import host_array
from vnode.data.source import check_rows
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch, in_equal_shards, node_size
from vnode.placement.world import own_index


def load_batch(size: int, placement: Placement, take: Callable[[np.ndarray], Any]) -> Any:
    """Loads a batch on a placement's devices.

    Args:
      size: the batch size, B.
      placement: the target.
      take: returns rows of the batch by number, a pytree of host arrays. It is called for the rows of this process's
        nodes; and for no rows if there are no such nodes, to learn the arrays' types.

    Returns:
      A pytree of global arrays if the shares are equal, otherwise of `ShardedBatch`.
    """
    if in_equal_shards(placement, size):
        sharding = placement.sharding(placement.axis)
        if placement.size == 1 and sharding.is_fully_addressable:
            return jax.device_put(take(np.arange(size)), sharding)  # a shortcut with the same result as below
        leaves, treedef = spread_rows(sharding, size, lambda start, stop: take(np.arange(start, stop)))
        return jax.tree.unflatten(treedef, leaves)
    n = node_size(placement, size)

    def nodes(group: Placement, slot: int, stop: int) -> Any:
        """The nodes of the device whose slots begin with `slot`; None if it has none."""
        device = slot // group.waves
        if slot == stop:
            return jax.tree.map(lambda leaf: np.zeros((0, n, *np.shape(leaf)[1:]), leaf.dtype), take(np.arange(0)))
        count = group.counts[device]
        if not count:
            return None
        mine = np.minimum(np.arange(count * n) + group.starts[device] * n, size - 1)

        def divided(leaf: Any) -> np.ndarray:
            room = np.zeros((group.waves, n, *np.shape(leaf)[1:]), np.asarray(leaf).dtype)
            room[:count] = np.reshape(leaf, (count, *room.shape[1:]))
            return room

        return jax.tree.map(divided, take(mine))

    made = [
        spread_rows(group.sharding(group.axis), group.size * group.waves, functools.partial(nodes, group))
        for group in placement.working
    ]
    parts = zip(*(leaves for leaves, _ in made), strict=True)
    return jax.tree.unflatten(made[0][1], [ShardedBatch(each, size, placement) for each in parts])


def local_batch(local: Any, batch_size: int, placement: Placement) -> Any:
    """Loads a batch of which this process has only its own rows, on a placement's devices.

    Each process calls it with the rows that `vnode.Placement.local_examples` names; together they are the batch. No
    example is sent between processes.

    Args:
      local: a pytree of host arrays ``[n, ...]``, one row for each of ``placement.local_examples(batch_size)``.
      batch_size: examples of the whole batch, B.
      placement: where the step's nodes live, ``step.placement``.

    Returns:
      A pytree for a step on this placement: of global arrays ``[B, ...]`` if the shares are equal, otherwise of
      `ShardedBatch`.

    Raises:
      BatchError: the number of rows is wrong, or an array cannot be on devices.

    Example:
      >>> import jax, numpy as np, vnode
      >>> placement = vnode.Placement(4, jax.devices()[:1])
      >>> images = np.arange(6.0)
      >>> vnode.data.local_batch(images[placement.local_examples(6)], 6, placement).shape
      (6,)
    """
    wanted = placement.local_examples(batch_size)
    check_rows(
        local,
        len(wanted),
        "the batch",
        f"process {own_index(placement.devices[0])} must give {len(wanted)} of the batch's {batch_size} rows.",
        "give the rows placement.local_examples(batch_size), in this order",
    )
    local = jax.tree_util.tree_map_with_path(lambda path, leaf: host_array(path, leaf, "the batch"), local)
    return load_batch(
        batch_size,
        placement,
        lambda positions: jax.tree.map(lambda leaf: leaf[np.searchsorted(wanted, positions)], local),
    )


def spread_rows(
    sharding: NamedSharding, length: int, rows: Callable[[int, int], Any]
) -> tuple[Sequence[jax.Array], Any]:
    """Makes sharded arrays by giving each device its rows.

    Args:
      sharding: the sharding of dimension 0.
      length: the size of dimension 0.
      rows: returns a range of rows, a pytree of host arrays; None for rows that are not read. For an empty range, it
        shows their dtypes and further dimensions.

    Returns:
      The global arrays, and the structure of the pytree.
    """
    indices = sharding.addressable_devices_indices_map((length,))
    shares = {device: index[0].indices(length)[:2] for device, index in indices.items() if index is not None}
    parts = {share: rows(*share) for share in dict.fromkeys(shares.values())}
    given = next((part for part in parts.values() if part is not None), None)
    if given is None:
        empty = rows(0, 0)
        start, stop = next(iter(parts), (0, 0))
        given = jax.tree.map(lambda leaf: np.zeros((stop - start, *np.shape(leaf)[1:]), leaf.dtype), empty)
    parts = {share: jax.tree.map(np.zeros_like, given) if part is None else part for share, part in parts.items()}
    leaves = {share: jax.tree.leaves(part) for share, part in parts.items()}
    like, treedef = jax.tree.flatten(given)
    pieces = jax.device_put(
        [leaves[share][i] for i in range(len(like)) for share in shares.values()], list(shares) * len(like)
    )
    made = [
        jax.make_array_from_single_device_arrays(
            (length, *np.shape(leaf)[1:]),
            sharding,
            pieces[i * len(shares) : (i + 1) * len(shares)],
            dtype=jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype),
        )
        for i, leaf in enumerate(like)
    ]
    return made, treedef
