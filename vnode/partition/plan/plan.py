"""A plan: on which mesh, with which layouts and divisions a step is to run, and what that would take.

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

from vnode.analysis.fingerprint import Fingerprint
from vnode.analysis.passes import Schedule
from vnode.analysis.program import ResultIndex
from vnode.errors import Bound, MemoryLimitError, PartitionError, PlacementError, layout_message
from vnode.partition.accept import TOLERANCE, Acceptance, compare_collectives, count_exchanges
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.program_memory import Memory
from vnode.partition.machine import Machine
from vnode.partition.plan.divisions import PARTS, DividedOperation
from vnode.partition.plan.memory_chart import draw as draw_levels
from vnode.partition.plan.node_spread import Spread
from vnode.partition.plan.predict import NODES, Figures, Prediction, dividing_axes, platform_of
from vnode.partition.plan.replica import ReplicaProgram, replica_program
from vnode.partition.plan.search_subject import subject_of
from vnode.partition.plan.step_layouts import parts_in_blocks, parts_of_sums, patterns, unknown
from vnode.partition.simulator import Timeline
from vnode.partition.uneven_shares.state_blocks import dims_of, rooms_of_state
from vnode.placement.node_layout import Layout as Grouped
from vnode.placement.patterns import Exactly
from vnode.placement.placement import Placement, device_list, neighbours_of_one_kind
from vnode.placement.trace_context import with_jit
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.plan.nodes.device_memory import memory_refusal
from vnode.report.sources import short_source
from vnode.report.step_report import Report
from vnode.show.drawable import Drawn
from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
from vnode.show.units import seconds, several, size
from vnode.spmd.flow_record import RecordedFlow
from vnode.step.explain import reports
from vnode.step.uneven_state import share_of
from vnode.step.virtual import VirtualStep

HUES = {
    "nodes": 210,
    "batch": 270,
    "left": 150,
    "right": 90,
    "sum": 30,
    "space": 330,
    "branch": 60,
    "blocks": 180,
    "other": 0,
}
"""Degrees of the colours of what axes divide."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(Drawn, Bound):
    """How a step is to run on a machine; made by `vnode.partition.search`, printed, saved, and turned into a step.

    Attributes:
      pattern: the step that it is for, a `VirtualStep`.
      args: its arguments, as shapes.
      fingerprint: of what that computes.
      machine: for which it was made.
      limit: bytes that one device may hold.
      virtual_nodes: V.
      name: what such a plan is called, or ``"searched"``.
      mesh: sizes of the axes; that of the nodes is ``"vnode"``.
      counts: nodes of each replica, in order; uneven where kinds of devices differ.
      specs: how the leaves of the state lie, by name; by name and shape where arguments have leaves of one name and
        several shapes.
      records: how what a node computes is divided, for each pass.
      prediction: what it takes by the model; None of a plan whose file an earlier version wrote, whose model was
        another.
      beside: the same of other plans, by name; those that do not fit too.
      gap: by which share the predicted cost may be above the best on this mesh; None if nothing was searched.
      divisions: of the dearest operations.
      host: names of the leaves of the state that lie in the host's memory between updates.
      far: how many of the sums that wait for others lie there meanwhile.
      parameters: names of the leaves of the state that passes read: no slots.
      compiled: what it takes by its compiler's word, if the search compiled it.
      notes: what the search did not try, compile, or find to fit, a line each.
    """

    pattern: Any
    args: tuple[Any, ...]
    fingerprint: Fingerprint
    machine: Machine
    limit: int
    virtual_nodes: int
    name: str
    mesh: Mapping[str, int]
    counts: tuple[int, ...]
    specs: Mapping[str, PartitionSpec | UnevenSpec]
    records: Mapping[str, RecordedFlow]
    prediction: Prediction | None
    beside: Mapping[str, Figures]
    gap: float | None = None
    divisions: tuple[DividedOperation, ...] = ()
    host: tuple[str, ...] = ()
    far: int = 0
    parameters: frozenset[str] = frozenset()
    compiled: Figures | None = None
    notes: tuple[str, ...] = ()
    _steps: dict[tuple[Any, ...], VirtualStep[..., Any]] = dataclasses.field(default_factory=dict)

    @property
    def figures(self) -> Figures:
        """The figures: the compiler's, or else the model's.

        Raises:
          PartitionError: nothing is known: an earlier version wrote the plan's file.
        """
        return self.compiled or self._predicted().figures

    @property
    def memory(self) -> Figure:
        """Bytes of one device, and who says so.

        Raises:
          PartitionError: see `figures`.
        """
        figures = self.figures
        if figures.source == "compiled":
            return Figure(figures.memory, "compiled", size)
        return Figure(figures.memory, "estimated", size, self._calibration().memory)

    @property
    def time(self) -> Figure:
        """Seconds of a step, and who says so: cycles of the compiler, or the model.

        Raises:
          PartitionError: see `figures`.
        """
        figures = self.figures
        if figures.timed:
            return Figure(figures.seconds, "compiled", seconds)
        return Figure(figures.seconds, "estimated", seconds, self._calibration().time)

    def _calibration(self) -> Calibration:
        """The calibration of the first kind of device."""
        return Calibration.for_platform(platform_of(self.machine), self.machine.kinds[0].name)

    @property
    def timeline(self) -> Timeline:
        """A device's predicted timeline.

        Raises:
          PartitionError: the plan is from a file, which does not hold that.
        """
        found = self._predicted().timeline
        if found is None:
            raise PartitionError(
                layout_message(
                    "a plan from a file has no timeline: what is written down is what it takes in all.",
                    facts=[f"predicted: {seconds(self.figures.seconds)} a step"],
                    remedies=["search the plan again, for its timeline: vnode.partition.search(...)"],
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
        """The step, to be run as planned.

        Args:
          devices: in the order of the machine's; by default all of ``jax.devices()``.

        Returns:
          A `VirtualStep`; its ``put`` places a state as planned. Asked again for the same devices, it is the same one.

        Raises:
          PlacementError: there are not as many devices as the machine has, or one is named twice.
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
                        "or search a plan for what is there: vnode.partition.Machine.here()",
                    ],
                )
            )
        if len(set(found)) < wanted:
            raise PlacementError(f"a device may be named only once: {', '.join(map(str, found))}")
        if len(neighbours_of_one_kind(sorted(found, key=kind_of))) > 1:
            raise PlacementError(
                layout_message(
                    "a plan is one program, and devices of different kinds cannot share one.",
                    facts=[f"there are {', '.join(dict.fromkeys(map(kind_of, found)))}"],
                    remedies=[
                        "give devices of one kind; they may differ in speed",
                        "or share out nodes among kinds: vnode.balance, and vnode.Placement(..., groups=...)",
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
        """Compiles the step as planned, without running it, and compares what the compiler made of it with the plan.

        A plan is accepted if its collectives are those planned, by kind, bytes and how often they run, and memory is as
        predicted up to a tolerance. What a compiler sends together, or carries out as another collective that does the
        same, is as planned, and listed.

        Args:
          devices: as for `step`; devices of a TPU topology that is not there will do
            (``jax.experimental.topologies``). A call of `step` on the same devices finds the compiled program.
          tolerance: by which share memory may differ from the prediction.

        Returns:
          What differs, and what to do; print it.

        Raises:
          PlacementError: there are not as many devices as the machine has.
          MemoryLimitError: the compiler refuses the program, because it does not fit.
          PartitionError: nothing is predicted: an earlier version wrote the plan's file.
          ProfileError: the compiler does not say what the program takes.
        """
        if isinstance(tolerance, str) or not isinstance(tolerance, SupportsFloat) or not tolerance >= 0:
            raise PartitionError(f"tolerance: expected a share such as {TOLERANCE}, not {tolerance!r}")
        step, figures, prediction = self.step(devices), self.figures, self._predicted()
        try:
            compiled = step.executor.compile_for(self.args, {})
        except jax.errors.JaxRuntimeError as error:
            refused, needed = memory_refusal(error)
            if not refused:
                raise
            raise MemoryLimitError(self._refused(needed)) from error
        wanted, given = prediction.platform, step.placement.devices[0].platform
        predicted = Memory(figures.arguments, figures.results, 0, figures.temporary, host=figures.aside + figures.far)
        return compare_collectives(
            compiled,
            count_exchanges(prediction.exchanges),
            predicted,
            tolerance=tolerance,
            limit=self.limit,
            over_nodes=prediction.iterations,
            fetched=figures.back,
            platforms=None if wanted == given else (wanted, given),
        )

    def pickle_remedy(self) -> str:
        """The remedy for pickling it."""
        return "save it, plan.save(path), and read it where it is needed: vnode.partition.Plan.load(path, step, args)"

    def _predicted(self) -> Prediction:
        """The prediction."""
        if self.prediction is None:
            raise PartitionError(
                layout_message(
                    "nothing is predicted of this plan: an earlier version of vnode wrote its file.",
                    facts=["how it divides the step is as it was; what it takes was predicted otherwise"],
                    remedies=["run it: plan.step()", "or search again, for what it takes: vnode.partition.search(...)"],
                )
            )
        return self.prediction

    def _refused(self, needed: int | None) -> str:
        """The message for when the compiler refuses the program."""
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
          path: of the file; what was there before stays until the whole is written.

        Raises:
          PartitionError: it cannot be written there.
        """
        from vnode.partition.plan.plan_file import write_plan

        write_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], step: Any, args: Sequence[Any], **options: Any) -> Plan:
        """Reads a plan.

        Args:
          path: of the file.
          step: the step that it was made for, as it was given to `vnode.partition.search`.
          args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
          **options: of `virtualize`, as they were; the number of nodes may be left out.

        Returns:
          The plan.

        Raises:
          PartitionError: the file is not there, or damaged, or the step is another.
        """
        from vnode.partition.plan.plan_file import read_plan

        return read_plan(Plan, path, step, args, options)

    @with_jit
    def explain(self) -> Explanation:
        """Says what becomes of the step, and how the plan divides it; no devices are needed.

        Returns:
          The plan beside what `VirtualStep.explain` says; print it.
        """
        together = len(self.machine.devices) // len(self.counts)
        choices = dataclasses.replace(self.pattern.spec.plan, planned=True)
        planned = VirtualStep(dataclasses.replace(self.pattern.spec, plan=choices), None)
        with planned.resolved(self.args, {}) as here:
            (report,) = reports(here, [Grouped(self.counts, together)], self._parts_of_sums)
        sent = None if self.prediction is None else self.figures.sent
        return Explanation(self, dataclasses.replace(report, planned=sent))

    def _parts_of_sums(self, schedule: Schedule) -> dict[Var, tuple[int, ...]]:
        """The shapes of one device's parts of what passes sum."""
        axes, share = dividing_axes(self.mesh), share_of(patterns(self.specs))
        if not axes:
            return {}
        replica = self._replica_program(schedule)
        return parts_of_sums(replica, self.records, axes) if share is None else parts_in_blocks(replica, share)

    def unknown(self) -> int:
        """How many of the step's passes the plan knows nothing of, though it divides what nodes compute: options of
        the step are others then, or jax is."""
        return (
            unknown(self._replica_program(subject_of(self.pattern, self.args).schedule), self.records)
            if self.records
            else 0
        )

    def _replica_program(self, schedule: Schedule) -> ReplicaProgram:
        """The program of a replica."""
        axes = dividing_axes(self.mesh)
        exact = self.pattern.options.reduction == "invariant"
        platform = platform_of(self.machine) if self.prediction is None else self.prediction.platform
        share = share_of(patterns(self.specs))
        rooms = None
        if share is not None:
            subject = subject_of(self.pattern, self.args)
            rooms = rooms_of_state(subject, dims_of(subject, self.specs), share)
        return replica_program(schedule, Spread.from_counts(self.counts), axes, platform, exact, rooms=rooms)

    def pictures(self) -> str:
        """Memory over time and the timeline, as HTML; nothing of a plan from a file."""
        found = []
        if self.prediction is not None and self.prediction.levels:
            figures, levels = self.figures, self.prediction.levels
            always = figures.arguments + figures.results
            found.append(f"<h4>memory over time</h4>{draw_levels(levels, always, self.limit)}")
        if self.prediction is not None and self.prediction.timeline is not None:
            found.append(f"<h4>timeline of one device</h4>{self.prediction.timeline.svg()}")
        return f'<figure class="vnode" style="margin:1em 0">{"".join(found)}</figure>' if found else ""

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.pictures()

    def page(self) -> Page:
        """The report."""
        axes = " x ".join(f"{name} {n}" for name, n in self.mesh.items())
        found = "" if self.gap is None else f", at most {self.gap:.1%} above the best on this mesh"
        facts = (
            Fact("machine", self.machine.name),
            Fact("mesh", axes, "nodes are spread over the first axis; the others divide what a node computes"),
            Fact("virtual nodes", f"{self.virtual_nodes}{uneven_counts_text(self.counts)}"),
            Fact("found", f"{self.name}{found}"),
            *self._kinds(),
            *self._shares(),
            Fact("memory", self._memory()),
            *self._branches(),
            *self._host(),
            *[Fact("recomputed", f"{several(len(self.recomputed), 'value')} where they are read late")][
                : len(self.recomputed)
            ],
            *[Fact("" if i else "notes", note) for i, note in enumerate(shortened(self.notes))],
        )
        said = "not predicted: an earlier version of vnode wrote its file"
        if self.prediction is not None:
            said = f"{self.time} a step, {self.memory} a device"
        beside = [] if self.prediction is None else [self._beside()]
        blocks = (Facts(facts), *beside, *self._state(), *self._divisions())
        return Page(f"plan for {self.pattern.spec.name}", said, blocks)

    def _memory(self) -> str:
        limit = f"{size(self.limit)} on each device"
        if self.prediction is None:
            return f"searched for {limit}"
        return f"{size(self.figures.memory)} of {limit}"

    def _kinds(self) -> list[Fact]:
        kinds = collections.Counter(device.kind.name for device in self.machine.devices)
        if len(kinds) == 1:
            return []
        way = "in one program: they may differ in speed, and not in what is compiled for them"
        return [Fact("devices", ", ".join(f"{n} of {name}" for name, n in kinds.items()), way)]

    def _shares(self) -> list[Fact]:
        found = dict.fromkeys((s.axis, s.blocks) for s in self.specs.values() if isinstance(s, UnevenSpec))
        return [
            Fact(
                "shares",
                f"{', '.join(map(str, blocks))} of {sum(blocks)} blocks along {axis}",
                f"each device computes its own blocks; the state has room for {max(blocks)} on each",
            )
            for axis, blocks in found
        ]

    def _branches(self) -> list[Fact]:
        groups = [group for record in self.records.values() for group in record.groups]
        found = []
        for axis in dict.fromkeys(group.axis for group in groups):
            along = [group for group in groups if group.axis == axis]
            most = max(len(group.branches) for group in along)
            said = f"{most} along {axis}, in {several(len(along), 'stage')} of what a node computes"
            way = "devices of one index evaluate one branch, and nothing of the others"
            found.append(Fact("branches side by side", said, way))
        return found

    def _host(self) -> list[Fact]:
        parts = []
        if self.host:
            parts.append(("of the state", several(len(self.host), "array"), "host"))
        if self.offloaded:
            parts.append(("of what loops keep", several(len(self.offloaded), "value"), "aside"))
        if self.far:
            parts.append(("of sums that wait for others", f"at most {self.far} of each", "far"))
        if self.prediction is None:
            return [Fact("on the host", ", ".join(f"{arrays} {what}" for what, arrays, _ in parts))][: len(parts)]
        sizes = [f"{size(getattr(self.figures, name))} {what}, in {arrays}" for what, arrays, name in parts]
        way = f"their way to the device and back: {seconds(self.figures.transfer)} a step"
        return [Fact("on the host", "; ".join(sizes), way)][: len(parts)]

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
                Cell(figures_source(figures), quiet=figures.source != "compiled"),
            )

        names = ("step", "compute", "exchange", "memory")
        columns = (Column("plan"), *(Column(name, right=True) for name in names), Column("fits"), Column("by"))
        others = [row(name, figures) for name, figures in self.beside.items()]
        note = "for each device; exchange may run beside computation"
        known = self._calibration()
        said = [
            f"{what} {spread[0]:g} to {spread[-1]:g}"
            for what, spread in (("memory", known.memory), ("computation", known.time))
            if spread is not None
        ]
        if said:
            note += f"; as compiled, {' and '.join(said)} times the estimate, of eight in ten programs"
        return Table("beside others", columns, (row(f"this: {self.name}", self.figures, True), *others), note)

    def _state(self) -> list[Table]:
        groups: dict[tuple[bool, str, str], list[str]] = collections.defaultdict(list)
        for name, spec in self.specs.items():
            where = ", on the host" * (name in self.host)
            groups[name not in self.parameters, without_numbers(name), spec_text(spec) + where].append(name)
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
        inner = [name for name in self.mesh if name != NODES]

        def part_name(part: str) -> str:
            """One of `PARTS`: without the number of a branch."""
            return part.split()[0]

        def row(each: DividedOperation) -> tuple[Cell, ...]:
            parts = [each.axes.get(name) for name in inner]
            return (
                Cell(each.operation, each.where),
                Cell("nodes", "each computes its own nodes", hue=HUES["nodes"]),
                *(
                    Cell("whole", quiet=True) if p is None else Cell(p, PARTS[part_name(p)], hue=HUES[part_name(p)])
                    for p in parts
                ),
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
        used = dict.fromkeys(part_name(part) for each in self.divisions for part in each.axes.values())
        key = "; ".join(f"{part}: {PARTS[part]}" for part in PARTS if part in used)
        note = f"products and windows of what a node computes, and what each axis of the mesh divides; {key}"
        return [Table("operations by axes", columns, rows[:40], note.rstrip("; "), rest_of(rows, 40))]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Drawn):
    """A step's report under a plan; made by `Plan.explain`.

    Attributes:
      plan: the plan.
      report: what is said of the step.
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
    """A number, and who says so.

    Attributes:
      value: bytes or seconds.
      source: ``"compiled"`` or ``"estimated"``.
      shown: how it is written.
      spread: compiled / estimated of the calibration's programs, quantiles 10%, 50% and 90%; None if it is not known.

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


