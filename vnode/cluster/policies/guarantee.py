"""A guarantee around any other policy: no job ends later than c times as late as by static priority.

Knows a virtual schedule of static priority, speeds, and what resizes cost. Must not know how the rest is shared.

A job that would have its devices by now in the virtual schedule has a floor: the fewest devices with which it still
ends in time. The virtual schedule fits on the devices, so the floors do. The inner policy shares what is left: it sees
what it would give without floors, and jobs get the larger of both, as far as there are devices. Jobs that it began
early have little left when their floors come.

A job may end a little later than in the virtual schedule, if all that follow may, too: by a delay that is the same for
all, so that the delayed schedule still fits. No job is done before it has started. So the delay is what the factor
allows to a job that does nothing but start; it also pays for the seconds of resizes. With a factor of 1, or where a
start takes no time, there is no delay.
"""

from __future__ import annotations

import numpy as np

from vnode.cluster.jobs import PENDING, STARTING, Jobs
from vnode.cluster.policies.virtual_static import VirtualStatic
from vnode.cluster.resize_costs import FREE, Costs
from vnode.cluster.simulator import Decision, Policy, as_array


def guarantee(factor: float, inner: Policy, costs: Costs = FREE) -> Policy:
    """A policy by which no job ends later than `factor` times as late as by static priority.

    The work that remains, and speeds, must be known. A job that is stopped for another one's floor starts again later,
    which the floors count with.

    Args:
      factor: at least 1; for the time from arrival to end.
      inner: who shares what is left.
      costs: what resizes cost.

    Raises:
      ValueError: the factor is below 1.
    """
    if not factor >= 1:
        raise ValueError(f"a guarantee is a factor of at least 1, not {factor!r}")
    kept: list[VirtualStatic] = []  # what was computed of the arrivals so far; it could be computed again

    def guaranteed(now: float, jobs: Jobs, devices: int) -> Decision:
        arrived = jobs.arrived
        if not kept or not kept[0].is_beginning_of(arrived, devices):
            kept[:] = [VirtualStatic(devices, costs.release)]
        virtual = kept[0]
        virtual.learn(arrived)
        ranks = jobs.rank.tolist()
        starts, ends = (np.array([times[rank] for rank in ranks]) for times in (virtual.starts, virtual.ends))
        delay = (factor - 1) * min(costs.start, virtual.least_start)
        floors = floors_of(now, jobs, starts, ends + delay, devices, costs)
        decided = inner(now, jobs, devices)
        again = decided.again if isinstance(decided, Decision) else None
        wanted = as_array(decided.shares if isinstance(decided, Decision) else decided, jobs)
        later = starts[starts > now]
        times = [*([float(later.min())] if len(later) else []), *([] if again is None else [again])]
        return Decision(shares_above_floors(floors, wanted, jobs, devices), min(times, default=None))

    return guaranteed


def floors_of(
    now: float, jobs: Jobs, starts: np.ndarray, deadlines: np.ndarray, devices: int, costs: Costs
) -> np.ndarray:
    """The fewest devices with which each job ends in time; 0 for those that are not due yet.

    Args:
      now: the time.
      jobs: all that are there.
      starts: when each is due.
      deadlines: when it must end.
      devices: how many there are; who is due first is given its floor first.
      costs: what resizes cost.
    """
    order = np.lexsort((jobs.rank, starts))
    due = order[starts[order] <= now]
    floors = np.zeros(len(jobs), np.int64)
    floors[due] = fewest(now, jobs.rows(due), deadlines[due], devices, costs)
    before = np.cumsum(floors[due]) - floors[due]
    floors[due] = np.clip(devices - before, 0, floors[due])
    return floors


def fewest(now: float, jobs: Jobs, deadlines: np.ndarray, devices: int, costs: Costs) -> np.ndarray:
    """The fewest devices with which each job ends by its deadline; all that it may have if it cannot."""
    most = np.minimum(jobs.demand, devices)
    counts, share = np.arange(jobs.curves.shape[1])[None, :], jobs.share[:, None]
    remaining, now_at = jobs.remaining[:, None], jobs.speed[np.arange(len(jobs)), jobs.share][:, None]
    waits = np.where((jobs.state == PENDING) | (jobs.state == STARTING), jobs.start, 0.0)[:, None]
    joins = costs.growth + costs.release  # a job that grows goes on meanwhile with what it has
    left = np.where(counts > share, np.maximum(remaining - joins * now_at, 0.0), remaining)
    resize = np.select([share == 0, counts > share, counts < share], [0.0, joins, costs.shrink], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):  # where it has no speed, which is left out below
        ends = now + waits + resize + left / jobs.speed
    usable = (counts >= jobs.minimum[:, None]) & (counts < most[:, None]) & (jobs.speed > 0)
    in_time = usable & (ends <= deadlines[:, None])
    return np.where(in_time.any(1), in_time.argmax(1), most)


def shares_above_floors(floors: np.ndarray, wanted: np.ndarray, jobs: Jobs, devices: int) -> np.ndarray:
    """Floors, and above them what is wanted, as far as there are devices: running jobs first, then by priority.

    A job that runs keeps the least that it can use before another one is given more than its floor.
    """
    shares, left = floors.copy(), devices - int(floors.sum())
    order = jobs.order[np.argsort(~jobs.runs[jobs.order], kind="stable")]
    for least in (True, False):
        goals = np.minimum(jobs.minimum, wanted) if least else wanted
        for job in order[goals[order] > shares[order]].tolist():
            more = min(int(goals[job] - shares[job]), left)
            if more > 0 and shares[job] + more >= jobs.minimum[job]:
                shares[job] += more
                left -= more
    return shares
