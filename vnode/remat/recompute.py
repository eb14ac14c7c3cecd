"""A program -> one that recomputes some residuals outside of loops where the backward pass reads them.

Knows programs in their order. Must not know nodes, devices, costs, nor who decides what is recomputed.

    h = f(x); loss = g(h); d = dg(loss); dx = df(h, d)   ->   ...; d = dg(loss); h' = f(after(d, x)); dx = df(h', d)

A train step holds most at its turning point, the end of the forward pass. Residuals that are read later can be
recomputed from values that are live anyway. An ordering barrier (`vnode.operators.ordering_barrier`) delays a group of
copied equations until a value of the backward pass, its trigger, exists. Without it, compilers would compute the copies
as early as the originals, or merge both.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom, Program, ResultIndex, barrier_equation
from vnode.errors import PartitionError
from vnode.operators.control_flow import region_of
from vnode.operators.cost import nbytes
from vnode.operators.ordering_barrier import postponed_barrier

TIMES = 12
"""The number of time slots after the turning point."""

SPAN = 3
"""A group of recomputed equations spans at most so many time slots."""

SPREAD = 3
"""An equation that makes more than so many times the bytes of an operand spreads (broadcasts) it."""


@dataclasses.dataclass(frozen=True, eq=False)
class TurningPoint:
    """A program and its turning point.

    Attributes:
      program: with calls inlined.
      varying: variables that depend on examples.
      turn: the number of the equation after which the live batched values have most bytes; the first of several such.
      readers: for each variable, the numbers of the equations that read it, in order.
    """

    program: Program
    varying: frozenset[Var]
    turn: int
    readers: Mapping[Var, Sequence[int]]

    @staticmethod
    def from_program(program: Program, batched: Iterable[int], turn: int | None = None) -> TurningPoint:
        """Finds the turning point of a program.

        Args:
          program: with calls inlined.
          batched: the numbers of the batched inputs.
          turn: the number of the equation, if it is known.
        """
        varying = {program.inputs[i] for i in batched}
        for eqn in program.equations:
            if any(atom in varying for atom in eqn.invars if isinstance(atom, Var)):
                varying.update(eqn.outvars)
        readers = readers_of(program)
        turn = find_turning_point(program, varying, readers) if turn is None else turn
        return TurningPoint(program, frozenset(varying), turn, readers)

    def late_readers(self, var: Var) -> Sequence[int]:
        """The numbers of the equations after the turning point that read a variable."""
        readers = self.readers.get(var, ())
        return readers[bisect.bisect_right(readers, self.turn) :]

    @functools.cached_property
    def recomputable(self) -> Mapping[ResultIndex, Var]:
        """The values that can be recomputed: batched, computed before the turning point, and not returned."""
        ends = {atom for atom in self.program.outputs if isinstance(atom, Var)}
        found: dict[ResultIndex, Var] = {}
        for k, eqn in enumerate(self.program.equations[: self.turn + 1]):
            if eqn.effects or region_of(eqn) is not None:
                continue
            for j, var in enumerate(eqn.outvars):
                if type(var) is Var and var in self.varying and var not in ends:
                    found[k, j] = var
        return found

    @functools.cached_property
    def live_values(self) -> tuple[Var, ...]:
        """The batched values that are live at the turning point."""
        made = [var for eqn in self.program.equations[: self.turn + 1] for var in eqn.outvars]
        return tuple(var for var in made if var in self.varying and self.late_readers(var))

    @functools.cached_property
    def time_bounds(self) -> Sequence[int]:
        """The numbers of the time slots' last equations. Each slot has about as many bytes of first reads."""
        first = sorted((self.late_readers(var)[0], nbytes(var.aval)) for var in self.live_values)
        sums = np.cumsum([each for _, each in first], dtype=float)
        parts = range(1, TIMES) if first else ()
        return sorted({first[min(int(np.searchsorted(sums, sums[-1] * n / TIMES)), len(first) - 1)][0] for n in parts})

    def time(self, k: int) -> int:
        """The time slot of an equation after the turning point: 1 to `TIMES`."""
        return 1 + bisect.bisect_left(self.time_bounds, k)

    def is_spread(self, var: Var) -> bool:
        """Whether equations on both sides of the turning point broadcast a variable.

        Compilers merge equal broadcasts, and keep the large result live in between.
        """
        beyond = self.late_readers(var)
        before = self.readers[var][: len(self.readers[var]) - len(beyond)]

        def largest(several: Sequence[int]) -> int:
            return max((nbytes(out.aval) for k in several for out in self.program.equations[k].outvars), default=0)

        return min(largest(before), largest(beyond)) > SPREAD * nbytes(var.aval)

    def trigger(self, first: int) -> Var | None:
        """The last value of the backward pass before an equation: an operand of it, or else of later equations.

        Args:
          first: the equation's number.

        Returns:
          A variable of floating-point numbers; None if there is none.
        """
        made = range(self.turn + 1, first)
        candidates = [v for k in made for v in self.program.equations[k].outvars if self.can_be_waited_for(v)]
        own = {atom for atom in self.program.equations[first].invars if isinstance(atom, Var)}
        for several in ([v for v in candidates if v in own], candidates):
            for var in reversed(several):
                if self.readers.get(var, (-1,))[-1] >= first:
                    return var
        return None

    def can_be_waited_for(self, var: Var) -> bool:
        """Whether a variable can be a trigger: it depends on examples, and has floating-point numbers."""
        aval = var.aval
        return var in self.varying and jnp.issubdtype(getattr(aval, "dtype", np.bool_), np.floating) and aval.size > 0


