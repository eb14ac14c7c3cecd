"""A node's program -> its independent branches, and the index of a mesh axis at which each runs.

Knows programs, the time of one equation, and groups. Must not know meshes, layouts, nor the cost of a choice.

Branches are found in the graph (`vnode.analysis.parallel_branches`). They are assigned to the least loaded index, the
longest first (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969). A branch that reads
results of earlier branches goes to the index with most of their bytes, so a backward pass follows its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.parallel_branches import Branches, parallel_branches
from vnode.analysis.program import Program
from vnode.operators.control_flow import region_of
from vnode.operators.cost import nbytes
from vnode.partition.searches.flattened_program import has_own_strategy
from vnode.spmd.branch_groups import Group


def branch_stages(program: Program, seconds: Callable[[JaxprEqn], float]) -> list[Branches]:
    """The stages of a program that have branches side by side.

    Args:
      program: a node's program.
      seconds: the time of an equation.

    Returns:
      For each stage its branches, as numbers of equations. A stage whose branches make random keys for others is left
      out, because keys cannot be summed.
    """
    producer = {var: number for number, eqn in enumerate(program.equations) for var in eqn.outvars}
    reads = [{producer[a] for a in eqn.invars if isinstance(a, Var) and a in producer} for eqn in program.equations]
    kernel = [region_of(eqn) is not None or has_own_strategy(program.describe(eqn)) for eqn in program.equations]
    weights = [seconds(eqn) if heavy else 0.0 for eqn, heavy in zip(program.equations, kernel, strict=True)]
    return [stage for stage in parallel_branches(reads, weights) if not makes_keys(program, stage)]


def makes_keys(program: Program, stage: Branches) -> bool:
    """Whether a branch makes random keys."""
    made = (var for branch in stage for number in branch for var in program.equations[number].outvars)
    return any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in made)


def groups_along(
    program: Program, stages: Sequence[Branches], seconds: Callable[[JaxprEqn], float], axis: str, size: int
) -> tuple[Group, ...]:
    """Stages as groups along an axis.

    Args:
      program: a node's program.
      stages: its stages, in order.
      seconds: the time of an equation.
      axis: name of the mesh axis.
      size: size of the axis.

    Returns:
      A group for each stage.
    """
    there: dict[Var, int] = {}
    found = []
    for stage in stages:
        takes = [sum(seconds(program.equations[number]) for number in branch) for branch in stage]
        near = [branch_bytes_at_indices(program, branch, there, size) for branch in stage]
        loads = [0.0] * size
        given: list[set[int]] = [set() for _ in range(size)]
        for k in sorted(range(len(stage)), key=lambda k: (not any(near[k]), -takes[k], k)):
            index = near[k].index(max(near[k])) if any(near[k]) else loads.index(min(loads))
            loads[index] += takes[k]
            given[index] |= stage[k]
            there.update((var, index) for number in stage[k] for var in program.equations[number].outvars)
        while not given[-1]:
            given.pop()
        found.append(Group(axis, tuple(map(frozenset, given))))
    return tuple(found)


def branch_bytes_at_indices(program: Program, branch: frozenset[int], there: Mapping[Var, int], size: int) -> list[int]:
    """The bytes that a branch reads, by the index that holds them."""
    read = {a for number in branch for a in program.equations[number].invars if isinstance(a, Var)}
    bytes_ = [0] * size
    for var in read:
        if var in there:
            bytes_[there[var]] += nbytes(var.aval)
    return bytes_
