"""A function of arrays, divided over the axes of a mesh over which they are sharded.

Knows the partitioner, and how functions are traced. Must not know schedules, placements, nor what a node is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from vnode.analysis.meshless import remove_mesh_closed
from vnode.analysis.program import Atom, Program, inline, message_about
from vnode.errors import PartitionError, layout_message
from vnode.operators import Monoid, Windowed
from vnode.operators.separate_rounding import Rounding
from vnode.placement.trace_context import NO_MESH
from vnode.spmd.bitwise_safe_sharding import shard_further
from vnode.spmd.device_program import BitwiseMode, run
from vnode.spmd.factor_blocks import in_blocks
from vnode.spmd.flow_record import RecordedFlow, digest_of
from vnode.spmd.layout import Axes, Layout, replicated, restrict_to_axes
from vnode.spmd.resharding_collectives import convert
from vnode.spmd.sharded_program import as_spec_layout, spec_of
from vnode.spmd.sharding_backprop import find_wishes
from vnode.spmd.sharding_flow import Flow, follow
from vnode.spmd.uneven_blocks import Share

Records = Mapping[str, RecordedFlow]
"""How programs are divided, by their digests."""


@dataclasses.dataclass(frozen=True)
class UnevenValues:
    """Values that are stored in blocks, of which devices have different numbers.

    Attributes:
      share: whose blocks are how many.
      inputs: of a program, for each input the dimension that is in blocks, or None.
      outputs: the same of outputs.
    """

    share: Share
    inputs: Sequence[int | None]
    outputs: Sequence[int | None] = ()


@dataclasses.dataclass(frozen=True)
class Division:
    """How whole values lie on a mesh, and who divides what is computed of them.

    Attributes:
      layouts: of a program's inputs; None for those that all devices have whole.
      over_nodes: whether some are sharded over the nodes' axis: what is computed once is divided over that, too, then.
      automatic: all is left to XLA's partitioner.
      records: how programs are divided of which somebody has decided that, by their digests.
      specs: how a program's inputs are sharded over all axes; None, or fewer, where nobody says.
      rooms: which inputs are given in blocks, and which outputs are wanted so; None if none are.
      ends: how a program's outputs shall lie, those that are sharded; nothing if nobody says.
      planned: a plan predicts what devices exchange: every sum goes over them by itself, as one block.
    """

    layouts: Sequence[Layout | None] = ()
    over_nodes: bool = False
    automatic: bool = False
    records: Records | None = None
    specs: Sequence[PartitionSpec | None] = ()
    uneven: UnevenValues | None = None
    ends: Sequence[Layout | None] = ()
    planned: bool = False


class MeshFunction:
    """A function of arrays, followed by layouts; called with one device's arrays, it gives that device's results.

    It may be called with the latest result of the program around it as well, and with a rounding; else one is made of
    what it is called with, if it is to have one.

    Args:
      fun: from a list of arrays to a list of arrays.
      shapes: of its arguments, as every device would have them whole.
      layouts: how they lie; each has a `PartitionSpec`.
      axes: of the mesh, those that arrays may be sharded over, each with its size.
      platform: what is compiled for.
      pieces: for each of the first results a monoid, by which the caller combines them further, so that pieces of them
        may be left uncombined; None for others.
      records: how programs are divided of which somebody has decided that; if given, this must be one of them.
      exact: axes whose size must not show in the bits of results.
      alike: if compilers shall compute elements alike whatever the sizes of some axes.
      others: the same function as other platforms would have it: what was decided for one of them holds as well.
      rooms: which arguments are given in blocks; then what is tied to them is computed, and returned, in blocks.
      whole: results, by number, that are returned in one piece even so.
      ends: for each result how it shall lie; see `follow_layouts`.

    Attributes:
      inputs: how the arguments have to lie.
      results: how the results lie; those that may be pieces, perhaps partial.
      dims: for each result the dimension that is in blocks, or None.
    """

    def __init__(
        self,
        fun: Callable[[Sequence[Any]], list[Any]],
        shapes: Sequence[Any],
        layouts: Sequence[Layout],
        axes: Axes,
        platform: str,
        pieces: Sequence[Monoid | None] = (),
        records: Records | None = None,
        exact: Collection[str] = (),
        alike: BitwiseMode | None = None,
        others: Sequence[Callable[[Sequence[Any]], list[Any]]] = (),
        rooms: UnevenValues | None = None,
        whole: Collection[int] = (),
        ends: Sequence[Layout | None] = (),
    ) -> None:
        program, self.captured = trace_with_captures(fun, shapes, axes)
        if records is not None and digest_of(program) not in records:
            several = (trace_with_captures(other, shapes, axes) for other in others)
            known = (made for made in several if digest_of(made[0]) in records)
            program, self.captured = next(known, (program, self.captured))
        self.dims: tuple[int | None, ...] = (None,) * len(program.outputs)
        if rooms is not None:
            seeds = {i: dim for i, dim in enumerate(rooms.inputs) if dim is not None}
            split = in_blocks(program, rooms.share, seeds, others=False, whole=whole)
            program, self.dims = split.program, split.outputs
        given = [*layouts, *(replicated(value.ndim) for value in self.captured)]
        ends = [end if dim is None else None for end, dim in zip(ends, self.dims, strict=True)] if ends else ends
        flow = (
            follow_recorded(program, records, axes)
            if records is not None
            else follow_layouts(program, given, axes, exact, ends)
        )
        self.inputs = list(flow.inputs[: len(shapes)])
        allowed = [*pieces, *[None] * (len(flow.ends) - len(pieces))]
        asked = ends or [None] * len(flow.ends)
        self.results = [
            result_layout(end, monoid, axes) if want is None else as_spec_layout(handed_on, axes)
            for end, handed_on, monoid, want in zip(flow.ends, flow.outputs, allowed, asked, strict=True)
        ]
        self.flow: Flow = dataclasses.replace(flow, outputs=tuple(self.results))
        self.shapes = [atom.aval.shape for atom in program.outputs]
        self.axes, self.platform, self.alike = axes, platform, alike

    def __call__(self, values: Sequence[Any], latest: Any = None, rounding: Rounding | None = None) -> list[Any]:
        alike = self.alike and dataclasses.replace(self.alike, rounding=rounding)
        return run(self.flow, [*values, *self.captured], self.axes, self.platform, alike=alike, latest=latest)

    def local_shape(self, i: int) -> tuple[int, ...]:
        """The shape of one device's array of a result."""
        return self.results[i].local_shape(self.shapes[i], self.axes)

    def combine_pieces(self, value: Any, i: int) -> Any:
        """One device's array of a result, its pieces combined."""
        return convert(value, self.results[i], self.results[i].without_partial, self.shapes[i], self.axes)


