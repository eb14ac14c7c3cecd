"""A step and a machine -> a plan of how the step is divided, and a prediction of its time and memory."""

from vnode.partition.accept import Acceptance, accept
from vnode.partition.cost.cache import Cache
from vnode.partition.cost.measured_times import Measured
from vnode.partition.cost.program_memory import Memory
from vnode.partition.cost.split_cost import ProgramCost, program_cost
from vnode.partition.cost.time_sources import Roofline, Times
from vnode.partition.machine import Axis, Device, Kind, Link, Machine, MachineMesh, Switch, Torus
from vnode.partition.plan.plan import Plan
from vnode.partition.plan.predict import Figures
from vnode.partition.plan.search import search
from vnode.partition.uneven_shares.state_blocks import uneven

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
