"""Turns measured times of a step on some counts of devices into the speed on any count.

Knows counts and times. Must not know jobs, nor who decides.

    Speeds.from_times({1: 4.0, 2: 2.5, 8: 1.0})   ->   steps per second on 1, 2, ..., 8 devices
    Speeds.with_fixed_part(578, 295, demand=8)    ->   t(n) = 295 + (578 - 295) * 8 / n
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Speeds:
    """How fast a job is on 0, 1, 2, ... devices of one kind.

    Attributes:
      per_second: units of work per second by count, from 0 devices on. 0.0 at a count that the job cannot use.

    Raises:
      ValueError: a speed is negative or no number, or there is one on no device.
    """

    per_second: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.per_second or self.per_second[0] != 0.0:
            raise ValueError(f"the speed on 0 devices is 0.0, not {self.per_second[:1]}")
        for count, speed in enumerate(self.per_second):
            if not (math.isfinite(speed) and speed >= 0):
                raise ValueError(f"the speed on {count} devices is {speed}: it must be a number, at least 0")

    @property
    def most(self) -> int:
        """The largest count that the job can use; 0 if there is none."""
        return max((count for count, speed in enumerate(self.per_second) if speed > 0), default=0)

    @classmethod
    def from_times(cls, times: Mapping[int, float], work: float = 1.0, allowed: Iterable[int] | None = None) -> Speeds:
        """Speeds between measured ones: the time is a line over 1/n between two neighbours, and flat outside of them.

        Args:
          times: seconds for the work, by count of devices.
          work: units that take so long.
          allowed: counts that the job can use; by default all up to the largest measured one. TPUs allow some only.

        Example:
          >>> [round(speed, 3) for speed in Speeds.from_times({1: 4.0, 2: 3.0, 4: 2.0}).per_second]
          [0.0, 0.25, 0.333, 0.429, 0.5]
        """
        known = sorted(times)
        if not known or known[0] < 1:
            raise ValueError(f"times are needed on 1 device or more, not on {known}")
        for count in known:
            if not (math.isfinite(times[count]) and times[count] > 0):
                raise ValueError(f"the time on {count} devices is {times[count]}: it must be a number above 0")
        most = known[-1]
        counts = np.arange(1, most + 1)
        # np.interp wants rising places: from the largest count to the smallest
        found = np.interp(1 / counts, [1 / n for n in known[::-1]], [times[n] for n in known[::-1]])
        usable = set(range(1, most + 1) if allowed is None else allowed)
        speeds = zip(counts.tolist(), found.tolist(), strict=True)
        return cls((0.0, *(work / time if count in usable else 0.0 for count, time in speeds)))

    @classmethod
    def with_fixed_part(cls, at_demand: float, fixed: float, demand: int, most: int | None = None) -> Speeds:
        """Speeds of a job with a part that more devices do not shorten: ``fixed + (at_demand - fixed) * demand / n``.

        Args:
          at_demand: seconds for the whole job on `demand` devices.
          fixed: seconds of them that do not depend on the count.
          demand: the count.
          most: the largest count that the job can use; by default the demand.

        Example:
          >>> [round(1 / s) for s in Speeds.with_fixed_part(578, 295, 8).per_second[1:]]
          [2559, 1427, 1050, 861, 748, 672, 618, 578]
        """
        if not 0 <= fixed <= at_demand:
            raise ValueError(f"the fixed part of {fixed} s is not between 0 and the {at_demand} s of the whole")
        counts = range(1, (most or demand) + 1)
        return cls((0.0, *(1 / (fixed + (at_demand - fixed) * demand / n) for n in counts)))

    @classmethod
    def linear(cls, at_demand: float, demand: int) -> Speeds:
        """Speeds of a job that is twice as fast on twice the devices."""
        return cls.with_fixed_part(at_demand, 0.0, demand)

    def at(self, count: int) -> float:
        """Units of work per second on so many devices; further ones than the job can use do nothing.

        >>> Speeds((0.0, 2.0, 3.0)).at(5)
        3.0
        """
        return self.per_second[min(count, self.most)]
