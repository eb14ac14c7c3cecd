"""The report that `VirtualStep.explain` returns: numbers -> facts and tables on a page.

Knows what is counted, and placements. Must not know schedules, nor how words and numbers are drawn: as text, in a
terminal or in a notebook, it is one page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from vnode.placement.node_layout import Layout
from vnode.placement.placement import Placement
from vnode.report.lines import Line, PassReport
from vnode.report.sources import short_source
from vnode.report.tables import memory_fact, passes_table, places_table, values_table
from vnode.show.drawable import Drawn
from vnode.show.grid import Grid
from vnode.show.page import Fact, Facts, Page, Picture, Table
from vnode.show.units import in_groups, number, several, size, spread


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Drawn):
    """The report of a virtualized step; print it.

    A notebook draws it by itself; `show` draws it in a terminal (with rich), in colour. The content is the same.

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
      drawn: random draws as long as the batch that meet no example before they go through products row by row: all of
        this is done once.
      undescribed: primitives that are run once on the whole batch, because no description says how they split; with the
        bytes that are collected for each.
      couplings: where examples influence each other.
      flops: of the whole step.
      recomputed: flops spent again by later passes.
      reduction: how sums over nodes are formed.
      exceptions: from which the promise of an invariant reduction does not hold.
      buffers: bytes of pending sums on a device, which the order of a tree takes besides the accumulators themselves.
      cheaper: what would make them fewer.
      temporary: bytes of temporary memory on a device, as compiled; None if nobody asked for it to be measured.
      layouts: what the step asks of layouts over mesh axes, and which of these are kept inside a node.
      search: how the number of nodes was found, if it was; a line each.
      turns: of a loop around passes, how often it runs, if that is known; else 1.
      between: what passes keep of all examples for later ones, when that takes most memory.
      around: what of all examples goes into loops around passes, or comes out of them: carries, stacked residuals.
      planned: bytes that a device sends in all exchanges of a step, if there is a plan that says so.
      planned_by: where a plan has these bytes from.
      batches: where there are several sizes, those of the batches, each with how many examples a node has; `batch` is
        then into how many parts the largest is divided.
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
    cheaper: str = ""
    temporary: int | None = None
    layouts: tuple[Line, ...] = ()
    search: tuple[str, ...] = ()
    turns: int = 1
    between: tuple[Line, ...] = ()
    around: tuple[Line, ...] = ()
    planned: float | None = None
    planned_by: str = "as predicted"
    batches: tuple[tuple[int, int], ...] = ()
    undescribed: tuple[Line, ...] = ()
    drawn: tuple[Line, ...] = ()

    def found_by(self, lines: Sequence[str]) -> Report:
        """The same report of a step whose number of nodes was searched for, with a line for each that was tried."""
        return dataclasses.replace(self, search=tuple(lines))

    @property
    def padding(self) -> int:
        """Examples that are computed but not real."""
        return self.virtual_nodes * self.node_size - self.batch

    @property
    def when_sent(self) -> str:
        """When devices exchange the bytes that are counted, and which bytes are not counted."""
        if self.placement.together > 1:
            return "for sums over nodes of a state that is whole; what goes over other axes of the mesh is not counted"
        return "after the loop of each pass, never inside it" if len(self.counts) > 1 else ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Nodes on each device, or row of devices that compute a node together."""
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
    def exchanges(self) -> int:
        """The number of exchanges of sums in one step: after each pass, in every iteration of a loop around passes."""
        return sum(p.sent > 0 for p in self.passes) + sum(inner.turns * inner.exchanges for inner in self.nested)

    def evaluations(self, nodes: int) -> int:
        """Equations evaluated one after another in one step, if a device has so many nodes."""
        own = self.once + nodes * sum(p.equations for p in self.passes)
        return own + sum(inner.turns * inner.evaluations(nodes) for inner in self.nested)

    @property
    def small_bodies(self) -> Fact:
        """The cost of loops around passes with small bodies, in which the launches of all nodes' kernels dominate."""
        ratio = self.evaluations(self.waves) / max(self.evaluations(1), 1)
        inside = sum(inner.turns * inner.all_passes for inner in self.nested) * self.waves
        exchanged = f" and {several(self.exchanges, 'exchange')}" if self.exchanges else ""
        return Fact(
            "loops inside",
            f"{several(inside, 'node')} one after another on a {self.holder}{exchanged} per step",
            f"up to {ratio:.1f} times the plain step's time{' beside exchanges' * bool(exchanged)} where kernels take "
            "microseconds",
        )

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
        """The values that passes keep of every node."""
        return tuple(line for p in self.passes for line in p.collected) + tuple(
            line for inner in self.nested for line in inner.kept
        )

    def page(self) -> Page:
        """The page that is drawn."""
        grid = Grid.from_counts(self.counts, self.placement.names, self.batch, self.node_size, self.holder)
        how = f"a {self.holder} computes its nodes one by one, left to right"
        picture = Picture(f"Nodes by {self.holder} and wave", grid, how)
        blocks = (Facts(tuple(self._facts())), picture, *self._tables())
        return Page(self.name, f"{self.examples} on {self.where}", blocks)

    @property
    def examples(self) -> str:
        """The number of examples, in words; for batches of several sizes, of each."""
        sizes = [batch for batch, _ in self.batches]
        return f"{' and '.join(map(str, sizes))} examples" if sizes else several(self.batch, "example")

    @property
    def where(self) -> str:
        """Nodes, devices and waves in words."""
        each = " and ".join(str(size) for _, size in self.batches) or self.node_size
        nodes = f"{several(self.virtual_nodes, 'virtual node')} of {each}"
        return f"{nodes}, {several(self.devices, 'device')}{self.in_rows}, {several(self.waves, 'wave')}"

    @property
    def devices(self) -> int:
        """The number of devices; devices that compute a node together are a row."""
        return len(self.counts) * self.placement.together

    @property
    def in_rows(self) -> str:
        """The number of rows of devices, in words after their number; empty if each device computes nodes alone."""
        return in_groups(len(self.counts), self.placement.together, "row")

    @property
    def holder(self) -> str:
        """The unit that holds nodes of its own: a device, or a row of devices."""
        return "device" if self.placement.together == 1 else "row"

    @property
    def passes_in_words(self) -> str:
        """The number of passes, and their places."""
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
        held_by_each = f"{spread(self.counts)} node{'s' * (self.waves > 1)}{each}"
        how, _, detail = self.reduction.partition(": ")
        inputs = ", ".join(line.what for line in self.inputs[:4]) + (", ..." if len(self.inputs) > 4 else "")
        facts = [
            Fact("devices", f"{self.devices}{self.in_rows} with {held_by_each}", idle),
            Fact(
                "split over nodes",
                f"{several(len(self.inputs), 'argument')}, {size(sum(line.bytes for line in self.inputs))}",
                inputs,
            ),
            Fact("passes", self.passes_in_words, "each is one loop over all nodes"),
            *([self.small_bodies] if self.all_passes > len(self.passes) and self.waves > 1 else []),
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
                f"{size(self.accumulated)} of accumulators, {size(self.buffered)} of pending sums of the tree"
                if self.buffered
                else "accumulators",
            ),
            *([Fact("", f"pending sums: {self.cheaper}")] if self.cheaper and self.buffered else []),
            Fact(
                "communication",
                f"{size(self.sent if self.planned is None else self.planned)} sent per device and step",
                self.when_sent if self.planned is None else f"over all axes of the mesh, {self.planned_by}",
            ),
        ]
        if self.kept_between:
            most = max((self, *self.descendants), key=lambda one: one.of_device(one.between))
            facts.append(memory_fact("kept for later passes", self.kept_between, most.between))
            given = sum(line.bytes for line in self.inputs)
            if any(line.bytes > given for one in (self, *self.descendants) for line in one.between):
                facts.append(Fact("", "more than the batch takes: recomputing them would exceed recompute_budget"))
        if self.kept_around:
            lines = [line for one in (self, *self.descendants) for line in one.around]
            facts.append(memory_fact("held around loops", self.kept_around, lines))
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

    def _tables(self, of: str = "the step") -> list[Table | Page]:
        """Everything that does not depend on devices, except what is sent."""
        accumulators = [(str(p.number), line) for p in self.passes for line in p.accumulators]
        kept = [(str(p.number), line) for p in self.passes for line in p.collected]
        tables: list[Table | Page] = []
        if self.passes or self.nested:
            tables.append(passes_table(self.passes, self.once, self.flops + self.recomputed, self.pass_flops, of))
        if accumulators:
            tables.append(
                values_table("Accumulated", "one value per device, to which every node contributes", accumulators)
            )
        if kept:
            tables.append(values_table("Kept of every node", "returned, gathered, or read by a later pass", kept))
        if self.around:
            note = "carried, stacked or read by loops around passes, because a later turn or loop needs it"
            tables.append(values_table("Held around loops", note, [("", line) for line in self.around]))
        for inner in self.nested:
            title = f"Around passes of its own: {short_source(inner.name)}"
            turns = f", in each of {several(inner.turns, 'turn')}" if inner.turns > 1 else ""
            note = f"a loop or branch whose body runs over all nodes{turns}"
            tables.append(Page(title, note, tuple(inner._tables("the body"))))
        if self.gathered:
            note = "gathered from all nodes, because something reads them at once"
            tables.append(values_table("Whole on every device", note, [("", line) for line in self.gathered]))
        if self.undescribed:
            note = "run once on the whole batch; vnode.operators.register splits them (docs/registering-a-primitive.md)"
            tables.append(values_table("Without a description", note, [("", line) for line in self.undescribed]))
        if self.sliced:
            note = "nodes cannot produce their own part of them"
            tables.append(values_table("Built whole, then sliced", note, [("", line) for line in self.sliced]))
        if self.drawn:
            note = "as long as the batch, but tied to no example: if its rows are examples, add 0 * a batched value"
            tables.append(values_table("Drawn whole", note, [("", line) for line in self.drawn]))
        if self.layouts:
            tables.append(places_table("Sharding", "asked for by the step", self.layouts))
        if self.couplings:
            tables.append(places_table("Couplings", "where one example influences another", self.couplings))
        return tables
