"""Turns measured times of a step on some counts of devices into the speed on any count.

Knows counts and times. Must not know jobs, nor who decides.

    Speeds.from_times({1: 4.0, 2: 2.5, 8: 1.0})   ->   steps per second on 1, 2, ..., 8 devices
    Speeds.with_fixed_part(578, 295, demand=8)    ->   t(n) = 295 + (578 - 295) * 8 / n
    Speeds.from_profile(vnode.profile(step, args), virtual_nodes=16)   ->   as `vnode.balance` predicts it
    Speeds.from_plans({4: plan, 8: other})        ->   on 4 to 7 devices as by the first plan
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

MOST = 100_000
"""Devices of a job; more is a mistake in a file."""

LONGEST = 1e12
"""Seconds; a longer time is a mistake in a file."""


class Measured(Protocol):
    """Measured times of a step on kinds of devices: what `vnode.profile` returns."""

    @property
    def kinds(self) -> Sequence[Any]: ...

    @property
    def lane(self) -> int: ...

    def seconds(self, counts: Mapping[str, Sequence[int]], /) -> float: ...


class Planned(Protocol):
    """A plan for some devices: what `vnode.partition.search` returns."""

    @property
    def mesh(self) -> Mapping[str, int]: ...

    @property
    def figures(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The speed of a job on 0, 1, 2, ... devices of one kind.

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
          >>> from vnode.cluster import Speeds
          >>> [round(speed, 3) for speed in Speeds.from_times({1: 4.0, 2: 3.0, 4: 2.0}).per_second]
          [0.0, 0.25, 0.333, 0.429, 0.5]
        """
        known = sorted(times)
        if not known or known[0] < 1:
            raise ValueError(f"times are needed on 1 device or more, not on {known}")
        for count in known:
            if not 0 < times[count] <= LONGEST:
                raise ValueError(f"the time on {count} devices is {times[count]}: it must be a number above 0")
        most = known[-1]
        if most > MOST:
            raise ValueError(f"there is a time on {most} devices, and {MOST} are the most")
        counts = np.arange(1, most + 1)
        # np.interp wants rising places: from the largest count to the smallest
        found = np.interp(1 / counts, [1 / n for n in known[::-1]], [times[n] for n in known[::-1]])
        usable = set(range(1, most + 1) if allowed is None else allowed)
        if strange := sorted(usable - set(range(1, most + 1))):
            raise ValueError(f"counts of devices are from 1 to {most}, the largest with a time, not {strange[0]}")
        speeds = zip(counts.tolist(), found.tolist(), strict=True)
        return cls((0.0, *(work / time if count in usable else 0.0 for count, time in speeds)))

    @classmethod
    def from_profile(
        cls, profiles: Measured, virtual_nodes: int, *, kind: str | None = None, most: int | None = None
    ) -> Speeds:
        """Steps per second by what `vnode.profile` measured, with the nodes shared as evenly as whole ones allow.

        Args:
          profiles: measured times, with the model that `vnode.balance` uses.
          virtual_nodes: of the step.
          kind: of device; needed if several were measured.
          most: devices at most; by default as many as were measured, or as the nodes allow.

        Raises:
          ValueError: there is no such kind, or several and none is named; or the nodes are no whole lanes.

        Example:
          >>> from vnode.cluster import Speeds
          >>> from vnode.plan.balance.profiles import Measurement, Profile, Profiles
          >>> measured = Measurement(1, 8, 0.9), Measurement(1, 4, 0.5), Measurement(4, 2, 0.6)
          >>> speeds = Speeds.from_profile(Profiles((Profile("V100", 4, measured),)), virtual_nodes=8)
          >>> [round(1 / speed, 2) for speed in speeds.per_second[1:]]  # three devices hold 3, 3 and 2 nodes
          [0.9, 0.6, 0.6, 0.6]
        """
        known = {each.kind: each for each in profiles.kinds}
        kind = next(iter(known)) if kind is None and len(known) == 1 else kind
        if kind is None or kind not in known:
            said = (
                "several kinds were measured; name one" if kind is None else f"no device of kind {kind!r} was measured"
            )
            raise ValueError(f"{said}: {', '.join(known)}")
        lanes, left = divmod(virtual_nodes, profiles.lane)
        if lanes < 1 or left:
            raise ValueError(f"{virtual_nodes} virtual nodes do not divide into lanes of {profiles.lane}")
        last = min(known[kind].devices if most is None else most, lanes)
        shares = ([(lanes + i) // n * profiles.lane for i in range(n)] for n in range(1, last + 1))
        return cls((0.0, *(1 / profiles.seconds({kind: each}) for each in shares)))

    @classmethod
    def from_plans(cls, plans: Mapping[int, Planned | float]) -> Speeds:
        """Steps per second by plans for some numbers of devices (`vnode.partition.search`).

        A share is used by the best plan that it has room for: between two plans, by the smaller one, and by it still if
        the larger one is slower. On fewer devices than the smallest plan has, the job cannot run.

        Args:
          plans: plans, or seconds of a step that they predict, by number of devices.

        Raises:
          ValueError: there is none, one is for another number of devices, or a time is no number above 0.

        Example:
          >>> from vnode.cluster import Speeds
          >>> Speeds.from_plans({2: 0.5, 4: 0.25}).per_second
          (0.0, 0.0, 2.0, 2.0, 4.0)
        """
        if not plans or not 1 <= min(plans) <= max(plans) <= MOST:
            raise ValueError(f"plans are needed on 1 device or more, not on {sorted(plans)}")
        found = [0.0] * (max(plans) + 1)
        for count, plan in plans.items():
            if not isinstance(plan, int | float):
                if (devices := math.prod(plan.mesh.values())) != count:
                    raise ValueError(f"the plan for {count} devices is for {devices}")
                plan = plan.figures.seconds
            if not 0 < plan <= LONGEST:
                raise ValueError(f"the time of the plan for {count} devices is {plan}: it must be a number above 0")
            found[count] = 1 / plan
        return cls(tuple(np.maximum.accumulate(found).tolist()))

    @classmethod
    def with_fixed_part(cls, at_demand: float, fixed: float, demand: int, most: int | None = None) -> Speeds:
        """Speeds of a job with a part that more devices do not shorten: ``fixed + (at_demand - fixed) * demand / n``.

        Args:
          at_demand: seconds for the whole job on `demand` devices.
          fixed: seconds of them that do not depend on the count.
          demand: the count.
          most: the largest count that the job can use; by default the demand.

        Example:
          >>> from vnode.cluster import Speeds
          >>> [round(1 / s) for s in Speeds.with_fixed_part(578, 295, 8).per_second[1:]]
          [2559, 1427, 1050, 861, 748, 672, 618, 578]
        """
        if not 0 <= fixed <= at_demand:
            raise ValueError(f"the fixed part of {fixed} s must be from 0 to {at_demand} s, the whole time")
        counts = range(1, (most or demand) + 1)
        return cls((0.0, *(1 / (fixed + (at_demand - fixed) * demand / n) for n in counts)))

    @classmethod
    def linear(cls, at_demand: float, demand: int) -> Speeds:
        """Speeds of a job that is twice as fast on twice the devices."""
        return cls.with_fixed_part(at_demand, 0.0, demand)

    def at(self, count: int) -> float:
        """Units of work per second on so many devices; further ones than the job can use do nothing.

        >>> from vnode.cluster import Speeds
        >>> Speeds((0.0, 2.0, 3.0)).at(5)
        3.0
        """
        return self.per_second[min(count, self.most)]
