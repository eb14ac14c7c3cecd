"""The jobs of a cluster: what a user asks for (`Job`), and the table of all of them that a policy reads (`Jobs`).

Knows arrivals, priorities, demands and speeds. Must not know who decides, nor how time passes.

A table has a column for each fact, as an array, so that a policy looks at hundreds of jobs in some microseconds. As a
sequence it has a row for each job, for policies that are written by hand:

    jobs.priority          ->  array([5., 1.])
    jobs[1].priority       ->  1.0
    jobs.speed[1, 4]       ->  units of work per second of the second job on 4 devices
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vnode.cluster.speeds import LONGEST, MOST, Speeds

PENDING, STARTING, RUNNING, RESIZING, ENDED = range(5)
"""States of a job: it has no device; its workers start; it makes steps; it makes steps while workers join or leave."""

STATES = ("pending", "starting", "running", "resizing", "ended")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A job that asks for devices.

    Attributes:
      id: its name, unique among the jobs.
      arrival: seconds since the beginning.
      work: units to do; what a unit is (a step, an epoch, the whole) is up to `speeds`.
      speeds: units per second by count of devices; by kind of device if there are several.
      demand: the most devices that it may have.
      minimum: the fewest that it can use.
      priority: its weight; twice the weight, twice the share.
      virtual_nodes: of its step; it cannot have more devices. None: as many as it demands.
      start: seconds from its devices to its first step; None: as the costs of the cluster say.
      together: measured speeds on several kinds at once, by kind and count in the order of names.
      facts: more about it, for reports.

    Raises:
      ValueError: a field is not what it must be; the message names job and field.
    """

    id: str
    arrival: float
    work: float
    speeds: Speeds | Mapping[str, Speeds]
    demand: int
    minimum: int = 1
    priority: float = 1.0
    virtual_nodes: int | None = None
    start: float | None = None
    together: Mapping[tuple[tuple[str, int], ...], float] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        def check(field: str, good: bool, must: str) -> None:
            if not good:
                raise ValueError(f"job {self.id!r}: {field} is {getattr(self, field)!r}; it must be {must}")

        check("arrival", 0 <= self.arrival <= LONGEST, "a number of seconds, at least 0 and at most 1e12")
        check("work", math.isfinite(self.work) and self.work > 0, "a number above 0")
        check("priority", math.isfinite(self.priority) and self.priority > 0, "a number above 0")
        check("demand", 1 <= self.demand <= MOST, f"from 1 to {MOST}")
        check("minimum", 1 <= self.minimum <= self.demand, f"from 1 to the demand, {self.demand}")
        check("start", self.start is None or 0 <= self.start <= LONGEST, "a number of seconds, at least 0")
        nodes = self.virtual_nodes
        check("virtual_nodes", nodes is None or nodes >= 1, "at least 1")
        check("demand", nodes is None or self.demand <= nodes, f"at most its virtual nodes, {nodes}")
        check("speeds", any(speeds.most for speeds in self.by_kind.values()), "above 0 on some count of devices")

    @property
    def by_kind(self) -> Mapping[str, Speeds]:
        """Speeds by kind of device; the kind is empty where there is one."""
        return {"": self.speeds} if isinstance(self.speeds, Speeds) else self.speeds

    def speed_on(self, counts: Mapping[str, int]) -> float:
        """Units of work per second on devices of one or several kinds.

        On several kinds that were not measured together, virtual nodes are shared out so that the kinds need as equal a
        time as whole nodes allow (`vnode.balance`).

        Args:
          counts: devices by kind.
        """
        used = {kind: count for kind, count in counts.items() if count}
        alone = {kind: self.by_kind[kind].at(count) if kind in self.by_kind else 0.0 for kind, count in used.items()}
        if len(used) < 2:
            return sum(alone.values())
        if (known := self.together.get(tuple(sorted(used.items())))) is not None:
            return known
        return balanced(list(alone.values()), self.virtual_nodes)


def balanced(speeds: Sequence[float], nodes: int | None) -> float:
    """The speed of kinds that share the nodes of each step so that all need as equal a time as can be.

    Args:
      speeds: of each kind alone.
      nodes: how many there are to share; None for any parts.

    Example:
      >>> balanced([3.0, 1.0], None), balanced([3.0, 1.0], 4), balanced([3.0, 1.0], 2)
      (4.0, 4.0, 3.0)
    """
    if nodes is None:
        return sum(speeds)
    shares = [0] * len(speeds)
    usable = [i for i, speed in enumerate(speeds) if speed > 0]
    for _ in range(nodes if usable else 0):
        kind = min(usable, key=lambda i: (shares[i] + 1) / speeds[i])
        shares[kind] += 1
    slowest = max((shares[i] / speeds[i] for i in usable), default=math.inf)
    return nodes / slowest


