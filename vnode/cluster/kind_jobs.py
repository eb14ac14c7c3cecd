"""The table of jobs on several kinds of devices that a policy of time shares reads.

Knows how fast jobs are on kinds. Must not know who decides, nor how time passes.

A job takes as many devices as its scale says, of one kind at a time. A policy says which part of the time each job
shall have on each kind: ``[jobs, kinds]``, at most 1 in sum for a job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vnode.cluster.jobs import Job
from vnode.errors import ClusterError


@dataclasses.dataclass(frozen=True, eq=False)
class MixedJobs:
    """Jobs at some time.

    Attributes:
      id: their names.
      rank: their order by arrival, then by name.
      priority: their weights.
      scale: how many devices each takes.
      speed: ``[jobs, kinds]`` units of work per second on so many devices; 0.0 where a job cannot run.
      remaining: units of work that are left.
      age: seconds since their arrivals.
      isolated: seconds that each job would have needed for what it has done at an equal part of the cluster.
      kind: the kind on which each ran last; -1 if it has not run.
      kinds: names of the kinds.
      devices: ``[kinds]`` how many there are.
    """

    id: Sequence[str]
    rank: np.ndarray
    priority: np.ndarray
    scale: np.ndarray
    speed: np.ndarray
    remaining: np.ndarray
    age: np.ndarray
    isolated: np.ndarray
    kind: np.ndarray
    kinds: Sequence[str]
    devices: np.ndarray

    def __len__(self) -> int:
        return len(self.rank)

    def rows(self, rows: np.ndarray) -> MixedJobs:
        """Some of them."""
        columns = ("rank", "priority", "scale", "speed", "remaining", "age", "isolated", "kind")
        found: dict[str, Any] = {name: getattr(self, name)[rows] for name in columns}
        return dataclasses.replace(self, id=[self.id[row] for row in rows.tolist()], **found)


def mixed_table(jobs: Sequence[Job], devices: Mapping[str, int]) -> MixedJobs:
    """The table of jobs that are sorted by arrival.

    Args:
      jobs: each takes its demand, whatever the kind.
      devices: by kind.

    Raises:
      ClusterError: a job has no speed on any kind of which there are enough devices.
    """
    kinds = list(devices)
    speed = np.zeros((len(jobs), len(kinds)))
    for i, job in enumerate(jobs):
        for k, kind in enumerate(kinds):
            known = job.by_kind.get(kind)
            if known is not None and job.demand <= devices[kind] and job.demand < len(known.per_second):
                speed[i, k] = known.per_second[job.demand]
        if not speed[i].any():
            raise ClusterError(
                f"job {job.id!r} can run nowhere: it takes {job.demand} devices of one kind.",
                facts=[f"{kind}: {devices[kind]} devices, no speed on {job.demand} of them" for kind in kinds],
                remedies=["give its speed on a kind with that many devices", "or leave it out"],
            )
    count = len(jobs)
    return MixedJobs(
        id=[job.id for job in jobs],
        rank=np.arange(count),
        priority=np.array([job.priority for job in jobs], float),
        scale=np.array([job.demand for job in jobs], np.int64),
        speed=speed,
        remaining=np.array([job.work for job in jobs], float),
        age=np.zeros(count),
        isolated=np.zeros(count),
        kind=np.full(count, -1),
        kinds=kinds,
        devices=np.array([devices[kind] for kind in kinds], float),
    )
