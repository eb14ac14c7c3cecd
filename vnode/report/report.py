"""What `VirtualStep.explain` says: the schedule of a step in words and numbers.

Knows schedules, couplings, placements, and how devices add. Must not know how a schedule is made or emitted, nor how
words and numbers are drawn in a terminal or a notebook.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from vnode.analysis.forms import Partial, Slice
from vnode.analysis.program import scope, where
from vnode.analysis.recipe import Conversion, Evaluation
from vnode.analysis.schedule import Accumulator, Pass, Schedule
from vnode.analysis.states import Coupling, Flow, Why
from vnode.operators import Monoid
from vnode.placement.layout import Layout
from vnode.placement.placement import Placement
from vnode.runtime.collectives import ReductionPlan
from vnode.show.grid import Grid
from vnode.show.page import Cell, Column, Drawn, Fact, Facts, Page, Picture, Table
from vnode.show.units import number, several, size, spread

TRANSFORMATIONS = re.compile(r"\w+\(|\)")
"""In a name stack, what says which of jax's transformations the equation comes from: ``transpose(jvp(...))``."""

FOLDERS = re.compile(r"^.*[/\\](?=[^/\\(]*:\d+ \()")
"""Of a source line, what stands before the file's name."""

REDUCTIONS = {Monoid.PROD: "product", Monoid.MAX: "maximum", Monoid.MIN: "minimum"}

