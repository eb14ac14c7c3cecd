"""A timed op and a kind of device -> its seconds by the roofline, or by the first of several sources that knows it.

Knows kinds of devices, the rates that they reach, operations and bytes. Must not know programs, meshes, or how anything
is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from vnode.operators.cost import Cost
from vnode.partition.cost.calibration import Calibration
from vnode.partition.cost.timed_pieces import TimedOp
from vnode.partition.machine import Kind


@dataclasses.dataclass(frozen=True)
class Time:
    """A time and its source.

    Attributes:
      seconds: time of one run.
      source: ``"measured"`` or ``"roofline"``.
      noise: seconds by which another measurement may differ: half of the distance between the quartiles of
        repetitions; 0 for estimates.
    """

    seconds: float
    source: str
    noise: float = 0.0


class Source(Protocol):
    """A source of times."""

    def time(self, piece: TimedOp, kind: Kind) -> Time | None:
        """The time of one run of a timed op on a kind of device; None if unknown."""
        ...


TRANSCENDENTAL = 10
"""How many multiplications an exponential or a logarithm takes: the degree of polynomials that compute it in float32
(Cephes' single precision functions have 5 to 8 terms, and the reduction of the argument)."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time by a device's peak rates: Williams, Waterman, Patterson, "Roofline" (CACM 2009).

    A timed op takes the longest of three times, and a launch before: its matrix operations at the peak rate of their
    dtype, its other operations at the vector rate, and its bytes at the bandwidth of memory. Fused equations read and
    write memory at their border only. Programs reach a share of these rates (`vnode.partition.cost.calibration`).

    Attributes:
      launch: seconds of launch overhead of each timed op with any work; by default the calibrated value.
      calibrated: whether rates are the calibrated ones, or the data sheet's.

    Example:
      >>> from vnode.operators.cost import Cost
      >>> from vnode.partition import Kind, Roofline
      >>> kind = Kind("toy", {"float32": 1e12}, vector=1e11, memory=2**30, bandwidth=1e11, host_bandwidth=1e10)
      >>> round(Roofline(launch=0).seconds(Cost(matrix={"float32": 10**9}, read=10**6), kind) * 1e3, 3)
      1.0
    """

    launch: float | None = None
    calibrated: bool = True

    def seconds(self, cost: Cost, kind: Kind) -> float:
        """The seconds of this many operations and bytes."""
        reached = Calibration.for_kind(kind) if self.calibrated else Calibration()
        matrix = sum(operations / kind.rate(dtype) for dtype, operations in cost.matrix.items()) / reached.products
        vector = (cost.vector + (TRANSCENDENTAL - 1) * cost.transcendental) / kind.vector
        memory = (cost.read + cost.written) / (kind.bandwidth * reached.passes)
        longest = max(matrix, vector, memory)
        return longest + (reached.launch if self.launch is None else self.launch) if longest else 0.0

    def time(self, piece: TimedOp, kind: Kind) -> Time:
        """See `Source`."""
        return Time(self.seconds(piece.cost, kind), "roofline")


@dataclasses.dataclass(frozen=True)
class Times:
    """Several sources of times, the best first; a timed op has the time of the first source that knows it.

    Attributes:
      sources: the sources, in order. By default the roofline, which knows every timed op.

    Example:
      >>> from vnode.partition import Times
      >>> import jax.numpy as jnp
      >>> from vnode.partition.cost.timed_pieces import traced_op
      >>> from vnode.partition.machine.known_kinds import kind_named
      >>> piece = traced_op(lambda a, b: a @ b, jnp.ones((512, 512)), jnp.ones((512, 512)))
      >>> Times().time(piece, kind_named("v5e")).source
      'roofline'
    """

    sources: Sequence[Source] = (Roofline(),)

    def time(self, piece: TimedOp, kind: Kind) -> Time:
        """The time of a timed op on a kind of device."""
        for source in self.sources:
            found = source.time(piece, kind)
            if found is not None:
                return found
        return Roofline().time(piece, kind)

    @property
    def is_roofline(self) -> bool:
        """Whether the roofline is the only source."""
        return all(isinstance(source, Roofline) for source in self.sources)

    def slowest(self, piece: TimedOp, kinds: Sequence[Kind]) -> Time:
        """The time on the slowest of several kinds, for which the others wait."""
        return max((self.time(piece, kind) for kind in kinds), key=lambda found: found.seconds)
