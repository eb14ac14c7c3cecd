"""A plan -> its report: facts, other plans, the layouts of its state, its operations, and pictures.

    plan_page(plan)       # mesh, memory, plans beside it, leaves, operations by axes
    plan_pictures(plan)   # memory over time and the timeline, as HTML

Knows the attributes of plans, and the parts of a page. Must not know how a plan is found or run.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from vnode.partition.plan.divisions import PARTS, DividedOperation
from vnode.partition.plan.memory_chart import draw as draw_levels
from vnode.partition.plan.meshes import NODES, mesh_text
from vnode.partition.plan.predict import Figures
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.report.sources import short_source
from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
from vnode.show.units import seconds, several, size

NODES_HUE = 210
"""The hue, in degrees, of the nodes' axis; those of other axes are in `PARTS`."""

SHOWN = 8
"""The most notes that are printed; the others are counted."""


def plan_page(plan: Any) -> Page:
    """The report of a plan."""
    way = "nodes are spread over the first axis; the others divide what a node computes"
    found = "" if plan.gap is None else f", at most {plan.gap:.1%} above the best on this mesh"
    facts = [
        Fact("machine", plan.machine.name),
        Fact("mesh", mesh_text(plan.mesh), way),
        Fact("virtual nodes", f"{plan.virtual_nodes}{uneven_counts_text(plan.counts)}"),
        Fact("found", f"{plan.name}{found}"),
        *uneven_facts(plan),
        Fact("memory", f"{size(plan.figures.memory)} of {size(plan.limit)} on each device"),
        *branch_facts(plan),
    ]
    if on_host := host_text(plan):
        way = f"transfers to the device and back: {seconds(plan.figures.transfer)} a step"
        facts.append(Fact("on the host", on_host, way))
    if plan.recomputed:
        facts.append(Fact("recomputed", f"{several(len(plan.recomputed), 'value')} where they are read late"))
    facts += [Fact("" if i else "notes", note) for i, note in enumerate(plan.notes[:SHOWN])]
    if len(plan.notes) > SHOWN:
        facts.append(Fact("", f"and {len(plan.notes) - SHOWN} more: plan.notes"))
    said = f"{plan.time} a step, {plan.memory} a device"
    blocks = (Facts(tuple(facts)), other_plans(plan), *state_tables(plan), *division_tables(plan))
    return Page(f"plan for {plan.pattern.spec.name}", said, blocks)


def uneven_facts(plan: Any) -> list[Fact]:
    """The kinds of devices and their shares of the state, where they differ."""
    found, kinds = [], collections.Counter(device.kind.name for device in plan.machine.devices)
    if len(kinds) > 1:
        way = "in one program: they may differ in speed, and not in what is compiled for them"
        found.append(Fact("devices", ", ".join(f"{n} of {name}" for name, n in kinds.items()), way))
    shares = dict.fromkeys((s.axis, s.blocks) for s in plan.specs.values() if isinstance(s, UnevenSpec))
    for axis, blocks in shares:
        way = f"each device computes its own blocks; the state has room for {max(blocks)} on each"
        found.append(Fact("shares", f"{', '.join(map(str, blocks))} of {sum(blocks)} blocks along {axis}", way))
    return found


def branch_facts(plan: Any) -> list[Fact]:
    """The branches that are placed side by side, for each axis."""
    along: dict[str, list[int]] = collections.defaultdict(list)
    for group in (group for record in plan.records.values() for group in record.groups):
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


def host_text(plan: Any) -> str:
    """The bytes in the host's memory, in words; empty if there are none."""
    parts = []
    if plan.host:
        parts.append(f"{size(plan.figures.host)} of the state, in {several(len(plan.host), 'array')}")
    if plan.offloaded:
        parts.append(f"{size(plan.figures.aside)} of residuals, in {several(len(plan.offloaded), 'value')}")
    if plan.far:
        parts.append(f"{size(plan.figures.far)} of pending sums, in at most {plan.far} of each")
    return "; ".join(parts)


