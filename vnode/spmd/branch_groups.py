"""Branches of a program side by side: equations that do not depend on each other, each on devices of its own.

Knows programs, and which equation reads what another computes. Must not know layouts, nor how anything is carried out.

A group says which equations are which branch's, along one axis of a mesh: the towers of an Inception block, two
encoders, experts. A program with groups has one equation in the place of each group's, whose bodies are the branches.
Devices with index i along the axis evaluate branch i only, and have nothing (zero) of what others compute: pieces of
a sum, as of any reduction that is divided. What a branch of a later group at the same index alone reads of them stays
where it is: a backward pass what its forward pass has kept.

Source: operators on disjoint sets of devices as in FlexFlow's parallelization space (Jia, Zaharia, Aiken, "Beyond data
and model parallelism for deep neural networks", MLSys 2019, section 4).
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Primitive, Var

from vnode.analysis.program import Program, barrier_equation, message_about, scope
from vnode.errors import PartitionError

side_by_side_p = Primitive("side_by_side")
side_by_side_p.multiple_results = True


@side_by_side_p.def_abstract_eval
def _(*_: Any, branches: Branches) -> list[Any]:
    return list(branches.types)


@dataclasses.dataclass(frozen=True)
class Group:
    """Branches of a program, one for each index along an axis.

    Attributes:
      axis: of the mesh.
      branches: for each index the equations of its branch, by number; indices behind the last have none.
    """

    axis: str
    branches: tuple[frozenset[int], ...]

    @property
    def equations(self) -> frozenset[int]:
        """The equations of all branches."""
        return frozenset().union(*self.branches)


@dataclasses.dataclass(frozen=True)
class Branches:
    """What a `side_by_side` equation consists of.

    Attributes:
      axis: of the mesh.
      programs: the branches.
      operands: for each branch which operands of the equation are its inputs.
      results: for each branch which results of the equation are its outputs.
    """

    axis: str
    programs: tuple[Program, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]

    @property
    def types(self) -> list[Any]:
        """Of all results."""
        found = {
            i: atom.aval
            for program, makes in zip(self.programs, self.results, strict=True)
            for i, atom in zip(makes, program.outputs, strict=True)
        }
        return [found[i] for i in range(len(found))]

    def maker(self, result: int) -> int:
        """Whose result it is: the number of the branch."""
        return next(number for number, makes in enumerate(self.results) if result in makes)

    def readers(self, operand: int) -> set[int]:
        """The branches that read an operand, by number."""
        return {number for number, reads in enumerate(self.operands) if operand in reads}

    def reads_at(self, operand: int, there: tuple[str, int] | None) -> bool:
        """Whether an operand is read where it is only: at an index along an axis."""
        return there is not None and there[0] == self.axis and self.readers(operand) == {there[1]}


def branches_of(eqn: JaxprEqn) -> Branches | None:
    """The branches that an equation consists of; None if it is none of `group_equations`."""
    return eqn.params["branches"] if eqn.primitive is side_by_side_p else None


def branch_locations(program: Program) -> dict[Var, tuple[str, int]]:
    """For what branches of a program compute: the axis along which, and the index at which, devices have it."""
    found: dict[Var, tuple[str, int]] = {}
    for eqn in program.equations:
        branches = branches_of(eqn)
        for i, var in enumerate(eqn.outvars if branches is not None else ()):
            assert branches is not None
            found[var] = branches.axis, branches.maker(i)
    return found


def group_equations(program: Program, groups: Iterable[Group]) -> Program:
    """The program with one equation in the place of those of each group.

    Args:
      program: the program.
      groups: which equations are whose; no equation is in two branches.

    Returns:
      The program, for `vnode.spmd.sharding_flow.follow` over a mesh that has the groups' axes.

    Raises:
      PartitionError: a branch depends on another, directly or by an equation that is in none; or equations are not the
        program's, or are in two branches.

    Example:
      >>> import jax
      >>> from vnode.analysis.program import inline
      >>> closed = jax.make_jaxpr(lambda x: (jax.numpy.sin(x), jax.numpy.cos(x)))(1.0)
      >>> program = inline(closed.jaxpr, closed.consts)
      >>> [eqn.primitive.name for eqn in program.equations]
      ['sin', 'cos']
      >>> two = group_equations(program, [Group("x", (frozenset({0}), frozenset({1})))])
      >>> [eqn.primitive.name for eqn in two.equations]
      ['side_by_side']
    """
    groups = list(groups)
    whose = branch_of_each(program, groups)
    producer = {var: number for number, eqn in enumerate(program.equations) for var in eqn.outvars}
    reads = [{producer[a] for a in eqn.invars if isinstance(a, Var) and a in producer} for eqn in program.equations]
    for g, group in enumerate(groups):
        check_independent(program, g, group, whose, reads)
    equations = [
        program.equations[node] if node >= 0 else branch_equation(program, groups[-1 - node])
        for node in order_topologically(reads, whose)
    ]
    return dataclasses.replace(program, equations=equations, _descriptions={})


def branch_of_each(program: Program, groups: Sequence[Group]) -> dict[int, tuple[int, int]]:
    """For each equation that is in a branch: the number of the group, and that of the branch."""
    whose: dict[int, tuple[int, int]] = {}
    for g, group in enumerate(groups):
        for b, branch in enumerate(group.branches):
            for number in sorted(branch):
                if not 0 <= number < len(program.equations):
                    raise PartitionError(
                        f"branch {b} of the group along {group.axis!r} has equation {number}, of a program that has "
                        f"{len(program.equations)}"
                    )
                if number in whose:
                    raise PartitionError(
                        message_about(
                            program.equations[number],
                            f"Equation {number} is in two branches: {whose[number][1]} and {b}.",
                            remedies=["leave it in one of them"],
                        )
                    )
                whose[number] = g, b
    return whose


def check_independent(
    program: Program, g: int, group: Group, whose: Mapping[int, tuple[int, int]], reads: Sequence[set[int]]
) -> None:
    """Checks that no branch of a group waits for another, nor for something outside that waits for the group."""
    behind: dict[int, int] = {}  # equations outside that depend on the group, with an equation of it
    for number in range(len(program.equations)):
        mine = whose.get(number)
        for source in reads[number]:
            theirs = whose.get(source)
            inside = theirs is not None and theirs[0] == g
            if mine is not None and mine[0] == g:
                if source in behind or (inside and theirs != mine):
                    other = whose[behind[source]] if source in behind else theirs
                    assert other is not None
                    between = "" if inside else " by way of an equation that is in no branch of the group"
                    raise PartitionError(
                        message_about(
                            program.equations[number],
                            f"Branch {mine[1]} along {group.axis!r} depends on branch {other[1]}{between}.",
                            facts=[f"equation {number} reads what equation {source} computes"],
                            remedies=["make two groups of it, one after the other"],
                        )
                    )
            elif inside or source in behind:
                behind.setdefault(number, source if inside else behind[source])


def read_outside(program: Program, group: Group) -> set[Var]:
    """The variables that somebody reads who is not in a group, or the caller."""
    outside = {atom for atom in program.outputs if isinstance(atom, Var)}
    for number, eqn in enumerate(program.equations):
        if number not in group.equations:
            outside |= {atom for atom in eqn.invars if isinstance(atom, Var)}
    return outside


def order_topologically(reads: Sequence[set[int]], whose: Mapping[int, tuple[int, int]]) -> list[int]:
    """Equations outside groups by number, and group g as -1 - g, so that what is read comes first."""

    def node(number: int) -> int:
        return -1 - whose[number][0] if number in whose else number

    first: dict[int, int] = {}
    needs: dict[int, set[int]] = {}
    for number, sources in enumerate(reads):
        first.setdefault(node(number), number)
        needs.setdefault(node(number), set()).update({node(s) for s in sources} - {node(number)})
    readers: dict[int, list[int]] = {}
    for reader, sources in needs.items():
        for source in sources:
            readers.setdefault(source, []).append(reader)
    missing = {n: len(sources) for n, sources in needs.items()}
    ready = [(first[n], n) for n, count in missing.items() if not count]
    heapq.heapify(ready)
    found = []
    while ready:
        _, n = heapq.heappop(ready)
        found.append(n)
        for reader in readers.get(n, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (first[reader], reader))
    if len(found) < len(missing):
        raise PartitionError("two groups wait for each other: equations of one are needed before and behind the other")
    return found


def branch_equation(program: Program, group: Group) -> JaxprEqn:
    """The equation that stands for a group."""
    outside = read_outside(program, group)
    invars: dict[Var, int] = {}
    outvars: list[Var] = []
    programs, operands, results = [], [], []
    for branch in group.branches:
        equations = [program.equations[number] for number in sorted(branch)]
        made = {var for eqn in equations for var in eqn.outvars}
        free = dict.fromkeys(a for e in equations for a in e.invars if isinstance(a, Var) and a not in made)
        constants = {var: program.constants[var] for var in free if var in program.constants}
        inputs = [var for var in free if var not in constants]
        outputs = [var for eqn in equations for var in eqn.outvars if var in outside]
        operands.append(tuple(invars.setdefault(var, len(invars)) for var in inputs))
        results.append(tuple(range(len(outvars), len(outvars) + len(outputs))))
        outvars += outputs
        programs.append(with_own_variables(Program(inputs, constants, equations, list(outputs))))
    params: dict[str, Any] = {"branches": Branches(group.axis, tuple(programs), tuple(operands), tuple(results))}
    source = program.equations[min(group.equations)].source_info
    return barrier_equation().replace(
        primitive=side_by_side_p, invars=list(invars), outvars=outvars, params=params, source_info=source
    )


def with_own_variables(program: Program) -> Program:
    """The program with variables of its own, so that what is said of a value outside is not said of it inside."""
    names: dict[Var, Var] = {}

    def name(atom: Any) -> Any:
        return names.setdefault(atom, Var(atom.aval)) if isinstance(atom, Var) else atom

    equations = [
        eqn.replace(invars=[name(atom) for atom in eqn.invars], outvars=[name(var) for var in eqn.outvars])
        for eqn in program.equations
    ]
    constants = {name(var): value for var, value in program.constants.items()}
    return Program([name(v) for v in program.inputs], constants, equations, [name(a) for a in program.outputs])


def by_scope(program: Program, axis: str, scopes: Mapping[str, int]) -> list[Group]:
    """Groups of the equations that were traced in some scopes, forward and backward.

    What depends on several branches lies between groups: a loss makes one group of the forward passes, and another of
    the backward passes. A stage in which only one branch has equations is no group.

    Args:
      program: the program.
      axis: of the mesh.
      scopes: for patterns searched in an equation's name stack (`jax.named_scope`, a flax module's name), the index
        along the axis.

    Returns:
      The groups, for `group_equations`.

    Raises:
      PartitionError: a pattern is found nowhere.
    """
    names = [scope(eqn) for eqn in program.equations]
    for pattern in scopes:
        if not any(re.search(pattern, name) for name in names):
            raise PartitionError(f"no equation has a name in which {pattern!r} is found")
    branch: list[int | None] = [next((i for p, i in scopes.items() if re.search(p, name)), None) for name in names]
    producer = {var: number for number, eqn in enumerate(program.equations) for var in eqn.outvars}
    reads = [{producer[a] for a in eqn.invars if isinstance(a, Var) and a in producer} for eqn in program.equations]
    readers: list[set[int | None]] = [set() for _ in names]
    for atom in program.outputs:
        if isinstance(atom, Var) and atom in producer:
            readers[producer[atom]].add(None)
    for number in reversed(range(len(names))):  # what stands between equations of one branch is the branch's
        if branch[number] is None and len(readers[number]) == 1:
            (only,) = readers[number]
            if only is not None and any(branch[source] == only for source in reads[number]):
                branch[number] = only
        for source in reads[number]:
            readers[source].add(branch[number])
    stage: list[int] = []
    for number, sources in enumerate(reads):
        mine = branch[number]
        stage.append(max((stage[s] + (branch[s] is not None and branch[s] != mine) for s in sources), default=0))
    found = []
    for s in range(max(stage, default=0) + 1):
        there = [(number, b) for number, b in enumerate(branch) if b is not None and stage[number] == s]
        if len({b for _, b in there}) > 1:
            last = max(b for _, b in there)
            found.append(Group(axis, tuple(frozenset(n for n, b in there if b == i) for i in range(last + 1))))
    return found
