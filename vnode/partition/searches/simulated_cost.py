"""An assignment -> its seconds on a simulated timeline, where devices compute and exchange at the same time.

Knows programs as problems, and the simulator. Must not know how a search works, nor machines.

This is FlexFlow's task graph (Jia, Zaharia, Aiken, SysML 2019, section 5): one task for each equation, and one for each
value that moves. All devices do the same, so one stands for all. Equations follow each other on the device, exchanges
queue for the links, and both run at the same time. All iterations of a loop are one task for each of its equations.

As FlexFlow's, a walk simulates again only what a change of one operator affects (section 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.extend.core import Literal, Var

from vnode.partition.searches.ilp_formulation import Search
from vnode.partition.searches.problem import Array
from vnode.partition.simulator import SECOND, picoseconds
from vnode.partition.simulator.graph import LONGEST
from vnode.partition.simulator.simulate import followers, serve

DEVICE, LINKS = 0, 1


class Simulated:
    """The seconds of a problem's assignments, by simulation; a `cost` for the searches.

    Args:
      search: the program as a problem.

    Attributes:
      resource: the resource of each task, unless it takes no time: `DEVICE` or `LINKS`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.analysis.program import inline
      >>> from vnode.partition.machine import Machine
      >>> from vnode.partition.searches import as_problem, exhaustive, Estimate
      >>> traced = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(jnp.ones((512, 256)), jnp.ones((256, 256)))
      >>> model = Estimate(Machine.tpu("v5e:2x2"), {"x": 4})
      >>> search = as_problem(inline(traced.jaxpr, traced.consts), {"x": 4}, model)
      >>> found = exhaustive(search.problem, cost=Simulated(search))
      >>> found.cost <= search.problem.cost(found.strategies) * 1.001
      True
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self._recent: list[tuple[Array, tuple[list[int], list[int]]]] = []  # entries, and the times of their tasks
        self.resource: list[int] = []
        self._tables: list[Array] = []  # the seconds of each task for each pair of strategies of its two places
        self._places: list[tuple[int, int]] = []
        self._waits: list[list[int]] = []
        self._wire()
        self._followers = followers(self._waits)
        self._start, self._end = np.reshape(self._places, (-1, 2)).T
        self._width = np.array([table.shape[1] for table in self._tables], np.int64)
        self._first = np.cumsum([0, *(table.size for table in self._tables)])[:-1]
        self._seconds = np.concatenate([np.zeros(0), *(table.ravel() for table in self._tables)])
        self._duration = picoseconds(np.where(np.isfinite(self._seconds), self._seconds, 0.0))
        resource = np.repeat(np.array(self.resource, np.int64), [table.size for table in self._tables])
        on = ((r,) if s > 0 else () for r, s in zip(resource.tolist(), self._seconds.tolist(), strict=True))
        self._on = np.fromiter(on, object, len(resource))

    def _add(self, resource: int, seconds: Array, places: tuple[int, int], waits: Sequence[int] = ()) -> int:
        self.resource.append(resource)
        self._tables.append(seconds)
        self._places.append(places)
        self._waits.append(list(waits))
        return len(self._tables) - 1

    def _wire(self) -> None:
        """Makes the tasks and their dependencies, which are the same for all assignments."""
        search, clusters = self.search, self.search.clusters
        made: dict[Var, tuple[int, int]] = {}  # cluster, task
        nodes: dict[tuple[int, int], int] = {}
        order = sorted((n, k, p) for k, each in enumerate(clusters) for p, n in enumerate(each.nodes))
        for n, k, p in order:
            times = [each.times[p] if each.times else math.inf for each in clusters[k].strategies]
            nodes[k, p] = self._add(DEVICE, np.reshape(times, (-1, 1)), (k, k))  # the device serves in program order
            for var in search.flat.nodes[n].eqn.outvars:
                made[var] = k, nodes[k, p]
        free = np.zeros((1, 1))
        there = {len(clusters) + i: self._add(LINKS, free, (0, 0)) for i in range(len(search.values))}
        for n, k, p in order:
            for i, atom in enumerate(search.flat.nodes[n].eqn.invars):
                maker, task = (-1, 0) if isinstance(atom, Literal) else made.get(atom, (-1, 0))
                if maker == k and task < nodes[k, p]:
                    times = [each.inner.get((p, i), 0.0) for each in clusters[k].strategies]
                    if any(times):
                        task = self._add(LINKS, np.reshape(times, (-1, 1)), (k, k), [task])
                    self._waits[nodes[k, p]].append(task)
        for each in search.handed:
            start = there[each.start] if each.after is None else nodes[each.start, each.after[0]]
            end = each.start if each.end is None else each.end
            task = self._add(LINKS, each.seconds, (each.start, end), [start])
            if each.end is None or each.back:
                continue
            reading = [nodes[end, p] for p in dict.fromkeys(p for p, _ in each.before)]
            for follower in [there[end]] if end in there else reading:
                self._waits[follower].append(task)
        for i, value in enumerate(search.values):  # a loop's carry arrives when the last iteration has ended
            last = search.flat.ends.get(value.var)
            if isinstance(last, Var) and last in made:
                self._waits[there[len(clusters) + i]].append(made[last][1])

    def _entries(self, strategies: Array) -> Array:
        """The position of each task in the tables that hold the seconds of all tasks."""
        chosen = np.concatenate(self.search.spread(strategies))
        column = np.where(self._width > 1, chosen[self._end], 0)
        row = np.where(np.diff(self._first, append=len(self._seconds)) > self._width, chosen[self._start], 0)
        return self._first + row * self._width + column

    def taken(self, strategies: Array) -> Array:
        """The seconds of each task; infinite where the assignment is impossible."""
        return self._seconds[self._entries(strategies)]

    def __call__(self, strategies: Array) -> float:
        """The seconds of an assignment; infinite if it is impossible.

        Simulates again only from the first task on that differs from the nearer one of two recent assignments: the one
        that a walk is at, and the change that it tried last.
        """
        entries = self._entries(strategies)
        if not np.isfinite(self._seconds[entries]).all():
            return math.inf
        near, known, since = [], ((), ()), -1
        for before, times in self._recent:
            different = np.flatnonzero(entries != before).tolist()
            first = min((times[0][task] for task in different), default=LONGEST)
            if first > since:
                near, known, since = [(before, times)], times, first
        duration, on = self._duration[entries].tolist(), self._on[entries].tolist()
        times = serve(duration, on, self._followers, 2, known, since)
        self._recent = [*near, (entries, times)]
        return max(times[1], default=0) / SECOND
