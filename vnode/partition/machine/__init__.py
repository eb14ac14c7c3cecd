"""Kinds of devices and their links -> a machine, which gives the times of computation and of moving bytes."""

from vnode.partition.machine.device_kind import Kind
from vnode.partition.machine.machine import Device, Machine
from vnode.partition.machine.machine_builders import Link
from vnode.partition.machine.machine_mesh import MachineMesh
from vnode.partition.machine.networks import Switch
from vnode.partition.machine.torus import Axis, Torus

__all__ = ["Axis", "Device", "Kind", "Link", "Machine", "MachineMesh", "Switch", "Torus"]
