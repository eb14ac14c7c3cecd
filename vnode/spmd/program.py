"""A whole program over a mesh: from arrays to arrays, by `jax.shard_map` that is manual over all axes.

Knows meshes, flows and how they are run. Must not know how layouts are chosen, nor virtual nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from vnode.spmd.exchange import convert
from vnode.spmd.flow import Flow
from vnode.spmd.layout import Axes, Layout
from vnode.spmd.route import even
from vnode.spmd.run import run


def long_axes(mesh: Mesh) -> dict[str, int]:
    """The axes of a mesh that are longer than one, each with its size."""
    return {name: size for name, size in mesh.shape.items() if size > 1}


def at_the_border(layout: Layout, axes: Axes) -> Layout:
    """A layout that a `PartitionSpec` can say: what axes do not divide evenly is whole."""
    return Layout(tuple(cut if even(cut, axes) else None for cut in layout.dims))


def spec_of(layout: Layout) -> PartitionSpec:
    """The `PartitionSpec` of a layout that has one."""
    return PartitionSpec(*[None if cut is None else cut.axes for cut in layout.dims])


def over_mesh(flow: Flow, mesh: Mesh) -> Any:
    """A function of a program's inputs that gives its outputs, each a list of arrays on `mesh`.

    Args:
      flow: layouts through the program.
      mesh: the devices, with the axes that the flow names.
    """
    axes, platform = long_axes(mesh), mesh.devices.flat[0].platform
    given = [at_the_border(layout, axes) for layout in flow.inputs]
    made = [at_the_border(layout, axes) for layout in flow.outputs]

    def moved(
        values: Sequence[Any], starts: Sequence[Layout], ends: Sequence[Layout], atoms: Sequence[Any]
    ) -> list[Any]:
        return [
            convert(value, start, end, getattr(atom.aval, "shape", ()), axes)
            for value, start, end, atom in zip(values, starts, ends, atoms, strict=True)
        ]

    def on_each_device(*values: Any) -> list[Any]:
        inputs = moved(values, given, flow.inputs, flow.program.inputs)
        outputs = run(flow, inputs, axes, platform)
        return moved(outputs, flow.outputs, made, flow.program.outputs)

    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=tuple(map(spec_of, given)),
        out_specs=list(map(spec_of, made)),
        check_vma=False,
    )
