"""Which values are needed in parts only, so that they are computed in parts: layouts, followed backward once.

Knows flows. Must not know how layouts flow forward, nor how a program is carried out.

Layouts flow forward, so what depends on nothing that is divided is computed whole on every device, and cut where it
meets something that is. Where all who read it cut it alike, it is computed so, and so is what it is made of. Loops and
branches read as their bodies do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from jax.extend.core import Var

from vnode.operators import OperatorDescription, Prefix
from vnode.spmd.layout import Axes, Layout, replicated
from vnode.spmd.op_sharding import OperandSharding, build_sharding, shardings_for_result
from vnode.spmd.resharding import is_local
from vnode.spmd.sharding_flow import Flow, Step


def computes_parts_locally(description: OperatorDescription) -> bool:
    """Whether parts of a result are computed of whole operands without any exchange."""
    return not any(isinstance(factor.split, Prefix) for factor in description.factors)


def find_wishes(flow: Flow, axes: Axes, exact: Set[str] = frozenset()) -> dict[Var, Layout]:
    """How values shall lie that every device has whole, and that are read in parts only, also in loops and branches.

    Args:
      flow: layouts through a program, followed forward.
      axes: of the mesh.
      exact: axes along which only what is computed element by element is computed in parts.

    Returns:
      For some variables the layout in which they are read.
    """
    wishes: dict[Var, Layout] = {}
    follow_back(flow, axes, exact, wishes)
    return wishes


def follow_back(flow: Flow, axes: Axes, exact: Set[str], wishes: dict[Var, Layout]) -> dict[Var, set[Layout]]:
    """Adds wishes of one program, and says in which layouts its variables are read then."""
    reads: dict[Var, set[Layout]] = {}

    def read(atom: object, layouts: Iterable[Layout]) -> None:
        if isinstance(atom, Var):
            reads.setdefault(atom, set()).update(layouts)

    for atom, layout in zip(flow.program.outputs, flow.outputs, strict=True):
        read(atom, [layout])
    for step in reversed(flow.steps):
        operands = step.operands
        description = flow.program.describe(step.eqn) if step.region is None else None
        if (
            description is not None
            and len(step.eqn.outvars) == 1
            and not step.materializable
            and computes_parts_locally(description)
        ):
            (var,), (layout,) = step.eqn.outvars, step.results
            wanted = reads.get(var, set())
            if len(wanted) == 1 and description.layout is None:
                (target,) = wanted
                finer = layout != target and is_local(layout, target, var.aval.shape, axes, var.aval.dtype)
                ways = shardings_for_result(description, 0, target, axes)
                allowed = description.by_element or not target.cut_axes.keys() & exact
                if finer and ways and allowed:
                    given = [
                        OperandSharding(replicated(len(getattr(atom.aval, "shape", ())))) for atom in step.eqn.invars
                    ]
                    choice = build_sharding(step.eqn, description, ways, given, axes, ())
                    if choice is not None and choice.results[0] == target:
                        wishes[var], operands = target, choice.operands
        inside = body_read_layouts(step, lambda body: follow_back(body, axes, exact, wishes))
        for i, (atom, layout) in enumerate(zip(step.eqn.invars, operands, strict=True)):
            read(atom, inside.get(i, [layout]))
    return reads


def read_layouts(flow: Flow, returned: bool = False) -> dict[Var, list[Layout]]:
    """In which layouts each variable of a program is read, each time; in loops and branches as their bodies read it.

    Args:
      flow: layouts through it.
      returned: whether the program's outputs are among what is read.
    """
    found: dict[Var, list[Layout]] = {}

    def read(atom: object, layouts: Iterable[Layout]) -> None:
        if isinstance(atom, Var):
            found.setdefault(atom, []).extend(layouts)

    for step in flow.steps:
        inside = body_read_layouts(step, lambda body: read_layouts(body, returned=True))
        for i, (atom, layout) in enumerate(zip(step.eqn.invars, step.operands, strict=True)):
            read(atom, inside.get(i, [layout]))
    for atom, layout in zip(flow.program.outputs, flow.outputs, strict=True) if returned else ():
        read(atom, [layout])
    return found


def body_read_layouts(step: Step, reads: Callable[[Flow], Mapping[Var, Iterable[Layout]]]) -> dict[int, list[Layout]]:
    """In which layouts bodies of a loop or branch read its operands, by their numbers.

    Not what is carried, which lies as it is carried, nor what chooses.

    Args:
      step: the loop or branch, or any other step, which has none.
      reads: says for a body in which layouts its variables are read.
    """
    found: dict[int, list[Layout]] = {}
    region = step.region
    if region is None:
        return found
    for body, inputs in zip(step.bodies, region.inputs, strict=True):
        several = reads(body)
        for i, var in zip(inputs, body.program.inputs, strict=True):
            if i not in region.carried and i != region.chooser:
                found.setdefault(i, []).extend(
                    Layout((None, *each.dims), each.partial) if i in region.scanned else each
                    for each in several.get(var, ())
                )
    return found
