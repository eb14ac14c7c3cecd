"""A program and two groups of unequal devices -> AccPar's strategies, and the share that the first group computes.

Knows programs as problems, kinds of devices, and elimination. Must not know how shares are carried out.

Source: Song, Chen, Zhuo, Qian, Li, Chen, "AccPar: Tensor partitioning for heterogeneous deep learning accelerators"
(HPCA 2020), sections 4 and 5. A group with share x of an operator computes for x of the time of the whole. It receives
partial sums, whose size does not depend on the share. Between two operators it receives the part of a tensor that it
lacks: a share 1 - x or x (1 - x). The share is the one with which both groups take equally long. A dynamic program
chooses dimensions for the last share, in turns.

The strategies and layouts are those of equal devices. An undivided equation takes a group the whole time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from vnode.analysis.program import Program
from vnode.errors import SearchError
from vnode.operators.cost import described_cost
from vnode.partition.cost import Roofline
from vnode.partition.machine import Kind
from vnode.partition.searches.elimination import Elimination
from vnode.partition.searches.flattened_program import has_own_strategy
from vnode.partition.searches.ilp_formulation import Search, as_problem
from vnode.partition.searches.problem import Array, Edge
from vnode.spmd.layout import Layout
from vnode.spmd.op_sharding import OpSharding, itemsize
from vnode.spmd.resharding import plan_resharding

TURNS = 20
"""The most turns of choosing dimensions and the share."""

AXES = {"groups": 2}

RECEIVED = {"all-reduce": 0, "reduce-scatter": 0, "all-gather": 1, "all-to-all": 2}
"""The part of a value that a group receives in a move: all, the missing part, or the crossing part."""

NEVER = 1e9
"""Seconds in place of infinite ones; no solution takes as long."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices of a kind that work as one.

    Attributes:
      kind: the kind of the devices.
      count: number of devices.
      bandwidth: bytes a second that the group receives from the other group.
    """

    kind: Kind
    count: int
    bandwidth: float


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


def between(
    program: Program, groups: Sequence[Group], *, carried: Mapping[int, int] | None = None
) -> tuple[Search, Cut]:
    """The problem of sharing a program between two groups of devices.

    Args:
      program: the program, with calls inlined.
      groups: the two groups.
      carried: for outputs, by number, the input that they become in the next step.

    Returns:
      The program as a problem over an axis of size two; and the `Cut` of the two groups, with the same strategies.

    Raises:
      SearchError: there are not two groups, or a group has no devices.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> from vnode.partition.machine.known_kinds import kind_named
      >>> traced = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8192, 4096)), jnp.ones((4096, 4096)))
      >>> groups = [Group(kind_named(name), 4, 1e15) for name in ("v5e", "v5p")]
      >>> _, cut = between(inline(traced.jaxpr, traced.consts), groups)
      >>> 0.2 < shared(cut).share < 0.4  # 197 of 197 + 459 Tflop/s
      True
    """
    if len(groups) != 2 or any(each.count < 1 or not each.bandwidth > 0 for each in groups):
        raise SearchError("groups: expected two, each with devices and a bandwidth")

    def build_problem(compute: Timer, *parts: float) -> Search:
        return as_problem(program, AXES, _Counted(compute, parts), carried=carried)

    moved = [build_problem(lambda eqn, choice: 0.0, *np.eye(3)[k]) for k in range(3)]
    divided = [build_problem(_timed(each, 1.0, 0.0), 0.0, 0.0, 0.0) for each in groups]
    whole = [build_problem(_timed(each, 0.0, 1.0), 0.0, 0.0, 0.0) for each in groups]
    rates = np.array([1 / each.bandwidth for each in groups])
    halves = [_timed(each, 0.5, 1.0) for each in groups]
    parts = rates.max() * np.array([1.0, 0.5, 0.25])
    search = build_problem(lambda eqn, choice: max(half(eqn, choice) for half in halves), *parts)
    compute, fixed = [], []
    for i in range(search.problem.operators):
        compute.append(_finite([each.problem.seconds[i] for each in divided]))
        received = np.sum([each.problem.seconds[i] for each in moved], axis=0)  # within: at most all of it
        fixed.append(_finite([each.problem.seconds[i] for each in whole] + rates[:, None] * received))
    edges = []
    for several in zip(*(each.problem.edges for each in moved), strict=True):
        received = np.multiply.outer(rates, [edge.seconds for edge in several])
        edges.append(SharedEdge(several[0].start, several[0].end, _finite(received)))
    return search, Cut(tuple(compute), tuple(fixed), tuple(edges))


Timer = Callable[[JaxprEqn, OpSharding], float]


class _Counted:
    """A cost model with a given time of equations, and a given price of each part of the received bytes."""

    def __init__(self, compute: Timer, parts: Sequence[float]) -> None:
        self.compute, self.parts = compute, parts

    def compute_time(self, eqn: JaxprEqn, choice: OpSharding) -> float:
        return self.compute(eqn, choice)

    def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
        kinds = [RECEIVED[move.kind] for move in plan_resharding(start, end, shape, AXES, dtype) if move.kind != "cut"]
        return float(math.prod(shape) * itemsize(dtype) * sum(self.parts[kind] for kind in kinds))

    def bytes(self, layout: Layout, shape: Sequence[int], dtype: Any) -> float:
        return float(math.prod(layout.local_shape(shape, AXES)) * itemsize(dtype))


def _timed(group: Group, divided: float, whole: float) -> Timer:
    """A group's seconds of an equation: with share `divided` if the groups divide it, else with share `whole`."""

    def seconds(eqn: JaxprEqn, choice: OpSharding) -> float:
        cost = described_cost(eqn, choice.description)
        if not has_own_strategy(choice.description):
            cost = dataclasses.replace(cost, read=0)  # fused with the equation that makes its operand
        share = divided if choice.ways else whole
        return share * Roofline(launch=0).seconds(cost, group.kind) / group.count

    return seconds


def _finite(times: Any) -> Array:
    return np.where(np.isfinite(times), times, NEVER)


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
    half = strategies_at(cut, 0.5)
    equal = cut.seconds(half, 0.5)
    best = Shared(half, 0.5, equal, equal)
    rates = [1 / max(float(sum(c[g].min() for c in cut.compute)), 1e-300) for g in range(2)]
    for share in (rates[0] / sum(rates), 0.5):
        for _ in range(TURNS):
            strategies = strategies_at(cut, share)
            again = balanced(cut, strategies)
            seconds = cut.seconds(strategies, again)
            if seconds < best.seconds:
                best = Shared(strategies, again, seconds, equal)
            if math.isclose(again, share):
                break
            share = again
    return best


def strategies_at(cut: Cut, share: float) -> Array:
    """The strategies that are best for both groups together at a share."""
    own = np.array([share, 1 - share])
    times = [own @ c + f.sum(axis=0) for c, f in zip(cut.compute, cut.fixed, strict=True)]
    terms = np.stack([np.ones(2), 1 - own, own * (1 - own)], axis=1)
    edges = [Edge(e.start, e.end, np.einsum("gm,gmst->st", terms, e.seconds)) for e in cut.edges]
    return Elimination([len(each) for each in times], edges).least(times)[1]
