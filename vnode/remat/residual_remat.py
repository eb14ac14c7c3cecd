"""A program -> one whose backward loops recompute residuals that forward loops stacked for them.

Knows programs, and loops of known length. Must not know batches, devices, costs, nor who decides what is recomputed.

    scan: a = f(h); h = g(a); stack a   ->   scan: a = f(h); h = g(a); stack h (the carry)
    scan over a: ...                    ->   scan over h: a = f(barrier(h)); ...

The derivative of a scan is another scan over the residuals of the first. If both have the same trip count, an iteration
of the backward loop can recompute a residual from the carry that the forward iteration began with. That carry is
stacked instead, if it is not already. A barrier keeps compilers from merging both computations, as in `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom, Program, ResultIndex, inline
from vnode.analysis.scan_rewriting import barrier_on, open_loop, rebuild_scan, saved_carries, stacked_variable
from vnode.errors import PartitionError
from vnode.operators.control_flow import Loop, region_of


@dataclasses.dataclass(frozen=True)
class Residual:
    """A stacked result of a loop that only later loops of the same trip count read.

    Attributes:
      readers: the later loops, by number, each with the number of the operand.
      bytes: of all iterations.
      flops: to recompute it from the carries of all iterations.
      trip_count: of the loop.
      carries: the numbers of the carries from which an iteration computes it.
      is_carry: whether it is the value of a carry before each iteration; that carry is then the only one in `carries`.
    """

    readers: tuple[tuple[int, int], ...]
    bytes: int
    flops: int
    trip_count: int
    carries: tuple[int, ...]
    is_carry: bool


def loop_residuals(program: Program) -> dict[ResultIndex, Residual]:
    """The residuals that loops of a program stack for later loops of the same trip count.

    Args:
      program: with calls inlined.
    """
    readers: dict[Var, list[tuple[int, int]]] = {}
    for k, eqn in enumerate(program.equations):
        for i, atom in enumerate(eqn.invars):
            if isinstance(atom, Var):
                readers.setdefault(atom, []).append((k, i))
    returned = {atom for atom in program.outputs if isinstance(atom, Var)}
    found: dict[ResultIndex, Residual] = {}
    for k, eqn in enumerate(program.equations):
        loop = region_of(eqn)
        if not isinstance(loop, Loop) or eqn.effects:
            continue
        for j in range(len(loop.carried), len(eqn.outvars)):
            var = eqn.outvars[j]
            several = readers.get(var, [])
            if several and var not in returned and all(scans_operand(program, at, i, loop) for at, i in several):
                found[k, j] = describe_residual(eqn, j, several)
    return found


def describe_residual(eqn: JaxprEqn, j: int, readers: Sequence[tuple[int, int]]) -> Residual:
    """The residual that is result `j` of a loop."""
    forward, aval = ForwardLoop.from_eqn(eqn, [j]), eqn.outvars[j].aval
    descriptions = map(forward.body.describe, forward.needed)
    flops = forward.loop.length * sum(each.flops for each in descriptions if each is not None)
    is_carry = j in saved_carries(forward.loop, forward.body)
    size = aval.size * aval.dtype.itemsize
    return Residual(tuple(readers), size, flops, forward.loop.length, forward.carries, is_carry)


def scans_operand(program: Program, k: int, i: int, like: Loop) -> bool:
    """Whether equation `k` is a loop of the same trip count as another, and scans over its operand `i`."""
    loop = region_of(program.equations[k])
    return isinstance(loop, Loop) and loop.length == like.length and i in loop.scanned


def recompute_residuals(program: Program, chosen: Collection[ResultIndex]) -> Program:
    """Recomputes residuals in the loops that read them.

    Args:
      program: with calls inlined.
      chosen: some of the `loop_residuals`.

    Returns:
      Another program of the same inputs and outputs.

    Raises:
      PartitionError: a chosen value is no residual of the program.
    """
    possible = loop_residuals(program)
    if not set(chosen) <= possible.keys():
        raise PartitionError(f"{sorted(set(chosen) - possible.keys())} are not residuals that only later loops read")
    equations = list(program.equations)
    for k in sorted({k for k, _ in chosen}, reverse=True):  # numbers of earlier ones stay
        dropped = sorted(j for at, j in chosen if at == k)
        readers = sorted({at for j in dropped for at, _ in possible[k, j].readers})
        forward = ForwardLoop.from_eqn(equations[k], dropped)
        equations[k], stacked_carries = forward.keep_carries()
        for at in readers:
            equations[at] = forward.recompute_in(equations[at], stacked_carries)
    return program.with_equations(equations)


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardLoop:
    """A forward loop, some of whose residuals are no longer stacked.

    Attributes:
      eqn: the loop's equation.
      loop: the loop as a region.
      body: its body, with calls inlined.
      dropped: the numbers of the results that are no longer stacked.
      needed: the equations of the body that compute the dropped residuals, in order.
      carries: the numbers of the carries that these equations read.
    """

    eqn: JaxprEqn
    loop: Loop
    body: Program
    dropped: tuple[int, ...]
    needed: tuple[JaxprEqn, ...]
    carries: tuple[int, ...]

    @staticmethod
    def from_eqn(eqn: JaxprEqn, dropped: Sequence[int]) -> ForwardLoop:
        """Finds the equations and carries from which the results numbered `dropped` are computed."""
        loop, body = open_loop(eqn)
        wanted = {atom for j in dropped if isinstance(atom := body.outputs[j], Var)}
        needed = []
        for each in reversed(body.equations):
            if wanted.intersection(each.outvars):
                needed.append(each)
                wanted.update(atom for atom in each.invars if isinstance(atom, Var))
        carries = [n for n, i in enumerate(loop.carried) if body.inputs[i] in wanted]
        return ForwardLoop(eqn, loop, body, tuple(dropped), tuple(needed[::-1]), tuple(carries))

    def keep_carries(self) -> tuple[JaxprEqn, list[Var]]:
        """The loop with the needed carries stacked in place of the dropped residuals, and these stacked carries."""
        carried, count = self.loop.carried, len(self.loop.carried)
        left = [j for j in range(count, len(self.eqn.outvars)) if j not in self.dropped]
        inputs = self.body.inputs
        outputs = [*self.body.outputs[:count], *(self.body.outputs[j] for j in left)]
        results = [*self.eqn.outvars[:count], *(self.eqn.outvars[j] for j in left)]
        there = {n: self.eqn.outvars[j] for j, n in saved_carries(self.loop, self.body).items() if j in left}
        begun = [there.get(n) or stacked_variable(inputs[carried[n]].aval, self.loop.length) for n in self.carries]
        outputs += [inputs[carried[n]] for n in self.carries if n not in there]
        results += [var for n, var in zip(self.carries, begun, strict=True) if n not in there]
        body = Program(inputs, self.body.constants, self.body.equations, outputs)
        return rebuild_scan(self.eqn, body, self.eqn.invars, len(self.loop.fixed), results), begun

    def recompute_in(self, later: JaxprEqn, begun: Sequence[Var]) -> JaxprEqn:
        """A backward loop that recomputes the dropped residuals.

        Args:
          later: the loop.
          begun: the stacked carries.
        """
        loop = region_of(later)
        assert isinstance(loop, Loop)
        (one,) = loop.bodies
        body = inline(one.jaxpr, one.constants, later)
        there = {self.eqn.outvars[j]: j for j in self.dropped}
        replaced = {i: there[atom] for i in loop.scanned if (atom := later.invars[i]) in there}
        fixed = [i for i in sorted(self.loop.fixed) if self.needs_input(i)]
        scanned = [i for i in self.loop.scanned if self.needs_input(i)]
        names: dict[Var, Var] = {}

        def fresh(var: Var) -> Var:
            new = Var(var.aval)
            names[var] = new
            return new

        constants = [fresh(self.body.inputs[i]) for i in fixed]
        turns = [fresh(self.body.inputs[self.loop.carried[n]]) for n in self.carries]
        turns += [fresh(self.body.inputs[i]) for i in scanned]
        barriers = [barrier_on(var) for var in (*constants, *turns)]
        behind = {barrier.invars[0]: barrier.outvars[0] for barrier in barriers}
        names.update({old: behind[new] for old, new in names.items()})
        barred = list(barriers)

        def renamed(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else names.get(atom, atom)

        for each in self.needed:
            outvars = [fresh(var) for var in each.outvars]
            barred.append(each.replace(invars=[renamed(atom) for atom in each.invars], outvars=outvars))
        values = {body.inputs[i]: renamed(self.body.outputs[j]) for i, j in replaced.items()}
        own = [
            each.replace(invars=[values.get(a, a) if isinstance(a, Var) else a for a in each.invars])
            for each in body.equations
        ]
        outputs = [values.get(a, a) if isinstance(a, Var) else a for a in body.outputs]
        inputs = [v for i, v in enumerate(body.inputs) if i not in replaced]
        split = len(loop.fixed)
        made = Program(
            [*constants, *inputs, *turns], {**self.body.constants, **body.constants}, [*barred, *own], outputs
        )
        operands = [self.eqn.invars[i] for i in fixed]
        operands += [atom for i, atom in enumerate(later.invars) if i not in replaced]
        operands += [*begun, *(self.eqn.invars[i] for i in scanned)]
        return rebuild_scan(later, made, operands, split + len(fixed), later.outvars)

    def needs_input(self, i: int) -> bool:
        """Whether the dropped residuals need input `i` of the body."""
        var = self.body.inputs[i]
        return any(var in each.invars for each in self.needed) or any(self.body.outputs[j] is var for j in self.dropped)
