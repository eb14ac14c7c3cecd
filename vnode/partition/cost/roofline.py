"""How long a piece of a program takes on one device, who says so, and the roofline, which can say it of every piece.

Knows kinds of devices, what they reach of their peak rates, operations and bytes. Must not know programs, meshes, or
how anything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from vnode.operators.cost import Cost
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.timed_pieces import TimedOp
from vnode.partition.machine import Kind


@dataclasses.dataclass(frozen=True)
class Time:
    """A time, and where it comes from.

    Attributes:
      seconds: of one run.
      source: ``"measured"`` or ``"roofline"``.
      noise: seconds by which another measurement would differ: half of the distance between the quartiles of
        repetitions, at least the resolution; 0 for what is not measured.
    """

    seconds: float
    source: str
    noise: float = 0.0


class Source(Protocol):
    """Something that knows how long pieces take."""

    def time(self, piece: TimedOp, kind: Kind) -> Time | None:
        """The time of one run of a piece on a device of a kind; None if it cannot say."""
        ...


TRANSCENDENTAL = 10
"""How many multiplications an exponential or a logarithm takes: the degree of polynomials that compute it in float32
(Cephes' single precision functions have 5 to 8 terms, and the reduction of the argument)."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time by a device's peak rates: Williams, Waterman, Patterson, "Roofline" (CACM 2009).

    A piece takes as long as its operations at the peak rate of their type, or as its bytes at the bandwidth of memory,
    whichever is longer, and a launch before. What units for matrices and other units do overlaps. A piece whose
    equations are fused reads and writes memory at its border only. Programs reach a part of these rates
    (`vnode.partition.cost.calibration`).

    Attributes:
      launch: seconds that come on top of each piece that does anything; by default as calibrated.
      calibrated: whether rates are those that programs reach, or those of the data sheet.

    Example:
      >>> kind = Kind("toy", {"float32": 1e12}, vector=1e11, memory=2**30, bandwidth=1e11, host_bandwidth=1e10)
      >>> round(Roofline(launch=0).seconds(Cost(matrix={"float32": 10**9}, read=10**6), kind) * 1e3, 3)
      1.0
    """

    launch: float | None = None
    calibrated: bool = True

    def seconds(self, cost: Cost, kind: Kind) -> float:
        """The time of this many operations and bytes."""
        reached = Calibration.for_kind(kind) if self.calibrated else Calibration()
        matrix = sum(operations / kind.rate(dtype) for dtype, operations in cost.matrix.items()) / reached.products
        vector = (cost.vector + (TRANSCENDENTAL - 1) * cost.transcendental) / kind.vector
        memory = (cost.read + cost.written) / (kind.bandwidth * reached.passes)
        longest = max(matrix, vector, memory)
        return longest + (reached.launch if self.launch is None else self.launch) if longest else 0.0

    def time(self, piece: TimedOp, kind: Kind) -> Time:
        """See `Source`."""
        return Time(self.seconds(piece.cost, kind), "roofline")


def seconds_by_source(times: Sequence[tuple[Time, float]]) -> Mapping[str, float]:
    """Seconds by who says so, of times that are run so often."""
    found: dict[str, float] = {}
    for time, runs in times:
        found[time.source] = found.get(time.source, 0.0) + time.seconds * runs
    return found
