"""Nodes and devices -> the assignment of nodes to devices, and the arrays on them."""

from vnode.placement.node_layout import Layout
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch

__all__ = ["Layout", "Placement", "ShardedBatch"]
