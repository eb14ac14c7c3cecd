"""The program of one device -> its cost on a machine: time, bytes between devices, memory.

Knows one device's program, machines, times of timed ops, the simulator. Must not know how the split was found.

All devices run the same program, so one timeline stands for all. A fused op has its time on the slowest kind of device;
a collective has the time of the busiest link. One resource of the timeline computes. Links that the same collectives
use are one resource, so two collectives that share a link wait for each other. Fused ops start in the program's order
when their operands are ready; collectives overlap with them unless `overlap` is False. A transfer to or from the host's
memory takes the time of its bytes on the host link. It overlaps with the other operations of the same loop iteration:
compilers start it when the value is ready, and wait for it at the reader or at the end of the iteration. Iterations of
a loop do not overlap: the timeline of the body counts once per iteration. A loop without collectives has its measured
time, if one is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Program
from vnode.operators.control_flow import Region, region_of
from vnode.operators.cost import all_bytes
from vnode.operators.memory_spaces import crosses_memories, is_on_host
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.collective_cost import KINDS, Transfer, transfer_of
from vnode.partition.cost.fusion import fuse_program
from vnode.partition.cost.lower_to_device import DeviceProgram, body_programs, device_program
from vnode.partition.cost.op_kinds import LOOP_BUFFERS, FusedOp, OpKind
from vnode.partition.cost.program_memory import Memory, memory_of
from vnode.partition.cost.roofline import Time, seconds_by_source
from vnode.partition.cost.time_sources import Times
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
    def total(self) -> float:
        """Seconds of one run, without overlap."""
        return self.compute + self.exchange + self.transfer

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
    overlap: bool = True,
) -> ProgramCost:
    """The cost of a split program.

    Args:
      program: one device's program, or the flow to trace it from.
      machine: the machine that runs it.
      mesh: its devices, with the axes of the program.
      times: source of the times of fused ops; by default `Times()`.
      donated: numbers of the donated inputs, if `program` is a flow.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; decides which equations are fused.
      overlap: whether devices compute while they exchange.

    Returns:
      The cost.

    Raises:
      MachineError: the mesh lacks an axis of the program, or has it in another size.

    Example:
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
    taken = _CostSum(machine, mesh, program.axes, times or Times(), calibration.recomputes, overlap)
    timeline = taken.timeline(program.program, 1)
    return ProgramCost(
        compute=sum(time.seconds * runs for time, runs in taken.times),
        exchange=sum(each.seconds * each.runs for each in taken.collectives),
        timeline=timeline,
        collectives=tuple(taken.collectives),
        memory=memory_of(program, calibration),
        sources=seconds_by_source(taken.times),
        noise=float(np.sqrt(sum((time.noise * runs) ** 2 for time, runs in taken.times))),
        unknown=frozenset(taken.unknown),
        open_loops=taken.open_loops,
        others=tuple(taken.others),
        moves=tuple(taken.moves),
    )


HOST_LINK = -1
"""The number of a device's link to its host, beside the machine's resources."""

DEVICE = -2
"""The number of the device itself, where it is one among links."""


@dataclasses.dataclass
class _Task:
    """A task before it is in a graph.

    `works` holds, for a loop or branch, the busy seconds of its links and of the device.
    """

    seconds: float
    links: tuple[int, ...]
    computes: bool
    label: str
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    works: Mapping[int, float] | None = None


