"""What a program takes whose layouts are known: the sum of its equations and moves, one after another.

Knows flows and a cost model. Must not know problems, nor how layouts were found.
"""

from __future__ import annotations

import itertools

from jax.extend.core import Literal, Var

from vnode.analysis.program import Atom
from vnode.partition.search.costs import CostModel
from vnode.spmd.choice import reached
from vnode.spmd.flow import Flow
from vnode.spmd.layout import Layout


def seconds_of(flow: Flow, model: CostModel) -> float:
    """Seconds of one evaluation on one device of a mesh.

    Args:
      flow: layouts through a program; a value stays in each layout into which it was brought, and is brought into
        another from the one from which that takes least, as `vnode.spmd.run` does.
      model: what equations and moves take.
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
            want = want.complete
        starts = [start for start in held[atom] if set(want.partial) <= set(start.partial)]
        seconds = min(model.move_time(start, want, shape, dtype) for start in starts)
        held[atom][want] = None
        return seconds

    for step in flow.steps:
        if step.anyhow:
            continue
        for atom, want in zip(step.eqn.invars, step.operands, strict=True):
            total += read(atom, want)
        if step.choice is not None:
            total += model.compute_time(step.eqn, step.choice)
            several = zip(step.choice.results, reached(step.eqn, step.choice), step.results, strict=True)
            for var, stages in zip(step.eqn.outvars, several, strict=True):
                for before, after in itertools.pairwise(stages):
                    if before != after:
                        total += model.move_time(before, after, var.aval.shape, var.aval.dtype)
        if step.region is not None:
            total += step.region.times * sum(seconds_of(body, model) for body in step.bodies)
        for var, layout in zip(step.eqn.outvars, step.results, strict=True):
            held[var] = {layout: None}
    for atom, want in zip(flow.program.outputs, flow.outputs, strict=True):
        total += read(atom, want)
    return total
