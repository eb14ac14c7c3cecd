"""The program of one device of a mesh: equations at local sizes, explicit collectives between them.

Knows flows, how they are run, and tracing. Must not know machines, or what anything costs.

The program is traced from what `vnode.spmd.over_mesh` runs on each device, so that what is counted is what is compiled:
copies of equations, masks, halos and every exchange. What nobody reads is left out, and what is computed twice of the
same operands, an exchange too, is computed once, as compilers do; and what they take out of loops is taken out
(`vnode.partition.cost.loops`), what they sum once is summed once (`vnode.partition.cost.sums`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.meshless import NO_MESH
from vnode.analysis.program import Program, inline
from vnode.operators import kind_to_keep
from vnode.operators.control import Loop, region_of
from vnode.partition.cost.collectives import KINDS
from vnode.partition.cost.loops import after_loops, before_loops, given_once, reshaped, without_single_turns
from vnode.partition.cost.lowered import lowered
from vnode.partition.cost.shapes import Shape, shape_of
from vnode.partition.cost.sums import added_before, parts_first
from vnode.partition.cost.target import Target
from vnode.spmd.exchange import convert
from vnode.spmd.flow import Flow
from vnode.spmd.layout import Axes
from vnode.spmd.program import at_the_border
from vnode.spmd.run import run


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceProgram:
    """What one device of a mesh runs.

    Attributes:
      program: its equations at local sizes; those of loops and branches are in their bodies (`bodies_of`).
      axes: of the mesh, those longer than one.
      donated: the inputs whose memory results may take.
      passes: whether its loops are passes over nodes, which have room for their sums only when what they read is there.
    """

    program: Program
    axes: Mapping[str, int]
    donated: frozenset[int] = frozenset()
    passes: bool = False


def device_program(
    flow: Flow,
    axes: Axes,
    *,
    platform: str = "tpu",
    donated: Collection[int] = (),
    single_turns: bool = False,
    passes: bool = False,
) -> DeviceProgram:
    """Traces what one device runs.

    Args:
      flow: layouts through the program.
      axes: of the mesh, those longer than one.
      platform: what is compiled for.
      donated: the inputs of the program that are given away.
      single_turns: whether loops of one turn stay loops, because the compiler is not told that they are.
      passes: see `DeviceProgram`.

    Returns:
      The program; its inputs and outputs are those of the flow, in local shapes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from vnode.spmd.flow import follow
      >>> from vnode.spmd.layout import from_spec
      >>> traced = jax.make_jaxpr(lambda x: jnp.sum(x))(jnp.ones((8, 4)))
      >>> program, axes = inline(traced.jaxpr, traced.consts), {"x": 4}
      >>> flow = follow(program, [from_spec(P("x"), (8, 4), axes)], axes)
      >>> [(eqn.primitive.name, eqn.invars[0].aval.shape) for eqn in device_program(flow, axes).program.equations]
      [('reduce_sum', (2, 4)), ('psum', ())]
    """
    given = [at_the_border(layout, axes) for layout in flow.inputs]
    made = [at_the_border(layout, axes) for layout in flow.outputs]
    shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in flow.program.inputs]
    results = [tuple(getattr(atom.aval, "shape", ())) for atom in flow.program.outputs]

    def on_one(*values: Any) -> list[Any]:
        inputs = [convert(*each, axes) for each in zip(values, given, flow.inputs, shapes, strict=True)]
        outputs = run(flow, inputs, axes, platform)
        return [convert(*each, axes) for each in zip(outputs, flow.outputs, made, results, strict=True)]

    local = [
        jax.ShapeDtypeStruct(layout.local(shape, axes), var.aval.dtype)
        for var, layout, shape in zip(flow.program.inputs, given, shapes, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(NO_MESH):  # whatever mesh the user has set
        traced = jax.make_jaxpr(on_one, axis_env=list(axes.items()))(*local)
    program = inline(traced.jaxpr, traced.consts)
    program = compiled_as(program if single_turns else without_single_turns(program), Target.on(platform))
    return DeviceProgram(program, dict(axes), frozenset(donated), passes)


def compiled_as(program: Program, target: Target) -> Program:
    """A device's program as compilers change it before they make kernels of it."""
    program = simplified(program)
    if target.hoists:
        program = simplified(before_loops(program, target.hoists_growing))
    if target.ordered:
        program = simplified(lowered(program))
    if target.adds_after:
        program = simplified(added_before(parts_first(after_loops(exchanged_first(program)))))
    return program


