"""A flow through a replica's program -> the step's seconds, bytes between devices, and memory of one device.

Knows the program of a replica, machines and what programs cost on them. Must not know how layouts were found.

A replica's devices divide the program of each of its nodes. Then accumulators are reduced across replicas, and each
device updates its part of the state. If the state is sharded over the replicas as well (ZeRO), passes gather the parts
that they read first (on TPUs, after the totals of earlier passes), and the update is divided further.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from vnode.errors import Bound
from vnode.partition.accept import planned_collectives
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.collective_cost import Transfer
from vnode.partition.cost.lower_to_device import DeviceProgram, device_program
from vnode.partition.cost.program_memory import Level, levels_over_time
from vnode.partition.cost.split_cost import program_cost
from vnode.partition.cost.time_sources import Times
from vnode.partition.hlo import Collective
from vnode.partition.machine import Machine, MachineMesh
from vnode.partition.plan.carry_sharding import shard_replicated_region
from vnode.partition.plan.meshes import NODES
from vnode.partition.plan.other_replicas import GATHER_FROM_REPLICAS, SUM_OVER_REPLICAS
from vnode.partition.plan.replica import loop_bodies
from vnode.partition.plan.replica_reduction import ReplicaReduction, reduce_over_replicas
from vnode.partition.plan.search_subject import Subject
from vnode.partition.searches.search_costs import Estimate, local_bytes
from vnode.partition.simulator import Timeline
from vnode.runtime.node_loops import ROOM_EARLY
from vnode.runtime.offloaded_accumulators import PIECE, can_offload
from vnode.show.units import size
from vnode.spmd.layout import Axes
from vnode.spmd.op_sharding import OpSharding
from vnode.spmd.sharding_flow import Flow

EXCHANGES = {SUM_OVER_REPLICAS: "all-reduce", GATHER_FROM_REPLICAS: "all-gather"}
"""Collectives across replicas, by the primitive that needs them."""


def dividing_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes that divide a node's computation: all longer than one, but the nodes' axis.

    >>> dividing_axes({"vnode": 2, "model": 4, "model2": 1})
    {'model': 4}
    """
    return {name: n for name, n in axes.items() if n > 1 and name != NODES}


