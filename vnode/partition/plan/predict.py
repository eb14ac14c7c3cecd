"""What a plan would take on a machine: seconds of a step, bytes between devices, memory of one device.

Knows the program of a row, machines and what programs cost on them. Must not know how layouts were found.

A row's devices run a node's program divided among them, for each of its nodes; then what passes sum is added up over
the rows, and each device updates its part of the state. Where the state is sharded over the rows as well (ZeRO), what
passes read of it is gathered first, and the update is divided once more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Atom, Program
from vnode.partition.cost.collectives import Transfer
from vnode.partition.cost.device import device_program
from vnode.partition.cost.kernels import Target
from vnode.partition.cost.memory import memory_of
from vnode.partition.cost.program import program_cost
from vnode.partition.cost.time import Times
from vnode.partition.machine import Machine, MachineMesh
from vnode.partition.plan.row import OVER_ROWS, RowProgram, over_axis
from vnode.partition.searches.costs import Estimate
from vnode.partition.simulator import Timeline
from vnode.spmd.choice import Choice, itemsize
from vnode.spmd.flow import Flow
from vnode.spmd.layout import Axes, Layout

NODES = "vnode"
"""The mesh axis that nodes are spread over."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """What a step takes on each device.

    Attributes:
      seconds: of a step, exchange that runs beside computation counted once.
      compute: seconds of all kernels.
      exchange: seconds of all collectives.
      sent: bytes that each device sends.
      collectives: bytes of one device's arrays in collectives, by kind.
      memory: bytes, the peak.
      state: bytes of the state, of all that is handed on.
      pending: bytes of sums that wait for others, which bits that do not depend on devices take.
      timeline: of one device.
    """

    seconds: float
    compute: float
    exchange: float
    sent: float
    collectives: Mapping[str, int]
    memory: int
    state: int
    pending: int
    timeline: Timeline


class RowCost(Estimate):
    """A cost model for the program of a row, which knows of other rows; its mesh has the axis of the nodes."""

    def compute_time(self, eqn: JaxprEqn, choice: Choice) -> float:
        """See `vnode.partition.searches.CostModel`; what is summed over rows takes an exchange."""
        if eqn.primitive is not OVER_ROWS:
            return super().compute_time(eqn, choice)
        if NODES not in self.axes:
            return 0.0
        held = nbytes(choice.results[0], eqn.outvars[0], self.axes)
        return self._seconds(Transfer("all-reduce", (NODES,), held, self.axes[NODES]))


def predicted(
    row: RowProgram,
    flow: Flow,
    machine: Machine,
    mesh: MachineMesh,
    *,
    platform: str,
    state: Collection[int],
    batch: Collection[int],
    donated: Collection[int],
    sharded: Mapping[int, int],
    pending: int,
    times: Times | None = None,
) -> Prediction:
    """Predicts what a row's program takes, carried out as a flow says.

    Args:
      row: the program.
      flow: layouts through it, over the axes besides that of the nodes.
      machine: on which.
      mesh: its devices.
      platform: what is compiled for.
      state: numbers of inputs that are handed on.
      batch: of inputs of which each row has its own part only.
      donated: of inputs that are given away.
      sharded: for inputs that are sharded over the rows as well, by number, into how many parts.
      pending: how many copies of what passes sum are held besides one.
      times: of kernels; by default the roofline of each kind.
    """
    rows = mesh.shape.get(NODES, 1)
    with over_axis(NODES if rows > 1 else ""):
        cost = program_cost(flow, machine, mesh, times=times, donated=donated, platform=platform)
    axes = {name: n for name, n in mesh.shape.items() if n > 1 and name != NODES}
    held = [nbytes(layout, var, axes) for layout, var in zip(flow.inputs, flow.program.inputs, strict=True)]
    inputs = cost.memory.arguments - sum(held[i] * (rows - 1) // rows for i in batch)
    outputs, temporaries = cost.memory.outputs - cost.memory.aliased, cost.memory.temporaries
    sums = local_sums(flow, axes)
    waiting, gathered, kept = pending * sums, 0, 0
    seconds, exchange, sent, kinds = cost.seconds, cost.exchange, cost.sent, dict(cost.bytes)
    if sharded:
        read = read_in_loops(flow)
        kept = sum(held[i] - held[i] // parts for i, parts in sharded.items())
        gathered = sum(held[i] for i in sharded if flow.program.inputs[i] in read)
        more = machine.collective("all_gather", mesh.groups(NODES)).seconds(gathered)
        seconds, exchange = seconds + more, exchange + more
        sent += gathered * (rows - 1) / rows
        kinds["all-gather"] = kinds.get("all-gather", 0) + gathered
        inputs -= kept
        outputs -= 0 if donated else kept  # what is given away is written in place
        with over_axis(""):
            loops = memory_of(device_program(before_updates(flow), axes, platform=platform), Target.on(platform))
        after = sums + max(temporaries - sums, 0) // rows
        temporaries = max(loops.temporaries + loops.outputs + gathered, after)
    return Prediction(
        seconds,
        cost.compute,
        exchange,
        sent,
        kinds,
        inputs + max(outputs, 0) + temporaries + waiting,
        sum(held[i] for i in state) - kept,
        waiting,
        cost.timeline,
    )


def before_updates(flow: Flow) -> Flow:
    """The part of a flow up to the last of what is summed over rows."""
    program = flow.program
    last = max((k for k, step in enumerate(flow.steps) if step.eqn.primitive is OVER_ROWS), default=-1)
    steps = flow.steps[: last + 1]
    totals = [(step.eqn.outvars[0], step.results[0]) for step in steps if step.eqn.primitive is OVER_ROWS]
    equations = [step.eqn for step in steps]
    outputs: list[Atom] = [var for var, _ in totals]
    lie = tuple(layout for _, layout in totals)
    return Flow(Program(program.inputs, program.constants, equations, outputs), flow.inputs, steps, lie, lie)


def nbytes(layout: Layout, var: Any, axes: Axes) -> int:
    """Bytes of one device's array."""
    shape = tuple(getattr(var.aval, "shape", ()))
    return math.prod(layout.local(shape, axes)) * itemsize(var.aval.dtype)


def local_sums(flow: Flow, axes: Axes) -> int:
    """Bytes of one device's part of what passes sum."""
    sums = (step for step in steps_of(flow) if step.eqn.primitive is OVER_ROWS)
    return sum(nbytes(step.results[0], step.eqn.outvars[0], axes) for step in sums)


def read_in_loops(flow: Flow) -> set[Any]:
    """The program's variables that its loops read."""
    regions = (step.eqn for step in flow.steps if step.region is not None)
    return {atom for eqn in regions for atom in eqn.invars if isinstance(atom, Var)}


def steps_of(flow: Flow) -> Iterator[Any]:
    """All steps of a flow, those of bodies among them."""
    for step in flow.steps:
        yield step
        for body in step.bodies:
            yield from steps_of(body)
