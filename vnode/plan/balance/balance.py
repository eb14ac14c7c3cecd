"""`balance`: the placement with the shortest step on devices of several kinds.

Knows measured times and placements. Must not know steps or programs, nor how times were measured.

The search is exact. The time of a step (see `vnode.plan.balance.profiles`) is that of the slowest device's nodes plus a
rest that depends on which devices take part, not on how the nodes are spread over them. Devices of a kind are alike, so
it is enough to know how many of each kind take part. For each such choice the best spread is found by asking, for a
time that the slowest device may take, how many nodes each device can finish and hold; the times in question are the
multiples of the kinds' seconds per node, among which one searches by bisection. All choices are tried, except those
whose lower bound (nodes divided at will) is above the best found so far. Nothing is rounded, and nothing is assumed of
the rest.

Among placements of equal time the one with the fewest devices is taken. The nodes are then dealt out one by one, each
to the device that would finish it first: no device takes longer than the slowest must, and none more than it has to.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vnode.errors import PlacementError, ProfileError
from vnode.placement.devices_by_kind import by_kind
from vnode.placement.placement import Placement, even_counts, node_count
from vnode.plan.balance.profiles import Profile, Profiles
from vnode.plan.nodes.device_memory import byte_count
from vnode.show.units import several
from vnode.tracebacks import api_boundary

Counts = dict[str, tuple[int, ...]]
"""For each kind in use, the nodes of each of its devices that has some."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A placement by kind, and the time of a step on it.

    Attributes:
      counts: for each kind in use, the nodes of each of its devices that has some.
      seconds: of a step, predicted.
    """

    counts: Counts
    seconds: float

    @property
    def devices(self) -> int:
        """The number of devices with nodes."""
        return sum(map(len, self.counts.values()))


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Devices of a kind that the placement does without.

    Attributes:
      kind: of device.
      devices: how many.
      seconds: of a step on the best placement with at least one of them more; None if there is none.
    """

    kind: str
    devices: int
    seconds: float | None


