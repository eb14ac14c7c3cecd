"""Switches, and networks as such -> the routes, latencies and loads of transfers and collectives on them.

Knows ports, links, their bandwidth and latency. Must not know kinds of devices, or other networks of a machine.

A network gives three figures. The *route* of a transfer between two devices is the resources that it occupies; a
resource is a link in one direction, which carries one transfer at a time. The cost of a *ring* over some of its devices
is the cost of an all-gather, from which reduce-scatter and all-reduce follow. The cost of an *exchange* is the cost of
an all-to-all.

The last two are a latency and loads: the fraction of the array that each resource carries. The caller adds the loads of
groups of devices that work at the same time.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
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
from vnode.show.units import number_range


@dataclasses.dataclass(frozen=True)
class Resource:
    """A link in one direction; it carries one transfer at a time.

    Attributes:
      name: the name in reports.
      bandwidth: bytes a second.
      latency: seconds of a transfer without bytes.
    """

    name: str
    bandwidth: float
    latency: float


@dataclasses.dataclass
class Phase:
    """A phase of a collective; all devices end it before the next begins.

    Attributes:
      latency: seconds without any bytes.
      loads: for each number of a resource the fraction of the array's bytes that it carries.
    """

    latency: float = 0.0
    loads: dict[int, float] = dataclasses.field(default_factory=dict)

    def add(self, resources: Iterable[int], share: float) -> None:
        """Adds a share of the array to what some resources carry."""
        for resource in resources:
            self.loads[resource] = self.loads.get(resource, 0.0) + share

    def join(self, other: Phase, first: int = 0, share: float = 1.0) -> None:
        """Adds a phase of other devices at the same time, of a network whose first resource has the number `first`."""
        self.latency = max(self.latency, other.latency)
        for resource, fraction in other.loads.items():
            self.add((first + resource,), fraction * share)


def ring(group: Sequence[int], route: Callable[[int, int], tuple[float, Sequence[int]]]) -> Phase:
    """An all-gather around the devices in their order: p - 1 steps, each of which sends a p-th part on.

    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005:
    (p - 1) latency + (p - 1) / p bytes / bandwidth, if no two devices share a link.

    Args:
      group: the devices.
      route: gives the latency and the resources of a transfer between two devices.
    """
    steps, found = len(group) - 1, Phase()
    for source, target in zip(group, (*group[1:], group[0]), strict=True):
        latency, resources = route(source, target)
        found.latency = max(found.latency, steps * latency)
        found.add(resources, steps / len(group))
    return found


class Network(abc.ABC):
    """A network that joins some devices."""

    name: str

    @property
    @abc.abstractmethod
    def members(self) -> frozenset[int]:
        """The devices that it joins."""

    @property
    @abc.abstractmethod
    def resources(self) -> tuple[Resource, ...]:
        """Its links, by number."""

    @abc.abstractmethod
    def route(self, source: int, target: int) -> tuple[int, ...]:
        """The resources between two different devices, in the order of travel."""

    def gather(self, group: Sequence[int]) -> tuple[Phase, ...]:
        """The phases of an all-gather over some of its devices; a ring, unless the network has a faster way."""
        return (ring(group, lambda source, target: (self.delay(source, target), self.route(source, target))),)

    def delay(self, source: int, target: int) -> float:
        """Seconds of a transfer without bytes between two devices."""
        return sum(self.resources[r].latency for r in self.route(source, target))

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
      >>> network = Switch("Ethernet", ((0, 1), (2, 3)), bandwidth=12.5e9, latency=1e-5)
      >>> [network.resources[r].name for r in network.route(1, 2)]
      ['Ethernet: out of 0-1', 'Ethernet: into 2-3']
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

    @functools.cached_property
    def resources(self) -> tuple[Resource, ...]:
        """For each port the direction out, which has the latency, and the direction in."""
        found = list[Resource]()
        for port in self.ports:
            found.append(Resource(f"{self.name}: out of {ranges_text(port)}", self.bandwidth, self.latency))
            found.append(Resource(f"{self.name}: into {ranges_text(port)}", self.bandwidth, 0.0))
        return tuple(found)

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


def ranges_text(numbers: Sequence[int]) -> str:
    """Numbers as text, consecutive ones as ranges.

    >>> ranges_text([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return ", ".join(number_range(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs))
