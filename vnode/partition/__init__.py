"""Splitting a step over a machine: the machine, the search for a plan, and what a plan would take."""

from vnode.partition.accept import Acceptance, accept
from vnode.partition.cost import Cache, Compiler, Measured, Memory, ProgramCost, Roofline, Times, program_cost
from vnode.partition.machine import Axis, Device, Kind, Link, Machine, MachineMesh, Pairs, Switch, Torus
from vnode.partition.plan import Figures, Plan, search

__all__ = [
    "Acceptance",
    "Axis",
    "Cache",
    "Compiler",
    "Device",
    "Figures",
    "Kind",
    "Link",
    "Machine",
    "MachineMesh",
    "Measured",
    "Memory",
    "Pairs",
    "Plan",
    "ProgramCost",
    "Roofline",
    "Switch",
    "Times",
    "Torus",
    "accept",
    "program_cost",
    "search",
]
