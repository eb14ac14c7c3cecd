"""The program of one device -> its cost on a machine: time, bytes between devices, memory.

Knows one device's program, machines, times of timed ops, the simulator. Must not know how the split was found.

All devices run the same program, so one timeline stands for all. A fused op has its time on the slowest kind of device;
a collective has the time of the busiest link. The timeline has three resources: the device computes, its links exchange
one collective at a time, and its host link transfers. Fused ops start in the program's order when their operands are
ready, and collectives overlap with them. A transfer to or from the host's memory takes the time of its bytes on the
host link. It overlaps with the other operations of the same loop iteration: compilers start it when the value is ready,
and wait for it at the reader or at the end of the iteration. Iterations of a loop do not overlap: the timeline of the
body counts once per iteration. A loop without collectives has its measured time, if one is known.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping

import numpy as np
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program
from vnode.operators.control_flow import Region, region_of
from vnode.operators.cost import all_bytes
from vnode.operators.memory_spaces import is_on_host
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.collective_cost import Transfer, transfer_of
from vnode.partition.cost.fusion import fuse_program
from vnode.partition.cost.lower_to_device import DeviceProgram, device_program
from vnode.partition.cost.op_kinds import LOOP_BUFFERS, FusedOp, FusedProgram, OpKind
from vnode.partition.cost.program_memory import Memory, memory_of
from vnode.partition.cost.time_sources import Time, Times
from vnode.partition.machine import Machine, MachineMesh
from vnode.partition.simulator import TaskGraph, Timeline, picoseconds, simulate
from vnode.show.units import size
from vnode.spmd.sharding_flow import Flow


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """A collective of a program.

    Attributes:
      transfer: its kind, mesh axes and bytes.
      runs: how often it runs, trip counts of loops included.
      seconds: time of one run; its share, if it is combined with others.
    """

    transfer: Transfer
    runs: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """A copy of a value to the host's memory, or back.

    Attributes:
      bytes: size of the value.
      runs: how often it is copied, trip counts of loops included.
      from_host: whether it is copied back to the device.
      seconds: time of one run.
    """

    bytes: int
    runs: int
    from_host: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """The cost of a split program on a machine.

    Attributes:
      compute: seconds of all fused ops, without overlap.
      exchange: seconds of all collectives, without overlap.
      timeline: both, with overlap.
      collectives: the collectives of a device; of a branch, those of its slowest body.
      others: the collectives of the other bodies of branches.
      moves: transfers to the host's memory and back; of a branch, those of its slowest body.
      memory: one device's memory.
      sources: seconds of `compute` by source of the times.
      noise: seconds by which the measured times may be off in all.
      unknown: primitives without a description, whose operations count as zero.
      open_loops: number of loops without a known trip count; their bodies count once.
    """

    compute: float
    exchange: float
    timeline: Timeline
    collectives: tuple[PlannedCollective, ...]
    memory: Memory
    sources: Mapping[str, float]
    noise: float
    unknown: frozenset[str] = frozenset()
    open_loops: int = 0
    others: tuple[PlannedCollective, ...] = ()
    moves: tuple[HostTransfer, ...] = ()

    @property
    def transfer(self) -> float:
        """Seconds of all transfers to the host's memory and back, without overlap."""
        return sum(each.seconds * each.runs for each in self.moves)

    @property
    def seconds(self) -> float:
        """Seconds of one run, with overlap."""
        return self.timeline.seconds

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of one device's arrays in collectives, by kind (`Transfer.bytes`)."""
        found: dict[str, int] = {}
        for each in self.collectives:
            found[each.transfer.kind] = found.get(each.transfer.kind, 0) + each.transfer.bytes * each.runs
        return found

    @property
    def sent(self) -> float:
        """Bytes that each device sends."""
        return sum(each.transfer.bytes_sent * each.runs for each in self.collectives)

    def __str__(self) -> str:
        said = ", ".join(f"{source} {seconds:.3g} s" for source, seconds in self.sources.items())
        moved = ", ".join(f"{kind} {size(n)}" for kind, n in sorted(self.bytes.items())) or "nothing"
        lines = [
            f"{self.seconds:.4g} s: compute {self.compute:.3g} s ({said or 'nothing'}), exchange {self.exchange:.3g} s",
            f"exchanged: {moved}",
            str(self.memory),
        ]
        if self.unknown:
            lines.append(f"operations not known of: {', '.join(sorted(self.unknown))}")
        if self.open_loops:
            lines.append(f"loops of unknown length, counted once: {self.open_loops}")
        return "\n".join(lines)


