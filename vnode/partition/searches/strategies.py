"""A cluster of equations -> its strategies: how axes divide it, its seconds, the layouts that it reads and makes.

Knows lists of equations, layouts, how one equation is cut, and a cost model. Must not know how a search chooses, nor
the other clusters' strategies.

An equation with a strategy of its own may give every axis to any factor that can be cut. The equations of a larger
cluster give an axis to the same named dimension, where they have it. Operands in another layout are moved inside the
cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence

from jax.extend.core import Literal, Var

from vnode.operators import Free, Monoid, Shifted, kind
from vnode.operators.cost import all_bytes
from vnode.operators.splits import Lead, Split
from vnode.partition.searches.flattened_program import FlatProgram, Node, variables
from vnode.partition.searches.search_costs import Estimate
from vnode.spmd.layout import Axes, Cut, Layout, cut_along, replicated_atom
from vnode.spmd.op_sharding import FactorSharding, OperandSharding, OpSharding, apply_shardings, reached_layouts
from vnode.spmd.sharding_flow import Path, RequestedSharding

MOST = 130
"""The most strategies of one cluster; beyond it fewer dimensions are considered."""

Pick = int | None
"""The division by one axis: the number of a factor sharding, or of a named dimension; None if it divides nothing."""

PIECES = "pieces of a sum"
"""In place of a named dimension: devices along the axis hold partial sums, and add partial sums to them."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to cut a cluster.

    Attributes:
      picks: the thing that each axis divides, in the order of the axes.
      seconds: the time on one device, in a step; infinite where the strategy is impossible.
      made: the layouts of results that others read, by (position of the node, result).
      wanted: the layouts that operands from outside must have, by (position of the node, operand).
      asked: the sharding of each node, in order; None for a node that every device evaluates whole.
      times: the part of `seconds` of each node, without moving its operands.
      inner: the part of `seconds` of moving values from node to node, by (position of the node, operand).
    """

    picks: tuple[Pick, ...]
    seconds: float
    made: Mapping[tuple[int, int], Layout] = dataclasses.field(default_factory=dict)
    wanted: Mapping[tuple[int, int], Layout] = dataclasses.field(default_factory=dict)
    asked: tuple[RequestedSharding | None, ...] = ()
    times: tuple[float, ...] = ()
    inner: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """Equations that are cut together.

    Attributes:
      nodes: the nodes' numbers.
      strategies: the strategies; clusters of one `shape` have equally many, in the same order.
      shape: equal for clusters that differ only in the values that they read.
      dimensions: for each strategy the named dimension that each axis divides; None for nothing.
    """

    nodes: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    shape: Hashable
    dimensions: tuple[tuple[Hashable, ...], ...]


@dataclasses.dataclass(frozen=True)
class EqnChoice:
    """The cost of an equation in one sharding.

    Attributes:
      operands: the layout that each operand needs.
      results: the layout that each result gets.
      seconds: the time on one device.
      asked: the sharding; None if every device evaluates it whole.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    seconds: float
    asked: RequestedSharding | None


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedNode:
    """The facts about a cluster's node that hold for all of its strategies.

    Attributes:
      node: the node.
      kind: the number of its equation's kind.
      leads: for each thing that an axis may divide, how the equation is cut then; None if it is not affected.
      operands: for each operand its place among the cluster's values; `OUTSIDE`, `LITERAL` or `ZERO` for others.
      results: the places of the results.
    """

    node: Node
    kind: int
    leads: tuple[tuple[Lead, Split] | None, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]


OUTSIDE, LITERAL, ZERO = -1, -2, -3


