"""Which values are needed in parts only, so that they are computed in parts: layouts, followed backward once.

Knows flows. Must not know how layouts flow forward, nor how a program is carried out.

Layouts flow forward, so what depends on nothing that is divided is computed whole on every device, and cut where it
meets something that is. Where all who read it cut it alike, it is computed so, and so is what it is made of.
"""

from __future__ import annotations

from jax.extend.core import Literal, Var

from vnode.operators import OperatorDescription, Prefix
from vnode.spmd.choice import Given, carried_out, ways_to
from vnode.spmd.flow import Flow
from vnode.spmd.layout import Axes, Layout, replicated
from vnode.spmd.route import route


def in_parts(description: OperatorDescription) -> bool:
    """Whether parts of a result are computed of whole operands without any exchange."""
    return not any(isinstance(factor.split, Prefix) for factor in description.factors)


def wished(flow: Flow, axes: Axes) -> dict[Var, Layout]:
    """How values shall lie that every device has whole, and that are read in parts only.

    Args:
      flow: layouts through a program, followed forward.
      axes: of the mesh.

    Returns:
      For some variables the layout in which they are read.
    """
    reads: dict[Var, set[Layout]] = {}
    wishes: dict[Var, Layout] = {}

    def read(atom: object, layout: Layout) -> None:
        if isinstance(atom, Var):
            reads.setdefault(atom, set()).add(layout)

    for atom, layout in zip(flow.program.outputs, flow.outputs, strict=True):
        read(atom, layout)
    for step in reversed(flow.steps):
        operands = step.operands
        description = flow.program.describe(step.eqn) if step.region is None else None
        if description is not None and len(step.eqn.outvars) == 1 and not step.anyhow and in_parts(description):
            (var,), (layout,) = step.eqn.outvars, step.results
            wanted = reads.get(var, set())
            if len(wanted) == 1 and description.layout is None:
                (target,) = wanted
                moves = route(layout, target, var.aval.shape, axes, var.aval.dtype) if not target.partial else ()
                ways = ways_to(description, 0, target, axes)
                if moves and ways and all(move.kind == "cut" for move in moves):
                    given = [Given(replicated(len(getattr(atom.aval, "shape", ())))) for atom in step.eqn.invars]
                    choice = carried_out(step.eqn, description, ways, given, axes, ())
                    if choice is not None and choice.results[0] == target:
                        wishes[var], operands = target, choice.operands
        for atom, layout in zip(step.eqn.invars, operands, strict=True):
            if not isinstance(atom, Literal):
                read(atom, layout)
    return wishes
