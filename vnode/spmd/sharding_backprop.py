"""Flow -> wanted layouts of replicated values that are read in shards, found by one backward pass.

Knows flows. Must not know how layouts flow forward, nor how programs are run.

    x: [-], y: [data];  z = sin(x) + y    forward: sin(x) is computed whole, then sliced
                                          wish:    sin(x) in [data], so that a device computes its shard only

Layouts flow forward, so values that depend on no sharded input are computed whole on every device, and sliced where
they meet a sharded one. If all readers shard a value alike, it is computed sharded, and so are its operands. Loops and
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
    """Whether shards of a result are computed from whole operands without communication."""
    return not any(isinstance(factor.split, Prefix) for factor in description.factors)


def find_wishes(flow: Flow, axes: Axes, exact: Set[str] = frozenset()) -> dict[Var, Layout]:
    """Wanted layouts of replicated values that are read in shards only, also in loops and branches.

    Args:
      flow: layouts through a program, followed forward.
      axes: the mesh axes.
      exact: axes over which only elementwise results are computed sharded.

    Returns:
      For some variables the layout in which they are read.
    """
    wishes: dict[Var, Layout] = {}
    follow_back(flow, axes, exact, wishes)
    return wishes


def follow_back(flow: Flow, axes: Axes, exact: Set[str], wishes: dict[Var, Layout]) -> dict[Var, set[Layout]]:
    """Adds the wishes of one program; returns the layouts in which its variables are then read."""
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
    """The layouts in which each variable of a program is read, one per use; loops and branches read as their bodies.

    Args:
      flow: layouts through the program.
      returned: whether outputs count as uses.
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
    """The layouts in which the bodies of a loop or branch read its operands, by operand number.

    Carries and the branch index are left out: a carry has a layout of its own.

    Args:
      step: the loop or branch; any other step has no bodies.
      reads: returns the layouts in which a body's variables are read.
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
