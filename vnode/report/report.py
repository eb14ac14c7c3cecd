"""What `VirtualStep.explain` says: the schedule of a step in words and numbers.

Knows schedules, couplings, placements, and how devices add. Must not know how a schedule is made or emitted, nor how
words and numbers are drawn: as text, in a terminal or in a notebook, it is one page.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.forms import Partial, Slice
from vnode.analysis.narrow import unrounded
from vnode.analysis.program import scope, where
from vnode.analysis.recipe import Conversion, Evaluation
from vnode.analysis.schedule import Accumulator, Pass, Schedule
from vnode.analysis.states import Coupling, Flow, Why
from vnode.operators import Monoid
from vnode.operators.control import Loop, region_of
from vnode.placement.layout import Layout
from vnode.placement.placement import Placement
from vnode.report.names import Names, summary
from vnode.runtime.collectives import ReductionPlan
from vnode.show.grid import Grid
from vnode.show.page import Cell, Column, Drawn, Fact, Facts, Page, Picture, Table
from vnode.show.units import number, several, size, spread

TRANSFORMATIONS = re.compile(r"\w+\(|\)")
"""In a name stack, what says which of jax's transformations the equation comes from: ``transpose(jvp(...))``."""

LINE = re.compile(r"^(.+?)(:\d+ \(.*)$")
"""A source line: the file, and the rest."""

REDUCTIONS = {Monoid.PROD: "product", Monoid.MAX: "maximum", Monoid.MIN: "minimum"}

