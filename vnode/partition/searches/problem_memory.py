"""A program as one list -> the live values at each point: values between clusters, operands and results of loops.

Knows lists of equations, and where values are made. Must not know layouts, costs, nor strategies.

What a loop reads is in memory in the layout in which its bodies read it, while the loop runs; what that was made of
only before. If that is there anyway (an argument, what a loop around it reads, what is read again later), the loop's
own takes memory only as far as it lies otherwise. What is made of nothing, wherever it is needed, takes none.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jax.extend.core import Var

from vnode.partition.searches.flattened_program import FlatProgram, LoopOrBranches, readers, size_of
from vnode.partition.searches.problem import Array

POINTS = 16
"""Number of points of time at which memory is counted."""


class DecidedBy(enum.Enum):
    """Whose choice says how much memory a value takes."""

    LAYOUT = "its own"
    READERS = "that of those who read it, whose copies are made once, before all turns"
    NONE = "nobody's: what loops inside read is counted there, here it takes the least"


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """A value that is in memory for some time.

    Attributes:
      var: which.
      first: the node with which it begins.
      last: that with which it ends.
      counts: whose choice says how much it takes.
      turns: how many such are in memory at a time: slices of what is scanned.
      beside: what is there anyway, and is the same if it lies so.
      copied: what it is copied of, once for all turns of a loop; copies that lie alike are one.
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
      made: what nodes make and others read, with the numbers of these nodes.
      replaced: what takes the place of an argument.
    """
    nodes = readers(flat.nodes)
    last = {var: max(n for n, _ in several) for var, several in nodes.items()}
    handed: set[Var] = set()
    same: dict[Var, LoopOrBranches] = {}  # in each turn
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
        while copied in same:  # copies of what is the same in each turn are made before the first
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
    """The nodes at which memory is counted: that with most of it whole, and others at equal distances.

    Args:
      spans: what is in memory when.
      count: how many nodes there are.
    """
    change = np.zeros(count + 2)
    for span in spans:
        size = span.turns * size_of(span.var)
        change[max(span.first, 0)] += size
        change[max(span.last, span.first, 0) + 1] -= size
    total = np.cumsum(change)[:count]
    return np.unique([int(total.argmax()), *np.linspace(0, count - 1, POINTS - 1).astype(int)])
