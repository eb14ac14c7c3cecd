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
      edges: the numbers of the edges in the table.
      messages: the numbers of the earlier buckets whose results are in the table.
      share: the share of the operator's own times that is in the table.
    """

    operator: int
    scope: Scope
    edges: tuple[int, ...]
    messages: tuple[int, ...]
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
        self.sizes, self.edges = sizes, edges
        self.order = smallest_first(sizes, edges)
        self.buckets: list[Bucket] = []
        self.of: list[list[int]] = [[] for _ in sizes]
        self._fill(entries)
        self.exact = all(len(several) == 1 for several in self.of)
        """Whether no operator's tables were divided, so that the bound is the least cost."""

    def _fill(self, entries: int) -> None:
        waiting: dict[tuple[str, int], Scope] = {
            ("edge", k): scope for k in range(len(self.edges)) if (scope := self._open(k))
        }
        holding: list[dict[tuple[str, int], None]] = [{} for _ in self.sizes]
        for key, scope in waiting.items():
            for i in scope:
                holding[i][key] = None
        for v in self.order:
            groups: list[tuple[set[int], list[tuple[str, int]]]] = []
            for key in sorted(holding[v], key=lambda key: -len(waiting[key])):
                scope = waiting[key]
                for union, members in groups:
                    if math.prod(self.sizes[i] for i in union.union(scope)) <= entries:
                        union.update(scope)
                        members.append(key)
                        break
                else:
                    groups.append(({v, *scope}, [key]))
            for union, members in groups or [({v}, [])]:
                bucket = Bucket(
                    v,
                    tuple(sorted(union)),
                    tuple(k for kind, k in members if kind == "edge"),
                    tuple(k for kind, k in members if kind == "message"),
                    1 / max(len(groups), 1),
                )
                for key in members:
                    for i in waiting.pop(key):
                        holding[i].pop(key)
                key = ("message", len(self.buckets))
                self.of[v].append(len(self.buckets))
                self.buckets.append(bucket)
                if bucket.rest:
                    waiting[key] = bucket.rest
                    for i in bucket.rest:
                        holding[i][key] = None

    def _spread(self, table: Array, scope: Scope, within: Scope) -> Array:
        """A table over some operators, broadcast over more."""
        return table.reshape([self.sizes[i] if i in scope else 1 for i in within])

    def _table(self, bucket: Bucket, times: Sequence[Array], messages: Sequence[Array | None]) -> Array:
        own = self._spread(times[bucket.operator] * bucket.share, (bucket.operator,), bucket.scope)
        parts = [self._spread(self.edges[k].seconds, self._open(k), bucket.scope) for k in bucket.edges]
        for k in bucket.messages:
            message = messages[k]
            assert message is not None
            parts.append(self._spread(message, self.buckets[k].rest, bucket.scope))
        table = np.zeros([self.sizes[i] for i in bucket.scope])
        for part in sorted([own, *parts], key=lambda part: part.size):
            table += part
        return table

    def _ends(self, k: int) -> Scope:
        return self.edges[k].start, self.edges[k].end

    def _open(self, k: int) -> Scope:
        """The operators of an edge that have more than one strategy."""
        return tuple(i for i in self._ends(k) if self.sizes[i] > 1)

    def _messages(self, times: Sequence[Array], pause: Callable[[], None]) -> list[Array]:
        messages: list[Array] = []
        for bucket in self.buckets:
            table = self._table(bucket, times, messages)
            messages.append(table.min(axis=bucket.scope.index(bucket.operator)))
            pause()
        return messages

    def _bound(self, messages: Sequence[Array]) -> float:
        total = sum(float(m) for m, bucket in zip(messages, self.buckets, strict=True) if not bucket.rest)
        return total + sum(float(e.seconds[0, 0]) for k, e in enumerate(self.edges) if not self._open(k))

    def least(self, times: Sequence[Array], pause: Callable[[], None] = lambda: None) -> tuple[float, Array]:
        """The least cost, and an assignment.

        Args:
          times: the times of each operator's strategies, float64.
          pause: called now and then; may raise.

        Returns:
          A lower bound of the cost, and an assignment. If `exact`, the assignment is the best one and has that cost.
        """
        messages = self._messages(times, pause)
        bound = self._bound(messages)
        chosen = np.zeros(len(self.sizes), np.int64)
        for v in reversed(self.order):
            total = times[v].copy()
            for k in self.of[v]:
                bucket = self.buckets[k]
                for e in bucket.edges:
                    a, b = self._ends(e)
                    seconds = self.edges[e].seconds
                    total += seconds[:, chosen[b]] if a == v else seconds[chosen[a]]
                for m in bucket.messages:
                    where = tuple(slice(None) if i == v else chosen[i] for i in self.buckets[m].rest)
                    total += messages[m][where]
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
