"""A step and a memory limit -> the residuals that it keeps, recomputes, or offloads to the host.

Knows late reads (`vnode.remat.recompute`), residuals of loops (`vnode.remat.residual_remat`) and offload
(`vnode.remat.offload`), fused ops, rooflines and integer programs. Must not know meshes, nor how much memory a device
has.

The backward pass, after the turning point of a program, reads residuals at consecutive times. A residual is live at the
turning point, or it is recomputed at one of these times, at which its operands must be live. It is live until its last
read. The live bytes at any time may not exceed a limit, and the total time is minimized. This is Checkmate's integer
program (Jain et al., MLSys 2020, section 4) for the second half of a program, with few times, and at most one
recomputation of each value. A value with a single reader is recomputed with that reader, inside its fused op if
possible.

Residuals of loops have a third choice: offload, where a device holds one iteration's residual at a time. Offload costs
the transfer of its bytes to the host and back, without overlap. The carries at the start of iterations may be offloaded
too; they must be kept, or offloaded, if a recomputed residual needs them.
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

from vnode.analysis.program import ResultIndex
from vnode.analysis.scan_rewriting import stacked_variable
from vnode.operators.cost import all_bytes, nbytes
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.fusion import fuse_program
from vnode.partition.cost.op_kinds import FusedOp, FusedProgram
from vnode.partition.cost.time_sources import Roofline
from vnode.partition.machine import Kind, Machine
from vnode.partition.plan.search_subject import Subject
from vnode.partition.searches.integer_program import milp
from vnode.remat.offload import is_offloadable
from vnode.remat.recompute import TurningPoint
from vnode.remat.residual_remat import Residual

STEP = 0.85
"""The ratio of consecutive limits."""

SMALL = 0.02
"""The share of all residual bytes, smallest values first, that is always kept."""

LIMITS = 14
"""Number of limits tried: the last one is a tenth of the bytes that are live if all residuals are kept."""

WITH_HOST = 14
"""Number of further limits where offload is possible: the last one is a hundredth."""

GAP = 0.02
"""The relative gap to the least time at which a solution is accepted."""

SOLVING = 5.0
"""Seconds that may be spent on one integer program."""


@dataclasses.dataclass(eq=False)
class LateValue:
    """A value that may be live in the backward pass.

    Attributes:
      bytes: its size.
      equations: numbers of the equations that recompute it, in order, with those fused into its late readers; empty if
        it cannot be recomputed.
      seconds: time of these equations.
      operands: the other values that they read.
      reads: the times at which the program reads it.
    """

    bytes: int
    equations: tuple[int, ...] = ()
    seconds: float = 0.0
    operands: tuple[Var, ...] = ()
    reads: tuple[int, ...] = ()


class MemoryPlan(NamedTuple):
    """The residuals that a step does not keep on the device, as results of equations, in order.

    Attributes:
      recomputed: residuals that are recomputed.
      offloaded: residuals on the host; a loop's final carry stands for the carries at the start of its iterations.
    """

    recomputed: tuple[ResultIndex, ...] = ()
    offloaded: tuple[ResultIndex, ...] = ()


@dataclasses.dataclass(frozen=True)
class StackedValue:
    """A residual of a loop, stacked over its iterations.

    Attributes:
      bytes: size over all iterations.
      part: bytes of one iteration.
      seconds: time of recomputing it; None if that is impossible, or saves nothing.
      transfer_seconds: time of its transfers to the host and back; None if it cannot be offloaded.
      begins: numbers of the stacked values that must be kept if it is recomputed.
      optional: whether it is kept for recomputing others only.
    """

    bytes: int
    part: int
    seconds: float | None
    transfer_seconds: float | None = None
    begins: tuple[int, ...] = ()
    optional: bool = False


class MemoryPlanner:
    """Memory plans of a step, each with fewer residuals than the one before.

    Args:
      subject: the step.
      machine: the machine; its first kind of device counts.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; there is no offload on CPUs.
    """

    def __init__(self, subject: Subject, machine: Machine, platform: str) -> None:
        self.subject, self.late = subject, subject.late_reads
        kept, kind = subject.kept, machine.kinds[0]
        self.stacked = stacked_of(self.late, kept, kind, platform != "cpu", subject.loops_on_device)
        without = {self.late.program.equations[k].outvars[j] for k, j in kept}
        fused = fuse_program(self.late.program, Calibration.for_platform(platform, kind.name).recomputes)
        self.values = _LateValues(self.late, fused, without, kind).all()
        self.found: dict[tuple[int, bool], MemoryPlan | None] = {(0, False): MemoryPlan(), (0, True): MemoryPlan()}

    @property
    def host(self) -> bool:
        """Whether anything can be offloaded."""
        return any(each.transfer_seconds is not None for each in self.stacked.values())

    def levels(self, host: bool) -> int:
        """The number of levels besides level 0, which keeps all; each holds less than the one before, if possible."""
        some = any(value.equations and value.reads for value in self.values.values())
        return LIMITS + WITH_HOST * (host and self.host) if some or self.stacked else 0

    def plan_at_level(self, level: int, seconds: float, host: bool = True) -> MemoryPlan:
        """The memory plan at a level, from 0, which keeps all, to `levels`.

        If no plan holds so little, it is the plan of the highest level below that has one. After `seconds` the best
        solution so far is taken.
        """
        if (level, host) not in self.found:
            self.found[level, host] = self.solve_share(STEP**level, seconds, host)
        found = self.found[level, host]
        return self.plan_at_level(level - 1, seconds, host) if found is None else found

    def solve_share(self, share: float, seconds: float, host: bool) -> MemoryPlan | None:
        """The memory plan whose live bytes never exceed a share of those with all residuals; None if none was found."""
        several = [each if host else dataclasses.replace(each, transfer_seconds=None) for each in self.stacked.values()]
        chosen = solve_integer_program(self.values, several, share, seconds)
        if chosen is None:
            return None
        again, places = chosen
        numbers = {k for var in again for k in self.values[var].equations}
        kept = {var for var in self.values if var not in again}
        made = {each for each, var in self.late.recomputable.items() if each[0] in numbers and var not in kept}
        several = [(each, of, place) for (each, of), place in zip(self.stacked.items(), places, strict=True)]
        made |= {each for each, of, place in several if place is NOWHERE and not of.optional}
        return MemoryPlan(tuple(sorted(made)), tuple(sorted(each for each, _, place in several if place is HOST)))


class StackLocation(enum.Enum):
    """The location of a loop's stacked value."""

    DEVICE = "device"
    HOST = "host"
    NOWHERE = "nowhere"


