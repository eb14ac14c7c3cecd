"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

import importlib
from typing import Any

from vnode import operators
from vnode.errors import (
    BatchError,
    CouplingError,
    MemoryLimitError,
    PlacementError,
    ProfileError,
    UnsupportedPrimitiveError,
    VnodeError,
)
from vnode.placement.placement import Placement
from vnode.plan.balance.balance import Balance, balance
from vnode.plan.balance.measure import profile
from vnode.plan.balance.profiles import Measurement, Profile, Profiles
from vnode.plan.check import Check, check
from vnode.plan.compare import explain
from vnode.plan.nodes.auto import AutoStep
from vnode.plan.nodes.fit import Fit, fit
from vnode.step.virtual import VirtualStep
from vnode.transform import virtualize

__all__ = [
    "AutoStep",
    "Balance",
    "BatchError",
    "Check",
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
    "check",
    "explain",
    "fit",
    "operators",
    "profile",
    "virtualize",
]


LAZY = {
    "data": "vnode.data",
    "elastic": "vnode.elastic",
    "grain": "vnode.data.grain",
    "nnx": "vnode.integrations.nnx",
}
"""Modules that are imported when they are asked for: the core needs neither them nor the libraries behind them."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(LAZY[name])
