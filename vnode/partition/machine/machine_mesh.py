"""Devices and axis sizes -> a mesh with named axes, which follow the axes of a torus where possible.

Knows networks, and numbers of devices. Must not know kinds of devices, or the arrays that an axis divides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from vnode.errors import MachineError
from vnode.partition.machine.networks import Network
from vnode.partition.machine.torus import Torus


@dataclasses.dataclass(frozen=True, eq=False)
class MachineMesh:
    """Devices of a machine as a mesh.

    Attributes:
      names: names of the axes.
      devices: numbers of the devices, an array with a dimension for each axis.

    Example:
      >>> import numpy as np
      >>> from vnode.partition import MachineMesh
      >>> mesh = MachineMesh(("data", "model"), np.arange(4).reshape(2, 2))
      >>> mesh.groups("model"), mesh.groups("data"), mesh.groups("data", "model")
      (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),))
    """

    names: tuple[str, ...]
    devices: np.ndarray

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(zip(self.names, self.devices.shape, strict=True))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Groups of devices that differ only along some axes; one group per position along the other axes.

        Args:
          axes: names of the axes; within a group, the first varies slowest.

        Raises:
          MachineError: the mesh has no such axis, or one is named twice.
        """
        if not axes or len(set(axes)) != len(axes) or not set(axes) <= set(self.names):
            raise MachineError(f"axes of a mesh over {', '.join(self.names)} are some of these, not {axes}")
        at = [self.names.index(axis) for axis in axes]
        moved = np.moveaxis(self.devices, at, range(-len(at), 0))
        rows = moved.reshape(-1, math.prod(self.shape[axis] for axis in axes))
        return tuple(tuple(int(device) for device in row) for row in rows)


def lay_out_mesh(sizes: Mapping[str, int], networks: Sequence[Network], devices: int) -> MachineMesh:
    """A mesh over all devices.

    If the devices are one torus, each mesh axis takes whole axes of the torus if the sizes allow it; else the torus is
    taken row by row. If they are several tori of one shape, the first mesh axes go from one torus to the next. Without
    a torus, devices are taken in order.
    """
    if not isinstance(sizes, Mapping):
        raise MachineError(f"a mesh needs the sizes of its axes, such as {{'data': 4}}, not {sizes!r}")
    shape = tuple(sizes.values())
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1 for n in shape):
        raise MachineError(f"each axis of a mesh needs a name and a positive size, not {dict(sizes)}")
    if math.prod(shape) != devices:
        raise MachineError(
            f"a mesh of {' x '.join(map(str, shape))} has {math.prod(shape)} places for {devices} devices",
            remedies=["the product of the sizes must be the number of devices"],
        )
    names = tuple(map(str, sizes))
    grids = [torus_grid(network) for network in networks if isinstance(network, Torus)]
    whole = [found for found in grids if found is not None]
    if not whole or sum(found.size for found in whole) != devices or len({found.shape for found in whole}) > 1:
        return MachineMesh(names, np.arange(devices).reshape(shape))
    return MachineMesh(names, mesh_order(whole, shape).reshape(shape))


def torus_grid(torus: Torus) -> np.ndarray | None:
    """The devices of a torus as an array of its shape; None unless every point has a device."""
    found = np.full([axis.size for axis in torus.axes], -1)
    for device, point in torus.at.items():
        found[point] = device
    return None if (found < 0).any() else found


def mesh_order(grids: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """The devices of several tori, arranged in the shape of a mesh."""
    for front in range(len(shape) + 1):
        if math.prod(shape[:front]) == len(grids):
            taken = assign_torus_axes(shape[front:], list(enumerate(grids[0].shape)))
            if taken is not None:
                order = [axis for axes in taken for axis in axes]
                rest = [axis for axis in range(grids[0].ndim) if axis not in order]  # of size 1
                return np.concatenate([found.transpose(order + rest).ravel() for found in grids])
    return np.concatenate([found.ravel() for found in grids])


def assign_torus_axes(sizes: Sequence[int], axes: list[tuple[int, int]]) -> list[tuple[int, ...]] | None:
    """The torus axes that each mesh axis takes whole; None if the sizes do not fit.

    >>> assign_torus_axes((4, 16), [(0, 4), (1, 4), (2, 4)])
    [(0,), (1, 2)]
    """
    if not sizes:
        return [] if all(size == 1 for _, size in axes) else None
    for chosen in range(1 << len(axes)):
        mine = [axis for i, axis in enumerate(axes) if chosen >> i & 1]
        if math.prod(size for _, size in mine) == sizes[0] and (sizes[0] > 1 or not mine):
            rest = assign_torus_axes(sizes[1:], [axis for axis in axes if axis not in mine])
            if rest is not None:
                return [tuple(axis for axis, _ in mine), *rest]
    return None
