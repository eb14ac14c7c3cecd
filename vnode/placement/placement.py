"""Virtual nodes -> devices.

Knows devices and meshes. Must not know steps, values or programs.

All devices of one program are of one kind. A placement on devices of several kinds has groups, one per program; each is
itself a placement of some consecutive nodes.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vnode.errors import Bound, PlacementError
from vnode.placement.world import is_local, world
from vnode.show.drawable import Drawn
from vnode.show.grid import Grid
from vnode.show.page import Page, Picture
from vnode.show.units import several, spread


class Placement(Drawn, Bound):
    """Maps virtual nodes onto devices: contiguous ranges, as even as possible unless `counts` says otherwise.

    A notebook draws it by itself, `show` draws it in a terminal (with rich).

    Args:
      virtual_nodes: V, at least 1.
      devices: the devices, in order, or a number for the first so many; all of ``jax.devices()`` by default. More
        devices than nodes is allowed: the last ones then hold no node.
      counts: nodes on each device; must add up to V.
      mesh: spread the nodes over one axis of this mesh instead; over its other axes parameters may be sharded, and
        what a node computes is divided. Explicit axes (sharding in types) are treated as automatic.
      axis: the name of the mesh axis over which nodes are spread.
      groups: in place of `devices`, those of each program: devices of one kind in each. By default neighbours of one
        kind share a program.

    Attributes:
      first: its first node; 0 unless it is a group of another placement.

    Raises:
      PlacementError: the arguments contradict each other.

    Example:
      >>> from vnode import Placement
      >>> import jax
      >>> placement = Placement(8, jax.devices()[:1])
      >>> placement.counts
      (8,)
    """

    def __init__(
        self,
        virtual_nodes: int,
        devices: Sequence[Any] | int | None = None,
        *,
        counts: Sequence[int] | None = None,
        mesh: Mesh | None = None,
        axis: str = "vnode",
        groups: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        virtual_nodes = node_count(virtual_nodes)
        if sum(given is not None for given in (devices, mesh, groups)) > 1:
            raise PlacementError("give one of devices, mesh and groups: each names the devices")
        divided: list[list[Any]] = []
        if mesh is not None:
            if axis not in mesh.axis_names:
                raise PlacementError(
                    f"the mesh has no axis {axis!r}.",
                    facts=[f"its axes are {', '.join(map(repr, mesh.axis_names))}"],
                    remedies=["name the axis over which to spread nodes: Placement(..., mesh=mesh, axis='data')"],
                )
        else:
            divided = (
                [device_list(group) for group in groups]
                if groups is not None
                else neighbours_of_one_kind(device_list(devices))
            )
            devices = [device for group in divided for device in group]
            if not devices or not all(divided):
                raise PlacementError("a placement needs at least one device" + (" in each group" if devices else ""))
            check_once(devices)
            mixed = [group for group in divided if len(neighbours_of_one_kind(group)) > 1]
            if mixed:
                raise PlacementError(f"a group is one program and needs devices of one kind, not {mixed[0]}")
            mesh = mesh_of(divided[0], axis)
        if any(kind is not AxisType.Auto for kind in mesh.axis_types):
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        size = sum(map(len, divided)) or mesh.shape[axis]
        if counts is None:
            counts = even_counts(virtual_nodes, size)
        try:
            counts = tuple(operator.index(n) for n in counts)
        except TypeError:
            raise PlacementError(
                f"counts must have one integer for each device, group after group, not {counts!r}"
            ) from None
        if len(counts) != size:
            raise PlacementError(f"counts has {several(len(counts), 'entry', 'entries')} for {several(size, 'device')}")
        if any(n < 0 for n in counts) or sum(counts) != virtual_nodes:
            raise PlacementError(f"counts must be at least 0 and add up to {virtual_nodes} nodes, not {list(counts)}")
        self.virtual_nodes = virtual_nodes
        self.mesh = mesh  # the first group's
        self.axis = axis
        self.counts = counts
        self.first = 0
        self._groups: tuple[Placement, ...] = ()
        if len(divided) > 1:
            ends = np.cumsum([0, *map(len, divided)])
            self._groups = tuple(
                self._group(mesh_of(group, axis), counts[start:end], sum(counts[:start]))
                for group, start, end in zip(divided, ends, ends[1:], strict=False)
            )

    def _group(self, mesh: Mesh, counts: tuple[int, ...], first: int) -> Placement:
        group = object.__new__(type(self))
        group.__dict__.update(self.__dict__)
        group.mesh, group.counts, group.first, group._groups = mesh, counts, first, ()
        return group

    @property
    def groups(self) -> tuple[Placement, ...]:
        """One placement per program, each of some of the nodes; itself if there is one program."""
        return self._groups or (self,)

    @property
    def working(self) -> tuple[Placement, ...]:
        """The groups that hold nodes."""
        return tuple(group for group in self.groups if group.nodes)

    @property
    def nodes(self) -> int:
        """The number of its nodes: V, unless it is a group."""
        return sum(self.counts)

    def resize(self, devices: Sequence[Any] | Mesh, counts: Sequence[int] | None = None) -> Placement:
        """Places the same nodes on other devices.

        Args:
          devices: a sequence of devices, as `arrange_devices` takes it, or a mesh that has the placement's axis.
          counts: nodes on each device, or at each place along the axis; as even as possible by default.

        Returns:
          Another placement.

        Raises:
          PlacementError: as for `Placement`, and for `arrange_devices`.

        Example:
          >>> from vnode import Placement
          >>> import jax
          >>> placement = Placement(8, jax.devices()[:4], counts=[2, 2, 2, 2])
          >>> placement.resize(jax.devices()[:3]).counts
          (3, 3, 2)
        """
        place = self.arrange_devices(devices)
        if isinstance(place, Mesh):
            return Placement(self.virtual_nodes, mesh=place, counts=counts, axis=self.axis)
        return Placement(self.virtual_nodes, place, counts=counts, axis=self.axis)

    def arrange_devices(self, devices: Sequence[Any] | Mesh) -> list[Any] | Mesh:
        """The devices on which the nodes will live: a list, or a mesh.

        Args:
          devices: a mesh, returned unchanged, or a sequence of devices. If the placement's mesh has other axes, these
            keep their sizes, and the nodes' axis takes the remaining devices.

        Returns:
          The devices as a list, or a mesh that has the placement's axes.

        Raises:
          PlacementError: the other axes do not divide the number of devices, or these are of several kinds.

        Example:
          >>> from jax.sharding import AxisType
          >>> from vnode import Placement
          >>> import jax
          >>> mesh = jax.make_mesh((4, 2), ("vnode", "model"), axis_types=(AxisType.Auto,) * 2)
          >>> dict(Placement(8, mesh=mesh).arrange_devices(jax.devices()[:6]).shape)
          {'vnode': 3, 'model': 2}
        """
        if isinstance(devices, Mesh):
            return devices
        devices, shape = device_list(devices), dict(self.mesh.shape)
        check_once(devices)
        mixed = len(neighbours_of_one_kind(devices)) > 1
        if len(shape) == 1 or not devices or (mixed and self.together == 1):
            return devices
        if mixed or len(devices) % self.together:
            others = {name: length for name, length in shape.items() if name != self.axis}
            alone = f"vnode.Placement({self.virtual_nodes}, devices, axis={self.axis!r})"
            raise PlacementError(
                f"{several(len(devices), 'device')} cannot have the mesh's other axes, {others}: "
                + ("they are of several kinds." if mixed else f"{self.together} does not divide {len(devices)}."),
                facts=[f"the nodes are on {shape}, along {self.axis!r}"],
                remedies=[
                    f"a multiple of {several(self.together, 'device')}, of one kind",
                    "a mesh, which gives the size of each axis: step.on(mesh)",
                    f"to drop the other axes, and sharding over them: step.on({alone})",
                ],
            )
        shape[self.axis] = len(devices) // self.together
        return Mesh(
            np.array(devices).reshape(tuple(shape.values())), self.mesh.axis_names, axis_types=self.mesh.axis_types
        )

    @property
    def devices(self) -> list[Any]:
        """All devices, including those along the mesh's other axes."""
        return [device for group in self.groups for device in group.mesh.devices.flat]

    @property
    def size(self) -> int:
        """The number of devices along the nodes' axis."""
        return len(self.counts)

    @property
    def together(self) -> int:
        """The number of devices that compute a node together: those along the mesh's other axes."""
        return len(self.devices) // self.size

    @property
    def waves(self) -> int:
        """The number of nodes that the fullest device computes one after another."""
        return max(self.counts)

    @property
    def even(self) -> bool:
        """Whether all devices hold equally many nodes."""
        return min(self.counts) == max(self.counts)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The first node of every device."""
        return tuple(self.first + int(n) for n in np.cumsum((0, *self.counts[:-1])))

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """The slot of every node, when every device has as many slots as the fullest one."""
        return tuple(d * self.waves + k for d, count in enumerate(self.counts) for k in range(count))

    def local_examples(self, batch_size: int) -> np.ndarray:
        """The rows of a batch that this process must provide: those of its own devices' nodes.

        If V does not divide the batch, the last example is repeated in the last nodes; a process whose nodes have no
        example of their own must provide that one.

        Args:
          batch_size: examples of the whole batch, B.

        Returns:
          Row numbers, increasing, ``int64[n]``; all of them if there is one process. `vnode.data.local_batch` takes
          these rows.

        Example:
          >>> from vnode import Placement
          >>> import jax
          >>> Placement(4, jax.devices()[:1]).local_examples(6)
          array([0, 1, 2, 3, 4, 5])
        """
        node, rows = -(-batch_size // self.virtual_nodes), [np.zeros(0, np.int64)]
        for group in self.groups:
            slices = np.moveaxis(group.mesh.devices, group.mesh.axis_names.index(group.axis), 0)
            for devices, start, count in zip(slices.reshape(group.size, -1), group.starts, group.counts, strict=True):
                if any(map(is_local, devices)):
                    rows.append(np.arange(start * node, (start + count) * node))
        return np.unique(np.minimum(np.concatenate(rows), batch_size - 1))

    @property
    def own_nodes(self) -> int:
        """The number of nodes that this process computes, some perhaps together with others along a further mesh axis.

        Example:
          >>> from vnode import Placement
          >>> import jax
          >>> Placement(4, jax.devices()[:1]).own_nodes
          4
        """
        return len(self.local_examples(self.virtual_nodes))

    @property
    def names(self) -> list[str]:
        """Names of the devices along the nodes' axis; each stands for those of the mesh's other axes too."""
        found = []
        for group in self.groups:
            axis = group.mesh.axis_names.index(group.axis)
            rows = np.moveaxis(group.mesh.devices, axis, 0).reshape(group.size, -1)
            more = f" +{rows.shape[1] - 1}" if rows.shape[1] > 1 else ""
            found += [f"{row[0].platform}:{row[0].id}{more}" for row in rows]
        return found

    def page(self) -> Page:
        """The page that displays the nodes by device and wave."""
        each = self.together
        holder = "device" if each == 1 else "row"
        held = f"{several(self.size, holder)}{'' if each == 1 else f' of {each} devices'}"
        held += f" with {spread(self.counts)} each, {several(self.waves, 'wave')}"
        held += f", {len(self.groups)} groups" if len(self.groups) > 1 else ""
        picture = Picture("", Grid.from_counts(self.counts, self.names, each=holder))
        return Page("Placement", f"{several(self.virtual_nodes, 'node')} on {held}", (picture,))

    def sharding(self, *spec: Any) -> NamedSharding:
        """A sharding over the placement's mesh, or its first group's; replicated without arguments."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.counts, self.axis, self.first, *(group.mesh for group in self.groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        parts = [f"{group.size} x {group.kinds}: {list(group.counts)}" for group in self.groups]
        return f"Placement({self.virtual_nodes} nodes on {', '.join(parts)})"

    __str__ = __repr__  # in messages it is one of several words; `show` draws it

    @property
    def kinds(self) -> str:
        """The kinds of devices, in words."""
        return "/".join(sorted({getattr(device, "device_kind", str(device)) for device in self.devices}))


