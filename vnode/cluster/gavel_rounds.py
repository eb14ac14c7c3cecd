"""Turns time shares into rounds, in which each job has devices of one kind or none: Gavel's mechanism.

Knows rounds, and what jobs have received. Must not know how time shares are computed.

In each round the devices of a kind go to the jobs that have received least of what they should have on it, in falling
order of share over received part; then of the time that they are behind, then of the share. A round ends with its last
job, after `seconds` at the latest. Time shares are computed anew at the beginning of a round if the set of jobs has
changed, and the last time is long enough ago; what jobs should have received until then is carried over.

Narayanan et al., OSDI 2020, section 5, and its public simulator, down to the order in which it looks at kinds: as they
are named for policies that read speeds, shuffled anew in each round for those that do not.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np

from vnode.cluster.events import Event
from vnode.cluster.job_figures import Result
from vnode.cluster.jobs import Job
from vnode.cluster.kind_jobs import MixedJobs, mixed_table
from vnode.cluster.policies.gavel import Allocation, isolated_speed
from vnode.cluster.simulator import natural
from vnode.errors import ClusterError

SEED = 5
"""The order in which Gavel's simulator looks at kinds."""


@dataclasses.dataclass
class Received:
    """The time that jobs have received on each kind since time shares were computed last.

    Attributes:
      seconds: ``[jobs, kinds]``; half a round more than they have, so that none has received nothing.
      behind: ``[jobs, kinds]`` seconds by which they are behind from earlier.
      shares: ``[jobs, kinds]`` the time shares; NaN for jobs that have none yet.
    """

    seconds: np.ndarray
    behind: np.ndarray
    shares: np.ndarray


def simulate_rounds(
    jobs: Sequence[Job],
    devices: Mapping[str, int],
    allocate: Allocation,
    *,
    seconds: float = 360.0,
    again: float = 1920.0,
    shuffles: bool = False,
    policy: str = "",
) -> Result:
    """Simulates jobs that take turns on kinds of devices.

    Args:
      jobs: in any order. Each takes as many devices as it demands; its work is in whole steps.
      devices: by kind, in the order in which they are looked at.
      allocate: computes time shares.
      seconds: of a round at most.
      again: seconds between two computations of time shares at least.
      shuffles: whether kinds are looked at in another order in each round.
      policy: its name, for people.

    Raises:
      ClusterError: a job can run nowhere, or makes no whole step in a round.
    """
    if not seconds > 0:
        raise ClusterError(f"a round takes {seconds:g} s; it must be more than 0")
    ordered = sorted(jobs, key=lambda job: (job.arrival, natural(job.id)))
    table = mixed_table(ordered, devices)
    count, kinds = table.speed.shape
    for job, kind in np.argwhere((table.speed > 0) & (table.speed * seconds < 1)).tolist():
        raise ClusterError(
            f"job {table.id[job]!r} makes no step in a round of {seconds:g} s on {table.kinds[kind]}.",
            facts=[f"a step takes {1 / table.speed[job, kind]:g} s there"],
            remedies=["make rounds longer: --rounds SECONDS", "or count its work in smaller steps"],
        )
    left = table.remaining.copy()
    arrival = np.array([job.arrival for job in ordered])
    isolated, kind = np.zeros(count), np.full(count, -1)
    received = Received(np.full((count, kinds), seconds / 2), np.zeros((count, kinds)), np.full((count, kinds), np.nan))
    given = np.zeros(kinds)
    shuffled = random.Random(SEED)
    events = [Event(time, "arrived", job) for job, time in enumerate(arrival.tolist())]
    active: list[int] = []
    now = last = 0.0
    arrived, changed = 0, True
    done = left.copy()  # what was left when time shares were computed last
    speeds = np.ones(count)  # of an equal part, then
    while arrived < count or active:
        if not active:
            now, last = max(now, float(arrival[arrived])), 0.0
        while arrived < count and arrival[arrived] <= now:
            active.append(arrived)
            arrived, changed = arrived + 1, True
        rows = np.array(active)
        if changed and (now - last >= again or last == 0):
            should = np.nan_to_num(received.shares[rows]) * (now - last)
            received.behind[rows] += should - (received.seconds[rows] - seconds / 2)
            received.seconds[rows] = seconds / 2
            given[:] = len(active) * seconds / 2
            isolated[rows] += (done[rows] - left[rows]) / speeds[rows]
            view = dataclasses.replace(table, remaining=left, age=now - arrival, isolated=isolated, kind=kind).rows(
                rows
            )
            done[rows], speeds[rows] = left[rows], isolated_speed(view, view.speed)
            received.shares[:] = np.nan
            received.shares[rows] = np.clip(allocate(view), 0, 1)
            last, changed = now, False
        order = list(range(kinds))
        if shuffles:
            shuffled.shuffle(order)
        chosen = choose(active, order, table, received, given)
        ends = {}
        for job, on in chosen.items():
            steps = min(int(table.speed[job, on] * seconds), left[job])
            ends[job] = now + steps / table.speed[job, on]
            left[job] -= steps
            if kind[job] != on:
                events.append(Event(now, "share", job, int(table.scale[job])))
            kind[job] = on
            events += [Event(now, name, job, int(table.scale[job])) for name in ("holds", "runs")]
            received.seconds[job, on] += ends[job] - now
            given[on] += ends[job] - now
        now = max(ends.values(), default=float(arrival[arrived]) if arrived < count else now)
        for job, end in ends.items():
            if left[job] <= 0:
                active.remove(job)
                changed = True
                events += [Event(end, "ended", job, int(table.scale[job])), Event(now, "holds", job, 0)]
            else:
                events += [Event(end, "runs", job, 0), Event(now, "holds", job, 0)]
    events.sort(key=lambda event: event.time)
    return Result(ordered, int(table.devices.sum()), events, policy)


def choose(
    active: Sequence[int], order: Sequence[int], table: MixedJobs, received: Received, given: np.ndarray
) -> dict[int, int]:
    """The kinds of the jobs that run in a round.

    Args:
      active: the jobs that are there.
      order: of kinds.
      table: of all jobs.
      received: what they have received.
      given: what all of them have received, by kind.
    """
    left, chosen = table.devices.copy(), {}
    for kind in order:
        shares = np.nan_to_num(received.shares[active, kind])
        fits = (shares > 0) & (table.speed[active, kind] > 0)
        parts = received.seconds[active, kind] / given[kind]
        first = np.where(fits, shares / parts, 0.0)
        keys = zip(first.tolist(), received.behind[active, kind].tolist(), shares.tolist(), active, strict=True)
        for _, _, _, job in sorted(keys, key=lambda key: key[:3], reverse=True):
            if job not in chosen and table.speed[job, kind] > 0 and table.scale[job] <= left[kind]:
                chosen[job] = kind
                left[kind] -= table.scale[job]
    return chosen