DEVICE, HOST, NOWHERE = StackLocation.DEVICE, StackLocation.HOST, StackLocation.NOWHERE


def stacked_of(
    late: TurningPoint,
    kept: Mapping[ResultIndex, Residual],
    kind: Kind,
    host: bool,
    on_device: Collection[int] = frozenset(),
) -> dict[ResultIndex, StackedValue]:
    """The values that loops may keep: their residuals `kept`, and the carries at the start of their iterations.

    Only values that depend on examples are offloaded, only if the host's memory can be used (`host`), and none of the
    loops with the numbers `on_device`.
    """
    rate = max(kind.rate("float32"), kind.vector)
    equations = late.program.equations

    def transfer_seconds(k: int, var: Var, like: Var, turns: int) -> float | None:
        """Seconds of the transfers to the host and back, by iteration; None if a value of loop `k` stays."""
        if not host or k in on_device or like not in late.varying or not is_offloadable(var):
            return None
        return 2 * (all_bytes(var.aval) / kind.host_bandwidth + turns * kind.host_latency)

    begun = {(made[0], each.carries[0]): made for made, each in kept.items() if each.is_carry}
    others = {(k, n): each.trip_count for (k, _), each in kept.items() for n in each.carries if (k, n) not in begun}
    numbers = {made: i for i, made in enumerate((*kept, *others))}
    numbers.update({place: numbers[made] for place, made in begun.items()})
    found: dict[ResultIndex, StackedValue] = {}
    for (k, j), each in kept.items():
        var = equations[k].outvars[j]
        seconds = None if each.is_carry else each.flops / rate
        needs = () if each.is_carry else tuple(numbers[k, n] for n in each.carries)
        found[k, j] = StackedValue(
            each.bytes, each.bytes // each.trip_count, seconds, transfer_seconds(k, var, var, each.trip_count), needs
        )
    for (k, n), turns in others.items():
        carried = equations[k].outvars[n]
        whole, part = stacked_variable(carried.aval, turns), all_bytes(carried.aval)
        found[k, n] = StackedValue(turns * part, part, 0.0, transfer_seconds(k, whole, carried, turns), optional=True)
    return found