SHOWN = 12
"""Rows of a table, the largest; the others are counted."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One accumulator, collected value or coupling, for display."""

    what: str
    where: str
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class PassReport:
    """One pass over the nodes.

    Attributes:
      level: its number, from 0.
      equations: evaluated by every node.
      flops: scalar operations of all nodes together.
      accumulators: what is summed over nodes (or combined by another monoid).
      collected: what is kept of every node.
      sent: bytes that a device sends in the reduction across devices: a ring all-reduce's, or, in the order of a tree,
        of every block that a device holds a chunk to each, and a chunk of the total to each.
    """

    level: int
    equations: int
    flops: int
    accumulators: tuple[Line, ...]
    collected: tuple[Line, ...]
    sent: int


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Drawn):
    """What a step becomes; `str` of it is the text that `explain` prints.

    A notebook draws it by itself, `show` draws it in a terminal (with rich).

    Attributes:
      name: of the step.
      batch: examples of the global batch.
      virtual_nodes: V.
      node_size: examples per node, padding included.
      placement: where the nodes live.
      inputs: batched arguments.
      passes: in order.
      nested: loops and branches that are evaluated around passes of their own.
      once: equations evaluated once per step (hoisted before the passes, or after them).
      hoisted: of those, the ones that need no pass: they are evaluated before the first.
      gathered: values that are needed whole, by every device.
      sliced: whole values with a batch dimension that nodes cannot produce for themselves (a permutation, the draws of
        a generator that cannot be sliced): built whole, then sliced.
      couplings: where examples influence each other.
      flops: of the whole step.
      recomputed: flops spent again by later passes.
      reduction: how sums over nodes are formed.
      exceptions: from which the promise of an invariant reduction does not hold.
      buffers: accumulators' bytes on a device that the order of a tree takes, besides the accumulators themselves.
      temporary: bytes of temporary memory on a device, as compiled; None if nobody asked for it to be measured.
      search: how the number of nodes was found, if it was; a line each.
    """

    name: str
    batch: int
    virtual_nodes: int
    node_size: int
    placement: Placement | Layout
    inputs: tuple[Line, ...]
    passes: tuple[PassReport, ...]
    nested: tuple[Report, ...]
    once: int
    hoisted: int
    gathered: tuple[Line, ...]
    sliced: tuple[Line, ...]
    couplings: tuple[Line, ...]
    flops: int
    recomputed: int
    reduction: str
    exceptions: tuple[str, ...]
    buffers: int = 0
    temporary: int | None = None
    search: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = self.placement.counts
        lines = [
            f"{self.name}: {self.batch} examples on {self.virtual_nodes} virtual nodes of {self.node_size}"
            + (f" ({self.padding} of padding)" if self.padding else ""),
            f"  devices       {len(counts)} with {spread(counts)} nodes each, {max(counts)} waves",
            f"  split         {len(self.inputs)} arguments, {size(sum(line.bytes for line in self.inputs))}",
            f"  once          {self.once} equations, {self.hoisted} of them before the first pass",
            f"  work          {number(self.flops)}flop"
            + (f", {self.recomputed / self.flops:.1%} recomputed" if self.recomputed else ""),
            f"  reduction     {self.reduction}",
            *(f"                but {exception}" for exception in self.exceptions),
        ]
        lines += [f"  {'' if i else 'search':<14}{line}" for i, line in enumerate(self.search)]
        for p in self.passes:
            total = sum(line.bytes for line in p.accumulators)
            lines.append(
                f"  pass {p.level}        {p.equations} equations per node, {number(p.flops)}flop, "
                f"{len(p.accumulators)} accumulators ({size(total)}), {size(p.sent)} sent per device"
            )
            lines += table("    + ", p.accumulators)
            lines += table("    keeps ", p.collected)
        for inner in self.nested:
            lines += ["  around passes of its own:", *("    " + line for line in str(inner).splitlines())]
        if self.gathered:
            lines += ["  whole on every device:", *table("    ", self.gathered)]
        if self.sliced:
            lines += ["  built whole, then sliced:", *table("    ", self.sliced)]
        if self.couplings:
            lines += ["  couplings (one example influences another):", *table("    ", self.couplings)]
        return "\n".join(lines)

    __repr__ = __str__

    def found_by(self, lines: Sequence[str]) -> Report:
        """The same report of a step whose number of nodes was searched for, with a line for each that was tried."""
        return dataclasses.replace(self, search=tuple(lines))

    @property
    def padding(self) -> int:
        """Examples that are computed but not real."""
        return self.virtual_nodes * self.node_size - self.batch

    @property
    def counts(self) -> tuple[int, ...]:
        """Nodes on each device."""
        return self.placement.counts

    @property
    def waves(self) -> int:
        """Nodes that the fullest device computes one after another."""
        return max(self.counts)

    @property
    def idle(self) -> int:
        """Slots without a node: how many more there could be without another wave."""
        return self.waves * len(self.counts) - self.virtual_nodes

    @property
    def accumulated(self) -> int:
        """Bytes of a device's accumulators, in the pass that has most."""
        own = [sum(line.bytes for line in p.accumulators) for p in self.passes]
        return max(own + [inner.accumulated for inner in self.nested], default=0)

    @property
    def buffered(self) -> int:
        """Bytes of `buffers`, in the pass that has most, loops included."""
        return max([self.buffers, *(inner.buffered for inner in self.nested)])

    @property
    def sent(self) -> int:
        """Bytes that a device sends to reduce across devices in one step, a loop around passes counted once."""
        return sum(p.sent for p in self.passes) + sum(inner.sent for inner in self.nested)

    def of_device(self, lines: Sequence[Line]) -> int:
        """Bytes of batched values that the fullest device holds."""
        return sum(line.bytes for line in lines) * self.waves * self.node_size // max(self.batch, 1)

    @property
    def kept(self) -> tuple[Line, ...]:
        """What is kept of every node, in all passes."""
        return tuple(line for p in self.passes for line in p.collected) + tuple(
            line for inner in self.nested for line in inner.kept
        )

    def page(self) -> Page:
        """What there is to see."""
        return Page(self.name, f"{several(self.batch, 'example')} on {self.where}", tuple(self._blocks(self._facts())))

    @property
    def where(self) -> str:
        """Nodes, devices and waves in words."""
        nodes = f"{several(self.virtual_nodes, 'virtual node')} of {self.node_size}"
        return f"{nodes}, {several(len(self.counts), 'device')}, {several(self.waves, 'wave')}"

    def _facts(self) -> list[Fact]:
        idle = f"{several(self.idle, 'idle slot')}" if self.idle else "no idle slot"
        how, _, detail = self.reduction.partition(": ")
        if self.buffers:
            detail = detail.rpartition(", ")[0]  # what the buffers take is a fact of its own
        inputs = ", ".join(short(line.what) for line in self.inputs[:4]) + (", ..." if len(self.inputs) > 4 else "")
        facts = [
            Fact("devices", f"{len(self.counts)} with {spread(self.counts)} node{'s' * (self.waves > 1)} each", idle),
            Fact(
                "split over nodes",
                f"{several(len(self.inputs), 'argument')}, {size(sum(line.bytes for line in self.inputs))}",
                inputs,
            ),
            Fact(
                "once per step",
                several(self.once, "equation"),
                f"{self.hoisted:,} of them hoisted before the first pass" if self.passes else "",
            ),
            Fact("work", f"{number(self.flops)}flop", self.repeated),
            Fact("sums over nodes", how, detail),
            *(Fact("", f"but {exception}") for exception in self.exceptions),
            Fact(
                "sums take",
                f"{size(self.accumulated + self.buffered)} of memory on a device",
                f"{size(self.accumulated)} of accumulators, {size(self.buffered)} of buffers for the tree"
                if self.buffered
                else "accumulators",
            ),
            Fact(
                "communication",
                f"{size(self.sent)} sent per device and step",
                "after the loop of each pass, never inside it" if len(self.counts) > 1 else "",
            ),
        ]
        if self.padding:
            facts.insert(
                0, Fact("padding", f"{several(self.padding, 'example')} at the end", "computed, masked in sums")
            )
        facts += [Fact("" if i else "search", line) for i, line in enumerate(self.search)]
        if self.temporary is not None:
            facts.append(Fact("temporary memory", f"{size(self.temporary)} per device", "as compiled"))
        return facts

    @property
    def repeated(self) -> str:
        """The share of the work that is done again by later passes, in words."""
        share = self.recomputed / max(self.flops, 1)
        percent = f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
        return f"{percent} of it computed again by later passes" if self.recomputed else "nothing computed twice"

    def _blocks(self, facts: Sequence[Fact]) -> list[Facts | Picture | Table | Page]:
        grid = Grid.of(self.counts, self.placement.names, self.batch, self.node_size)
        blocks: list[Facts | Picture | Table | Page] = [
            Facts(tuple(facts)),
            Picture("Nodes by device and wave", grid, "a device computes its nodes one after another, left to right"),
        ]
        return blocks + self._tables()

    def _tables(self) -> list[Facts | Picture | Table | Page]:
        """Everything that does not depend on devices, except what is sent."""
        accumulators = [(str(p.level), line) for p in self.passes for line in p.accumulators]
        kept = [(str(p.level), line) for p in self.passes for line in p.collected]
        tables: list[Facts | Picture | Table | Page] = []
        if self.passes:
            tables.append(self._passes())
        if accumulators:
            tables.append(listed("Accumulated", "one value per device, to which every node contributes", accumulators))
        if kept:
            tables.append(listed("Kept of every node", "returned, gathered, or read by a later pass", kept))
        for inner in self.nested:
            title = f"Around passes of its own: {short(inner.name)}"
            tables.append(Page(title, "a loop or branch whose body runs over all nodes", tuple(inner._tables())))
        if self.gathered:
            note = "gathered from all nodes, because something reads them at once"
            tables.append(listed("Whole on every device", note, [("", line) for line in self.gathered]))
        if self.sliced:
            note = "nodes cannot produce their own part of them"
            tables.append(listed("Built whole, then sliced", note, [("", line) for line in self.sliced]))
        if self.couplings:
            columns = (Column("what"), Column("source line", code=True, wide=True))
            rows = tuple((Cell(line.what), Cell(short(line.where), line.where)) for line in self.couplings)
            tables.append(Table("Couplings", columns, rows, "where one example influences another"))
        return tables

    def _passes(self) -> Table:
        """The passes with their cost."""
        names = ("pass", "equations per node", "work", "share", "accumulators", "sent per device")
        columns = tuple(Column(name, right=True) for name in names)
        rows = []
        for p in self.passes:
            share = p.flops / max(self.flops, 1)
            total = size(sum(line.bytes for line in p.accumulators))
            rows.append(
                (
                    Cell(str(p.level), strong=True),
                    Cell(f"{p.equations:,}"),
                    Cell(f"{number(p.flops)}flop"),
                    Cell(f"{share:.1%}", "of all work of the step", share=min(share, 1.0)),
                    Cell(f"{len(p.accumulators)}, {total}" if p.accumulators else "none"),
                    Cell(size(p.sent)),
                )
            )
        return Table("Passes", columns, tuple(rows), "each is one loop over all nodes")


