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
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from vnode.partition.searches.problem import Array, Problem
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
    first = np.cumsum([0, *problem.sizes])
    times = [np.concatenate(problem.seconds)]
    rows, columns, signs, width, height = [], [], [], int(first[-1]), 0
    for edge in problem.edges:
        a, b = np.nonzero(np.isfinite(edge.seconds))
        number = width + np.arange(len(a))
        for own, operator in ((a, edge.start), (b, edge.end)):
            n = problem.sizes[operator]
            rows += [height + own, height + np.arange(n)]
            columns += [number, first[operator] + np.arange(n)]
            signs += [np.ones(len(a)), -np.ones(n)]
            height += n
        times.append(edge.seconds[a, b])
        width += len(a)
    constraints = []
    if height:
        ties = scipy.sparse.csr_array(
            (np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))), (height, width)
        )
        constraints.append(scipy.optimize.LinearConstraint(ties, 0, 0))
    constraints.append(scipy.optimize.LinearConstraint(one_strategy_rows(problem, width), 1, 1))
    over = problem.most > problem.limit
    if over.any():
        unit = SCALE / problem.limit if problem.limit else 1.0
        held = scipy.sparse.csr_array(np.concatenate(problem.memory, axis=1)[over] * unit)
        held = scipy.sparse.hstack([held, scipy.sparse.csr_array((int(over.sum()), width - sum(problem.sizes)))])
        constraints.append(scipy.optimize.LinearConstraint(held, -np.inf, problem.limit * unit))
    cost = np.concatenate(times)
    unit = SCALE / scale if scale > 0 else 1.0
    upper = np.isfinite(cost).astype(float)
    whole = np.zeros(width)
    whole[: first[-1]] = 1
    return solve(problem, np.where(upper > 0, cost, 0) * unit, whole, upper, constraints, gap, seconds, pause, 1 / unit)


def least_memory(problem: Problem, seconds: float, pause: Callable[[], None]) -> Solved:
    """The assignment of smallest footprint among those of finite cost; arguments as for `least_time`."""
    total = sum(problem.sizes)
    first = np.cumsum([0, *problem.sizes])
    unit = SCALE / problem.limit if problem.limit else 1.0
    held = np.concatenate(problem.memory, axis=1) * unit
    most = scipy.sparse.hstack([scipy.sparse.csr_array(held), -np.ones((len(held), 1))])
    constraints = [
        scipy.optimize.LinearConstraint(one_strategy_rows(problem, total + 1), 1, 1),
        scipy.optimize.LinearConstraint(most, -np.inf, 0),
    ]
    for edge in problem.edges:
        never = ~np.isfinite(edge.seconds)
        for s in np.flatnonzero(never.any(axis=1)):  # a strategy that is impossible, alone or with another
            row = np.zeros(total + 1)
            row[first[edge.start] + s] = 1
            row[first[edge.end] + np.flatnonzero(never[s])] = 1
            constraints.append(scipy.optimize.LinearConstraint(row, -np.inf, 1))
    upper = np.append(np.isfinite(np.concatenate(problem.seconds)).astype(float), np.inf)
    cost, whole = np.append(np.zeros(total), 1.0), np.append(np.ones(total), 0.0)
    return solve(problem, cost, whole, upper, constraints, 1e-6, seconds, pause, 1 / unit)


def one_strategy_rows(problem: Problem, width: int) -> Any:
    """The rows that say that each operator has one strategy."""
    total = sum(problem.sizes)
    owner = np.repeat(np.arange(problem.operators), problem.sizes)
    return scipy.sparse.csr_array((np.ones(total), (owner, np.arange(total))), (problem.operators, width))


def solve(
    problem: Problem,
    cost: Array,
    whole: Array,
    upper: Array,
    constraints: list[Any],
    gap: float,
    seconds: float,
    pause: Callable[[], None],
    unit: float,
) -> Solved:
    """Solves a program."""
    options: dict[str, Any] = {"mip_rel_gap": gap}
    if math.isfinite(seconds):
        options["time_limit"] = max(seconds, POLL)
    bounds = scipy.optimize.Bounds(0, upper)  # pyright: ignore[reportArgumentType]
    result = milp(cost, whole, bounds, constraints, options, pause)
    if result.status == 2:
        return Solved(None, math.inf)
    bound = getattr(result, "mip_dual_bound", None)
    bound = bound * unit if bound is not None and math.isfinite(bound) else 0.0
    if result.x is None:
        return Solved(None, bound)
    first = np.cumsum([0, *problem.sizes])
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
    """Runs `scipy.optimize.milp` in a thread, so that this one receives Ctrl-C.

    Args:
      cost: the objective, float ``[variables]``.
      whole: 1 for variables that have to be whole numbers, ``[variables]``.
      bounds: the bounds of variables.
      constraints: the rows.
      options: the solver's options.
      pause: called now and then while the solver runs; may raise.
    """
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
