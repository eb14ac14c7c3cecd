"""Which values a step keeps for its backward pass, which it computes again there, and which it has on the host.

Knows what is read late (`vnode.remat.recompute`), what loops keep (`vnode.remat.residual_remat`) and can have on
the host (`vnode.remat.offload`), fused ops, rooflines and integer programs. Must not know meshes, nor how much
memory a device has.

What is read beyond the turning point of a program is read at times in a row. A value is there at the turning point, or
it is computed at one of these times, for which all that it is computed from has to be there then; and it is there until
it is read last. At no time more may be there than a limit; of all such choices this is the one that takes least time:
Checkmate's program (Jain et al., MLSys 2020, section 4) for the second half of a program, with few times, and each
value computed once more at most. What only one other reads is computed with that, inside of its fused op if that can
be.

Of what loops keep there is a third choice: it lies on the host in between, and a device holds that of one turn. That
takes the time of its bytes on the link to the host, there and back, as if nothing were computed beside it. So does what
turns begin with, which has to be kept, here or there, if anything is computed again that needs it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.sparse
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.program import Made
from vnode.analysis.scan_rewriting import stacked
from vnode.operators.cost import all_bytes
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.fusion import fuse_program
from vnode.partition.cost.op_kinds import FusedOp, FusedProgram
from vnode.partition.cost.roofline import Roofline
from vnode.partition.machine import Kind, Machine
from vnode.partition.plan.search_subject import Subject
from vnode.partition.searches.integer_program import milp
from vnode.remat.offload import is_movable
from vnode.remat.recompute import Late
from vnode.remat.residual_remat import Kept

STEP = 0.85
"""Of two limits that are tried one after the other, the second is so many times the first."""

SMALL = 0.02
"""Of what is read late, the smallest values, which together are so much of all bytes, are kept in any case."""

LIMITS = 14
"""How many limits are tried: the last one is a tenth of what is there if all is kept."""

WITH_HOST = 14
"""How many more are tried where something can be on the host: the last one is a hundredth."""

GAP = 0.02
"""How far above the least time what is computed again may be."""

SOLVING = 5.0
"""Seconds that may be spent on one choice."""


@dataclasses.dataclass(eq=False)
class LateValue:
    """Something that may be there.

    Attributes:
      bytes: of it.
      equations: that make it again, by number, in order, and what is made of it at once where it is read late; none if
        it cannot be computed again.
      seconds: that these take.
      operands: the other values that they read.
      reads: the times at which the program reads it.
    """

    bytes: int
    equations: tuple[int, ...] = ()
    seconds: float = 0.0
    operands: tuple[Var, ...] = ()
    reads: tuple[int, ...] = ()


class MemoryPlan(NamedTuple):
    """What a step does not keep on the device, results of equations in order.

    Attributes:
      again: what is computed again.
      away: what is on the host; results that a loop carries stand for what its turns begin with.
    """

    recomputed: tuple[Made, ...] = ()
    offloaded: tuple[Made, ...] = ()


@dataclasses.dataclass(frozen=True)
class StackedValue:
    """Something that a loop could keep of every turn.

    Attributes:
      bytes: of all turns.
      part: bytes of one.
      seconds: that it takes to compute it again; None if that cannot be, or is no gain.
      way: seconds of its way to the host and back; None if it cannot go there.
      begins: of others, by number, those that have to be kept if it is computed again.
      optional: whether it is kept for the sake of others only, and not there if all are kept.
    """

    bytes: int
    part: int
    seconds: float | None
    transfer_seconds: float | None = None
    begins: tuple[int, ...] = ()
    optional: bool = False


class MemoryPlanner:
    """What a step keeps, less and less of it.

    Args:
      late: the step's program, and what of it is read late.
      kept: what its loops keep for later ones.
      kind: of device.
      platform: what is compiled for; CPUs have no other memory of their host.
    """

    def __init__(self, late: Late, kept: Mapping[Made, Kept], kind: Kind, platform: str) -> None:
        self.late = late
        self.stacked = stacked_of(late, kept, kind, platform != "cpu")
        without = {late.program.equations[k].outvars[j] for k, j in kept}
        fused = fuse_program(late.program, Calibration.for_platform(platform, kind.name).recomputes)
        self.values = _LateValues(late, fused, without, kind).all()
        self.found: dict[tuple[int, bool], MemoryPlan | None] = {(0, False): MemoryPlan(), (0, True): MemoryPlan()}

    @property
    def host(self) -> bool:
        """Whether anything could be on the host."""
        return any(each.transfer_seconds is not None for each in self.stacked.values())

    def levels(self, host: bool) -> int:
        """How many choices there are beside keeping all: each holds less than the one before, if that is possible.

        Args:
          host: whether with something on the host.
        """
        some = any(value.equations and value.reads for value in self.values.values())
        return LIMITS + WITH_HOST * (host and self.host) if some or self.stacked else 0

    @staticmethod
    def for_subject(subject: Subject, machine: Machine, platform: str) -> MemoryPlanner:
        """That of a step, on the first kind of a machine's devices."""
        kind = machine.kinds[0]
        return MemoryPlanner(subject.late_reads, subject.kept, kind, platform)

    def plan_at_level(self, level: int, seconds: float, host: bool = True) -> MemoryPlan:
        """What is computed again, or on the host.

        Args:
          level: 0 to keep all, up to `levels`.
          seconds: after which the best so far is taken.
          host: whether something may be on the host, where that can be.

        Returns:
          The choice; if so little cannot be held, what holds least of what was found.
        """
        if (level, host) not in self.found:
            self.found[level, host] = self.solve_share(STEP**level, seconds, host)
        found = self.found[level, host]
        return self.plan_at_level(level - 1, seconds, host) if found is None else found

    def solve_share(self, share: float, seconds: float, host: bool) -> MemoryPlan | None:
        """What is not kept so that at no time more is there than a share of what is if all is kept."""
        several = [each if host else dataclasses.replace(each, transfer_seconds=None) for each in self.stacked.values()]
        program = IntegerProgram(self.values, several)
        chosen = program.solve_share(share, seconds)
        if chosen is None:
            return None
        again, places = chosen
        numbers = {k for var in again for k in self.values[var].equations}
        kept = {var for var in self.values if var not in again}
        made = {each for each, var in self.late.repeatable.items() if each[0] in numbers and var not in kept}
        several = [(each, of, place) for (each, of), place in zip(self.stacked.items(), places, strict=True)]
        made |= {each for each, of, place in several if place is NOWHERE and not of.optional}
        return MemoryPlan(tuple(sorted(made)), tuple(sorted(each for each, _, place in several if place is HOST)))


