"""A function of arrays, divided over the axes of a mesh over which they are sharded.

Knows the partitioner, and how functions are traced. Must not know schedules, placements, nor what a node is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from vnode.analysis.meshless import meshless
from vnode.analysis.program import inline, message_about
from vnode.errors import PartitionError
from vnode.operators import Monoid, Windowed
from vnode.spmd.backward import wished
from vnode.spmd.exchange import convert
from vnode.spmd.flow import Flow, follow
from vnode.spmd.layout import Axes, Layout, replicated
from vnode.spmd.program import at_the_border, spec_of
from vnode.spmd.run import run


@dataclasses.dataclass(frozen=True)
class Division:
    """How whole values lie on a mesh, and who divides what is computed of them.

    Attributes:
      layouts: of a program's inputs, over the axes that nodes are not spread over; None for those that all devices
        have whole.
      over_nodes: whether inputs are sharded over the nodes' axis, too.
      automatic: all is left to XLA's partitioner.
    """

    layouts: Sequence[Layout | None] = ()
    over_nodes: bool = False
    automatic: bool = False


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

    Attributes:
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
    ) -> None:
        names = tuple(axes)
        mesh = AbstractMesh(tuple(axes.values()), names, axis_types=(AxisType.Auto,) * len(names))
        with jax.sharding.use_abstract_mesh(mesh):  # what asks for layouts over its axes goes on asking
            made = jax.make_jaxpr(lambda *values: fun(values))(*shapes)
        self.captured = [value for value in made.consts if isinstance(value, jax.core.Tracer)]
        program = inline(meshless(made.jaxpr), made.consts)
        given = [*layouts, *(replicated(value.ndim) for value in self.captured)]
        flow = follow(program, given, axes)
        wishes = wished(flow, axes)
        flow = follow(program, given, axes, wishes=wishes) if wishes else flow
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
