"""A compiled program and its prediction -> the differences in collectives, memory and host memory.

Knows compiled programs and predictions. Must not know how a split was found, or its purpose.

A compiler may combine several arrays in one collective: that is as planned, and listed. Some rewrites are known
(`REWRITES`), and planned collectives are paired with them:

- a reduce-scatter may become an all-reduce, perhaps in bfloat16, or the other way round;
- a gather of parts that are not whole rows (`ROW`) may become an all-reduce of arrays that are zero elsewhere;
- a dtype may change between bfloat16 and float32;
- only a half, a quarter or an eighth may be sent, if each device keeps no more of the result.

Everything else is a difference.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from vnode.errors import ProfileError, layout_message
from vnode.partition.bipartite_pairing import maximum_pairing
from vnode.partition.cost.collective_cost import NAMES
from vnode.partition.cost.program_memory import Memory
from vnode.partition.cost.split_cost import PlannedCollective, ProgramCost
from vnode.partition.hlo import HloCollective, find_collectives, find_fetches, parse
from vnode.placement.temporary import temporary_of
from vnode.show.drawable import Drawn
from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
from vnode.show.units import several, size

TOLERANCE = 0.35
"""The relative error up to which memory counts as predicted: estimates are off by that much."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Equal collectives.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``, ``"permute"``, or another kind
        that only a compiler makes.
      bytes: size of one device's array: the result of an all-gather, the operand of other kinds.
      devices: number of devices in a group; 0 for a permute.
      runs: the total number of runs.
    """

    kind: str
    bytes: int
    devices: int
    runs: int

    def __str__(self) -> str:
        among = f" among {self.devices}" if self.devices else ""
        return f"{self.runs} x {self.kind} of {self.bytes:,} bytes{among}"


@dataclasses.dataclass(frozen=True, repr=False)
class Acceptance(Drawn):
    """A compiled program beside its prediction; print it, or let a notebook draw it.

    Attributes:
      planned: bytes by kind of collective, as predicted.
      found: bytes by kind of collective in the compiled program.
      missing: planned collectives that the compiled program lacks.
      extra: compiled collectives that were not planned.
      rewritten: planned collectives, each with the known rewrite that the compiled program has instead.
      added: permutes that move elements to their place after a sum over padded arrays
        (`vnode.partition.hlo.find_collectives`); listed, and neither found nor extra.
      combined: number of arrays of each collective that sends several.
      predicted: the predicted memory of one device.
      arguments: bytes of arguments in the compiled program.
      outputs: bytes of results.
      aliased: bytes of results in donated buffers.
      temporaries: bytes of all other arrays at the peak.
      gaps: bytes of fragmentation between temporary arrays; compilers leave gaps where there is room.
      open_loops: collectives in loops without a known trip count; they are counted once.
      tolerance: relative error up to which memory counts as predicted.
      limit: bytes that one device may hold, if known.
      platforms: the predicted platform and the compiled one, if they differ.
      on_host: bytes of temporary arrays in the host's memory, in the compiled program.
      fetched: bytes fetched from the host's memory in a step, as planned and as compiled.
    """

    planned: dict[str, int]
    found: dict[str, int]
    missing: tuple[Exchange, ...]
    extra: tuple[Exchange, ...]
    combined: tuple[int, ...]
    predicted: Memory
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    open_loops: int = 0
    tolerance: float = TOLERANCE
    rewritten: tuple[tuple[Exchange, Exchange], ...] = ()
    limit: int | None = None
    platforms: tuple[str, str] | None = None
    added: tuple[Exchange, ...] = ()
    on_host: int = 0
    fetched: tuple[int, int] = (0, 0)
    gaps: int = 0

    @property
    def memory(self) -> int:
        """Bytes of one device's memory that the compiled program needs, without gaps."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def memory_error(self) -> float:
        """The prediction's relative deviation from `memory`."""
        return (self.predicted.total - self.memory) / max(self.memory, 1)

    @property
    def memory_accepted(self) -> bool:
        """Whether memory is as predicted, up to the tolerance."""
        return abs(self.memory_error) <= self.tolerance

    @property
    def exchange_accepted(self) -> bool:
        """Whether all collectives are as planned."""
        return not (self.missing or self.extra)

    @property
    def host_accepted(self) -> bool:
        """Whether host memory and fetched bytes of offloaded residuals are as predicted, up to the tolerance."""
        planned, found = self.fetched
        pairs = (self.predicted.host, self.on_host), (planned, found)
        return not self.predicted.host or all(abs(a - b) <= self.tolerance * b for a, b in pairs)

    @property
    def accepted(self) -> bool:
        """Whether collectives, memory and host memory are all as planned."""
        return self.memory_accepted and self.exchange_accepted and self.host_accepted

    @property
    def reasons(self) -> tuple[str, ...]:
        """The differences that prevent acceptance; empty if it is accepted."""
        found = []
        if not self.exchange_accepted:
            more, less = (sum(each.bytes * each.runs for each in several) for several in (self.extra, self.missing))
            unplanned = [f"{size(more)} that are not planned"] * bool(more)
            absent = [f"{size(less)} less than planned"] * bool(less)
            found.append(f"devices exchange {', and '.join(unplanned + absent) or 'no bytes, by other collectives'}")
        if not self.memory_accepted:
            side = "above" if self.memory_error > 0 else "below"
            found.append(f"it takes {size(self.memory)}; the prediction is {abs(self.memory_error):.0%} {side} that")
        if not self.host_accepted:
            planned, there = (f"{size(a)} of residuals, {size(b)} read" for a, b in zip(*self._host(), strict=True))
            found.append(f"on the host {there}; planned: {planned}")
        return tuple(found)

    @property
    def advice(self) -> tuple[str, ...]:
        """Remedies; empty if it is accepted."""
        found: list[str] = []
        if not self.accepted and self.platforms is not None:
            wanted, given = self.platforms
            found.append(f"compile it for {wanted}, as predicted, not for {given}: plan.accept(devices)")
        if self.accepted or self.limit is None:
            pass
        elif self.memory > self.limit:
            less = int(self.limit * self.predicted.total / self.memory)
            found.append(f"search again with memory={less}: it takes more than the limit of {size(self.limit)}")
        elif not self.memory_accepted:
            found.append(f"it still fits in {size(self.limit)}")
        if self.limit is not None and self.memory <= self.limit < self.memory + self.gaps:
            found.append(
                f"with the gaps that the compiler leaves between arrays it takes {size(self.memory + self.gaps)}, more "
                f"than the limit of {size(self.limit)}; for a device that is full, the compiler leaves fewer gaps"
            )
        if not self.exchange_accepted:
            found.append("time its steps before relying on it: the predicted time counts only the planned collectives")
        return tuple(found)

    def _host(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes in host memory, and bytes fetched from it: as planned, and in the compiled program."""
        return (self.predicted.host, self.on_host), self.fetched

    def page(self) -> Page:
        """The report."""
        said = "; ".join(self.reasons) or "collectives as planned, memory as predicted"
        blocks: list[Facts | Table] = []
        if self.advice:
            blocks.append(Facts(tuple(Fact("" if i else "what to do", text) for i, text in enumerate(self.advice))))
        if self.planned or self.found:
            blocks.append(self._exchange())
        blocks += [*self._differences(), self._memory()]
        return Page("accepted" if self.accepted else "not accepted", said, tuple(blocks))

    def _exchange(self) -> Table:
        rows = []
        for kind in sorted({*self.planned, *self.found}):
            planned, found = self.planned.get(kind, 0), self.found.get(kind, 0)
            rows.append((Cell(kind), Cell(f"{planned:,}"), Cell(f"{found:,}"), Cell("as planned", quiet=True)))
            if planned != found:
                rows[-1] = (*rows[-1][:3], Cell(f"{found - planned:+,}"))
        notes = [f"sent together: {', '.join(f'{n} arrays' for n in self.combined)}"] if self.combined else []
        if self.open_loops:
            notes.append(f"{several(self.open_loops, 'collective')} in loops of unknown length, counted once")
        columns = (Column("collectives"), Column("planned", right=True), Column("compiled", right=True), Column(""))
        return Table("exchanged", columns, tuple(rows), "bytes of one device's arrays", "; ".join(notes))

    def _differences(self) -> list[Table]:
        rows = [
            *((Cell("planned, not found", strong=True), Cell(str(each))) for each in self.missing),
            *((Cell("found, not planned", strong=True), Cell(str(each))) for each in self.extra),
            *((Cell("carried out as another"), Cell(f"{one}, as {other}")) for one, other in self.rewritten),
            *((Cell("added, for the sake of padding"), Cell(str(each))) for each in self.added),
        ]
        columns = (Column("difference"), Column("collective", wide=True))
        return [Table("differences", columns, tuple(rows))] if rows else []

    def _memory(self) -> Table:
        def row(name: str, planned: int, found: int) -> tuple[Cell, ...]:
            return Cell(name), Cell(size(planned)), Cell(size(found)), Cell("")

        p = self.predicted
        off = f"{self.memory_error:+.1%}"
        of_host = [row(name, *pair) for name, pair in zip(("on the host", "from the host"), self._host(), strict=True)]
        rows = (
            row("arguments", p.arguments, self.arguments),
            row("results", p.outputs - p.aliased, self.outputs - self.aliased),
            row("temporary", p.temporaries, self.temporaries),
            (*row("in all", p.total, self.memory)[:3], Cell(off, strong=not self.memory_accepted)),
            *[(Cell("gaps between arrays"), Cell(""), Cell(size(self.gaps)), Cell("", quiet=True))][: bool(self.gaps)],
            *of_host[: len(of_host) * bool(p.host)],
        )
        columns = (Column("memory"), *(Column(name, right=True) for name in ("predicted", "compiled", "off by")))
        note = f"of one device; accepted up to {self.tolerance:.0%}"
        note += "; residuals on the host, and the bytes read from there in a step" * bool(p.host)
        return Table("held", columns, rows, note)


def accept(compiled: Any, cost: ProgramCost, *, tolerance: float = TOLERANCE) -> Acceptance:
    """Compares a compiled program with its prediction.

    Args:
      compiled: the compiled program, a `jax.stages.Compiled`.
      cost: the prediction for the same program.
      tolerance: relative error up to which memory counts as predicted.

    Returns:
      The differences.

    Raises:
      ProfileError: the compiler reports no memory for the program, or no text.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from vnode.analysis.program import inline
      >>> from vnode.partition import Machine
      >>> from vnode.partition.cost import program_cost
      >>> from vnode.spmd.sharding_flow import follow
      >>> from vnode.spmd.layout import from_spec
      >>> from vnode.spmd.sharded_program import flow_over_mesh
      >>> traced = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((64, 512)), jnp.ones((512, 64)))
      >>> program, axes = inline(traced.jaxpr, traced.consts), {"x": 4}
      >>> layouts = [from_spec(P(None, "x"), (64, 512), axes), from_spec(P("x"), (512, 64), axes)]
      >>> flow = follow(program, layouts, axes)
      >>> run = flow_over_mesh(flow, Mesh(np.array(jax.devices()[:4]), ("x",)))
      >>> compiled = jax.jit(run).lower(*(var.aval for var in program.inputs)).compile()
      >>> machine = Machine.tpu("v5e:2x2")
      >>> cost = program_cost(flow, machine, machine.mesh(axes), platform="cpu")
      >>> found = accept(compiled, cost)
      >>> found.accepted, found.found, found.memory
      (True, {'all-reduce': 16384}, 98304)
    """
    return compare_collectives(
        compiled, count_planned((*cost.collectives, *cost.others)), cost.memory, tolerance=tolerance
    )


def compare_collectives(
    compiled: Any,
    wanted: Counts,
    predicted: Memory,
    *,
    tolerance: float = TOLERANCE,
    limit: int | None = None,
    over_nodes: int | None = None,
    platforms: tuple[str, str] | None = None,
    fetched: int = 0,
) -> Acceptance:
    """Compares a compiled program with collectives and memory.

    Args:
      compiled: the program, a `jax.stages.Compiled`.
      wanted: the planned collectives.
      predicted: the predicted memory of one device.
      tolerance: relative error up to which memory counts as predicted.
      limit: bytes that one device may hold, if known.
      over_nodes: total trip count of loops over a device's nodes, where the compiled text lacks it.
      platforms: the predicted platform and the compiled one, if they differ.
      fetched: predicted bytes fetched from the host's memory in a step.

    Returns:
      The differences.

    Raises:
      ProfileError: the compiler reports no memory for the program, or no text.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or not text:
        raise ProfileError(
            layout_message(
                "the compiler reports no memory, or no text, for the program.",
                facts=[f"memory analysis: {memory}", f"text: {len(text or '')} characters"],
                remedies=["compile for a platform that reports both: CPU, GPU or TPU"],
            )
        )
    module, temporary = parse(text), temporary_of(compiled)
    found = find_collectives(module, over_nodes)
    there = count_compiled(each for each in found if not each.added)
    missing, extra, rewritten = match_rewrites(wanted, there)
    return Acceptance(
        planned=bytes_by_kind(wanted),
        found=bytes_by_kind(there),
        missing=sorted_exchanges(missing),
        extra=sorted_exchanges(extra),
        rewritten=rewritten,
        added=sorted_exchanges(count_compiled(each for each in found if each.added)),
        combined=tuple(len(each.arrays) for each in found if len(each.arrays) > 1 and each.kind != "all-to-all"),
        predicted=predicted,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=temporary.held,
        gaps=temporary.gaps,
        open_loops=sum(each.open for each in found),
        tolerance=tolerance,
        limit=limit,
        platforms=platforms,
        on_host=getattr(memory, "host_temp_size_in_bytes", 0),
        fetched=(fetched, find_fetches(module, over_nodes)),
    )


