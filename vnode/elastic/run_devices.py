"""Turns requests for devices, and lost devices, into the placement that a run uses.

Knows devices, meshes and placements. Must not know steps, states, or when devices are changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from vnode.errors import PlacementError
from vnode.placement.placement import Placement, device_list
from vnode.placement.world import is_local, is_shared, world


class Devices:
    """The devices that a run is to use, changed from wherever the change is known.

    `change` may be called from other threads and from signal handlers; the run follows before its next step.

    Args:
      devices: a sequence of devices, a number for the first so many, or a `Placement`.
      counts: nodes on each device; as even as possible by default.

    Example:
      >>> import jax, signal, vnode
      >>> devices = vnode.elastic.Devices(jax.devices())
      >>> def fewer(*_):
      ...     devices.change(jax.devices()[:1])
      >>> previous = signal.signal(signal.SIGUSR1, fewer)
      >>> signal.raise_signal(signal.SIGUSR1)
      >>> devices.request.devices == (jax.devices()[0],)
      True
      >>> _ = signal.signal(signal.SIGUSR1, previous)
    """

    def __init__(self, devices: Any, *, counts: Sequence[int] | None = None) -> None:
        self.change(devices, counts=counts)

    def change(self, devices: Any, *, counts: Sequence[int] | None = None) -> None:
        """Asks for other devices; the last request counts."""
        self.request = Request.from_devices(devices, counts)  # one assignment: no lock that a signal could find taken


@dataclasses.dataclass(frozen=True)
class Request:
    """Devices that are asked for."""

    devices: Placement | Mesh | tuple[Any, ...]
    counts: tuple[int, ...] | None = None

    @classmethod
    def from_devices(cls, devices: Any, counts: Sequence[int] | None = None) -> Request:
        """A request for a placement, a mesh, or a sequence of devices.

        Raises:
          PlacementError: it is none of them.
        """
        if devices is None:
            raise PlacementError("devices must be a number or a sequence of devices, or a vnode.Placement, not None")
        if not isinstance(devices, Placement | Mesh):
            devices = tuple(device_list(devices))
        return cls(devices, None if counts is None else tuple(counts))


def responds(device: Any) -> bool:
    """Whether a device still computes: asks it for a sum. Those of other processes cannot be asked."""
    if not is_local(device):
        return True
    try:
        return int(jax.device_put(np.int32(20), device) + jax.device_put(np.int32(22), device)) == 42
    except JaxRuntimeError:
        return False


def requests(devices: Any, step: Any) -> Callable[[int], Request | None]:
    """Turns the option `devices` into a function from the step number to a request.

    Raises:
      PlacementError: several processes would learn of a change at different steps.
    """
    if isinstance(devices, Devices):
        if is_shared():
            raise PlacementError(
                "vnode.elastic.Devices changes the devices in one process, and there are others.",
                facts=[f"there are {world().count} processes"],
                remedies=["a function of the step number, the same in all processes: devices=lambda number: ..."],
            )
        return lambda number: devices.request
    if callable(devices):

        def requested(number: int) -> Request | None:
            wanted = devices(number)
            return None if wanted is None else Request.from_devices(wanted)

        return requested
    fixed = Request.from_devices(step.placement if devices is None else devices)
    return lambda number: fixed


def remaining_placement(placement: Placement, lost: set[Any]) -> Mesh:
    """The devices of a placement that are left; of a mesh with other axes, the whole slices along the nodes' axis.

    Raises:
      PlacementError: none are left.
    """
    mesh, axis = placement.mesh, placement.mesh.axis_names.index(placement.axis)
    slices = np.moveaxis(mesh.devices, axis, 0).reshape(placement.size, -1)
    left = [i for i, devices in enumerate(slices) if not lost & set(devices)]
    if not left:
        raise none_left(lost)
    return Mesh(np.take(mesh.devices, left, axis), mesh.axis_names, axis_types=mesh.axis_types)


def none_left(lost: set[Any]) -> PlacementError:
    """The error of a run that has lost all of its devices."""
    return PlacementError(
        "no device is left to go on with.",
        facts=[f"lost: {', '.join(sorted(map(str, lost)))}"],
        remedies=["start again on other devices with the same checkpoint=...: the run resumes"],
    )
