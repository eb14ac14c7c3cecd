"""A task graph -> its timeline; a change of the graph -> the changed timeline, in less time."""

from vnode.partition.simulator.delta import resimulate
from vnode.partition.simulator.graph import SECOND, TaskGraph, picoseconds
from vnode.partition.simulator.graph_builder import Builder, Change, Edit
from vnode.partition.simulator.simulate import simulate
from vnode.partition.simulator.timeline import Memory, Timeline

__all__ = [
    "SECOND",
    "Builder",
    "Change",
    "Edit",
    "Memory",
    "TaskGraph",
    "Timeline",
    "picoseconds",
    "resimulate",
    "simulate",
]