@dataclasses.dataclass(frozen=True)
class Figures:
    """The cost of a step on each device, as numbers that can be saved.

    Attributes:
      seconds: time of a step, with overlap.
      compute: seconds of all fused ops.
      exchange: seconds of all collectives, overlapped ones included.
      sent: bytes that each device sends.
      arguments: bytes of the step's arguments.
      results: bytes of its results, without those in donated buffers.
      temporary: bytes of all other arrays at the peak.
      state: bytes of the arguments that are carried from step to step.
      pending: bytes of waiting partial sums, which same bits on any devices need; part of `temporary`.
      collectives: bytes of one device's arrays in collectives, by kind.
      host: bytes of one device's part of the state in the host's memory, in none of the other figures.
      transfer: seconds of host transfers of the state, and of `aside` and `far`; part of `seconds`.
      aside: bytes of offloaded residuals of loops in the host's memory.
      back: bytes fetched from the host in a step, trip counts of loops included; as many go there before.
      far: bytes of waiting partial sums in the host's memory.
      source: ``"model"``; ``"compiled"``, where memory and collectives are the compiler's; or ``"draft"``, where they
        are those of a program that was compiled with few optimizations.
      timed: whether `compute` is the compiler's, too.
    """

    seconds: float
    compute: float
    exchange: float
    sent: float
    arguments: int
    results: int
    temporary: int
    state: int
    pending: int
    collectives: Mapping[str, int]
    host: int = 0
    transfer: float = 0.0
    aside: int = 0
    back: int = 0
    far: int = 0
    source: str = "model"
    timed: bool = False

    @property
    def memory(self) -> int:
        """Peak bytes of one device."""
        return self.arguments + self.results + self.temporary

    @property
    def on_host(self) -> str:
        """The offloaded bytes, in words; empty without any."""
        parts = ((self.host, "the state"), (self.far, "sums that wait"))
        return " and ".join(f"{size(n)} of {what}" for n, what in parts if n) + " on the host" * any(
            n for n, _ in parts
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction(Bound):
    """The predicted cost of a step on each device.

    Attributes:
      figures: the figures.
      exchanges: its collectives, equal ones as one.
      platform: the platform that it is predicted for.
      iterations: nodes of a replica; of the slowest, where replicas differ.
      timeline: a device's timeline; None if it was read from a file.
      device: a device's program; likewise.
      calibration: the kind of device's calibration; likewise.
    """

    figures: Figures
    exchanges: tuple[Collective, ...]
    platform: str
    iterations: int
    timeline: Timeline | None = None
    device: DeviceProgram | None = None
    calibration: Calibration | None = None

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """The live bytes, fused op by fused op; empty without `device`."""
        if self.device is None or self.calibration is None:
            return ()
        f = self.figures
        found = levels_over_time(self.device, self.calibration)
        most = max((each.bytes for each in found), default=0)
        always = f.arguments + f.results
        moved = {each.bytes: f.temporary if each.bytes == most else min(each.bytes, f.temporary) for each in found}
        return tuple(dataclasses.replace(each, bytes=moved[each.bytes] + always) for each in found)


class ReplicaCost(Estimate):
    """A cost model for a replica's program, collectives across replicas included; its mesh has the nodes' axis."""

    def compute_time(self, eqn: JaxprEqn, choice: OpSharding) -> float:
        """See `Estimate`; sums and gathers across replicas take an exchange."""
        kind = EXCHANGES.get(eqn.primitive)
        if kind is None:
            return super().compute_time(eqn, choice)
        if NODES not in self.axes:
            return 0.0
        held = local_bytes(choice.results[0], eqn.outvars[0].aval, self.axes)
        return self.seconds(Transfer(kind, (NODES,), held, self.axes[NODES]))


def predict(
    subject: Subject,
    flow: Flow,
    machine: Machine,
    mesh: MachineMesh,
    across: ReplicaReduction,
    *,
    platform: str,
    sharded: Mapping[int, PartitionSpec] | None,
    iterations: int,
    times: Times | None = None,
) -> Prediction:
    """Predicts the cost of a replica's program in given layouts.

    Args:
      subject: the step.
      flow: layouts through that program, over all axes but the nodes'.
      machine: the machine.
      mesh: its devices.
      across: the reduction across replicas.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      sharded: layouts of the inputs that are sharded over the replicas as well, by number; these and the totals then
        decide the sharding of the replicated region. None: the flow decides it.
      iterations: nodes of the replica that stands for all.
      times: source of the times of fused ops; by default `Times()`.
    """
    axes = {name: n for name, n in mesh.shape.items() if n > 1}
    inner = dividing_axes(axes)
    sums = local_sums(flow, inner)
    early = platform in ROOM_EARLY
    whole = reduce_over_replicas(
        flow if sharded is None else shard_replicated_region(flow, sharded, subject.carried, axes, across, early),
        across,
    )
    device = device_program(whole, axes, platform=platform, donated=subject.donated, single_turns=across.invariant)
    cost = program_cost(device, machine, mesh, times=times, platform=platform)
    given = [local_bytes(layout, var.aval, axes) for layout, var in zip(whole.inputs, flow.program.inputs, strict=True)]
    memory = cost.memory
    once, kind = far_sums(flow, inner), machine.kinds[0]
    far = across.sums_on_host * once
    way = across.crossings * (once / kind.host_bandwidth + -(-once // PIECE) * kind.host_latency)
    figures = Figures(
        seconds=cost.seconds + way,
        compute=cost.compute,
        exchange=cost.exchange,
        sent=cost.sent,
        arguments=memory.arguments,
        results=memory.outputs - memory.aliased,
        temporary=memory.temporaries,
        state=sum(given[i] for i in subject.state),
        pending=across.waiting * sums - far,
        collectives=cost.bytes,
        transfer=cost.transfer + way,
        aside=memory.host,
        back=sum(each.bytes * each.runs for each in cost.moves if each.from_host),
        far=far,
    )
    return Prediction(
        figures,
        planned_collectives(cost),
        platform,
        iterations,
        cost.timeline,
        device,
        Calibration.for_platform(platform, machine.kinds[0].name),
    )


def local_sums(flow: Flow, axes: Axes) -> int:
    """Bytes of one device's part of the accumulators."""
    flows = [flow, *(body for _, body in loop_bodies(flow))]
    sums = (step for each in flows for step in each.steps if step.eqn.primitive is SUM_OVER_REPLICAS)
    return sum(local_bytes(step.made[0], step.eqn.outvars[0].aval, axes) for step in sums)


def far_sums(flow: Flow, axes: Axes) -> int:
    """Bytes of one device's part of the accumulators that may wait on the host: large ones, of passes outside loops."""
    found = 0
    for step in flow.steps:
        if step.eqn.primitive is SUM_OVER_REPLICAS:
            var, (layout,) = step.eqn.outvars[0], step.made
            if can_offload(layout.local_shape(var.aval.shape, axes), var.aval.dtype):
                found += local_bytes(layout, var.aval, axes)
    return found


def platform_of(machine: Machine) -> str:
    """The platform of a machine, by its kinds of devices.

    >>> platform_of(Machine.tpu("v5e:2x2")), platform_of(Machine.gpus("P100", hosts=1, per_host=2))
    ('tpu', 'gpu')
    """
    names = {kind.name for kind in machine.kinds}
    if all(name.startswith("TPU") for name in names):
        return "tpu"
    return "cpu" if any("cpu" in name.lower() for name in names) else "gpu"
