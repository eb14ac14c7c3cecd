"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

from typing import Any

from vnode import operators
from vnode.auto import AutoStep
from vnode.errors import (
    BatchError,
    CouplingError,
    MemoryLimitError,
    PlacementError,
    UnsupportedPrimitiveError,
    VnodeError,
)
from vnode.fitting import Fit, fit
from vnode.placement import Placement
from vnode.transform import VirtualStep, virtualize

__all__ = [
    "AutoStep",
    "BatchError",
    "CouplingError",
    "Fit",
    "MemoryLimitError",
    "Placement",
    "PlacementError",
    "UnsupportedPrimitiveError",
    "VirtualStep",
    "VnodeError",
    "fit",
    "operators",
    "virtualize",
]


def __getattr__(name: str) -> Any:
    """`vnode.nnx` is imported when it is asked for: the core does not need flax."""
    if name != "nnx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vnode.integrations import nnx

    return nnx
