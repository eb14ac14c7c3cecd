"""Moves arrays to a placement's devices.

Knows shardings and placements. Must not know steps.

Arrays go from device to device. That includes replicated ones, also on a single device that jax treats as a mesh. A
sharded array is gathered by its old devices and sharded by its new ones. Otherwise jax would move arrays through the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from vnode.placement.device_cache import device_cache
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch


def transfer(leaf: Any, placement: Placement, *, batch: bool = False, mesh_known: bool = False) -> Any:
    """An array as the programs of a placement take it; unchanged if it already lies so.

    A batch in shares of another placement is gathered.

    Args:
      leaf: an array, or a batch in shares.
      placement: the target.
      batch: whether it is split among nodes.
      mesh_known: as for `stays_in_place`.
    """
    if isinstance(leaf, ShardedBatch):
        if leaf.placement == placement:
            return leaf
        leaf = leaf.whole()
    if stays_in_place(leaf.sharding, placement, batch and mesh_known):
        return leaf
    return to_placement(leaf, placement, arrival_sharding(leaf, placement, batch))


with jax.core.eval_context():
    AT_ONCE = jax.extend.core.get_opaque_trace_state(convention="vnode")


def tracing() -> bool:
    """Whether jax traces; then operations on concrete arrays are traced too.

    Example:
      >>> tracing(), jax.eval_shape(lambda: jax.numpy.array(tracing())).shape
      (False, ())
    """
    return jax.extend.core.get_opaque_trace_state(convention="vnode") != AT_ONCE


def commit_to(leaf: Any, placement: Placement) -> Any:
    """Commits an array leaf to the placement's mesh."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.committed and is_own(leaf.sharding, placement):
        return leaf
    return to_placement(leaf, placement)


def to_placement(leaf: Any, placement: Placement, target: NamedSharding | None = None) -> Any:
    """Moves a leaf to the placement's devices, with a given sharding, or that of `target_sharding`."""
    sharding: Any = getattr(leaf, "sharding", None)
    target = target_sharding(leaf, placement) if target is None else target
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


def target_sharding(leaf: Any, placement: Placement) -> NamedSharding:
    """An array's sharding on a placement: over axes of the same names, if these divide it, else replicated.

    Args:
      leaf: an array or a `jax.ShapeDtypeStruct`.
      placement: the target.

    Returns:
      The sharding.

    Example:
      >>> import jax, jax.numpy as jnp, vnode
      >>> target_sharding(jnp.ones(3), vnode.Placement(4, jax.devices()[:1])).is_fully_replicated
      True
    """
    return fitting_sharding(placement, np.shape(leaf), partition(leaf))


def arrival_sharding(leaf: Any, placement: Placement, batch: bool) -> NamedSharding:
    """The sharding of a step's argument that comes to a placement from elsewhere.

    An array of another mesh of the same devices keeps its memory kind. A batch, whose axis has another name there,
    stays sharded, by nodes; `target_sharding` would replicate it.

    Args:
      leaf: an array, or a `jax.ShapeDtypeStruct` with a sharding.
      placement: the target.
      batch: whether it is split among nodes.
    """
    target = target_sharding(leaf, placement)
    if not has_device_order(leaf.sharding, placement.devices):
        return target
    parts = leaf.sharding.shard_shape(leaf.shape)
    split = [dim for dim, (part, length) in enumerate(zip(parts, leaf.shape, strict=True)) if part < length]
    if batch and split and not any(trim_spec(target.spec)):
        target = fitting_sharding(placement, leaf.shape, PartitionSpec(*[None] * split[0], placement.axis))
    kind = leaf.sharding.memory_kind
    return target if kind in (None, memory_kind(target)) else target.with_memory_kind(kind)


def memory_kind(sharding: NamedSharding) -> str:
    """The memory kind of a sharding; the devices' default where it has none."""
    return sharding.memory_kind or mesh_devices(sharding.mesh)[0].default_memory().kind


def partition(leaf: Any) -> PartitionSpec:
    """The mesh axes over which a leaf is partitioned."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def fitting_sharding(placement: Placement, shape: tuple[int, ...], spec: PartitionSpec) -> NamedSharding:
    """The sharding by `spec` on a placement's mesh if it fits there, else the replicated one."""
    try:
        sharding = NamedSharding(placement.mesh, spec)
        sharding.shard_shape(shape)
    except ValueError:
        return placement.sharding()
    return sharding


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


def trim_spec(spec: PartitionSpec) -> PartitionSpec:
    """A spec without trailing dimensions that name no axis; XLA does not return these."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def has_device_order(sharding: Sharding, devices: Sequence[Any]) -> bool:
    """Whether a sharding is over these devices in this order: a program has one order of devices.

    Example:
      >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
      >>> has_device_order(NamedSharding(mesh, PartitionSpec()), jax.devices()[:1])
      True
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return mesh_devices(sharding.mesh) == tuple(devices)
    return sharding.device_set == set(devices)


def is_own(sharding: Sharding, placement: Placement) -> bool:
    """Whether a placement's programs take an array with a sharding as it is: over its mesh, or its only device.

    The same devices are not enough: jax reads all results' shardings by the mesh of a program's first argument, and
    results over the placement's mesh may not be expressible over another one.

    Example:
      >>> mesh, other = Mesh(np.array(jax.devices()[:2]), ("data",)), Mesh(np.array(jax.devices()[:2]), ("model",))
      >>> [is_own(NamedSharding(each, PartitionSpec()), Placement(2, mesh=mesh, axis="data")) for each in (mesh, other)]
      [True, False]
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh == placement.mesh:
        return True
    return placement.mesh.size == 1 and stays_in_place(sharding, placement, mesh_known=True)


def stays_in_place(sharding: Sharding, placement: Placement, mesh_known: bool) -> bool:
    """As `is_own`, given whether the mesh is known from an earlier argument.

    After such an argument only the devices count, and that their mesh is not part of the array's type.
    """
    return (
        has_device_order(sharding, placement.devices) and not is_explicit(sharding)
        if mesh_known
        else is_own(sharding, placement)
    )


@device_cache(maxsize=16)
def mesh_devices(mesh: Any) -> tuple[Any, ...]:
    """The devices of a `Mesh`."""
    return tuple(mesh.devices.flat)


def typed_sharding(leaf: Any) -> bool:
    """Whether a leaf's sharding is part of its type (a mesh with explicit axes)."""
    return is_explicit(getattr(leaf, "sharding", None))


def is_explicit(sharding: Any) -> bool:
    """Whether a sharding is over a mesh with explicit axes."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
