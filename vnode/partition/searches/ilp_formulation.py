"""A program -> a problem: clusters and shared values are its operators, moves between them its edges.

Knows lists of equations, clusters with their strategies, and problems. Must not know how a search works, nor the
experts' splits.

An argument, a loop's carry, or a value that several clusters read is an operator of its own. Its strategies are
layouts, so that bringing the value into a layout is counted once for all its readers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from vnode.analysis.program import Program
from vnode.errors import SearchError
from vnode.operators import Monoid
from vnode.partition.searches.coarsen import clusters
from vnode.partition.searches.flattened_program import FlatProgram, Link, flatten, readers
from vnode.partition.searches.problem import Array, Edge, Problem
from vnode.partition.searches.problem_memory import DecidedBy, points_of, spans_of
from vnode.partition.searches.search_costs import Estimate, local_bytes
from vnode.partition.searches.strategies import Cluster, Strategies, asked_by_path, axis_picks
from vnode.spmd.layout import Axes, Layout, cut_of, replicated, replicated_atom
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
      after: the position of the node that computes it, and the number of the result; None if `start` is a value.
      before: the positions of the nodes that read it, each with the number of the operand.
      why: equal for handovers of one kind: to a value, to readers, to the next step, or over a link that drops as many
        dimensions.
      back: whether the next iteration, or the next step, reads it.
    """

    start: int
    end: int | None
    seconds: Array
    after: tuple[int, int] | None
    before: tuple[tuple[int, int], ...] = ()
    why: Hashable = "result"
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

    @functools.cached_property
    def first(self) -> list[int]:
        """The first cluster or value of each operator."""
        return np.unique(self.groups, return_index=True)[1].tolist()

    def steps(self) -> list[Array]:
        """The division of each strategy by each axis, per operator, int ``[strategies, axes]``; 0 for none."""
        found: list[Array] = []
        for place in self.first:
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
            pairs = (
                (e.start, e.end) for e in problem.edges if math.isinf(e.seconds[strategies[e.start], strategies[e.end]])
            )
            apart = [f"operators {start} and {end}" for start, end in pairs]
            raise SearchError("these strategies cannot be chosen together.", facts=apart[:12])
        chosen, layouts = self.spread(strategies)
        asked = {}
        for cluster, s in zip(self.clusters, chosen.tolist(), strict=True):
            asked.update(asked_by_path(self.flat, cluster, s))
        lies = {value.var: value.layouts[k] for value, k in zip(self.values, layouts.tolist(), strict=True)}
        inputs = [lies.get(var, replicated_atom(var)) for var in self.program.inputs]
        outputs = [inputs[self.carried[j]] if j in self.carried else None for j in range(len(self.program.outputs))]
        return follow(self.program, inputs, self.axes, outputs=outputs, asked=asked, wishes=lies)