def trace_with_captures(
    fun: Callable[[Sequence[Any]], list[Any]], shapes: Sequence[Any], axes: Axes
) -> tuple[Program, list[Any]]:
    """A function as a program, and what it reads of a trace around it, its last inputs; see `trace_to_jaxpr`."""
    made = trace_to_jaxpr(fun, shapes, axes)
    captured = [value for value in made.consts if isinstance(value, jax.core.Tracer)]
    plain = remove_mesh_closed(made)
    return inline(plain.jaxpr, plain.consts), captured


def trace_to_jaxpr(fun: Callable[[Sequence[Any]], list[Any]], shapes: Sequence[Any], axes: Axes) -> Any:
    """A function as a closed jaxpr; what asks in it for layouts over the axes goes on asking.

    Args:
      fun: from a list of arrays to a list of arrays.
      shapes: of its arguments.
      axes: of the mesh, those that arrays may be sharded over, each with its size.
    """
    names = tuple(axes)
    mesh = AbstractMesh(tuple(axes.values()), names, axis_types=(AxisType.Auto,) * len(names))
    with jax.sharding.use_abstract_mesh(NO_MESH), jax.sharding.use_abstract_mesh(mesh):  # not within the caller's
        return jax.make_jaxpr(lambda *values: fun(values))(*shapes)


