"""Which virtual nodes live on which device.

Knows devices and meshes. Must not know steps, values or programs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vnode.errors import PlacementError, layout_message
from vnode.show.grid import Grid
from vnode.show.page import Drawn, Page, Picture
from vnode.show.units import several, spread


class Placement(Drawn):
    """Maps virtual nodes onto devices: contiguous ranges, as even as possible unless `counts` says otherwise.

    A notebook draws it by itself, `show` draws it in a terminal (with rich).

    Args:
      virtual_nodes: V, at least 1.
      devices: the devices, in order; all of ``jax.devices()`` by default. More devices than nodes is allowed: the
        last ones then hold no node.
      counts: nodes on each device; must add up to V.
      mesh: spread the nodes over one axis of this mesh instead; its other axes stay automatic, so that parameters
        may be sharded over them. Explicit axes (sharding in types) are treated as automatic.
      axis: the name of the mesh axis over which nodes are spread.

    Raises:
      PlacementError: the arguments do not fit together.

    Example:
      >>> import jax
      >>> placement = Placement(8, jax.devices()[:1])
      >>> placement.counts
      (8,)
    """

    def __init__(
        self,
        virtual_nodes: int,
        devices: Sequence[Any] | None = None,
        *,
        counts: Sequence[int] | None = None,
        mesh: Mesh | None = None,
        axis: str = "vnode",
    ) -> None:
        virtual_nodes = node_count(virtual_nodes)
        if mesh is not None:
            if devices is not None:
                raise PlacementError("give either devices or a mesh: a mesh already has devices")
            if axis not in mesh.axis_names:
                raise PlacementError(
                    layout_message(
                        f"the mesh has no axis {axis!r}.",
                        facts=[f"its axes are {', '.join(map(repr, mesh.axis_names))}"],
                        remedies=["name the axis over which to spread nodes: Placement(..., mesh=mesh, axis='data')"],
                    )
                )
        else:
            if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable)):
                raise PlacementError(
                    f"devices must be a sequence of devices, such as jax.devices()[:2], not {devices!r}"
                )
            devices = list(jax.devices() if devices is None else devices)
            for device in devices:
                if not hasattr(device, "platform"):
                    raise PlacementError(f"{device!r} is no device; jax.devices() has some")
            if not devices:
                raise PlacementError("a placement needs at least one device")
            if len(set(devices)) != len(devices):
                raise PlacementError("a device may be named only once in a placement")
            mesh = Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))
        if any(kind is not AxisType.Auto for kind in mesh.axis_types):
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        size = mesh.shape[axis]
        if counts is None:
            counts = even_counts(virtual_nodes, size)
        counts = tuple(operator.index(n) for n in counts)
        if len(counts) != size:
            raise PlacementError(f"counts has {len(counts)} entries for {size} devices")
        if any(n < 0 for n in counts) or sum(counts) != virtual_nodes:
            raise PlacementError(f"counts must be at least 0 and add up to {virtual_nodes} nodes, not {list(counts)}")
        self.virtual_nodes = virtual_nodes
        self.mesh = mesh
        self.axis = axis
        self.counts = counts

    @property
    def devices(self) -> list[Any]:
        """All devices, those of the mesh's other axes included."""
        return list(self.mesh.devices.flat)

    @property
    def size(self) -> int:
        """Devices along the node axis."""
        return len(self.counts)

    @property
    def waves(self) -> int:
        """Nodes that the fullest device computes one after another."""
        return max(self.counts)

    @property
    def even(self) -> bool:
        """Whether every device holds as many nodes as every other."""
        return min(self.counts) == max(self.counts)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The first node of every device."""
        return tuple(int(n) for n in np.cumsum((0, *self.counts[:-1])))

    @property
    def names(self) -> list[str]:
        """What to call the devices along the node axis; each stands for those of the mesh's other axes too."""
        rows = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(self.axis), 0).reshape(self.size, -1)
        more = f" +{rows.shape[1] - 1}" if rows.shape[1] > 1 else ""
        return [f"{row[0].platform}:{row[0].id}{more}" for row in rows]

    def page(self) -> Page:
        """What there is to see: the nodes by device and wave."""
        held = f"{several(self.size, 'device')} with {spread(self.counts)} each, {several(self.waves, 'wave')}"
        picture = Picture("", Grid.of(self.counts, self.names))
        return Page("Placement", f"{several(self.virtual_nodes, 'node')} on {held}", (picture,))

    def sharding(self, *spec: Any) -> NamedSharding:
        """A sharding over the placement's mesh; replicated without arguments."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and self.counts == other.counts
            and self.mesh == other.mesh
            and self.axis == other.axis
        )

    def __hash__(self) -> int:
        return hash((self.counts, self.mesh, self.axis))

    def __repr__(self) -> str:
        kinds = sorted({getattr(d, "device_kind", str(d)) for d in self.devices})
        return f"Placement({self.virtual_nodes} nodes on {self.size} x {'/'.join(kinds)}: {list(self.counts)})"


def even_counts(virtual_nodes: int, devices: int, lane: int = 1) -> list[int]:
    """Nodes of each device, as even as possible, in whole lanes.

    >>> even_counts(32, 3), even_counts(32, 3, lane=4)
    ([11, 11, 10], [12, 12, 8])
    """
    lanes = -(-virtual_nodes // lane)
    starts = [min(lane * (d * (lanes // devices) + min(d, lanes % devices)), virtual_nodes) for d in range(devices)]
    return [stop - start for start, stop in zip(starts, [*starts[1:], virtual_nodes], strict=True)]


def node_count(virtual_nodes: Any) -> int:
    """A number of nodes as a Python integer.

    Raises:
      PlacementError: it is none.
    """
    try:
        count = 0 if isinstance(virtual_nodes, bool) else operator.index(virtual_nodes)
    except TypeError:
        count = 0
    if count < 1:
        raise PlacementError(f"virtual_nodes must be a positive integer, not {virtual_nodes!r}")
    return count