class StackLocation(enum.Enum):
    """Where something that a loop stacks is."""

    DEVICE = "device"
    HOST = "host"
    NOWHERE = "nowhere"


DEVICE, HOST, NOWHERE = StackLocation.DEVICE, StackLocation.HOST, StackLocation.NOWHERE


def stacked_of(late: Late, kept: Mapping[Made, Kept], kind: Kind, host: bool) -> dict[Made, StackedValue]:
    """What loops could keep: what they stack, and what their turns begin with, called by what is carried.

    Args:
      late: the step's program, and what of it depends on examples: nothing else goes to the host.
      kept: what loops stack for later ones.
      kind: of device.
      host: whether its host's memory can be used.
    """
    rate = max(kind.rate("float32"), kind.vector)
    equations = late.program.equations

    def transfer_seconds(var: Var, like: Var, turns: int) -> float | None:
        """Seconds of something's way to the host and back, turn by turn, if it depends on examples as `like` does."""
        if not host or like not in late.varying or not is_movable(var):
            return None
        return 2 * (all_bytes(var.aval) / kind.host_bandwidth + turns * kind.host_latency)

    begun = {(made[0], each.begins[0]): made for made, each in kept.items() if each.is_begin}
    others = {(k, n): each.turns for (k, _), each in kept.items() for n in each.begins if (k, n) not in begun}
    numbers = {made: i for i, made in enumerate((*kept, *others))}
    numbers.update({place: numbers[made] for place, made in begun.items()})
    found: dict[Made, StackedValue] = {}
    for (k, j), each in kept.items():
        var = equations[k].outvars[j]
        seconds = None if each.is_begin else each.flops / rate
        needs = () if each.is_begin else tuple(numbers[k, n] for n in each.begins)
        found[k, j] = StackedValue(
            each.bytes, each.bytes // each.turns, seconds, transfer_seconds(var, var, each.turns), needs
        )
    for (k, n), turns in others.items():
        carried = equations[k].outvars[n]
        whole, part = stacked(carried.aval, turns), all_bytes(carried.aval)
        found[k, n] = StackedValue(turns * part, part, 0.0, transfer_seconds(whole, carried, turns), optional=True)
    return found