def short(source: str) -> str:
    """A source line without the folders of its file.

    >>> short("/home/me/train.py:7 (train.<locals>.loss) in a/b")
    'train.py:7 (train.<locals>.loss) in a/b'
    """
    return FOLDERS.sub("", source)


def listed(title: str, note: str, entries: Sequence[tuple[str, Line]]) -> Table:
    """Values of passes with their bytes, the largest first."""
    ordered = sorted(entries, key=lambda entry: -entry[1].bytes)
    total = max(sum(line.bytes for _, line in entries), 1)
    several_passes = any(level for level, _ in entries)
    columns = (Column("value", code=True), Column("bytes", right=True), Column("source line", code=True, wide=True))
    rows = []
    for level, line in ordered[:SHOWN]:
        first = (Cell(level),) if several_passes else ()
        cells = (Cell(line.what), Cell(size(line.bytes), share=line.bytes / total), Cell(short(line.where), line.where))
        rows.append(first + cells)
    left = ordered[SHOWN:]
    rest = f"… and {several(len(left), 'smaller one')}, {size(sum(line.bytes for _, line in left))}" if left else ""
    return Table(title, ((Column("pass", right=True),) if several_passes else ()) + columns, tuple(rows), note, rest)


def table(prefix: str, entries: Sequence[Line], limit: int = SHOWN) -> list[str]:
    """Entries in columns, the largest first; what is left out is counted."""
    ordered = sorted(entries, key=lambda line: -line.bytes)
    width = max((len(line.what) for line in ordered[:limit]), default=0)
    sized = any(line.bytes for line in ordered)
    rows = [
        f"{prefix}{line.what:<{width}}{f'  {size(line.bytes):>9}' if sized else ''}  {line.where}".rstrip()
        for line in ordered[:limit]
    ]
    if len(ordered) > limit:
        rest = sum(line.bytes for line in ordered[limit:])
        rows.append(f"{prefix}... and {len(ordered) - limit} more" + (f", {size(rest)}" if rest else ""))
    return rows


