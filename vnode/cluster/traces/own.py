"""Turns vnode's own JSON of jobs into jobs.

Knows the fields of the format, which docs/cluster.md describes. Must not know policies.

    {"devices": 8, "costs": {"start": 8, "growth": 5}, "jobs": [
        {"id": "lm", "arrival": 0, "demand": 8, "priority": 5, "steps": 1000, "step_seconds": {"1": 4.0, "8": 0.7}}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vnode.cluster.costs import FREE, Costs
from vnode.cluster.jobs import Job
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces.trace import Trace, at, number

FIELDS = {"id", "arrival", "demand", "minimum", "priority", "steps", "step_seconds", "virtual_nodes", "start", "counts"}
"""Those that a job may have."""


def read(found: Mapping[str, Any], path: str) -> Trace:
    """The jobs of a file.

    Raises:
      ClusterError: a field is missing, unknown or wrong.
    """
    with at(f"{path}, costs"):
        costs = Costs(**found["costs"]) if "costs" in found else FREE
    jobs = []
    for index, record in enumerate(found["jobs"]):
        with at(f"{path}, jobs[{index}]"):
            jobs.append(read_job(record))
    with at(path):
        return Trace(jobs, number(found, "devices", int) if "devices" in found else None, costs)


def read_job(record: Mapping[str, Any]) -> Job:
    """One job."""
    if unknown := sorted(set(record) - FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(FIELDS))}")
    times = {int(count): float(seconds) for count, seconds in record["step_seconds"].items()}
    demand = number(record, "demand", int) if "demand" in record else max(times)
    options = {name: record[name] for name in ("minimum", "priority", "virtual_nodes", "start") if name in record}
    return Job(
        id=str(record["id"]),
        arrival=number(record, "arrival"),
        work=number(record, "steps"),
        speeds=Speeds.from_times(times, allowed=record.get("counts")),
        demand=demand,
        **options,
    )
