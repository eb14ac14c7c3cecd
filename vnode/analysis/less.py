"""Programs that keep less for their backward pass, in loops and outside of them.

Knows both ways to compute something again. Must not know who decides what is recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vnode.analysis.again import computed_again
from vnode.analysis.late import Late, Made, computed_late
from vnode.analysis.program import Program
from vnode.errors import PartitionError
from vnode.operators.control import region_of


def keeping_less(program: Program, several: Collection[Made], batched: Sequence[int]) -> Program:
    """A program that computes some values again where they are read late.

    Args:
      program: with calls inlined.
      several: results of loops that these stack (`vnode.analysis.again`), and of other equations
        (`vnode.analysis.late`).
      batched: the inputs that have examples, by number.

    Returns:
      Another program of the same inputs and outputs.

    Raises:
      PartitionError: some of them cannot be computed again.
    """
    count = len(program.equations)
    unknown = [made for made in several if not (0 <= made[0] < count)]
    if unknown:
        raise PartitionError(f"{unknown} are of none of the program's {count} equations")
    stacked = {made for made in several if region_of(program.equations[made[0]]) is not None}
    others = set(several) - stacked
    less = computed_again(program, stacked) if stacked else program
    return computed_late(Late.of(less, batched, Late.of(program, batched).turn), others) if others else less
