"""A problem -> an integer program, which HiGHS solves.

Knows problems and `scipy.optimize.milp`. Must not know how problems were made smaller before, nor who asks.

There is one binary variable for each strategy, and one for each pair of strategies of an edge. The pair's variable is 1
if both are chosen: Alpa's program (Zheng et al., OSDI 2022, section 4.2). Pair variables may be fractional, since rows
tie their sums to the strategies' variables.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from vnode.partition.searches.problem import Array, Edge, Problem
from vnode.threads import background

SCALE = 1e4
"""The approximate largest sum of each row after scaling: HiGHS has absolute tolerances of 1e-6."""

POLL = 0.1
"""Seconds between two looks at whether the solver is done."""


@dataclasses.dataclass(frozen=True, eq=False)
class Solved:
    """The solution of an integer program.

    Attributes:
      strategies: int64 ``[operators]``; None if no assignment was found.
      bound: a lower bound of the objective; infinite if no assignment is possible.
    """

    strategies: Array | None
    bound: float


def variables(problem: Problem) -> int:
    """The number of variables of a problem's integer program."""
    return sum(problem.sizes) + sum(int(np.isfinite(edge.seconds).sum()) for edge in problem.edges)


def least_time(problem: Problem, scale: float, gap: float, seconds: float, pause: Callable[[], None]) -> Solved:
    """The assignment of least cost that fits.

    Args:
      problem: the problem.
      scale: roughly the least cost.
      gap: the relative gap at which the solver ends.
      seconds: the time after which the solver ends.
      pause: called now and then while the solver runs; may raise.
    """
    return minimize(problem, problem.edges, problem.limit, SCALE / scale if scale > 0 else 1.0, gap, seconds, pause)


def least_memory(problem: Problem, seconds: float, pause: Callable[[], None]) -> Solved:
    """The assignment of smallest footprint among those of finite cost; arguments as for `least_time`."""
    binding = [edge for edge in problem.edges if not np.isfinite(edge.seconds).all()]
    return minimize(problem, binding, math.inf, 0.0, 1e-6, seconds, pause)


def minimize(
    problem: Problem,
    edges: Sequence[Edge],
    limit: float,
    unit: float,
    gap: float,
    seconds: float,
    pause: Callable[[], None],
) -> Solved:
    """The assignment of least cost; other arguments as for `least_time`.

    Args:
      edges: the edges that count.
      limit: the most bytes that there may be at any point.
      unit: the factor that scales costs; with 0 the footprint is the cost.
    """
    first = np.cumsum([0, *problem.sizes])
    total = width = int(first[-1])
    owner = np.repeat(np.arange(problem.operators), problem.sizes)
    times, rows, columns, signs, height = [np.concatenate(problem.seconds)], [], [], [], 0
    for edge in edges:  # the pairs of a strategy sum to its own variable
        a, b = np.nonzero(np.isfinite(edge.seconds))
        for own, operator in ((a, edge.start), (b, edge.end)):
            n = problem.sizes[operator]
            rows += [height + own, height + np.arange(n)]
            columns += [width + np.arange(len(a)), first[operator] + np.arange(n)]
            signs += [np.ones(len(a)), -np.ones(n)]
            height += n
        times.append(edge.seconds[a, b])
        width += len(a)
    byte = SCALE / problem.limit if 0 < problem.limit < math.inf else 1.0
    held = np.concatenate(problem.memory, axis=1)[problem.most > (limit if unit else -1)] * byte
    once = scipy.sparse.csr_array((np.ones(total), (owner, np.arange(total))), (problem.operators, width + 1))
    beside = scipy.sparse.csr_array((len(held), width - total))  # the last variable is the footprint
    held = scipy.sparse.hstack([scipy.sparse.csr_array(held), beside, -np.ones((len(held), 1))])
    constraints = [scipy.optimize.LinearConstraint(once, 1, 1), scipy.optimize.LinearConstraint(held, -np.inf, 0)]
    if height:
        entries = np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))
        ties = scipy.sparse.csr_array(entries, (height, width + 1))
        constraints.append(scipy.optimize.LinearConstraint(ties, 0, 0))
    cost = np.concatenate(times)
    upper = np.append(np.isfinite(cost).astype(float), limit * byte)
    cost = np.append(np.where(np.isfinite(cost), cost, 0) * unit, 0.0 if unit else 1.0)
    whole = np.append(np.ones(total), np.zeros(width + 1 - total))
    options: dict[str, Any] = {"mip_rel_gap": gap}
    if math.isfinite(seconds):
        options["time_limit"] = max(seconds, POLL)
    bounds = scipy.optimize.Bounds(0, upper)  # pyright: ignore[reportArgumentType]
    result = milp(cost, whole, bounds, constraints, options, pause)
    if result.status == 2:
        return Solved(None, math.inf)
    bound = getattr(result, "mip_dual_bound", None)
    bound = bound / (unit or byte) if bound is not None and math.isfinite(bound) else 0.0
    if result.x is None:
        return Solved(None, bound)
    chosen = np.array([result.x[a:b].argmax() for a, b in itertools.pairwise(first)], np.int64)
    return Solved(chosen, bound)


def milp(
    cost: Array,
    whole: Array,
    bounds: scipy.optimize.Bounds,
    constraints: list[Any],
    options: dict[str, Any],
    pause: Callable[[], None],
) -> Any:
    """Runs `scipy.optimize.milp` in a thread, so that this one receives Ctrl-C; calls `pause`, which may raise."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(
                scipy.optimize.milp(cost, integrality=whole, bounds=bounds, constraints=constraints, options=options)
            )
        except BaseException as error:
            future.set_exception(error)

    background(work, "integer program")
    while True:
        try:
            return future.result(POLL)
        except concurrent.futures.TimeoutError:
            pause()
