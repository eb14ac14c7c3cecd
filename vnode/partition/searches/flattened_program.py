"""A program -> one list of its equations, loop bodies included, with names for the dimensions that belong together.

Knows programs, loops and descriptions. Must not know chosen layouts, costs, nor strategies.

A *named dimension* is a set of array dimensions that equations index by the same factor: the batch, a layer's hidden
units. Union-find over the factors of all equations finds them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom, Program
from vnode.operators import Algebra, LookedUp, Monoid, OperatorDescription, Prefix, Windowed
from vnode.operators.control_flow import Region, region_of
from vnode.spmd.branch_groups import Branches, branch_locations
from vnode.spmd.layout import Axes, replicated_atom
from vnode.spmd.sharding_flow import Flow, Path, Step, follow, monoid_of_one


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An equation.

    Attributes:
      path: its place in the program.
      eqn: the equation.
      description: its description; None if it cannot be divided.
      times: how often a step evaluates it.
      unsplit_axes: axes along which devices evaluate other branches; none of them divides it.
    """

    path: Path
    eqn: JaxprEqn
    description: OperatorDescription | None
    times: float
    unsplit_axes: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """A value that enters a loop or branch, goes on to the next iteration, or leaves.

    Attributes:
      source: the variable outside, or of the iteration before.
      target: the variable that receives it.
      times: how often in a step.
      dropped: the number of leading dimensions that the target lacks (a slice of a scanned array); negative if it has
        more (a stacked result).
      back: whether the value goes to the next iteration.
      leaves: set if the value leaves a branch: the axis of which the devices at one index hold it, as partial sums.
      stays: the axis along which partial sums need not be combined, since the devices that hold them read them.
    """

    source: Var
    target: Var
    times: float
    dropped: int = 0
    back: bool = False
    leaves: str | None = None
    stays: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LoopOrBranches:
    """A loop, or branches of which a step takes one.

    Attributes:
      first: its first node.
      last: its last node; the one before `first` if it has none.
      reads: for each operand variable of the bodies, the outer value; None for constants.
      scanned: operands of which each iteration reads a slice.
      carried: the loop's carries.
      makes: its results.
      stacked: results that get a slice from each iteration.
    """

    first: int
    last: int
    reads: Mapping[Var, Var | None]
    scanned: frozenset[Var]
    carried: frozenset[Var]
    makes: tuple[Var, ...]
    stacked: frozenset[Var]


class UnionFind:
    """Union-find."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, key: Hashable) -> Hashable:
        """The representative of a key's class."""
        root = key
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while (parent := self._parent.get(key, root)) != root:
            self._parent[key], key = root, parent
        return root

    def join(self, a: Hashable, b: Hashable) -> None:
        """Makes two classes one."""
        self._parent[self.find(a)] = self.find(b)


@dataclasses.dataclass(eq=False)
class FlatProgram:
    """A program, its loops and branches included, as one list of equations.

    Attributes:
      program: the program.
      nodes: its equations, except those of constants alone, which each reader evaluates for itself.
      links: the values that enter, leave or go round its loops and branches.
      names: the named dimension of each (variable, dimension) and of each (number of a node, factor).
      free: variables that are computed from constants alone, wherever they are needed.
      sums: carries that begin as zero, which may be carried as partial sums.
      unified: variables of several bodies that are one operand of their loop or branches, and have one layout.
      read_whole: values that every device needs whole, and how often: branch indices and conditions of loops.
      ends: for a loop's final carry, the value that its last iteration hands on.
      uncut: the number of a variable's leading dimensions that are not divided, such as iterations of a loop.
      unsplit_axes: for variables in branches that run side by side, the axes that divide nothing there.
      branch_axis: for results of such branches, the axis along which the devices of one index hold them.
      parts: loops, and branches of which a step takes one, inner ones first.
    """

    program: Program
    nodes: list[Node] = dataclasses.field(default_factory=list)
    links: list[Link] = dataclasses.field(default_factory=list)
    names: UnionFind = dataclasses.field(default_factory=UnionFind)
    free: set[Var] = dataclasses.field(default_factory=set)
    sums: set[Var] = dataclasses.field(default_factory=set)
    unified: dict[Var, Var] = dataclasses.field(default_factory=dict)
    read_whole: list[tuple[Var, float]] = dataclasses.field(default_factory=list)
    ends: dict[Var, Atom] = dataclasses.field(default_factory=dict)
    uncut: dict[Var, int] = dataclasses.field(default_factory=dict)
    unsplit_axes: dict[Var, frozenset[str]] = dataclasses.field(default_factory=dict)
    branch_axis: dict[Var, str] = dataclasses.field(default_factory=dict)
    parts: list[LoopOrBranches] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def constants_only(self) -> frozenset[Var]:
        """The free variables, and the variables in bodies of loops and branches that depend on free ones alone."""
        found = set(self.free)
        for part in reversed(self.parts):  # outer ones first
            for var, source in part.reads.items():
                if var not in part.carried and (source is None or source in found):
                    found.add(var)
        return frozenset(found)

    def named(self, var: Var, dim: int) -> Hashable:
        """The named dimension of a value's dimension."""
        return self.names.find((var, dim))

    def factor(self, node: int, factor: int) -> Hashable:
        """The named dimension of an equation's factor."""
        return self.names.find((node, factor))


