"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

import importlib as _importlib
import typing as _typing

from vnode import operators
from vnode.errors import (
    BatchError,
    CouplingError,
    MachineError,
    MemoryLimitError,
    PartitionError,
    PlacementError,
    ProcessError,
    ProfileError,
    SearchError,
    TaskGraphError,
    UnsupportedPrimitiveError,
    VnodeError,
    VnodeWarning,
)
from vnode.placement.placement import Placement
from vnode.placement.uneven import UnevenSpec
from vnode.step.virtual import VirtualStep
from vnode.transform import virtualize

__all__ = [
    "AutoStep",
    "Balance",
    "BatchError",
    "Check",
    "CouplingError",
    "Fit",
    "MachineError",
    "Measurement",
    "MemoryLimitError",
    "PartitionError",
    "Placement",
    "PlacementError",
    "ProcessError",
    "Profile",
    "ProfileError",
    "Profiles",
    "SearchError",
    "TaskGraphError",
    "UnevenSpec",
    "UnsupportedPrimitiveError",
    "VirtualStep",
    "VnodeError",
    "VnodeWarning",
    "balance",
    "check",
    "explain",
    "fit",
    "operators",
    "profile",
    "virtualize",
]

if _typing.TYPE_CHECKING:
    from vnode import data as data
    from vnode import elastic as elastic
    from vnode import partition as partition
    from vnode.data import grain as grain
    from vnode.integrations import nnx as nnx
    from vnode.plan.balance.balance import Balance, balance
    from vnode.plan.balance.measure import profile
    from vnode.plan.balance.profiles import Measurement, Profile, Profiles
    from vnode.plan.check.answer import Check
    from vnode.plan.check.check import check
    from vnode.plan.compare import explain
    from vnode.plan.nodes.auto import AutoStep
    from vnode.plan.nodes.fit import Fit, fit

    __version__: str

_LAZY = {
    "data": "vnode.data",
    "elastic": "vnode.elastic",
    "grain": "vnode.data.grain",
    "nnx": "vnode.integrations.nnx",
    "partition": "vnode.partition",
}
"""Modules that are imported when they are asked for: the core needs neither them nor the libraries behind them."""

_HOMES = {
    "AutoStep": "vnode.plan.nodes.auto",
    "Balance": "vnode.plan.balance.balance",
    "Check": "vnode.plan.check.answer",
    "Fit": "vnode.plan.nodes.fit",
    "Measurement": "vnode.plan.balance.profiles",
    "Profile": "vnode.plan.balance.profiles",
    "Profiles": "vnode.plan.balance.profiles",
    "balance": "vnode.plan.balance.balance",
    "check": "vnode.plan.check.check",
    "explain": "vnode.plan.compare",
    "fit": "vnode.plan.nodes.fit",
    "profile": "vnode.plan.balance.measure",
}
"""Where names are that not every step needs; imported when they are asked for."""


if not _typing.TYPE_CHECKING:  # or type checkers would believe that any name is there

    def __getattr__(name: str) -> _typing.Any:
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("vnode")
            except metadata.PackageNotFoundError:  # a source tree that is not installed
                return "0+unknown"
        if name in _HOMES:
            return getattr(_importlib.import_module(_HOMES[name]), name)
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _importlib.import_module(_LAZY[name])


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY, "__version__"])
