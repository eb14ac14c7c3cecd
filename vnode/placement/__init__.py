"""Which virtual nodes live on which device, and how arrays get there."""

from vnode.placement.node_layout import Layout
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch

__all__ = ["Layout", "Placement", "ShardedBatch"]