def as_problem(
    program: Program,
    axes: Axes,
    model: Estimate,
    *,
    carried: Mapping[int, int] | None = None,
    memory: float = math.inf,
    tied: bool = True,
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
      fixed: fixed layouts of single inputs, by number.
      together: groups of inputs of one shape, by number, that get one layout.
      donated: the donated inputs, by number; their new values take their memory.

    Returns:
      The problem, with the meaning of its strategies.
    """
    made = _Builder(program, axes, model, carried or {}, fixed or {}, together, donated)
    made.hand_over()
    edges = [Edge(each.start, each.end, each.seconds) for each in made.handed if each.end is not None]
    problem = Problem(tuple(made.seconds), tuple(edges), tuple(made.live_bytes()), memory)
    groups = made.groups(tied)
    return Search(
        program,
        axes,
        made.flat,
        made.clusters,
        tuple(made.values),
        problem.tied(groups),
        tuple(groups),
        made.carried,
        tuple(made.handed),
    )


class _Builder:
    """The operators of a problem, and what they hand to each other; arguments as for `as_problem`."""

    def __init__(
        self,
        program: Program,
        axes: Axes,
        model: Estimate,
        carried: Mapping[int, int],
        fixed: Mapping[int, Layout],
        together: Sequence[Sequence[int]],
        donated: Collection[int],
    ) -> None:
        self.program, self.axes, self.model, self.carried, self.donated = program, axes, model, carried, donated
        self.flat = flatten(program, axes)
        self.same = dict(self.flat.unified)  # variables that have the layout of another
        for several in ([program.inputs[i] for i in each] for each in together):
            first = max(several, key=lambda var: self.flat.uncut.get(var, 0))
            self.same.update((var, first) for var in several if var is not first)
        self.strategies = Strategies(self.flat, axes, model)
        found = clusters(self.flat)
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
        for link in self.flat.links:
            self.into.setdefault(link.target, []).append(link)
        outputs = [atom for atom in program.outputs if isinstance(atom, Var)]
        leaves = [*(link.source for link in self.flat.links), *(var for var, _ in self.flat.read_whole), *outputs]
        self.out = collections.Counter(leaves)  # how often a value is handed on, other than to an equation
        self.tables: dict[Hashable, Array] = {}  # of moves
        self.values = self.own_layouts({program.inputs[i]: layout for i, layout in fixed.items()})
        self.number = {value.var: len(self.clusters) + k for k, value in enumerate(self.values)}
        self.seconds = [np.array([s.seconds for s in c.strategies]) for c in self.clusters]
        self.seconds += [np.zeros(len(value.layouts)) for value in self.values]
        self.handed: list[Handover] = []

    def hand_over(self) -> None:
        """Adds all handovers, and what the step's results and values that are read whole take."""
        for k, several in self.nowhere.items():
            asked = [any(layout.partial for layout in want) for want in self.operand_layouts(k, several)]
            self.seconds[k] = np.where(asked, math.inf, self.seconds[k])
        for value in self.values:
            at = self.number[value.var]
            if value.var in self.makers:
                k, p, j = self.makers[value.var]
                moved = self.table(self.result_layouts(k, p, j), value.layouts, value.var, self.times(k, p))
                self.handed.append(Handover(k, at, moved, (p, j), (), "made"))
            for link in self.into.get(value.var, ()):
                if (origin := self.origin(link.source)) is not None:
                    start, starts, after = origin
                    moved = self.table(self.by_branches(starts, link), ends_of(link, value), link.source, link.times)
                    self.handed.append(Handover(start, at, moved, after, (), link.dropped, link.back))
        for var, by in self.reads.items():
            if (origin := self.origin(var)) is None:
                continue
            start, starts, after = origin
            for k, several in by.items():
                times = max(self.times(k, p) for p, _ in several)
                moved = self.table(starts, self.operand_layouts(k, several), var, times)
                self.handed.append(Handover(start, k, moved, after, tuple(several), "read"))
        for j, atom in enumerate(self.program.outputs):
            if isinstance(atom, Literal) or (origin := self.origin(atom)) is None:
                continue
            start, starts, after = origin
            if j in self.carried:
                target = self.program.inputs[self.carried[j]]
                if target is not atom:
                    at = self.number[target]
                    moved = self.table(starts, self.values[at - len(self.clusters)].layouts, atom, 1.0)
                    self.handed.append(Handover(start, at, moved, after, (), "next", True))
            elif atom in self.makers:
                k, p, r = self.makers[atom]
                made = self.result_layouts(k, p, r)
                self.leave(k, [[self.strategies.move(x, x.without_partial, atom)] for x in made], (p, r))
        for var, times in self.flat.read_whole:
            if (origin := self.origin(var)) is not None:
                start, starts, after = origin
                self.leave(start, self.table(starts, [replicated(len(var.aval.shape))], var, times), after)

    def origin(self, var: Var) -> tuple[int, Sequence[Layout], tuple[int, int] | None] | None:
        """Where readers get a value: the number, the layouts by strategy, and the node's position and result.

        None if the value is computed from constants.
        """
        if var in self.number:
            at = self.number[var]
            return at, self.values[at - len(self.clusters)].layouts, None
        if var in self.makers:
            k, p, j = self.makers[var]
            return k, self.result_layouts(k, p, j), (p, j)
        return None

    def leave(self, start: int, seconds: Any, after: tuple[int, int] | None) -> None:
        """Adds the seconds of a move that no other operator decides about."""
        moved = np.array(seconds)
        self.seconds[start] = self.seconds[start] + moved[:, 0]
        self.handed.append(Handover(start, None, moved, after))

    def times(self, cluster: int, position: int) -> float:
        return self.flat.nodes[self.clusters[cluster].nodes[position]].times

    def result_layouts(self, cluster: int, position: int, result: int) -> list[Layout]:
        """The layout of a result, for each strategy."""
        node = self.flat.nodes[self.clusters[cluster].nodes[position]]
        none = replicated_atom(node.eqn.outvars[result])
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

    def by_branches(self, starts: Sequence[Layout], link: Link) -> Sequence[Layout]:
        """The layouts of a value that leaves a branch, or that a branch reads where it is."""
        if link.stays is not None:
            return [present_at_one(layout, link.stays) for layout in starts]
        if link.leaves is None:
            return starts
        order, one = list(self.axes), (link.leaves, monoid_of_one(link.source.aval.dtype))
        several = [(x, sorted((*x.partial, one), key=lambda piece: order.index(piece[0]))) for x in starts]
        return [Layout(layout.dims, tuple(pieces)) for layout, pieces in several]

    def own_layouts(self, fixed: Mapping[Var, Layout]) -> list[Value]:
        """The values that have a layout of their own; those of `fixed` have one choice."""
        found: list[Value] = []
        handed = {*self.program.inputs, *self.into, *self.same.values(), *self.same}
        everything = dict.fromkeys([*self.program.inputs, *self.into, *self.same.values(), *self.same, *self.reads])
        for var in everything:
            if var in fixed:
                layouts = [fixed[var]]
            elif var in handed:
                layouts = self.possible_layouts(self.same.get(var, var))
            elif len(self.reads[var]) + self.out[var] > 1:
                layouts = [replicated(len(var.aval.shape))]
                if var in self.makers:
                    layouts += [x.without_partial for x in self.result_layouts(*self.makers[var])]
                for k, several in self.reads[var].items():
                    layouts += [x for want in self.operand_layouts(k, several) for x in want]
            else:
                continue
            found.append(Value(var, tuple(dict.fromkeys(layouts))))
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

    def live_bytes(self) -> list[Array]:
        """Bytes at each point for each strategy: arguments, values between clusters, and operands of loops."""
        makers = {var: self.clusters[k].nodes[p] for var, (k, p, _) in self.makers.items()}
        crossing = {var: n for var, n in makers.items() if var in self.reads or var in self.out}
        number, outputs = self.number, self.program.outputs
        replaced = {atom for j, i in self.carried.items() if i in self.donated and isinstance(atom := outputs[j], Var)}
        spans = [span for span in spans_of(self.flat, crossing, replaced) if span.var in crossing or span.var in number]
        points = points_of(spans, max(len(self.flat.nodes), 1))
        held = [np.zeros((len(points), len(c.strategies))) for c in self.clusters]
        held += [np.zeros((len(points), len(value.layouts))) for value in self.values]
        memo: dict[Hashable, int] = {}

        def bytes_in(layout: Layout, var: Var) -> int:
            key = (layout, tuple(var.aval.shape), var.aval.dtype)
            if key not in memo:
                memo[key] = local_bytes(layout, var.aval, self.axes)
            return memo[key]

        def bytes_of(var: Var) -> Array:
            """Bytes of a value for each strategy of the cluster or value that decides about it."""
            own = () if var in crossing else self.values[number[var] - len(self.clusters)].layouts
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

    def groups(self, tied: bool) -> list[int]:
        """The operator of each cluster and value; equal ones with equal neighbours share an operator if `tied`.

        Source: Weisfeiler and Leman's refinement (1968).
        """
        joined = numbered([*[None] * len(self.clusters), *(self.same.get(v.var, v.var) for v in self.values)])
        if not tied:
            return joined
        inputs = set(self.program.inputs)
        own: list[list[Hashable]] = [[] for _ in range(max(joined, default=-1) + 1)]
        near: list[list[tuple[int, Hashable]]] = [[] for _ in own]
        for operator, cluster in zip(joined, self.clusters, strict=False):
            own[operator].append(cluster.shape)
        for operator, value in zip(joined[len(self.clusters) :], self.values, strict=True):
            aval = value.var.aval
            own[operator].append((aval.shape, str(aval.dtype), value.layouts, value.var in inputs))
        for each in self.handed:
            if each.end is not None:
                near[joined[each.start]].append((joined[each.end], (each.after, each.why)))
                near[joined[each.end]].append((joined[each.start], (each.before, each.why)))
        labels = numbered([frozenset(collections.Counter(several).items()) for several in own])
        for _ in range(ROUNDS):
            around = [frozenset((labels[b], edge) for b, edge in each) for each in near]
            labels = numbered([*zip(labels, around, strict=True)])
        return [labels[operator] for operator in joined]


def ends_of(link: Link, value: Value) -> Sequence[Layout]:
    """The layouts of a link's source for each layout of its target; iterations' slices are whole along the stack."""
    if link.dropped > 0:
        return [Layout((None, *layout.dims)) for layout in value.layouts]
    return [Layout(layout.dims[1:]) for layout in value.layouts] if link.dropped < 0 else value.layouts


def numbered(labels: Sequence[Hashable]) -> list[int]:
    """Equal labels as equal numbers, from 0 without gaps; None equals nothing.

    >>> numbered(["a", "b", "a", None, None])
    [0, 1, 0, 2, 3]
    """
    known: dict[Hashable, int] = {}
    return [known.setdefault((k,) if label is None else ("", label), len(known)) for k, label in enumerate(labels)]