@dataclasses.dataclass(frozen=True, repr=False)
class Balance:
    """The placement with the shortest step; `str` of it is a table.

    Attributes:
      profiles: the times that it was computed from.
      virtual_nodes: V.
      best: the placement chosen.
      single: the best placement on devices of one kind, for each kind on which there is one.
      even: all devices with as many nodes each as possible; None if that exceeds their memory.
      left_out: devices that are not used.
    """

    profiles: Profiles
    virtual_nodes: int
    best: Candidate
    single: dict[str, Candidate]
    even: Candidate | None
    left_out: tuple[LeftOut, ...]

    @property
    def counts(self) -> Counts:
        """For each kind in use, the nodes of each of its devices that has some."""
        return self.best.counts

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.best.seconds

    @property
    def gain(self) -> float | None:
        """The gain over the best single kind, as a fraction: 0.1 is 1.1 times as fast.

        0 where a single kind is best, and None where no single kind can hold the nodes.
        """
        fastest = min((found.seconds for found in self.single.values()), default=None)
        return None if fastest is None else fastest / self.seconds - 1

    def rate(self, batch: int) -> float:
        """The predicted examples per second, for a batch size."""
        return batch / self.seconds

    def placement(self, devices: Mapping[str, Sequence[Any]] | Sequence[Any] | None = None) -> Placement:
        """The placement on actual devices, in the order of the profiles' kinds.

        Args:
          devices: as those of `vnode.profile`; all of ``jax.devices()`` by default.

        Returns:
          A `Placement` on the devices that have nodes.

        Raises:
          PlacementError: there are fewer devices of a kind than the placement needs.
        """
        return place_nodes(self.virtual_nodes, self.counts, by_kind(devices))

    def __repr__(self) -> str:
        return f"Balance({self.virtual_nodes} nodes, {self.seconds:.4g} s a step: {counts_text(self.counts)})"

    def __str__(self) -> str:
        devices = self.best.devices
        used = [self.profiles[kind] for kind in self.counts]
        rest = self.profiles.rest(used, devices)
        gain = "no single kind holds them" if self.gain is None else f"{self.gain:.1%} over the best of one kind"
        rows = [("chosen", self.best), *((f"{kind} alone", found) for kind, found in self.single.items())]
        rows += [] if self.even is None else [("all, evenly", self.even)]
        table = [(name, counts_text(found.counts), f"{found.seconds:.4g} s") for name, found in rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = [
            f"{self.virtual_nodes} virtual nodes on {several(devices, 'device')}: {self.seconds:.4g} s a step",
            f"  nodes         {self.seconds - rest:.4g} s on the slowest device",
            f"  besides       {rest:.4g} s for the update and the exchange",
            f"  gain          {gain}",
            f"  fit           within {max(p.error for p in self.profiles.kinds):.1%} of the measured times",
            *(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in table),
        ]
        for left in self.left_out:
            name = f"  left out: {left.devices} x {left.kind}, "
            if left.seconds is None:
                lines.append(name + "of which no placement has one more")
            elif left.seconds > self.seconds:
                more = left.seconds / self.seconds - 1
                lines.append(
                    name + f"since with one more of them a step takes {left.seconds:.4g} s at best, {more:.1%} more"
                )
            else:
                lines.append(name + "since with one more of them a step takes as long")
        return "\n".join(lines)


@api_boundary
def balance(
    profiles: Profiles, virtual_nodes: int, *, memory: int | str | Mapping[str, int | str] | None = None
) -> Balance:
    """Finds the placement with the shortest predicted step, among all that fit into memory.

    Devices that make a step slower are left out, and the result says so: a device is worth having only if it takes
    more off the slowest than it adds to the exchange.

    Args:
      profiles: measured by `vnode.profile`, for nodes of the size that they will have.
      virtual_nodes: V.
      memory: bytes of a device, or a string such as ``"16GiB"``, of each or of each kind; by default the profiles'.

    Returns:
      The placement, its predicted time, and what it was compared with.

    Raises:
      PlacementError: the devices cannot hold the nodes.
      ProfileError: `profiles` are none, or there is a limit of memory for a kind whose need is not known.

    Example:
      >>> from vnode import balance
      >>> from vnode import Measurement, Profile, Profiles
      >>> fast = Profile("fast", 1, (Measurement(1, 2, 0.3), Measurement(1, 4, 0.5)))
      >>> slow = Profile("slow", 2, (Measurement(1, 2, 0.7), Measurement(1, 4, 1.3)))
      >>> found = balance(Profiles((fast, slow)), 10)
      >>> found.counts
      {'fast': (6,), 'slow': (2, 2)}
      >>> print(found)
      10 virtual nodes on 3 devices: 0.7 s a step
        nodes         0.6 s on the slowest device
        besides       0.1 s for the update and the exchange
        gain          57.1% over the best of one kind
        fit           within 0.0% of the measured times
        chosen       fast 6, slow 2 2  0.7 s
        fast alone   fast 10           1.1 s
        slow alone   slow 5 5          1.6 s
        all, evenly  fast 4, slow 3 3    1 s
    """
    if not isinstance(profiles, Profiles) or not profiles.kinds:
        raise ProfileError(
            f"balance takes measured times, a vnode.Profiles, not {profiles!r:.80}.",
            remedies=[
                "profiles = vnode.profile(step, (state, batch)), and vnode.balance(profiles, virtual_nodes=32)",
                "or load them from a file: vnode.Profiles.load('times.json')",
            ],
        )
    virtual_nodes = node_count(virtual_nodes)
    lane = profiles.lane
    search = CountSearch(
        profiles, -(-virtual_nodes // lane), [capacity(p, virtual_nodes, memory) // lane for p in profiles.kinds]
    )
    available = [profile.devices for profile in profiles.kinds]
    none = [0] * len(available)

    def candidate(use: Sequence[int] | None) -> Candidate | None:
        if use is None:
            return None
        counts = search.counts(use)
        last = list(counts)[-1]
        whole = {kind: tuple(n * lane for n in nodes) for kind, nodes in counts.items()}
        surplus = search.nodes * lane - virtual_nodes  # of the last lane, which is that of the last device
        whole[last] = (*whole[last][:-1], whole[last][-1] - surplus)
        return Candidate(whole, search.seconds(use))

    best = candidate(chosen := search.best(none, available))
    if best is None or chosen is None:
        raise PlacementError(
            f"{virtual_nodes} virtual nodes do not fit into the memory of the devices.",
            facts=[
                f"{profile.kind}: {several(profile.devices, 'device')} with room for {most * lane} nodes each"
                + (f" ({profile.bytes(most * lane + lane)} bytes for {(most + 1) * lane})" if profile.bytes(1) else "")
                for profile, most in zip(profiles.kinds, search.max_nodes, strict=True)
            ],
            remedies=["more devices", "more, smaller virtual nodes, and profiles with them"],
        )
    single = {}
    for i, profile in enumerate(profiles.kinds):
        alone = candidate(search.best(none, [n if j == i else 0 for j, n in enumerate(available)]))
        if alone is not None:
            single[profile.kind] = alone
    left_out = []
    for i, profile in enumerate(profiles.kinds):
        if spare := available[i] - chosen[i]:
            more = search.best([chosen[i] + 1 if j == i else 0 for j in range(len(available))], available)
            left_out.append(LeftOut(profile.kind, spare, None if more is None else search.seconds(more)))
    return Balance(
        profiles,
        virtual_nodes,
        best,
        single,
        even_candidate(profiles, virtual_nodes, search.max_nodes),
        tuple(left_out),
    )


class CountSearch:
    """The search over how many devices of each kind take part.

    Args:
      profiles: the times.
      nodes: how many to place (lanes, if a lane has several).
      most: how many of them a device of each kind can hold.
    """

    def __init__(self, profiles: Profiles, nodes: int, most: Sequence[int]) -> None:
        self.profiles = profiles
        self.nodes = nodes
        self.max_nodes = [min(n, nodes) for n in most]
        self.node = [profile.node * profiles.lane for profile in profiles.kinds]

    def best(self, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...] | None:
        """The numbers of devices of each kind, within bounds, with the shortest step; None if the nodes fit on none."""
        found, least = None, (math.inf, 0)
        for use in device_counts(low, [n if most else 0 for n, most in zip(high, self.max_nodes, strict=True)]):
            if not sum(use) <= self.nodes <= sum(n * most for n, most in zip(use, self.max_nodes, strict=True)):
                continue
            speed = sum(n / each for n, each in zip(use, self.node, strict=True))
            rest = self.fixed_seconds(use)
            if (self.nodes / speed + rest) * (1 - 1e-9) > least[0]:  # rounding must not hide an equal one
                continue
            key = (self.seconds(use), sum(use))
            if key < least:
                found, least = use, key
        return found

    def fixed_seconds(self, use: Sequence[int]) -> float:
        """The seconds of a step besides the nodes."""
        kinds = [profile for profile, n in zip(self.profiles.kinds, use, strict=True) if n]
        return self.profiles.rest(kinds, sum(use))

    def seconds(self, use: Sequence[int]) -> float:
        """The seconds of a step, with the best spread of nodes."""
        return self.slowest(use) + self.fixed_seconds(use)

    def slowest(self, use: Sequence[int]) -> float:
        """The least time in which the devices compute the nodes, each at least one."""
        kinds = [i for i, n in enumerate(use) if n]
        floor = max(self.node[i] for i in kinds)

        def finished_nodes(i: int, seconds: float) -> int:
            """Nodes that a device of a kind has done by then: the most n with n * node <= seconds, exactly."""
            n = min(int(seconds / self.node[i]), self.max_nodes[i])
            while n < self.max_nodes[i] and (n + 1) * self.node[i] <= seconds:
                n += 1
            while n * self.node[i] > seconds:
                n -= 1
            return n

        found = math.inf
        for k in kinds:  # the slowest device is of this kind: the least number of nodes with which all are done
            first = max(1, math.ceil(floor / self.node[k] * (1 - 1e-9)))
            numbers_of = range(first, self.max_nodes[k] + 1)
            at = bisect.bisect_left(
                numbers_of,
                True,
                key=lambda n, k=k: (
                    n * self.node[k] >= floor
                    and sum(use[i] * finished_nodes(i, n * self.node[k]) for i in kinds) >= self.nodes
                ),
            )
            if at < len(numbers_of):
                found = min(found, numbers_of[at] * self.node[k])
        return found

    def counts(self, use: Sequence[int]) -> Counts:
        """Nodes of each device: one each, then each further one to the device that would be done with it first."""
        heap = [(2 * self.node[i], i, d) for i, n in enumerate(use) for d in range(n) if self.max_nodes[i] > 1]
        given = [[1] * n for n in use]
        heapq.heapify(heap)
        for _ in range(self.nodes - sum(use)):
            _, i, d = heapq.heappop(heap)
            given[i][d] += 1
            if given[i][d] < self.max_nodes[i]:
                heapq.heappush(heap, ((given[i][d] + 1) * self.node[i], i, d))
        return {p.kind: tuple(nodes) for p, nodes in zip(self.profiles.kinds, given, strict=True) if nodes}


def device_counts(low: Sequence[int], high: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of devices of each kind within bounds, most devices first: they tend to be fast, and bound the others."""
    return itertools.product(*(range(b, a - 1, -1) for a, b in zip(low, high, strict=True)))


def capacity(profile: Profile, virtual_nodes: int, memory: int | str | Mapping[str, int | str] | None) -> int:
    """The number of nodes that a device of a kind can hold, at most all.

    Raises:
      ProfileError: its memory is limited, and that of a node is unknown.
    """
    most = memory.get(profile.kind, profile.memory) if isinstance(memory, Mapping) else memory
    most = profile.memory if most is None else byte_count(most) if isinstance(most, str) else most
    if most is None:
        return virtual_nodes
    if isinstance(most, bool) or not isinstance(most, numbers.Real) or most <= 0:
        raise ProfileError(f"memory of {profile.kind!r} must be a positive number of bytes, not {most!r}")
    if profile.bytes(1) is None:
        raise ProfileError(
            f"memory is limited, but what a node needs on a {profile.kind} was not measured.",
            remedies=["measure with vnode.profile", "give bytes to each Measurement", "memory=None"],
        )
    sizes = range(1, virtual_nodes + 1)
    return bisect.bisect_right(sizes, most, key=lambda n: profile.bytes(n) or 0)


def even_candidate(profiles: Profiles, virtual_nodes: int, most: Sequence[int]) -> Candidate | None:
    """All devices, as even as possible, if their memory allows."""
    split = even_counts(virtual_nodes, sum(profile.devices for profile in profiles.kinds), profiles.lane)
    counts = {}
    for profile, hold in zip(profiles.kinds, most, strict=True):
        mine, split = tuple(split[: profile.devices]), split[profile.devices :]
        if max(mine) > hold * profiles.lane:
            return None
        if any(mine):
            counts[profile.kind] = tuple(n for n in mine if n)
    return Candidate(counts, profiles.seconds(counts))


def place_nodes(
    virtual_nodes: int, counts: Mapping[str, Sequence[int]], devices: Mapping[str, Sequence[Any]]
) -> Placement:
    """A placement on the first devices of each kind.

    Raises:
      PlacementError: a kind has fewer devices than counts.
    """
    for kind, nodes in counts.items():
        there = len(devices.get(kind, ()))
        if there < len(nodes):
            raise PlacementError(
                f"the placement needs {several(len(nodes), 'device')} of kind {kind!r}, not {there}.",
                facts=[f"{name}: {several(len(group), 'device')}" for name, group in devices.items()],
                remedies=["balance again: profiles of these devices", "name kinds as the profiles do"],
            )
    chosen = [device for kind, nodes in counts.items() for device in devices[kind][: len(nodes)]]
    return Placement(virtual_nodes, chosen, counts=[n for nodes in counts.values() for n in nodes])


def counts_text(counts: Mapping[str, Sequence[int]]) -> str:
    """Counts for people; runs of equal ones are counted.

    >>> counts_text({"V100": (6, 6), "P100": (1, 1, 1, 1)})
    'V100 6 6, P100 4 x 1'
    """
    parts = []
    for kind, nodes in counts.items():
        runs = [(n, len(list(same))) for n, same in itertools.groupby(nodes)]
        parts.append(f"{kind} " + " ".join(f"{c} x {n}" if c > 3 else " ".join([str(n)] * c) for n, c in runs))
    return ", ".join(parts)