def bytes_of(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def kind(aval: Any) -> str:
    return aval.str_short(short_dtypes=True)


def coupling_line(coupling: Coupling) -> Line:
    """A coupling in one line: what reads what, and where the user wrote it."""
    source = coupling.source or coupling.eqn
    name = module(source)
    return Line(f"pass {coupling.level}: {coupling_text(coupling)}", where(source) + (f" in {name}" if name else ""))


def coupling_text(coupling: Coupling) -> str:
    """What reads what."""
    source = coupling.source or coupling.eqn
    name = source.primitive.name
    if coupling.mode == "local":
        return f"{name} reads each node's own estimate of a sum over the batch"
    match coupling.kind:
        case "loop":
            return f"{coupling.eqn.primitive.name} has passes of its own: {name} {coupling.why and coupling.why.value}"
        case "materialize":
            return f"{name} {(coupling.why if coupling.why is Why.PAIRS else Why.WHOLE).value}"
    if coupling.source is None:
        return f"{name} reads what was made of the whole batch"
    form = coupling.flow.states[source.outvars[0]].form
    reduction = REDUCTIONS.get(form.monoid, form.monoid.value) if isinstance(form, Partial) else "sum"
    return f"{name} reads a {reduction} over the batch"


def module(eqn: JaxprEqn) -> str:
    """The modules and scopes that the user named, whichever of jax's transformations the equation comes from.

    >>> TRANSFORMATIONS.sub("", "transpose(jvp(Net))/BatchNorm_0")
    'Net/BatchNorm_0'
    """
    return "/".join(part for part in TRANSFORMATIONS.sub("", scope(eqn)).split("/") if part)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How sums over nodes are formed.

    Attributes:
      mode: ``"invariant"`` or ``"fast"``.
      lane: of an invariant one: consecutive nodes that are added one after another.
      sharded: arguments that are sharded over the axis of the nodes.
    """

    mode: str
    lane: int = 1
    sharded: tuple[str, ...] = ()

    def depth(self, placement: Placement | Layout) -> int:
        """How many buffers a device needs for each accumulator, besides the accumulator itself."""
        if self.mode == "fast":
            return 0
        plan = ReductionPlan.of(placement.counts, self.lane, True)
        return plan.depth if plan.depth > 1 or plan.most else 0  # in place of the accumulator; and the node's own

    def buffers(self, made: Schedule, placement: Placement | Layout) -> int:
        """Their bytes, in the pass that has most."""
        total = max((sum(a.bytes for a in p.accumulators if inexact(a)) for p in made.passes), default=0)
        return self.depth(placement) * total

    def text(self, made: Schedule, placement: Placement | Layout) -> str:
        """One line of the report."""
        if self.mode == "fast":
            return "fast: each device in node order, then across devices in any order"
        leaves = "the nodes" if self.lane == 1 else f"{-(-placement.virtual_nodes // self.lane)} lanes of {self.lane}"
        depth, bytes_more = self.depth(placement), self.buffers(made, placement)
        return f"invariant: in the order of a tree over {leaves}, {depth} more buffers ({size(bytes_more)}) on a device"

    def exceptions(self, made: Schedule, placement: Placement | Layout) -> tuple[str, ...]:
        """From which the promise does not hold."""
        if self.mode == "fast":
            return ()
        found = []
        if any(a.monoid is Monoid.PROD and jnp.issubdtype(a.dtype, jnp.complexfloating) for a in accumulators(made)):
            found.append("not of products of complex numbers: compilers round those as they like")
        if self.sharded:
            named = ", ".join(self.sharded[:4]) + (", ..." if len(self.sharded) > 4 else "")
            found.append(f"not of what the step itself sums over what is sharded over devices: {named}")
        if isinstance(placement, Placement) and len(placement.groups) > 1:
            found.append(
                "not of what is computed once: on groups of devices it is compiled apart and may round otherwise"
            )
        return tuple(found)


def accumulators(made: Schedule) -> list[Accumulator]:
    """Those of a schedule, of schedules within it too."""
    inner = [inner for stage in made.stages for action in stage.once for inner in action.schedules]
    return [a for p in made.passes for a in p.accumulators] + [a for one in inner for a in accumulators(one)]


def inexact(accumulator: Accumulator) -> bool:
    return jnp.issubdtype(accumulator.dtype, jnp.inexact)


def report(
    made: Schedule, placement: Placement | Layout, name: str, couplings: Sequence[Coupling], reduction: Reduction
) -> Report:
    """Describes a schedule.

    Args:
      made: the schedule.
      placement: where its nodes live, or would.
      name: of the step.
      couplings: met by batch flow.
      reduction: how sums over nodes are formed.

    Returns:
      The report.
    """
    flow = made.flow
    nested = [
        report(inner, placement, where(action.step.eqn), (), reduction)
        for stage in made.stages
        for action in stage.once
        for inner in action.schedules
        if inner.passes
    ]
    defined = flow.program.definitions
    return Report(
        name=name,
        batch=flow.batch.size,
        virtual_nodes=placement.virtual_nodes,
        node_size=flow.node_size,
        placement=placement,
        inputs=tuple(
            Line(kind(var.aval), str(flow.states[var].form), bytes_of(var.aval))
            for var in flow.program.inputs
            if isinstance(flow.states[var].form, Slice)
        ),
        passes=tuple(pass_report(flow, p, placement, reduction) for p in made.passes),
        nested=tuple(nested),
        once=sum(len(stage.once) for stage in made.stages),
        hoisted=len(made.stages[0].once) if made.passes else 0,
        gathered=tuple(
            Line(kind(var.aval), where(defined[var]) if var in defined else "argument", bytes_of(var.aval))
            for var in made.gathered
        ),
        sliced=tuple(
            Line(kind(var.aval), where(defined[var]), bytes_of(var.aval))
            for var in dict.fromkeys(
                action.var
                for nodes in made.passes
                for action in nodes.recipe.actions
                if isinstance(action, Conversion) and isinstance(action.target, Slice)
            )
            if var in defined
        ),
        couplings=tuple(dict.fromkeys(map(coupling_line, couplings))),
        flops=made.flops,
        recomputed=made.recomputed,
        reduction=reduction.text(made, placement),
        exceptions=reduction.exceptions(made, placement),
        buffers=reduction.buffers(made, placement),
    )


def pass_report(flow: Flow, nodes: Pass, placement: Placement | Layout, reduction: Reduction) -> PassReport:
    defined = flow.program.definitions
    actions = [action for action in nodes.recipe.actions if isinstance(action, Evaluation)]
    devices = len(placement.counts)
    blocks = 1
    if reduction.mode == "invariant":
        blocks = max(len(fold.rest) for fold in ReductionPlan.of(placement.counts, reduction.lane, True).own)
    total = sum(a.bytes * (1 + (blocks if inexact(a) else 1)) for a in nodes.accumulators)
    return PassReport(
        level=nodes.level,
        equations=len(actions),
        flops=sum(action.step.flops for action in actions),
        accumulators=tuple(
            Line(f"{a.monoid.value} {kind(a.var.aval)}", where(defined[a.var]), a.bytes) for a in nodes.accumulators
        ),
        collected=tuple(Line(kind(var.aval), where(defined[var]), bytes_of(var.aval)) for var, _ in nodes.collected),
        sent=int((devices - 1) / devices * total),
    )
