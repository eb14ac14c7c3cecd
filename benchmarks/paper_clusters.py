"""The clusters on which papers measured -> machines: FlexFlow's P100 and K80 hosts (Jia, Zaharia, Aiken, SysML 2019).

Knows the wiring that the paper describes. Must not know models or searches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from vnode.partition import Link, Machine, Switch
from vnode.partition.machine.known_kinds import PCIE3
from vnode.partition.machine.machine_builders import NETWORK, NVLINK, PCIE
from vnode.partition.machine.networks import Network, Phase


@dataclasses.dataclass(frozen=True)
class Pairs(Network):
    """A link between every two devices, as NVLink joins four GPUs without a switch.

    Attributes:
        name: The network's name.
        devices: Numbers of the devices that it joins.
        bandwidth: Bytes a second of each link in each direction.
        latency: Seconds of a transfer without bytes.
    """

    name: str
    devices: tuple[int, ...]
    bandwidth: float
    latency: float

    @functools.cached_property
    def members(self) -> frozenset[int]:
        """The devices that the links join."""
        return frozenset(self.devices)

    @functools.cached_property
    def _between(self) -> dict[tuple[int, int], int]:
        return {pair: i for i, pair in enumerate(itertools.permutations(self.devices, 2))}

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """The link from the source to the target."""
        return (self._between[source, target],)

    def gather(self, group: Sequence[int]) -> tuple[Phase, ...]:
        """All devices send to all others at once, over separate links: latency + bytes / p / bandwidth."""
        links = [self._between[pair] for pair in itertools.permutations(group, 2)]
        return (Phase(self.latency, dict.fromkeys(links, 1 / len(group))),)

    def exchange(self, parts: Sequence[Sequence[int]]) -> Phase:
        """All messages at once, over separate links."""
        return Phase(self.latency, super().exchange(parts).loads)


def p100() -> Machine:
    """4 hosts with 4 P100 each, NVLink within hosts and 100 Gb/s InfiniBand between them.

    The number of NVLinks between two GPUs is an assumption: one, 20 GB/s in each direction, as among the four of half a
    DGX-1.
    """
    usual = Machine.gpus("P100", hosts=4, per_host=4, between=Link("InfiniBand", 12.5e9, NETWORK, of="host"))
    near = [Pairs("NVLink", host, 20e9, NVLINK) for host in usual.hosts]
    return Machine("FlexFlow's P100 cluster", usual.devices, (*near, usual.networks[-1]))


def k80() -> Machine:
    """16 hosts with 4 K80 each (a device is one die); two dies share a PCI Express switch; 56 Gb/s InfiniBand."""
    usual = Machine.gpus("K80", hosts=16, per_host=4)
    cards = [Pairs("PCI Express of a card", (first, first + 1), PCIE3, PCIE) for first in range(0, 64, 2)]
    hosts = [Switch("PCI Express", ((n, n + 1), (n + 2, n + 3)), PCIE3, PCIE) for n in range(0, 64, 4)]
    return Machine("FlexFlow's K80 cluster", usual.devices, (*cards, *hosts, usual.networks[-1]))