SHOWN = 12
"""Rows of a table, the largest; the others are counted."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One accumulator, collected value or coupling, for display.

    Attributes:
      what: dtype and shape, or a sentence.
      where: the user's source line, with the whole path of the file.
      bytes: of it.
      name: of the parameter or result that it belongs to, if there is one.
    """

    what: str
    where: str
    bytes: int = 0
    name: str = ""


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
    """What a step becomes; print it.

    A notebook draws it by itself, `show` draws it in a terminal (with rich), in colour: what they say is the same.

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
      layouts: what the step asks of layouts over mesh axes, and which of these are kept inside a node.
      search: how the number of nodes was found, if it was; a line each.
      turns: of a loop around passes, how often it runs, if that is known; else 1.
      between: what passes keep of all examples for later ones, when that takes most memory.
      around: what of all examples goes into loops around passes, or comes out of them: carries, stacked residuals.
      late: what loops and branches compute with sums of few bits, which are rounded only when these have ended.
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
    layouts: tuple[Line, ...] = ()
    search: tuple[str, ...] = ()
    turns: int = 1
    between: tuple[Line, ...] = ()
    around: tuple[Line, ...] = ()
    late: tuple[Line, ...] = ()

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
        """Bytes that a device sends to reduce across devices in one step, in every turn of a loop around passes."""
        return sum(p.sent for p in self.passes) + sum(inner.turns * inner.sent for inner in self.nested)

    @property
    def all_passes(self) -> int:
        """Passes of one step, in every turn of a loop around passes."""
        return len(self.passes) + sum(inner.turns * inner.all_passes for inner in self.nested)

    @property
    def pass_flops(self) -> int:
        """Scalar operations of all passes of one step."""
        return sum(p.flops for p in self.passes) + sum(inner.turns * inner.pass_flops for inner in self.nested)

    def of_device(self, lines: Sequence[Line]) -> int:
        """Bytes of batched values that the fullest device holds."""
        return sum(line.bytes for line in lines) * self.waves * self.node_size // max(self.batch, 1)

    @property
    def kept_between(self) -> int:
        """Bytes of `between` on the fullest device, where that is most, loops included."""
        return max([self.of_device(self.between), *(inner.kept_between for inner in self.nested)])

    @property
    def kept_around(self) -> int:
        """Bytes of `around` on the fullest device, if all are there at a time, loops included."""
        return self.of_device(self.around) + sum(inner.kept_around for inner in self.nested)

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

    @property
    def passes_in_words(self) -> str:
        """How many passes there are, and where."""
        inside = self.all_passes - len(self.passes)
        text = several(self.all_passes, "pass", "passes")
        if not inside:
            return text
        turns = sorted({inner.turns for inner in self.nested})
        loops = f"in {turns[0]:,} turns of a loop" if len(self.nested) == 1 and turns[0] > 1 else "in loops or branches"
        return f"{text}, {inside:,} of them {loops}"

    def _facts(self) -> list[Fact]:
        idle = f"{several(self.idle, 'idle slot')}" if self.idle else "no idle slot"
        each = " each" if len(self.counts) > 1 else ""
        how, _, detail = self.reduction.partition(": ")
        if self.buffers:
            detail = detail.rpartition(", ")[0]  # what the buffers take is a fact of its own
        inputs = ", ".join(line.what for line in self.inputs[:4]) + (", ..." if len(self.inputs) > 4 else "")
        facts = [
            Fact("devices", f"{len(self.counts)} with {spread(self.counts)} node{'s' * (self.waves > 1)}{each}", idle),
            Fact(
                "split over nodes",
                f"{several(len(self.inputs), 'argument')}, {size(sum(line.bytes for line in self.inputs))}",
                inputs,
            ),
            Fact("passes", self.passes_in_words, "each is one loop over all nodes"),
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
        if self.kept_between:
            most = max((self, *self.descendants), key=lambda one: one.of_device(one.between))
            facts.append(held("kept for later passes", self.kept_between, most.between))
        if self.kept_around:
            lines = [line for one in (self, *self.descendants) for line in one.around]
            facts.append(held("held around loops", self.kept_around, lines))
        if self.padding:
            facts.insert(
                0, Fact("padding", f"{several(self.padding, 'example')} at the end", "computed, masked in sums")
            )
        facts += [Fact("" if i else "search", line) for i, line in enumerate(self.search)]
        if self.temporary is not None:
            facts.append(Fact("temporary memory", f"{size(self.temporary)} per device", "as compiled"))
        return facts

    @property
    def descendants(self) -> Iterator[Report]:
        """The reports of loops and branches around passes, and those within them."""
        for inner in self.nested:
            yield inner
            yield from inner.descendants

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
            Picture("Nodes by device and wave", grid, "a device computes its nodes one by one, left to right"),
        ]
        return blocks + self._tables()

    def _tables(self, of: str = "the step") -> list[Facts | Picture | Table | Page]:
        """Everything that does not depend on devices, except what is sent."""
        accumulators = [(str(p.level), line) for p in self.passes for line in p.accumulators]
        kept = [(str(p.level), line) for p in self.passes for line in p.collected]
        tables: list[Facts | Picture | Table | Page] = []
        if self.passes:
            tables.append(self._passes(of))
        if accumulators:
            tables.append(listed("Accumulated", "one value per device, to which every node contributes", accumulators))
        if kept:
            tables.append(listed("Kept of every node", "returned, gathered, or read by a later pass", kept))
        if self.around:
            note = "carried, stacked or read by loops around passes, because a later turn or loop needs it"
            tables.append(listed("Held around loops", note, [("", line) for line in self.around]))
        for inner in self.nested:
            title = f"Around passes of its own: {short(inner.name)}"
            turns = f", in each of {several(inner.turns, 'turn')}" if inner.turns > 1 else ""
            note = f"a loop or branch whose body runs over all nodes{turns}"
            tables.append(Page(title, note, tuple(inner._tables("the body"))))
        if self.gathered:
            note = "gathered from all nodes, because something reads them at once"
            tables.append(listed("Whole on every device", note, [("", line) for line in self.gathered]))
        if self.sliced:
            note = "nodes cannot produce their own part of them"
            tables.append(listed("Built whole, then sliced", note, [("", line) for line in self.sliced]))
        if self.layouts:
            tables.append(places("Sharding", "asked for by the step", self.layouts))
        if self.late:
            note = "sums that may overflow in a turn or branch, which then does not show; cast and scale after the loop"
            tables.append(places("Rounded late", note, self.late))
        if self.couplings:
            tables.append(places("Couplings", "where one example influences another", self.couplings))
        return tables

    def _passes(self, of: str) -> Table:
        """The passes with their cost, and what is done besides; all of it is the work of `of`."""
        names = ("pass", "equations", "work", "share", "accumulators", "sent")
        columns = tuple(Column(name, right=True) for name in names)
        rows = []
        for p in self.passes:
            total = size(sum(line.bytes for line in p.accumulators))
            rows.append(
                (
                    Cell(str(p.level), strong=True),
                    Cell(f"{p.equations:,}", "of every node"),
                    Cell(f"{number(p.flops)}flop", "of all nodes together"),
                    self._share(p.flops),
                    Cell(f"{len(p.accumulators)}, {total}" if p.accumulators else "none"),
                    Cell(size(p.sent), "by each device"),
                )
            )
        rest = max(self.flops + self.recomputed - self.pass_flops, 0)
        once = (
            Cell("once"),
            Cell(f"{self.once:,}"),
            Cell(f"{number(rest)}flop"),
            self._share(rest),
            Cell(""),
            Cell(""),
        )
        note = f"share: of {of}'s work; equations: of a node; sent: by each device"
        return Table("Passes", columns, (*rows, once), note)

    def _share(self, flops: int) -> Cell:
        share = min(flops / max(self.flops + self.recomputed, 1), 1.0)
        return Cell(f"{share:.1%}", "of all work, what is computed again included", share=share)


def short(source: str) -> str:
    """A source line with its file seen from the working directory, else from the folder that holds its package.

    >>> short("/nowhere/me/train.py:7 (train.<locals>.loss) in a/b")
    'train.py:7 (train.loss) in a/b'
    """
    found = LINE.match(source)
    if not found:
        return source
    file = near(found[1]) if os.path.isabs(found[1]) else found[1]  # In[3] is no file
    return file + found[2].replace(".<locals>", "")


@functools.lru_cache(maxsize=1024)
def near(file: str) -> str:
    """A file's path: of an installed package, from the folder that holds it, even if that is in the working directory.

    Else from the working directory, if the file is in there.
    """
    path = Path(file)
    for index, part in enumerate(path.parts):
        if part in ("site-packages", "dist-packages"):
            return str(Path(*path.parts[index + 1 :]))
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    root = path.parent
    while (root / "__init__.py").exists():
        root = root.parent
    return str(path.relative_to(root))


def held(what: str, total: int, lines: Sequence[Line]) -> Fact:
    """Memory that values of all examples take, with the one that takes most."""
    largest = max(lines, key=lambda line: line.bytes)
    text = f"{several(len(lines), 'value')} of all examples, the largest {largest.what} at {short(largest.where)}"
    return Fact(what, f"{size(total)} of memory on a device", text)


def places(title: str, note: str, lines: Sequence[Line]) -> Table:
    """What happens at lines of the user's."""
    columns = (Column("what"), Column("source line", code=True, wide=True))
    rows = tuple((Cell(line.what), Cell(short(line.where), line.where)) for line in lines)
    return Table(title, columns, rows, note)


