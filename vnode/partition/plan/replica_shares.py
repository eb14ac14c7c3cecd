"""A mesh of several kinds of devices -> nodes of each replica, in proportion to the speed of its slowest device.

Knows machines, and how long each kind of device takes for a node. Must not know programs, searches nor plans.

Rows work at the same time, and a step takes as long as the replica that is last (AccPar, Song et al., HPCA 2020,
section 4.2, where a layer's batch is shared in proportion to speed). Nodes are whole, so the best shares are found
exactly: one lane after another goes to the replica that would be done first with it. Shares as equal as they can be may
do better all the same, where sums over nodes are what takes long.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from vnode.partition.machine import Kind, Machine, MachineMesh
from vnode.partition.plan.meshes import NODES
from vnode.partition.plan.node_spread import Spread
from vnode.placement.placement import even_counts


def replica_shares(
    machine: Machine,
    mesh: MachineMesh,
    virtual_nodes: int,
    lane: int,
    pace: Mapping[str, float],
    even: bool = False,
) -> tuple[Spread, Kind]:
    """Shares the nodes out.

    Args:
      machine: the devices.
      mesh: their order; the nodes' axis is the first.
      virtual_nodes: V.
      lane: nodes that stay together.
      pace: seconds that a node takes on each kind, by the kind's name; asked only where kinds differ.
      even: whether replicas have the same shares all the same.

    Returns:
      The shares, where the replica that is done last stands for all; and the slowest kind of device in that. Every
      replica has a lane if there are enough.
    """
    replicas = mesh.devices.reshape(mesh.shape.get(NODES, 1), -1).tolist()
    kinds = [[machine.devices[i].kind for i in replica] for replica in replicas]
    counts = even_counts(virtual_nodes, len(replicas), lane)
    if len(machine.kinds) == 1:
        return Spread.from_counts(counts), kinds[0][0]
    slowest = [max(replica, key=lambda kind: pace[kind.name]) for replica in kinds]
    seconds = [pace[kind.name] for kind in slowest]
    if len(set(seconds)) > 1 and not even:
        counts = fastest_shares(seconds, virtual_nodes, lane)
    last = max(range(len(replicas)), key=lambda r: counts[r] * seconds[r])
    return Spread(tuple(counts), last), slowest[last]


def fastest_shares(seconds: Sequence[float], virtual_nodes: int, lane: int) -> list[int]:
    """Nodes of each replica, in whole lanes but for the last, so that the slowest replica ends as early as possible.

    >>> fastest_shares([1.0, 1.0, 2.0], 10, 1), fastest_shares([1.0, 3.0], 16, 4)
    ([4, 4, 2], [12, 4])
    """
    lanes = -(-virtual_nodes // lane)
    first = [int(r < lanes) for r in range(len(seconds))]
    counts = [lane * n for n in fastest_counts([(0.0, each) for each in seconds], lanes, first)]
    full = max(r for r, n in enumerate(counts) if n)
    counts[full] -= lane * lanes - virtual_nodes
    return counts


def fastest_counts(times: Sequence[tuple[float, float]], pieces: int, first: Sequence[int] = ()) -> tuple[int, ...]:
    """The pieces of each device that let the slowest device end as early as possible.

    Args:
      times: for each device, its fixed seconds and its seconds per piece.
      pieces: total number of pieces; each goes to the device that would be done first with it.
      first: the pieces that each device has in any case; none by default.

    >>> fastest_counts([(0.0, 1.0), (0.0, 3.0)], 8), fastest_counts([(4.0, 1.0), (0.0, 1.0)], 8)
    ((6, 2), (2, 6))
    """
    counts = [*first] or [0] * len(times)
    waiting = [(fixed + (n + 1) * each, d) for d, ((fixed, each), n) in enumerate(zip(times, counts, strict=True))]
    heapq.heapify(waiting)
    for _ in range(pieces - sum(counts)):
        d = waiting[0][1]
        counts[d] += 1
        heapq.heapreplace(waiting, (times[d][0] + (counts[d] + 1) * times[d][1], d))
    return tuple(counts)


def of_one_kind(machine: Machine, kind: Kind) -> Machine:
    """The machine as if all devices were of one kind."""
    devices = tuple(dataclasses.replace(device, kind=kind) for device in machine.devices)
    return Machine(machine.name, devices, machine.networks)