class Strategies:
    """Enumerates the strategies of a program's clusters; clusters of one shape are enumerated once.

    Args:
      program: the program.
      axes: the mesh's axes that are longer than one.
      model: the cost of equations and moves.
    """

    def __init__(self, program: FlatProgram, axes: Axes, model: Estimate) -> None:
        self.program, self.axes, self.model = program, axes, model
        self._strategies: dict[Hashable, tuple[Strategy, ...]] = {}
        self._choices: dict[Hashable, EqnChoice | None] = {}
        self._kinds: dict[Hashable, int] = {}
        self._moves: dict[Hashable, float] = {}
        self._met: dict[Hashable, int] = {}

    def cluster(self, numbers: Sequence[int]) -> Cluster:
        """A cluster of nodes, given by their numbers in program order."""
        nodes = [self.program.nodes[n] for n in numbers]
        shape = self.shape_of(nodes)
        own: list[tuple[Lead, Split]] = []  # of an equation that is a cluster of its own
        if len(nodes) == 1:
            own = self.ways_of(nodes[0], numbers[0])
            shape = shape, tuple(lead for lead, _ in own)
            named = [self.program.factor(numbers[0], lead[0]) for lead, _ in own]
        else:
            named = self.dimensions(numbers)
        if self.adds_up(nodes):
            shape, named = (shape, PIECES), [*named, PIECES]
        options = axis_picks(len(named), len(self.axes))
        if shape not in self._strategies:
            prepared = self.prepared(numbers, nodes, named, own)
            self._strategies[shape] = tuple(self.strategy(prepared, named, option) for option in options)
        dimensions = tuple(tuple(None if p is None else named[p] for p in option) for option in options)
        return Cluster(tuple(numbers), self._strategies[shape], shape, dimensions)

    def adds_up(self, nodes: Sequence[Node]) -> bool:
        """Whether a cluster adds to a loop's carry, so that the carry may be partial sums."""
        read = {var for node in nodes for _, var in variables(node.eqn.invars)}
        linear = all(node.description is not None and node.description.linear for node in nodes)
        return linear and not read.isdisjoint(self.program.sums)

    def shape_of(self, nodes: Sequence[Node]) -> Hashable:
        """The key of clusters that differ only in the values that they read."""
        number: dict[Var, int] = {}
        parts = []
        for node in nodes:
            own = kind(node.eqn)
            ins = tuple(
                ("literal", repr(a.val)) if isinstance(a, Literal) else number.setdefault(a, len(number))
                for a in node.eqn.invars
            )
            for var in node.eqn.outvars:
                number[var] = len(number)
            parts.append((id(node.eqn) if own is None else own, node.times, node.unsplit_axes, ins))
        named: dict[Hashable, int] = {}
        dims = tuple(
            named.setdefault(self.program.named(var, d), len(named))
            for var in number
            for d in range(len(getattr(var.aval, "shape", ())))
        )
        return tuple(parts), dims

    def most_picks(self) -> int:
        """The most things that an axis may divide, to keep the number of strategies in bounds."""
        several = (n for n in range(1, MOST) if len(axis_picks(n + 1, len(self.axes))) > MOST)
        return next(several, 1)

    def ways_of(self, node: Node, number: int) -> list[tuple[Lead, Split]]:
        """The ways to cut an equation along factors of at least the smallest axis's size, the largest factors first."""
        d = node.description
        if d is None:
            return []
        least = min(self.axes.values(), default=1)
        several = [(lead, split) for lead, split in d.leads if max(d.sizes[f] for f in lead) >= least]
        several = [each for each in several if not isinstance(each[1], Shifted) or d.sizes[each[0][0]] > 1]
        order = {each[0]: self._order(self.program.factor(number, each[0][0])) for each in several}
        several.sort(key=lambda each: (-max(d.sizes[f] for f in each[0]), order[each[0]]))
        return several[: self.most_picks()]

    def _order(self, name: Hashable) -> int:
        """A rank of named dimensions that is the same for all equations: the order in which they were first met."""
        return self._met.setdefault(name, len(self._met))

    def dimensions(self, numbers: Sequence[int]) -> list[Hashable]:
        """The named dimensions that most bytes of a cluster's values lie along."""
        weight: dict[Hashable, float] = {}
        least = min(self.axes.values(), default=1)
        for n in numbers:
            node = self.program.nodes[n]
            for _, var in variables((*node.eqn.invars, *node.eqn.outvars)):
                for d, length in enumerate(getattr(var.aval, "shape", ())):
                    if length >= least:
                        name = self.program.named(var, d)
                        weight[name] = weight.get(name, 0.0) + all_bytes(var.aval)
        return sorted(weight, key=lambda name: -weight[name])[: self.most_picks()]

    def prepared(
        self,
        numbers: Sequence[int],
        nodes: Sequence[Node],
        named: Sequence[Hashable],
        own: Sequence[tuple[Lead, Split]],
    ) -> list[PreparedNode]:
        """Prepares a cluster's nodes for all strategies; `own` are the ways to cut a single equation."""
        places: dict[Var, int] = {}
        found = []
        for number, node in zip(numbers, nodes, strict=True):
            d, of = node.description, kind(node.eqn)
            by_name: dict[Hashable, tuple[Lead, Split]] = {}
            for lead, split in () if d is None else sorted(d.leads, key=lambda each: not isinstance(each[1], Free)):
                if d is not None and d.sizes[lead[0]] > 1:  # prefers free dimensions
                    by_name.setdefault(self.program.factor(number, lead[0]), (lead, split))
            leads = (*own, *map(by_name.get, named[len(own) :]))
            operands = []
            for atom in node.eqn.invars:
                if isinstance(atom, Literal):
                    operands.append(ZERO if not getattr(atom.aval, "shape", ()) and atom.val == 0 else LITERAL)
                else:
                    operands.append(places.get(atom, OUTSIDE))
            for var in node.eqn.outvars:
                places[var] = len(places)
            results = tuple(places[var] for var in node.eqn.outvars)
            of = self._kinds.setdefault(("alone", number) if of is None else of, len(self._kinds))
            found.append(PreparedNode(node, of, leads, tuple(operands), results))
        return found

    def strategy(self, nodes: Sequence[PreparedNode], named: Sequence[Hashable], picks: tuple[Pick, ...]) -> Strategy:
        """The strategy of a cluster for given divisions by the axes."""
        states: list[Layout] = []
        times: list[float] = []
        inner: dict[tuple[int, int], float] = {}
        made: dict[tuple[int, int], Layout] = {}
        wanted: dict[tuple[int, int], Layout] = {}
        taken: list[RequestedSharding | None] = []
        held: set[tuple[int, Layout]] = set()
        several = list(zip(self.axes, picks, strict=True))
        if any(p is not None and axis in nodes[0].node.unsplit_axes for axis, p in several):
            return Strategy(picks, math.inf)
        pieces = tuple((axis, Monoid.SUM) for axis, p in several if p is not None and named[p] is PIECES)
        divided = [(axis, p) for axis, p in several if p is not None and named[p] is not PIECES]
        for position, each in enumerate(nodes):
            node, found = each.node, None
            if node.description is not None:
                leads = [(axis, lead) for axis, p in divided if (lead := each.leads[p]) is not None]
                found = self.choice(each, group_ways(leads), states, pieces)
                if found is None and len(nodes) == 1:
                    return Strategy(picks, math.inf)
                if found is None:
                    found = self.choice(each, (), states, pieces)
            found = found or self.undivided(node)
            if pieces and (found.asked is None or found.asked.passed != pieces):
                return Strategy(picks, math.inf)
            times.append(node.times * found.seconds)
            for i, place in enumerate(each.operands):
                if place == OUTSIDE:
                    wanted[position, i] = found.operands[i]
                elif place >= 0:
                    end = found.operands[i]
                    if end != states[place] and (place, end) not in held:
                        held.add((place, end))
                        var = node.eqn.invars[i]
                        assert isinstance(var, Var)
                        inner[position, i] = node.times * self.move(states[place], end, var)
            states.extend(found.results)
            made.update(((position, j), layout) for j, layout in enumerate(found.results))
            taken.append(found.asked)
        seconds = sum(times) + sum(inner.values())
        return Strategy(picks, seconds, made, wanted, tuple(taken), tuple(times), inner)

    def undivided(self, node: Node) -> EqnChoice:
        """The cost of an equation that every device evaluates whole: none, as it is the same for all strategies."""
        operands, results = (tuple(map(replicated_atom, atoms)) for atoms in (node.eqn.invars, node.eqn.outvars))
        return EqnChoice(operands, results, 0.0, None)

    def choice(
        self,
        prepared: PreparedNode,
        ways: tuple[FactorSharding, ...],
        states: Sequence[Layout],
        pieces: tuple[tuple[str, Monoid], ...],
    ) -> EqnChoice | None:
        """The cost of an equation in given shardings, with partial operands; None if it cannot be sharded so."""
        key = prepared.kind, ways, tuple([p if p < 0 else states[p] for p in prepared.operands]), pieces
        if key not in self._choices:
            node, given = prepared.node, []
            d = node.description
            assert d is not None
            for i, (atom, place) in enumerate(zip(node.eqn.invars, prepared.operands, strict=True)):
                if place in (LITERAL, ZERO):
                    given.append(OperandSharding(replicated_atom(atom), materializable=True, zero=place == ZERO))
                elif place >= 0:
                    given.append(OperandSharding(states[place]))
                else:
                    given.append(OperandSharding(dataclasses.replace(self.expected(node, i, ways), partial=pieces)))
            choice = apply_shardings(node.eqn, d, given, self.axes, ways)
            if choice is None:
                self._choices[key] = None
            else:
                seconds = self.model.compute_time(node.eqn, choice) + self.rounding(node, choice)
                asked = RequestedSharding(ways, tuple(each.layout for each in given), choice.passed)
                results = tuple(reached_layouts(node.eqn, choice))
                self._choices[key] = EqnChoice(tuple(choice.operands), results, seconds, asked)
        return self._choices[key]

    def expected(self, node: Node, operand: int, ways: tuple[FactorSharding, ...]) -> Layout:
        """The best layout of an operand from outside: its cut dimensions in blocks."""
        d = node.description
        assert d is not None
        cuts: list[Cut | None] = []
        for dim in d.operands[operand]:
            cut = None
            for way in ways:
                factor = next((f for f in dim if f in way.split.concerned(way.lead)), None)
                if factor is not None and cut is None:
                    cut = cut_along(way.axes, factor, dim, d.sizes, self.axes)
            cuts.append(cut)
        return Layout(tuple(cuts))

    def rounding(self, node: Node, choice: OpSharding) -> float:
        """Seconds of combining the partial sums of low-precision results at once."""
        return sum(
            self.move(before, after, var)
            for var, before, after in zip(
                node.eqn.outvars, choice.results, reached_layouts(node.eqn, choice), strict=True
            )
            if before != after
        )

    def move(self, start: Layout, end: Layout, var: Var) -> float:
        """Seconds of moving a value between layouts; infinite into partial sums that it does not have."""
        if start == end:
            return 0.0
        if not set(end.partial) <= set(start.partial):
            return math.inf
        shape, dtype = tuple(var.aval.shape), var.aval.dtype
        key = (start, end, shape, dtype)
        if key not in self._moves:
            self._moves[key] = self.model.move_time(start, end, shape, dtype)
        return self._moves[key]


