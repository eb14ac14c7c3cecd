"""A problem without a memory limit -> its least cost, found by eliminating one operator after another.

Knows times of strategies and edges. Must not know memory limits, nor why times are asked for.

Eliminating an operator finds its best strategy for every choice of its neighbours. This is the dynamic program over
graphs (bucket elimination: Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence
113, 1999). Graphs of models are long and narrow, so few neighbours are left at any time. Where one table would be too
large, the operator's tables are divided into several groups, and each group chooses the operator's strategy for itself.
The result is then a lower bound (mini-buckets: Dechter and Rish, Journal of the ACM 50, 2003).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from vnode.partition.searches.problem import Array, Edge

Scope = tuple[int, ...]

ENTRIES = 2_000_000
"""The most entries of a table: 16 MB."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One of the tables from which an operator is eliminated.

    Attributes:
      operator: the operator that is eliminated.
      scope: the operators of the table, in order; `operator` is one of them.
      parts: the numbers of the tables in it: of edges, then of the results of earlier buckets.
      share: the share of the operator's own times that is in the table.
    """

    operator: int
    scope: Scope
    parts: tuple[int, ...]
    share: float

    @property
    def rest(self) -> Scope:
        """The operators that the bucket's result depends on."""
        return tuple(i for i in self.scope if i != self.operator)


class Elimination:
    """An order in which a graph's operators are eliminated; the operators may have any times.

    Args:
      sizes: the number of strategies of each operator.
      edges: the edges between operators.
      entries: the most entries of a table.

    Example:
      >>> chain = Elimination([2, 2], [Edge(0, 1, np.array([[0.0, 3.0], [3.0, 0.0]]))])
      >>> chain.least([np.array([4.0, 2.0]), np.array([1.0, 2.0])])
      (4.0, array([1, 1]))
    """

    def __init__(self, sizes: Sequence[int], edges: Sequence[Edge], entries: int = ENTRIES) -> None:
        self.sizes, self.edges = sizes, len(edges)
        self.scopes: list[Scope] = [tuple(i for i in (e.start, e.end) if sizes[i] > 1) for e in edges]
        self.tables = [e.seconds.reshape([sizes[i] for i in s]) for e, s in zip(edges, self.scopes, strict=True)]
        self.order = smallest_first(sizes, edges)
        self.buckets: list[Bucket] = []
        self.of: list[list[Bucket]] = [[] for _ in sizes]
        self._fill(entries)
        self.exact = all(len(several) == 1 for several in self.of)
        """Whether no operator's tables were divided, so that the bound is the least cost."""

    def _fill(self, entries: int) -> None:
        holding: list[dict[int, None]] = [{} for _ in self.sizes]  # the tables that each operator is still in
        for number, scope in enumerate(self.scopes):
            for i in scope:
                holding[i][number] = None
        for v in self.order:
            groups: list[tuple[set[int], list[int]]] = []
            for number in sorted(holding[v], key=lambda number: -len(self.scopes[number])):
                scope = self.scopes[number]
                for union, members in groups:
                    if math.prod(self.sizes[i] for i in union.union(scope)) <= entries:
                        union.update(scope)
                        members.append(number)
                        break
                else:
                    groups.append(({v, *scope}, [number]))
            for union, members in groups or [({v}, [])]:
                parts = sorted(members, key=lambda number: number >= self.edges)
                bucket = Bucket(v, tuple(sorted(union)), tuple(parts), 1 / max(len(groups), 1))
                for number in members:
                    for i in self.scopes[number]:
                        holding[i].pop(number)
                for i in bucket.rest:
                    holding[i][len(self.scopes)] = None
                self.of[v].append(bucket)
                self.buckets.append(bucket)
                self.scopes.append(bucket.rest)

    def _table(self, bucket: Bucket, times: Sequence[Array], tables: Sequence[Array]) -> Array:
        """The sum of a bucket's tables, each broadcast over all its operators."""
        several = [(times[bucket.operator] * bucket.share, (bucket.operator,))]
        several += [(tables[number], self.scopes[number]) for number in bucket.parts]
        total = np.zeros([self.sizes[i] for i in bucket.scope])
        for table, scope in sorted(several, key=lambda each: each[0].size):
            total += table.reshape([self.sizes[i] if i in scope else 1 for i in bucket.scope])
        return total

    def least(self, times: Sequence[Array], pause: Callable[[], None] = lambda: None) -> tuple[float, Array]:
        """The least cost, and an assignment.

        Args:
          times: the times of each operator's strategies, float64.
          pause: called now and then; may raise.

        Returns:
          A lower bound of the cost, and an assignment. If `exact`, the assignment is the best one and has that cost.
        """
        tables = [*self.tables]
        for bucket in self.buckets:
            tables.append(self._table(bucket, times, tables).min(axis=bucket.scope.index(bucket.operator)))
            pause()
        bound = sum(float(table) for table, scope in zip(tables, self.scopes, strict=True) if not scope)
        chosen = np.zeros(len(self.sizes), np.int64)
        for v in reversed(self.order):
            total = times[v].copy()
            for number in (number for bucket in self.of[v] for number in bucket.parts):
                total += tables[number][tuple(slice(None) if i == v else chosen[i] for i in self.scopes[number])]
            chosen[v] = total.argmin()
        return bound, chosen


def smallest_first(sizes: Sequence[int], edges: Sequence[Edge]) -> list[int]:
    """The order that always eliminates next the operator whose table, over all its neighbours, is smallest."""
    near: list[set[int]] = [set() for _ in sizes]
    for edge in edges:
        if min(sizes[edge.start], sizes[edge.end]) > 1:
            near[edge.start].add(edge.end)
            near[edge.end].add(edge.start)
    weight = np.log(np.asarray(sizes, float))

    def table(i: int) -> float:
        return weight[i] + sum(weight[j] for j in near[i])

    costs = np.array([table(i) for i in range(len(sizes))])
    order = []
    for _ in sizes:
        v = int(costs.argmin())
        order.append(v)
        costs[v] = np.inf
        around = near[v]
        for i in around:
            near[i] |= around
            near[i] -= {i, v}
        for i in around:
            costs[i] = table(i)
    return order
