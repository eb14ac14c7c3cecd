"""The programs of a step, traced for several placements -> a warning if they are not one and the same.

    a step that multiplies by np.random.rand()  ->  VnodeWarning when it is traced for other devices

Knows programs and their fingerprints. Must not know placements, nor how programs are run.

A step is traced again for each placement. A trace reads Python variables, NumPy's random numbers and the time anew. A
result would then depend on when the devices changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from vnode.analysis.fingerprint import Fingerprint, fingerprint_of
from vnode.analysis.program import Program
from vnode.compat import trace_settings
from vnode.errors import limit_lines
from vnode.step.likely_mistakes import warn

SHOWN = 3
"""The number of differing operations that a warning shows."""


class Retraces:
    """The first program of a step for each kind of arguments.

    Attributes:
      first: the programs, or once they were compared their fingerprint, by the kind of arguments.
    """

    def __init__(self) -> None:
        self.first: dict[Hashable, Sequence[Program] | Fingerprint] = {}

    def compare(self, kind: Hashable, programs: Sequence[Program], name: str) -> None:
        """Warns if a step's programs are others than those that were traced first.

        Host code is compared by its name: it may count its calls.

        Args:
          kind: what the trace depends on besides the step: types of arguments, and contexts.
          programs: those of the step, traced now.
          name: of the step.
        """
        key = kind, trace_settings()
        before = self.first.setdefault(key, programs)
        if before is programs:
            return
        if not isinstance(before, Fingerprint):
            before = self.first[key] = fingerprint_of(*before, host_code=False)
        found = fingerprint_of(*programs, host_code=False).differences(before)
        if found:
            warn(
                f"{name!r} was traced again and is not the program that it was: it reads values that have changed.",
                [
                    "make what changes an argument of the step: a rate, or a key for jax.random in the state",
                    "Python variables, np.random and the time are read when a step is traced: once for each placement",
                ],
                facts=limit_lines(found, SHOWN),
            )
