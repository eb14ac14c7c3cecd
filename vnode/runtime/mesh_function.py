"""Function of arrays -> one device's function, over the mesh axes that shard the arrays.

    f(w, x) = [x @ w], w: [-, model]   ->   f_device(w's shard, x) = [x @ w's shard];  results: [-, model]

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
from vnode.errors import PartitionError
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
"""Recorded shardings of programs, by the programs' digests."""


@dataclasses.dataclass(frozen=True)
class UnevenValues:
    """Values stored in blocks, of which devices have different numbers.

    Attributes:
      share: the number of blocks of each device.
      inputs: for each input of a program the dimension stored in blocks, or None.
      outputs: the same for outputs.
    """

    share: Share
    inputs: Sequence[int | None]
    outputs: Sequence[int | None] = ()


@dataclasses.dataclass(frozen=True)
class Division:
    """The sharding of whole values over a mesh, and the partitioner of the computation.

    Attributes:
      layouts: layouts of a program's inputs; None for replicated inputs.
      over_nodes: whether the nodes' axis shards some inputs; the once-computed part is then partitioned over it, too.
      automatic: XLA's partitioner does all of it.
      records: recorded shardings of programs, by the programs' digests.
      specs: shardings of a program's inputs over all axes; None, or fewer entries, where none is given.
      uneven: which inputs are given in uneven blocks, and which outputs are returned so; None if none are.
      ends: required layouts of a program's sharded outputs; empty if none are given.
      planned: whether a plan predicts the collectives: every sum has its own, as one block.
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
    """A function of arrays, partitioned by layouts; called with one device's arrays, it returns that device's
    results.

    A call may also pass the latest result of the surrounding program, and a rounding. Without a rounding, one is made
    from the arguments if `alike` asks for it.

    Args:
      fun: takes and returns a list of arrays.
      shapes: the global shapes of its arguments.
      layouts: the arguments' layouts; each has a `PartitionSpec`.
      axes: the mesh axes that may shard arrays, each with its size.
      platform: the platform to compile for.
      pieces: for each of the first results the monoid by which the caller combines partial results further, which then
        may stay uncombined; None for other results.
      records: recorded shardings of programs; if given, the function's program must be among them.
      exact: axes whose size must not change bits of results.
      alike: the `BitwiseMode`, if elements must be computed alike whatever the sizes of some axes.
      others: the same function for other platforms; a sharding recorded for one of them applies as well.
      rooms: arguments given in uneven blocks; dimensions tied to theirs are computed, and returned, in blocks.
      whole: numbers of results that are returned in one piece nevertheless.
      ends: required layouts of results; see `follow_layouts`.

    Attributes:
      inputs: the required layouts of arguments.
      results: the results' layouts, those in `pieces` perhaps partial.
      dims: for each result the dimension in blocks, or None.
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
        program, self.dims = in_given_blocks(program, rooms, whole)
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
        """One device's array of a result, after its partial values are combined."""
        return convert(value, self.results[i], self.results[i].without_partial, self.shapes[i], self.axes)


def in_given_blocks(
    program: Program, rooms: UnevenValues | None, whole: Collection[int] = ()
) -> tuple[Program, Sequence[int | None]]:
    """A program over blocks, if its inputs are in blocks; and the dimension in blocks of each output, or None."""
    if rooms is None:
        return program, [None] * len(program.outputs)
    seeds = {i: dim for i, dim in enumerate(rooms.inputs) if dim is not None}
    split = in_blocks(program, rooms.share, seeds, others=False, whole=whole)
    return split.program, split.outputs


def trace_with_captures(
    fun: Callable[[Sequence[Any]], list[Any]], shapes: Sequence[Any], axes: Axes
) -> tuple[Program, list[Any]]:
    """Traces a function to a program; also returns captured outer values, its last inputs. See `trace_to_jaxpr`."""
    made = trace_to_jaxpr(fun, shapes, axes)
    captured = [value for value in made.consts if isinstance(value, jax.core.Tracer)]
    plain = remove_mesh_closed(made)
    return inline(plain.jaxpr, plain.consts), captured


def trace_to_jaxpr(fun: Callable[[Sequence[Any]], list[Any]], shapes: Sequence[Any], axes: Axes) -> Any:
    """Traces a function to a closed jaxpr; sharding constraints over the axes are kept.

    Args:
      fun: takes and returns a list of arrays.
      shapes: of its arguments.
      axes: the mesh axes that may shard arrays, each with its size.
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
    """Propagates layouts of a program's inputs through the program.

    Axes that must not change bits are used last: the program is first partitioned over the other axes.

    Args:
      program: the program.
      given: the inputs' layouts.
      axes: the mesh axes longer than one.
      exact: the axes among them whose size must not change bits.
      ends: for each output its required layout, perhaps over further axes; None where any layout will do; empty if that
        is so for all outputs. One that is whole over `axes` is not required: on a mesh without the further axes there
        would be none, and bits must not differ.
    """
    several = zip(program.outputs, ends or [None] * len(program.outputs), strict=True)
    known = [None if end is None else restrict_to_axes(axes, end, shape_or_none(a)) for a, end in several]
    outputs = [None if end is None or end.is_whole else end for end in known]
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
    """The shape of an atom; empty if it has none."""
    return getattr(atom.aval, "shape", ())


def follow_recorded(program: Program, records: Records, axes: Axes) -> Flow:
    """Layouts through a program by its recorded sharding.

    Raises:
      PartitionError: the program has no recorded sharding.
    """
    record = records.get(digest_of(program))
    if record is None:
        raise PartitionError(
            "the plan is for another step, for arguments of other shapes, or for other settings of jax: "
            "it does not know one of this step's passes.",
            facts=[f"the pass has {len(program.equations)} equations", f"the plan is of {len(records)} passes"],
            remedies=["search a plan for this step, these shapes, and this number of virtual nodes"],
        )
    return record.flow(program, axes)


def meshless_type(value: Any) -> jax.ShapeDtypeStruct:
    """The type of a value, without its mesh."""
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def result_layout(end: Layout, monoid: Monoid | None, axes: Axes) -> Layout:
    """The layout in which a result of layout `end` is handed on."""
    partial = end.partial if monoid is not None and all(m is monoid for _, m in end.partial) else ()
    return Layout(as_spec_layout(end, axes).dims, partial)


def stacked_spec(layout: Layout, dim: int, axis: str) -> PartitionSpec:
    """The `PartitionSpec` of a value with one more dimension, which a further axis shards."""
    entries = [*spec_of(layout)]
    return PartitionSpec(*entries[:dim], axis, *entries[dim:])


def refuse_windows(flow: Flow) -> None:
    """Refuses gradients of windows that are split over space, which XLA's partitioner computes wrongly.

    Raises:
      PartitionError: windows are split over space.
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
