"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

from vnode import operators
from vnode.errors import BatchError, CouplingError, PlacementError, UnsupportedPrimitiveError, VnodeError
from vnode.placement import Placement
from vnode.transform import VirtualStep, virtualize

__all__ = [
    "BatchError",
    "CouplingError",
    "Placement",
    "PlacementError",
    "UnsupportedPrimitiveError",
    "VirtualStep",
    "VnodeError",
    "operators",
    "virtualize",
]
