"""Names of TPU slices and GPU hosts -> the devices and networks of a machine.

Knows the wiring of slices and hosts, with sources. Must not know machines as such, nor the devices of this one.

Sources for TPUs: Google Cloud documentation, pages on TPU v4, v5e, v5p and v6e. Bandwidth of links and wrap-around are
from "How to scale your model" (Austin and others, 2025), chapter "How to think about TPUs": v5e and v6e wrap an axis of
16 only; v4 and v5p wrap if all axes are multiples of 4, where switches join full cubes; about 1 us over a link; 25 GB/s
from host to host over the data center network, whose latency (50 us) is assumed.

Sources for GPUs: NVLink of one GPU in one direction is half of the data sheets' "bidirectional" figure (P100 160, V100
300, A100 600, H100 and H200 900 GB/s). Networks: DGX-1 (four EDR cards of 100 Gb/s a host), DGX A100 and H100 (a card
for each GPU, of 200 and 400 Gb/s). Latencies are NCCL's own (tuning.cc, 2020), ring with the LL128 protocol: 1.9 us
over NVLink, 2.5 us over PCI Express, 4 us over a network.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from vnode.errors import MachineError
from vnode.partition.machine.description_checks import (
    MOST_DEVICES,
    SLOWEST,
    one_line,
    positive_number,
    whole_number,
    wrong_value,
)
from vnode.partition.machine.device_kind import Kind
from vnode.partition.machine.known_kinds import KINDS, PCIE3, PCIE5, kind_named
from vnode.partition.machine.networks import Network, Switch
from vnode.partition.machine.torus import Axis, Point, Torus

NVLINK, PCIE, NETWORK, HOP, DCN = 1.9e-6, 2.5e-6, 4e-6, 1e-6, 5e-5
"""Latencies, seconds."""

DESCRIBE = "describe the machine: Machine(...).save('machine.json'), and Machine.load it in every process"
"""The remedy where a machine cannot be measured."""


@dataclasses.dataclass(frozen=True)
class Device:
    """One device of a machine.

    Attributes:
      kind: its kind.
      host: the number of its host.
    """

    kind: Kind
    host: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            raise wrong_value("kind", "a Kind", self.kind)
        whole_number(self.host, "host", "the number of a host", 0, MOST_DEVICES - 1)


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between the devices of a host, or between hosts.

    Attributes:
      name: the network's name.
      bandwidth: bytes a second in each direction.
      latency: seconds of a transfer without bytes.
      of: the owner of one such link: each ``"device"`` or each ``"host"``.

    Example:
      >>> from vnode.partition import Link
      >>> Link("Ethernet", 12.5e9, 3e-5, of="host").bandwidth
      12500000000.0
    """

    name: str
    bandwidth: float
    latency: float
    of: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        one_line(self.name, "name")
        positive_number(self.bandwidth, "bandwidth", "bytes a second")
        positive_number(self.latency, "latency", "seconds", SLOWEST, zero=True)
        if self.of not in ("device", "host"):
            raise wrong_value("of", "'device' or 'host'", self.of)

    def network(self, hosts: list[list[int]]) -> Network:
        """The network of these devices, by host."""
        ports = hosts if self.of == "host" else [[device] for device in itertools.chain(*hosts)]
        return Switch(self.name, tuple(map(tuple, ports)), self.bandwidth, self.latency)


DGX1 = Link("InfiniBand", 4 * 12.5e9, NETWORK, of="host")
A100 = Link("NVLink", 300e9, NVLINK), Link("InfiniBand", 25e9, NETWORK)
HOPPER = Link("NVLink", 450e9, NVLINK), Link("InfiniBand", 50e9, NETWORK)
V100 = Link("NVLink", 150e9, NVLINK), DGX1