@functools.cache
def axis_picks(things: int, axes: int) -> tuple[tuple[Pick, ...], ...]:
    """The combinations of divisions. Up to two axes: any. More axes: leading ones divide one thing, the rest another.

    So three axes of 2 are searched as meshes of 2 x 4, 4 x 2 and 8, each equation in the one that suits it.

    >>> len(axis_picks(2, 2)), len(axis_picks(2, 4))
    (9, 21)
    """
    one: list[Pick] = [None, *range(things)]
    if axes <= 2:
        return tuple(itertools.product(one, repeat=axes))
    found = [(a,) * k + (b,) * (axes - k) for k in range(1, axes) for a in one for b in one]
    return tuple(dict.fromkeys(found))


def group_ways(several: Sequence[tuple[str, tuple[Lead, Split]]]) -> tuple[FactorSharding, ...]:
    """One way for each divided thing: axes that divide the same thing are joined."""
    found: dict[tuple[Lead, Split], list[str]] = {}
    for axis, each in several:
        found.setdefault(each, []).append(axis)
    return tuple(FactorSharding(lead, split, tuple(axes)) for (lead, split), axes in found.items())


def asked_by_path(program: FlatProgram, cluster: Cluster, strategy: int) -> dict[Path, RequestedSharding]:
    """The shardings of a cluster's equations by path, as `vnode.spmd.sharding_flow.follow` takes them."""
    asked = cluster.strategies[strategy].asked
    return {program.nodes[n].path: each for n, each in zip(cluster.nodes, asked, strict=True) if each is not None}
