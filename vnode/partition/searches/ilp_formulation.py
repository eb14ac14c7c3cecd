"""A program -> a problem: clusters and shared values are its operators, moves between them its edges.

Knows lists of equations, clusters with their strategies, and problems. Must not know how a search works, nor the
experts' splits.

An argument, a loop's carry, or a value that several clusters read is an operator of its own. Its strategies are
layouts, so that bringing the value into a layout is counted once for all its readers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np
from jax.extend.core import Literal, Var

from vnode.analysis.program import Program
from vnode.errors import SearchError, layout_message
from vnode.operators import Algebra, Monoid
from vnode.partition.searches.coarsen import clusters, members
from vnode.partition.searches.flattened_program import FlatProgram, Link, flatten, readers
from vnode.partition.searches.problem import Array, Edge, Problem
from vnode.partition.searches.problem_memory import DecidedBy, points_of, spans_of
from vnode.partition.searches.search_costs import CostModel
from vnode.partition.searches.strategies import Cluster, Strategies, asked_by_path, axis_picks
from vnode.spmd.layout import Axes, Layout, cut_of, replicated
from vnode.spmd.resharding import is_even
from vnode.spmd.sharding_flow import Flow, follow, monoid_of_one, present_at_one

ROUNDS = 2
"""The number of refinement rounds by which operators are told apart by their neighbours, before equal ones are tied."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value with a layout of its own.

    Attributes:
      var: the variable.
      layouts: the layouts to choose from.
    """

    var: Var
    layouts: tuple[Layout, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Handover:
    """A move of a value from one cluster or value to another.

    Attributes:
      start: the number of the cluster or value that it comes from; values are numbered after clusters.
      end: the number of the one that reads it; None for a result of the step.
      seconds: the time in a step, float64 ``[strategies of start, strategies of end]``.
      after: the position of the node that computes it; None if `start` is a value.
      before: the positions of the nodes that read it.
      back: whether the next iteration, or the next step, reads it.
    """

    start: int
    end: int | None
    seconds: Array
    after: int | None
    before: tuple[int, ...] = ()
    back: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """A program as a problem to search.

    Attributes:
      program: the program.
      axes: the mesh's axes.
      flat: the program as one list of equations.
      clusters: the clusters of its equations.
      values: the values that have layouts of their own.
      problem: the problem, with an operator for each group of clusters and values that share a strategy.
      groups: the operator of each cluster, then of each value.
      carried: for outputs (by number) the input that they become in the next step.
      handed: the moves that the problem's edges stand for, before equal clusters share a strategy.
    """

    program: Program
    axes: Axes
    flat: FlatProgram
    clusters: tuple[Cluster, ...]
    values: tuple[Value, ...]
    problem: Problem
    groups: tuple[int, ...]
    carried: Mapping[int, int]
    handed: tuple[Handover, ...]

    def spread(self, strategies: Array) -> tuple[Array, Array]:
        """The strategy of each cluster, and the layout's number of each value, in an assignment."""
        each = np.asarray(strategies)[list(self.groups)]
        return each[: len(self.clusters)], each[len(self.clusters) :]

    def steps(self) -> list[Array]:
        """The division of each strategy by each axis, per operator, int ``[strategies, axes]``; 0 for none."""
        found: list[Array] = []
        places: dict[int, int] = {}
        for place, operator in enumerate(self.groups):
            places.setdefault(operator, place)
        for operator in range(self.problem.operators):
            place = places[operator]
            if place < len(self.clusters):
                several = [s.picks for s in self.clusters[place].strategies]
                rows = [[0 if pick is None else pick + 1 for pick in picks] for picks in several]
            else:
                cuts = [layout.cut_axes for layout in self.values[place - len(self.clusters)].layouts]
                rows = [[cut.get(axis, -1) + 1 for axis in self.axes] for cut in cuts]
            found.append(np.array(rows, np.int64).reshape(len(rows), len(self.axes)))
        return found

    def flow(self, strategies: Array) -> Flow:
        """The layouts of an assignment, for `vnode.spmd.sharded_program.flow_over_mesh`.

        Args:
          strategies: int64 ``[operators]`` of the problem.

        Raises:
          SearchError: the strategies cannot be chosen together: their cost is infinite.
        """
        problem = self.problem
        if math.isinf(problem.cost(strategies)):
            apart = [e for e in problem.edges if math.isinf(e.seconds[strategies[e.start], strategies[e.end]])]
            facts = [f"{problem.name(e.start)} and {problem.name(e.end)}" for e in apart]
            facts += [problem.name(i) for i, s in enumerate(strategies) if math.isinf(problem.seconds[i][s])]
            raise SearchError(layout_message("these strategies cannot be chosen together.", facts=facts[:12]))
        chosen, layouts = self.spread(strategies)
        asked = {}
        for cluster, s in zip(self.clusters, chosen.tolist(), strict=True):
            asked.update(asked_by_path(self.flat, cluster, s))
        lies = {value.var: value.layouts[k] for value, k in zip(self.values, layouts.tolist(), strict=True)}
        inputs = [lies.get(var, replicated(len(getattr(var.aval, "shape", ())))) for var in self.program.inputs]
        outputs = [inputs[self.carried[j]] if j in self.carried else None for j in range(len(self.program.outputs))]
        return follow(self.program, inputs, self.axes, outputs=outputs, asked=asked, wishes=lies)


