"""Switches, and networks as such -> the routes, latencies and loads of transfers and collectives on them.

Knows ports, links, their bandwidth and latency. Must not know kinds of devices, or other networks of a machine.

A network gives three figures. The *route* of a transfer between two devices is the links that it occupies, by number;
each is a link in one direction. The cost of a *ring* over some of its devices is the cost of an all-gather, from which
reduce-scatter and all-reduce follow. The cost of an *exchange* is the cost of an all-to-all.

The last two are a latency and loads: the fraction of the array that each link carries. The caller adds the loads of
groups of devices that work at the same time.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vnode.partition.machine.description_checks import (
    SLOWEST,
    device_numbers,
    error_context,
    nonempty_list,
    one_line,
    positive_number,
)


@dataclasses.dataclass
class Phase:
    """A phase of a collective; all devices end it before the next begins.

    Attributes:
      latency: seconds without any bytes.
      loads: for each link the fraction of the array's bytes that it carries.
    """

    latency: float = 0.0
    loads: dict[Any, float] = dataclasses.field(default_factory=dict)

    def add(self, links: Iterable[Any], share: float) -> None:
        """Adds a share of the array to what some links carry."""
        for link in links:
            self.loads[link] = self.loads.get(link, 0.0) + share

    def join(self, other: Phase, network: int | None = None, share: float = 1.0) -> None:
        """Adds a phase of other devices at the same time; its links are those of a network, if its number is given."""
        self.latency = max(self.latency, other.latency)
        for link, fraction in other.loads.items():
            self.add((link if network is None else (network, link),), fraction * share)


def ring(group: Sequence[int], route: Callable[[int, int], tuple[float, Sequence[Any]]]) -> Phase:
    """An all-gather around the devices in their order: p - 1 steps, each of which sends a p-th part on.

    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005:
    (p - 1) latency + (p - 1) / p bytes / bandwidth, if no two devices share a link.

    Args:
      group: the devices.
      route: gives the latency and the links of a transfer between two devices.
    """
    steps, found = len(group) - 1, Phase()
    for source, target in zip(group, (*group[1:], group[0]), strict=True):
        latency, links = route(source, target)
        found.latency = max(found.latency, steps * latency)
        found.add(links, steps / len(group))
    return found


class Network(abc.ABC):
    """A network that joins some devices."""

    name: str
    bandwidth: float
    latency: float

    @property
    @abc.abstractmethod
    def members(self) -> frozenset[int]:
        """The devices that it joins."""

    @abc.abstractmethod
    def route(self, source: int, target: int) -> tuple[int, ...]:
        """The links between two different devices, in the order of travel."""

    def gather(self, group: Sequence[int]) -> tuple[Phase, ...]:
        """The phases of an all-gather over some of its devices; a ring, unless the network has a faster way."""
        return (ring(group, lambda source, target: (self.delay(source, target), self.route(source, target))),)

    def delay(self, source: int, target: int) -> float:
        """Seconds of a transfer without bytes between two devices."""
        return self.latency

    def exchange(self, parts: Sequence[Sequence[int]]) -> Phase:
        """Each device sends each device of the other parts one unit of bytes.

        The latency is that of all messages of the device that waits longest, one after another.
        """
        found = Phase()
        for part in parts:
            others = [device for other in parts if other is not part for device in other]
            for source in part:
                found.latency = max(found.latency, sum(self.delay(source, target) for target in others))
                for target in others:
                    found.add(self.route(source, target), 1.0)
        return found


@dataclasses.dataclass(frozen=True)
class Switch(Network):
    """A non-blocking switch: NVLink with its switches, PCI Express, a fat tree.

    A transfer leaves by its source's port and arrives by its target's port.

    Attributes:
      name: the network's name.
      ports: the devices behind each port: one, or several that share it, as the devices of a host share its network
        card.
      bandwidth: bytes a second of a port in each direction.
      latency: seconds from port to port.

    Raises:
      MachineError: an attribute is wrong.

    Example:
      >>> from vnode.partition import Switch
      >>> network = Switch("Ethernet", ((0, 1), (2, 3)), bandwidth=12.5e9, latency=1e-5)
      >>> network.route(1, 2)  # out of the first port, into the second
      (0, 3)
    """

    name: str
    ports: tuple[tuple[int, ...], ...]
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        with error_context("ports"):
            ports = tuple(
                device_numbers(port, f"[{i}]") for i, port in enumerate(nonempty_list(self.ports, "", "ports"))
            )
            device_numbers([device for port in ports for device in port], "")
        object.__setattr__(self, "ports", ports)
        check_network(self)

    @functools.cached_property
    def members(self) -> frozenset[int]:
        """The devices behind its ports."""
        return frozenset(self._port)

    @functools.cached_property
    def _port(self) -> dict[int, int]:
        return {device: i for i, port in enumerate(self.ports) for device in port}

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """The source's port out and the target's port in; devices may share a port."""
        return 2 * self._port[source], 2 * self._port[target] + 1

    def exchange(self, parts: Sequence[Sequence[int]]) -> Phase:
        """Each device sends one message after another, to all others in turn; the same, without each pair's route."""
        size = sum(map(len, parts))
        found = Phase((size - min(map(len, parts))) * self.latency)
        for part in parts:
            for device in part:
                found.add(self.route(device, device), size - len(part))
        return found


def check_network(network: Any) -> None:
    """Checks and converts the attributes that all networks have."""
    one_line(network.name, "name")
    object.__setattr__(network, "bandwidth", positive_number(network.bandwidth, "bandwidth", "bytes a second"))
    object.__setattr__(network, "latency", positive_number(network.latency, "latency", "seconds", SLOWEST, zero=True))
