"""The entries of a report, as data: lines for accumulators, kept values and couplings; reports of passes.

Knows words and numbers. Must not know where they come from, nor which table they are in.
"""

from __future__ import annotations

import dataclasses

from vnode.report.sources import short_source

SHOWN = 12
"""The number of lines that are shown, the largest ones; all others are counted."""


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

    def __str__(self) -> str:
        return f"{self.what}, {short_source(self.where)}"


@dataclasses.dataclass(frozen=True)
class PassReport:
    """One pass over the nodes.

    Attributes:
      number: its place among the passes, from 0.
      level: how often sums were completed before what it reads. Several passes may have one level, or none.
      reads: the numbers of the passes whose results it needs.
      adds_only: whether it does nothing but add up large sums, from operands that the pass it reads has kept.
      equations: evaluated by every node.
      flops: scalar operations of all nodes together.
      accumulators: what is summed over nodes (or combined by another monoid).
      collected: what is kept of every node.
      sent: bytes that a device sends in the reduction across devices: a ring all-reduce's, or, in the order of a tree,
        of every block that a device holds a chunk to each, and a chunk of the total to each.
    """

    number: int
    level: int
    reads: tuple[int, ...]
    adds_only: bool
    equations: int
    flops: int
    accumulators: tuple[Line, ...]
    collected: tuple[Line, ...]
    sent: int