Counts = collections.Counter[tuple[str, int, int]]
"""The number of runs of collectives, by kind, bytes and devices."""


def count_planned(planned: Iterable[PlannedCollective]) -> Counts:
    """Counts the collectives of a plan."""
    found: Counts = collections.Counter()
    for each in planned:
        transfer = each.transfer
        devices = 0 if transfer.kind == "permute" else transfer.devices
        found[transfer.kind, transfer.bytes, devices] += each.runs
    return found


def count_exchanges(several: Iterable[Exchange]) -> Counts:
    """Counts the collectives of a saved prediction."""
    found: Counts = collections.Counter()
    for each in several:
        found[each.kind, each.bytes, each.devices] += each.runs
    return found


def count_compiled(collectives_found: Iterable[HloCollective]) -> Counts:
    """Counts the collectives of a compiled program; the arrays of an all-to-all are parts of one."""
    found: Counts = collections.Counter()
    for each in collectives_found:
        kind = "permute" if each.kind == "collective-permute" else each.kind
        for n in (each.bytes,) if kind == "all-to-all" else each.arrays:
            found[kind, n, each.devices] += each.runs
    return found


REWRITES = (
    ("all-reduce", "reduce-scatter", 1),
    *(("reduce-scatter", "all-reduce", factor) for factor in (1, 0.5)),
    ("all-gather", "all-reduce", 1),
    *((kind, kind, factor) for kind in NAMES for factor in (0.5, 2)),
    *((kind, kind, 1 / part) for kind in ("all-reduce", "all-gather") for part in (4, 8)),
)
"""Known rewrites: the kind, and the factor of the bytes, that compilers use for a collective among as many devices."""