def listed(title: str, note: str, entries: Sequence[tuple[str, Line]]) -> Table:
    """Values of passes with their bytes, the largest first; those that are alike, of one source line, in one row."""
    alike: dict[tuple[str, str, str], list[Line]] = {}
    for level, line in entries:
        alike.setdefault((level, line.what, line.where), []).append(line)
    ordered = sorted(alike.items(), key=lambda entry: -sum(line.bytes for line in entry[1]))
    total = max(sum(line.bytes for _, line in entries), 1)
    several_passes = any(level for level, _ in entries)
    named = any(line.name for _, line in entries)
    columns = (
        *((Column("pass", right=True),) * several_passes),
        Column("value", code=True),
        Column("bytes", right=True),
        *((Column("of", code=True, wide=True),) * named),
        Column("source line", code=True, wide=True),
    )
    rows = []
    for (level, what, place), lines in ordered[:SHOWN]:
        bytes_of_all = sum(line.bytes for line in lines)
        share = bytes_of_all / total
        rows.append(
            (
                *((Cell(level),) * several_passes),
                Cell(f"{len(lines)} x {what}" if len(lines) > 1 else what),
                Cell(size(bytes_of_all), f"{share:.1%} of this table's", share=share),
                *((Cell(summary([line.name for line in lines if line.name])),) * named),
                Cell(short(place), place),
            )
        )
    left = [line for _, lines in ordered[SHOWN:] for line in lines]
    rest = f"… and {several(len(left), 'smaller one')}, {size(sum(line.bytes for line in left))}" if left else ""
    return Table(title, columns, tuple(rows), note, rest)


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
            found.append(f"not of what the step makes of arguments that are themselves sharded over devices: {named}")
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
    made: Schedule,
    placement: Placement | Layout,
    name: str,
    couplings: Sequence[Coupling],
    reduction: Reduction,
    names: Names | None = None,
    turns: int = 1,
) -> Report:
    """Describes a schedule.

    Args:
      made: the schedule.
      placement: where its nodes live, or would.
      name: of the step.
      couplings: met by batch flow.
      reduction: how sums over nodes are formed.
      names: of its program's values, by their paths.
      turns: how often it runs in one step.

    Returns:
      The report.
    """
    flow = made.flow
    names = names or Names(flow.program)
    nested = [
        report(
            inner,
            placement,
            where(action.step.eqn),
            (),
            reduction,
            names.within(action.step.eqn, inner.flow.program),
            region.length if isinstance(region := region_of(action.step.eqn), Loop) else 1,
        )
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
        passes=tuple(pass_report(flow, p, placement, reduction, names) for p in made.passes),
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
        turns=turns,
        between=value_lines(made.between, defined, names),
        around=value_lines(made.around, defined, names),
        layouts=tuple(dict.fromkeys(layout_lines(flow, placement))),
        late=tuple(dict.fromkeys(map(late_line, unrounded(flow)))),
    )


