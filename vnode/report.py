"""What `VirtualStep.explain` says: the schedule of a step in words and numbers.

Knows schedules, couplings, placements, and how devices add. Must not know how a schedule is made or emitted.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from vnode.analysis.forms import Slice
from vnode.analysis.program import scope, where
from vnode.analysis.recipe import Conversion, Evaluation
from vnode.analysis.schedule import Accumulator, Pass, Schedule
from vnode.analysis.states import Coupling, Flow
from vnode.operators import Monoid
from vnode.placement import Placement
from vnode.runtime.collectives import Plan

TRANSFORMS_ONLY = re.compile(r"(\w+\(|\)|/)*")
"""A name stack that says no more than which of jax's transformations the equation comes from: ``transpose(jvp())``."""


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


@dataclasses.dataclass(frozen=True)
class Report:
    """What a step becomes; `str` of it is the text that `explain` prints.

    Attributes:
      name: of the step.
      batch: examples of the global batch.
      virtual_nodes: V.
      node_size: examples per node, padding included.
      placement: where the nodes live.
      inputs: batched arguments.
      passes: in order.
      around: loops and branches that are evaluated around passes of their own.
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
      search: how the number of nodes was found, if it was; a line each.
    """

    name: str
    batch: int
    virtual_nodes: int
    node_size: int
    placement: Placement
    inputs: tuple[Line, ...]
    passes: tuple[PassReport, ...]
    around: tuple[Report, ...]
    once: int
    hoisted: int
    gathered: tuple[Line, ...]
    sliced: tuple[Line, ...]
    couplings: tuple[Line, ...]
    flops: int
    recomputed: int
    reduction: str
    exceptions: tuple[str, ...]
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
        for inner in self.around:
            lines += ["  around passes of its own:", *("    " + line for line in str(inner).splitlines())]
        if self.gathered:
            lines += ["  whole on every device:", *table("    ", self.gathered)]
        if self.sliced:
            lines += ["  built whole, then sliced:", *table("    ", self.sliced)]
        if self.couplings:
            lines += ["  couplings (one example influences another):", *table("    ", self.couplings)]
        return "\n".join(lines)

    @property
    def padding(self) -> int:
        """Examples that are computed but not real."""
        return self.virtual_nodes * self.node_size - self.batch


def table(prefix: str, entries: Sequence[Line], limit: int = 12) -> list[str]:
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


def spread(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def size(count: float) -> str:
    """Bytes for people.

    >>> size(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(count: float) -> str:
    """A large number for people, with the SI prefix.

    >>> number(2500000)
    '2.5 M'
    """
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.0f} " if not unit else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} P"


def bytes_of(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def kind(aval: Any) -> str:
    return aval.str_short(short_dtypes=True)


def coupling_line(coupling: Coupling) -> Line:
    """A coupling in one line: what reads what, and where the user wrote it."""
    source = coupling.source or coupling.eqn
    what = {
        "reduction": "reads a sum over the batch",
        "materialize": "needs the whole batch",
        "loop": "is repeated with passes of its own",
    }[coupling.kind]
    if coupling.mode == "local":
        what = "reads each node's own estimate of a sum over the batch"
    name = "" if TRANSFORMS_ONLY.fullmatch(scope(source)) else f" in {scope(source)}"
    return Line(f"pass {coupling.level}: {source.primitive.name} {what}", where(source) + name)


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

    def text(self, made: Schedule, placement: Placement) -> str:
        """One line of the report."""
        if self.mode == "fast":
            return "fast: each device in node order, then across devices in any order"
        leaves = "the nodes" if self.lane == 1 else f"{-(-placement.virtual_nodes // self.lane)} lanes of {self.lane}"
        depth = Plan.of(placement.counts, self.lane, True).depth
        bytes_more = depth * max((sum(a.bytes for a in p.accumulators if inexact(a)) for p in made.passes), default=0)
        return f"invariant: in the order of a tree over {leaves}, {depth} more buffers ({size(bytes_more)}) on a device"

    def exceptions(self, made: Schedule) -> tuple[str, ...]:
        """From which the promise does not hold."""
        if self.mode == "fast":
            return ()
        found = []
        if any(a.monoid is Monoid.PROD and jnp.issubdtype(a.dtype, jnp.complexfloating) for a in accumulators(made)):
            found.append("not of products of complex numbers: compilers round those as they like")
        if self.sharded:
            named = ", ".join(self.sharded[:4]) + (", ..." if len(self.sharded) > 4 else "")
            found.append(f"not of what the step itself sums over what is sharded over devices: {named}")
        return tuple(found)


def accumulators(made: Schedule) -> list[Accumulator]:
    """Those of a schedule, of schedules within it too."""
    inner = [inner for stage in made.stages for action in stage.once for inner in action.schedules]
    return [a for p in made.passes for a in p.accumulators] + [a for one in inner for a in accumulators(one)]


def inexact(accumulator: Accumulator) -> bool:
    return jnp.issubdtype(accumulator.dtype, jnp.inexact)


def report(
    made: Schedule, placement: Placement, name: str, couplings: Sequence[Coupling], reduction: Reduction
) -> Report:
    """Describes a schedule.

    Args:
      made: the schedule.
      placement: where its nodes live.
      name: of the step.
      couplings: met by batch flow.
      reduction: how sums over nodes are formed.

    Returns:
      The report.
    """
    flow = made.flow
    around = [
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
        around=tuple(around),
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
        exceptions=reduction.exceptions(made),
    )


def pass_report(flow: Flow, nodes: Pass, placement: Placement, reduction: Reduction) -> PassReport:
    defined = flow.program.definitions
    actions = [action for action in nodes.recipe.actions if isinstance(action, Evaluation)]
    devices = len(placement.counts)
    blocks = 1
    if reduction.mode == "invariant":
        blocks = max(len(fold.rest) for fold in Plan.of(placement.counts, reduction.lane, True).own)
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
