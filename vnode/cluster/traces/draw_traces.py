"""Draws traces from the jobs of one: other arrivals, priorities and an order of jobs, for spreads over seeds.

Knows jobs. Must not know policies.

As VirtualFlow's generator (arXiv 2009.09523, section 6.4): jobs drawn uniformly, priorities 1, 5 or 10, gaps that are
exponential, in whole seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vnode.cluster.jobs import Job
from vnode.cluster.speeds import Speeds

PRIORITIES = (1.0, 5.0, 10.0)


def draw(jobs: Sequence[Job], seed: int, *, rate: float | None = None, linear: bool = False) -> list[Job]:
    """As many jobs, drawn with replacement.

    Args:
      jobs: to draw from.
      seed: of the draw.
      rate: jobs per hour; by default that of the jobs.
      linear: whether jobs are twice as fast on twice the devices; of jobs on one kind of device.

    Example:
      >>> job = Job(id="a", arrival=0, work=1, speeds=Speeds.linear(60, 2), demand=2)
      >>> [(each.id, each.arrival) for each in draw([job, job], 0, rate=60)]
      [('0', 0.0), ('1', 18.0)]
    """
    last = max(job.arrival for job in jobs)
    rate = (3600 * (len(jobs) - 1) / last if last else 1.0) if rate is None else rate
    rng, made, now = np.random.default_rng(seed), [], 0.0
    for number in range(len(jobs)):
        if number:
            now += int(-np.log(1 - rng.random()) * 3600 / rate)
        job, priority = jobs[int(rng.integers(len(jobs)))], PRIORITIES[int(rng.integers(len(PRIORITIES)))]
        speeds = Speeds.linear(1 / job.by_kind[""].at(job.demand), job.demand) if linear else job.speeds
        made.append(dataclasses.replace(job, id=str(number), arrival=now, priority=priority, speeds=speeds))
    return made
