"""A program as one list of equations, those of loops' bodies among them, with dimensions that belong together.

Knows programs, loops and descriptions. Must not know layouts that are chosen, costs, nor strategies.

Dimensions that one factor of an equation indexes are one *named dimension*: the batch, a layer's hidden units. They are
found by following the factors of all equations (union-find).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom, Program
from vnode.operators import Algebra, LookedUp, OperatorDescription, Prefix, Windowed
from vnode.spmd.choice import itemsize
from vnode.spmd.flow import Flow, Path, follow
from vnode.spmd.layout import Axes, replicated


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An equation.

    Attributes:
      path: where it is in the program.
      eqn: the equation.
      description: of it; None for what cannot be cut.
      times: how often it is evaluated in a step.
    """

    path: Path
    eqn: JaxprEqn
    description: OperatorDescription | None
    times: float


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """A value that is handed into a loop or branch, from turn to turn, or out of it.

    Attributes:
      source: the variable that is handed on.
      target: what it is called there.
      times: how often.
      dropped: leading dimensions that the target lacks (a slice of what is scanned), or has more (what is stacked).
    """

    source: Var
    target: Var
    times: float
    dropped: int = 0


class Names:
    """Union-find."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, key: Hashable) -> Hashable:
        """Who stands for a key's class."""
        root = key
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while (parent := self._parent.get(key, root)) != root:
            self._parent[key], key = root, parent
        return root

    def join(self, a: Hashable, b: Hashable) -> None:
        """Makes two classes one."""
        self._parent[self.find(a)] = self.find(b)


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A program as one list.

    Attributes:
      program: what it was.
      nodes: its equations, without those whose results are made of nothing wherever they are needed.
      links: between its parts.
      names: the named dimensions: of (variable, dimension), and of (number of a node, factor).
    """

    program: Program
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    names: Names

    def named(self, var: Var, dim: int) -> Hashable:
        """The named dimension of a value's dimension."""
        return self.names.find((var, dim))

    def factor(self, node: int, factor: int) -> Hashable:
        """The named dimension of an equation's factor."""
        return self.names.find((node, factor))


def flat(program: Program, axes: Axes) -> Flat:
    """Lists a program's equations and names its dimensions.

    Args:
      program: with calls inlined.
      axes: of a mesh, those longer than one.
    """
    flow = follow(program, [replicated(len(getattr(var.aval, "shape", ()))) for var in program.inputs], axes)
    nodes: list[Node] = []
    links: list[Link] = []
    free: set[Var] = set()
    _walk(flow, (), 1.0, nodes, links, free)
    names = Names()
    for number, node in enumerate(nodes):
        _name(names, number, node)
    for link in links:
        skipped = max(link.dropped, 0)
        for d in range(skipped, len(link.source.aval.shape)):
            names.join((link.source, d), (link.target, d - link.dropped))
    return Flat(program, tuple(nodes), tuple(links), names)


def _walk(flow: Flow, at: Path, times: float, nodes: list[Node], links: list[Link], free: set[Var]) -> None:
    free |= flow.program.constants.keys()
    for number, step in enumerate(flow.steps):
        path, eqn, region = (*at, number), step.eqn, step.region
        if region is None:
            if step.anyhow and all(isinstance(atom, Literal) or atom in free for atom in eqn.invars):
                free.update(eqn.outvars)
            else:
                nodes.append(Node(path, eqn, flow.program.describe(eqn), times))
            continue
        turns = times * region.times
        for k, (body, inputs) in enumerate(zip(step.bodies, region.inputs, strict=True)):
            for i, var in zip(inputs, body.program.inputs, strict=True):
                atom = eqn.invars[i]
                if not isinstance(atom, Literal) and atom not in free:
                    links.append(Link(atom, var, times, int(i in region.scanned)))
            _walk(body, (*path, k), turns, nodes, links, free)
            if k < region.tests:
                continue
            carried = len(region.carried)
            into = dict(zip(inputs, body.program.inputs, strict=True))
            for j, (atom, result) in enumerate(zip(body.program.outputs, eqn.outvars, strict=True)):
                if isinstance(atom, Literal) or atom in free:
                    continue
                stacked = region.stacks and j >= carried
                links.append(Link(atom, result, turns if stacked else times, -int(stacked)))
                if j < carried:
                    links.append(Link(atom, into[region.carried[j]], turns))


def _name(names: Names, number: int, node: Node) -> None:
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


def decides(description: OperatorDescription | None) -> bool:
    """Whether an equation is a kernel of its own, and has a strategy of its own: a contraction, a window, a look-up, a
    running sum. What works element by element, or moves elements, is fused with its neighbours."""
    if description is None:
        return True
    own = any(isinstance(x.split, LookedUp | Windowed | Prefix) for x in description.factors)
    return own or description.has(Algebra.CONTRACTS)


def size_of(atom: Atom) -> int:
    """The bytes of a whole value."""
    return math.prod(getattr(atom.aval, "shape", ())) * itemsize(atom.aval.dtype)


def variables(atoms: Sequence[Atom]) -> Iterator[tuple[int, Var]]:
    """Those that are no literals, with their places."""
    return ((i, atom) for i, atom in enumerate(atoms) if not isinstance(atom, Literal))


def readers(nodes: Sequence[Node]) -> Mapping[Var, list[tuple[int, int]]]:
    """For each value the nodes that read it, and as which operand."""
    found: dict[Var, list[tuple[int, int]]] = {}
    for number, node in enumerate(nodes):
        for i, var in variables(node.eqn.invars):
            found.setdefault(var, []).append((number, i))
    return found