def readers_of(program: Program) -> dict[Var, list[int]]:
    """For each variable of a program, the numbers of the equations that read it, in order."""
    found: dict[Var, list[int]] = {}
    for k, eqn in enumerate(program.equations):
        for var in dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var)):
            found.setdefault(var, []).append(k)
    return found


def find_turning_point(program: Program, varying: Collection[Var], readers: Mapping[Var, Sequence[int]]) -> int:
    """The number of the equation after which the live variables in `varying` have most bytes; -1 if none is live."""
    ends = {atom for atom in program.outputs if isinstance(atom, Var)}
    change = np.zeros(len(program.equations) + 1, np.int64)
    for k, eqn in enumerate(program.equations):
        for var in eqn.outvars:
            if var in varying and var not in ends and var in readers:
                change[k] += nbytes(var.aval)
                change[readers[var][-1]] -= nbytes(var.aval)
    return int(np.cumsum(change).argmax()) if change.any() else -1


def recompute_late(late: TurningPoint, chosen: Collection[ResultIndex]) -> Program:
    """Recomputes values for the equations after the turning point that read them.

    Args:
      late: the program and its turning point.
      chosen: the values to recompute, some of `late.recomputable`. Copied equations read all other values as they are.

    Returns:
      Another program of the same inputs and outputs.

    Raises:
      PartitionError: a chosen value cannot be recomputed.
    """
    if not set(chosen) <= late.recomputable.keys():
        raise PartitionError(f"{sorted(set(chosen) - late.recomputable.keys())} cannot be recomputed")
    equations = late.program.equations
    inserted: dict[int, list[JaxprEqn]] = {}
    names: list[tuple[int, Var, Var]] = []  # (k, variable, copy): equations from k on read the copy
    recomputed = {late.recomputable[made] for made in chosen}
    several = [(numbers, set[Var]()) for numbers in group_equations(late, sorted({k for k, _ in chosen}), recomputed)]
    several += (
        [(set[int](), {var}) for var in late.live_values if var not in recomputed and late.is_spread(var)]
        if chosen
        else []
    )
    for numbers, spread in several:
        wanted = {late.recomputable[made] for made in chosen if made[0] in numbers} | spread
        readers = sorted({k for var in wanted for k in late.late_readers(var)})
        begin = next(((k, var) for k in readers if (var := late.trigger(k)) is not None), None)
        if begin is None:
            continue
        first, trigger = begin
        copies, own = copy_equations([equations[k] for k in sorted(numbers)], [*spread], late.varying, trigger)
        inserted.setdefault(first, []).extend(copies)
        names += [(first, var, own[var]) for var in (*wanted, trigger)]
    renamed: dict[Var, Var] = {}
    later = sorted(names, key=lambda each: each[0], reverse=True)
    made: list[JaxprEqn] = []
    for k, eqn in enumerate(equations):
        made += [each.replace(invars=rename_atoms(each.invars, renamed)) for each in inserted.get(k, ())]
        while later and later[-1][0] == k:
            _, var, new = later.pop()
            renamed[var] = new
        made.append(eqn.replace(invars=rename_atoms(eqn.invars, renamed)) if k > late.turn else eqn)
    old = late.program
    outputs = rename_atoms(old.outputs, renamed)
    return Program(old.inputs, old.constants, made, outputs, old.custom_derivatives, old.reverse_only)


