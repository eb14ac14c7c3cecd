"""Schedule -> pieces, each one program per group of devices, with its inputs and outputs.

    pass 0;  u = f(sums of 0);  pass 1(u)     ->     piece 0: pass 0, leaves partial sums
                                                     piece 1: completes the sums of piece 0;  u;  pass 1
                                                     piece 2: completes the sums of piece 1

Knows schedules, and the operands and results of equations. Must not know devices, arrays, nor how a piece is run.

A schedule is split where the nodes of all groups exchange values: after each pass, and around loops and branches with
passes of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Var

from vnode.analysis.forms import Slice, Whole
from vnode.analysis.passes import Pass, Schedule
from vnode.analysis.program import Program
from vnode.analysis.recipe import Evaluation
from vnode.operators import Algebra

Key = tuple[str, Any]
"""A value that a group holds. ``("whole", var)``: a whole value. ``("full", var)``: all of a batched value.
``("batched", var)``: the part of the group's nodes, in batch order. ``("collected", var)``: that part per slot.
``("left", number)``: the partial sums of piece `number`."""


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramPiece:
    """One program of a group.

    Attributes:
      completes: the piece whose sums are completed first, by number, and its pass.
      once: the evaluations after that.
      nodes: the pass that follows.
      nested: instead of all that, a loop or branch with passes of its own.
    """

    completes: tuple[int, Pass] | None = None
    once: tuple[Evaluation, ...] = ()
    nodes: Pass | None = None
    nested: Evaluation | None = None

    @property
    def idle(self) -> bool:
        """Whether the piece has nothing to do."""
        return self.completes is None and not self.once and self.nodes is None and self.nested is None

    def reads(self) -> Iterator[Var]:
        """The variables that the piece reads, except in its once-computed evaluations."""
        if self.nodes is not None:
            yield from (var for var, _ in self.nodes.recipe.leaves)
        if self.nested is not None:
            yield from operands_of(self.nested)

    def makes(self, number: int) -> Iterator[Key]:
        """The values that the piece can hand on."""
        if self.completes is not None:
            yield from (("whole", a.var) for a in self.completes[1].accumulators)
        for action in self.once:
            for var, _ in action.produced:
                yield ("whole", var)
        if self.nodes is not None:
            yield ("left", number)
            for var, _ in self.nodes.collected:
                yield ("collected", var)
                yield ("batched", var)


def split_schedule(schedule: Schedule) -> list[ProgramPiece]:
    """Splits a schedule into pieces, in order."""
    pieces: list[ProgramPiece] = []
    once: list[Evaluation] = []

    def close(nodes: Pass | None = None) -> None:
        before = pieces[-1].nodes if pieces else None
        if once or nodes is not None or before is not None:
            completes = None if before is None else (len(pieces) - 1, before)
            pieces.append(ProgramPiece(completes, tuple(once), nodes))
            once.clear()

    for stage in schedule.stages:
        for action in stage.once_actions:
            if needs_own_piece(action):
                close()
                pieces.append(ProgramPiece(nested=action))
            else:
                once.append(action)
        if stage.node_pass is not None:
            close(stage.node_pass)
    close()
    return defer_evaluations(pieces, schedule.flow.program)


def needs_own_piece(action: Evaluation) -> bool:
    """Whether a loop or branch has passes of its own, or batched values, of which a group holds a part only."""
    if not action.schedules:
        return False
    inner = [one for made in action.schedules for stage in made.stages for one in stage.once_actions]
    return (
        any(made.passes for made in action.schedules)
        or any(isinstance(form, Slice) for form in (*action.operands, *action.results))
        or any(map(needs_own_piece, inner))
    )


def defer_evaluations(pieces: Sequence[ProgramPiece], program: Program) -> list[ProgramPiece]:
    """Moves each once-computed evaluation to the first piece that reads it; repeats it in later ones if it is cheap.

    In one program a compiler sees it beside its users, and rounds both together: a moment's decay and its update.
    """
    later = list(pieces)
    for number, piece in enumerate(pieces):
        following = next((n for n in range(number + 1, len(later)) if later[n].nested is None), None)
        if piece.nested is not None or following is None:
            continue
        read = {var for between in later[number:following] for var in between.reads()}
        wanted = {atom for atom in program.outputs if isinstance(atom, Var)}
        for behind in later[number + 1 :]:
            wanted.update(behind.reads(), *(operands_of(action) for action in behind.once))
        here: list[Evaluation] = []
        there: list[Evaluation] = []
        for action in reversed(later[number].once):
            stays = not read.isdisjoint(action.step.eqn.outvars)
            if stays:
                here.append(action)
                read.update(operands_of(action))
            if not stays or (is_cheap(action, program) and not wanted.isdisjoint(action.step.eqn.outvars)):
                there.append(action)
                wanted.update(operands_of(action))
        later[number] = dataclasses.replace(later[number], once=tuple(reversed(here)))
        later[following] = dataclasses.replace(later[following], once=(*reversed(there), *later[following].once))
    return later


def operands_of(action: Evaluation) -> list[Var]:
    return [atom for atom in action.step.eqn.invars if isinstance(atom, Var)]


def is_cheap(action: Evaluation, program: Program) -> bool:
    """Whether a compiler might recompute a value rather than read it."""
    eqn = action.step.eqn
    description = program.describe(eqn) if action.step.region is None and not eqn.effects else None
    return description is not None and not (
        description.has(Algebra.CONTRACTS) or description.reduced or description.whole
    )


class ProgramPlan:
    """The pieces of a schedule, with their inputs and outputs."""

    def __init__(self, schedule: Schedule, given: Iterable[Key] = ()) -> None:
        self.schedule = schedule
        self.pieces = split_schedule(schedule)
        self.states = schedule.flow.states
        self.reads: list[list[Key]] = []
        there = set(given)
        for number, piece in enumerate(self.pieces):
            self.reads.append(list(dict.fromkeys(self.read_by(piece, there))))
            there.update(piece.makes(number))
        self.hands_on: list[list[Key]] = []
        wanted = {self.result_key(atom) for atom in schedule.flow.program.outputs if isinstance(atom, Var)}
        for number, piece in reversed(list(enumerate(self.pieces))):
            self.hands_on.append([key for key in piece.makes(number) if key in wanted])
            wanted.update(self.reads[number])
            wanted.update(("batched", var) for kind, var in self.reads[number] if kind == "full")
        self.hands_on.reverse()

    def read_by(self, piece: ProgramPiece, there: set[Key]) -> Iterator[Key]:
        """The keys of the values that a piece reads; `there` has the keys that earlier pieces can hand on."""
        known = set(self.schedule.flow.program.constants)
        if piece.completes is not None:
            number, nodes = piece.completes
            yield ("left", number)
            known.update(a.var for a in nodes.accumulators)
        for action in piece.once:
            for atom, form in zip(action.step.eqn.invars, action.operands, strict=True):
                if isinstance(atom, Var) and atom not in known and not (action.bodies and form is None):
                    yield self.whole_key(atom)
            known.update(var for var, _ in action.produced)
        if piece.nested is not None:
            for atom in piece.nested.step.eqn.invars:
                if isinstance(atom, Var):
                    yield self.whole_key(atom)
        if piece.nodes is not None:
            for var, form in piece.nodes.recipe.leaves:
                if isinstance(form, Whole):
                    if var not in known:
                        yield self.whole_key(var)
                else:
                    yield ("collected" if ("collected", var) in there else "batched", var)

    def result_key(self, var: Var) -> Key:
        """The key under which a value is returned."""
        return ("batched" if isinstance(self.states[var].form, Slice) else "whole", var)

    def whole_key(self, var: Var) -> Key:
        """The key under which all of a value is read."""
        return ("full" if isinstance(self.states[var].form, Slice) else "whole", var)
