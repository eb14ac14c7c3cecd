"""A batch in unequal shares: the devices of a placement hold different numbers of examples.

Knows arrays, nodes and placements. Must not know steps, nor where examples come from.

jax has no arrays with unequal shards. So every device has as many *slots* as the fullest one has nodes: its own nodes
come first, and the rest is never read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vnode.placement.device_cache import device_cache
from vnode.placement.placement import Placement


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedBatch:
    """A batched array laid out for a placement: a step on that placement takes it as it is, others gather it first.

    `vnode.data.Batches.load` makes them. In a pytree it is an inner node with children `parts`.

    Args:
      parts: for each group of the placement with nodes ``[slots, node size, ...]``, sharded over slots. Missing
        examples in the last node are copies of the last example.
      size: the number of examples, B.
      placement: the placement whose devices hold them.

    Example:
      >>> import jax
      >>> import numpy as np
      >>> import vnode
      >>> batches = vnode.data.Batches(np.arange(10), batch_size=5, shuffle=False)
      >>> batch = batches.load(0, vnode.Placement(2, jax.devices()[:1]))
      >>> batch.parts[0].tolist(), batch.whole().tolist()
      ([[0, 1, 2], [3, 4, 4]], [0, 1, 2, 3, 4])
    """

    parts: tuple[Any, ...]
    size: int
    placement: Placement

    @property
    def shape(self) -> tuple[int, ...]:
        """The batch's shape, ``(B, ...)``."""
        return (self.size, *self.parts[0].shape[2:])

    @property
    def dtype(self) -> Any:
        """The examples' dtype."""
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        """The batch's number of dimensions."""
        return len(self.shape)

    def whole(self) -> jax.Array:
        """The batch as one array, replicated on the devices of the first group."""
        groups, parts = self.placement.working, self.parts
        if len(groups) > 1:
            parts = jax.device_put(list(parts), groups[0].sharding())
        return order_program(groups, self.size)(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.whole(), dtype)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"ShardedBatch({np.dtype(self.dtype)}{list(self.shape)} on {self.placement})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[int, Placement]]:
        """For jax."""
        return self.parts, (self.size, self.placement)

    @classmethod
    def tree_unflatten(cls, rest: tuple[int, Placement], parts: tuple[Any, ...]) -> ShardedBatch:
        """For jax."""
        return cls(tuple(parts), *rest)


@device_cache(maxsize=128)
def order_program(groups: tuple[Placement, ...], size: int) -> Callable[[tuple[Any, ...]], jax.Array]:
    """A program that joins the groups' parts on the devices of the first group."""
    here = groups[0].sharding()  # replicated, or the partitioner would add zeros to picked elements, also to -0

    def run(parts: tuple[Any, ...]) -> jax.Array:
        held = jax.lax.with_sharding_constraint(parts, here)
        nodes = jnp.concatenate([part[np.array(group.slots)] for part, group in zip(held, groups, strict=True)])
        return nodes.reshape(nodes.shape[0] * nodes.shape[1], *nodes.shape[2:])[:size]

    return jax.jit(run)


def is_sharded_batch(leaf: Any) -> bool:
    """Whether a leaf is a batch in shares; for ``is_leaf``."""
    return isinstance(leaf, ShardedBatch)


def whole_batches(tree: Any) -> Any:
    """Gathers batches in shares in a tree to one array each."""
    return jax.tree.map(lambda leaf: leaf.whole() if is_sharded_batch(leaf) else leaf, tree, is_leaf=is_sharded_batch)


def node_size(placement: Placement, size: int) -> int:
    """The number of examples of a node in a batch of `size`."""
    return -(-size // placement.virtual_nodes)


def in_equal_shards(placement: Placement, size: int) -> bool:
    """Whether a placement stores a batch of `size` as an array with equal shards; otherwise it is a `ShardedBatch`."""
    return placement.even and size % placement.virtual_nodes == 0 and len(placement.groups) == 1


def abstract_batch(shape: tuple[int, ...], dtype: Any, placement: Placement) -> Any:
    """The abstract value of a batch that `vnode.data.Batches.load` gives on a placement.

    Args:
      shape: the batch's shape, ``(B, ...)``.
      dtype: the examples' dtype.
      placement: the placement.

    Returns:
      A `jax.ShapeDtypeStruct`, or a `ShardedBatch` of such.
    """
    size, n = shape[0], node_size(placement, shape[0])
    if in_equal_shards(placement, size):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(placement.axis))
    parts = [
        jax.ShapeDtypeStruct((group.size * group.waves, n, *shape[1:]), dtype, sharding=group.sharding(group.axis))
        for group in placement.working
    ]
    return ShardedBatch(tuple(parts), size, placement)
