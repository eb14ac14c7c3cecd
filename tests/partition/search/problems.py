"""Problems at random, small enough to look at every assignment."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import strategies as st

from vnode.partition.searches import Edge, Problem


@st.composite
def problems(draw: st.DrawFn, points: int = 2, infinite: bool = True) -> Problem:
    """A problem with whole figures, so that sums are exact; sometimes with pairs that cannot be chosen."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.3, 0.7, 1.0]))
    never = draw(st.sampled_from([0.0, 0.3])) if infinite else 0.0
    edges = []
    for a, b in itertools.permutations(range(len(sizes)), 2):
        if generator.random() < share / 2:
            seconds = generator.integers(0, 15, (sizes[a], sizes[b])).astype(float)
            seconds[generator.random(seconds.shape) < never] = np.inf
            edges.append(Edge(a, b, seconds))
    seconds = tuple(generator.integers(0, 20, n).astype(float) for n in sizes)
    number = draw(st.integers(0, points))
    memory = tuple(generator.integers(0, 10, (number, n)).astype(float) for n in sizes)
    problem = Problem(seconds, tuple(edges), memory)
    if not number:
        return problem
    least = max(sum(held[r].min() for held in memory) for r in range(number))
    limit = draw(st.integers(max(int(least) - 2, 0), max(int(problem.most.max()), int(least))))
    return dataclasses.replace(problem, limit=float(limit))


def by_hand(problem: Problem) -> tuple[float, float]:
    """The least cost of what fits (infinite if nothing does) and the smallest footprint of a finite cost, by loops."""
    best, smallest = np.inf, np.inf
    for chosen in itertools.product(*map(range, problem.sizes)):
        cost = sum(problem.seconds[i][s] for i, s in enumerate(chosen))
        cost += sum(edge.seconds[chosen[edge.start], chosen[edge.end]] for edge in problem.edges)
        rows = problem.memory[0].shape[0]
        most = max([sum(problem.memory[i][r, s] for i, s in enumerate(chosen)) for r in range(rows)], default=0)
        smallest = min(smallest, most) if np.isfinite(cost) else smallest
        if most <= problem.limit:
            best = min(best, cost)
    return float(best), float(smallest)
