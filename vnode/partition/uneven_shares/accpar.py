"""Two groups of unequal devices -> AccPar's strategies, and the share of every operator that the first group computes.

Knows the cost of operators on either of two groups, as a function of the share. Must not know equations or machines.

Source: Song, Chen, Zhuo, Qian, Li, Chen, "AccPar: Tensor partitioning for heterogeneous deep learning accelerators"
(HPCA 2020), sections 4 and 5. A group with share x of an operator computes for x of the time of the whole. It receives
partial sums, whose size does not depend on the share. Between two operators it receives the part of a tensor that it
lacks: a share 1 - x or x (1 - x). The share is the one with which both groups take equally long. A dynamic program
chooses dimensions for the last share, in turns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from vnode.errors import SearchError
from vnode.partition.searches.elimination import Elimination
from vnode.partition.searches.problem import Array, Edge

TURNS = 20
"""The most turns of choosing dimensions and the share."""


@dataclasses.dataclass(frozen=True, eq=False)
class SharedEdge:
    """The bytes that a group receives between two operators, in seconds.

    Attributes:
      start: the operator that makes the value.
      end: the operator that reads it.
      seconds: for each group, float64 ``[2, 3, strategies of start, strategies of end]``: a constant, and the factors
        of 1 - x and of x (1 - x).
    """

    start: int
    end: int
    seconds: Array


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Operators that two groups of devices share.

    Attributes:
      compute: for each operator the seconds that each group would take for the whole, float64 ``[2, strategies]``.
      fixed: for each operator the seconds that a group takes at any share, float64 ``[2, strategies]``.
      edges: the edges between operators.
    """

    compute: tuple[Array, ...]
    fixed: tuple[Array, ...]
    edges: tuple[SharedEdge, ...] = ()

    def __post_init__(self) -> None:
        for i, (a, b) in enumerate(zip(self.compute, self.fixed, strict=True)):
            if a.shape != b.shape or a.ndim != 2 or a.shape[0] != 2 or not ((a >= 0).all() and (b >= 0).all()):
                raise SearchError(f"operator {i}: expected times, 0 or more, of two groups for each strategy")
        for k, e in enumerate(self.edges):
            if e.seconds.shape != (2, 3, self.compute[e.start].shape[1], self.compute[e.end].shape[1]):
                raise SearchError(f"edges[{k}]: expected three times of two groups for every two strategies")

    def polynomials(self, strategies: Array) -> Array:
        """Seconds of each group by the first one's share x: the factors of 1, x and x^2, float64 ``[2, 3]``."""
        scaled = sum(c[:, s] for c, s in zip(self.compute, strategies, strict=True)) + np.zeros(2)
        fixed = sum(c[:, s] for c, s in zip(self.fixed, strategies, strict=True)) + np.zeros(2)
        moved = sum((e.seconds[:, :, strategies[e.start], strategies[e.end]] for e in self.edges), np.zeros((2, 3)))
        (c0, c1), (f0, f1), (m0, m1) = scaled, fixed, moved
        first = [f0 + m0[0] + m0[1], c0 - m0[1] + m0[2], -m0[2]]
        second = [f1 + c1 + m1[0], -c1 + m1[1] + m1[2], -m1[2]]  # its share is 1 - x
        return np.array([first, second])

    def seconds(self, strategies: Array, share: float) -> float:
        """Seconds of the slower group."""
        return float((self.polynomials(strategies) @ [1, share, share**2]).max())


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The division of operators between two groups.

    Attributes:
      strategies: int64 ``[operators]``.
      share: the first group's share.
      seconds: the slower group's seconds.
      equal: the seconds if each group had half, with the best strategies for that.
    """

    strategies: Array
    share: float
    seconds: float
    equal: float


def balanced(cut: Cut, strategies: Array) -> float:
    """The share of the first group at which the slower group takes the least time.

    Example:
      >>> alone = Cut((np.array([[3.0], [1.0]]),), (np.zeros((2, 1)),))  # the second group is three times as fast
      >>> balanced(alone, np.array([0]))
      0.25
    """
    first, second = cut.polynomials(strategies)
    found = [0.0, 1.0, *np.roots((first - second)[::-1])]
    found += [-p[1] / (2 * p[2]) for p in (first, second) if p[2]]
    shares = [float(x.real) for x in np.asarray(found, complex) if abs(x.imag) < 1e-12 and 0 <= x.real <= 1]
    return min(shares, key=lambda share: cut.seconds(strategies, share))


def shared(cut: Cut) -> Shared:
    """Chooses strategies, and the share of the first group.

    Args:
      cut: operators and groups.

    Example:
      >>> alone = Cut((np.array([[3.0, 9.0], [1.0, 3.0]]),), (np.zeros((2, 2)),))
      >>> found = shared(alone)
      >>> found.strategies, found.share, found.seconds, found.equal
      (array([0]), 0.25, 0.75, 1.5)
    """
    sizes = [c.shape[1] for c in cut.compute]
    half = strategies_at(cut, sizes, 0.5)
    equal = cut.seconds(half, 0.5)
    best = Shared(half, 0.5, equal, equal)
    rates = [1 / max(float(sum(c[g].min() for c in cut.compute)), 1e-300) for g in range(2)]
    for share in (rates[0] / sum(rates), 0.5):
        for _ in range(TURNS):
            strategies = strategies_at(cut, sizes, share)
            again = balanced(cut, strategies)
            seconds = cut.seconds(strategies, again)
            if seconds < best.seconds:
                best = Shared(strategies, again, seconds, equal)
            if math.isclose(again, share):
                break
            share = again
    return best


def strategies_at(cut: Cut, sizes: Sequence[int], share: float) -> Array:
    """The strategies that are best for both groups together at a share."""
    own = np.array([share, 1 - share])[:, None]
    times = [(c * own + f).sum(axis=0) for c, f in zip(cut.compute, cut.fixed, strict=True)]
    terms = np.stack([np.ones(2), 1 - own[:, 0], own[:, 0] * (1 - own[:, 0])], axis=1)
    edges = [Edge(e.start, e.end, np.einsum("gm,gmst->st", terms, e.seconds)) for e in cut.edges]
    return Elimination(sizes, edges).least(times)[1]
