"""Flow -> program over a mesh, from arrays to arrays, by a `jax.shard_map` that is manual over all axes.

Knows meshes, flows and how they are run. Must not know how layouts are chosen, nor virtual nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.spmd.device_program import run
from vnode.spmd.layout import Axes, Layout
from vnode.spmd.resharding import is_even
from vnode.spmd.resharding_collectives import convert
from vnode.spmd.sharding_flow import Flow


def long_axes(mesh: Mesh) -> dict[str, int]:
    """The axes of a mesh that are longer than one, each with its size."""
    return {name: size for name, size in mesh.shape.items() if size > 1}


def as_spec_layout(layout: Layout, axes: Axes) -> Layout:
    """A layout that a `PartitionSpec` can express: dimensions that axes do not divide evenly are whole."""
    return Layout(tuple(cut if is_even(cut, axes) else None for cut in layout.dims))


def spec_of(layout: Layout) -> PartitionSpec:
    """The `PartitionSpec` of a layout that has one."""
    return PartitionSpec(*[None if cut is None else cut.axes for cut in layout.dims])


def flow_over_mesh(flow: Flow, mesh: Mesh) -> Any:
    """A function from a program's inputs to its outputs, both lists of arrays on `mesh`.

    Args:
      flow: layouts through the program.
      mesh: the devices, with the axes that the flow names.
    """
    program, given, made = program_of_device(flow, long_axes(mesh), mesh.devices.flat[0].platform)
    return program_over_mesh(program, mesh, tuple(map(spec_of, given)), list(map(spec_of, made)))


def program_of_device(
    flow: Flow, axes: Axes, platform: str
) -> tuple[Callable[..., list[Any]], list[Layout], list[Layout]]:
    """The function that each device runs: from its parts of a program's inputs to its parts of the outputs.

    Args:
      flow: layouts through the program.
      axes: sizes of the mesh axes longer than one.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Returns:
      The function, and the layouts of the inputs and of the outputs, which specs can express.
    """
    given = [as_spec_layout(layout, axes) for layout in flow.inputs]
    made = [as_spec_layout(layout, axes) for layout in flow.outputs]

    def convert_values(
        values: Sequence[Any], starts: Sequence[Layout], ends: Sequence[Layout], atoms: Sequence[Any]
    ) -> list[Any]:
        return [
            convert(value, start, end, getattr(atom.aval, "shape", ()), axes)
            for value, start, end, atom in zip(values, starts, ends, atoms, strict=True)
        ]

    def on_each_device(*values: Any) -> list[Any]:
        inputs = convert_values(values, given, flow.inputs, flow.program.inputs)
        outputs = run(flow, inputs, axes, platform)
        return convert_values(outputs, flow.outputs, made, flow.program.outputs)

    return on_each_device, given, made


def program_over_mesh(program: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Runs a per-device program over a mesh, all of whose axes are manual.

    XLA treats empty arrays as constants before it reads the shardings of operands, and fails if a program then has no
    operand. If all operands are empty, they are made on each device.

    Args:
      program: maps a device's shards of arguments to its shards of results.
      mesh: the devices.
      in_specs: specs of the arguments, as for `jax.shard_map`.
      out_specs: specs of the results.
    """

    def run(*args: Any) -> Any:
        whole = functools.partial(jax.shard_map, mesh=mesh, out_specs=out_specs, check_vma=False)
        leaves, treedef = jax.tree.flatten(args)
        if not leaves or any(leaf.size for leaf in leaves):
            return whole(program, in_specs=in_specs)(*args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))

        def without_operands() -> Any:
            pairs = zip(leaves, specs, strict=True)
            return program(*jax.tree.unflatten(treedef, [empty_part(leaf, spec, mesh) for leaf, spec in pairs]))

        return whole(without_operands, in_specs=())()

    return run


def empty_part(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """A device's shard of an empty array."""
    shape = NamedSharding(mesh, spec).shard_shape(leaf.shape)
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, leaf.dtype)
    data = jax.eval_shape(jax.random.key_data, leaf)
    shape = (*shape, *data.shape[len(shape) :])
    return jax.random.wrap_key_data(jnp.zeros(shape, data.dtype), impl=jax.random.key_impl(leaf))
