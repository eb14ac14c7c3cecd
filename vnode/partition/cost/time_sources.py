"""A timed op -> its time, by the first of several sources that knows it.

Knows sources of times. Must not know programs, meshes, or how any source finds its times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vnode.partition.cost.roofline import Roofline, Source, Time
from vnode.partition.cost.timed_pieces import TimedOp
from vnode.partition.machine import Kind


@dataclasses.dataclass(frozen=True)
class Times:
    """Several sources of times, the best first; a timed op has the time of the first source that knows it.

    Attributes:
      sources: the sources, in order. By default the roofline, which knows every timed op.

    Example:
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

    def known(self, piece: TimedOp, kinds: Sequence[Kind]) -> Time | None:
        """The time on the slowest of several kinds, if sources other than the roofline know it for all of them."""
        sources = [source for source in self.sources if not isinstance(source, Roofline)]
        found = [next((t for source in sources if (t := source.time(piece, kind)) is not None), None) for kind in kinds]
        said = [time for time in found if time is not None]
        return max(said, key=lambda time: time.seconds) if said and len(said) == len(found) else None

    def slowest(self, piece: TimedOp, kinds: Sequence[Kind]) -> Time:
        """The time on the slowest of several kinds, for which the others wait."""
        return max((self.time(piece, kind) for kind in kinds), key=lambda found: found.seconds)
