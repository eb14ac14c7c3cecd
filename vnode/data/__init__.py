"""The examples of step t, by t and the seed only."""

from vnode.data.batches import Arrays, Batches, Examples, Order, Records, local_batch
from vnode.placement.sharded import ShardedBatch

__all__ = ["Arrays", "Batches", "Examples", "Order", "Records", "ShardedBatch", "local_batch"]