ROW = 128 * 4
"""Bytes of a row of a TPU's tiles in float32; parts that are not whole rows are summed instead of gathered."""


def match_rewrites(wanted: Counts, there: Counts) -> tuple[Counts, Counts, tuple[tuple[Exchange, Exchange], ...]]:
    """Pairs planned collectives with compiled ones by known rewrites; returns the unpaired ones, and the pairs.

    All are paired at once, as many as possible: a compiled collective may be one plan's own and another's rewrite. Of
    the largest pairings, the one with the smallest sum of ranks in `REWRITES` is taken. A collective as planned has
    rank 0.

    >>> planned, found = Counts({("reduce-scatter", 64, 4): 2}), Counts({("all-reduce", 64, 4): 1})
    >>> missing, extra, ((before, after),) = match_rewrites(planned, found)
    >>> dict(missing), dict(extra)
    ({('reduce-scatter', 64, 4): 1}, {})
    >>> print(before, "as", after)
    1 x reduce-scatter of 64 bytes among 4 as 1 x all-reduce of 64 bytes among 4
    """
    ranks = {
        (one, other): rank
        for one in sorted(+wanted)
        for other, rank in possible_rewrites(one).items()
        if there[other] > 0
    }
    missing, extra = +wanted, +there
    pairs = list[tuple[Exchange, Exchange]]()
    for (one, other), runs in maximum_pairing(wanted, there, ranks).items():
        missing[one] -= runs
        extra[other] -= runs
        if one != other:
            before, after = (Exchange(kind, n, devices, runs) for kind, n, devices in (one, other))
            pairs.append((before, after))
    return +missing, +extra, tuple(pairs)


def possible_rewrites(planned: tuple[str, int, int]) -> dict[tuple[str, int, int], int]:
    """The collectives that a planned one may become, with ranks: 0 as planned, then in the order of `REWRITES`."""
    kind, n, devices = planned
    found = {planned: 0}
    for rank, (before, after, factor) in enumerate(REWRITES, 1):
        rows = (before, after) == ("all-gather", "all-reduce") and not n % (ROW * max(devices, 1))
        if before == kind and not rows:
            found.setdefault((after, int(n * factor), devices), rank)
    return found


def bytes_by_kind(counts: Counts) -> dict[str, int]:
    """Total bytes of each kind of collective."""
    found: dict[str, int] = {}
    for (kind, n, _), runs in sorted(counts.items()):
        found[kind] = found.get(kind, 0) + n * runs
    return found


def sorted_exchanges(counts: Counts) -> tuple[Exchange, ...]:
    """Counted collectives as exchanges, the largest first."""
    found = [Exchange(kind, n, devices, runs) for (kind, n, devices), runs in counts.items()]
    return tuple(sorted(found, key=lambda each: (-each.bytes * each.runs, str(each))))
