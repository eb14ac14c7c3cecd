"""A step on virtual nodes: how it is called, compiled and run."""

from vnode.step.virtual import VirtualStep

__all__ = ["VirtualStep"]