def flatten(program: Program, axes: Axes) -> FlatProgram:
    """Lists a program's equations and names its dimensions.

    Args:
      program: the program, with calls inlined.
      axes: the mesh's axes that are longer than one.
    """
    flow = follow(program, list(map(replicated_atom, program.inputs)), axes)
    flat = FlatProgram(program)
    _Walk(flat).all(flow, (), 1.0)
    for number, node in enumerate(flat.nodes):
        _name(flat.names, number, node)
    for link in flat.links:
        skipped = max(link.dropped, 0)
        for d in range(skipped, len(link.source.aval.shape)):
            flat.names.join((link.source, d), (link.target, d - link.dropped))
    for one, other in flat.unified.items():
        for d in range(len(getattr(one.aval, "shape", ()))):
            flat.names.join((one, d), (other, d))
    return flat


class _Walk:
    """Goes through a program and its bodies, and fills a `FlatProgram`."""

    def __init__(self, flat: FlatProgram) -> None:
        self.flat, self.free = flat, flat.free
        self.zero: set[Var] = set()
        self.without: frozenset[str] = frozenset()

    def all(self, flow: Flow, at: Path, times: float) -> None:
        self.free.update(flow.program.constants)
        self.flat.unsplit_axes.update(dict.fromkeys(flow.program.inputs, self.without))
        made = branch_locations(flow.program)
        for number, step in enumerate(flow.steps):
            path, eqn = (*at, number), step.eqn
            if step.region is not None:
                self.region(step, step.region, path, times)
            elif step.branches is not None:
                self.side_by_side(step, step.branches, path, times, made)
            elif step.materializable and all(self.is_free(atom) for atom in eqn.invars):
                self.free.update(eqn.outvars)
                description = flow.program.describe(eqn)
                moves = description is not None and description.has(Algebra.MOVES)
                if moves and eqn.invars and all(self.is_zero(atom) for atom in eqn.invars):
                    self.zero.update(eqn.outvars)
            else:
                self.flat.nodes.append(Node(path, eqn, flow.program.describe(eqn), times, self.without))
            self.flat.unsplit_axes.update(dict.fromkeys(eqn.outvars, self.without))

    def side_by_side(
        self, step: Step, branches: Branches, path: Path, times: float, made: Mapping[Var, tuple[str, int]]
    ) -> None:
        """Branches that run at the same time. Their times are still summed, so that each branch is divided well."""
        eqn, axis, first = step.eqn, branches.axis, dict[int, Var]()
        before, self.without = self.without, self.without | {axis}
        for k, (body, reads) in enumerate(zip(step.bodies, branches.operands, strict=True)):
            for i, var in zip(reads, body.program.inputs, strict=True):
                atom = eqn.invars[i]
                if i in first:
                    self.flat.unified[var] = first[i]
                elif self.is_free(atom):
                    self.free.add(var)
                else:
                    first[i] = var
                    assert isinstance(atom, Var)
                    stays = axis if branches.reads_at(i, made.get(atom)) else None
                    self.flat.links.append(Link(atom, var, times, stays=stays))
            self.all(body, (*path, k), times)
        self.without = before
        for body, makes in zip(step.bodies, branches.results, strict=True):
            for j, atom in zip(makes, body.program.outputs, strict=True):
                assert isinstance(atom, Var)
                if atom in self.free:
                    continue
                self.flat.links.append(Link(atom, eqn.outvars[j], times, leaves=axis))
                if monoid_of_one(atom.aval.dtype) is Monoid.SUM:
                    self.flat.branch_axis[eqn.outvars[j]] = axis

    def is_free(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or atom in self.free

    def is_zero(self, atom: Atom) -> bool:
        if isinstance(atom, Literal):
            return not getattr(atom.aval, "shape", ()) and atom.val == 0
        return atom in self.zero

    def link(self, source: Atom, target: Var, times: float, dropped: int = 0, back: bool = False) -> None:
        if not self.is_free(source):
            assert isinstance(source, Var)
            self.flat.links.append(Link(source, target, times, dropped, back))

    def region(self, step: Step, region: Region, path: Path, times: float) -> None:
        eqn, turns, first, begins = step.eqn, times * region.run_count, dict[int, Var](), len(self.flat.nodes)
        choosers = [] if region.chooser is None else [eqn.invars[region.chooser]]
        self.flat.read_whole += [(a, times) for a in choosers if not isinstance(a, Literal) and a not in self.free]
        tested = [atom for body in step.bodies[: region.tests] for atom in body.program.outputs]
        stopping = max((len(atom.aval.shape) for atom in tested), default=0)
        for k, (body, inputs) in enumerate(zip(step.bodies, region.inputs, strict=True)):
            for i, var in zip(inputs, body.program.inputs, strict=False):
                if i in first:
                    self.flat.unified[var] = first[i]
                    continue
                first[i] = var
                self.link(eqn.invars[i], var, times, int(i in region.scanned))
                if i in region.carried:
                    self.flat.uncut[var] = stopping
                    if region.stacks and self.is_zero(eqn.invars[i]) and only_added_to(body.program, var):
                        self.flat.sums.add(var)
            self.all(body, (*path, k), turns)
        self.flat.read_whole += [(a, turns) for a in tested if not isinstance(a, Literal) and a not in self.free]
        for body in step.bodies[region.tests :]:
            for j, (atom, result) in enumerate(zip(body.program.outputs, eqn.outvars, strict=True)):
                if j < len(region.carried):
                    held = first[region.carried[j]]
                    self.link(atom, held, turns, back=True)
                    self.link(held, result, times)
                    self.flat.ends[result] = atom
                elif region.stacks:
                    self.flat.uncut[result] = 1
                    self.link(atom, result, turns, -1)
                else:
                    self.link(atom, result, times)
        given = {i: atom for i, atom in enumerate(eqn.invars) if isinstance(atom, Var) and not self.is_free(atom)}
        part = LoopOrBranches(
            begins,
            len(self.flat.nodes) - 1,
            {var: given.get(i) for i, var in first.items()},
            frozenset(var for i, var in first.items() if i in region.scanned),
            frozenset(var for i, var in first.items() if i in region.carried),
            tuple(eqn.outvars),
            frozenset(eqn.outvars[len(region.carried) :] if region.stacks else ()),
        )
        self.flat.parts.append(part)


def only_added_to(program: Program, var: Var) -> bool:
    """Whether every reader of a variable adds to it, so that partial sums can be added to other partial sums."""
    reading = [eqn for eqn in program.equations if var in eqn.invars]
    several = [None if region_of(eqn) is not None else program.describe(eqn) for eqn in reading]
    return bool(reading) and all(
        d is not None and any(len(group) == len(d.operands) for group in d.linear) for d in several
    )


def _name(names: UnionFind, number: int, node: Node) -> None:
    d = node.description
    if d is None:
        return
    for atoms, several in ((node.eqn.invars, d.operands), (node.eqn.outvars, d.results)):
        for atom, dims in zip(atoms, several, strict=True):
            if isinstance(atom, Literal):
                continue
            for k, dim in enumerate(dims):
                major = next((f for f in dim if d.sizes[f] > 1), None)
                if major is not None:
                    names.join((atom, k), (number, major))
    for lead, split in d.leads:
        together = sorted(split.concerned(lead))
        for f in together[1:]:
            names.join((number, together[0]), (number, f))


def has_own_strategy(description: OperatorDescription | None) -> bool:
    """Whether an equation compiles to a kernel of its own and so has a strategy of its own.

    Contractions, windows, look-ups and running sums do. Element-wise and data-moving equations are fused with their
    neighbours.
    """
    if description is None:
        return True
    own = any(isinstance(x.split, LookedUp | Windowed | Prefix) for x in description.factors)
    return own or description.has(Algebra.CONTRACTS)


def variables(atoms: Sequence[Atom]) -> Iterator[tuple[int, Var]]:
    """The atoms that are variables, each with its position."""
    return ((i, atom) for i, atom in enumerate(atoms) if not isinstance(atom, Literal))


def readers(nodes: Sequence[Node]) -> Mapping[Var, list[tuple[int, int]]]:
    """The readers of each value: the node's number, and the operand's."""
    found: dict[Var, list[tuple[int, int]]] = {}
    for number, node in enumerate(nodes):
        for i, var in variables(node.eqn.invars):
            found.setdefault(var, []).append((number, i))
    return found
