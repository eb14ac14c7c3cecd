"""Which values a step keeps for its backward pass, and which it computes again there: an integer programme.

Knows what is read late (`vnode.analysis.late`), what loops keep (`vnode.analysis.again`), rooflines and
`scipy.optimize.milp`. Must not know meshes, nor how much memory a device has.

What is read beyond the turning point of a program is read at times in a row. A value is there at the turning point, or
it is computed at one of these times, for which all that it is computed from has to be there then; and it is there until
it is read last. At no time more may be there than a limit; of all such choices this is the one that takes least time:
Checkmate's programme (Jain et al., MLSys 2020, section 4) for the second half of a program, with few times, and each
value computed once more at most. What only one other reads is computed with that, inside of its kernel if that can be.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.again import Kept, Stacked
from vnode.analysis.late import Late, Made
from vnode.operators.cost import nbytes
from vnode.partition.cost.pieces import piece_of
from vnode.partition.cost.time import Roofline
from vnode.partition.machine import Kind
from vnode.partition.searches.programme import milp

TIMES = 12
"""How many times are told apart beyond the turning point."""

STEP = 0.85
"""Of two limits that are tried one after the other, the second is so many times the first."""

SMALL = 0.02
"""Of what is read late, the smallest values, which together are so much of all bytes, are kept in any case."""

LIMITS = 14
"""How many limits are tried: the last one is a tenth of what is there if all is kept."""

GAP = 0.02
"""How far above the least time what is computed again may be."""


@dataclasses.dataclass(eq=False)
class Value:
    """Something that may be there.

    Attributes:
      bytes: of it.
      equations: that make it again, by number, in order; none if it cannot be computed again.
      seconds: that these take.
      operands: the other values that they read.
      reads: the times at which the program reads it.
    """

    bytes: int
    equations: tuple[int, ...] = ()
    seconds: float = 0.0
    operands: tuple[Var, ...] = ()
    reads: tuple[int, ...] = ()


class Keeping:
    """What a step keeps, less and less of it.

    Args:
      late: the step's program, and what of it is read late.
      kept: what its loops keep for later ones.
      kind: of device.
    """

    def __init__(self, late: Late, kept: Mapping[Stacked, Kept], kind: Kind) -> None:
        self.late, self.kept = late, kept
        rate = max(kind.rate("float32"), kind.vector)
        self.stacked = {made: (each.bytes, each.flops / rate) for made, each in kept.items()}
        self.loops = {var for k, j in kept if (var := late.program.equations[k].outvars[j])}
        self.values = values_of(late, self.loops, functools.partial(seconds_of, late, kind))
        self.found: dict[int, tuple[Made, ...] | None] = {0: ()}

    @property
    def levels(self) -> int:
        """How many choices there are beside keeping all: each holds less than the one before, if that is possible."""
        some = any(value.equations and value.reads for value in self.values.values())
        return LIMITS if some or self.stacked else 0

    def chosen(self, level: int, seconds: float, pause: Callable[[], None] = lambda: None) -> tuple[Made, ...]:
        """What is computed again.

        Args:
          level: 0 to keep all, up to `levels`.
          seconds: after which the best so far is taken.
          pause: called now and then; may raise.

        Returns:
          Results of equations, in order; if so little cannot be held, what holds least of what was found.
        """
        if level not in self.found:
            self.found[level] = self.solved(STEP**level, seconds, pause)
        found = self.found[level]
        return self.chosen(level - 1, seconds, pause) if found is None else found

    def solved(self, share: float, seconds: float, pause: Callable[[], None]) -> tuple[Made, ...] | None:
        """What is computed again so that at no time more is there than a share of what is if all is kept."""
        programme = Programme(self.values, [*self.stacked.values()])
        chosen = programme.solved(share, seconds, pause)
        if chosen is None:
            return None
        again, stacked = chosen
        numbers = {k for var in again for k in self.values[var].equations}
        made = {made for made in self.late.repeatable if made[0] in numbers}
        kept = {var for var in self.values if var not in again}
        made = {each for each in made if self.late.repeatable[each] not in kept}
        return tuple(sorted(made | {each for each, gone in zip(self.stacked, stacked, strict=True) if gone}))


def seconds_of(late: Late, kind: Kind, equations: Sequence[JaxprEqn], var: Var) -> float:
    """What a kernel takes by the roofline."""
    return Roofline(launch=0).seconds(piece_of(equations, [var]).cost, kind)


def values_of(
    late: Late, without: set[Var], seconds: Callable[[Sequence[JaxprEqn], Var], float]
) -> dict[Var, Value]:
    """What may be there beyond the turning point: what is read there, and what that is computed from.

    Args:
      late: the program.
      without: what is not among it.
      seconds: that it takes to evaluate equations for the sake of one of their results.
    """
    program, repeatable = late.program, {var: k for (k, _), var in late.repeatable.items()}
    made = {var for eqn in program.equations for var in eqn.outvars}

    held = [var for var in late.held if var not in without]
    held.sort(key=lambda var: nbytes(var.aval))
    sizes = np.cumsum([nbytes(var.aval) for var in held])
    small = {*held[: np.searchsorted(sizes, SMALL * sizes[-1]) if held else 0]}
    held = [var for var in late.held if var not in without and var not in small]
    def operands(k: int) -> list[Var]:
        read = (atom for atom in program.equations[k].invars if isinstance(atom, Var))
        return [v for v in dict.fromkeys(read) if v in late.varying and v in made and v not in without and v not in small]

    users: dict[Var, int] = {}
    pending, seen = [*held], {*held}
    while pending:
        var = pending.pop()
        for operand in operands(repeatable[var]) if var in repeatable else ():
            users[operand] = users.get(operand, 0) + 1
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    times = times_of(late, held)
    inside = {v for v in seen if v in repeatable and users.get(v) == 1 and not late.beyond(v)}
    found: dict[Var, Value] = {}
    for var in seen - inside:
        value = found[var] = Value(nbytes(var.aval), reads=tuple(sorted({times(k) for k in late.beyond(var)})))
        if var not in repeatable:
            continue
        numbers, read, ahead = set[int](), dict[Var, None](), [var]
        while ahead:
            k = repeatable[ahead.pop()]
            numbers.add(k)
            for operand in operands(k):
                if operand in inside:
                    ahead.append(operand)
                else:
                    read[operand] = None
        value.equations, value.operands = tuple(sorted(numbers)), tuple(v for v in read if v is not var)
        value.seconds = seconds([program.equations[k] for k in value.equations], var)
    return found


def times_of(late: Late, held: Sequence[Var]) -> Callable[[int], int]:
    """From equations beyond the turning point, by number, to times, 1 to `TIMES`: at each about as much is read first."""
    first = sorted((late.beyond(var)[0], nbytes(var.aval)) for var in held)
    sums = np.cumsum([each for _, each in first], dtype=float)
    ends: list[int] = []
    for part in range(1, TIMES) if first else ():
        ends.append(first[min(int(np.searchsorted(sums, sums[-1] * part / TIMES)), len(first) - 1)][0])
    several = sorted({*ends})
    return lambda k: 1 + bisect.bisect_left(several, k)


class Programme:
    """The integer programme.

    Variables, all between 0 and 1: for each value and each time, and for the turning point, whether it is there; for
    each value and each time whether it is computed then; for each stacked result whether it is kept.

    Args:
      values: what may be there.
      stacked: for what loops keep, its bytes and the seconds that it takes to compute it again.
    """

    def __init__(self, values: Mapping[Var, Value], stacked: Sequence[tuple[int, float]]) -> None:
        self.values, self.stacked = values, stacked
        self.end = ends_of(values)
        count = itertools.count()
        self.there = {(var, t): next(count) for var, end in self.end.items() for t in range(end + 1)}
        self.computed = {(var, t): next(count) for var, t in self.there if t and values[var].equations}
        self.kept = [next(count) for _ in stacked]
        self.size = next(count)

    def solved(
        self, share: float, seconds: float, pause: Callable[[], None]
    ) -> tuple[set[Var], list[bool]] | None:
        """What is computed again, of the values and of what loops keep; None if nothing was found.

        Args:
          share: of what is there at the turning point if all is kept; so much may be there.
          seconds: after which the best so far is taken.
          pause: called now and then; may raise.
        """
        rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least and most
        times: dict[int, dict[int, float]] = {}
        whole = sum(value.bytes for value in self.values.values() if value.reads) + sum(b for b, _ in self.stacked)
        cost, lower = np.zeros(self.size), np.zeros(self.size)
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
        total = sum(value.seconds for value in self.values.values()) + sum(s for _, s in self.stacked)
        for (var, _), place in self.computed.items():
            cost[place] += self.values[var].seconds / (total or 1)
        for var, end in self.end.items():
            again = [self.computed[var, t] for t in range(1, end + 1) if (var, t) in self.computed]
            rows.append(({self.there[var, 0]: 1, **dict.fromkeys(again, 1.0)}, -np.inf, 1))
        for place, (held, lost) in zip(self.kept, self.stacked, strict=True):
            cost[place] -= lost / (total or 1)
            for row in times.values() or [times.setdefault(0, {})]:
                row[place] = held / whole
        rows += [(row, -np.inf, share) for row in times.values()]
        matrix = scipy.sparse.csr_array(
            (
                [v for row, _, _ in rows for v in row.values()],
                ([i for i, (row, _, _) in enumerate(rows) for _ in row], [j for row, _, _ in rows for j in row]),
            ),
            shape=(len(rows), self.size),
        )
        limits = scipy.optimize.LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows])  # pyright: ignore[reportArgumentType]
        discrete = np.zeros(self.size)
        discrete[[*self.there.values(), *self.kept]] = 1
        result: Any = milp(
            cost, discrete, scipy.optimize.Bounds(lower, 1), [limits], {"mip_rel_gap": GAP, "time_limit": seconds}, pause  # pyright: ignore[reportArgumentType]
        )
        if result.x is None:
            return None
        gone = {var for var, _ in self.computed if result.x[self.there[var, 0]] < 0.5}
        needed = {var for var, t in self.there if var in gone and result.x[self.there[var, t]] > 0.5}
        return needed, [bool(result.x[place] < 0.5) for place in self.kept]


def ends_of(values: Mapping[Var, Value]) -> dict[Var, int]:
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
