"""Asks a compiler about programs: which compiler serves a machine, what it says, many programs within a time."""

from vnode.partition.compiler.pool import CompilePool
from vnode.partition.compiler.stats import CompiledStats
from vnode.partition.compiler.target import CompileTarget

__all__ = ["CompilePool", "CompileTarget", "CompiledStats"]
