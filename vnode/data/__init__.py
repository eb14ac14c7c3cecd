"""The examples of step t, by t and the seed only."""

from vnode.data.batch_order import Order
from vnode.data.batches import Batches
from vnode.data.examples import Arrays, Examples, Records
from vnode.data.loading import local_batch
from vnode.placement.sharded import ShardedBatch

__all__ = ["Arrays", "Batches", "Examples", "Order", "Records", "ShardedBatch", "local_batch"]


def __dir__() -> list[str]:
    return sorted(__all__)
