"""A candidate that a search chose -> a plan: mesh, layouts and predictions, and a step that runs by it.

Knows candidates, steps and machines. Must not know how a plan was found, nor how it is shown.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from vnode.analysis.passes import Schedule
from vnode.analysis.program import ResultIndex
from vnode.errors import Bound, MemoryLimitError, PartitionError, PlacementError
from vnode.partition.accept import TOLERANCE, Acceptance
from vnode.partition.compiler.stats import compiled_stats
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.program_memory import Memory
from vnode.partition.machine import Machine
from vnode.partition.plan.divisions import DividedOperation
from vnode.partition.plan.meshes import NODES
from vnode.partition.plan.node_spread import Spread
from vnode.partition.plan.plan_report import plan_page, plan_pictures
from vnode.partition.plan.predict import Figures, Prediction, dividing_axes, platform_of
from vnode.partition.plan.replica import ReplicaProgram, replica_program
from vnode.partition.plan.search_subject import Subject
from vnode.partition.plan.step_layouts import parts_of_sums, patterns
from vnode.partition.simulator import Timeline
from vnode.partition.uneven_shares.state_blocks import dims_of, rooms_of_state
from vnode.placement.node_layout import Layout as Grouped
from vnode.placement.patterns import Exactly
from vnode.placement.placement import Placement, device_list
from vnode.placement.trace_context import with_jit
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.plan.nodes.device_memory import memory_refusal
from vnode.report.step_report import Report
from vnode.show.drawable import Drawn
from vnode.show.page import Page
from vnode.show.units import seconds, several, size
from vnode.spmd.flow_record import RecordedFlow, digest_of
from vnode.step.explain import reports
from vnode.step.uneven_state import share_of
from vnode.step.virtual import VirtualStep


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(Drawn, Bound):
    """A way to run a step on a machine, found by `vnode.partition.search`; it can be printed, saved, and run.

    Attributes:
      subject: the step and its arguments.
      machine: the machine.
      limit: bytes that one device may hold.
      name: the name of the strategy, such as ``"FSDP"``; or ``"searched"``.
      mesh: sizes of the mesh axes; the nodes' axis is ``"vnode"``.
      counts: the number of nodes of each replica, in order; uneven where kinds of devices differ.
      specs: the specs of the state's leaves, by name; by name and shape where leaves of several shapes share a name.
      records: the division of a node's computation, for each pass.
      prediction: the model's prediction.
      beside: figures of other plans, by name, including plans that do not fit.
      gap: the share by which the predicted cost may be above the best on this mesh; None if nothing was searched.
      divisions: the divisions of the most expensive operations.
      host: names of the state's leaves that are in the host's memory between updates.
      far: how many partial sums are in the host's memory while they wait for others.
      compiled: the compiler's figures, if the search compiled the plan.
      notes: candidates that the search did not try, compile, or find to fit, a line each.
    """

    subject: Subject
    machine: Machine
    limit: int
    name: str
    mesh: Mapping[str, int]
    counts: tuple[int, ...]
    specs: Mapping[str, PartitionSpec | UnevenSpec]
    records: Mapping[str, RecordedFlow]
    prediction: Prediction
    beside: Mapping[str, Figures]
    gap: float | None = None
    divisions: tuple[DividedOperation, ...] = ()
    host: tuple[str, ...] = ()
    far: int = 0
    compiled: Figures | None = None
    notes: tuple[str, ...] = ()
    _steps: dict[tuple[Any, ...], VirtualStep[..., Any]] = dataclasses.field(default_factory=dict)

    @property
    def pattern(self) -> Any:
        """The step, a `VirtualStep`."""
        return self.subject.step

    @property
    def args(self) -> tuple[Any, ...]:
        """The step's arguments, as shapes."""
        return self.subject.args

    @property
    def virtual_nodes(self) -> int:
        """V."""
        return self.subject.virtual_nodes

    @property
    def figures(self) -> Figures:
        """The compiler's figures, or else the model's."""
        return self.compiled or self.prediction.figures

    @property
    def memory(self) -> Figure:
        """Bytes of one device, with their source."""
        source = "estimated" if self.figures.source == "model" else self.figures.source
        return Figure(self.figures.memory, source, size, self.spreads(source)[0])

    @property
    def time(self) -> Figure:
        """Seconds of a step, with their source: the compiler's cycles, or the model."""
        source = self.figures.source if self.figures.timed else "estimated"
        return Figure(self.figures.seconds, source, seconds, self.spreads(source)[1])

    def spreads(self, source: str) -> Sequence[Sequence[float] | None]:
        """The spreads (see `Figure`) of memory and of time by a source, on the first kind of device."""
        known = Calibration.for_platform(platform_of(self.machine), self.machine.kinds[0].name)
        return {"draft": (DRAFT_MEMORY, DRAFT_TIME), "estimated": (known.memory, known.time)}.get(source, (None, None))

    @property
    def timeline(self) -> Timeline:
        """A device's predicted timeline.

        Raises:
          PartitionError: the plan is from a file, which has no timeline.
        """
        found = self.prediction.timeline
        if found is None:
            raise PartitionError(
                "a plan from a file has no timeline: the file holds only the totals.",
                facts=[f"predicted: {seconds(self.figures.seconds)} a step"],
                remedies=["search again to get the timeline: vnode.partition.search(...)"],
            )
        return found

    @property
    def offloaded(self) -> tuple[ResultIndex, ...]:
        """The offloaded residuals of loops: results of equations; a final carry stands for all iterations' carries."""
        return self.pattern.spec.plan.offloaded

    @property
    def recomputed(self) -> tuple[ResultIndex, ...]:
        """The residuals that the backward pass recomputes: results of equations."""
        return self.pattern.spec.plan.recomputed

    def step(self, devices: Sequence[Any] | None = None) -> VirtualStep[..., Any]:
        """The step, which runs as planned.

        Args:
          devices: the devices, in the order of the machine's; by default all of ``jax.devices()``.

        Returns:
          A `VirtualStep`; its ``put`` places a state as planned. A later call with the same devices returns the same
          one.

        Raises:
          PlacementError: the machine has another number of devices, or a device is named twice.
        """
        found = device_list(devices)
        known = self._steps.get(tuple(found))
        if known is not None:
            return known
        wanted = len(self.machine.devices)
        if len(found) != wanted:
            raise PlacementError(
                f"the plan is for {several(wanted, 'device')}, and there are {len(found)}.",
                facts=[f"machine: {self.machine.name}"],
                remedies=[
                    f"to try it on a CPU: jax.config.update('jax_num_cpu_devices', {wanted}) before jax is used"
                    if len(found) < wanted
                    else f"give as many devices: jax.devices()[:{wanted}]",
                    "or search a plan for the present devices: vnode.partition.Machine.here()",
                ],
            )
        if len(set(found)) < wanted:
            raise PlacementError(f"a device may be named only once: {', '.join(map(str, found))}")
        kinds = dict.fromkeys(f"{each.platform} {getattr(each, 'device_kind', '')}" for each in found)
        if len(kinds) > 1:  # compilers depend on both
            raise PlacementError(
                "a plan is one program, and devices of different kinds cannot share one.",
                facts=[f"there are {', '.join(kinds)}"],
                remedies=[
                    "give devices of one kind; they may differ in speed",
                    "or divide nodes among kinds: vnode.balance, and vnode.Placement(..., groups=...)",
                ],
            )
        order = self.machine.mesh(self.mesh).devices
        mesh = Mesh(np.array(found, dtype=object)[order], tuple(self.mesh))
        options = dataclasses.replace(
            self.pattern.options,
            virtual_nodes=self.virtual_nodes,
            automatic=False,
            patterns=patterns(self.specs),
        )
        choices = dataclasses.replace(
            self.pattern.spec.plan,
            host=tuple(map(Exactly, self.host)),
            host_accumulators=self.far,
            records=dict(self.records) or None,
            planned=True,
        )
        placement = Placement(self.virtual_nodes, mesh=mesh, counts=self.counts, axis=NODES)
        made = VirtualStep(dataclasses.replace(self.pattern.spec, options=options, plan=choices), placement)
        return self._steps.setdefault(tuple(found), made)

    @with_jit
    def accept(self, devices: Sequence[Any] | None = None, *, tolerance: float = TOLERANCE) -> Acceptance:
        """Compiles the planned step, without running it, and compares the compiled program with the plan.

        A plan is accepted if it fits in the limit, and if memory and the bytes that a device sends are as predicted, up
        to a tolerance.

        Args:
          devices: as for `step`. Devices of a TPU topology that is not attached will do
            (``jax.experimental.topologies``). A call of `step` on the same devices finds the compiled program.
          tolerance: the share by which memory and sent bytes may differ from the prediction.

        Returns:
          The differences and their remedies; print it.

        Raises:
          PlacementError: the machine has another number of devices.
          MemoryLimitError: the compiler refuses the program, because it does not fit.
          PartitionError: the tolerance is not a share.
          ProfileError: the compiler reports no memory for the program.
        """
        if isinstance(tolerance, str) or not isinstance(tolerance, SupportsFloat) or not tolerance >= 0:
            raise PartitionError(f"tolerance: expected a share such as {TOLERANCE}, not {tolerance!r}")
        step, figures, prediction = self.step(devices), self.figures, self.prediction
        try:
            compiled = step.executor.compile_for(self.args, {})
        except jax.errors.JaxRuntimeError as error:
            refused, needed = memory_refusal(error)
            if not refused:
                raise
            raise self._refused(needed) from error
        wanted, given = prediction.platform, step.placement.devices[0].platform
        predicted = Memory(figures.arguments, figures.results, 0, figures.temporary, host=figures.aside + figures.far)
        return Acceptance(
            predicted,
            prediction.exchanges,
            compiled_stats(compiled, prediction.iterations),
            fetched=figures.back,
            tolerance=float(tolerance),
            limit=self.limit,
            platforms=None if wanted == given else (wanted, given),
        )

    def pickle_remedy(self) -> str:
        """The remedy for an attempt to pickle it."""
        return "save it, plan.save(path), and read it where it is needed: vnode.partition.Plan.load(path, step, args)"

    def _refused(self, needed: int | None) -> MemoryLimitError:
        """The error for a program that the compiler refuses."""
        facts = [f"{self.memory}, of {size(self.limit)} that the plan may take"]
        remedies = ["search again with less memory: vnode.partition.search(..., memory=...)"]
        if needed is not None:
            facts.append(f"the compiler: {size(needed)}")
            share = self.figures.memory / needed
            remedies = [f"search again with less memory: vnode.partition.search(..., memory={int(self.limit * share)})"]
        what = "the compiler refuses the planned step: it does not fit."
        return MemoryLimitError(what, facts=facts, remedies=remedies)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, as JSON; `Plan.load` reads it.

        Args:
          path: the path of the file; an old file stays until the new one is complete.

        Raises:
          PartitionError: the file cannot be written.
        """
        from vnode.partition.plan.plan_file import write_plan

        write_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], step: Any, args: Sequence[Any], **options: Any) -> Plan:
        """Reads a plan.

        Args:
          path: the path of the file.
          step: the step that the plan was made for, as it was given to `vnode.partition.search`.
          args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
          **options: the same options of `virtualize`; the number of nodes may be left out.

        Returns:
          The plan.

        Raises:
          PartitionError: the file is missing or damaged, or the plan was made for another step.
        """
        from vnode.partition.plan.plan_file import read_plan

        return read_plan(Plan, path, step, args, options)

    @with_jit
    def explain(self) -> Explanation:
        """Explains the transformed step, and how the plan divides it; no devices are needed.

        Returns:
          The plan's report beside that of `VirtualStep.explain`; print it.
        """
        together = len(self.machine.devices) // len(self.counts)
        choices = dataclasses.replace(self.pattern.spec.plan, planned=True)
        planned = VirtualStep(dataclasses.replace(self.pattern.spec, plan=choices), None)
        with planned.resolved(self.args, {}) as here:
            (report,) = reports(here, [Grouped(self.counts, together)], self._parts_of_sums)
        by = {"compiled": "as compiled", "draft": "as in its draft"}.get(self.figures.source, "as predicted")
        return Explanation(self, dataclasses.replace(report, planned=self.figures.sent, planned_by=by))

    def _parts_of_sums(self, schedule: Schedule) -> dict[Var, tuple[int, ...]]:
        """The shapes of one device's parts of the sums of passes."""
        axes, share = dividing_axes(self.mesh), share_of(patterns(self.specs))
        return parts_of_sums(self._replica_program(schedule), self.records, axes, share) if axes else {}

    def unknown(self) -> int:
        """The number of the step's passes that the plan has no division for; 0 if it divides no node's computation.

        Such a pass means that the step's options, or the version of jax, changed since the search.
        """
        nodes = self._replica_program(self.subject.schedule).nodes if self.records else ()
        return sum(digest_of(node.written) not in self.records for node in nodes)

    def _replica_program(self, schedule: Schedule) -> ReplicaProgram:
        """The program of a replica."""
        axes = dividing_axes(self.mesh)
        exact = self.pattern.options.reduction == "invariant"
        share, rooms = share_of(patterns(self.specs)), None
        if share is not None:
            rooms = rooms_of_state(self.subject, dims_of(self.subject, self.specs), share)
        spread = Spread.from_counts(self.counts)
        return replica_program(schedule, spread, axes, self.prediction.platform, exact, rooms=rooms)

    def _repr_html_(self) -> str:
        return super()._repr_html_() + plan_pictures(self)

    def page(self) -> Page:
        """The report."""
        return plan_page(self)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Drawn):
    """A step's report under a plan; made by `Plan.explain`.

    Attributes:
      plan: the plan.
      report: the step's report.
    """

    plan: Plan
    report: Report

    def page(self) -> Page:
        """The report."""
        page = self.plan.page()
        return dataclasses.replace(page, blocks=(*page.blocks, self.report.page()))

    def _repr_html_(self) -> str:
        return super()._repr_html_() + plan_pictures(self.plan)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number with its source.

    Attributes:
      value: bytes or seconds.
      source: ``"compiled"``; ``"draft"``, compiled with few optimizations; or ``"estimated"``.
      shown: the function that formats it.
      spread: quantiles 10%, 50% and 90% of compiled / this value over programs that were compared; None if not known.

    Example:
      >>> print(Figure(2**20, "estimated", size))
      1.0 MiB (estimated)
    """

    value: float
    source: str
    shown: Callable[[Any], str] = dataclasses.field(default=str, repr=False)
    spread: Sequence[float] | None = None

    def __str__(self) -> str:
        return f"{self.shown(self.value)} ({self.source})"


DRAFT_MEMORY, DRAFT_TIME = (0.73, 0.92, 1.0), (0.41, 0.55, 0.85)
"""Spreads of drafts: 13 plans of five models, compiled for v5e:2x4."""
