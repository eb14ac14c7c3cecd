"""A task graph -> its timeline."""

from vnode.partition.simulator.graph import SECOND, TaskGraph, picoseconds
from vnode.partition.simulator.simulate import simulate
from vnode.partition.simulator.timeline import Timeline

__all__ = ["SECOND", "TaskGraph", "Timeline", "picoseconds", "simulate"]
