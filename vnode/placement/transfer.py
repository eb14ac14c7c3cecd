"""Moves arrays to a placement's devices.

Knows shardings and placements. Must not know steps.

Arrays go from device to device. Replicas do so as they are, also a single one that jax is told to be the only one of a
mesh; an array that is sharded is put together by the devices that it leaves and divided by those that it comes to. All
else jax would move through the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch, is_sharded_batch


def transferred(tree: Any, placement: Placement) -> Any:
    """A tree whose arrays all live on the placement's devices; those that do, and what is no array, stay as they are.

    A batch in shares is put together if they are those of another placement.

    Args:
      tree: any pytree.
      placement: where to.

    Returns:
      The same tree; as it is if that would become part of a program that jax is tracing.
    """
    if tracing():
        return tree
    here = placement.devices

    def move(leaf: Any) -> Any:
        if isinstance(leaf, ShardedBatch):
            return leaf if leaf.placement == placement else move(leaf.whole())
        if not isinstance(leaf, jax.Array):
            return leaf
        if not lies_on(leaf.sharding, here) or typed_sharding(leaf):
            return to_placement(leaf, placement)
        return leaf

    return jax.tree.map(move, tree, is_leaf=is_sharded_batch)


with jax.core.eval_context():
    AT_ONCE = jax.extend.core.get_opaque_trace_state(convention="vnode")


def tracing() -> bool:
    """Whether jax records what is done, instead of doing it; also what is done to arrays that are there.

    Example:
      >>> tracing(), jax.eval_shape(lambda: jax.numpy.array(tracing())).shape
      (False, ())
    """
    return jax.extend.core.get_opaque_trace_state(convention="vnode") != AT_ONCE


def committed_to(leaf: Any, placement: Placement) -> Any:
    """A leaf that is committed to the placement's devices, if it is an array."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.committed and lies_on(leaf.sharding, placement.devices):
        return leaf
    return to_placement(leaf, placement)


def to_placement(leaf: Any, placement: Placement) -> Any:
    """A leaf on the placement's devices, in the sharding that `target_sharding` says."""
    sharding: Any = getattr(leaf, "sharding", None)
    target = target_sharding(leaf, placement)
    if sharding is not None and sharding.device_set != target.device_set:
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


@functools.lru_cache
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
    return fitting(placement, np.shape(leaf), partition(leaf))


def partition(leaf: Any) -> PartitionSpec:
    """Over which mesh axes a leaf is partitioned."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def fitting(placement: Placement, shape: tuple[int, ...], spec: PartitionSpec) -> NamedSharding:
    """The sharding by `spec` on a placement's mesh if it fits there, else the replicated one."""
    try:
        sharding = NamedSharding(placement.mesh, spec)
        sharding.shard_shape(shape)
    except ValueError:
        return placement.sharding()
    return sharding


def named_so(leaf: jax.Array, target: NamedSharding) -> jax.Array:
    """An array that lies as `target` says, with a sharding that names the same axes.

    Axes of a single device divide nothing, so that an array may lie so and not name them: one on a single device, or
    one that XLA gave back. But whoever reads how a state is sharded must find the axes: it is computed as one that is
    sharded over them, and is divided over them once they are longer. Nothing is copied.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh
      >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
      >>> named_so(jnp.ones(3), NamedSharding(mesh, PartitionSpec("data"))).sharding.spec == PartitionSpec("data")
      True
    """
    return leaf if short(partition(leaf)) == short(target.spec) else jax.device_put(leaf, target)


def short(spec: PartitionSpec) -> PartitionSpec:
    """A spec without the dimensions at its end that it does not name, which XLA does not give back."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def lies_on(sharding: Sharding, devices: Sequence[Any]) -> bool:
    """Whether a sharding is over these devices, and counts them in this order: a program has one order of devices.

    Example:
      >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
      >>> lies_on(NamedSharding(mesh, PartitionSpec()), jax.devices()[:1])
      True
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return in_order(sharding.mesh) == tuple(devices)
    return sharding.device_set == set(devices)


@functools.lru_cache
def in_order(mesh: Mesh) -> tuple[Any, ...]:
    """The devices of a mesh."""
    return tuple(mesh.devices.flat)


def typed_sharding(leaf: Any) -> bool:
    """Whether a leaf's sharding is part of its type (a mesh with explicit axes)."""
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and any(kind is AxisType.Explicit for kind in sharding.mesh.axis_types)
