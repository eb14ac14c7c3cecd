"""A leaf's shape, present sharding and role -> its sharding on a placement's devices; None if it stays as it is.

    role      the leaf is ...                            its sharding
    NAMED     named by a pattern                         by the pattern's spec, or whole; perhaps in host memory
              not named, or has too few dimensions       stays
    PUT       anywhere                                   over axes of the same names if they divide it, else replicated
    UNSPLIT   on no devices yet                          replicated
              in place: on the placement's mesh          stays
              on a mesh of the same devices              as PUT, in the memory, host or device, where it is
              on other devices                           as PUT
    SPLIT     on no devices yet                          stays: jax.jit shards it
              in place: on the placement's devices, in   stays
              their order (on its mesh, if it comes first)
              on a mesh of the same devices              as UNSPLIT, but sharded over nodes if it is sharded at all
              on other devices                           as PUT

Knows shardings and placements. Must not know steps, arrays, nor how these move.

Five callers ask `leaf_sharding` where an argument or a state goes: calls, ahead-of-time compilation, `put`, exchanges
between processes, and patterns of names. So ahead-of-time compilation makes the program that a call needs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from vnode.placement.device_cache import device_cache
from vnode.placement.placement import Placement

HOST = "pinned_host"
"""jax's name for the host memory that devices read and write."""


class Role(enum.Enum):
    """The role of a leaf for a step.

    Attributes:
      NAMED: a leaf of a state, which patterns of names may place.
      PUT: a leaf that is put on a placement by itself: of `VirtualStep.put`, or exchanged between processes.
      UNSPLIT: a leaf of an argument that every node reads whole.
      SPLIT: a leaf of an argument that carries examples.
    """

    NAMED = enum.auto()
    PUT = enum.auto()
    UNSPLIT = enum.auto()
    SPLIT = enum.auto()


def leaf_sharding(
    shape: Sequence[int],
    present: Sharding | None,
    placement: Placement,
    role: Role,
    *,
    mesh_known: bool = False,
    spec: PartitionSpec | None = None,
    host: bool = False,
) -> NamedSharding | None:
    """The sharding that a leaf gets on a placement.

    Args:
      shape: of the leaf.
      present: its sharding; None if it is not committed to devices.
      placement: the target.
      role: of the leaf.
      mesh_known: as for `stays_in_place`; counts for split leaves.
      spec: the spec of the pattern that names the leaf, if one does. Axes that the mesh lacks divide nothing.
      host: whether a pattern puts the leaf into host memory.

    Returns:
      The sharding; None if the leaf stays as it is.

    Example:
      >>> import vnode
      >>> here = vnode.Placement(2, mesh=Mesh(np.array(jax.devices()[:1]), ("data",)), axis="data")
      >>> [leaf_sharding((4,), None, here, role) for role in (Role.SPLIT, Role.NAMED)]
      [None, None]
      >>> leaf_sharding((4,), None, here, Role.NAMED, spec=PartitionSpec(("data", "model"))).spec
      P('data',)
    """
    if role is Role.NAMED:
        asked = PartitionSpec() if host and spec is None else spec
        if asked is None or len(asked) > len(shape):
            return None
        return NamedSharding(placement.mesh, restrict_to_mesh(asked, placement), memory_kind=HOST if host else None)
    if present is None:
        return None if role is Role.SPLIT else placement.sharding()
    if role is not Role.PUT and stays_in_place(present, placement, role is Role.SPLIT and mesh_known):
        return None
    target = fitting_sharding(placement, shape, spec_of(present))
    if role is Role.PUT or not has_device_order(present, placement.devices):
        return target
    parts = present.shard_shape(tuple(shape))
    split = [dim for dim, (part, length) in enumerate(zip(parts, shape, strict=True)) if part < length]
    if role is Role.SPLIT and split and not any(trim_spec(target.spec)):  # the axis has another name there
        target = fitting_sharding(placement, shape, PartitionSpec(*[None] * split[0], placement.axis))
    kind = present.memory_kind
    return target if kind in (None, memory_kind(target)) else target.with_memory_kind(kind)


def put_sharding(leaf: Any, placement: Placement) -> NamedSharding:
    """The sharding of an array, or a `jax.ShapeDtypeStruct`, that is put on a placement by itself.

    Example:
      >>> import jax.numpy as jnp, vnode
      >>> put_sharding(jnp.ones(3), vnode.Placement(4, jax.devices()[:1])).is_fully_replicated
      True
    """
    target = leaf_sharding(np.shape(leaf), getattr(leaf, "sharding", None), placement, Role.PUT)
    assert target is not None
    return target


def committed_sharding(leaf: Any) -> Sharding | None:
    """The sharding of an array that is committed to its devices, or of a `jax.ShapeDtypeStruct`; otherwise None."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def fitting_sharding(placement: Placement, shape: Sequence[int], spec: PartitionSpec) -> NamedSharding:
    """The sharding by `spec` on a placement's mesh if it fits there, else the replicated one."""
    try:
        sharding = NamedSharding(placement.mesh, spec)
        sharding.shard_shape(tuple(shape))
    except ValueError:
        return placement.sharding()
    return sharding


def partition(leaf: Any) -> PartitionSpec:
    """The mesh axes over which a leaf is partitioned."""
    return spec_of(getattr(leaf, "sharding", None))


def spec_of(sharding: Any) -> PartitionSpec:
    """The spec of a sharding over a mesh; an empty one for any other."""
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def restrict_to_mesh(spec: PartitionSpec, placement: Placement) -> PartitionSpec:
    """Restricts a spec to the axes of a placement's mesh."""
    entries = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in spec]
    kept = [tuple(name for name in entry if name in placement.mesh.shape) for entry in entries]
    return PartitionSpec(*[entry or None for entry in kept])


def trim_spec(spec: PartitionSpec) -> PartitionSpec:
    """A spec without trailing dimensions that name no axis; XLA does not return these."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def memory_kind(sharding: NamedSharding) -> str:
    """The memory kind of a sharding; the devices' default where it has none."""
    return sharding.memory_kind or mesh_devices(sharding.mesh)[0].default_memory().kind


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


def is_explicit(sharding: Any) -> bool:
    """Whether a sharding is over a mesh with explicit axes, and so a part of its array's type."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
