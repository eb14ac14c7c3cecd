"""Whether a compiled program is what was planned: collectives, by kind, group and bytes, memory, and the host's.

Knows compiled programs and predictions. Must not know how a split was found, or what it is good for.

Compilers send several arrays by one collective where they can; that is as planned, and listed. So are exchanges that a
compiler is known to carry out as others (`REWRITES`), pair by pair: a sum of which everybody keeps a part as a whole
sum, which then may be in bfloat16, or the other way round; a gather of parts that are no whole rows (`ROW`) as a sum
of arrays that are zero elsewhere; in bfloat16 in place of float32, or the other way round; of a half, a quarter or an
eighth only, if each device keeps no more of the result. Everything else is a difference.
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
"""By which share the memory of a compiled program may differ from the prediction: estimates are off by that much."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives that are alike.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"`` or ``"permute"``, or another that
        only a compiler makes.
      bytes: of one device's array: of the result of an all-gather, of the operand of the others.
      devices: of a group; 0 of a permute.
      runs: how often they run in all.
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
      found: the same in the compiled program.
      missing: collectives that are planned and not there.
      extra: collectives that are there and not planned.
      rewritten: those that are planned, with those that a compiler is known to make of them, and that are there.
      added: those by which a compiler puts in place what a sum over padded arrays has left elsewhere
        (`vnode.partition.hlo.find_collectives`); listed, and neither found nor extra.
      combined: how many arrays each collective sends that sends several.
      predicted: the memory of one device.
      arguments: bytes of them in the compiled program.
      outputs: of results.
      aliased: of results in place of arguments.
      temporaries: of the rest, at the moment at which that is most.
      gaps: bytes that it takes besides, between temporary arrays: compilers leave them where there is room.
      open_loops: collectives in loops whose length the compiled text does not tell; they are counted once.
      tolerance: by which share memory may differ.
      limit: bytes that one device may hold, if that is known.
      platforms: what was predicted for, and what it was compiled for, if these differ.
      on_host: bytes of what is temporary in the host's memory in the compiled program.
      fetched: bytes that come from there in a step, as planned and in the compiled program.
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
        """Bytes of one device's memory that the compiled program needs: all that it takes, but for gaps."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def memory_error(self) -> float:
        """The prediction's relative deviation from it."""
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
        """Whether what loops were to keep on the host is there, and comes from there, up to the tolerance."""
        planned, found = self.fetched
        pairs = (self.predicted.host, self.on_host), (planned, found)
        return not self.predicted.host or all(abs(a - b) <= self.tolerance * b for a, b in pairs)

    @property
    def accepted(self) -> bool:
        """Whether all is as planned."""
        return self.memory_accepted and self.exchange_accepted and self.host_accepted

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not accepted; nothing if it is."""
        found = []
        if not self.exchange_accepted:
            more, less = (sum(each.bytes * each.runs for each in several) for several in (self.extra, self.missing))
            differ = [f"{size(more)} that are not planned"] * bool(more) + [f"{size(less)} less than planned"] * bool(
                less
            )
            found.append(f"devices exchange {', and '.join(differ) or 'nothing, in another way'}")
        if not self.memory_accepted:
            side = "above" if self.memory_error > 0 else "below"
            found.append(f"it takes {size(self.memory)}, the prediction is {abs(self.memory_error):.0%} {side} that")
        if not self.host_accepted:
            planned, there = (f"{size(a)}, read as {size(b)}" for a, b in zip(*self._host(), strict=True))
            found.append(f"loops keep {there} on the host, not {planned} as planned")
        return tuple(found)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do; nothing if it is accepted."""
        found: list[str] = []
        if not self.accepted and self.platforms is not None:
            wanted, given = self.platforms
            found.append(f"compile it for {wanted}, as predicted, not for {given}: plan.accept(devices)")
        if self.accepted or self.limit is None:
            pass
        elif self.memory > self.limit:
            less = int(self.limit * self.predicted.total / self.memory)
            found.append(f"search again with memory={less}: it takes more than the {size(self.limit)} that it may")
        elif not self.memory_accepted:
            found.append(f"it fits in {size(self.limit)} all the same")
        if self.limit is not None and self.memory <= self.limit < self.memory + self.gaps:
            found.append(
                f"with the gaps that the compiler leaves between arrays it takes {size(self.memory + self.gaps)}, more "
                f"than the {size(self.limit)} that it may; it leaves fewer where the device itself has no more"
            )
        if not self.exchange_accepted:
            found.append(
                "time its steps before relying on it: the predicted time counts what was planned to be exchanged"
            )
        return tuple(found)

    def _host(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What is on the host, as planned and in the compiled program, and what comes from there."""
        return (self.predicted.host, self.on_host), self.fetched

    def page(self) -> Page:
        """What there is to see."""
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
        note += "; what loops keep on the host, and what comes from there in a step" * bool(p.host)
        return Table("held", columns, rows, note)


def accept(compiled: Any, cost: ProgramCost, *, tolerance: float = TOLERANCE) -> Acceptance:
    """Compares a compiled program with what was predicted of it.

    Args:
      compiled: of the program that the prediction is of; a `jax.stages.Compiled`.
      cost: the prediction.
      tolerance: by which share memory may differ.

    Returns:
      What differs.

    Raises:
      ProfileError: the compiler says nothing about the program's memory, or shows no text.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from vnode.analysis.program import inline
      >>> from vnode.partition import Machine
      >>> from vnode.partition.cost import program_cost
      >>> from vnode.spmd.sharding_flow import follow
      >>> from vnode.spmd.layout import from_spec
      >>> from vnode.spmd.sharded_program import over_mesh
      >>> traced = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((64, 512)), jnp.ones((512, 64)))
      >>> program, axes = inline(traced.jaxpr, traced.consts), {"x": 4}
      >>> layouts = [from_spec(P(None, "x"), (64, 512), axes), from_spec(P("x"), (512, 64), axes)]
      >>> flow = follow(program, layouts, axes)
      >>> run = over_mesh(flow, Mesh(np.array(jax.devices()[:4]), ("x",)))
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
      wanted: the collectives that are planned.
      predicted: the memory of one device.
      tolerance: by which share memory may differ.
      limit: bytes that one device may hold, if that is known.
      over_nodes: how often loops over a device's nodes run whose length the compiled text does not tell.
      platforms: what was predicted for, and what it was compiled for, if these differ.
      fetched: bytes that are to come from the host's memory in a step.

    Returns:
      What differs.

    Raises:
      ProfileError: the compiler says nothing about the program's memory, or shows no text.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or not text:
        raise ProfileError(
            layout_message(
                "the compiler does not say what the program takes.",
                facts=[f"memory analysis: {memory}", f"text: {len(text or '')} characters"],
                remedies=["compile for a platform that says so: CPU, GPU or TPU"],
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
"""How often a collective of a kind, with so many bytes, among so many devices runs."""


def count_planned(planned: Iterable[PlannedCollective]) -> Counts:
    """The collectives of a plan."""
    found: Counts = collections.Counter()
    for each in planned:
        transfer = each.transfer
        devices = 0 if transfer.kind == "permute" else transfer.devices
        found[transfer.kind, transfer.bytes, devices] += each.runs
    return found


def count_exchanges(several: Iterable[Exchange]) -> Counts:
    """Collectives that were written down."""
    found: Counts = collections.Counter()
    for each in several:
        found[each.kind, each.bytes, each.devices] += each.runs
    return found


def count_compiled(collectives_found: Iterable[HloCollective]) -> Counts:
    """The collectives of a compiled program; the arrays of an all-to-all are parts of one."""
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
"""As which kind, with how many times the bytes, exchanges among as many devices are known to be carried out."""

ROW = 128 * 4
"""Bytes of a row of a TPU's tiles in float32: parts that are no whole rows are not gathered, but summed."""


def match_rewrites(wanted: Counts, there: Counts) -> tuple[Counts, Counts, tuple[tuple[Exchange, Exchange], ...]]:
    """What is left of differences where planned exchanges are carried out as others that are known, and these pairs.

    All are paired at once, and as many as can be: one that is there as planned may still be another that is carried out
    as that, as where a compiler sends all in twice the bytes. Of pairings of as many, it is the one whose pairs are,
    added up, nearest to the beginning of `REWRITES`, before which is what is as planned.

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
    """As what an exchange may be carried out, with its rank: 0 as planned, then as `REWRITES` are ordered."""
    kind, n, devices = planned
    found = {planned: 0}
    for rank, (before, after, factor) in enumerate(REWRITES, 1):
        rows = (before, after) == ("all-gather", "all-reduce") and not n % (ROW * max(devices, 1))
        if before == kind and not rows:
            found.setdefault((after, int(n * factor), devices), rank)
    return found


def bytes_by_kind(counts: Counts) -> dict[str, int]:
    """Bytes by kind."""
    found: dict[str, int] = {}
    for (kind, n, _), runs in sorted(counts.items()):
        found[kind] = found.get(kind, 0) + n * runs
    return found


def sorted_exchanges(counts: Counts) -> tuple[Exchange, ...]:
    """The largest first."""
    found = [Exchange(kind, n, devices, runs) for (kind, n, devices), runs in counts.items()]
    return tuple(sorted(found, key=lambda each: (-each.bytes * each.runs, str(each))))
