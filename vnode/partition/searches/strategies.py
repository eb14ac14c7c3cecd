"""The strategies of equations that are cut together: how axes divide them, what that takes, what goes in and comes out.

Knows lists of equations, layouts, how one equation is cut, and a cost model. Must not know how a search chooses, nor
what others do.

An equation that decides for itself may give every axis to any way in which it can be cut. Of several that are cut
together each gives an axis to the same named dimension, as far as it has it. What it lacks is brought there within.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence

from jax.extend.core import Literal, Var

from vnode.operators import Free, Monoid, Shifted, kind
from vnode.operators.splits import Lead, Split
from vnode.partition.searches.flattened_program import FlatProgram, Node, size_of, variables
from vnode.partition.searches.search_costs import CostModel
from vnode.spmd.layout import Axes, Cut, Layout, cut_along, replicated
from vnode.spmd.op_sharding import FactorSharding, OperandSharding, OpSharding, apply_shardings, reached_layouts
from vnode.spmd.sharding_flow import Path, RequestedSharding

MOST = 130
"""Strategies of one cluster at most: beyond it fewer dimensions are looked at."""

Pick = int | None
"""The division by an axis: the number of a factor sharding, or of a named dimension; None for none."""

PIECES = "pieces of a sum"
"""In place of a named dimension: devices along an axis have pieces of a sum, and add pieces to them."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to cut a cluster.

    Attributes:
      picks: what each axis divides, in the order of the axes.
      seconds: on one device, in a step; infinite where it cannot be.
      made: how what others read lies, by (position of the node, result).
      wanted: how what others make must lie, by (position of the node, operand).
      asked: of each node, in order; None for what every device evaluates whole.
      times: of `seconds`, what each node takes, without what is brought to it.
      inner: of `seconds`, what bringing values from node to node takes, by (position of the node, operand).
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
      nodes: their numbers.
      strategies: equally many, and in the same order, for clusters of one `shape`.
      shape: equal for clusters that are the same but for the values that they read.
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
      operands: how each has to lie.
      results: how each lies then.
      seconds: on one device.
      asked: how it is cut.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    seconds: float
    asked: RequestedSharding


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedNode:
    """The facts about a cluster's node that hold for all strategies.

    Attributes:
      node: the node.
      kind: the number of its equation's kind.
      leads: for each thing that an axis may divide how the equation is cut then; None if it is not concerned.
      numbers: of these, so that they are compared quickly; -1 for None.
      operands: for each operand its place among the cluster's values; `OUTSIDE`, `LITERAL` or `ZERO` for others.
      results: places of the results.
    """

    node: Node
    kind: int
    leads: tuple[tuple[Lead, Split] | None, ...]
    numbers: tuple[int, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]


OUTSIDE, LITERAL, ZERO = -1, -2, -3


