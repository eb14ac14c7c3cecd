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
from vnode.partition.searches.costs import CostModel
from vnode.partition.searches.flat import Flat, Node, size_of, variables
from vnode.spmd.choice import Choice, Given, Way, chosen, reached
from vnode.spmd.flow import Asked, Path
from vnode.spmd.layout import Axes, Cut, Layout, cut_along, replicated

MOST = 130
"""Strategies of one cluster at most: beyond it fewer dimensions are looked at."""

Pick = int | None
"""What an axis divides: the number of a way of an equation, or of a named dimension; None for nothing."""

PIECES = "pieces of a sum"
"""In place of a named dimension: devices along an axis have pieces of a sum, and add pieces to them."""

ADDED = 4
"""Equations of a cluster at most that adds pieces to pieces."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to cut a cluster.

    Attributes:
      picks: what each axis divides, in the order of the axes.
      seconds: on one device, in a step; infinite where it cannot be.
      made: how what others read lies, by (position of the node, result).
      wanted: how what others make must lie, by (position of the node, operand).
      asked: of each node, in order; None for what every device evaluates whole.
    """

    picks: tuple[Pick, ...]
    seconds: float
    made: Mapping[tuple[int, int], Layout] = dataclasses.field(default_factory=dict)
    wanted: Mapping[tuple[int, int], Layout] = dataclasses.field(default_factory=dict)
    asked: tuple[Asked | None, ...] = ()


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
class Done:
    """What an equation takes, cut in some ways.

    Attributes:
      operands: how each has to lie.
      results: how each lies then.
      seconds: on one device.
      asked: how it is cut.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    seconds: float
    asked: Asked


class Strategies:
    """Enumerates strategies of a program's clusters, each shape of cluster once.

    Args:
      program: the program.
      axes: of the mesh, those longer than one.
      model: what equations and moves take.
    """

    def __init__(self, program: Flat, axes: Axes, model: CostModel) -> None:
        self.program, self.axes, self.model = program, axes, model
        self._strategies: dict[Hashable, tuple[Strategy, ...]] = {}
        self._choices: dict[Hashable, Done | None] = {}
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
        options = picked(len(named), len(self.axes))
        if shape not in self._strategies:
            self._strategies[shape] = tuple(self.strategy(numbers, nodes, named, option) for option in options)
        dimensions = tuple(tuple(None if p is None else named[p] for p in option) for option in options)
        return Cluster(tuple(numbers), self._strategies[shape], shape, dimensions)

    def adds_up(self, nodes: Sequence[Node]) -> bool:
        """Whether a cluster adds to what a loop carries, so that it may be carried in pieces."""
        read = {var for node in nodes for _, var in variables(node.eqn.invars)}
        linear = all(node.description is not None and node.description.linear for node in nodes)
        return linear and len(nodes) <= ADDED and not read.isdisjoint(self.program.sums)

    def shape_of(self, nodes: Sequence[Node]) -> Hashable:
        """What is the same for clusters that differ only in the values that they read."""
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
            parts.append((id(node.eqn) if own is None else own, node.times, ins))
        named: dict[Hashable, int] = {}
        dims = tuple(
            named.setdefault(self.program.named(var, d), len(named))
            for var in number
            for d in range(len(getattr(var.aval, "shape", ())))
        )
        return tuple(parts), dims

    def most_picks(self) -> int:
        """How many things an axis may divide, so that strategies do not become too many."""
        several = (n for n in range(1, MOST) if len(picked(n + 1, len(self.axes))) > MOST)
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

    def strategy(
        self, numbers: Sequence[int], nodes: Sequence[Node], named: Sequence[Hashable], picks: tuple[Pick, ...]
    ) -> Strategy:
        """What a cluster takes if each axis divides something."""
        states: dict[Var, Layout] = {}
        seconds = 0.0
        made: dict[tuple[int, int], Layout] = {}
        wanted: dict[tuple[int, int], Layout] = {}
        taken: list[Asked | None] = []
        held: dict[tuple[Var, Layout], None] = {}
        several = list(zip(self.axes, picks, strict=True))
        pieces = tuple((axis, Monoid.SUM) for axis, p in several if p is not None and named[p] is PIECES)
        divided = [(axis, p) for axis, p in several if p is not None and named[p] is not PIECES]
        for position, (number, node) in enumerate(zip(numbers, nodes, strict=True)):
            if len(nodes) == 1 and node.description is not None:
                leads = self.ways_of(node, number)
                ways = grouped([(axis, leads[p]) for axis, p in divided])
            else:
                ways = self.ways_for(number, node, [(axis, named[p]) for axis, p in divided])
            found = None if ways is None else self.choice(number, node, ways, states, pieces)
            if pieces and (found is None or found.asked.passed != pieces):
                return Strategy(picks, math.inf)
            if found is None and len(nodes) == 1 and node.description is not None:
                return Strategy(picks, math.inf)
            if found is None and node.description is not None:
                found = self.choice(number, node, (), states, pieces)
            if found is None:  # every device evaluates it whole
                operands = tuple(replicated(len(getattr(a.aval, "shape", ()))) for a in node.eqn.invars)
                results = tuple(replicated(len(getattr(v.aval, "shape", ()))) for v in node.eqn.outvars)
            else:
                operands, results = found.operands, found.results
                seconds += node.times * found.seconds
            for i, var in variables(node.eqn.invars):
                if var not in states:
                    wanted[position, i] = operands[i]
                elif (var, operands[i]) not in held:
                    held[var, operands[i]] = None
                    seconds += node.times * self.move(states[var], operands[i], var)
            for j, (var, layout) in enumerate(zip(node.eqn.outvars, results, strict=True)):
                states[var] = layout
                held[var, layout] = None
                made[position, j] = layout
            taken.append(None if found is None else found.asked)
        return Strategy(picks, seconds, made, wanted, tuple(taken))

    def ways_for(self, number: int, node: Node, divided: Sequence[tuple[str, Hashable]]) -> tuple[Way, ...] | None:
        """The ways of an equation that divide named dimensions as far as it has them, free ones rather than others."""
        d = node.description
        if d is None:
            return None
        found = []
        for axis, wanted in divided:
            for name, lead, split in self.known(number, node)[1]:
                if name == wanted:
                    found.append((axis, (lead, split)))
                    break
        return grouped(found)

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
        number: int,
        node: Node,
        ways: tuple[Way, ...],
        states: Mapping[Var, Layout],
        pieces: tuple[tuple[str, Monoid], ...] = (),
    ) -> Done | None:
        """What an equation takes, cut in some ways, what others make being in pieces; None if it cannot be cut so."""
        d = node.description
        assert d is not None
        given = []
        for i, atom in enumerate(node.eqn.invars):
            if isinstance(atom, Literal):
                shape = getattr(atom.aval, "shape", ())
                given.append(Given(replicated(len(shape)), anyhow=True, zero=not shape and atom.val == 0))
            elif atom in states:
                given.append(Given(states[atom]))
            else:
                given.append(Given(dataclasses.replace(self.expected(node, i, ways), partial=pieces)))
        key = self.known(number, node)[0], tuple(given), ways
        if key not in self._choices:
            choice = chosen(node.eqn, d, given, self.axes, ways)
            if choice is None:
                self._choices[key] = None
            else:
                seconds = self.model.compute_time(node.eqn, choice) + self.rounding(node, choice)
                asked = Asked(ways, tuple(each.layout for each in given), choice.passed)
                self._choices[key] = Done(choice.operands, reached(node.eqn, choice), seconds, asked)
        return self._choices[key]

    def expected(self, node: Node, operand: int, ways: tuple[Way, ...]) -> Layout:
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

    def rounding(self, node: Node, choice: Choice) -> float:
        """Seconds in which pieces of narrow sums are combined at once."""
        return sum(
            self.move(before, after, var)
            for var, before, after in zip(node.eqn.outvars, choice.results, reached(node.eqn, choice), strict=True)
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
def picked(things: int, axes: int) -> tuple[tuple[Pick, ...], ...]:
    """What axes may divide at once: up to two axes anything; of more, leading ones one thing and the others another.

    So three axes of 2 are searched as meshes of 2 x 4, 4 x 2 and 8, each equation in the one that suits it.

    >>> len(picked(2, 2)), len(picked(2, 4))
    (9, 21)
    """
    one: list[Pick] = [None, *range(things)]
    if axes <= 2:
        return tuple(itertools.product(one, repeat=axes))
    found = [(a,) * k + (b,) * (axes - k) for k in range(1, axes) for a in one for b in one]
    return tuple(dict.fromkeys(found))


def grouped(several: Sequence[tuple[str, tuple[Lead, Split]]]) -> tuple[Way, ...]:
    """Ways, from what each axis divides: axes that divide the same are one way."""
    found: dict[tuple[Lead, Split], list[str]] = {}
    for axis, each in several:
        found.setdefault(each, []).append(axis)
    return tuple(Way(lead, split, tuple(axes)) for (lead, split), axes in found.items())


def asked_by_path(program: Flat, cluster: Cluster, strategy: int) -> dict[Path, Asked]:
    """What `vnode.spmd.flow.follow` is asked for of a cluster."""
    asked = cluster.strategies[strategy].asked
    return {program.nodes[n].path: each for n, each in zip(cluster.nodes, asked, strict=True) if each is not None}
