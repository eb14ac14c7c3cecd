"""A candidate that a search chose -> a plan: mesh, layouts and predictions; a step that runs by it; and its report.

Knows candidates, steps and machines. Must not know how a plan was found.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from vnode.analysis.passes import Schedule
from vnode.analysis.program import ResultIndex
from vnode.errors import Bound, MemoryLimitError, PartitionError, PlacementError, layout_message
from vnode.partition.accept import TOLERANCE, Acceptance
from vnode.partition.compiler.stats import compiled_stats
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.program_memory import Memory
from vnode.partition.machine import Machine
from vnode.partition.plan.divisions import PARTS, DividedOperation
from vnode.partition.plan.memory_chart import draw as draw_levels
from vnode.partition.plan.meshes import NODES, mesh_text
from vnode.partition.plan.node_spread import Spread
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
from vnode.report.sources import short_source
from vnode.report.step_report import Report
from vnode.show.drawable import Drawn
from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
from vnode.show.units import seconds, several, size
from vnode.spmd.flow_record import RecordedFlow, digest_of
from vnode.step.explain import reports
from vnode.step.uneven_state import share_of
from vnode.step.virtual import VirtualStep

NODES_HUE = 210
"""The hue, in degrees, of the nodes' axis; those of other axes are in `PARTS`."""


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
        return Figure(self.figures.memory, source, size, self._spreads(source)[0])

    @property
    def time(self) -> Figure:
        """Seconds of a step, with their source: the compiler's cycles, or the model."""
        source = self.figures.source if self.figures.timed else "estimated"
        return Figure(self.figures.seconds, source, seconds, self._spreads(source)[1])

    def _spreads(self, source: str) -> Sequence[Sequence[float] | None]:
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
                layout_message(
                    "a plan from a file has no timeline: the file holds only the totals.",
                    facts=[f"predicted: {seconds(self.figures.seconds)} a step"],
                    remedies=["search again to get the timeline: vnode.partition.search(...)"],
                )
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
                layout_message(
                    f"the plan is for {several(wanted, 'device')}, and there are {len(found)}.",
                    facts=[f"machine: {self.machine.name}"],
                    remedies=[
                        "give the devices: plan.step(devices)",
                        "or search a plan for the present devices: vnode.partition.Machine.here()",
                    ],
                )
            )
        if len(set(found)) < wanted:
            raise PlacementError(f"a device may be named only once: {', '.join(map(str, found))}")
        kinds = dict.fromkeys(f"{each.platform} {getattr(each, 'device_kind', '')}" for each in found)
        if len(kinds) > 1:  # compilers depend on both
            raise PlacementError(
                layout_message(
                    "a plan is one program, and devices of different kinds cannot share one.",
                    facts=[f"there are {', '.join(kinds)}"],
                    remedies=[
                        "give devices of one kind; they may differ in speed",
                        "or divide nodes among kinds: vnode.balance, and vnode.Placement(..., groups=...)",
                    ],
                )
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
            raise MemoryLimitError(self._refused(needed)) from error
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

    def _refused(self, needed: int | None) -> str:
        """The message for a program that the compiler refuses."""
        facts = [f"{self.memory}, of {size(self.limit)} that the plan may take"]
        remedies = ["search again with less memory: vnode.partition.search(..., memory=...)"]
        if needed is not None:
            facts.append(f"the compiler: {size(needed)}")
            share = self.figures.memory / needed
            remedies = [f"search again with less memory: vnode.partition.search(..., memory={int(self.limit * share)})"]
        return layout_message("the compiler refuses the planned step: it does not fit.", facts=facts, remedies=remedies)

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
        return Explanation(self, dataclasses.replace(report, planned=self.figures.sent))

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

    def pictures(self) -> str:
        """Memory over time and the timeline, as HTML; empty for a plan from a file."""
        found = []
        if self.prediction.levels:
            always = self.figures.arguments + self.figures.results
            found.append(("memory over time", draw_levels(self.prediction.levels, always, self.limit)))
        if self.prediction.timeline is not None:
            found.append(("timeline of one device", self.prediction.timeline.svg()))
        drawn = "".join(
            f'<h4>{title} <span class="note">as predicted</span></h4><div class="scroll">{picture}</div>'
            for title, picture in found
        )
        return f'<figure class="vnode" style="margin:1em 0">{drawn}</figure>' if drawn else ""

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.pictures()

    def page(self) -> Page:
        """The report."""
        way = "nodes are spread over the first axis; the others divide what a node computes"
        found = "" if self.gap is None else f", at most {self.gap:.1%} above the best on this mesh"
        facts = [
            Fact("machine", self.machine.name),
            Fact("mesh", mesh_text(self.mesh), way),
            Fact("virtual nodes", f"{self.virtual_nodes}{uneven_counts_text(self.counts)}"),
            Fact("found", f"{self.name}{found}"),
            *self._uneven(),
            Fact("memory", f"{size(self.figures.memory)} of {size(self.limit)} on each device"),
            *self._branches(),
        ]
        if on_host := self._on_host():
            way = f"transfers to the device and back: {seconds(self.figures.transfer)} a step"
            facts.append(Fact("on the host", on_host, way))
        if self.recomputed:
            facts.append(Fact("recomputed", f"{several(len(self.recomputed), 'value')} where they are read late"))
        facts += [Fact("" if i else "notes", note) for i, note in enumerate(self.notes[:SHOWN])]
        if len(self.notes) > SHOWN:
            facts.append(Fact("", f"and {len(self.notes) - SHOWN} more: plan.notes"))
        said = f"{self.time} a step, {self.memory} a device"
        blocks = (Facts(tuple(facts)), self._beside(), *self._state(), *self._divisions())
        return Page(f"plan for {self.pattern.spec.name}", said, blocks)

    def _uneven(self) -> list[Fact]:
        """The kinds of devices and their shares of the state, where they differ."""
        found, kinds = [], collections.Counter(device.kind.name for device in self.machine.devices)
        if len(kinds) > 1:
            way = "in one program: they may differ in speed, and not in what is compiled for them"
            found.append(Fact("devices", ", ".join(f"{n} of {name}" for name, n in kinds.items()), way))
        shares = dict.fromkeys((s.axis, s.blocks) for s in self.specs.values() if isinstance(s, UnevenSpec))
        for axis, blocks in shares:
            way = f"each device computes its own blocks; the state has room for {max(blocks)} on each"
            found.append(Fact("shares", f"{', '.join(map(str, blocks))} of {sum(blocks)} blocks along {axis}", way))
        return found

    def _branches(self) -> list[Fact]:
        along: dict[str, list[int]] = collections.defaultdict(list)
        for group in (group for record in self.records.values() for group in record.groups):
            along[group.axis].append(len(group.branches))
        way = "devices at one index compute one branch, and none of the others"
        return [
            Fact(
                "branches side by side",
                f"{max(n)} along {axis}, in {several(len(n), 'stage')} of a node's computation",
                way,
            )
            for axis, n in along.items()
        ]

    def _on_host(self) -> str:
        parts = []
        if self.host:
            parts.append(f"{size(self.figures.host)} of the state, in {several(len(self.host), 'array')}")
        if self.offloaded:
            parts.append(f"{size(self.figures.aside)} of residuals, in {several(len(self.offloaded), 'value')}")
        if self.far:
            parts.append(f"{size(self.figures.far)} of pending sums, in at most {self.far} of each")
        return "; ".join(parts)

    def _beside(self) -> Table:
        def row(name: str, figures: Figures, strong: bool = False) -> tuple[Cell, ...]:
            fits = figures.memory <= self.limit
            moved = ", ".join(f"{kind} {size(n)}" for kind, n in sorted(figures.collectives.items()))
            return (
                Cell(name, strong=strong),
                Cell(seconds(figures.seconds), strong=strong),
                Cell(seconds(figures.compute)),
                Cell(seconds(figures.exchange), moved),
                Cell(size(figures.memory), "" if fits else f"more than {size(self.limit)}"),
                Cell("yes" if fits else "no", quiet=fits),
                Cell(figures_source(figures), quiet=figures.source == "model"),
            )

        names = ("step", "compute", "exchange", "memory")
        columns = (Column("plan"), *(Column(name, right=True) for name in names), Column("fits"), Column("by"))
        others = [row(name, figures) for name, figures in self.beside.items()]
        note = "for each device; exchange may run beside computation"
        source, what, times = "estimated", ("memory", "computation"), "the estimate"
        if self.figures.source == "draft":
            source, what = "draft", ("memory", "time")
            times = "the draft's, compiled with few optimizations"
        spreads = zip(what, self._spreads(source), strict=True)
        if said := " and ".join(f"{name} {each[0]:g} to {each[-1]:g}" for name, each in spreads if each):
            note += f"; as compiled, {said} times {times}, of eight in ten programs"
        return Table("beside others", columns, (row(f"this: {self.name}", self.figures, True), *others), note)

    def _state(self) -> list[Table]:
        groups: dict[tuple[bool, str, str], list[str]] = collections.defaultdict(list)
        for name, spec in self.specs.items():
            where = ", on the host" * (name in self.host)
            groups[name not in self.subject.parameters, without_numbers(name), spec_text(spec) + where].append(name)
        if not groups:
            return []
        rows = tuple(
            (Cell(name, ", ".join(names[:6])), Cell(spec), Cell(str(len(names))))
            for (_, name, spec), names in sorted(
                groups.items(), key=lambda each: (each[0][0], each[0][2] == "whole", each)
            )
        )
        columns = (Column("leaves", code=True), Column("divided", wide=True), Column("arrays", right=True))
        return [Table("state", columns, rows[:30], "* stands for numbers", rest_of(rows, 30))]

    def _divisions(self) -> list[Table]:
        if not self.divisions:
            return []

        def part_cell(part: str | None) -> Cell:
            if part is None:
                return Cell("whole", quiet=True)
            hue, meaning = PARTS[part.split()[0]]  # without the number of a branch
            return Cell(part, meaning, hue=hue)

        def row(each: DividedOperation) -> tuple[Cell, ...]:
            return (
                Cell(each.operation, each.where),
                Cell("nodes", "each computes its own nodes", hue=NODES_HUE),
                *(part_cell(each.axes.get(name)) for name in self.mesh if name != NODES),
                Cell(each.cut),
                Cell(str(each.count)),
                Cell(short_source(each.where), each.where),
            )

        rows = tuple(map(row, self.divisions))
        columns = (
            Column("operation", code=True),
            *(Column(f"{name} {n}") for name, n in self.mesh.items()),
            Column("operands -> result", code=True, wide=True),
            Column("times", right=True),
            Column("line", code=True),
        )
        used = dict.fromkeys(part.split()[0] for each in self.divisions for part in each.axes.values())
        key = "; ".join(f"{part}: {meaning}" for part, (_, meaning) in PARTS.items() if part in used)
        note = f"products and convolutions of a node, and the dimension that each mesh axis divides; {key}"
        return [Table("operations by axes", columns, rows[:40], note.rstrip("; "), rest_of(rows, 40))]


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
        return super()._repr_html_() + self.plan.pictures()


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

SHOWN = 8
"""The most notes that are printed; the others are counted."""


def figures_source(figures: Figures) -> str:
    """The source of a plan's figures."""
    if figures.source == "model":
        return "estimated"
    return figures.source if figures.timed else "memory compiled"


def without_numbers(name: str) -> str:
    """A leaf's name with numbers replaced by `*`; leaves that differ only in numbers are shown together.

    >>> without_numbers("opt/0/mu/Dense_12/kernel"), without_numbers("params/w2")
    ('opt/*/mu/Dense_*/kernel', 'params/w2')
    """
    return re.sub(r"((?<![^/])|(?<=_))\d+(?![^/])", "*", name)


def rest_of(rows: Sequence[Any], shown: int) -> str:
    """The number of rows that a table leaves out."""
    return f"and {len(rows) - shown} more" if len(rows) > shown else ""


def uneven_counts_text(counts: Sequence[int]) -> str:
    """The numbers of nodes of replicas, where they differ.

    >>> uneven_counts_text((4, 4)), uneven_counts_text((5, 5, 3, 3))
    ('', ': 5 on each of 2 rows, 3 on each of 2')
    """
    if max(counts) - min(counts) <= 1:
        return ""
    runs = [(n, len(list(same))) for n, same in itertools.groupby(counts)]
    (first, rows), *rest = [(n, f"each of {k}" if k > 1 else "1") for n, k in runs]
    return f": {first} on {rows} rows" + "".join(f", {n} on {k}" for n, k in rest)


def spec_text(spec: PartitionSpec | UnevenSpec) -> str:
    """A spec as text."""
    if isinstance(spec, UnevenSpec):
        return f"dimension {spec.dim} over {spec.axis}: {', '.join(map(str, spec.counts))}"
    parts = [
        f"dimension {d} over {' and '.join(entry if isinstance(entry, tuple) else (entry,))}"
        for d, entry in enumerate(spec)
        if entry
    ]
    return ", ".join(parts) or "whole"
