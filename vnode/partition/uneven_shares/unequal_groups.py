"""A program and two unequal groups of devices -> the problem that AccPar's search solves.

Knows programs as problems, kinds of devices, and what groups share. Must not know how shares are found.

AccPar writes each group's time for a share x of an equation, and the bytes that it receives, as polynomials of x (Song
et al., HPCA 2020, sections 4 and 5; `vnode.partition.uneven_shares.accpar`). Here they follow from the same strategies
and layouts as for equal devices. A divided equation takes a group its share of the whole time; an undivided one takes
the whole time. For a value of S bytes, a group receives S if it is reduced, (1 - x) S if the group lacks a part, and
x (1 - x) S if the value is divided along another dimension. Times are predicted and shares simulated;
`vnode.partition.uneven_shares.carried_shares` carries them out as far as possible.
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
from vnode.partition.searches.flattened_program import has_own_strategy
from vnode.partition.searches.ilp_formulation import Search, as_problem
from vnode.partition.searches.problem import Array
from vnode.partition.uneven_shares.accpar import Cut, SharedEdge
from vnode.spmd.layout import Layout
from vnode.spmd.op_sharding import OpSharding, itemsize
from vnode.spmd.resharding import plan_resharding

AXES = {"groups": 2}

RECEIVED = {"all-reduce": 0, "reduce-scatter": 0, "all-gather": 1, "all-to-all": 2}
"""The part of a value that a group receives in a move: all, the missing part, or the crossing part."""


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
      >>> from vnode.partition.uneven_shares.accpar import shared
      >>> traced = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8192, 4096)), jnp.ones((4096, 4096)))
      >>> groups = [Group(kind_named(name), 4, 1e15) for name in ("v5e", "v5p")]
      >>> _, cut = between(inline(traced.jaxpr, traced.consts), groups)
      >>> 0.2 < shared(cut).share < 0.4  # 197 of 197 + 459 Tflop/s
      True
    """
    if len(groups) != 2 or any(each.count < 1 or not each.bandwidth > 0 for each in groups):
        raise SearchError("groups: expected two, each with devices and a bandwidth")

    def build_problem(compute: Timer, parts: tuple[float, float, float]) -> Search:
        return as_problem(program, AXES, _Counted(compute, parts), carried=carried)

    moved = [build_problem(_nothing, (float(k == 0), float(k == 1), float(k == 2))) for k in range(3)]
    divided = [build_problem(_timed(each, 1.0, 0.0), (0.0, 0.0, 0.0)) for each in groups]
    whole = [build_problem(_timed(each, 0.0, 1.0), (0.0, 0.0, 0.0)) for each in groups]
    rate = max(1 / each.bandwidth for each in groups)
    halves = [_timed(each, 0.5, 1.0) for each in groups]
    search = build_problem(lambda eqn, choice: max(half(eqn, choice) for half in halves), (rate, rate / 2, rate / 4))
    rates = np.array([1 / each.bandwidth for each in groups])
    compute, fixed = [], []
    for i in range(search.problem.operators):
        compute.append(_finite(np.stack([each.problem.seconds[i] for each in divided])))
        received = np.sum([each.problem.seconds[i] for each in moved], axis=0)  # within: at most all of it
        fixed.append(_finite(np.stack([each.problem.seconds[i] for each in whole]) + rates[:, None] * received))
    edges = []
    for several in zip(*(each.problem.edges for each in moved), strict=True):
        received = np.stack([edge.seconds for edge in several])
        edges.append(SharedEdge(several[0].start, several[0].end, _finite(np.multiply.outer(rates, received))))
    return search, Cut(tuple(compute), tuple(fixed), tuple(edges))


Timer = Callable[[JaxprEqn, OpSharding], float]


class _Counted:
    """A cost model with a given time of equations, and a given price of each part of the received bytes."""

    def __init__(self, compute: Timer, parts: tuple[float, float, float]) -> None:
        self.compute, self.parts = compute, parts

    def compute_time(self, eqn: JaxprEqn, choice: OpSharding) -> float:
        return self.compute(eqn, choice)

    def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
        kinds = [RECEIVED[move.kind] for move in plan_resharding(start, end, shape, AXES, dtype) if move.kind != "cut"]
        return float(math.prod(shape) * itemsize(dtype) * sum(self.parts[kind] for kind in kinds))

    def bytes(self, layout: Layout, shape: Sequence[int], dtype: Any) -> float:
        return float(math.prod(layout.local_shape(shape, AXES)) * itemsize(dtype))


def _nothing(eqn: JaxprEqn, choice: OpSharding) -> float:
    return 0.0


def _timed(group: Group, divided: float, whole: float) -> Timer:
    """A group's seconds of an equation: with share `divided` if the groups divide it, else with share `whole`."""

    def seconds(eqn: JaxprEqn, choice: OpSharding) -> float:
        share = divided if choice.ways else whole
        if not share:
            return 0.0
        cost = described_cost(eqn, choice.description)
        if not has_own_strategy(choice.description):
            cost = dataclasses.replace(cost, read=0)  # fused with the equation that makes its operand
        return share * Roofline(launch=0).seconds(cost, group.kind) / group.count

    return seconds


def _finite(times: Array) -> Array:
    """Replaces infinite times by a finite time that no solution takes."""
    return np.where(np.isfinite(times), times, 1e9)
