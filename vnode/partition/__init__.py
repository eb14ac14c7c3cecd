"""A step and a machine -> a plan of how the step is divided, and a prediction of its time and memory."""

from vnode.partition.accept import Acceptance, accept
from vnode.partition.cost import Cache, Measured, Memory, ProgramCost, Roofline, Times, program_cost
from vnode.partition.machine import Axis, Device, Kind, Link, Machine, MachineMesh, Switch, Torus
from vnode.partition.plan import Figures, Plan, search
from vnode.partition.uneven_shares.uneven_leaves import uneven

__all__ = [
    "Acceptance",
    "Axis",
    "Cache",
    "Device",
    "Figures",
    "Kind",
    "Link",
    "Machine",
    "MachineMesh",
    "Measured",
    "Memory",
    "Plan",
    "ProgramCost",
    "Roofline",
    "Switch",
    "Times",
    "Torus",
    "accept",
    "program_cost",
    "search",
    "uneven",
]


def __dir__() -> list[str]:
    return sorted(__all__)