def device_list(devices: Any) -> list[Any]:
    """A list of devices; all by default; for a number n, the first n of ``jax.devices()``.

    Raises:
      PlacementError: an entry is no device.
    """
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        there = world().devices
        if not 1 <= devices <= len(there):
            raise PlacementError(
                f"devices={devices} was asked for, and jax.devices() has {len(there)}.",
                remedies=[
                    f"name from 1 to {len(there)}",
                    "or, to try several on a CPU, write this before jax is used: "
                    f'jax.config.update("jax_num_cpu_devices", {max(devices, 1)})',
                ],
            )
        devices = there[:devices]
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable)):
        raise PlacementError(
            f"devices must be a number or a sequence of devices, such as jax.devices()[:2], not {devices!r}; "
            "groups=[...] takes several such sequences"
        )
    devices = list(world().devices if devices is None else devices)
    if devices and all(isinstance(each, int | np.integer) for each in devices):
        raise PlacementError(
            f"devices={devices} are numbers; a step is put on devices.",
            remedies=[
                f"by number in jax.devices(): [jax.devices()[i] for i in {devices}]",
                f"or one number, for the first of them: {max(int(each) for each in devices)}",
            ],
        )
    for device in devices:
        if not hasattr(device, "platform"):
            nested = isinstance(device, Iterable) and not isinstance(device, str)
            hint = "give one list of devices, or groups=[...], a list for each program" if nested else None
            raise PlacementError(f"{device!r} is not a device; {hint or 'jax.devices() lists them'}")
    return devices