SHOWN = 8
"""Notes that are printed; the others are counted."""


def shortened(notes: Sequence[str]) -> list[str]:
    """The first of several notes, and how many more there are.

    >>> shortened(["a"] * 10)[-1]
    'and 2 more: plan.notes'
    """
    return [*notes[:SHOWN], *[f"and {len(notes) - SHOWN} more: plan.notes"][: max(len(notes) - SHOWN, 0)]]


def figures_source(figures: Figures) -> str:
    """The source of a plan's figures."""
    if figures.source != "compiled":
        return "estimated"
    return "compiled" if figures.timed else "memory compiled"


def kind_of(device: Any) -> str:
    """The platform and kind of a device, which decide about its compiler."""
    return f"{device.platform} {getattr(device, 'device_kind', '')}"


def without_numbers(name: str) -> str:
    """A leaf's name as it is shown together with those that are alike but for numbers.

    >>> without_numbers("opt/0/mu/Dense_12/kernel"), without_numbers("params/w2")
    ('opt/*/mu/Dense_*/kernel', 'params/w2')
    """
    return re.sub(r"((?<![^/])|(?<=_))\d+(?![^/])", "*", name)


def rest_of(rows: Sequence[Any], shown: int) -> str:
    """The number of rows that a table leaves out."""
    return f"and {len(rows) - shown} more" if len(rows) > shown else ""


def uneven_counts_text(counts: Sequence[int]) -> str:
    """How many nodes rows have, where one has more than another and a lane.

    >>> uneven_counts_text((4, 4)), uneven_counts_text((5, 5, 3, 3))
    ('', ': 5 on each of 2 rows, 3 on each of 2')
    """
    if max(counts) - min(counts) <= 1:
        return ""
    runs = [(n, len(list(same))) for n, same in itertools.groupby(counts)]
    (first, rows), *rest = [(n, f"each of {k}" if k > 1 else "1") for n, k in runs]
    return f": {first} on {rows} rows" + "".join(f", {n} on {k}" for n, k in rest)


def spec_text(spec: PartitionSpec | UnevenSpec) -> str:
    """A spec in words."""
    if isinstance(spec, UnevenSpec):
        return f"dimension {spec.dim} over {spec.axis}: {', '.join(map(str, spec.counts))}"
    parts = [
        f"dimension {d} over {' and '.join(entry if isinstance(entry, tuple) else (entry,))}"
        for d, entry in enumerate(spec)
        if entry
    ]
    return ", ".join(parts) or "whole"
