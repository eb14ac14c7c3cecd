"""Program -> program with branches side by side: independent equations, each on devices of its own.

Knows programs, and which equation reads another's results. Must not know layouts, nor how programs are run.

    a = sin(x);  b = cos(x)   ->   a, b = side_by_side(x)     devices 0 along the axis: sin(x), 0; devices 1: 0, cos(x)

A group assigns equations to branches along one mesh axis: the towers of an Inception block, two encoders, experts. In a
program with groups, one equation whose bodies are the branches replaces each group's equations. Devices with index i
along the axis evaluate branch i only; for the other branches' results they have zero. So results are partial sums, as
of any divided reduction. Results that only a later group's branch at the same index reads stay where they are: the
residuals of a backward pass.

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
      axis: the mesh axis.
      branches: for each index the numbers of its branch's equations; indices after the last have none.
    """

    axis: str
    branches: tuple[frozenset[int], ...]

    @property
    def equations(self) -> frozenset[int]:
        """The equations of all branches."""
        return frozenset().union(*self.branches)


@dataclasses.dataclass(frozen=True)
class Branches:
    """The content of a `side_by_side` equation.

    Attributes:
      axis: the mesh axis.
      programs: the branches.
      operands: for each branch the numbers of the equation's operands that are its inputs.
      results: for each branch the numbers of the equation's results that are its outputs.
    """

    axis: str
    programs: tuple[Program, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]

    @property
    def types(self) -> list[Any]:
        """The types of all results."""
        found = {
            i: atom.aval
            for program, makes in zip(self.programs, self.results, strict=True)
            for i, atom in zip(makes, program.outputs, strict=True)
        }
        return [found[i] for i in range(len(found))]

    def maker(self, result: int) -> int:
        """The number of the branch that computes a result."""
        return next(number for number, makes in enumerate(self.results) if result in makes)

    def readers(self, operand: int) -> set[int]:
        """The numbers of the branches that read an operand."""
        return {number for number, reads in enumerate(self.operands) if operand in reads}

    def reads_at(self, operand: int, there: tuple[str, int] | None) -> bool:
        """Whether an operand is read only where it is: at one index along an axis."""
        return there is not None and there[0] == self.axis and self.readers(operand) == {there[1]}


def branches_of(eqn: JaxprEqn) -> Branches | None:
    """The branches of a `side_by_side` equation; None for any other."""
    return eqn.params["branches"] if eqn.primitive is side_by_side_p else None


def branch_locations(program: Program) -> dict[Var, tuple[str, int]]:
    """For each value computed in a branch, the axis and the index along it whose devices have the value."""
    found: dict[Var, tuple[str, int]] = {}
    for eqn in program.equations:
        branches = branches_of(eqn)
        for i, var in enumerate(eqn.outvars if branches is not None else ()):
            assert branches is not None
            found[var] = branches.axis, branches.maker(i)
    return found


def group_equations(program: Program, groups: Iterable[Group]) -> Program:
    """Replaces the equations of each group by one equation.

    Args:
      program: the program.
      groups: the groups; no equation is in two branches.

    Returns:
      The program, for `vnode.spmd.sharding_flow.follow` over a mesh that has the groups' axes.

    Raises:
      PartitionError: a branch depends on another, directly or through an equation in no branch; or equations are not in
        the program, or in two branches.

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
    """For each equation in a branch, the numbers of the group and of the branch."""
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
    """Checks that no branch depends on another of its group, nor on an outside equation that depends on the group."""
    behind: dict[int, int] = {}  # outside equations that depend on the group, each with an equation of the group
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
                            remedies=["split the group into two, one after the other"],
                        )
                    )
            elif inside or source in behind:
                behind.setdefault(number, source if inside else behind[source])


def read_outside(program: Program, group: Group) -> set[Var]:
    """The group's variables that equations outside it read, or the caller."""
    outside = {atom for atom in program.outputs if isinstance(atom, Var)}
    for number, eqn in enumerate(program.equations):
        if number not in group.equations:
            outside |= {atom for atom in eqn.invars if isinstance(atom, Var)}
    return outside


def order_topologically(reads: Sequence[set[int]], whose: Mapping[int, tuple[int, int]]) -> list[int]:
    """Topological order of equations outside groups, by number, and of groups, as -1 - g."""

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
        raise PartitionError("two groups wait for each other: each needs results of the other")
    return found


def branch_equation(program: Program, group: Group) -> JaxprEqn:
    """The equation that replaces a group."""
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
    """Renames a program's variables, so that layouts of outer variables do not apply inside."""
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
    """Groups the equations traced in some scopes, forward and backward.

    Equations that depend on several branches separate groups: with a loss between, the forward passes form one group
    and the backward passes another. A stage in which only one branch has equations is no group.

    Args:
      program: the program.
      axis: the mesh axis.
      scopes: for patterns searched in an equation's name stack (`jax.named_scope`, a flax module's name), the index
        along the axis.

    Returns:
      The groups, for `group_equations`.

    Raises:
      PartitionError: a pattern matches no equation.
    """
    names = [scope(eqn) for eqn in program.equations]
    for pattern in scopes:
        if not any(re.search(pattern, name) for name in names):
            raise PartitionError(f"no equation's name matches {pattern!r}")
    branch: list[int | None] = [next((i for p, i in scopes.items() if re.search(p, name)), None) for name in names]
    producer = {var: number for number, eqn in enumerate(program.equations) for var in eqn.outvars}
    reads = [{producer[a] for a in eqn.invars if isinstance(a, Var) and a in producer} for eqn in program.equations]
    readers: list[set[int | None]] = [set() for _ in names]
    for atom in program.outputs:
        if isinstance(atom, Var) and atom in producer:
            readers[producer[atom]].add(None)
    for number in reversed(range(len(names))):  # equations between those of one branch belong to the branch
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