def follow_layouts(
    program: Program,
    given: Sequence[Layout],
    axes: Axes,
    exact: Collection[str] = (),
    ends: Sequence[Layout | None] = (),
) -> Flow:
    """Layouts through a program, as those of its inputs lead them.

    Along axes whose size must not show in bits the program is divided once it is divided over the others.

    Args:
      program: the program.
      given: how its inputs lie.
      axes: of the mesh, those longer than one.
      exact: of these, those whose size must not show in bits.
      ends: for each output how it shall lie, perhaps over further axes as well; None where that is left open, and
        nothing if it is for all of them.
    """
    several = zip(program.outputs, ends or [None] * len(program.outputs), strict=True)
    outputs = [None if end is None else restrict_to_axes(axes, end, shape_or_none(a)) for a, end in several]
    asked = {a: end for a, end in zip(program.outputs, outputs, strict=True) if isinstance(a, Var) and end is not None}

    def flow_with_wishes(wishes: Mapping[Var, Layout]) -> Flow:
        if base is None:
            return follow(program, given, axes, wishes=wishes, outputs=outputs)
        return shard_further(base, given, inner, axes, wishes, outputs)

    inner, base = {name: size for name, size in axes.items() if name not in exact}, None
    if exact:
        base = follow_layouts(
            program,
            [
                restrict_to_axes(inner, layout, shape_or_none(var))
                for layout, var in zip(given, program.inputs, strict=True)
            ],
            inner,
            ends=ends,
        )
    flow = flow_with_wishes(asked)
    wishes = find_wishes(flow, axes, frozenset(exact))
    return flow_with_wishes({**wishes, **asked}) if wishes else flow


def shape_or_none(atom: Atom) -> tuple[int, ...]:
    """The shape of what an atom stands for; nothing of what has none."""
    return getattr(atom.aval, "shape", ())


def follow_recorded(program: Program, records: Records, axes: Axes) -> Flow:
    """Layouts through a program of which somebody has decided how it is divided.

    Raises:
      PartitionError: nobody has.
    """
    record = records.get(digest_of(program))
    if record is None:
        raise PartitionError(
            layout_message(
                "the plan is for another step, for arguments of other shapes, or for other settings of jax: "
                "it does not know one of this step's passes.",
                facts=[f"the pass has {len(program.equations)} equations", f"the plan is of {len(records)} passes"],
                remedies=["search a plan for this step, these shapes, and this number of virtual nodes"],
            )
        )
    return record.flow(program, axes)


def meshless_type(value: Any) -> jax.ShapeDtypeStruct:
    """The type of a value, without what it says of a mesh."""
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def result_layout(end: Layout, monoid: Monoid | None, axes: Axes) -> Layout:
    """How a result is handed on that lies in some way."""
    partial = end.partial if monoid is not None and all(m is monoid for _, m in end.partial) else ()
    return Layout(as_spec_layout(end, axes).dims, partial)


def stacked_spec(layout: Layout, dim: int, axis: str) -> PartitionSpec:
    """The `PartitionSpec` of a value with one more dimension, which is divided over an axis of its own."""
    entries = [*spec_of(layout)]
    return PartitionSpec(*entries[:dim], axis, *entries[dim:])


def refuse_windows(flow: Flow) -> None:
    """Refuses to leave to XLA's partitioner what it computes wrongly: gradients of windows that are split over space.

    Raises:
      PartitionError: a window is.
    """
    for step in flow.steps:
        for body in step.bodies:
            refuse_windows(body)
        for way in step.choice.ways if step.choice is not None else ():
            if isinstance(way.split, Windowed):
                raise PartitionError(
                    message_about(
                        step.eqn,
                        f"{step.eqn.primitive.name!r} has windows that are split over {', '.join(way.axes)}, of which "
                        "XLA's partitioner computes wrong gradients.",
                        remedies=["leave out partition='xla'", "or split another dimension"],
                    )
                )
