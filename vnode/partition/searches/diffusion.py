"""A problem -> a lower bound of its cost: times are moved between operators and their edges.

Knows problems. Must not know memory limits, nor who asks.

Times can move from an operator to its edges and back without changing the cost of any assignment. The sum of the
smallest entry of each table is a lower bound. Moving times along an order of the operators, forwards and backwards,
raises it: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (IEEE TPAMI 28, 2006),
section 4. Each step moves the least cost of an operator and all its edges to the edges ahead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vnode.partition.searches.problem import Array, Edge, Problem

SWEEPS = 60
"""The most sweeps, each forwards and backwards."""

SLOW = 1e-4
"""Sweeps end when two of them raise the bound by less than this share."""


def diffuse(problem: Problem, pause: Callable[[], None] = lambda: None) -> tuple[float, Problem]:
    """Moves times so that the smallest entries of the tables sum to a high lower bound.

    Args:
      problem: the problem.
      pause: called now and then; may raise.

    Returns:
      A lower bound of the cost, and a problem in which every assignment costs that much less.

    Example:
      >>> move = np.array([[0.0, 3.0], [3.0, 0.0]])
      >>> bound, rest = diffuse(Problem((np.array([4.0, 2.0]), np.array([1.0, 2.0])), (Edge(0, 1, move),)))
      >>> bound, rest.cost([1, 1]), rest.cost([0, 0])
      (4.0, 0.0, 1.0)
    """
    tables = [*problem.seconds, *(edge.seconds for edge in problem.edges)]
    dear = 10 * sum(x[np.isfinite(x)].max(initial=0.0) for x in tables)  # costs more than any assignment, but finite
    own = [np.where(np.isfinite(x), x, dear) for x in problem.seconds]
    edges = [np.where(np.isfinite(e.seconds), e.seconds, dear) for e in problem.edges]  # the times after moving
    near: list[list[tuple[int, int, int]]] = [[] for _ in own]  # edge, side, other operator
    for k, e in enumerate(problem.edges):
        near[e.start].append((k, 0, e.end))
        near[e.end].append((k, 1, e.start))

    def bound() -> float:
        return float(sum(x.min() for x in own) + sum(x.min() for x in edges))

    def move(i: int, ahead: int) -> None:
        """Gathers the least cost of an operator and its edges, and moves it to the edges ahead."""
        onwards = [(other - i) * ahead > 0 for _, _, other in near[i]]
        share = 1 / max(sum(onwards), len(onwards) - sum(onwards), 1)
        total = own[i]
        needs = [edges[k].min(axis=1 - side) for k, side, _ in near[i]]
        for need in needs:
            total = total + need
        for (k, side, _), need, goes in zip(near[i], needs, onwards, strict=True):
            edges[k] += _along((total * share if goes else 0.0) - need, side)
        own[i] = total * (1 - share * sum(onwards))

    best = last = bound()
    for _ in range(SWEEPS):
        for order, ahead in ((range(len(own)), 1), (range(len(own) - 1, -1, -1), -1)):
            for i in order:
                move(i, ahead)
            pause()
        best = bound()
        if best - last <= SLOW * abs(best):
            break
        last = best
    seconds = tuple(
        np.where(np.isfinite(a), np.maximum(b - b.min(), 0), np.inf) for a, b in zip(problem.seconds, own, strict=True)
    )
    rest = tuple(
        Edge(e.start, e.end, np.where(np.isfinite(e.seconds), np.maximum(x - x.min(), 0), np.inf))
        for e, x in zip(problem.edges, edges, strict=True)
    )
    return best, Problem(seconds, rest, problem.memory, problem.limit, problem.names)


def least_more(problem: Problem) -> list[Array]:
    """For each strategy, its own time plus the smallest entries of its edges: its least excess over the bound."""
    found = [x.copy() for x in problem.seconds]
    for e in problem.edges:
        found[e.start] += e.seconds.min(axis=1)
        found[e.end] += e.seconds.min(axis=0)
    return found


def _along(values: Array, side: int) -> Array:
    return values[:, None] if side == 0 else values[None]
