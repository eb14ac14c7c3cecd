"""A compiled program and its prediction -> whether it fits, and how far memory and exchanged bytes are off.

Knows compiled programs and predictions. Must not know how a split was found, or its purpose.

Compilers combine collectives, and carry out one kind as another. So only the bytes that a device sends are compared.
In a ring, these are the same for an all-reduce and for the reduce-scatter and all-gather that it consists of. Bytes by
kind are shown beside each other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vnode.partition.compiler.stats import CompiledStats, compiled_stats
from vnode.partition.cost.program_memory import Memory
from vnode.partition.cost.split_cost import ProgramCost
from vnode.partition.hlo import Collective, bytes_by_kind, merge
from vnode.show.drawable import Drawn
from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
from vnode.show.units import size

TOLERANCE = 0.35
"""The relative error up to which bytes count as predicted: estimates are off by that much."""


@dataclasses.dataclass(frozen=True, repr=False)
class Acceptance(Drawn):
    """A compiled program beside its prediction; print it, or let a notebook draw it.

    Attributes:
      predicted: the predicted memory of one device.
      collectives: the planned collectives.
      compiled: the compiler's figures.
      fetched: predicted bytes fetched from the host's memory in a step.
      tolerance: relative error up to which bytes count as predicted.
      limit: bytes that one device may hold, if known.
      platforms: the predicted platform and the compiled one, if they differ.
    """

    predicted: Memory
    collectives: tuple[Collective, ...]
    compiled: CompiledStats
    fetched: int = 0
    tolerance: float = TOLERANCE
    limit: int | None = None
    platforms: tuple[str, str] | None = None

    @property
    def memory(self) -> int:
        """Bytes of one device's memory that the compiled program needs, without gaps."""
        return self.compiled.memory

    @property
    def memory_error(self) -> float:
        """The prediction's relative deviation from `memory`."""
        return (self.predicted.total - self.memory) / max(self.memory, 1)

    @property
    def planned(self) -> dict[str, int]:
        """Planned bytes of one device's arrays in collectives, by kind."""
        return bytes_by_kind(self.collectives)

    @property
    def found(self) -> dict[str, int]:
        """Bytes of one device's arrays in the compiled program's collectives, by kind."""
        return bytes_by_kind(self.compiled.collectives)

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes that one device sends in a step, as planned and as compiled."""
        planned, found = self.collectives, self.compiled.collectives
        return sum(each.sent for each in planned), sum(each.sent for each in found)

    @property
    def fits(self) -> bool:
        """Whether the compiled program takes no more than the limit."""
        return self.limit is None or self.memory <= self.limit

    @property
    def memory_accepted(self) -> bool:
        """Whether memory is as predicted, up to the tolerance."""
        return self._is_near(self.predicted.total, self.memory)

    @property
    def exchange_accepted(self) -> bool:
        """Whether devices send as many bytes as planned, up to the tolerance."""
        return self._is_near(*self.sent)

    @property
    def host_accepted(self) -> bool:
        """Whether bytes of residuals on the host, and bytes read from there, are as predicted, up to the tolerance."""
        return not self.predicted.host or all(self._is_near(*pair) for pair in self._host().values())

    def _is_near(self, predicted: float, found: float) -> bool:
        return abs(predicted - found) <= self.tolerance * found

    def _host(self) -> dict[str, tuple[int, int]]:
        """Bytes in host memory, and bytes fetched from it, as planned and as compiled."""
        return {
            "on the host": (self.predicted.host, self.compiled.host),
            "from the host": (self.fetched, self.compiled.fetched),
        }

    @property
    def accepted(self) -> bool:
        """Whether it fits, and memory, exchanged bytes and host memory are all as planned."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """The differences that prevent acceptance; empty if it is accepted."""
        found = []
        if not self.exchange_accepted:
            planned, there = map(size, map(round, self.sent))
            found.append(f"each device sends {there} a step; planned: {planned}")
        if not self.memory_accepted:
            side = "above" if self.memory_error > 0 else "below"
            found.append(f"it takes {size(self.memory)}; the prediction is {abs(self.memory_error):.0%} {side} that")
        if self.limit is not None and not self.fits:
            found.append(f"it takes {size(self.memory)}, more than the limit of {size(self.limit)}")
        if not self.host_accepted:
            (wanted, held), (wanted_read, read) = self._host().values()
            there = f"on the host {size(held)} of residuals, {size(read)} read"
            found.append(f"{there}; planned: {size(wanted)} of residuals, {size(wanted_read)} read")
        return tuple(found)

    @property
    def advice(self) -> tuple[str, ...]:
        """Remedies; empty if it is accepted."""
        found: list[str] = []
        if not self.accepted and self.platforms is not None:
            wanted, given = self.platforms
            there = "; docs/plans.md says where to get a TPU's without one" * (wanted == "tpu")
            found.append(f"compile it for {wanted}, as predicted, not for {given}: plan.accept(devices){there}")
        if self.limit is not None and not self.fits:
            found.append(f"search again with memory={int(self.limit * self.predicted.total / self.memory)}")
        elif self.limit is not None and not self.memory_accepted:
            found.append(f"it still fits in {size(self.limit)}")
        if self.limit is not None and self.memory <= self.limit < self.memory + self.compiled.gaps:
            found.append(
                f"with gaps between arrays it takes {size(self.memory + self.compiled.gaps)}, more than the limit of "
                f"{size(self.limit)}; for a device that is full, the compiler leaves fewer gaps"
            )
        if not self.exchange_accepted:
            found.append("time its steps before relying on it: the predicted time is that of the planned collectives")
        return tuple(found)

    def page(self) -> Page:
        """The report."""
        said = "; ".join(self.reasons) or "memory and exchanged bytes as predicted"
        blocks: list[Facts | Table] = [self._memory()]
        if self.planned or self.found:
            blocks.insert(0, self._exchange())
        if self.advice:
            blocks.insert(0, Facts(tuple(Fact("" if i else "what to do", text) for i, text in enumerate(self.advice))))
        return Page("accepted" if self.accepted else "not accepted", said, tuple(blocks))

    def _exchange(self) -> Table:
        def row(name: str, planned: float, found: float, as_expected: bool) -> tuple[Cell, ...]:
            off = f"{found - planned:+,.0f}" if found != planned else "as planned"
            return Cell(name), Cell(f"{planned:,.0f}"), Cell(f"{found:,.0f}"), Cell(off, quiet=as_expected)

        kinds = [(kind, self.planned.get(kind, 0), self.found.get(kind, 0)) for kind in {**self.planned, **self.found}]
        rows = [row(kind, planned, found, planned == found) for kind, planned, found in sorted(kinds)]
        rows.append(row("sent by each device", *self.sent, self.exchange_accepted))
        columns = (Column("collectives"), Column("planned", right=True), Column("compiled", right=True), Column(""))
        return Table("exchanged", columns, tuple(rows), "bytes of one device's arrays, by kind, and bytes sent in all")

    def _memory(self) -> Table:
        def row(name: str, planned: int, found: int) -> tuple[Cell, ...]:
            return Cell(name), Cell(size(planned)), Cell(size(found)), Cell("")

        p, c = self.predicted, self.compiled
        off = Cell(f"{self.memory_error:+.1%}", strong=not self.memory_accepted)
        rows = [
            row("arguments", p.arguments, c.arguments),
            row("results", p.outputs - p.aliased, c.outputs - c.aliased),
            row("temporary", p.temporaries, c.temporary),
            (*row("in all", p.total, self.memory)[:3], off),
        ]
        if c.gaps:
            rows.append((Cell("gaps between arrays"), Cell(""), Cell(size(c.gaps)), Cell("")))
        note = f"of one device; accepted up to {self.tolerance:.0%}"
        if p.host:
            rows += [row(name, *pair) for name, pair in self._host().items()]
            note += "; residuals on the host, and the bytes read from there in a step"
        columns = (
            Column("memory"),
            *(Column(name, right=True) for name in ("predicted", "compiled", "prediction off by")),
        )
        return Table("held", columns, tuple(rows), note)


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
      >>> from vnode.partition import accept
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from vnode.analysis.program import inline
      >>> from vnode.partition import Machine
      >>> from vnode.partition.cost.split_cost import program_cost
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
    fetched = sum(each.bytes * each.runs for each in cost.moves if each.from_host)
    return Acceptance(cost.memory, planned_collectives(cost), compiled_stats(compiled), fetched, tolerance)


def planned_collectives(cost: ProgramCost) -> tuple[Collective, ...]:
    """The collectives of a prediction, of all bodies of branches; equal ones as one."""
    transfers = [(each.transfer, each.runs) for each in (*cost.collectives, *cost.others)]
    return merge(Collective(t.kind, t.bytes, t.devices * (t.kind != "permute"), runs) for t, runs in transfers)