@dataclasses.dataclass(frozen=True)
class Row:
    """One job of a table, as it is at some time.

    Attributes:
      id: its name.
      arrival: seconds since the beginning.
      priority: its weight.
      demand: the most devices that it may have.
      minimum: the fewest that it can use.
      share: the devices that it was given by the last decision.
      state: "pending", "starting", "running", "resizing" or "ended".
      work: units to do.
      remaining: units that are left.
      speed: units per second by count of devices.
    """

    id: str
    arrival: float
    priority: float
    demand: int
    minimum: int
    share: int
    state: str
    work: float
    remaining: float
    speed: np.ndarray


@dataclasses.dataclass(eq=False)
class Jobs(Sequence[Row]):
    """A table of jobs at some time: those that have arrived and not ended.

    Attributes:
      id: their names.
      rank: their order by arrival, then by name: ties are settled by it alone.
      arrival, priority, demand, minimum, work: as of `Job`.
      share: devices by the last decision; ``[jobs, kinds]`` where there are several kinds.
      state: PENDING, STARTING, RUNNING or RESIZING.
      start: seconds from a job's devices to its first step.
      remaining: units of work that are left.
      curve: for each job, its row of `curves`.
      curves: ``[curves, counts]`` units per second by count of devices; jobs that are alike share one.
      ended: when each has ended; NaN while it has not.
      job: what was asked for, for policies that need more than the columns.
      look_back: makes `arrived`.
      memo: what `from_curves` has computed, for all tables with these curves.
    """

    id: Sequence[str]
    rank: np.ndarray
    arrival: np.ndarray
    priority: np.ndarray
    demand: np.ndarray
    minimum: np.ndarray
    work: np.ndarray
    start: np.ndarray
    share: np.ndarray
    state: np.ndarray
    remaining: np.ndarray
    curve: np.ndarray
    curves: np.ndarray
    ended: np.ndarray
    job: Sequence[Job] = ()
    look_back: Callable[[], Jobs] | None = None
    memo: dict[Any, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int | np.integer):
            return [self[i] for i in range(*index.indices(len(self)))]  # pyright: ignore
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return Row(
            self.id[int(index)],
            float(self.arrival[index]),
            float(self.priority[index]),
            int(self.demand[index]),
            int(self.minimum[index]),
            int(np.sum(self.share[index])),
            STATES[self.state[index]],
            float(self.work[index]),
            float(self.remaining[index]),
            self.curves[self.curve[index]],
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def rows(self, rows: np.ndarray | slice) -> Jobs:
        """Some of the jobs, as they are now.

        Args:
          rows: indices, whose columns are copied; or a slice, whose columns are not, and cannot be written to.
        """
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        if isinstance(rows, slice):
            for column in columns.values():
                column.flags.writeable = False
        chosen = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        names, asked = Picked(self.id, chosen), Picked(self.job, chosen)
        return Jobs(id=names, job=asked, curves=self.curves, memo=self.memo, **columns)

    @functools.cached_property
    def speed(self) -> np.ndarray:
        """Units per second, ``[jobs, counts]``; on more devices than a job may have, as on the most that it may."""
        counts = np.minimum(np.arange(self.curves.shape[1])[None, :], self.demand[:, None])
        return self.curves[self.curve[:, None], counts]

    def from_curves(self, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Calls a function of the curves once; returns its row for each job."""
        if function not in self.memo:
            self.memo[function] = function(self.curves)
        return self.memo[function][self.curve]

    @functools.cached_property
    def arrived(self) -> Jobs:
        """The table of all jobs that have arrived, those that have ended too, for policies that look back."""
        return self if self.look_back is None else self.look_back()

    @functools.cached_property
    def runs(self) -> np.ndarray:
        """For each job whether it has devices."""
        return self.state != PENDING

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Indices in falling priority, then by arrival and name."""
        return np.lexsort((self.rank, -self.priority))


COLUMNS = ("rank", "arrival", "priority", "demand", "minimum", "work", "start", "share", "state", "remaining", "curve")
COLUMNS += ("ended",)
"""Those of a table that have an entry for each job."""


class Picked(Sequence[Any]):
    """Some entries of a sequence, looked up when they are asked for."""

    def __init__(self, entries: Sequence[Any], rows: Sequence[int] | np.ndarray) -> None:
        self.entries, self.rows = entries, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.entries[int(self.rows[index])]
