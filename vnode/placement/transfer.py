"""Moves arrays to a placement's devices.

Knows shardings and placements. Must not know steps.

Arrays go from device to device. Replicas do so as they are, also a single one that jax is told to be the only one of a
mesh; an array that is sharded is put together by the devices that it leaves and divided by those that it comes to. All
else jax would move through the host.
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


def transfer(leaf: Any, placement: Placement, *, batch: bool = False, led: bool = False) -> Any:
    """An array as the programs of a placement take it; one that lies so stays as it is.

    A batch in shares is put together if they are those of another placement.

    Args:
      leaf: an array, or a batch in shares.
      placement: where to.
      batch: whether it is split among nodes.
      led: as for `stays_in_place`.
    """
    if isinstance(leaf, ShardedBatch):
        if leaf.placement == placement:
            return leaf
        leaf = leaf.whole()
    if stays_in_place(leaf.sharding, placement, batch and led):
        return leaf
    return to_placement(leaf, placement, arrival_sharding(leaf, placement, batch))


with jax.core.eval_context():
    AT_ONCE = jax.extend.core.get_opaque_trace_state(convention="vnode")


def tracing() -> bool:
    """Whether jax records what is done, instead of doing it; also what is done to arrays that are there.

    Example:
      >>> tracing(), jax.eval_shape(lambda: jax.numpy.array(tracing())).shape
      (False, ())
    """
    return jax.extend.core.get_opaque_trace_state(convention="vnode") != AT_ONCE


def commit_to(leaf: Any, placement: Placement) -> Any:
    """A leaf that is committed to the placement's mesh, if it is an array."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.committed and is_own(leaf.sharding, placement):
        return leaf
    return to_placement(leaf, placement)


def to_placement(leaf: Any, placement: Placement, target: NamedSharding | None = None) -> Any:
    """A leaf on the placement's devices, in the sharding that is said, or else `target_sharding` says."""
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
    """An array whole on each of its devices, if it is sharded over a mesh."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return leaf
    return resharding(NamedSharding(sharding.mesh, PartitionSpec()))(leaf)


@device_cache(maxsize=64)
def resharding(target: NamedSharding) -> Callable[[Any], Any]:
    """A program that brings an array into another sharding over the same devices."""
    return jax.jit(lambda leaf: leaf, out_shardings=target)


def target_sharding(leaf: Any, placement: Placement) -> NamedSharding:
    """How an array is laid out on a placement: as it was, over axes of the same names, if these divide it, else whole.

    Args:
      leaf: an array or a `jax.ShapeDtypeStruct`.
      placement: where it goes.

    Returns:
      The sharding.

    Example:
      >>> import jax, jax.numpy as jnp, vnode
      >>> target_sharding(jnp.ones(3), vnode.Placement(4, jax.devices()[:1])).is_fully_replicated
      True
    """
    return fitting_sharding(placement, np.shape(leaf), partition(leaf))


def arrival_sharding(leaf: Any, placement: Placement, batch: bool) -> NamedSharding:
    """How an argument of a step lies that is brought to a placement from elsewhere.

    What comes from another mesh of the same devices stays in the memory where it is. A batch, which has an axis of
    another name there, stays split, along the nodes: it would be whole on every device by `target_sharding`.

    Args:
      leaf: an array, or a `jax.ShapeDtypeStruct` with a sharding.
      placement: where it goes.
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
    """In which memory arrays of a sharding lie; that of the devices where it does not say."""
    return sharding.memory_kind or mesh_devices(sharding.mesh)[0].default_memory().kind


def partition(leaf: Any) -> PartitionSpec:
    """Over which mesh axes a leaf is partitioned."""
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
    """An array that lies as `target` says, with a sharding that names the same axes.

    Axes of a single device divide nothing, so that an array may lie so and not name them: one on a single device, or
    one that XLA gave back. But whoever reads how a state is sharded must find the axes: it is computed as one that is
    sharded over them, and is divided over them once they are longer. Nothing is copied.

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
    """A spec without the dimensions at its end that it does not name, which XLA does not give back."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def has_device_order(sharding: Sharding, devices: Sequence[Any]) -> bool:
    """Whether a sharding is over these devices, and counts them in this order: a program has one order of devices.

    Example:
      >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
      >>> has_device_order(NamedSharding(mesh, PartitionSpec()), jax.devices()[:1])
      True
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return mesh_devices(sharding.mesh) == tuple(devices)
    return sharding.device_set == set(devices)


def is_own(sharding: Sharding, placement: Placement) -> bool:
    """Whether programs of a placement take an array of a sharding as it is: over its mesh, or over its only device.

    It is not enough to be over the same devices: jax reads how all results lie by the mesh of a program's first
    argument, and results that lie over the placement's mesh may not lie over that.

    Example:
      >>> mesh, other = Mesh(np.array(jax.devices()[:2]), ("data",)), Mesh(np.array(jax.devices()[:2]), ("model",))
      >>> [is_own(NamedSharding(each, PartitionSpec()), Placement(2, mesh=mesh, axis="data")) for each in (mesh, other)]
      [True, False]
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh == placement.mesh:
        return True
    return placement.mesh.size == 1 and stays_in_place(sharding, placement, led=True)


def stays_in_place(sharding: Sharding, placement: Placement, led: bool) -> bool:
    """Whether programs take an array of a sharding as it is, given whether an argument before it is on their mesh.

    Behind such a one the devices count, and that their mesh is no part of the array's type.
    """
    return (
        has_device_order(sharding, placement.devices) and not is_explicit(sharding)
        if led
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
