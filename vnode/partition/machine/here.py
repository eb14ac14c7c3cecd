"""jax's devices -> the machine that this program runs on.

Knows jax's devices, the table of kinds, and measurements. Must not know the queries of machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vnode.errors import MachineError
from vnode.partition.machine.device_kind import Kind
from vnode.partition.machine.known_kinds import JAX_NAMES, KINDS
from vnode.partition.machine.machine_builders import (
    DESCRIBE,
    LINKS,
    SLICES,
    Device,
    Link,
    Parts,
    host_networks,
    slice_networks,
)
from vnode.partition.machine.measure_machine import host_memory, measure_kind
from vnode.partition.machine.networks import Network
from vnode.partition.machine.torus import Point
from vnode.placement.placement import device_list
from vnode.placement.world import is_local
from vnode.plan.nodes.device_memory import reported_bytes


def this_machine(devices: Sequence[Any] | None, measure: bool) -> Parts:
    """See `Machine.here`."""
    found = device_list(devices)
    if not found:
        raise MachineError("a machine needs at least one device")
    by_kind: dict[str, list[Any]] = {}
    for device in found:
        by_kind.setdefault(device.device_kind, []).append(device)
    kinds, links = dict[str, Kind](), dict[str, Link | None]()
    for name, group in by_kind.items():
        known = KINDS.get(JAX_NAMES.get(name, ""))
        memory = min((n for n in map(reported_bytes, group) if n), default=0)
        if known is None or measure:
            kinds[name], links[name] = measure_local_devices(name, group, memory)
        else:
            kinds[name] = dataclasses.replace(known, memory=memory or known.memory)
            links[name] = LINKS.get(known.name, (None, None))[0]
    hosts: dict[Any, int] = {}
    made = tuple(Device(kinds[d.device_kind], hosts.setdefault(host_key(d), len(hosts))) for d in found)
    name = " + ".join(f"{len(group)} x {kind}" for kind, group in by_kind.items())
    if len(found) == 1:
        return name, made, ()
    if not measure and (networks := torus_networks(found, made)):
        return name, made, networks
    far = [LINKS.get(device.kind.name, (None, None))[1] for device in made]
    return name, made, host_networks(made, [links[d.device_kind] for d in found], far)


def measure_local_devices(name: str, group: Sequence[Any], memory: int) -> tuple[Kind, Link | None]:
    """Measures the devices of one kind that belong to this process."""
    mine = [device for device in group if is_local(device)]
    if not mine:
        raise MachineError(
            f"{name!r} is not a known kind, and this process has no device of it to measure.", remedies=[DESCRIBE]
        )
    return measure_kind(name, mine, memory or host_memory(len(mine)))


def host_key(device: Any) -> Any:
    """The key of a device's host. For GPUs it is the slice, which NVLink can join; for other devices the process."""
    if device.platform == "gpu" and getattr(device, "slice_index", None) is not None:
        return device.slice_index
    return device.process_index


def torus_networks(devices: Sequence[Any], described: Sequence[Device]) -> tuple[Network, ...]:
    """The torus of each slice of TPU chips, and the network between slices; empty for other devices."""
    names = {JAX_NAMES.get(device.device_kind, "") for device in devices}
    made = [found for found in SLICES.values() if {found.kind} == names]
    if not made:
        return ()
    by_slice: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(i)
    if any(device.core_on_chip for device in devices):
        raise MachineError("here each core of a chip is a device, but a torus joins chips", remedies=["use megacore"])
    points = list[dict[int, Point]]()
    for mine in by_slice.values():
        places = np.array([devices[i].coords[: made[0].axes] for i in mine])
        points.append(dict(zip(mine, map(tuple, (places - places.min(0)).tolist()), strict=True)))
    return slice_networks(made[0], points, described)
