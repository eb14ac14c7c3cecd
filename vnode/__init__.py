"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

import importlib
from typing import Any

from vnode import operators
from vnode.auto import AutoStep
from vnode.compare import explain
from vnode.errors import (
    BatchError,
    CouplingError,
    MemoryLimitError,
    PlacementError,
    ProfileError,
    UnsupportedPrimitiveError,
    VnodeError,
)
from vnode.fitting import Fit, fit
from vnode.placement import Placement
from vnode.plan.balance import Balance, balance
from vnode.plan.measure import profile
from vnode.plan.profiles import Measurement, Profile, Profiles
from vnode.step import VirtualStep
from vnode.transform import virtualize

__all__ = [
    "AutoStep",
    "Balance",
    "BatchError",
    "CouplingError",
    "Fit",
    "Measurement",
    "MemoryLimitError",
    "Placement",
    "PlacementError",
    "Profile",
    "ProfileError",
    "Profiles",
    "UnsupportedPrimitiveError",
    "VirtualStep",
    "VnodeError",
    "balance",
    "explain",
    "fit",
    "operators",
    "profile",
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
