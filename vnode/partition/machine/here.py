"""jax's devices -> the machine that this program runs on.

Knows jax's devices, the table of kinds, and measurements. Must not know the queries of machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vnode.errors import MachineError
from vnode.partition.machine.device_kind import Kind
from vnode.partition.machine.known_kinds import JAX_NAMES, KINDS
from vnode.partition.machine.machine_builders import (
    DCN,
    HOP,
    LINKS,
    SLICES,
    Device,
    Link,
    Parts,
    hosts_of,
    wrapped_axes,
)
from vnode.partition.machine.measure_machine import host_memory, measure_kind
from vnode.partition.machine.networks import Network
from vnode.partition.machine.torus import Axis, Torus
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
    if not measure and (networks := slice_networks(found, made)):
        return name, made, networks
    return name, made, switch_networks(made, links, [d.device_kind for d in found])


def measure_local_devices(name: str, group: Sequence[Any], memory: int) -> tuple[Kind, Link | None]:
    """Measures the devices of one kind that belong to this process."""
    mine = [device for device in group if is_local(device)]
    if not mine:
        raise MachineError(
            f"{name!r} is not a known kind, and this process has no device of it to measure.",
            remedies=["describe the machine: Machine(...).save('machine.json'), and Machine.load it in every process"],
        )
    return measure_kind(name, mine, memory or host_memory(len(mine)))


def host_key(device: Any) -> Any:
    """The key of a device's host. For GPUs it is the slice, which NVLink can join; for other devices the process."""
    if device.platform == "gpu" and getattr(device, "slice_index", None) is not None:
        return device.slice_index
    return device.process_index


def slice_networks(devices: Sequence[Any], described: Sequence[Device]) -> tuple[Network, ...]:
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
    networks = list[Network]()
    for index, mine in by_slice.items():
        points = [tuple(devices[i].coords)[: made[0].axes] for i in mine]
        low = [min(axis) for axis in zip(*points, strict=True)]
        points = [tuple(n - least for n, least in zip(point, low, strict=True)) for point in points]
        sizes = tuple(max(axis) + 1 for axis in zip(*points, strict=True))
        axes = tuple(map(Axis, sizes, wrapped_axes(sizes)))
        networks.append(Torus(f"ICI of slice {index}", axes, tuple(mine), tuple(points), made[0].bandwidth, HOP))
    if len(networks) > 1:
        networks.append(Link("data center network", 25e9, DCN, of="host").network(hosts_of(described)))
    return tuple(networks)


def switch_networks(
    devices: Sequence[Device], links: dict[str, Link | None], names: Sequence[str]
) -> tuple[Network, ...]:
    """The networks of measured devices, or of devices with known switches; between kinds, the slower link counts."""
    hosts = hosts_of(devices)
    near, far = list[Network](), list[Link]()
    for host in hosts:
        mine = [links[name] for name in dict.fromkeys(names[i] for i in host)]
        if len(host) > 1:
            if None in mine:
                raise unknown_links()
            slowest = min((link for link in mine if link is not None), key=lambda link: link.bandwidth)
            near.append(slowest.network([host]))
    if len(hosts) == 1:
        return tuple(near)
    for device in devices:
        usual = LINKS.get(device.kind.name, (None, None))[1]
        if usual is None:
            raise unknown_links()
        far.append(usual)
    slowest = min(far, key=lambda link: link.bandwidth)
    return (*near, slowest.network(hosts))


def unknown_links() -> MachineError:
    """The error for links between processes, which one process cannot measure."""
    return MachineError(
        "the links between these devices are not known.",
        remedies=["describe the machine: Machine(...).save('machine.json'), and Machine.load it in every process"],
    )