def program_cost(
    program: DeviceProgram | Flow,
    machine: Machine,
    mesh: MachineMesh,
    *,
    times: Times | None = None,
    donated: Collection[int] = (),
    platform: str = "tpu",
) -> ProgramCost:
    """The cost of a split program.

    Args:
      program: one device's program, or the flow to trace it from.
      machine: the machine that runs it.
      mesh: its devices, with the axes of the program.
      times: source of the times of fused ops; by default `Times()`.
      donated: numbers of the donated inputs, if `program` is a flow.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; decides which equations are fused.

    Returns:
      The cost.

    Raises:
      MachineError: the mesh lacks an axis of the program, or has it in another size.

    Example:
      >>> from vnode.partition import Machine, program_cost
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from vnode.analysis.program import inline
      >>> from vnode.spmd.sharding_flow import follow
      >>> from vnode.spmd.layout import from_spec
      >>> traced = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((256, 512)), jnp.ones((512, 256)))
      >>> program, axes = inline(traced.jaxpr, traced.consts), {"x": 4}
      >>> layouts = [from_spec(P(None, "x"), (256, 512), axes), from_spec(P("x"), (512, 256), axes)]
      >>> machine = Machine.tpu("v5e:2x2")
      >>> cost = program_cost(follow(program, layouts, axes), machine, machine.mesh(axes))
      >>> cost.bytes, cost.memory.arguments
      ({'all-reduce': 262144}, 262144)
    """
    if isinstance(program, Flow):
        axes = {name: n for name, n in mesh.shape.items() if n > 1}
        program = device_program(program, axes, platform=platform, donated=donated)
    calibration = Calibration.for_platform(platform, machine.kinds[0].name)
    taken = _CostSum(machine, mesh, program.axes, times or Times())
    fused = fuse_program(program.program, calibration.recomputes)
    timeline = taken.timeline(fused, 1)
    compute = sum(time.seconds * runs for time, runs in taken.times)
    exchange, transfer = (
        sum(each.seconds * each.runs for each in several) for several in (taken.collectives, taken.moves)
    )
    works = picoseconds([compute, exchange, transfer])
    sources = collections.Counter[str]()
    for time, runs in taken.times:
        sources[time.source] += time.seconds * runs  # pyright: ignore[reportArgumentType]
    return ProgramCost(
        compute=compute,
        exchange=exchange,
        timeline=dataclasses.replace(timeline, idle=np.maximum(timeline.busy - works, 0)),
        collectives=tuple(taken.collectives),
        memory=memory_of(program, calibration, fused),
        sources=sources,
        noise=float(np.sqrt(sum((time.noise * runs) ** 2 for time, runs in taken.times))),
        unknown=frozenset(taken.unknown),
        open_loops=taken.open_loops,
        others=tuple(taken.others),
        moves=tuple(taken.moves),
    )


RESOURCES = "compute", "links", "host link"
COMPUTE, LINKS, HOST_LINK = range(3)