def simplified(program: Program) -> Program:
    """The program without equations that repeat others, that turn back what others turned, or that nobody reads.

    The only effect that equations have here is that they name mesh axes: `vnode.spmd` refuses others.
    """
    same: dict[Var, Var] = {}
    known: dict[object, JaxprEqn] = {}
    equations: list[JaxprEqn] = []
    turned: dict[Var, JaxprEqn] = {}  # what transpositions give

    def first(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for eqn in reshaped_after(program):
        if any(isinstance(atom, Var) and atom in same for atom in eqn.invars):
            eqn = eqn.replace(invars=[first(atom) for atom in eqn.invars])
        region = region_of(eqn)
        if isinstance(region, Loop):
            eqn = given_once(eqn, region)
        if region is None:
            of = kind_to_keep(eqn) or repr(sorted(eqn.params.items(), key=str))
            key = eqn.primitive, tuple(map(said, eqn.invars)), of
            other = known.setdefault(key, eqn)
            if other is not eqn:
                same.update(zip(eqn.outvars, other.outvars, strict=True))
                continue
        order, (source, *_) = eqn.params.get("permutation"), (*eqn.invars, None)
        if order is not None and isinstance(source, Var):
            before = turned.get(source)
            if before is not None and [before.params["permutation"][i] for i in order] == sorted(order):
                same[eqn.outvars[0]] = first(before.invars[0])
                continue
            turned[eqn.outvars[0]] = eqn
        equations.append(eqn)
    outputs = [first(atom) for atom in program.outputs]
    wanted = {atom for atom in outputs if isinstance(atom, Var)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(equations):
        if wanted.intersection(eqn.outvars):
            kept.append(eqn)
            wanted.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return program.derived(program.inputs, kept[::-1], outputs)


def reshaped_after(program: Program) -> Iterator[JaxprEqn]:
    """The equations, with what is reduced over devices reduced before it is reshaped: then equal ones are seen."""
    makers = program.definitions
    for eqn in program.equations:
        reduces, (operand, *_) = KINDS.get(eqn.primitive.name) == "all-reduce", (*eqn.invars, None)
        maker = makers.get(operand) if reduces and isinstance(operand, Var) else None
        if maker is None or shape_of(maker, program.describe(maker)) is not Shape.SAME:
            yield eqn
            continue
        reduced = Var(maker.invars[0].aval)
        yield eqn.replace(invars=[maker.invars[0]], outvars=[reduced])
        yield maker.replace(invars=[reduced], outvars=eqn.outvars)


def exchanged_first(program: Program) -> Program:
    """The program with what is exchanged in pieces exchanged before it has more dimensions of one element."""
    equations: list[JaxprEqn] = []
    makers = program.definitions
    for eqn in program.equations:
        pieces, (operand, *_) = KINDS.get(eqn.primitive.name) == "all-to-all", (*eqn.invars, None)
        maker = makers.get(operand) if pieces and isinstance(operand, Var) else None
        same = maker is not None and shape_of(maker, program.describe(maker)) is Shape.SAME
        exchanged = in_fewer_dimensions(eqn, maker.invars[0]) if maker is not None and same else None
        if exchanged is None:
            equations.append(eqn)
        else:
            equations += [exchanged, reshaped(eqn, exchanged.outvars[0], eqn.outvars[0])]
    return program.with_equations(equations)


def in_fewer_dimensions(eqn: JaxprEqn, source: Any) -> JaxprEqn | None:
    """An exchange in pieces of the same array without dimensions of one element, if that is what its source is."""
    shape = eqn.invars[0].aval.shape
    long = [d for d, n in enumerate(shape) if n > 1]
    places = [eqn.params["split_axis"], eqn.params["concat_axis"]]
    if not eqn.params.get("tiled") or not {*places} <= {*long} or [shape[d] for d in long] != [*source.aval.shape]:
        return None
    after = [eqn.outvars[0].aval.shape[d] for d in long]
    split, concat = map(long.index, places)
    params = {**eqn.params, "split_axis": split, "concat_axis": concat}
    return eqn.replace(invars=[source], outvars=[Var(source.aval.update(shape=tuple(after)))], params=params)


def said(atom: Any) -> object:
    """What tells operands apart: literals are the same if their values and types are."""
    return (np.asarray(atom.val).tobytes(), atom.aval) if isinstance(atom, Literal) else atom


def bodies_of(eqn: JaxprEqn) -> Sequence[Program]:
    """The programs of the bodies of a loop or branch; nothing for any other equation."""
    return [] if region_of(eqn) is None else bodies_of_region(eqn)


@functools.lru_cache(maxsize=8)
def bodies_of_region(eqn: JaxprEqn) -> Sequence[Program]:
    """The programs of the bodies of a loop or branch, the same for who asks for their time, and for their memory."""
    region = region_of(eqn)
    assert region is not None
    return tuple(simplified(inline(body.jaxpr, body.constants, eqn)) for body in region.bodies)
