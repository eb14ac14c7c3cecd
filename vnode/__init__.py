"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

from typing import Any

from vnode import operators
from vnode.compare import explain
from vnode.errors import (
    BatchError,
    CouplingError,
    PlacementError,
    ProfileError,
    UnsupportedPrimitiveError,
    VnodeError,
)
from vnode.placement import Placement
from vnode.plan.balance import Balance, balance
from vnode.plan.measure import profile
from vnode.plan.profiles import Measurement, Profile, Profiles
from vnode.transform import VirtualStep, virtualize

__all__ = [
    "Balance",
    "BatchError",
    "CouplingError",
    "Measurement",
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
    "operators",
    "profile",
    "virtualize",
]


def __getattr__(name: str) -> Any:
    """`vnode.nnx` is imported when it is asked for: the core does not need flax."""
    if name != "nnx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vnode.integrations import nnx

    return nnx
