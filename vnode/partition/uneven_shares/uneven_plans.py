"""A mesh of unequal devices -> plans that give faster devices more blocks of a dimension of the state.

Knows steps, the program of a replica in blocks, machines and predictions. Must not know which candidates there are, nor
files.

Where devices along an axis of a mesh differ in speed, an even split of hidden units, heads or words makes the fast ones
wait. The dimensions that an even plan divides over the axis, and all dimensions tied to them, are cut into equal
blocks. Each device gets a number of blocks that makes all take equally long, as far as whole blocks allow (AccPar, Song
et al., HPCA 2020, section 5). The cost is predicted from the program in which each device loops over its own blocks, on
each kind of device. The slowest device counts for time, the one with most blocks for memory.

Nodes are spread evenly. Where replicas differ too, the slowest device at an index stands for all replicas there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from vnode.errors import PartitionError, UnsupportedPrimitiveError
from vnode.partition.cost.time_sources import Times
from vnode.partition.machine import Kind, Machine, MachineMesh
from vnode.partition.plan.carry_sharding import shard_carries
from vnode.partition.plan.meshes import NODES
from vnode.partition.plan.node_spread import Spread
from vnode.partition.plan.predict import Prediction, dividing_axes, predict
from vnode.partition.plan.replica import ReplicaProgram, replica_program
from vnode.partition.plan.replica_reduction import ReplicaReduction
from vnode.partition.plan.replica_shares import fastest_counts, of_one_kind
from vnode.partition.plan.search_subject import Subject
from vnode.partition.uneven_shares.state_blocks import rooms_of_state, specs_in_blocks
from vnode.placement.placement import even_counts
from vnode.runtime.mesh_function import follow_layouts
from vnode.spmd.layout import replicated_atom
from vnode.spmd.sharding_flow import Flow, with_cut
from vnode.spmd.uneven_blocks import Share


def reduce_counts(counts: Sequence[int]) -> tuple[int, ...]:
    """The same proportions with the largest blocks."""
    common = math.gcd(*counts)
    return tuple(n // common for n in counts)


@dataclasses.dataclass(frozen=True, eq=False)
class UnevenCandidate:
    """A step with an unevenly sharded state, on one mesh.

    Attributes:
      share: blocks of each index along the axis.
      dims: the dimension in blocks, by number of the input.
      replica: the program of a replica.
      flow: layouts through that program.
      prediction: the prediction for the slowest index.
    """

    share: Share
    dims: Mapping[int, int]
    replica: ReplicaProgram
    flow: Flow
    prediction: Prediction


class UnevenSearch:
    """A search for the blocks of devices along an axis of a mesh, by their speed.

    Args:
      subject: the step.
      machine: the machine.
      sizes: sizes of the mesh axes: the nodes' axis first, and one other.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      times: source of the times of fused ops.
      pace: seconds of a node on a device of each kind.
    """

    def __init__(
        self,
        subject: Subject,
        machine: Machine,
        sizes: Mapping[str, int],
        platform: str,
        times: Times | None,
        pace: Mapping[str, float],
    ) -> None:
        self.subject, self.machine, self.platform, self.times = subject, machine, platform, times
        self.axes = dividing_axes(sizes)
        (self.axis,) = self.axes
        self.mesh: MachineMesh = machine.mesh(sizes)
        replicas = self.mesh.devices.reshape(sizes[NODES], -1).tolist()
        of = [[machine.devices[i].kind for i in column] for column in zip(*replicas, strict=True)]
        self.kinds: list[Kind] = [max(column, key=lambda kind: pace[kind.name]) for column in of]
        self.rates = [1 / pace[kind.name] for kind in self.kinds]
        options = subject.step.options
        counts = tuple(even_counts(options.virtual_nodes, sizes[NODES], options.lane))
        self.across = ReplicaReduction(counts, options.lane, options.reduction == "invariant")
        self.known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], UnevenCandidate | None] = {}

    def predicted(self, flow: Flow, kind: Kind, blocks: int) -> Prediction:
        """The prediction for a device with this many blocks."""
        return predict(
            self.subject,
            flow_of_device(flow, (blocks, 0)),
            of_one_kind(self.machine, kind),
            self.mesh,
            self.across,
            platform=self.platform,
            sharded=None,
            iterations=max(self.across.counts),
            times=self.times,
        )

    def with_counts(self, dims: Mapping[int, int], counts: Sequence[int]) -> UnevenCandidate | None:
        """The candidate with these numbers of blocks; None if it cannot be carried out."""
        key = reduce_counts(counts), tuple(sorted(dims.items()))
        if key not in self.known:
            self.known[key] = self.with_share(dims, Share((self.axis,), key[0]))
        return self.known[key]

    def with_share(self, dims: Mapping[int, int], share: Share) -> UnevenCandidate | None:
        """The candidate with a share; see `with_counts`."""
        subject = self.subject
        try:
            specs_in_blocks(subject, dims, share)
            replica = replica_program(
                subject.schedule,
                Spread.from_counts(self.across.counts),
                self.axes,
                self.platform,
                self.across.invariant,
                rooms=rooms_of_state(subject, dims, share),
            )
            given = list(map(replicated_atom, replica.program.inputs))
            for i, dim in dims.items():
                room = replica.program.inputs[i].aval.shape[dim]
                given[i] = with_cut(dim, share.cut(room, self.axes), given[i])
            flow = shard_carries(follow_layouts(replica.program, given, self.axes), self.axes)
        except (PartitionError, UnsupportedPrimitiveError):
            return None
        alike = dict.fromkeys(zip((kind.name for kind in self.kinds), share.counts, strict=True))
        kinds = {kind.name: kind for kind in self.kinds}
        found = [self.predicted(flow, kinds[name], blocks) for name, blocks in alike]
        return UnevenCandidate(share, dims, replica, flow, max(found, key=lambda each: each.figures.seconds))

    def lines(self, shared: UnevenCandidate, blocks: int) -> list[tuple[float, float]]:
        """The fixed seconds of each index, and its seconds per block."""
        found: dict[str, tuple[float, float]] = {}
        for kind in self.kinds:
            if kind.name not in found:
                own = shared.share.blocks
                one, every = (self.predicted(shared.flow, kind, n).figures.seconds for n in (1, own))
                block = (every - one) / (own - 1)
                found[kind.name] = one - block, block * own / blocks
        return [found[kind.name] for kind in self.kinds]

    def best(
        self, dims: Mapping[int, int], blocks: int, memory: float = math.inf, hopeless: float = math.inf
    ) -> UnevenCandidate | None:
        """The fastest candidate that fits.

        Args:
          dims: the dimension in blocks, by number of the input.
          blocks: total number of blocks.
          memory: bytes that one device may hold.
          hopeless: seconds above which only the first shares, those by speed, are tried.

        Returns:
          The candidate; None if the program cannot be carried out in blocks, or no unequal shares were found.
        """
        found: dict[tuple[int, ...], UnevenCandidate] = {}
        counts = fastest_counts([(0.0, 1 / rate) for rate in self.rates], blocks)
        if max(counts) == blocks:  # one for the next fastest, and not all for one
            first, second, *_ = sorted(range(len(counts)), key=lambda d: (-counts[d], -self.rates[d]))
            counts = tuple(n - (d == first) + (d == second) for d, n in enumerate(counts))
        while counts not in found and is_unequal(counts):  # counts and times follow each other
            one = self.with_counts(dims, counts)
            if one is None:
                break
            found[counts] = one
            if one.prediction.figures.seconds <= hopeless:
                counts = fastest_counts(self.lines(one, blocks), blocks)
        fits = [each for each in found.values() if each.prediction.figures.memory <= memory]
        return min(fits or found.values(), key=lambda each: each.prediction.figures.seconds, default=None)


def is_unequal(counts: Sequence[int]) -> bool:
    """Whether devices have different numbers of blocks, and no device has all."""
    return len({*counts}) > 1 and sum(n > 0 for n in counts) > 1


def flow_of_device(flow: Flow, at: tuple[int, int]) -> Flow:
    """A flow whose loops run over one device's blocks, from its first block on."""
    steps = tuple(
        dataclasses.replace(
            step,
            bodies=tuple(flow_of_device(body, at) for body in step.bodies),
            loop=None if step.loop is None else dataclasses.replace(step.loop, at=at),
        )
        for step in flow.steps
    )
    return dataclasses.replace(flow, steps=steps)
