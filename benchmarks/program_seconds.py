"""A program with layouts -> its seconds: the sum over its equations and moves, without overlap.

Knows flows and a cost model. Must not know problems, nor how layouts were found.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Literal, Var

from vnode.analysis.program import Atom
from vnode.partition.searches.search_costs import Estimate
from vnode.spmd.layout import Layout
from vnode.spmd.sharding_flow import Flow, Step


def seconds_of(flow: Flow, model: Estimate) -> float:
    """Seconds of one evaluation on one device of a mesh.

    Args:
      flow: the layouts of a program's values. A value stays in each layout that it was brought into. It is brought into
        another layout from the one that makes the move cheapest, as `vnode.spmd.device_program` does.
      model: the cost of equations and moves.
    """
    held: dict[Var, dict[Layout, None]] = {
        var: {x: None} for var, x in zip(flow.program.inputs, flow.inputs, strict=True)
    }
    total = 0.0

    def read(atom: Atom, want: Layout) -> float:
        if isinstance(atom, Literal) or atom not in held or want in held[atom]:
            return 0.0
        shape, dtype = atom.aval.shape, atom.aval.dtype
        if not any(set(want.partial) <= set(start.partial) for start in held[atom]):
            want = want.without_partial
        starts = [start for start in held[atom] if set(want.partial) <= set(start.partial)]
        seconds = min(model.move_time(start, want, shape, dtype) for start in starts)
        held[atom][want] = None
        return seconds

    for step in flow.steps:
        if step.materializable:
            continue
        for atom, want in zip(step.eqn.invars, step.operands, strict=True):
            total += read(atom, want)
        if step.choice is not None:
            total += model.compute_time(step.eqn, step.choice)
            total += reshard_seconds(step, step.choice.results, step.made, model)
        if step.region is not None:
            total += step.region.run_count * sum(seconds_of(body, model) for body in step.bodies)
        total += reshard_seconds(step, step.made, step.results, model)
        for var, several in zip(step.eqn.outvars, zip(step.made, step.results, strict=True), strict=True):
            held[var] = dict.fromkeys(several)
    for atom, want in zip(flow.program.outputs, flow.outputs, strict=True):
        total += read(atom, want)
    return total


def reshard_seconds(step: Step, before: Sequence[Layout], after: Sequence[Layout], model: Estimate) -> float:
    """Seconds of moving the results of a step from their layouts to others."""
    return sum(
        model.move_time(a, b, var.aval.shape, var.aval.dtype)
        for var, a, b in zip(step.eqn.outvars, before, after, strict=True)
        if a != b
    )
