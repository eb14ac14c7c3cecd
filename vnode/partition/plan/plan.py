"""A plan: on which mesh, with which layouts and divisions a step is to run, and what that would take.

Knows candidates, steps and machines. Must not know how a plan was found.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from vnode.analysis.fingerprint import Fingerprint
from vnode.errors import PlacementError, layout_message
from vnode.partition.machine import Machine
from vnode.partition.plan.divisions import Division
from vnode.partition.plan.layouts import patterns
from vnode.partition.plan.predict import NODES, Prediction
from vnode.partition.simulator import Timeline
from vnode.placement.placement import Placement, device_list, even_counts
from vnode.show.drawn import Drawn
from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
from vnode.show.units import several, size
from vnode.spmd.record import RecordedFlow
from vnode.step.virtual import VirtualStep


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a plan takes, in numbers that can be written down.

    Attributes:
      seconds: of a step.
      compute: seconds of all kernels.
      exchange: seconds of all collectives; what runs beside computation is in both.
      sent: bytes that each device sends.
      memory: bytes of one device, the peak.
      state: bytes of one device's part of the state.
      pending: bytes of sums that wait for others, for the sake of the same bits on any devices.
      collectives: bytes of one device's arrays in collectives, by kind.
    """

    seconds: float
    compute: float
    exchange: float
    sent: float
    memory: int
    state: int
    pending: int
    collectives: Mapping[str, int]

    @staticmethod
    def of(prediction: Prediction) -> Figures:
        """Those of a prediction."""
        names = [field.name for field in dataclasses.fields(Figures)]
        return Figures(**{name: getattr(prediction, name) for name in names})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(Drawn):
    """How a step is to run on a machine; made by `vnode.partition.search`, printed, saved, and turned into a step.

    Attributes:
      pattern: the step that it is for, a `VirtualStep`.
      fingerprint: of what that computes.
      machine: for which it was made.
      memory: bytes that one device may hold.
      virtual_nodes: V.
      name: what such a plan is called, or ``"searched"``.
      mesh: sizes of the axes; that of the nodes is ``"vnode"``.
      specs: how the leaves of the state lie, by name.
      records: how what a node computes is divided, for each pass.
      figures: what is predicted.
      beside: the same of other plans, by name; those that do not fit too.
      gap: by which share the predicted cost may be above the best on this mesh; None if nothing was searched.
      divisions: of the dearest operations.
      timeline: what a device does when, as predicted; None of a plan from a file.
    """

    pattern: Any
    fingerprint: Fingerprint
    machine: Machine
    memory: int
    virtual_nodes: int
    name: str
    mesh: Mapping[str, int]
    specs: Mapping[str, PartitionSpec]
    records: Mapping[str, RecordedFlow]
    figures: Figures
    beside: Mapping[str, Figures]
    gap: float | None = None
    divisions: tuple[Division, ...] = ()
    timeline: Timeline | None = None

    def step(self, devices: Sequence[Any] | None = None) -> VirtualStep[..., Any]:
        """The step, to be run as planned.

        Args:
          devices: in the order of the machine's; by default all of ``jax.devices()``.

        Returns:
          A `VirtualStep`; its ``put`` places a state as planned.

        Raises:
          PlacementError: there are not as many devices as the machine has.
        """
        found = device_list(devices)
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
        order = self.machine.mesh(self.mesh).devices
        mesh = Mesh(np.array(found, dtype=object)[order], tuple(self.mesh))
        options = dataclasses.replace(
            self.pattern.options,
            virtual_nodes=self.virtual_nodes,
            automatic=False,
            patterns=patterns(self.specs),
            records=dict(self.records) or None,
        )
        counts = even_counts(self.virtual_nodes, self.mesh[NODES], options.lane)
        placement = Placement(self.virtual_nodes, mesh=mesh, counts=counts, axis=NODES)
        return VirtualStep(dataclasses.replace(self.pattern.spec, options=options), placement)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, as JSON; `Plan.load` reads it."""
        from vnode.partition.plan.store import write

        write(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], step: Any, args: Sequence[Any], **options: Any) -> Plan:
        """Reads a plan.

        Args:
          path: of the file.
          step: the step that it was made for, as it was given to `vnode.partition.search`.
          args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
          **options: of `virtualize`, as they were.

        Returns:
          The plan.

        Raises:
          PartitionError: the file is damaged, or the step is another.
        """
        from vnode.partition.plan.store import read

        return read(path, step, args, options)

    def _repr_html_(self) -> str:
        drawn = super()._repr_html_()
        return drawn if self.timeline is None else f"{drawn}<figure>{self.timeline.svg()}</figure>"

    def page(self) -> Page:
        """What there is to see."""
        axes = " x ".join(f"{name} {n}" for name, n in self.mesh.items())
        found = "" if self.gap is None else f", at most {self.gap:.1%} above the best on this mesh"
        facts = (
            Fact("machine", self.machine.name),
            Fact("mesh", axes, "nodes are spread over the first axis; the others divide what a node computes"),
            Fact("virtual nodes", str(self.virtual_nodes)),
            Fact("found", f"{self.name}{found}"),
            Fact("memory", f"{size(self.figures.memory)} of {size(self.memory)} on each device"),
        )
        said = f"{seconds(self.figures.seconds)} a step, {size(self.figures.memory)} a device (predicted)"
        blocks = (Facts(facts), self._beside(), *self._state(), *self._divisions())
        return Page(f"plan for {self.pattern.spec.name}", said, blocks)

    def _beside(self) -> Table:
        def row(name: str, figures: Figures, strong: bool = False) -> tuple[Cell, ...]:
            fits = figures.memory <= self.memory
            moved = ", ".join(f"{kind} {size(n)}" for kind, n in sorted(figures.collectives.items()))
            return (
                Cell(name, strong=strong),
                Cell(seconds(figures.seconds), strong=strong),
                Cell(seconds(figures.compute)),
                Cell(seconds(figures.exchange), moved),
                Cell(size(figures.sent)),
                Cell(size(figures.memory), "" if fits else f"more than {size(self.memory)}"),
                Cell("yes" if fits else "no", quiet=fits),
            )

        names = ("step", "compute", "exchange", "sent", "memory")
        columns = (Column("plan"), *(Column(name, right=True) for name in names), Column("fits"))
        others = [row(name, figures) for name, figures in self.beside.items()]
        note = "predicted, for each device; exchange may run beside computation"
        return Table("beside others", columns, (row(f"this: {self.name}", self.figures, True), *others), note)

    def _state(self) -> list[Table]:
        groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for name, spec in self.specs.items():
            groups[re.sub(r"\d+", "*", name), said(spec)].append(name)
        if not groups:
            return []
        rows = tuple(
            (Cell(name, ", ".join(names[:6])), Cell(spec), Cell(str(len(names))))
            for (name, spec), names in sorted(groups.items(), key=lambda item: (item[0][1] == "whole", item[0]))
        )
        columns = (Column("leaves", code=True), Column("divided", wide=True), Column("arrays", right=True))
        return [Table("state", columns, rows[:30], "* stands for numbers", rest_of(rows, 30))]

    def _divisions(self) -> list[Table]:
        if not self.divisions:
            return []
        rows = tuple(
            (Cell(each.operation), Cell(each.cut), Cell(str(each.count)), Cell(each.where)) for each in self.divisions
        )
        columns = (
            Column("operation", code=True),
            Column("operands -> result", code=True, wide=True),
            Column("times", right=True),
            Column("line", code=True),
        )
        note = "products and windows of what a node computes; - is whole, and a sum in pieces is named"
        return [Table("what is divided how", columns, rows[:40], note, rest_of(rows, 40))]


def rest_of(rows: Sequence[Any], shown: int) -> str:
    """What a table leaves out."""
    return f"and {len(rows) - shown} more" if len(rows) > shown else ""


def said(spec: PartitionSpec) -> str:
    """A spec in words."""
    parts = [
        f"dimension {d} over {' and '.join(entry if isinstance(entry, tuple) else (entry,))}"
        for d, entry in enumerate(spec)
        if entry
    ]
    return ", ".join(parts) or "whole"


def seconds(time: float) -> str:
    """A time for people.

    >>> seconds(0.0021), seconds(3.2e-5), seconds(2.0)
    ('2.1 ms', '32 us', '2 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= scale:
            return f"{time / scale:.3g} {unit}"
    return f"{time * 1e9:.3g} ns"
