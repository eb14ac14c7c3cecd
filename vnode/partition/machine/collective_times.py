"""A collective of groups of devices -> its latency and time per byte over the machine's networks.

Knows networks, and groups of devices that work at the same time. Must not know kinds of devices.

A time is `latency + bytes * per_byte`. The latency is the sum over the steps of the algorithm. The time per byte is the
busiest resource's: the bytes that all groups send over it, divided by its bandwidth. So groups that share a link slow
each other, and the slowest link decides.

On one network all-gather is a ring (`networks.ring`, `Torus.gather`). Over several networks it is hierarchical. If h
hosts with m devices each gather an array, each device first gathers the m-th part that its counterparts in other hosts
have, in h - 1 steps over the network. Then the devices of a host gather these parts, in m - 1 steps. A group with
unequal numbers of devices in its hosts uses one ring. Reduce-scatter is the reverse, all-reduce is reduce-scatter and
all-gather (Chan, Heimlich, Purkayastha, van de Geijn: Collective Communication: Theory, Practice, and Experience,
2007). Time for additions is not counted.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Sequence

from vnode.errors import MachineError
from vnode.partition.machine.networks import Network, Phase, ring
from vnode.show.units import several

Group = tuple[int, ...]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of a collective.

    Attributes:
      latency: seconds without any bytes.
      per_byte: seconds that each byte adds.

    Example:
      >>> Cost(latency=0.5, per_byte=0.25).seconds(2)
      1.0
    """

    latency: float
    per_byte: float

    def seconds(self, bytes: float) -> float:
        """The seconds for this many bytes, counted as `Machine.collective` defines."""
        return self.latency + bytes * self.per_byte


@dataclasses.dataclass(frozen=True)
class Fabric:
    """The networks of a machine, from the nearest to the farthest.

    Two devices use the first network that joins both. Networks are nested or disjoint. So the devices of a network fall
    into the parts that nearer networks join, and single devices.
    """

    networks: tuple[Network, ...]

    def nearest_common_network(self, group: Sequence[int]) -> int:
        """The first network that joins all of a group."""
        for i, network in enumerate(self.networks):
            if network.members.issuperset(group):
                return i
        raise MachineError(f"no network joins devices {', '.join(map(str, group[:8]))}")

    def parts(self, group: Group, home: int) -> list[Group]:
        """The parts of a group that networks nearer than network `home` join."""
        left, found = list(group), list[Group]()
        for network in reversed(self.networks[:home]):
            near = tuple(device for device in left if device in network.members)
            if near:
                found.append(near)
                left = [device for device in left if device not in network.members]
        found += [(device,) for device in left]
        return sorted(found, key=lambda part: group.index(part[0]))

    def route(self, source: int, target: int) -> tuple[float, Sequence[tuple[int, int]]]:
        """The latency of a transfer between two devices, and its links: numbers of the network and of its link."""
        if source == target:
            return 0.0, ()
        home = self.nearest_common_network((source, target))
        network = self.networks[home]
        return network.delay(source, target), [(home, link) for link in network.route(source, target)]

    def collective(self, name: str, groups: Sequence[Group], pairs: Sequence[tuple[int, int]] = ()) -> Cost:
        """The cost of a collective by all groups at once; see `Machine.collective`."""
        if name == "permute":
            return self.cost([self.permute(groups, pairs)])
        if name == "all_to_all":
            return self.cost([self.all_to_all(groups)])
        phases = collections.defaultdict[tuple[int, int], Phase](Phase)
        for group in groups:
            self.gather(group, 0, phases)
        cost = self.cost([*phases.values()])
        twice = 2 if name == "all_reduce" else 1
        return Cost(twice * cost.latency, twice * cost.per_byte)

    def gather(self, group: Group, depth: int, phases: dict[tuple[int, int], Phase]) -> None:
        """Adds an all-gather to `phases`, by depth in the hierarchy and by order."""
        if len(group) == 1:
            return
        home = self.nearest_common_network(group)
        parts = self.parts(group, home)
        if len({len(part) for part in parts}) > 1:
            phases[depth, 0].join(ring(group, self.route))
            return
        for rail in zip(*parts, strict=True):
            for t, phase in enumerate(self.networks[home].gather(rail)):
                phases[depth, t].join(phase, home, 1 / len(parts[0]))
        for part in parts:
            self.gather(part, depth + 1, phases)

    def permute(self, groups: Sequence[Group], pairs: Sequence[tuple[int, int]]) -> Phase:
        """All pairs send at once; the most distant pair sets the latency."""
        found = Phase()
        for group in groups:
            for source, target in pairs:
                latency, links = self.route(group[source], group[target])
                found.join(Phase(latency, dict.fromkeys(links, 1.0)))
        return found

    def all_to_all(self, groups: Sequence[Group]) -> Phase:
        """Every device sends a p-th part to every other directly, over all networks at once."""
        total = Phase()
        for group in groups:
            own, pending = Phase(), [group]
            while pending:
                part = pending.pop()
                if len(part) == 1:
                    continue
                home = self.nearest_common_network(part)
                parts = self.parts(part, home)
                found = self.networks[home].exchange(parts)
                found.latency += own.latency  # one after another
                own.join(found, home, 1 / len(group))
                pending += parts
            total.join(own)
        return total

    def cost(self, phases: Sequence[Phase]) -> Cost:
        """The cost of phases in sequence."""
        bandwidth = [network.bandwidth for network in self.networks]
        seconds = [max((n / bandwidth[i] for (i, _), n in phase.loads.items()), default=0.0) for phase in phases]
        return Cost(sum(phase.latency for phase in phases), sum(seconds))


def checked_groups(groups: Sequence[Sequence[int]], devices: int) -> tuple[Group, ...]:
    """Checks that groups have equally many devices, and no device twice; raises `MachineError`."""
    try:
        found = tuple(tuple(operator.index(device) for device in group) for group in groups)
    except TypeError:
        raise MachineError(f"groups must be sequences of device numbers, not {groups!r}") from None
    named = [device for group in found for device in group]
    if not named or len({len(group) for group in found}) > 1 or len(set(named)) != len(named):
        raise MachineError(f"groups must be of equally many devices, each in one of them only, not {found}")
    if min(named) < 0 or max(named) >= devices:
        raise MachineError(f"groups name devices from 0 to {devices - 1} of {several(devices, 'device')}, not {found}")
    return found


def checked_pairs(pairs: Sequence[tuple[int, int]], devices: int) -> tuple[tuple[int, int], ...]:
    """Checks that each place of a group sends and receives at most once; raises `MachineError`."""
    try:
        found = tuple((operator.index(source), operator.index(target)) for source, target in pairs)
    except (TypeError, ValueError):
        raise MachineError(f"each pair must be two places in a group, not {pairs!r}") from None
    for ends in zip(*found, strict=True):
        if len({*ends}) < len(ends) or min(ends) < 0 or max(ends) >= devices:
            raise MachineError(
                f"in pairs each place of a group of {several(devices, 'device')} is at most once the first, and the "
                f"second, not {found}"
            )
    return found
