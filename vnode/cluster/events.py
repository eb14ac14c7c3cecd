"""Events of jobs in a cluster, simulated or live, as plain values.

Knows nothing else. Must not know why something happened.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened to a job.

    Attributes:
      time: seconds since the beginning.
      kind: "arrived", "share" (another number of devices was decided), "holds" (so many devices are not free because of
        it), "runs" (steps are made on so many devices) or "ended".
      job: its index.
      devices: how many.
      stall: seconds for which no steps are made at first, of "runs".
    """

    time: float
    kind: str
    job: int
    devices: int = 0
    stall: float = 0.0
