"""Jobs for tests of a cluster, drawn by hypothesis or made by hand; and a simulation by small steps of time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from vnode.cluster import Job, Speeds
from vnode.cluster.jobs import RUNNING, Jobs
from vnode.cluster.resize_costs import FREE
from vnode.cluster.simulator import table_of


@st.composite
def jobs(
    draw: st.DrawFn, most: int = 6, devices: int = 8, powers: bool = False, alike: bool = False, minima: bool = False
) -> list[Job]:
    """Jobs with speeds between not faster at all and linear, on 1 to as many devices as they demand."""
    made = []
    for number in range(draw(st.integers(1, most))):
        counts = [count for count in range(1, devices + 1) if not powers or count & (count - 1) == 0]
        demand = draw(st.sampled_from(counts))
        alone = draw(st.integers(10, 1000))
        fixed = 0 if alike else draw(st.integers(0, 10)) / 10
        made.append(
            Job(
                id=f"{number}",
                arrival=float(draw(st.integers(0, 600))),
                work=1.0,
                speeds=Speeds.with_fixed_part(float(alone), fixed * alone, demand),
                demand=demand,
                minimum=draw(st.integers(1, demand)) if minima else 1,
                priority=float(draw(st.sampled_from([1, 5, 10]))),
            )
        )
    return made


def table(jobs: Sequence[Job], shares: Sequence[int] = (), remaining: Sequence[float] = ()) -> Jobs:
    """The table of jobs that have all arrived, with the shares that they have."""
    made = table_of(sorted(jobs, key=lambda job: (job.arrival, int(job.id))), FREE, {"": 8})
    if len(shares):
        made.share[:] = shares
        made.state[made.share > 0] = RUNNING
    if len(remaining):
        made.remaining[:] = remaining
    return made


def speed(job: Job, count: int) -> float:
    """Units of work per second."""
    return job.by_kind[""].at(min(count, job.demand))


def by_small_steps(jobs: Sequence[Job], devices: int, decide, tick: float) -> np.ndarray:
    """When each job ends if everything happens at multiples of a tick, and resizes take no time."""
    ordered = sorted(jobs, key=lambda job: (job.arrival, int(job.id)))
    left = np.array([job.work for job in ordered])
    share = np.zeros(len(ordered), int)
    ended = np.full(len(ordered), np.nan)
    now = 0.0
    while np.isnan(ended).any():
        there = [i for i, job in enumerate(ordered) if job.arrival <= now and np.isnan(ended[i])]
        if there:
            view = table([ordered[i] for i in there], share[there], left[there])
            share[there] = decide(now, view, devices)
        for i in there:
            left[i] -= tick * speed(ordered[i], int(share[i]))
            if left[i] <= 1e-12:
                ended[i], share[i] = now + tick, 0
        now += tick
    return ended