def as_problem(
    program: Program,
    axes: Axes,
    model: CostModel,
    *,
    carried: Mapping[int, int] | None = None,
    memory: float = math.inf,
    tied: bool = True,
    backward: bool = False,
    fixed: Mapping[int, Layout] | None = None,
    together: Sequence[Sequence[int]] = (),
    donated: Collection[int] = (),
) -> Search:
    """Turns a program into a problem.

    Args:
      program: the program, with calls inlined.
      axes: the mesh's axes that are longer than one.
      model: the cost of equations and moves.
      carried: for outputs, by number, the input that they become in the next step. Such an output gets the input's
        layout.
      memory: the bytes of each device.
      tied: whether equal clusters with equal neighbours share one strategy.
      backward: whether products over the same named dimensions also share one: a forward product and its two backward
        products. Element-wise equations share one in any case.
      fixed: fixed layouts of single inputs, by number.
      together: groups of inputs of one shape, by number, that get one layout.
      donated: the donated inputs, by number; their new values take their memory.

    Returns:
      The problem, with the meaning of its strategies.
    """
    return _Builder(program, axes, model, carried or {}, memory, tied, backward, fixed or {}, together, donated).build()


class _Builder:
    def __init__(
        self,
        program: Program,
        axes: Axes,
        model: CostModel,
        carried: Mapping[int, int],
        memory: float,
        tied: bool,
        backward: bool,
        fixed: Mapping[int, Layout],
        together: Sequence[Sequence[int]],
        donated: Collection[int],
    ) -> None:
        self.donated = donated
        self.fixed = {program.inputs[i]: layout for i, layout in fixed.items()}
        self.program, self.axes, self.model, self.carried = program, axes, model, carried
        self.memory, self.tied, self.backward = memory, tied, backward
        self.flat = flatten(program, axes)
        self.same = dict(self.flat.unified)  # variables that have the layout of another
        for several in ([program.inputs[i] for i in each] for each in together):
            first = max(several, key=lambda var: self.flat.uncut.get(var, 0))
            self.same.update((var, first) for var in several if var is not first)
        self.strategies = Strategies(self.flat, axes, model)
        found = clusters(self.flat)
        self.of = members(found)
        self.clusters = tuple(self.strategies.cluster(each) for each in found)
        self.place = {n: (k, p) for k, each in enumerate(found) for p, n in enumerate(each)}
        self.makers = {
            var: (*self.place[n], j) for n, node in enumerate(self.flat.nodes) for j, var in enumerate(node.eqn.outvars)
        }
        self.reads: dict[Var, dict[int, list[tuple[int, int]]]] = {}  # by cluster: positions and operands
        self.nowhere: dict[int, list[tuple[int, int]]] = {}  # operands computed from constants; never partial sums
        for var, several in readers(self.flat.nodes).items():
            for n, i in several:
                k, p = self.place[n]
                if var in self.flat.constants_only:
                    self.nowhere.setdefault(k, []).append((p, i))
                if var not in self.flat.free and self.makers.get(var, (-1,))[0] != k:
                    self.reads.setdefault(var, {}).setdefault(k, []).append((p, i))
        self.into: dict[Var, list[Link]] = {}  # by target
        self.tables: dict[Hashable, Array] = {}  # of moves
        self.out: dict[Var, int] = {}  # the number of links and outputs that hand a value on
        for link in self.flat.links:
            self.into.setdefault(link.target, []).append(link)
            self.out[link.source] = self.out.get(link.source, 0) + 1
        self.handed: dict[Var, list[int]] = {}  # the inputs that a value becomes in the next step
        for var, _ in self.flat.read_whole:
            self.out[var] = self.out.get(var, 0) + 1
        for j, atom in enumerate(program.outputs):
            if not isinstance(atom, Literal):
                self.out[atom] = self.out.get(atom, 0) + 1
                if j in self.carried:
                    self.handed.setdefault(atom, []).append(self.carried[j])

    def build(self) -> Search:
        values = self.values()
        number = {value.var: len(self.clusters) + k for k, value in enumerate(values)}
        seconds = [np.array([s.seconds for s in c.strategies]) for c in self.clusters]
        seconds += [np.zeros(len(value.layouts)) for value in values]
        for k, several in self.nowhere.items():
            asked = [any(layout.partial for layout in want) for want in self.operand_layouts(k, several)]
            seconds[k] = np.where(asked, math.inf, seconds[k])
        edges: list[Edge] = []
        alike: list[list[tuple[int, Hashable]]] = [[] for _ in seconds]  # for each operator, the keys of its edges

        handed: list[Handover] = []

        def edge(a: int, b: int, moved: Array, out: Hashable, into: Hashable, back: bool = False) -> None:
            edges.append(Edge(a, b, moved))
            after = out[0] if isinstance(out, tuple) else None
            before = tuple(dict.fromkeys(p for p, _ in into)) if isinstance(into, tuple) else ()
            handed.append(Handover(a, b, moved, after, before, back))
            alike[a].append((b, out))
            alike[b].append((a, into))

        for value in values:
            at = number[value.var]
            if value.var in self.makers:
                k, p, j = self.makers[value.var]
                moved = self.table(self.result_layouts(k, p, j), value.layouts, value.var, self.times(k, p))
                edge(k, at, moved, (p, j), "made")
            for each in self.into.get(value.var, ()):
                self.link(edge, number, at, value, each)
        for var, by in self.reads.items():
            for k, several in by.items():
                wants = self.operand_layouts(k, several)
                times = max(self.times(k, p) for p, _ in several)
                if var in number:
                    layouts = values[number[var] - len(self.clusters)].layouts
                    edge(number[var], k, self.table(layouts, wants, var, times), "read", tuple(several))
                elif var in self.makers:
                    m, p, j = self.makers[var]
                    edge(m, k, self.table(self.result_layouts(m, p, j), wants, var, times), (p, j), tuple(several))
        for var, inputs in self.handed.items():
            for i in inputs:
                target = number.get(self.program.inputs[i])
                if target is None or var is self.program.inputs[i]:
                    continue
                layouts = values[target - len(self.clusters)].layouts
                if var in self.makers:
                    m, p, j = self.makers[var]
                    edge(
                        m,
                        target,
                        self.table(self.result_layouts(m, p, j), layouts, var, 1.0),
                        (p, j, "next"),
                        "next",
                        True,
                    )
                elif var in number:
                    own = values[number[var] - len(self.clusters)].layouts
                    edge(number[var], target, self.table(own, layouts, var, 1.0), "becomes", "next", True)
        for j, atom in enumerate(self.program.outputs):
            if not isinstance(atom, Literal) and j not in self.carried and atom in self.makers:
                m, p, r = self.makers[atom]
                made = self.result_layouts(m, p, r)
                leave = np.array([self.strategies.move(x, x.without_partial, atom) for x in made])
                seconds[m] = seconds[m] + leave
                handed.append(Handover(m, None, leave[:, None], p))
        for var, times in self.flat.read_whole:
            whole = [replicated(len(var.aval.shape))]
            if var in number:
                at = number[var]
                layouts = values[at - len(self.clusters)].layouts
                moved = self.table(layouts, whole, var, times)
                seconds[at] = seconds[at] + moved[:, 0]
                handed.append(Handover(at, None, moved, None))
            elif var in self.makers:
                m, p, r = self.makers[var]
                moved = self.table(self.result_layouts(m, p, r), whole, var, times)
                seconds[m] = seconds[m] + moved[:, 0]
                handed.append(Handover(m, None, moved, p))
        problem = Problem(
            tuple(seconds), tuple(edges), tuple(self.live_bytes(values)), self.memory, tuple(self.names(values))
        )
        groups = self.groups(values, alike)
        return Search(
            self.program,
            self.axes,
            self.flat,
            self.clusters,
            tuple(values),
            problem.tied(groups),
            tuple(groups),
            self.carried,
            tuple(handed),
        )

    def times(self, cluster: int, position: int) -> float:
        return self.flat.nodes[self.clusters[cluster].nodes[position]].times

    def result_layouts(self, cluster: int, position: int, result: int) -> list[Layout]:
        """The layout of a result, for each strategy."""
        node = self.flat.nodes[self.clusters[cluster].nodes[position]]
        none = replicated(len(getattr(node.eqn.outvars[result].aval, "shape", ())))
        return [s.made.get((position, result), none) for s in self.clusters[cluster].strategies]

    def operand_layouts(self, cluster: int, several: Sequence[tuple[int, int]]) -> list[tuple[Layout, ...]]:
        """The layouts in which a value is read, for each strategy: each once, in the order of the readers."""
        strategies = self.clusters[cluster].strategies
        return [tuple(dict.fromkeys(s.wanted[key] for key in several if key in s.wanted)) for s in strategies]

    def table(
        self, starts: Sequence[Layout], ends: Sequence[Layout | tuple[Layout, ...]], var: Var, times: float
    ) -> Array:
        """Seconds of the moves from each of some layouts to each of others, float64 ``[starts, ends]``."""
        key = tuple(starts), tuple(ends), tuple(var.aval.shape), var.aval.dtype
        if key not in self.tables:
            first, second = dict.fromkeys(starts), dict.fromkeys(ends)
            singles = dict.fromkeys(e for b in second for e in (b if isinstance(b, tuple) else (b,)))
            into = {e: np.array([self.strategies.move(a, e, var) for a in first]) for e in singles}
            none = np.zeros(len(first))
            columns = [sum((into[e] for e in (b if isinstance(b, tuple) else (b,))), none) for b in second]
            row = {x: i for i, x in enumerate(first)}
            column = {x: i for i, x in enumerate(second)}
            small = np.array(columns).T
            self.tables[key] = small[np.ix_([row[x] for x in starts], [column[x] for x in ends])]
        return times * self.tables[key]

    def link(
        self,
        edge: Callable[[int, int, Array, Hashable, Hashable, bool], None],
        number: Mapping[Var, int],
        at: int,
        value: Value,
        link: Link,
    ) -> None:
        """Adds the edge of a link. A scanned or stacked value is whole along the dimension of iterations."""
        source, times, dropped, back = link.source, link.times, link.dropped, link.back
        ends = value.layouts
        if dropped > 0:
            ends = tuple(Layout((None, *layout.dims)) for layout in ends)
        if dropped < 0:  # every iteration moves a slice of the stack
            ends = tuple(Layout(layout.dims[1:]) for layout in ends)
        if source in number:
            starts = self._values[number[source] - len(self.clusters)].layouts
            maker, out = number[source], "handed"
        elif source in self.makers:
            maker, p, j = self.makers[source]
            starts, out = self.result_layouts(maker, p, j), (p, j, dropped)
        else:
            return
        edge(maker, at, self.table(self.by_branches(starts, link), ends, source, times), out, dropped, back)

    def by_branches(self, starts: Sequence[Layout], link: Link) -> Sequence[Layout]:
        """The layouts of a value that leaves a branch, or that a branch reads where it is."""
        if link.stays is not None:
            return [present_at_one(layout, link.stays) for layout in starts]
        if link.leaves is None:
            return starts
        order, one = list(self.axes), (link.leaves, monoid_of_one(link.source.aval.dtype))
        several = [(x, sorted((*x.partial, one), key=lambda piece: order.index(piece[0]))) for x in starts]
        return [Layout(layout.dims, tuple(pieces)) for layout, pieces in several]

    def values(self) -> list[Value]:
        """The values that have a layout of their own."""
        found: list[Value] = []
        inputs = set(self.program.inputs)
        same = self.same
        everything = dict.fromkeys([*self.program.inputs, *self.into, *same.values(), *same, *self.reads])
        for var in everything:
            stands = len(self.reads.get(var, ())) + self.out.get(var, 0)
            handed = var in inputs or var in self.into or var in same or var in same.values()
            if not (handed or stands > 1):
                continue
            layouts: dict[Layout, None] = {}
            if var in self.fixed:
                layouts[self.fixed[var]] = None
            elif handed:
                layouts.update(dict.fromkeys(self.possible_layouts(same.get(var, var))))
            else:
                layouts[replicated(len(var.aval.shape))] = None
                if var in self.makers:
                    layouts.update(dict.fromkeys(x.without_partial for x in self.result_layouts(*self.makers[var])))
                for k, several in self.reads.get(var, {}).items():
                    layouts.update(dict.fromkeys(x for want in self.operand_layouts(k, several) for x in want))
            found.append(Value(var, tuple(layouts)))
        self._values = found
        return found

    def possible_layouts(self, var: Var) -> list[Layout]:
        """Layouts with each axis on a dimension that it divides evenly, or on none; or as partial sums of a loop."""
        shape = getattr(var.aval, "shape", ())
        found = []
        apart, beside = self.flat.unsplit_axes.get(var, frozenset()), self.flat.branch_axis.get(var)
        places = [*range(self.flat.uncut.get(var, 0), len(shape)), *([-1] if var in self.flat.sums else [])]
        for picks in axis_picks(len(places), len(self.axes)):
            where = [None if pick is None else places[pick] for pick in picks]
            if any(w is not None and axis in apart for axis, w in zip(self.axes, where, strict=True)):
                continue
            dims = []
            pieces = tuple((a, Monoid.SUM) for a, w in zip(self.axes, where, strict=True) if w == -1)
            for d, n in enumerate(shape):
                names = tuple(a for a, w in zip(self.axes, where, strict=True) if w == d)
                dims.append(cut_of(names, 1, n, n, self.axes) if names else None)
            if all(cut is None or (shape[d] > 1 and is_even(cut, self.axes)) for d, cut in enumerate(dims)):
                found.append(Layout(tuple(dims), pieces))
        if beside is not None:
            found += [Layout(x.dims, ((beside, Monoid.SUM),)) for x in found if beside not in x.cut_axes]
        return found

    def live_bytes(self, values: Sequence[Value]) -> list[Array]:
        """Bytes at each point for each strategy: arguments, values between clusters, and operands of loops."""
        makers = {var: self.clusters[k].nodes[p] for var, (k, p, _) in self.makers.items()}
        crossing = {var: n for var, n in makers.items() if var in self.reads or var in self.out}
        number = {value.var: len(self.clusters) + k for k, value in enumerate(values)}
        outputs = self.program.outputs
        replaced = {atom for j, i in self.carried.items() if i in self.donated and isinstance(atom := outputs[j], Var)}
        spans = [span for span in spans_of(self.flat, crossing, replaced) if span.var in crossing or span.var in number]
        points = points_of(spans, max(len(self.flat.nodes), 1))
        held = [np.zeros((len(points), len(c.strategies))) for c in self.clusters]
        held += [np.zeros((len(points), len(value.layouts))) for value in values]
        memo: dict[Hashable, float] = {}

        def bytes_in(layout: Layout, var: Var) -> float:
            key = (layout, tuple(var.aval.shape), var.aval.dtype)
            if key not in memo:
                memo[key] = self.model.bytes(*key)
            return memo[key]

        def bytes_of(var: Var) -> Array:
            """Bytes of a value for each strategy of the cluster or value that decides about it."""
            own = () if var in crossing else values[number[var] - len(self.clusters)].layouts
            return np.array([bytes_in(layout, var) for layout in own or self.result_layouts(*self.makers[var])])

        copies: dict[tuple[DecidedBy, Var | None], int] = {}
        for span in spans:
            several = len(self.reads.get(span.var, ())) if span.counts is DecidedBy.READERS else 1
            copies[span.counts, span.copied] = copies.get((span.counts, span.copied), 0) + several
        for span in spans:
            when = (span.first <= points) & (points <= span.last)
            least = 0.0 if span.beside is None else bytes_of(span.beside).min()
            each = 1 if span.copied is None else copies[span.counts, span.copied]
            own = self.makers[span.var][0] if span.var in crossing else number[span.var]
            taken = span.turns * bytes_of(span.var)
            if span.counts is DecidedBy.READERS:
                for k, reading in self.reads.get(span.var, {}).items():
                    wanted = [
                        sum(bytes_in(layout, span.var) for layout in want) for want in self.operand_layouts(k, reading)
                    ]
                    held[k][when] += np.maximum(np.array(wanted) - least, 0) / each
            elif span.counts is DecidedBy.LAYOUT:
                held[own][when] += np.maximum(taken - least, 0) / each
            else:
                held[own][when] += max(taken.min() - least, 0)
        for var in self.program.inputs:
            if var in number:
                held[number[var]] += bytes_of(var)
        return held

    def names(self, values: Sequence[Value]) -> list[str]:
        main = [max(c.nodes, key=lambda n: self.work(n)) for c in self.clusters]
        return [self.flat.nodes[n].eqn.primitive.name for n in main] + [
            value.var.aval.str_short(short_dtypes=True) for value in values
        ]

    def work(self, node: int) -> float:
        d = self.flat.nodes[node].description
        return 0.0 if d is None else d.flops

    def groups(self, values: Sequence[Value], alike: Sequence[Sequence[tuple[int, Hashable]]]) -> list[int]:
        """The operator of each cluster and value; equal ones with equal neighbours share an operator.

        Source: Weisfeiler and Leman's refinement (1968).
        """
        same = [self.same.get(value.var, value.var) for value in values]
        joined = numbered([*(self.product(k) for k in range(len(self.clusters))), *same])
        if not self.tied:
            return joined
        inputs = set(self.program.inputs)
        own: list[list[Hashable]] = [[] for _ in range(max(joined, default=-1) + 1)]
        near: list[list[tuple[int, Hashable]]] = [[] for _ in own]
        for place, operator in enumerate(joined):
            what: Hashable
            if place < len(self.clusters):
                what = "cluster", self.clusters[place].shape
            else:
                value = values[place - len(self.clusters)]
                what = value.var.aval.shape, str(value.var.aval.dtype), value.layouts, value.var in inputs
            own[operator].append(what)
            near[operator] += [(joined[b], edge) for b, edge in alike[place]]
        labels = numbered([frozenset((each, several.count(each)) for each in several) for several in own])
        for _ in range(ROUNDS):
            labels = numbered(
                [
                    (label, frozenset((labels[b], edge) for b, edge in each))
                    for label, each in zip(labels, near, strict=True)
                ]
            )
        return [labels[operator] for operator in joined]

    def product(self, cluster: int) -> Hashable:
        """The key of products that share a strategy; None for single ones."""
        c = self.clusters[cluster]
        node = self.flat.nodes[c.nodes[0]]
        if not self.backward or len(c.nodes) > 1 or node.description is None:
            return None
        names = {name for each in c.dimensions for name in each} - {None}
        distinct = len(c.dimensions) == (len(names) + 1) ** len(self.axes)
        contracts = node.description.has(Algebra.CONTRACTS)
        return (frozenset(names), node.times) if distinct and contracts else None


def numbered(labels: Sequence[Hashable]) -> list[int]:
    """Equal labels as equal numbers, from 0 without gaps; None equals nothing.

    >>> numbered(["a", "b", "a", None, None])
    [0, 1, 0, 2, 3]
    """
    known: dict[Hashable, int] = {}
    return [known.setdefault((k,) if label is None else ("", label), len(known)) for k, label in enumerate(labels)]