class _LateValues:
    """The values live after the peak (the turning point): those that fused ops read there, and their operands."""

    def __init__(self, late: TurningPoint, fused: FusedProgram, without: Collection[Var], kind: Kind) -> None:
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
        held.sort(key=lambda var: nbytes(var.aval))
        sizes = np.cumsum([nbytes(var.aval) for var in held])
        small = int(np.searchsorted(sizes, SMALL * sizes[-1])) if held else 0
        self.left_out = {*without, *held[:small]}
        self.held = held[small:]

    def first_late_equation(self, op: FusedOp, var: Var) -> int:
        """The number of a fused op's first equation after the turning point that depends on a value.

        Its last equation may be an update at the end of the program, fused with the product that it reads.
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
        """All variables that share a value's buffer, by that value."""
        found: dict[Var, set[Var]] = {var: {var} for var in self.maker}
        for other in self.fused.names:
            found.setdefault(self.fused.buffer_of(other), set()).add(other)
        return found

    def is_late(self, op: FusedOp) -> bool:
        """Whether a fused op runs after the turning point."""
        return max(self.number[id(eqn)] for eqn in op.timed_op.equations) > self.late.turn

    def late_readers(self, var: Var) -> list[FusedOp]:
        """The fused ops after the turning point that read a value."""
        return [op for op in self.readers.get(var, ()) if self.is_late(op)]

    def is_repeatable(self, var: Var) -> bool:
        """Whether a value can be recomputed."""
        return var in self.maker and {
            self.number[id(eqn)] for eqn in self.maker[var].timed_op.equations if self.varies(eqn)
        } <= {k for k, _ in self.late.recomputable}

    def varies(self, eqn: JaxprEqn) -> bool:
        """Whether an equation's results depend on examples."""
        return any(var in self.late.varying for var in eqn.outvars)

    def operands(self, var: Var) -> list[Var]:
        """The other values from which a value is computed."""
        read = dict.fromkeys(map(self.fused.buffer_of, self.maker[var].timed_op.reads))
        return [v for v in read if v in self.late.varying and v in self.maker and v not in self.left_out]

    def followers(self, var: Var) -> tuple[int, ...]:
        """The equations before the turning point that late readers of a value have fused, or that rename it."""
        definitions, turn = self.late.program.definitions, self.late.turn
        found = {self.number[id(definitions[other])] for other in self.names[var] if other is not var}
        found.update(self.number[id(eqn)] for op in self.late_readers(var) for eqn in self.dependent_equations(op, var))
        return tuple(sorted(k for k in found if k <= turn))

    def all(self) -> dict[Var, LateValue]:
        """The values; a value whose only reader is the recomputation of another one is recomputed with that."""
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
            value = found[var] = LateValue(nbytes(var.aval), reads=tuple(sorted(reads)))
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


