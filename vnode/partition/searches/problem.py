"""Times, moves and memory of strategies -> the problem of choosing one strategy per operator.

Knows arrays of times and bytes. Must not know equations, layouts, machines, nor how it is searched.

The cost of an assignment is the sum of each operator's time and of each edge's. An edge's time is that of bringing one
operator's result into the form that the other reads: the model of Alpa (Zheng et al., OSDI 2022, section 4.2).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from vnode.errors import MemoryLimitError, SearchError

Array = np.ndarray
SLACK = 1e-9
"""The share by which a sum of bytes may exceed the limit, for rounding."""


@dataclasses.dataclass(frozen=True, eq=False)
class Edge:
    """The cost of a value that one operator hands to another.

    Attributes:
      start: the operator that makes the value.
      end: the operator that reads it.
      seconds: the time of the move, float64 ``[strategies of start, strategies of end]``; infinite where impossible.
    """

    start: int
    end: int
    seconds: Array


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Operators, their strategies, and the costs of choices.

    Several edges between the same two operators are summed into one, from the lower number to the higher. An edge from
    an operator to itself is added to the operator's times.

    Attributes:
      seconds: for each operator the time that each strategy takes in a step, float64 ``[strategies]``; infinite where
        the strategy is impossible.
      edges: the costs of handing values on.
      memory: for each operator the bytes that a strategy holds at each of several points of time, float64
        ``[points, strategies]``; empty by default.
      limit: the most bytes that there may be at any point.

    Raises:
      SearchError: the arrays do not fit together, or a figure is negative or not a number.

    Example:
      >>> move = np.array([[0.0, 3.0], [3.0, 0.0]])
      >>> problem = Problem((np.array([4.0, 2.0]), np.array([1.0, 2.0])), (Edge(0, 1, move),))
      >>> problem.cost([1, 1]), problem.cost([1, 0])
      (4.0, 6.0)
    """

    seconds: tuple[Array, ...]
    edges: tuple[Edge, ...] = ()
    memory: tuple[Array, ...] = ()
    limit: float = math.inf

    def __post_init__(self) -> None:
        seconds = [np.array(each, float) for each in self.seconds]
        for i, each in enumerate(seconds):
            if each.ndim != 1 or not each.size or not (each >= 0).all():
                raise SearchError(f"seconds[{i}]: expected the times of one or more strategies, 0 or more")
        pairs: dict[tuple[int, int], Array] = {}
        for k, edge in enumerate(self.edges):
            if not (0 <= edge.start < len(seconds) and 0 <= edge.end < len(seconds)):
                raise SearchError(f"edges[{k}]: there is no operator {max(edge.start, edge.end)}")
            moved = np.array(edge.seconds, float)
            if moved.shape != (seconds[edge.start].size, seconds[edge.end].size) or not (moved >= 0).all():
                raise SearchError(f"edges[{k}]: expected a time, 0 or more, for every two strategies")
            if edge.start == edge.end:
                seconds[edge.start] += moved.diagonal()
                continue
            key = min(edge.start, edge.end), max(edge.start, edge.end)
            pairs[key] = pairs.get(key, 0.0) + (moved if edge.start < edge.end else moved.T)
        memory = [np.array(each, float) for each in self.memory] or [np.zeros((0, s.size)) for s in seconds]
        if len(memory) != len(seconds):
            raise SearchError(f"memory: expected bytes of {len(seconds)} operators, not of {len(memory)}")
        for i, (each, times) in enumerate(zip(memory, seconds, strict=True)):
            points = memory[0].shape[0]
            if each.shape != (points, times.size) or not (np.isfinite(each) & (each >= 0)).all():
                raise SearchError(f"memory[{i}]: expected bytes, 0 or more, at {points} points for each strategy")
        if not self.limit >= 0:
            raise SearchError(f"limit: expected bytes, not {self.limit}")
        object.__setattr__(self, "seconds", tuple(seconds))
        object.__setattr__(self, "edges", tuple(Edge(i, j, m) for (i, j), m in sorted(pairs.items())))
        object.__setattr__(self, "memory", tuple(memory))

    @property
    def operators(self) -> int:
        """The number of operators."""
        return len(self.seconds)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of strategies of each operator."""
        return tuple(each.size for each in self.seconds)

    @property
    def bounded(self) -> bool:
        """Whether some assignment could exceed the memory limit."""
        return bool((self.most > self.limit).any())

    @functools.cached_property
    def most(self) -> Array:
        """The bytes at each point, if every operator took the strategy that holds most there."""
        if not self.memory:
            return np.zeros(0)
        return np.sum([each.max(axis=1) for each in self.memory], axis=0)

    def costs(self, strategies: Array) -> Array:
        """Seconds of several assignments, int ``[assignments, operators]``: float64 ``[assignments]``."""
        chosen = np.asarray(strategies)
        total = np.zeros(len(chosen))
        for i, each in enumerate(self.seconds):
            total += each[chosen[:, i]]
        for edge in self.edges:
            total += edge.seconds[chosen[:, edge.start], chosen[:, edge.end]]
        return total

    def footprints(self, strategies: Array) -> Array:
        """Bytes of several assignments, int ``[assignments, operators]``: float64 ``[assignments, points]``."""
        chosen = np.asarray(strategies)
        total = np.zeros((len(chosen), len(self.most)))
        for i, each in enumerate(self.memory):
            total += each[:, chosen[:, i]].T
        return total

    def cost(self, strategies: Sequence[int] | Array) -> float:
        """Seconds of one assignment, a strategy for each operator."""
        return float(self.costs(np.asarray(strategies)[None])[0])

    def footprint(self, strategies: Sequence[int] | Array) -> float:
        """The most bytes at any point; 0 if none are counted."""
        return float(self.footprints(np.asarray(strategies)[None])[0].max(initial=0))

    def fits(self, strategies: Sequence[int] | Array) -> bool:
        """Whether an assignment stays within the memory limit."""
        return self.footprint(strategies) <= self.limit * (1 + SLACK)

    def restricted(self, kept: Sequence[Array]) -> Problem:
        """The problem with some of the strategies, given as positions for each operator."""
        return Problem(
            tuple(each[k] for each, k in zip(self.seconds, kept, strict=True)),
            tuple(Edge(e.start, e.end, e.seconds[np.ix_(kept[e.start], kept[e.end])]) for e in self.edges),
            tuple(each[:, k] for each, k in zip(self.memory, kept, strict=True)),
            self.limit,
        )

    def tied(self, groups: Sequence[int]) -> Problem:
        """The problem in which operators of a group share one strategy.

        Args:
          groups: the number of each operator's group, from 0 without gaps.

        Returns:
          A problem with one operator for each group. A choice for a group costs as much as the same choice for each
          operator of the group costs here.

        Raises:
          SearchError: the operators of a group do not have equally many strategies.

        Example:
          >>> same = Problem((np.array([4.0, 2.0]), np.array([1.0, 2.0])), (Edge(0, 1, np.ones((2, 2))),)).tied([0, 0])
          >>> same.seconds
          (array([6., 5.]),)
        """
        members: list[list[int]] = [[] for _ in range(max(groups, default=-1) + 1)]
        for i, group in enumerate(groups):
            members[group].append(i)
        if len(groups) != self.operators or not all(members):
            raise SearchError("groups: expected a group for each operator, numbered without gaps")
        for k, several in enumerate(members):
            if len({self.seconds[i].size for i in several}) > 1:
                raise SearchError(f"group {k}: its operators do not have equally many strategies")
        return Problem(
            tuple(np.sum([self.seconds[i] for i in several], axis=0) for several in members),
            tuple(Edge(groups[e.start], groups[e.end], e.seconds) for e in self.edges),
            tuple(np.sum([self.memory[i] for i in several], axis=0) for several in members),
            self.limit,
        )

    def checked(self, strategies: Sequence[int] | Array) -> Array:
        """An assignment as an array, int64 ``[operators]``.

        Raises:
          SearchError: it is not an assignment.
        """
        chosen = np.asarray(strategies)
        if chosen.shape != (self.operators,) or (self.operators and chosen.dtype.kind not in "iu"):
            raise SearchError(f"expected a strategy for each of {self.operators} operators, as whole numbers")
        for i, (s, n) in enumerate(zip(chosen, self.sizes, strict=True)):
            if not 0 <= s < n:
                raise SearchError(f"operator {i} has strategies 0 to {n - 1}, not {s}")
        return chosen.astype(np.int64)

    def nothing_fits(self, smallest: float, *, proven: bool = True) -> MemoryLimitError:
        """The error for a problem that no assignment fits.

        Args:
          smallest: the smallest footprint, bytes.
          proven: whether `smallest` is proven; else it is the smallest that a search found.
        """
        over = smallest - self.limit
        which = "The smallest footprint that can be reached" if proven else "The smallest footprint that was found"
        return MemoryLimitError(
            "No choice of strategies fits in memory.",
            facts=[
                f"limit: {self.limit:.6g} bytes on each device",
                f"{which}: {smallest:.6g} bytes, {over:.6g} too many",
            ],
            remedies=["use more devices, or devices with more memory", "use more virtual nodes, or keep less"],
        )


Cost = Callable[[Array], float]
"""The seconds of an assignment, int ``[operators]``, however they are found: a simulator's time instead of the sum."""