def check_once(devices: Sequence[Any]) -> None:
    """Raises if a device is named twice.

    Raises:
      PlacementError: one is named twice.
    """
    if len(set(devices)) != len(devices):
        raise PlacementError("a device may be named only once in a placement")


def neighbours_of_one_kind(devices: Sequence[Any]) -> list[list[Any]]:
    """Groups neighbouring devices of one kind."""

    def kind(device: Any) -> tuple[str, Any]:
        return device.platform, getattr(device, "device_kind", None)

    return [list(group) for _, group in itertools.groupby(devices, kind)]


def mesh_of(devices: Sequence[Any], axis: str) -> Mesh:
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))


def even_counts(virtual_nodes: int, devices: int, lane: int = 1) -> list[int]:
    """The number of nodes of each device, as even as possible, in whole lanes.

    >>> even_counts(32, 3), even_counts(32, 3, lane=4)
    ([11, 11, 10], [12, 12, 8])
    """
    lanes = -(-virtual_nodes // lane)
    starts = [min(lane * (d * (lanes // devices) + min(d, lanes % devices)), virtual_nodes) for d in range(devices)]
    return [stop - start for start, stop in zip(starts, [*starts[1:], virtual_nodes], strict=True)]


MOST_NODES = 1 << 20
"""The most nodes. Each is an iteration of a loop, and a leaf of the tree of sums, which the host builds."""


def node_count(virtual_nodes: Any) -> int:
    """Converts a number of nodes to a Python integer.

    Raises:
      PlacementError: it is no positive integer, or too large.
    """
    try:
        count = 0 if isinstance(virtual_nodes, bool) else operator.index(virtual_nodes)
    except TypeError:
        count = 0
    if count < 1:
        raise PlacementError(f"virtual_nodes must be a positive integer, not {virtual_nodes!r}")
    if count > MOST_NODES:
        raise PlacementError(
            f"virtual_nodes is at most {MOST_NODES:,}, not {count:,}: each node is an iteration of a loop.",
            remedies=["at most as many as the batch has examples: more have nothing to do", "or 'auto'"],
        )
    return count
