"""Programs that hold less for their backward pass, in loops and outside of them.

Knows both ways to compute something again, and the one to put it on the host. Must not know who decides what is
recomputed, or moved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vnode.analysis.program import Program, ResultIndex
from vnode.analysis.scan_rewriting import open_loop, saved_carries
from vnode.errors import PartitionError
from vnode.operators.control_flow import Loop, region_of
from vnode.remat.offload import offload_residuals
from vnode.remat.recompute import TurningPoint, recompute_late
from vnode.remat.residual_remat import recompute_residuals


def apply_memory_plan(
    program: Program, several: Collection[ResultIndex], batched: Sequence[int], away: Collection[ResultIndex] = ()
) -> Program:
    """A program that computes some values again where they are read late, and has others on the host until then.

    Args:
      program: with calls inlined.
      several: results of loops that these stack (`vnode.remat.residual_remat`), and of other equations
        (`vnode.remat.recompute`): what is computed again.
      batched: the inputs that have examples, by number.
      away: results of loops that these stack, and of what loops carry, which stand for what turns begin with, where
        that is kept: what is on the host (`vnode.remat.offload`).

    Returns:
      Another program of the same inputs and outputs.

    Raises:
      PartitionError: some of them cannot be computed again, or moved.
    """
    count = len(program.equations)
    unknown = [made for made in (*several, *away) if not (0 <= made[0] < count)]
    if unknown:
        raise PartitionError(f"{unknown} are of none of the program's {count} equations")
    both = sorted({*several} & {*away})
    if both:
        raise PartitionError(f"{both} cannot be both computed again and on the host")
    stacked = {made for made in several if region_of(program.equations[made[0]]) is not None}
    others = set(several) - stacked
    less = recompute_residuals(program, stacked) if stacked else program
    less = offload_residuals(less, [locate_result(program, less, made) for made in away]) if away else less
    return (
        recompute_late(
            TurningPoint.from_program(less, batched, TurningPoint.from_program(program, batched).turn), others
        )
        if others
        else less
    )


def locate_result(before: Program, after: Program, made: ResultIndex) -> ResultIndex:
    """Where a result of a loop is after some of what loops stack is computed again.

    Args:
      before: the program as it was.
      after: the program, whose equations have the same numbers.
      made: a result that the loop stacks; or of what it carries, for what its turns begin with.

    Raises:
      PartitionError: it is not there: the equation is no loop, or does not keep that.
    """
    k, j = made
    eqn = after.equations[k]
    loop = region_of(eqn)
    found = None
    if isinstance(loop, Loop) and 0 <= j < len(loop.carried):
        found = next((i for i, n in saved_carries(*open_loop(eqn)).items() if n == j), None)
    elif isinstance(loop, Loop) and j < len(before.equations[k].outvars):
        var = before.equations[k].outvars[j]
        found = next((i for i, other in enumerate(eqn.outvars) if other is var), None)
    if found is None:
        raise PartitionError(f"no loop keeps {made} for later ones, so that it could be on the host")
    return k, found