def other_plans(plan: Any) -> Table:
    """The plan's figures beside those of other plans."""

    def row(name: str, figures: Figures, strong: bool = False) -> tuple[Cell, ...]:
        fits = figures.memory <= plan.limit
        moved = ", ".join(f"{kind} {size(n)}" for kind, n in sorted(figures.collectives.items()))
        return (
            Cell(name, strong=strong),
            Cell(seconds(figures.seconds), strong=strong),
            Cell(seconds(figures.compute)),
            Cell(seconds(figures.exchange), moved),
            Cell(size(figures.memory), "" if fits else f"more than {size(plan.limit)}"),
            Cell("yes" if fits else "no", quiet=fits),
            Cell(figures_source(figures), quiet=figures.source == "model"),
        )

    names = ("step", "compute", "exchange", "memory")
    columns = (Column("plan"), *(Column(name, right=True) for name in names), Column("fits"), Column("by"))
    others = [row(name, figures) for name, figures in plan.beside.items()]
    note = "for each device; exchange may run beside computation"
    source, what, times = "estimated", ("memory", "computation"), "the estimate"
    if plan.figures.source == "draft":
        source, what = "draft", ("memory", "time")
        times = "the draft's, compiled with few optimizations"
    spreads = zip(what, plan.spreads(source), strict=True)
    if said := " and ".join(f"{name} {each[0]:g} to {each[-1]:g}" for name, each in spreads if each):
        note += f"; eight of ten programs were measured as compiled to have {said} times {times}"
    return Table("beside others", columns, (row(f"this: {plan.name}", plan.figures, True), *others), note)


def state_tables(plan: Any) -> list[Table]:
    """The layouts of the state's leaves, the parameters first; no table without leaves."""
    groups: dict[tuple[bool, str, str], list[str]] = collections.defaultdict(list)
    for name, spec in plan.specs.items():
        where = ", on the host" * (name in plan.host)
        groups[name not in plan.subject.parameters, without_numbers(name), spec_text(spec) + where].append(name)
    if not groups:
        return []
    rows = tuple(
        (Cell(name, ", ".join(names[:6])), Cell(spec), Cell(str(len(names))))
        for (_, name, spec), names in sorted(groups.items(), key=lambda each: (each[0][0], each[0][2] == "whole", each))
    )
    columns = (Column("leaves", code=True), Column("divided", wide=True), Column("arrays", right=True))
    return [Table("state", columns, rows[:30], "* stands for numbers", rest_of(rows, 30))]


def division_tables(plan: Any) -> list[Table]:
    """The most expensive operations, and the dimension that each axis divides; no table if nothing is divided."""
    if not plan.divisions:
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
            *(part_cell(each.axes.get(name)) for name in plan.mesh if name != NODES),
            Cell(each.cut),
            Cell(str(each.count)),
            Cell(short_source(each.where), each.where),
        )

    rows = tuple(map(row, plan.divisions))
    columns = (
        Column("operation", code=True),
        *(Column(f"{name} {n}") for name, n in plan.mesh.items()),
        Column("operands -> result", code=True, wide=True),
        Column("times", right=True),
        Column("line", code=True),
    )
    used = dict.fromkeys(part.split()[0] for each in plan.divisions for part in each.axes.values())
    key = "; ".join(f"{part}: {meaning}" for part, (_, meaning) in PARTS.items() if part in used)
    note = f"products and convolutions of a node, and the dimension that each mesh axis divides; {key}"
    return [Table("operations by axes", columns, rows[:40], note.rstrip("; "), rest_of(rows, 40))]


def plan_pictures(plan: Any) -> str:
    """Memory over time and the timeline, as HTML; empty for a plan from a file."""
    found = []
    if plan.prediction.levels:
        always = plan.figures.arguments + plan.figures.results
        found.append(("memory over time", draw_levels(plan.prediction.levels, always, plan.limit)))
    if plan.prediction.timeline is not None:
        found.append(("timeline of one device", plan.prediction.timeline.svg()))
    drawn = "".join(
        f'<h4>{title} <span class="note">as predicted</span></h4><div class="scroll">{picture}</div>'
        for title, picture in found
    )
    return f'<figure class="vnode" style="margin:1em 0">{drawn}</figure>' if drawn else ""


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