LINKS: dict[str, tuple[Link, Link]] = {
    "A100-40GB": A100,
    "A100-80GB": A100,
    "H100-SXM": HOPPER,
    "H100-PCIe": (Link("PCI Express", PCIE5, PCIE), Link("InfiniBand", 50e9, NETWORK)),
    "H200": HOPPER,
    "V100-16GB": V100,
    "V100-32GB": V100,
    "P100": (Link("NVLink", 80e9, NVLINK), DGX1),
    "K80": (Link("PCI Express", PCIE3, PCIE), Link("InfiniBand", 7e9, NETWORK, of="host")),
}
"""The default links of GPUs within a host, and between hosts."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """The wiring of the chips of one TPU generation.

    Attributes:
      kind: the kind of a chip, which is one device.
      axes: number of axes of the torus.
      bandwidth: bytes a second of a link in one direction.
      largest: number of chips in a pod.
    """

    kind: str
    axes: int
    bandwidth: float
    largest: int


SLICES = {
    "v4": Slice("TPU v4", 3, 4.5e10, 4096),
    "v5p": Slice("TPU v5p", 3, 9e10, 8960),
    "v5e": Slice("TPU v5e", 2, 4.5e10, 256),
    "v6e": Slice("TPU v6e", 2, 9e10, 256),
}

Parts = tuple[str, tuple[Device, ...], tuple[Network, ...]]
"""The name, the devices and the networks of a machine."""


def tpu(topology: str, slices: int = 1) -> Parts:
    """See `Machine.tpu`."""
    found = re.fullmatch(r"(v\w+):(\d{1,4}(?:x\d{1,4})*)", topology) if isinstance(topology, str) else None
    if found is None or found[1] not in SLICES:
        raise MachineError(
            f"there is no TPU slice {topology!r}.",
            remedies=[f"give a generation ({', '.join(SLICES)}) and its chips along each axis: 'v5e:4x4', 'v5p:2x2x2'"],
        )
    made, sizes = SLICES[found[1]], tuple(map(int, found[2].split("x")))
    chips, count = math.prod(sizes), whole_number(slices, "slices", "slices", 1, 256)
    even = all(size % 2 == 0 for size in sizes[:2]) or chips == 1
    fits = min(sizes) >= 1 and even and chips <= made.largest and (made.axes > 2 or max(sizes) <= 16)
    if len(sizes) != made.axes or not fits:
        limit = "16x16" if made.axes == 2 else f"{made.largest:,} chips"
        raise MachineError(
            f"{topology!r} is no slice of TPU {found[1]}: it has {made.axes} axes"
            + (", both even" if made.axes == 2 else ", the first two even")
            + f", up to {limit}. For example 'v5e:2x4' has two, and 'v4:2x2x1' three."
        )
    places = list(points_by_host(sizes))
    devices = [
        Device(KINDS[made.kind], s * len(places) + h) for s in range(count) for h, _ in enumerate(places) for _ in _
    ]
    chips_of = [dict(enumerate(itertools.chain(*places), s * chips)) for s in range(count)]
    networks = slice_networks(made, chips_of, devices)
    return f"TPU {topology}" + (f" x {count}" if count > 1 else ""), tuple(devices), networks


def slice_networks(
    made: Slice, points: Sequence[Mapping[int, Point]], devices: Sequence[Device]
) -> tuple[Network, ...]:
    """The torus of each slice, given the points of its devices, and the network between slices."""
    networks: list[Network] = []
    for s, places in enumerate(points):
        sizes = tuple(1 + max(along) for along in zip(*places.values(), strict=True))
        axes = tuple(map(Axis, sizes, wrapped_axes(sizes)))
        name = "ICI" if len(points) == 1 else f"ICI of slice {s}"
        networks.append(Torus(name, axes, tuple(places), tuple(places.values()), made.bandwidth, HOP))
    if len(points) > 1:
        networks.append(Link("data center network", 25e9, DCN, of="host").network(hosts_of(devices)))
    return tuple(networks)


def points_by_host(sizes: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """The points of a slice, host by host, in jax's order: 2x2 chips each, the first axis fastest.

    This is the order of `jax.experimental.topologies`, with the hosts of libtpu's default. A cloud may have eight chips
    in a host; the order is the same.
    """
    host = (2, 2, 1)[: len(sizes)] if max(sizes) > 1 else (1,) * len(sizes)

    def points(ends: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        return (point[::-1] for point in itertools.product(*(range(end) for end in ends[::-1])))

    for corner in points(tuple(size // side for size, side in zip(sizes, host, strict=True))):
        yield [tuple(c * s + o for c, s, o in zip(corner, host, offset, strict=True)) for offset in points(host)]


def wrapped_axes(sizes: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether each axis of a slice wraps around.

    >>> wrapped_axes((8, 16)), wrapped_axes((4, 4, 8)), wrapped_axes((2, 4, 4))
    ((False, True), (True, True, True), (False, False, False))
    """
    if len(sizes) == 2:
        return tuple(size == 16 for size in sizes)
    return (all(size % 4 == 0 for size in sizes),) * len(sizes)


def gpus(kind: Kind | str, hosts: int, per_host: int, within: Link | None, between: Link | None) -> Parts:
    """See `Machine.gpus`."""
    found = kind_named(kind)
    whole_number(hosts, "hosts", "hosts", 1, MOST_DEVICES)
    whole_number(per_host, "per_host", "devices of a host", 1, MOST_DEVICES // hosts)
    usual = LINKS.get(found.name, (None, None))
    near, far = within or usual[0], between or usual[1]
    if (near is None and per_host > 1) or (far is None and hosts > 1):
        raise MachineError(
            f"the links of devices of kind {found.name!r} are not known.",
            remedies=["within=Link('PCIe', 31.5e9, 2.5e-6), between=Link('Ethernet', 12.5e9, 3e-5, of='host')"],
        )
    devices = tuple(Device(found, i // per_host) for i in range(hosts * per_host))
    networks = host_networks(devices, [near] * len(devices), [far] * len(devices))
    return f"{hosts} x {per_host} {found.name}", devices, networks


def host_networks(
    devices: Sequence[Device], near: Sequence[Link | None], far: Sequence[Link | None]
) -> tuple[Network, ...]:
    """The network within each host, and the network between hosts, given each device's links to both."""
    hosts = hosts_of(devices)
    networks = [slowest_link([near[i] for i in host]).network([host]) for host in hosts if len(host) > 1]
    return (*networks, slowest_link(far).network(hosts)) if len(hosts) > 1 else tuple(networks)


def slowest_link(links: Sequence[Link | None]) -> Link:
    """The slowest of some links; None stands for links between processes, which one process cannot measure."""
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        raise MachineError("the links between these devices are not known.", remedies=[DESCRIBE])
    return min(known, key=lambda link: link.bandwidth)


def hosts_of(devices: Any) -> list[list[int]]:
    """The numbers of the devices of each host."""
    found: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        found.setdefault(device.host, []).append(i)
    return list(found.values())
