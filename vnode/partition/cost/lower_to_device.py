"""A flow over a mesh -> the program of one device: equations at local sizes, explicit collectives between them.

    x @ w, w cut by columns over 4 devices  ->  dot_general of a quarter of the columns; all_gather of the result

Knows flows, how they are run, and tracing. Must not know machines, or what anything costs.

The program is traced from the function that `vnode.spmd.sharded_program.flow_over_mesh` runs on each device. So costs
count the compiled equations: local copies, masks, halos and every collective. Unread results are dropped, and equal
equations, collectives too, are evaluated once, as every compiler does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.meshless import NO_MESH
from vnode.analysis.program import Program, inline, origins
from vnode.operators import kind_to_keep
from vnode.operators.control_flow import region_of
from vnode.partition.cost.simplify_loops import hoist_invariants, inline_single_iterations
from vnode.spmd.layout import Axes
from vnode.spmd.sharded_program import program_of_device
from vnode.spmd.sharding_flow import Flow


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceProgram:
    """The program of one device of a mesh.

    Attributes:
      program: its equations at local sizes; those of loops and branches are in their bodies (`body_programs`).
      axes: sizes of the mesh axes longer than one.
      donated: the numbers of the donated inputs.
    """

    program: Program
    axes: Mapping[str, int]
    donated: frozenset[int] = frozenset()


def device_program(
    flow: Flow, axes: Axes, *, platform: str = "tpu", donated: Collection[int] = (), single_turns: bool = False
) -> DeviceProgram:
    """Traces the program of one device; its inputs and outputs are those of the flow, in local shapes.

    Args:
      flow: layouts through the program.
      axes: sizes of the mesh axes longer than one.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      donated: the numbers of the donated inputs.
      single_turns: whether loops of one iteration stay loops, because the compiler does not see their trip count.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from vnode.spmd.sharding_flow import follow
      >>> from vnode.spmd.layout import from_spec
      >>> traced = jax.make_jaxpr(lambda x: jnp.sum(x))(jnp.ones((8, 4)))
      >>> program, axes = inline(traced.jaxpr, traced.consts), {"x": 4}
      >>> flow = follow(program, [from_spec(P("x"), (8, 4), axes)], axes)
      >>> [(eqn.primitive.name, eqn.invars[0].aval.shape) for eqn in device_program(flow, axes).program.equations]
      [('reduce_sum', (2, 4)), ('psum', ())]
    """
    on_each_device, given, _ = program_of_device(flow, axes, platform)
    local = [
        jax.ShapeDtypeStruct(layout.local_shape(var.aval.shape, axes), var.aval.dtype)
        for var, layout in zip(flow.program.inputs, given, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(NO_MESH):  # whatever mesh the user has set
        traced = jax.make_jaxpr(on_each_device, axis_env=list(axes.items()))(*local)
    program = inline(traced.jaxpr, traced.consts)
    program = simplify(program if single_turns else inline_single_iterations(program))
    return DeviceProgram(simplify(hoist_invariants(program)), dict(axes), frozenset(donated))


def simplify(program: Program) -> Program:
    """Drops repeated equations, and equations that nobody reads.

    The only effect of equations here is that they name mesh axes: `vnode.spmd` refuses others.
    """
    same: dict[Var, Var] = {}
    known: dict[object, JaxprEqn] = {}
    equations: list[JaxprEqn] = []

    def first_equal(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for eqn in program.equations:
        if any(isinstance(atom, Var) and atom in same for atom in eqn.invars):
            eqn = eqn.replace(invars=[first_equal(atom) for atom in eqn.invars])
        if region_of(eqn) is None:
            of = kind_to_keep(eqn) or repr(sorted(eqn.params.items(), key=str))
            key = eqn.primitive, tuple(map(operand_key, eqn.invars)), of
            other = known.setdefault(key, eqn)
            if other is not eqn:
                same.update(zip(eqn.outvars, other.outvars, strict=True))
                continue
        equations.append(eqn)
    made = program.derive(program.inputs, equations, [first_equal(atom) for atom in program.outputs])
    read = origins(made, {atom for atom in made.outputs if isinstance(atom, Var)})
    return made.with_equations([eqn for eqn in equations if not read.isdisjoint(eqn.outvars)])


def operand_key(atom: Any) -> object:
    """The key of an operand: literals are the same if their values and types are."""
    return (np.asarray(atom.val).tobytes(), atom.aval) if isinstance(atom, Literal) else atom


def body_programs(eqn: JaxprEqn) -> Sequence[Program]:
    """The programs of the bodies of a loop or branch."""
    region = region_of(eqn)
    assert region is not None
    return tuple(simplify(inline(body.jaxpr, body.constants, eqn)) for body in region.bodies)