class _CostSum:
    """Adds up the cost of a program and of the bodies of its loops and branches."""

    def __init__(
        self,
        machine: Machine,
        mesh: MachineMesh,
        axes: Mapping[str, int],
        times: Times,
        recomputes: bool,
        overlap: bool,
    ) -> None:
        self.machine, self.mesh, self.axes = machine, mesh, axes
        self.source, self.recomputes, self.overlap = times, recomputes, overlap
        self.times: list[tuple[Time, float]] = []
        self.collectives: list[PlannedCollective] = []
        self.others: list[PlannedCollective] = []  # of bodies that are not the slowest
        self.moves: list[HostTransfer] = []
        self.unknown: set[str] = set()
        self.open_loops = 0

    def timeline(self, program: Program, runs: int) -> Timeline:
        """The timeline of a program; its costs are counted `runs` times."""
        fused = fuse_program(program, self.recomputes)
        tasks = list[_Task]()
        for op, reads in zip(fused.fused_ops, fused.reads, strict=True):
            before = len(self.times), len(self.collectives)
            seconds, links, computes = self.add_fused_op(op, program, runs)
            works = self.busy_seconds(before, runs) if op.kind is OpKind.REGION else None
            tasks.append(_Task(seconds, links, computes, str(op.timed_op), reads, op.timed_op.writes, works))
        graph, idle = build_task_graph(tasks, self.overlap)
        return dataclasses.replace(simulate(graph), idle=idle)

    def busy_seconds(self, before: tuple[int, int], runs: int) -> dict[int, float]:
        """The busy seconds of the device and of each link per run, of the costs added since `before`."""
        times, collectives = before
        runs = max(runs, 1)  # a loop of no iterations keeps nothing busy
        found = {DEVICE: sum(time.seconds * n for time, n in self.times[times:]) / runs}
        for each in self.collectives[collectives:]:
            for link in each.transfer.cost(self.machine, self.mesh).resources:
                found[link] = found.get(link, 0.0) + each.seconds * each.runs / runs
        return found

    def add_fused_op(self, op: FusedOp, program: Program, runs: int) -> tuple[float, tuple[int, ...], bool]:
        """Adds the cost of a fused op; its seconds per run, its links, and whether the device computes."""
        eqn, piece = op.root, op.timed_op
        sent = [transfer_of(each, self.axes) for each in piece.equations] if op.kind is OpKind.COLLECTIVE else []
        transfers = [transfer for transfer in sent if transfer is not None]
        if transfers:
            cost = transfers[0].cost(self.machine, self.mesh)
            for transfer in transfers:
                share = transfer.bytes * cost.per_byte + cost.latency / len(transfers)
                self.collectives.append(PlannedCollective(transfer, runs, share))
            return cost.seconds(sum(transfer.bytes for transfer in transfers)), cost.resources, False
        if op.kind is OpKind.HOST_TRANSFER:
            (move,) = [self.host_transfer(each, runs) for each in piece.equations]
            self.moves.append(move)
            return move.seconds, (HOST_LINK,), False
        region = region_of(eqn) if op.kind is OpKind.REGION else None
        if region is not None:
            known = (
                None if has_collective(eqn) or has_host_transfer(eqn) else self.source.known(piece, self.machine.kinds)
            )
            if known is None:
                return self.add_region(eqn, region, runs)
            self.times.append((known, runs))
            return known.seconds, (), True
        if eqn.effects or eqn.primitive is LOOP_BUFFERS:  # `axis_index`; a loop's buffers
            return 0.0, (), True
        if program.describe(eqn) is None:
            self.unknown.add(eqn.primitive.name)
        found = self.source.slowest(piece, self.machine.kinds)
        self.times.append((found, runs))
        return found.seconds, (), True

    def host_transfer(self, eqn: JaxprEqn, runs: int) -> HostTransfer:
        """The transfer of a value to or from the host, on the kind of device with the slowest link."""
        bytes_ = sum(all_bytes(var.aval) for var in eqn.outvars)
        seconds = max(bytes_ / kind.host_bandwidth + kind.host_latency for kind in self.machine.kinds)
        return HostTransfer(bytes_, runs, not is_on_host(eqn.outvars[0].aval), seconds)

    def add_region(self, eqn: JaxprEqn, region: Region, runs: int) -> tuple[float, tuple[int, ...], bool]:
        """Adds the cost of a loop, body times trip count, or of the slowest body of a branch."""
        bodies = body_programs(eqn)
        counts = body_trip_counts(region, len(bodies))
        if counts is None:
            self.open_loops += 1
            counts = [1] * len(bodies)
        before = len(self.times), len(self.collectives), len(self.moves)
        found = list[tuple[float, list[tuple[Time, float]], list[PlannedCollective], list[HostTransfer]]]()
        for body, turns in zip(bodies, counts, strict=True):
            seconds = self.timeline(body, runs * turns).seconds * turns
            found.append((seconds, self.times[before[0] :], self.collectives[before[1] :], self.moves[before[2] :]))
            del self.times[before[0] :], self.collectives[before[1] :], self.moves[before[2] :]
        chosen = [max(found, key=lambda each: each[0])] if region.chooser is not None else found
        for _, times, collectives, moves in chosen:
            self.times += times
            self.collectives += collectives
            self.moves += moves
        for branch in found:
            self.others += branch[2] if not any(branch is each for each in chosen) else []
        links = set[int]()
        for _, _, collectives, _ in chosen:
            for each in collectives:
                links.update(each.transfer.cost(self.machine, self.mesh).resources)
        return sum(seconds for seconds, *_ in chosen), tuple(sorted(links)), True


def has_collective(eqn: JaxprEqn) -> bool:
    """Whether the bodies of a loop or branch contain a collective."""
    inner = [each for body in body_programs(eqn) for each in body.equations]
    return any(each.primitive.name in KINDS or has_collective(each) for each in inner)


def has_host_transfer(eqn: JaxprEqn) -> bool:
    """Whether the bodies of a loop or branch contain a transfer to or from the host's memory."""
    inner = [each for body in body_programs(eqn) for each in body.equations]
    return any(has_host_transfer(each) if region_of(each) is not None else crosses_memories(each) for each in inner)


def body_trip_counts(region: Region, bodies: int) -> list[int] | None:
    """How often each body runs; None if the trip count is unknown."""
    if region.chooser is not None:
        return [1] * bodies
    if region.tests and getattr(region, "trip_count", None) is None:
        return None
    return [region.run_count + 1] * region.tests + [region.run_count] * (bodies - region.tests)


def build_task_graph(tasks: Sequence[_Task], overlap: bool) -> tuple[TaskGraph, np.ndarray]:
    """A task graph whose dependencies follow the operands; and the idle picoseconds of each resource within tasks.

    Links that the same tasks occupy are one resource, which is busy while its busiest link is.
    """
    used: dict[int, set[int]] = {}
    sets = list(dict.fromkeys(task.links for task in tasks if task.links))
    for number, found in enumerate(sets):
        for link in found:
            used.setdefault(link, set()).add(number)
    classes = list(dict.fromkeys(frozenset(numbers) for numbers in used.values()))
    place = {numbers: 1 + i for i, numbers in enumerate(classes)}
    resources = {found: sorted({place[frozenset(used[link])] for link in found}) for found in sets}
    graph = TaskGraph(["compute", *(f"links {i}" for i in range(1, len(classes) + 1))])
    members = [[DEVICE], *([link for link in used if frozenset(used[link]) == each] for each in classes)]
    idle = np.zeros(len(members), np.int64)
    made: dict[Var, int] = {}
    for task in tasks:
        on = ([0] if task.computes or not overlap else []) + resources.get(task.links, [])
        after = sorted({made[var] for var in task.reads if var in made})
        number = graph.add(int(picoseconds(task.seconds)), on, after=after, label=task.label)
        made.update(dict.fromkeys(task.writes, number))
        if task.works is None:
            continue
        for resource in on:
            works = max(task.works.get(link, 0.0) for link in members[resource])
            idle[resource] += max(int(picoseconds(task.seconds)) - int(picoseconds(works)), 0)
    return graph, idle