@dataclasses.dataclass(eq=False)
class _CostSum:
    """Adds up the cost of a program and of the bodies of its loops and branches."""

    machine: Machine
    mesh: MachineMesh
    axes: Mapping[str, int]
    source: Times
    times: list[tuple[Time, float]] = dataclasses.field(default_factory=list)
    collectives: list[PlannedCollective] = dataclasses.field(default_factory=list)
    others: list[PlannedCollective] = dataclasses.field(default_factory=list)  # of bodies that are not the slowest
    moves: list[HostTransfer] = dataclasses.field(default_factory=list)
    unknown: set[str] = dataclasses.field(default_factory=set)
    open_loops: int = 0

    def timeline(self, fused: FusedProgram, runs: int) -> Timeline:
        """The timeline of a program, whose costs are counted `runs` times."""
        graph, made = TaskGraph(RESOURCES), dict[Var, int]()
        for op, reads in zip(fused.fused_ops, fused.reads, strict=True):
            seconds, on = self.add_fused_op(op, fused.program, runs)
            after = sorted({made[var] for var in reads if var in made})
            number = graph.add(int(picoseconds(seconds)), on, after=after, label=str(op.timed_op))
            made.update(dict.fromkeys(op.timed_op.writes, number))
        return simulate(graph)

    def add_fused_op(self, op: FusedOp, program: Program, runs: int) -> tuple[float, tuple[int, ...]]:
        """Adds the cost of a fused op. Returns its seconds, and the resources that it occupies."""
        eqn, piece = op.root, op.timed_op
        sent = [transfer_of(each, self.axes) for each in piece.equations] if op.kind is OpKind.COLLECTIVE else []
        transfers = [transfer for transfer in sent if transfer is not None]
        if transfers:
            cost = transfers[0].cost(self.machine, self.mesh)
            for transfer in transfers:
                share = transfer.bytes * cost.per_byte + cost.latency / len(transfers)
                self.collectives.append(PlannedCollective(transfer, runs, share))
            return cost.seconds(sum(transfer.bytes for transfer in transfers)), (LINKS,)
        if op.kind is OpKind.HOST_TRANSFER:
            (move,) = [self.host_transfer(each, runs) for each in piece.equations]
            self.moves.append(move)
            return move.seconds, (HOST_LINK,)
        region = region_of(eqn) if op.kind is OpKind.REGION else None
        if region is None and (eqn.effects or eqn.primitive is LOOP_BUFFERS):  # `axis_index`; a loop's buffers
            return 0.0, (COMPUTE,)
        if region is not None and (self.source.is_roofline or eqn.effects or has_host_transfer(op)):
            return self.add_region(op, region, runs)
        found = self.source.slowest(piece, self.machine.kinds)
        if region is not None and found.source == "roofline":
            return self.add_region(op, region, runs)
        if program.describe(eqn) is None and region is None:
            self.unknown.add(eqn.primitive.name)
        self.times.append((found, runs))
        return found.seconds, (COMPUTE,)

    def host_transfer(self, eqn: JaxprEqn, runs: int) -> HostTransfer:
        """The transfer of a value to or from the host, on the kind of device with the slowest link."""
        bytes_ = sum(all_bytes(var.aval) for var in eqn.outvars)
        seconds = max(bytes_ / kind.host_bandwidth + kind.host_latency for kind in self.machine.kinds)
        return HostTransfer(bytes_, runs, not is_on_host(eqn.outvars[0].aval), seconds)

    def add_region(self, op: FusedOp, region: Region, runs: int) -> tuple[float, tuple[int, ...]]:
        """Adds the cost of a loop, body times trip count, or of the slowest body of a branch."""
        counts = body_trip_counts(region, len(op.bodies))
        if counts is None:
            self.open_loops += 1
            counts = [1] * len(op.bodies)
        found = list[tuple[float, _CostSum]]()
        for body, turns in zip(op.bodies, counts, strict=True):
            inner = _CostSum(self.machine, self.mesh, self.axes, self.source)
            found.append((inner.timeline(body, runs * turns).seconds * turns, inner))
        chosen = [max(found, key=lambda each: each[0])] if region.chooser is not None else found
        for each in found:
            _, inner = each
            self.others += inner.others
            self.unknown |= inner.unknown
            self.open_loops += inner.open_loops
            if each in chosen:
                self.times += inner.times
                self.collectives += inner.collectives
                self.moves += inner.moves
            else:
                self.others += inner.collectives
        on = (COMPUTE, LINKS) if any(inner.collectives for _, inner in chosen) else (COMPUTE,)
        return sum(seconds for seconds, _ in chosen), on


def has_host_transfer(op: FusedOp) -> bool:
    """Whether the bodies of a loop or branch contain a transfer to or from the host's memory."""
    inner = [each for body in op.bodies for each in body.fused_ops]
    return any(each.kind is OpKind.HOST_TRANSFER or has_host_transfer(each) for each in inner)


def body_trip_counts(region: Region, bodies: int) -> list[int] | None:
    """How often each body runs; None if the trip count is unknown."""
    if region.chooser is not None:
        return [1] * bodies
    if region.tests and getattr(region, "trip_count", None) is None:
        return None
    return [region.run_count + 1] * region.tests + [region.run_count] * (bodies - region.tests)