class _LateValues:
    """The values live after the peak (the turning point): those that fused ops read there, and their operands.

    Args:
      late: the program.
      fused ops: that its compiler makes of it.
      without: what is not among it.
      kind: of device.
    """

    def __init__(self, late: Late, fused: FusedProgram, without: Collection[Var], kind: Kind) -> None:
        self.late, self.fused, self.kind = late, fused, kind
        self.number = {id(eqn): k for k, eqn in enumerate(late.program.equations)}
        self.maker: dict[Var, FusedOp] = {}
        self.readers: dict[Var, list[FusedOp]] = {}
        for op in fused.fused_ops:
            if not self.is_late(op):
                self.maker.update(dict.fromkeys(op.timed_op.writes, op))
            for var in dict.fromkeys(map(fused.buffer_of, op.timed_op.reads)):
                self.readers.setdefault(var, []).append(op)
        held = [var for var in self.maker if var in late.varying and var not in without and self.late_readers(var)]
        held.sort(key=fused.nbytes)
        sizes = np.cumsum([fused.nbytes(var) for var in held])
        small = int(np.searchsorted(sizes, SMALL * sizes[-1])) if held else 0
        self.left_out = {*without, *held[:small]}
        self.held = held[small:]

    def first_late_equation(self, op: FusedOp, var: Var) -> int:
        """The number of the first equation beyond the turning point that a fused op computes of a value.

        The last may be an update, which comes at the end of the program, with the product that it is made of.
        """
        numbers = (self.number[id(eqn)] for eqn in self.dependent_equations(op, var))
        return min((k for k in numbers if k > self.late.turn), default=self.late.turn + 1)

    def dependent_equations(self, op: FusedOp, var: Var) -> Iterator[JaxprEqn]:
        """The equations of a fused op that depend on a value that it reads."""
        depends = self.names[var].copy()
        for eqn in op.timed_op.equations:
            if depends.intersection(atom for atom in eqn.invars if isinstance(atom, Var)):
                depends.update(eqn.outvars)
                yield eqn

    @functools.cached_property
    def names(self) -> Mapping[Var, set[Var]]:
        """All variables that have a value's memory, by that value."""
        found: dict[Var, set[Var]] = {var: {var} for var in self.maker}
        for other in self.fused.names:
            found.setdefault(self.fused.buffer_of(other), set()).add(other)
        return found

    def is_late(self, op: FusedOp) -> bool:
        """Whether a fused op runs beyond the turning point."""
        return max(self.number[id(eqn)] for eqn in op.timed_op.equations) > self.late.turn

    def late_readers(self, var: Var) -> list[FusedOp]:
        """The fused ops beyond the turning point that read a value."""
        return [op for op in self.readers.get(var, ()) if self.is_late(op)]

    def is_repeatable(self, var: Var) -> bool:
        """Whether a value can be computed again."""
        return var in self.maker and {
            self.number[id(eqn)] for eqn in self.maker[var].timed_op.equations if self.varies(eqn)
        } <= {k for k, _ in self.late.repeatable}

    def varies(self, eqn: JaxprEqn) -> bool:
        """Whether an equation's results depend on examples."""
        return any(var in self.late.varying for var in eqn.outvars)

    def operands(self, var: Var) -> list[Var]:
        """The other values from which a value is computed."""
        read = dict.fromkeys(map(self.fused.buffer_of, self.maker[var].timed_op.reads))
        return [v for v in read if v in self.late.varying and v in self.maker and v not in self.left_out]

    def followers(self, var: Var) -> tuple[int, ...]:
        """The equations that are computed of a value inside of fused ops beyond the turning point, or rename it."""
        definitions, turn = self.late.program.definitions, self.late.turn
        found = {self.number[id(definitions[other])] for other in self.names[var] if other is not var}
        found.update(self.number[id(eqn)] for op in self.late_readers(var) for eqn in self.dependent_equations(op, var))
        return tuple(sorted(k for k in found if k <= turn))

    def all(self) -> dict[Var, LateValue]:
        """The values; what only one other is computed from, and nothing else reads, is computed with that."""
        users: dict[Var, int] = {}
        pending, seen = [*self.held], dict.fromkeys(self.held)
        while pending:
            var = pending.pop()
            for operand in self.operands(var) if self.is_repeatable(var) else ():
                users[operand] = users.get(operand, 0) + 1
                if operand not in seen:
                    seen[operand] = None
                    pending.append(operand)
        late = {var for var in seen if self.late_readers(var)}
        inside = {var for var in seen if var not in late and users.get(var) == 1 and self.is_repeatable(var)}
        found: dict[Var, LateValue] = {}
        for var in seen:
            if var in inside:
                continue
            reads = {self.late.time(self.first_late_equation(op, var)) for op in self.late_readers(var)}
            value = found[var] = LateValue(self.fused.nbytes(var), reads=tuple(sorted(reads)))
            if not self.is_repeatable(var):
                continue
            numbers, read, ahead = set[int](), dict[Var, None](), [var]
            while ahead:
                each = ahead.pop()
                piece = self.maker[each].timed_op
                value.seconds += Roofline(launch=0).seconds(piece.cost, self.kind)
                numbers.update(self.number[id(eqn)] for eqn in piece.equations if self.varies(eqn))
                numbers.update(self.followers(each))
                for operand in self.operands(each):
                    if operand in inside:
                        ahead.append(operand)
                    else:
                        read[operand] = None
            value.equations = tuple(sorted(numbers))
            value.operands = tuple(v for v in read if v is not var)
        return found


