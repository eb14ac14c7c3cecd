"""An assignment -> its seconds on a simulated timeline, where devices compute and exchange at the same time.

Knows programs as problems, and the simulator. Must not know how a search works, nor machines.

This is FlexFlow's task graph (Jia, Zaharia, Aiken, SysML 2019, section 5): one task for each equation, and one for each
value that moves. All devices do the same, so one stands for all. Equations follow each other on the device, exchanges
queue for the links, and both run at the same time. All iterations of a loop are one task for each of its equations. If
one operator changes its strategy, its tasks and those of its edges change; the timeline is simulated from the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import Literal, Var

from vnode.errors import SearchError
from vnode.partition.searches.ilp_formulation import Handover, Search
from vnode.partition.searches.problem import Array
from vnode.partition.simulator import Builder, Edit, Timeline, picoseconds, resimulate, simulate

DEVICE, LINKS = 0, 1

Part = tuple[int, int] | tuple[int, int, int] | Handover | int
"""A task's key: a node (cluster, position), an operand brought to it (cluster, position, operand), a move from one
cluster or value to another, or the arrival of a value."""


class Simulated:
    """The seconds of a problem's assignments, by simulation; a `vnode.partition.searches.Walk`.

    Args:
      search: the program as a problem.

    Attributes:
      timeline: the timeline of the last assignment.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> from vnode.partition.machine import Machine
      >>> from vnode.partition.searches import as_problem, exhaustive, of_machine
      >>> traced = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(jnp.ones((512, 256)), jnp.ones((256, 256)))
      >>> model = of_machine(Machine.tpu("v5e:2x2"), {"x": 4})
      >>> search = as_problem(inline(traced.jaxpr, traced.consts), {"x": 4}, model)
      >>> found = exhaustive(search.problem, cost=Simulated(search).start)
      >>> found.cost <= search.problem.cost(found.strategies) * 1.001
      True
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.parts: list[Part] = []
        self.waits: list[list[int]] = []
        self.of: list[list[int]] = [[] for _ in range(len(search.clusters) + len(search.values))]  # tasks by place
        self.members: list[list[int]] = [[] for _ in range(search.problem.operators)]
        for place, operator in enumerate(search.groups):
            self.members[operator].append(place)
        self._wire()
        self.followers: list[list[int]] = [[] for _ in self.parts]
        for task, waits in enumerate(self.waits):
            for other in waits:
                self.followers[other].append(task)

    def _add(self, part: Part, places: Sequence[int], waits: Sequence[int]) -> int:
        self.parts.append(part)
        self.waits.append(list(waits))
        for place in dict.fromkeys(places):
            self.of[place].append(len(self.parts) - 1)
        return len(self.parts) - 1

    def _wire(self) -> None:
        """Makes the tasks and their dependencies, which are the same for all assignments."""
        search, clusters = self.search, self.search.clusters
        made: dict[Var, tuple[int, int, int]] = {}  # cluster, position, task
        nodes: dict[tuple[int, int], int] = {}
        order = sorted((n, k, p) for k, each in enumerate(clusters) for p, n in enumerate(each.nodes))
        for n, k, p in order:
            nodes[k, p] = self._add((k, p), [k], [])  # in program order, in which the device serves them
            for var in search.flat.nodes[n].eqn.outvars:
                made[var] = k, p, nodes[k, p]
        there = {len(clusters) + i: self._add(len(clusters) + i, [], []) for i in range(len(search.values))}
        for n, k, p in order:
            for i, atom in enumerate(search.flat.nodes[n].eqn.invars):
                maker, _, task = (-1, 0, 0) if isinstance(atom, Literal) else made.get(atom, (-1, 0, 0))
                if maker == k and task < nodes[k, p]:
                    self.waits[nodes[k, p]].append(self._add((k, p, i), [k], [task]))
        for each in search.handed:
            start = there[each.start] if each.after is None else nodes[each.start, each.after]
            task = self._add(each, [each.start] if each.end is None else [each.start, each.end], [start])
            if each.end is None or each.back:
                continue
            for follower in [there[each.end]] if each.end in there else [nodes[each.end, p] for p in each.before]:
                self.waits[follower].append(task)
        for i, value in enumerate(search.values):  # a loop's carry arrives when the last iteration has ended
            last = search.flat.ends.get(value.var)
            if isinstance(last, Var) and last in made:
                self.waits[there[len(clusters) + i]].append(made[last][2])

    def _seconds(self, part: Part, chosen: Mapping[int, int] | Array) -> float:
        """The seconds of a task."""
        if isinstance(part, Handover):
            return float(part.seconds[chosen[part.start], 0 if part.end is None else chosen[part.end]])
        if isinstance(part, int):
            return 0.0
        strategy = self.search.clusters[part[0]].strategies[chosen[part[0]]]
        if not strategy.times:
            return math.inf
        return strategy.times[part[1]] if len(part) == 2 else strategy.inner.get((part[1], part[2]), 0.0)

    def _on(self, part: Part, seconds: float) -> list[int]:
        """The resources that a task occupies: none if it takes no time."""
        return [DEVICE if isinstance(part, tuple) and len(part) == 2 else LINKS] if seconds > 0 else []

    def start(self, strategies: Array) -> float:
        """See `Walk`.

        Args:
          strategies: int64 ``[operators]`` of the problem.

        Returns:
          Seconds; infinite where the assignment is impossible.
        """
        self.chosen = np.concatenate(self.search.spread(np.asarray(strategies)))
        self.taken = np.array([self._seconds(part, self.chosen) for part in self.parts])
        if not np.isfinite(self.taken).all():
            return math.inf
        builder = Builder(["device", "links"])
        for task, seconds in enumerate(self.taken.tolist()):
            builder.add(int(picoseconds(seconds)), self._on(self.parts[task], seconds), priority=task)
        for task, waits in enumerate(self.waits):
            if waits:
                builder.depend(task, waits)
        self.timeline = simulate(builder.build())
        self.numbers = np.arange(len(self.parts))
        return self.timeline.seconds

    def changed(self, operator: int, strategy: int) -> float:
        """See `Walk`."""
        if not np.isfinite(self.taken).all():
            raise SearchError("expected a start that can be: some strategy, or two together, have an infinite cost")
        chosen = self.chosen.copy()
        chosen[self.members[operator]] = strategy
        taken, edit = self.taken.copy(), Edit(self.timeline.graph)
        fresh: dict[int, int] = {}
        for task in sorted({task for place in self.members[operator] for task in self.of[place]}):
            taken[task] = seconds = self._seconds(self.parts[task], chosen)
            if seconds == self.taken[task]:
                continue
            if not math.isfinite(seconds):
                return math.inf
            if (seconds > 0) == (self.taken[task] > 0):
                edit.retime(self.numbers[task], int(picoseconds(seconds)))
                continue
            edit.remove(self.numbers[task])
            on = self._on(self.parts[task], seconds)
            fresh[task] = int(edit.add(int(picoseconds(seconds)), on, priority=task)[0])
        numbers = self.numbers.copy()
        numbers[list(fresh)] = list(fresh.values())
        for task in fresh:
            for other in self.waits[task]:
                edit.depend(numbers[task], numbers[other])
            for other in self.followers[task]:
                if other not in fresh:
                    edit.depend(numbers[other], numbers[task])
        change = edit.build()
        timeline = resimulate(self.timeline, change)
        self._last = chosen, taken, np.asarray(change.ids(numbers)), timeline
        return timeline.seconds

    def take(self) -> None:
        """See `Walk`."""
        self.chosen, self.taken, self.numbers, self.timeline = self._last

    timeline: Timeline
