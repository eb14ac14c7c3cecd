"""Write the training step once, for one big device and the whole batch; run it on whatever devices there are."""

import importlib as _importlib
import typing as _typing

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
    from vnode import cluster as cluster
    from vnode import data as data
    from vnode import elastic as elastic
    from vnode import operators as operators
    from vnode import partition as partition
    from vnode.data import grain as grain
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
    from vnode.integrations import nnx as nnx
    from vnode.placement.placement import Placement
    from vnode.placement.uneven_dimension import UnevenSpec
    from vnode.plan.balance.balance import Balance, balance
    from vnode.plan.balance.measure_step import profile
    from vnode.plan.balance.profiles import Measurement, Profile, Profiles
    from vnode.plan.check.answer import Check
    from vnode.plan.check.check import check
    from vnode.plan.explain_placements import explain
    from vnode.plan.nodes.auto_step import AutoStep
    from vnode.plan.nodes.fit import Fit, fit
    from vnode.step.virtual import VirtualStep
    from vnode.transform import virtualize

    __version__: str

_LAZY = {
    "cluster": "vnode.cluster",
    "data": "vnode.data",
    "elastic": "vnode.elastic",
    "grain": "vnode.data.grain",
    "nnx": "vnode.integrations.nnx",
    "operators": "vnode.operators",
    "partition": "vnode.partition",
}
"""Modules that are imported when they are first asked for: most steps need neither them nor their libraries."""

_HOMES = {
    "AutoStep": "vnode.plan.nodes.auto_step",
    "Balance": "vnode.plan.balance.balance",
    "BatchError": "vnode.errors",
    "Check": "vnode.plan.check.answer",
    "CouplingError": "vnode.errors",
    "Fit": "vnode.plan.nodes.fit",
    "MachineError": "vnode.errors",
    "Measurement": "vnode.plan.balance.profiles",
    "MemoryLimitError": "vnode.errors",
    "PartitionError": "vnode.errors",
    "Placement": "vnode.placement.placement",
    "PlacementError": "vnode.errors",
    "ProcessError": "vnode.errors",
    "Profile": "vnode.plan.balance.profiles",
    "ProfileError": "vnode.errors",
    "Profiles": "vnode.plan.balance.profiles",
    "SearchError": "vnode.errors",
    "TaskGraphError": "vnode.errors",
    "UnevenSpec": "vnode.placement.uneven_dimension",
    "UnsupportedPrimitiveError": "vnode.errors",
    "VirtualStep": "vnode.step.virtual",
    "VnodeError": "vnode.errors",
    "VnodeWarning": "vnode.errors",
    "balance": "vnode.plan.balance.balance",
    "check": "vnode.plan.check.check",
    "explain": "vnode.plan.explain_placements",
    "fit": "vnode.plan.nodes.fit",
    "profile": "vnode.plan.balance.measure_step",
    "virtualize": "vnode.transform",
}
"""Where each public name is. It is imported when it is first asked for: the command line runs without jax."""


if not _typing.TYPE_CHECKING:  # or type checkers would believe that any name is there

    def __getattr__(name: str) -> _typing.Any:
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("vnode")
            except metadata.PackageNotFoundError:  # a source tree that is not installed
                return "0+unknown"
        if name in _HOMES:
            found = getattr(_importlib.import_module(_HOMES[name]), name)
            return globals().setdefault(name, found)
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _importlib.import_module(_LAZY[name])


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, "__version__"})