class Strategies:
    """Enumerates strategies of a program's clusters, each shape of cluster once.

    Args:
      program: the program.
      axes: of the mesh, those longer than one.
      model: what equations and moves take.
    """

    def __init__(self, program: FlatProgram, axes: Axes, model: CostModel) -> None:
        self.program, self.axes, self.model = program, axes, model
        self._strategies: dict[Hashable, tuple[Strategy, ...]] = {}
        self._choices: dict[Hashable, EqnChoice | None] = {}
        self._leads: dict[Hashable, int] = {}
        self._grouped: dict[Hashable, tuple[int, tuple[FactorSharding, ...]]] = {}
        self._layouts: dict[Layout, int] = {}
        self._numbered: list[Layout] = []
        self._kinds: dict[Hashable, int] = {}
        self._known: dict[int, tuple[int, list[tuple[Hashable, Lead, Split]]]] = {}  # by the node's number
        self._moves: dict[Hashable, float] = {}
        self._ways: dict[int, list[tuple[Lead, Split]]] = {}
        self._met: dict[Hashable, int] = {}

    def cluster(self, numbers: Sequence[int]) -> Cluster:
        """A cluster of nodes, given by their numbers in order."""
        nodes = [self.program.nodes[n] for n in numbers]
        shape = self.shape_of(nodes)
        if len(nodes) == 1 and nodes[0].description is not None:
            leads = self.ways_of(nodes[0], numbers[0])
            shape = shape, tuple(lead for lead, _ in leads)
            named = [self.program.factor(numbers[0], lead[0]) for lead, _ in leads]
        else:
            named = [] if len(nodes) == 1 else self.dimensions(numbers)
        if self.adds_up(nodes):
            shape, named = (shape, PIECES), [*named, PIECES]
        options = axis_picks(len(named), len(self.axes))
        if shape not in self._strategies:
            prepared = self.prepared(numbers, nodes, named)
            self._strategies[shape] = tuple(self.strategy(prepared, named, option) for option in options)
        dimensions = tuple(tuple(None if p is None else named[p] for p in option) for option in options)
        return Cluster(tuple(numbers), self._strategies[shape], shape, dimensions)

    def adds_up(self, nodes: Sequence[Node]) -> bool:
        """Whether a cluster adds to what a loop carries, so that it may be carried in pieces."""
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
        """How many things an axis may divide, so that strategies do not become too many."""
        several = (n for n in range(1, MOST) if len(axis_picks(n + 1, len(self.axes))) > MOST)
        return next(several, 1)

    def ways_of(self, node: Node, number: int) -> list[tuple[Lead, Split]]:
        """The ways to cut an equation that one axis at least divides, those of the largest factors first."""
        if number in self._ways:
            return self._ways[number]
        d = node.description
        assert d is not None
        least = min(self.axes.values(), default=1)
        several = [(lead, split) for lead, split in d.leads if max(d.sizes[f] for f in lead) >= least]
        several = [each for each in several if not isinstance(each[1], Shifted) or d.sizes[each[0][0]] > 1]
        order = {each[0]: self._order(self.program.factor(number, each[0][0])) for each in several}
        several.sort(key=lambda each: (-max(d.sizes[f] for f in each[0]), order[each[0]]))
        self._ways[number] = several[: self.most_picks()]
        return self._ways[number]

    def _order(self, name: Hashable) -> int:
        """The same order of named dimensions for all equations: in which they are met."""
        return self._met.setdefault(name, len(self._met))

    def dimensions(self, numbers: Sequence[int]) -> list[Hashable]:
        """The named dimensions along which most bytes of a cluster's values lie."""
        weight: dict[Hashable, float] = {}
        least = min(self.axes.values(), default=1)
        for n in numbers:
            node = self.program.nodes[n]
            for _, var in variables((*node.eqn.invars, *node.eqn.outvars)):
                for d, length in enumerate(getattr(var.aval, "shape", ())):
                    if length >= least:
                        name = self.program.named(var, d)
                        weight[name] = weight.get(name, 0.0) + size_of(var)
        return sorted(weight, key=lambda name: -weight[name])[: self.most_picks()]

    def prepared(self, numbers: Sequence[int], nodes: Sequence[Node], named: Sequence[Hashable]) -> list[PreparedNode]:
        """A cluster's nodes, made ready for all strategies."""
        places: dict[Var, int] = {}
        found = []
        for number, node in zip(numbers, nodes, strict=True):
            of, several = self.known(number, node)
            leads: list[tuple[Lead, Split] | None]
            if len(nodes) == 1 and node.description is not None:
                own = self.ways_of(node, number)
                leads = [own[p] if p < len(own) else None for p in range(len(named))]
            else:  # free ones rather than others
                by_name = {name: (lead, split) for name, lead, split in reversed(several)}
                leads = [by_name.get(name) for name in named]
            numbered = tuple(-1 if x is None else self._leads.setdefault((of, x), len(self._leads)) for x in leads)
            operands = []
            for atom in node.eqn.invars:
                if isinstance(atom, Literal):
                    operands.append(ZERO if not getattr(atom.aval, "shape", ()) and atom.val == 0 else LITERAL)
                else:
                    operands.append(places.get(atom, OUTSIDE))
            for var in node.eqn.outvars:
                places[var] = len(places)
            results = tuple(places[var] for var in node.eqn.outvars)
            found.append(PreparedNode(node, of, tuple(leads), numbered, tuple(operands), results))
        return found

    def strategy(self, nodes: Sequence[PreparedNode], named: Sequence[Hashable], picks: tuple[Pick, ...]) -> Strategy:
        """The cost of a cluster for given divisions by the axes."""
        states: list[int] = []
        times: list[float] = []
        inner: dict[tuple[int, int], float] = {}
        made: dict[tuple[int, int], Layout] = {}
        wanted: dict[tuple[int, int], Layout] = {}
        taken: list[RequestedSharding | None] = []
        held: set[tuple[int, int]] = set()
        several = list(zip(self.axes, picks, strict=True))
        if any(p is not None and axis in nodes[0].node.unsplit_axes for axis, p in several):
            return Strategy(picks, math.inf)
        pieces = tuple((axis, Monoid.SUM) for axis, p in several if p is not None and named[p] is PIECES)
        divided = [(axis, p) for axis, p in several if p is not None and named[p] is not PIECES]
        for position, each in enumerate(nodes):
            node, found = each.node, None
            if node.description is not None:
                found = self.choice(each, self.ways(each, divided), states, pieces)
                if found is None and len(nodes) == 1:
                    return Strategy(picks, math.inf)
                if found is None:
                    found = self.choice(each, self.ways(each, []), states, pieces)
            if pieces and (found is None or found.asked.passed != pieces):
                return Strategy(picks, math.inf)
            if found is None:  # every device evaluates it whole
                operands = tuple(replicated(len(getattr(a.aval, "shape", ()))) for a in node.eqn.invars)
                results = tuple(replicated(len(getattr(v.aval, "shape", ()))) for v in node.eqn.outvars)
            else:
                operands, results = found.operands, found.results
            times.append(0.0 if found is None else node.times * found.seconds)
            for i, place in enumerate(each.operands):
                if place == OUTSIDE:
                    wanted[position, i] = operands[i]
                elif place >= 0:
                    end = self.number(operands[i])
                    if end != states[place] and (place, end) not in held:
                        held.add((place, end))
                        var = node.eqn.invars[i]
                        assert isinstance(var, Var)
                        start = self._numbered[states[place]]
                        inner[position, i] = node.times * self.move(start, operands[i], var)
            for j, layout in enumerate(results):
                states.append(self.number(layout))
                made[position, j] = layout
            taken.append(None if found is None else found.asked)
        seconds = sum(times) + sum(inner.values())
        return Strategy(picks, seconds, made, wanted, tuple(taken), tuple(times), inner)

    def number(self, layout: Layout) -> int:
        """A layout's number, the same for equal ones."""
        if layout not in self._layouts:
            self._layouts[layout] = len(self._numbered)
            self._numbered.append(layout)
        return self._layouts[layout]

    def ways(self, node: PreparedNode, divided: Sequence[tuple[str, int]]) -> tuple[int, tuple[FactorSharding, ...]]:
        """The ways of an equation that divide what axes shall divide, as far as it has it; with a number for them."""
        key = node.kind, tuple([(axis, node.numbers[p]) for axis, p in divided])
        if key not in self._grouped:
            leads = [(axis, node.leads[p]) for axis, p in divided]
            ways = group_ways([(axis, lead) for axis, lead in leads if lead is not None])
            self._grouped[key] = len(self._grouped), ways
        return self._grouped[key]

    def known(self, number: int, node: Node) -> tuple[int, list[tuple[Hashable, Lead, Split]]]:
        """The number of an equation's kind, and the named dimensions that it can be cut along."""
        if number not in self._known:
            of: Hashable = kind(node.eqn)
            of = ("alone", number) if of is None else of
            d = node.description
            several = [] if d is None else sorted(d.leads, key=lambda each: not isinstance(each[1], Free))
            leads = [
                (self.program.factor(number, lead[0]), lead, split)
                for lead, split in several
                if d is not None and d.sizes[lead[0]] > 1
            ]
            self._known[number] = self._kinds.setdefault(of, len(self._kinds)), leads
        return self._known[number]

    def choice(
        self,
        prepared: PreparedNode,
        numbered: tuple[int, tuple[FactorSharding, ...]],
        states: Sequence[int],
        pieces: tuple[tuple[str, Monoid], ...],
    ) -> EqnChoice | None:
        """The cost of an equation in some shardings, with partial operands; None if it cannot be sharded so."""
        number, ways = numbered
        key = prepared.kind, number, tuple([p if p < 0 else states[p] for p in prepared.operands]), pieces
        if key not in self._choices:
            node, given = prepared.node, []
            d = node.description
            assert d is not None
            for i, (atom, place) in enumerate(zip(node.eqn.invars, prepared.operands, strict=True)):
                if place in (LITERAL, ZERO):
                    ndim = len(getattr(atom.aval, "shape", ()))
                    given.append(OperandSharding(replicated(ndim), materializable=True, zero=place == ZERO))
                elif place >= 0:
                    given.append(OperandSharding(self._numbered[states[place]]))
                else:
                    given.append(OperandSharding(dataclasses.replace(self.expected(node, i, ways), partial=pieces)))
            choice = apply_shardings(node.eqn, d, given, self.axes, ways)
            if choice is None:
                self._choices[key] = None
            else:
                seconds = self.model.compute_time(node.eqn, choice) + self.rounding(node, choice)
                asked = RequestedSharding(ways, tuple(each.layout for each in given), choice.passed)
                self._choices[key] = EqnChoice(choice.operands, reached_layouts(node.eqn, choice), seconds, asked)
        return self._choices[key]

    def expected(self, node: Node, operand: int, ways: tuple[FactorSharding, ...]) -> Layout:
        """How an operand that somebody else makes would best lie: what is cut, in blocks."""
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
        """Seconds in which pieces of narrow sums are combined at once."""
        return sum(
            self.move(before, after, var)
            for var, before, after in zip(
                node.eqn.outvars, choice.results, reached_layouts(node.eqn, choice), strict=True
            )
            if before != after
        )

    def move(self, start: Layout, end: Layout, var: Var) -> float:
        """Seconds of bringing a value from one layout to another; infinite into pieces that it is not in."""
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
    """The combinations of divisions: any for up to two axes; of more, leading axes divide one thing, the rest another.

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
    """Ways, from what each axis divides: axes that divide the same are one way."""
    found: dict[tuple[Lead, Split], list[str]] = {}
    for axis, each in several:
        found.setdefault(each, []).append(axis)
    return tuple(FactorSharding(lead, split, tuple(axes)) for (lead, split), axes in found.items())


def asked_by_path(program: FlatProgram, cluster: Cluster, strategy: int) -> dict[Path, RequestedSharding]:
    """The shardings of a cluster's equations that `vnode.spmd.sharding_flow.follow` gets, by path."""
    asked = cluster.strategies[strategy].asked
    return {program.nodes[n].path: each for n, each in zip(cluster.nodes, asked, strict=True) if each is not None}