def late_line(eqn: JaxprEqn) -> Line:
    """What computes with a sum that is not rounded yet."""
    return Line(f"{eqn.primitive.name} in a loop or branch computes with a sum of 16 bits or less", where(eqn))


def value_lines(values: Sequence[Var], defined: Mapping[Var, JaxprEqn], names: Names) -> tuple[Line, ...]:
    """Values of a program with the source lines that make them."""
    return tuple(Line(kind(var.aval), where(defined[var]), bytes_of(var.aval), names(var)) for var in values)


def layout_lines(flow: Flow, placement: Placement | Layout) -> Iterator[Line]:
    """What a program asks of layouts, and what becomes of it on a placement."""
    mesh = getattr(placement, "mesh", None)
    for step in flow.steps:
        for body in step.bodies:
            yield from layout_lines(body, placement)
        description = flow.program.describe(step.eqn)
        if description is None or not any(description.layout or ()):
            continue
        axes = dict.fromkeys(name for names in description.layout or () for name in names or ())
        form = step.results[0]
        examples = description.layout[form.dim] or () if isinstance(form, Slice) and description.layout else ()
        carrying = [name for name in axes if name in examples or (mesh is not None and name == placement.axis)]
        kept = [name for name in axes if mesh is not None and name in mesh.axis_names and name not in carrying]
        away = [name for name in axes if name not in carrying + kept]
        parts = [
            f"{', '.join(names)} {fate}"
            for names, fate in (
                (carrying, "dropped: carries the examples"),
                (kept, "kept inside a node"),
                (away, "dropped: no axis of the placement"),
            )
            if names
        ]
        yield Line(f"{kind(step.eqn.outvars[0].aval)} over {'; '.join(parts)}", where(step.eqn))


def pass_report(
    flow: Flow, nodes: Pass, placement: Placement | Layout, reduction: Reduction, names: Names
) -> PassReport:
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
            Line(f"{a.monoid.value} {kind(a.var.aval)}", where(defined[a.var]), a.bytes, names(a.var))
            for a in nodes.accumulators
        ),
        collected=value_lines([var for var, _ in nodes.collected], defined, names),
        sent=int((devices - 1) / devices * total),
    )
