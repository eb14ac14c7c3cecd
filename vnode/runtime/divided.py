"""A function of arrays, divided over the axes of a mesh over which they are sharded.

Knows the partitioner, and how functions are traced. Must not know schedules, placements, nor what a node is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from vnode.analysis.meshless import meshless
from vnode.analysis.program import Program, inline, message_about
from vnode.errors import PartitionError, layout_message
from vnode.operators import Monoid, Windowed
from vnode.spmd.backward import wished
from vnode.spmd.exchange import convert
from vnode.spmd.flow import Flow, follow
from vnode.spmd.layout import Axes, Layout, replicated
from vnode.spmd.program import at_the_border, spec_of
from vnode.spmd.record import RecordedFlow, digest_of
from vnode.spmd.run import run

Records = Mapping[str, RecordedFlow]
"""How programs are divided, by their digests."""


@dataclasses.dataclass(frozen=True)
class Division:
    """How whole values lie on a mesh, and who divides what is computed of them.

    Attributes:
      layouts: of a program's inputs, over the axes that nodes are not spread over; None for those that all devices
        have whole.
      over_nodes: whether inputs are sharded over the nodes' axis, too.
      automatic: all is left to XLA's partitioner.
      records: how programs are divided of which somebody has decided that, by their digests.
    """

    layouts: Sequence[Layout | None] = ()
    over_nodes: bool = False
    automatic: bool = False
    records: Records | None = None


class Divided:
    """A function of arrays, followed by layouts; called with one device's arrays, it gives that device's results.

    Args:
      fun: from a list of arrays to a list of arrays.
      shapes: of its arguments, as every device would have them whole.
      layouts: how they lie; each has a `PartitionSpec`.
      axes: of the mesh, those that arrays may be sharded over, each with its size.
      platform: what is compiled for.
      pieces: for each of the first results a monoid, by which the caller combines them further, so that pieces of them
        may be left uncombined; None for others.
      records: how programs are divided of which somebody has decided that; if given, this must be one of them.

    Attributes:
      inputs: how the arguments have to lie.
      results: how the results lie; those that may be pieces, perhaps partial.
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
    ) -> None:
        made = traced(fun, shapes, axes)
        self.captured = [value for value in made.consts if isinstance(value, jax.core.Tracer)]
        program = inline(meshless(made.jaxpr), made.consts)
        given = [*layouts, *(replicated(value.ndim) for value in self.captured)]
        flow = recorded(program, records, axes) if records is not None else followed(program, given, axes)
        self.inputs = list(flow.inputs[: len(shapes)])
        allowed = [*pieces, *[None] * (len(flow.ends) - len(pieces))]
        self.results = [result(end, monoid, axes) for end, monoid in zip(flow.ends, allowed, strict=True)]
        self.flow: Flow = dataclasses.replace(flow, outputs=tuple(self.results))
        self.shapes = [atom.aval.shape for atom in program.outputs]
        self.axes, self.platform = axes, platform

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        return run(self.flow, [*values, *self.captured], self.axes, self.platform)

    def local(self, i: int) -> tuple[int, ...]:
        """The shape of one device's array of a result."""
        return self.results[i].local(self.shapes[i], self.axes)

    def completed(self, value: Any, i: int) -> Any:
        """One device's array of a result, its pieces combined."""
        return convert(value, self.results[i], self.results[i].complete, self.shapes[i], self.axes)


def traced(fun: Callable[[Sequence[Any]], list[Any]], shapes: Sequence[Any], axes: Axes) -> Any:
    """A function as a closed jaxpr; what asks in it for layouts over the axes goes on asking.

    Args:
      fun: from a list of arrays to a list of arrays.
      shapes: of its arguments.
      axes: of the mesh, those that arrays may be sharded over, each with its size.
    """
    names = tuple(axes)
    mesh = AbstractMesh(tuple(axes.values()), names, axis_types=(AxisType.Auto,) * len(names))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(lambda *values: fun(values))(*shapes)


def followed(program: Program, given: Sequence[Layout], axes: Axes) -> Flow:
    """Layouts through a program, as those of its inputs lead them."""
    flow = follow(program, given, axes)
    wishes = wished(flow, axes)
    return follow(program, given, axes, wishes=wishes) if wishes else flow


def recorded(program: Program, records: Records, axes: Axes) -> Flow:
    """Layouts through a program of which somebody has decided how it is divided.

    Raises:
      PartitionError: nobody has.
    """
    record = records.get(digest_of(program))
    if record is None:
        raise PartitionError(
            layout_message(
                "the plan is for another step: it does not know one of this step's passes.",
                facts=[f"the pass has {len(program.equations)} equations", f"the plan is of {len(records)} passes"],
                remedies=["search a plan for this step, these shapes, and this number of virtual nodes"],
            )
        )
    return record.flow(program, axes)


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """The type of a value, without what it says of a mesh."""
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def result(end: Layout, monoid: Monoid | None, axes: Axes) -> Layout:
    """How a result is handed on that lies in some way."""
    partial = end.partial if monoid is not None and all(m is monoid for _, m in end.partial) else ()
    return Layout(at_the_border(end, axes).dims, partial)


def sharded(layout: Layout, dim: int, axis: str) -> PartitionSpec:
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
