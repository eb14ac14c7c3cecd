"""Moves arrays to a placement's devices.

Knows shardings and placements. Must not know steps, nor which sharding an array gets (`leaf_sharding` does).

Arrays go from device to device. That includes replicated ones, also on a single device that jax treats as a mesh. A
sharded array is gathered by its old devices and sharded by its new ones. Otherwise jax would move arrays through the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from vnode.placement.device_cache import device_cache
from vnode.placement.leaf_sharding import (
    Role,
    committed_sharding,
    has_device_order,
    is_explicit,
    leaf_sharding,
    memory_kind,
    partition,
    put_sharding,
    trim_spec,
)
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch

ARRAYS = (jax.Array, np.ndarray, np.generic)


def transfer(leaf: Any, placement: Placement, role: Role, *, mesh_known: bool = False) -> Any:
    """An array as the programs of a placement take it; unchanged if it already lies so, or is no array.

    A batch in shares of another placement is gathered.

    Args:
      leaf: a leaf of an argument.
      placement: the target.
      role: of the leaf.
      mesh_known: as for `stays_in_place`.
    """
    if isinstance(leaf, ShardedBatch):
        if leaf.placement == placement:
            return leaf
        leaf = leaf.whole()
    if not isinstance(leaf, ARRAYS):
        return leaf
    target = leaf_sharding(leaf.shape, committed_sharding(leaf), placement, role, mesh_known=mesh_known)
    return in_row_major_order(leaf, placement) if target is None else to_placement(leaf, placement, target)


with jax.core.eval_context():
    AT_ONCE = jax.extend.core.get_opaque_trace_state(convention="vnode")


def tracing() -> bool:
    """Whether jax traces; then operations on concrete arrays are traced too.

    Example:
      >>> tracing(), jax.eval_shape(lambda: jax.numpy.array(tracing())).shape
      (False, ())
    """
    return jax.extend.core.get_opaque_trace_state(convention="vnode") != AT_ONCE


def to_placement(leaf: Any, placement: Placement, target: NamedSharding | None = None) -> Any:
    """Moves a leaf to the placement's devices, with a given sharding, or that of `put_sharding`."""
    leaf = in_row_major_order(leaf, placement)
    sharding: Any = getattr(leaf, "sharding", None)
    target = put_sharding(leaf, placement) if target is None else target
    if sharding is not None and sharding.device_set == target.device_set:
        moves = not sharding.is_equivalent_to(target, leaf.ndim) and sharding.memory_kind == memory_kind(target)
        if moves and has_device_order(sharding, placement.devices) and not is_explicit(sharding):
            return resharding(target)(leaf)
    elif sharding is not None:
        if sharding.memory_kind not in (None, memory_kind(target)):  # jax does not change both at once
            leaf = jax.device_put(leaf, sharding.with_memory_kind(memory_kind(target)))
            sharding = leaf.sharding
        if isinstance(sharding, SingleDeviceSharding):
            mesh = Mesh(np.array(list(sharding.device_set)), (placement.axis,), axis_types=(AxisType.Auto,))
            leaf = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
        elif isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            return resharding(target)(jax.device_put(replicated(leaf), placement.sharding()))
    return jax.device_put(leaf, target)


def in_row_major_order(leaf: Any, placement: Placement) -> Any:
    """An array with its dimensions in order in memory, if it is for several devices; a copy if they are not.

    XLA's partitioner reads an argument in another order wrongly once it splits it (seen with jax 0.10, not with 0.12).
    Users have such arrays from ``jax.jit(..., out_shardings=Format(Layout((1, 0)), ...))``.

    Example:
      >>> import jax.numpy as jnp, vnode
      >>> array = jnp.ones((2, 3))
      >>> in_row_major_order(array, vnode.Placement(4, jax.devices()[:1])) is array
      True
    """
    if (
        not isinstance(leaf, jax.Array)
        or leaf.ndim < 2
        or placement.mesh.size == 1
        or isinstance(leaf, jax.core.Tracer)
    ):
        return leaf
    layout = leaf.format.layout if hasattr(leaf, "format") else None  # keys have none
    order = tuple(range(leaf.ndim))
    if layout is None or layout.major_to_minor == order:
        return leaf
    return jax.device_put(leaf, Format(Layout(order), leaf.sharding))


def replicated(leaf: jax.Array) -> jax.Array:
    """Replicates an array on its devices, if it is sharded over a mesh."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return leaf
    return resharding(NamedSharding(sharding.mesh, PartitionSpec()))(leaf)


@device_cache(maxsize=64)
def resharding(target: NamedSharding) -> Callable[[Any], Any]:
    """A program that reshards an array over the same devices."""
    return jax.jit(lambda leaf: leaf, out_shardings=target)


def rename_axes(leaf: jax.Array, target: NamedSharding) -> jax.Array:
    """Gives an array that lies as `target` a sharding with the same axis names.

    Axes of size one divide nothing, so an array may lie so without naming them: on a single device, or as XLA returned
    it. But readers of a state's sharding must find the axes: the state is sharded over them once they are longer.
    Nothing is copied.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh
      >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
      >>> rename_axes(jnp.ones(3), NamedSharding(mesh, PartitionSpec("data"))).sharding.spec == PartitionSpec("data")
      True
    """
    there = not isinstance(leaf.sharding, NamedSharding) or leaf.sharding.mesh == target.mesh
    return leaf if there and trim_spec(partition(leaf)) == trim_spec(target.spec) else jax.device_put(leaf, target)