def solve_integer_program(
    values: Mapping[Var, LateValue], stacked: Sequence[StackedValue], share: float, seconds: float
) -> tuple[set[Var], list[StackLocation]] | None:
    """The recomputed values, and the location of each stacked value; None if no solution was found in time.

    The variables are between 0 and 1: for each value and each time (0 is the turning point), whether it is live; for
    each value and each later time, whether it is computed; for each stacked value and each location, whether it is
    there.

    Args:
      values: the values that may be live.
      stacked: the values that loops may keep.
      share: the limit of live bytes, as a share of those at the turning point if all is kept.
      seconds: the time after which the best solution so far is taken.
    """
    ends, count = ends_of(values), itertools.count()
    there = {(var, t): next(count) for var, end in ends.items() for t in range(end + 1)}
    computed = {(var, t): next(count) for var, t in there if t and values[var].equations}
    all_places = [{place: next(count) for place in StackLocation} for _ in stacked]
    size = next(count)
    rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least and most
    times: dict[int, dict[int, float]] = {}
    whole = sum(value.bytes for value in values.values() if value.reads)
    whole += sum(each.bytes for each in stacked if not each.optional)
    cost, lower, upper = np.zeros(size), np.zeros(size), np.ones(size)
    if not whole:
        return None
    for (var, t), place in there.items():
        value = values[var]
        times.setdefault(t, {})[place] = value.bytes / whole
        cost[place] += 1e-6 * value.bytes / whole  # of equal solutions, the one that holds less
        if value.reads and value.reads[0] <= t <= value.reads[-1]:
            lower[place] = 1
        if t == 0:
            continue
        before = there[var, t - 1]
        if not value.equations:
            rows.append(({place: 1, before: -1}, -np.inf, 0))
            continue
        rows.append(({computed[var, t]: 1, place: -1, before: 1}, 0, np.inf))
        for operand in value.operands:
            rows.append(({there[operand, t]: 1, place: -1, before: 1}, 0, np.inf))
    total = sum(value.seconds for value in values.values()) + sum(each.seconds or 0.0 for each in stacked)
    for (var, _), place in computed.items():
        cost[place] += values[var].seconds / (total or 1)
    for var, end in ends.items():
        again = [computed[var, t] for t in range(1, end + 1) if (var, t) in computed]
        rows.append(({there[var, 0]: 1, **dict.fromkeys(again, 1.0)}, -np.inf, 1))
    for places, each in zip(all_places, stacked, strict=True):
        rows.append((dict.fromkeys(places.values(), 1.0), 1, 1))
        upper[places[NOWHERE]] = each.seconds is not None
        upper[places[HOST]] = each.transfer_seconds is not None
        cost[places[NOWHERE]] = (each.seconds or 0.0) / (total or 1)
        cost[places[HOST]] = (each.transfer_seconds or 0.0) / (total or 1)
        for row in times.values() or [times.setdefault(0, {})]:
            row[places[DEVICE]], row[places[HOST]] = each.bytes / whole, each.part / whole
        for begin in each.begins:  # a value and its operand may not both be nowhere
            nowhere = {places[NOWHERE]: 1.0, all_places[begin][NOWHERE]: 1.0}
            rows.append((nowhere, -np.inf, 1))
    rows += [(row, -np.inf, share) for row in times.values()]
    matrix = scipy.sparse.csr_array(
        (
            [v for row, _, _ in rows for v in row.values()],
            ([i for i, (row, _, _) in enumerate(rows) for _ in row], [j for row, _, _ in rows for j in row]),
        ),
        shape=(len(rows), size),
    )
    lows, highs = np.array([row[1:] for row in rows]).T
    limits = scipy.optimize.LinearConstraint(matrix, lows, highs)  # pyright: ignore[reportArgumentType]
    discrete = np.zeros(size)
    discrete[[*there.values(), *(place for places in all_places for place in places.values())]] = 1
    bounds = scipy.optimize.Bounds(lower, upper)  # pyright: ignore[reportArgumentType]
    result = milp(cost, discrete, bounds, [limits], {"mip_rel_gap": GAP, "time_limit": seconds}, lambda: None)
    if result.x is None:
        return None
    gone = {var for var, _ in computed if result.x[there[var, 0]] < 0.5}
    needed = {var for var, t in there if var in gone and result.x[there[var, t]] > 0.5}
    found = [max(places, key=lambda place, of=places: result.x[of[place]]) for places in all_places]
    wanted = {i for each, place in zip(stacked, found, strict=True) for i in each.begins if place is NOWHERE}
    return needed, [place if i in wanted or not stacked[i].optional else NOWHERE for i, place in enumerate(found)]


def ends_of(values: Mapping[Var, LateValue]) -> dict[Var, int]:
    """The last time at which each value may be needed: by a reader, or to recompute others."""
    ends = {var: max(value.reads, default=0) for var, value in values.items()}
    later = list(values)
    while later:
        var = later.pop()
        for operand in values[var].operands:
            if ends[operand] < ends[var]:
                ends[operand] = ends[var]
                later.append(operand)
    return ends
