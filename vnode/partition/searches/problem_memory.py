"""A flat program -> the live values at each point: values between clusters, operands and results of loops.

Knows lists of equations, and where values are made. Must not know layouts, costs, nor strategies.

While a loop runs, its operands are in memory in the layout in which its bodies read them. The value that such an
operand was made of is in memory only before the loop. It may also be there anyway: as an argument, as an operand of an
outer loop, or for a later reader. Then the loop's operand takes memory only if its layout differs. A value that is
computed from constants wherever it is needed takes none.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jax.extend.core import Var

from vnode.operators.cost import all_bytes
from vnode.partition.searches.flattened_program import FlatProgram, LoopOrBranches, readers
from vnode.partition.searches.problem import Array

POINTS = 16
"""The number of points of time at which memory is counted."""


class DecidedBy(enum.Enum):
    """The choice that fixes how much memory a value takes."""

    LAYOUT = "its own"
    READERS = "that of those who read it, whose copies are made once, before all turns"
    NONE = "nobody's: what loops inside read is counted there, here it takes the least"


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """A live value.

    Attributes:
      var: the variable.
      first: the first node at which it is live.
      last: the last one.
      counts: the choice that fixes how much memory it takes.
      turns: how many copies are live at a time: slices of a scanned array.
      beside: a value that is live anyway; the span takes no memory if both have the same layout.
      copied: the value that it is a copy of, once for all iterations of a loop; copies of one layout share memory.
    """

    var: Var
    first: int
    last: int
    counts: DecidedBy = DecidedBy.LAYOUT
    turns: int = 1
    beside: Var | None = None
    copied: Var | None = None


def spans_of(flat: FlatProgram, made: Mapping[Var, int], replaced: Collection[Var] = ()) -> list[Span]:
    """The times at which values other than arguments are live.

    Args:
      flat: the program.
      made: values that a node makes and others read, with the number of that node.
      replaced: values that take the memory of an argument.
    """
    nodes = readers(flat.nodes)
    last = {var: max(n for n, _ in several) for var, several in nodes.items()}
    handed: set[Var] = set()
    same: dict[Var, LoopOrBranches] = {}  # loop-invariant operands
    for part in flat.parts:
        same.update(dict.fromkeys(part.reads.keys() - part.scanned - part.carried, part))
        for source in filter(None, part.reads.values()):
            handed.add(source)
            last[source] = max(last.get(source, -1), part.first - 1)
    last.update((atom, len(flat.nodes)) for atom in flat.program.outputs if isinstance(atom, Var))
    found = [Span(var, n, max(last.get(var, n), n)) for var, n in made.items() if var not in replaced]
    anyway = {*flat.program.inputs, *(var for part in flat.parts for var in part.reads)}

    def operand(part: LoopOrBranches, var: Var, source: Var | None) -> Span:
        if var in part.carried or source is None:
            return Span(var, part.first, part.last)
        outer, copied = part, source
        while copied in same:  # loop-invariant values are copied before the first iteration
            outer = same[copied]
            copied = outer.reads[copied]
        beside = source if source in anyway or last[source] > part.last else None
        turns = source.aval.shape[0] if var in part.scanned else 1
        counts = DecidedBy.LAYOUT if var in part.scanned else DecidedBy.READERS if var in nodes else DecidedBy.NONE
        return Span(var, outer.first, outer.last, counts, turns, beside, copied)

    for part in flat.parts:
        found += [operand(part, *each) for each in part.reads.items() if each[0] not in flat.constants_only]
        for var in part.makes:
            begins = part.first if var in part.stacked else part.last
            if var not in replaced:
                found.append(Span(var, begins, max(last.get(var, begins), begins)))
    return found


def points_of(spans: Sequence[Span], count: int) -> Array:
    """The nodes at which memory is counted: where most bytes live if nothing is divided, and evenly spaced ones."""
    change = np.zeros(count + 2)
    for span in spans:
        size = span.turns * all_bytes(span.var.aval)
        change[max(span.first, 0)] += size
        change[max(span.last, span.first, 0) + 1] -= size
    total = np.cumsum(change)[:count]
    return np.unique([int(total.argmax()), *np.linspace(0, count - 1, POINTS - 1).astype(int)])
