"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

import importlib
from typing import Any

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


LAZY = {
    "data": "vnode.data",
    "elastic": "vnode.elastic",
    "grain": "vnode.integrations.grain",
    "nnx": "vnode.integrations.nnx",
}
"""Modules that are imported when they are asked for: the core needs neither them nor the libraries behind them."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(LAZY[name])