class IntegerProgram:
    """The integer program.

    Variables, all between 0 and 1: for each value and each time, and for the turning point, whether it is there; for
    each value and each time whether it is computed then; for each stacked result and each place whether it is there.

    Args:
      values: what may be there.
      stacked: what loops could keep.
    """

    def __init__(self, values: Mapping[Var, LateValue], stacked: Sequence[StackedValue]) -> None:
        self.values, self.stacked = values, stacked
        self.end = ends_of(values)
        count = itertools.count()
        self.there = {(var, t): next(count) for var, end in self.end.items() for t in range(end + 1)}
        self.computed = {(var, t): next(count) for var, t in self.there if t and values[var].equations}
        self.places = [{place: next(count) for place in StackLocation} for _ in stacked]
        self.size = next(count)

    def solve_share(self, share: float, seconds: float) -> tuple[set[Var], list[StackLocation]] | None:
        """What is computed again of the values, and where is what loops could keep; None if nothing was found.

        Args:
          share: of what is there at the turning point if all is kept; so much may be there.
          seconds: after which the best so far is taken.
        """
        rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least and most
        times: dict[int, dict[int, float]] = {}
        whole = sum(value.bytes for value in self.values.values() if value.reads)
        whole += sum(each.bytes for each in self.stacked if not each.optional)
        cost, lower, upper = np.zeros(self.size), np.zeros(self.size), np.ones(self.size)
        if not whole:
            return None
        for (var, t), place in self.there.items():
            value = self.values[var]
            times.setdefault(t, {})[place] = value.bytes / whole
            cost[place] += 1e-6 * value.bytes / whole  # of equal ones that which holds less
            if value.reads and value.reads[0] <= t <= value.reads[-1]:
                lower[place] = 1
            if t == 0:
                continue
            before = self.there[var, t - 1]
            if not value.equations:
                rows.append(({place: 1, before: -1}, -np.inf, 0))
                continue
            rows.append(({self.computed[var, t]: 1, place: -1, before: 1}, 0, np.inf))
            for operand in value.operands:
                rows.append(({self.there[operand, t]: 1, place: -1, before: 1}, 0, np.inf))
        total = sum(value.seconds for value in self.values.values()) + sum(each.seconds or 0.0 for each in self.stacked)
        for (var, _), place in self.computed.items():
            cost[place] += self.values[var].seconds / (total or 1)
        for var, end in self.end.items():
            again = [self.computed[var, t] for t in range(1, end + 1) if (var, t) in self.computed]
            rows.append(({self.there[var, 0]: 1, **dict.fromkeys(again, 1.0)}, -np.inf, 1))
        for places, each in zip(self.places, self.stacked, strict=True):
            rows.append((dict.fromkeys(places.values(), 1.0), 1, 1))
            upper[places[NOWHERE]] = each.seconds is not None
            upper[places[HOST]] = each.transfer_seconds is not None
            cost[places[NOWHERE]] = (each.seconds or 0.0) / (total or 1)
            cost[places[HOST]] = (each.transfer_seconds or 0.0) / (total or 1)
            for row in times.values() or [times.setdefault(0, {})]:
                row[places[DEVICE]], row[places[HOST]] = each.bytes / whole, each.part / whole
            for begin in each.begins:  # neither it nor what it is computed from may be nowhere
                nowhere = {places[NOWHERE]: 1.0, self.places[begin][NOWHERE]: 1.0}
                rows.append((nowhere, -np.inf, 1))
        rows += [(row, -np.inf, share) for row in times.values()]
        matrix = scipy.sparse.csr_array(
            (
                [v for row, _, _ in rows for v in row.values()],
                ([i for i, (row, _, _) in enumerate(rows) for _ in row], [j for row, _, _ in rows for j in row]),
            ),
            shape=(len(rows), self.size),
        )
        lows, highs = np.array([row[1:] for row in rows]).T
        limits = scipy.optimize.LinearConstraint(matrix, lows, highs)  # pyright: ignore[reportArgumentType]
        discrete = np.zeros(self.size)
        discrete[[*self.there.values(), *(place for places in self.places for place in places.values())]] = 1
        bounds = scipy.optimize.Bounds(lower, upper)  # pyright: ignore[reportArgumentType]
        result = milp(cost, discrete, bounds, [limits], {"mip_rel_gap": GAP, "time_limit": seconds}, lambda: None)
        if result.x is None:
            return None
        gone = {var for var, _ in self.computed if result.x[self.there[var, 0]] < 0.5}
        needed = {var for var, t in self.there if var in gone and result.x[self.there[var, t]] > 0.5}
        found = [max(places, key=lambda place, of=places: result.x[of[place]]) for places in self.places]
        wanted = {i for each, place in zip(self.stacked, found, strict=True) for i in each.begins if place is NOWHERE}
        return needed, [
            place if i in wanted or not self.stacked[i].optional else NOWHERE for i, place in enumerate(found)
        ]


def ends_of(values: Mapping[Var, LateValue]) -> dict[Var, int]:
    """The last time at which each value may be needed: to be read, or for others."""
    ends = {var: max(value.reads, default=0) for var, value in values.items()}
    later = list(values)
    while later:
        var = later.pop()
        for operand in values[var].operands:
            if ends[operand] < ends[var]:
                ends[operand] = ends[var]
                later.append(operand)
    return ends
