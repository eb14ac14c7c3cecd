"""Seconds until a decision about devices is carried out.

Knows the phases of a start, of a resize and of an end. Must not know who decides.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, and the way in which decisions are made.

    Attributes:
      start: from the devices to the first step: they are held, and nothing is done.
      growth: from more devices to the first step on all of them; the job goes on with those that it had.
      growth_stall: how long steps stand still in the end of a growth.
      shrink: how long steps stand still in a shrink.
      release: from the end of a shrink, or of a job, until its devices are free: its processes are known to be gone.
      tick: decisions are made at multiples of it; 0: at once.
      settles: whether nothing is decided while a start or a growth waits for devices.
    """

    start: float = 0.0
    growth: float = 0.0
    growth_stall: float = 0.0
    shrink: float = 0.0
    release: float = 0.0
    tick: float = 0.0
    settles: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "settles" and not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} is {value!r}; it must be a number of seconds, at least 0")


FREE = Costs()
"""A resize, a start and an end take no time."""

VIRTUALFLOW = Costs(start=73, growth=70, growth_stall=0, shrink=0.5, release=10, tick=1, settles=True)
"""The medians that VirtualFlow's public logs of 8 V100 show (20 jobs, September 2020)."""

VNODE = Costs(start=8, growth=5, growth_stall=0.36, shrink=0.16, release=0.3)
"""Workers of `vnode run` on CPUs of one host (docs/workers.md)."""
