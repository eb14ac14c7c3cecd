"""A program and a memory plan -> a program that recomputes or offloads the planned values before its backward pass.

Knows both ways to recompute values, and the one to offload them. Must not know who decides what is recomputed or
offloaded.

    h = f(x); ...; dx = df(h)   ->   h = f(x); ...; h' = f(x); dx = df(h')          h recomputed where it is read late
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
    program: Program,
    recomputed: Collection[ResultIndex],
    batched: Sequence[int],
    offloaded: Collection[ResultIndex] = (),
) -> Program:
    """Rewrites a program to recompute some values where they are read late, and to offload others to the host.

    Args:
      program: with calls inlined.
      recomputed: the values to recompute: stacked results of loops (`vnode.remat.residual_remat`), and results of other
        equations (`vnode.remat.recompute`).
      batched: the numbers of the batched inputs.
      offloaded: the values to offload (`vnode.remat.offload`): stacked results of loops, and carries of loops. A
        carry stands for its saved values of all iterations.

    Returns:
      Another program of the same inputs and outputs.

    Raises:
      PartitionError: some of them cannot be recomputed or offloaded.
    """
    count = len(program.equations)
    unknown = [index for index in (*recomputed, *offloaded) if not (0 <= index[0] < count)]
    if unknown:
        raise PartitionError(f"the program has {count} equations, none numbered {unknown}")
    both = sorted({*recomputed} & {*offloaded})
    if both:
        raise PartitionError(f"{both} cannot be both recomputed and offloaded")
    stacked = {index for index in recomputed if region_of(program.equations[index[0]]) is not None}
    others = set(recomputed) - stacked
    rewritten = recompute_residuals(program, stacked) if stacked else program
    if offloaded:
        rewritten = offload_residuals(rewritten, [locate_result(program, rewritten, index) for index in offloaded])
    if not others:
        return rewritten
    turn = TurningPoint.from_program(program, batched).turn  # equations have the same numbers in both programs
    return recompute_late(TurningPoint.from_program(rewritten, batched, turn), others)


def locate_result(before: Program, after: Program, made: ResultIndex) -> ResultIndex:
    """Finds a loop's stacked result in a program in which other stacked results are recomputed.

    Args:
      before: the original program.
      after: the rewritten program, whose equations have the same numbers.
      made: a stacked result; or a carry, for its saved value of every iteration.

    Returns:
      The equation's number, and the number of the result in the rewritten program.

    Raises:
      PartitionError: the equation is no loop, or does not keep the value.
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
        raise PartitionError(f"{made} is not a residual of a loop, so it cannot be offloaded")
    return k, found