def rename_atoms(atoms: Sequence[Atom], names: Mapping[Var, Var]) -> list[Atom]:
    """Replaces variables by their new names."""
    return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]


def group_equations(late: TurningPoint, numbers: Sequence[int], recomputed: Collection[Var]) -> list[set[int]]:
    """Groups recomputed equations, by number, into connected sets that are computed one after another.

    Values between two groups are written to memory and cannot be fused, so groups are large.

    Args:
      late: the program.
      numbers: of the recomputed equations, in order.
      recomputed: their results that are recomputed.
    """
    maker = {var: k for k in numbers for var in late.program.equations[k].outvars}
    wanted: dict[int, int] = {}  # for equations, the first late reader
    for k in reversed(numbers):
        eqn = late.program.equations[k]
        for first in (beyond[0] for var in eqn.outvars if var in recomputed and (beyond := late.late_readers(var))):
            wanted[k] = min(wanted.get(k, first), first)
        for atom in eqn.invars if k in wanted else ():
            if isinstance(atom, Var) and atom in recomputed:
                made = maker[atom]
                wanted[made] = min(wanted.get(made, wanted[k]), wanted[k])
    times = {k: late.time(first) for k, first in wanted.items()}
    found: list[set[int]] = []
    for members in connected_groups(late, sorted(wanted), maker):
        begin, end = min(times[k] for k in members), max(times[k] for k in members)
        windows = [[k for k in sorted(members) if t <= times[k] < t + SPAN] for t in range(begin, end + 1, SPAN)]
        found += [several for window in windows for several in connected_groups(late, window, maker)]
    return found


def connected_groups(late: TurningPoint, numbers: Sequence[int], maker: Mapping[Var, int]) -> list[set[int]]:
    """The connected components of equations, by number."""
    found: list[set[int]] = []
    for k in numbers:
        reads = {maker[atom] for atom in late.program.equations[k].invars if isinstance(atom, Var) and atom in maker}
        joined = {k}.union(*(each for each in found if each & reads))
        found = [each for each in found if not each & reads] + [joined]
    return found


def copy_equations(
    equations: Sequence[JaxprEqn], others: Sequence[Var], varying: Collection[Var], trigger: Var
) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """Copies equations behind an ordering barrier on a trigger.

    Args:
      equations: to copy, in order.
      others: further variables that get a copy behind the barrier.
      varying: variables that depend on examples.
      trigger: the value that the copies wait for.

    Returns:
      The barriers and copies, and the new names of variables.
    """
    made = {var for eqn in equations for var in eqn.outvars}
    read = dict.fromkeys(atom for eqn in equations for atom in eqn.invars if isinstance(atom, Var) and atom in varying)
    read |= dict.fromkeys(others)
    names: dict[Var, Var] = {}
    template = barrier_equation()
    source = (equations[0] if equations else template).source_info
    barrier = postponed_barrier()
    copies: list[JaxprEqn] = []
    for var in (*(var for var in read if var not in made), trigger):
        names[var] = Var(var.aval)
        copies.append(
            template.replace(primitive=barrier, invars=[var], outvars=[names[var]], params={}, source_info=source)
        )
    for eqn in equations:
        invars = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in eqn.invars]
        names.update((var, Var(var.aval)) for var in eqn.outvars)
        copies.append(eqn.replace(invars=invars, outvars=[names[var] for var in eqn.outvars]))
    return copies, names
