"""How long a piece of a program takes on one device, and who says so.

Knows kinds of devices, operations and bytes. Must not know programs, meshes, or how anything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from vnode.operators.cost import Cost
from vnode.partition.cost.pieces import Piece
from vnode.partition.machine import Kind


@dataclasses.dataclass(frozen=True)
class Time:
    """A time, and where it comes from.

    Attributes:
      seconds: of one run.
      source: ``"measured"``, ``"compiler"`` or ``"roofline"``.
      noise: seconds by which another measurement would differ: half of the distance between the quartiles of
        repetitions, at least the resolution; 0 for what is not measured.
    """

    seconds: float
    source: str
    noise: float = 0.0


class Source(Protocol):
    """Something that knows how long pieces take."""

    def time(self, piece: Piece, kind: Kind) -> Time | None:
        """The time of one run of a piece on a device of a kind; None if it cannot say."""
        ...


TRANSCENDENTAL = 10
"""How many multiplications an exponential or a logarithm takes: the degree of polynomials that compute it in float32
(Cephes' single precision functions have 5 to 8 terms, and the reduction of the argument)."""

LAUNCH = 2e-6
"""Seconds until a kernel computes: on GPUs 2 to 5 us of launching one after the other; TPUs and CPUs take less."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time that a device's peak rates allow: Williams, Waterman, Patterson, "Roofline" (CACM 2009).

    A piece takes as long as its operations at the peak rate of their type, or as its bytes at the bandwidth of memory,
    whichever is longer, and a launch before. What units for matrices and other units do overlaps. A piece whose
    equations are fused reads and writes memory at its border only.

    Attributes:
      launch: seconds that come on top of each piece that does anything.

    Example:
      >>> kind = Kind("toy", {"float32": 1e12}, vector=1e11, memory=2**30, bandwidth=1e11, host_bandwidth=1e10)
      >>> round(Roofline(launch=0).seconds(Cost(matrix={"float32": 10**9}, read=10**6), kind) * 1e3, 3)
      1.0
    """

    launch: float = LAUNCH

    def seconds(self, cost: Cost, kind: Kind) -> float:
        """The time of this many operations and bytes."""
        matrix = sum(operations / kind.rate(dtype) for dtype, operations in cost.matrix.items())
        vector = (cost.vector + (TRANSCENDENTAL - 1) * cost.transcendental) / kind.vector
        memory = (cost.read + cost.written) / kind.bandwidth
        longest = max(matrix, vector, memory)
        return longest + self.launch if longest else 0.0

    def time(self, piece: Piece, kind: Kind) -> Time:
        """See `Source`."""
        return Time(self.seconds(piece.cost, kind), "roofline")


@dataclasses.dataclass(frozen=True)
class Times:
    """Several sources, the best first: each piece has the time of the first that knows one.

    Attributes:
      sources: in this order; the last is asked about everything.

    Example:
      >>> import jax.numpy as jnp
      >>> from vnode.partition.cost.pieces import traced_piece
      >>> from vnode.partition.machine.table import kind_named
      >>> piece = traced_piece(lambda a, b: a @ b, jnp.ones((512, 512)), jnp.ones((512, 512)))
      >>> Times().time(piece, kind_named("v5e")).source
      'roofline'
    """

    sources: Sequence[Source] = (Roofline(),)

    def time(self, piece: Piece, kind: Kind) -> Time:
        """The time of a piece on a device of a kind."""
        for source in self.sources:
            found = source.time(piece, kind)
            if found is not None:
                return found
        return Roofline().time(piece, kind)

    def known(self, piece: Piece, kinds: Sequence[Kind]) -> Time | None:
        """The time on the slowest of several kinds, if a source other than the roofline says it of all of them."""
        sources = [source for source in self.sources if not isinstance(source, Roofline)]
        found = [next((t for source in sources if (t := source.time(piece, kind)) is not None), None) for kind in kinds]
        said = [time for time in found if time is not None]
        return max(said, key=lambda time: time.seconds) if said and len(said) == len(found) else None

    def slowest(self, piece: Piece, kinds: Sequence[Kind]) -> Time:
        """The time on the kind of several that takes longest: all wait for it."""
        return max((self.time(piece, kind) for kind in kinds), key=lambda found: found.seconds)


def by_source(times: Sequence[tuple[Time, float]]) -> Mapping[str, float]:
    """Seconds by who says so, of times that are run so often."""
    found: dict[str, float] = {}
    for time, runs in times:
        found[time.source] = found.get(time.source, 0.0) + time.seconds * runs
    return found
