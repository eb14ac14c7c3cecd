"""A machine and programs -> its compiler's figures for them, for many programs within a time limit."""

from vnode.partition.compiler.pool import CompilePool
from vnode.partition.compiler.stats import CompiledStats
from vnode.partition.compiler.target import CompileTarget

__all__ = ["CompilePool", "CompileTarget", "CompiledStats"]
