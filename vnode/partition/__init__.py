"""Splitting a step over a machine: the machine, and what a plan would take on it."""

from vnode.partition.accept import Acceptance, accept
from vnode.partition.cost import Cache, Compiler, Measured, Memory, ProgramCost, Roofline, Times, program_cost
from vnode.partition.machine import Axis, Device, Kind, Link, Machine, MachineMesh, Pairs, Switch, Torus

__all__ = [
    "Acceptance",
    "Axis",
    "Cache",
    "Compiler",
    "Device",
    "Kind",
    "Link",
    "Machine",
    "MachineMesh",
    "Measured",
    "Memory",
    "Pairs",
    "ProgramCost",
    "Roofline",
    "Switch",
    "Times",
    "Torus",
    "accept",
    "program_cost",
]
