"""The answer of `check`: each array that a step returns, compared with the plain step's, and its bits everywhere.

Knows the comparison of each array, and how it is shown. Must not know steps, nor how it was found out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vnode.plan.check.arrays import DIFFERENT, EQUAL, MULTIPLE, ROUNDING, UNKNOWN, Leaf
from vnode.plan.check.plain import SAMPLES
from vnode.show.drawable import Drawn
from vnode.show.page import Cell, Column, Fact, Facts, Page, Table
from vnode.show.units import several

SHOWN = 16
"""Leaves in the table, those that are furthest from the plain step's first."""


@dataclasses.dataclass(frozen=True, repr=False)
class Check(Drawn):
    """The answer of `check`; print it.

    Attributes:
      name: of the step.
      leaves: what it returns, those that are furthest from the plain step's first.
      places: on which devices it ran, in words.
      promised: whether the step promises the same bits on all of them.
      repeatable: whether a second run on the first place gave the bits of the first.
      plain: why there is no plain step to compare with; empty if there is one.
      exact: whether the step means to equal the plain one: couplings that are estimated do not.
    """

    name: str
    leaves: tuple[Leaf, ...]
    places: tuple[str, ...]
    promised: bool
    repeatable: bool
    plain: str = ""
    exact: bool = True

    @property
    def equal(self) -> bool:
        """Whether every element is the plain step's up to rounding. False where that could not be found out."""
        return all(leaf.verdict in (EQUAL, ROUNDING) for leaf in self.leaves)

    @property
    def same_bits(self) -> bool:
        """Whether every bit is the same on all of the devices."""
        return self.repeatable and all(all(leaf.bits) for leaf in self.leaves)

    @property
    def ok(self) -> bool:
        """Whether the step may be trusted: equal to the plain one, and with the same bits if it promises them."""
        return self.equal and (self.same_bits or not self.promised)

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        wrong = [leaf for leaf in self.leaves if leaf.verdict == DIFFERENT]
        if wrong:
            first = f"NOT equal to the plain step in {len(wrong)} of {several(len(self.leaves), 'array')}"
        elif self.equal:
            exact = all(leaf.verdict == EQUAL for leaf in self.leaves)
            first = "equal to the plain step, " + ("bit for bit" if exact else "up to rounding")
        else:
            first = "not compared with the plain step"
        where = join_names(self.places)
        if not self.repeatable:
            return f"{first}; a second run on {self.places[0]} gave other bits"
        if len(self.places) == 1:
            return f"{first}; run on {where} only"
        return f"{first}; " + (f"the same bits on {where}" if self.same_bits else f"OTHER bits on {self.others}")

    @property
    def others(self) -> str:
        """The places whose bits are not those of the first."""
        differ = [p for i, p in enumerate(self.places) if not all(leaf.bits[i] for leaf in self.leaves)]
        return f"{join_names(differ)} than on {self.places[0]}"

    def page(self) -> Page:
        """The page that is drawn."""
        facts = [
            Fact("plain step", self.plain or "as written, compiled whole, on one device"),
            Fact(
                "rounding", f"{SAMPLES} runs of it with changed roundings", f"allowed: {MULTIPLE:g} times their effect"
            ),
            Fact("ran on", join_names(self.places), "and once more on the first"),
        ]
        if not self.promised:
            facts.append(Fact("", "reduction='fast' does not promise the same bits"))
        if not self.exact:
            facts.append(Fact("", "coupling='local' is not meant to equal the plain step"))
        columns = (
            Column("result", code=True, wide=True),
            Column("kind", code=True),
            Column("plain step"),
            Column("relative", right=True),
            Column("ulp", right=True),
            Column("bits"),
        )
        blocks: list[Any] = [Facts(tuple(facts))]
        rows = tuple(map(self._row, self.leaves[:SHOWN]))
        left = self.leaves[SHOWN:]
        rest = f"… and {several(len(left), 'array')} nearer to the plain step's" if left else ""
        note = "relative: largest difference over largest value; ulp: of each element"
        blocks.append(Table("What the step returns", columns, rows, note, rest))
        verdict = "ok" if self.ok else "NOT ok" if self.wrong else "not proven"
        return Page(f"{self.name}: {verdict}", self.summary, tuple(blocks))

    @property
    def wrong(self) -> bool:
        """Whether something is different that should not be."""
        return any(leaf.verdict == DIFFERENT for leaf in self.leaves) or (self.promised and not self.same_bits)

    def _row(self, leaf: Leaf) -> tuple[Cell, ...]:
        compared = leaf.verdict != UNKNOWN or leaf.ulps > 0
        verdict = leaf.verdict
        if leaf.verdict == ROUNDING:
            verdict = f"rounding x {leaf.rounding:.1f}"
        elif leaf.wrong:
            verdict += f" at {leaf.wrong:,} of {leaf.size:,}"
        differ = [p for p, same in zip(self.places, leaf.bits, strict=True) if not same]
        return (
            Cell(leaf.path),
            Cell(leaf.kind),
            Cell(verdict, leaf.note, strong=leaf.verdict == DIFFERENT, quiet=leaf.verdict == EQUAL),
            Cell(f"{leaf.relative:.0e}" if leaf.relative else "0" if compared else "-"),
            Cell(f"{leaf.ulps:,.0f}" if leaf.ulps < 1e6 else f"{leaf.ulps:.0e}") if compared else Cell("-"),
            Cell(f"DIFFERENT on {join_names(differ)}" if differ else "same", strong=bool(differ), quiet=not differ),
        )


def join_names(names: Sequence[str]) -> str:
    """Names in a row.

    >>> join_names(["1 cpu device", "2 cpu devices", "3 cpu devices"])
    '1, 2 and 3 cpu devices'
    """
    parts = [name.partition(" ") for name in names]
    if len({rest.removesuffix("s") for _, _, rest in parts}) == 1:
        numbers = [number for number, _, _ in parts]
        joined = ", ".join(numbers[:-1]) + (" and " if len(numbers) > 1 else "") + numbers[-1]
        return f"{joined} {parts[-1][2]}"
    return ", ".join(names)
