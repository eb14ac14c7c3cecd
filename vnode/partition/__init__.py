"""Splitting a step over a machine: the machine, and what a plan would take on it."""

from vnode.partition.machine import Axis, Device, Kind, Link, Machine, MachineMesh, Pairs, Switch, Torus

__all__ = ["Axis", "Device", "Kind", "Link", "Machine", "MachineMesh", "Pairs", "Switch", "Torus"]
