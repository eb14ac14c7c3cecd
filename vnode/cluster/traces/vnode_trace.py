"""Turns vnode's own JSON of jobs into jobs.

Knows the fields of the format, which docs/cluster.md describes. Must not know policies.

    {"devices": 8, "costs": {"start": 8, "growth": 5}, "jobs": [
        {"id": "lm", "arrival": 0, "demand": 8, "priority": 5, "steps": 1000, "step_seconds": {"1": 4.0, "8": 0.7}}]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vnode.cluster.jobs import Job
from vnode.cluster.resize_costs import FREE, Costs
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces.job_trace import Trace, array, checked_number, known_fields, located_errors, mapping, number
from vnode.cluster.traces.measured_speeds import plan_seconds, speeds_of_profile

SPEEDS = ("step_seconds", "profile", "plans")
"""Fields that say how fast a job is; a job has one of them."""

FIELDS = {
    "id",
    "arrival",
    "demand",
    "minimum",
    "priority",
    "steps",
    "virtual_nodes",
    "start",
    "counts",
    "kind",
    *SPEEDS,
}
"""The fields that a job may have."""


def read(found: Mapping[str, Any], path: Path) -> Trace:
    """The jobs of a file.

    Args:
      found: what stands in it.
      path: of the file; other files are named relative to its folder.

    Raises:
      ClusterError: a field is missing, unknown or wrong.
    """
    with located_errors(str(path)):
        known_fields(found, ("devices", "costs", "jobs"))
        devices = number(found, "devices", int) if "devices" in found else None
        if devices is not None and devices < 1:
            raise ValueError(f"devices is {devices}; there must be at least 1")
        records = array(found["jobs"], "jobs")
    with located_errors(f"{path}, costs"):
        costs = read_costs(mapping(found["costs"], "costs")) if "costs" in found else FREE
    jobs = []
    for index, record in enumerate(records):
        with located_errors(f"{path}, jobs[{index}]"):
            jobs.append(read_job(mapping(record, "a job"), path.parent))
    return Trace(jobs, devices, costs)


def read_costs(record: Mapping[str, Any]) -> Costs:
    """Seconds of starts and resizes."""
    known_fields(record, [field.name for field in dataclasses.fields(Costs)])
    if not isinstance(record.get("settles", False), bool):
        raise ValueError(f"settles is {record['settles']!r}, not true or false")
    seconds = {name: number(record, name) for name in record if name != "settles"}
    return Costs(**seconds, settles=record.get("settles", False))


def read_job(record: Mapping[str, Any], folder: Path) -> Job:
    """One job."""
    known_fields(record, FIELDS)
    name, nodes = record["id"], None
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id is {name!r}, not a text or a number")
    if "virtual_nodes" in record:
        nodes = number(record, "virtual_nodes", int)
    speeds = read_speeds(record, folder, nodes)
    least = next(count for count, speed in enumerate(speeds.per_second) if speed or count == speeds.most)
    return Job(
        id=str(name),
        arrival=number(record, "arrival"),
        work=number(record, "steps"),
        speeds=speeds,
        demand=number(record, "demand", int) if "demand" in record else speeds.most,
        minimum=number(record, "minimum", int) if "minimum" in record else least,
        priority=number(record, "priority") if "priority" in record else 1.0,
        virtual_nodes=nodes,
        start=number(record, "start") if record.get("start") is not None else None,
    )


def read_speeds(record: Mapping[str, Any], folder: Path, nodes: int | None) -> Speeds:
    """The speed of a job: by times of steps, by a file of `vnode.profile`, or by plans of `vnode.partition.search`."""
    given = [name for name in SPEEDS if name in record]
    if not given:
        raise KeyError("step_seconds")
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} both give its speed; leave one of them out")
    for field, needs in (("counts", "step_seconds"), ("kind", "profile")):
        if field in record and needs not in record:
            raise ValueError(f"{field} belongs to {needs}, not to {given[0]}")
    if "profile" in record:
        kind = record.get("kind")
        if nodes is None:
            raise KeyError("virtual_nodes")
        if not isinstance(kind, str | None):
            raise ValueError(f"kind is {kind!r}, not a text")
        return speeds_of_profile(folder / named_file(record["profile"], "profile"), nodes, kind)
    if "plans" in record:
        plans = by_count(record["plans"], "plans")
        found = {count: folder / named_file(name, f"plans, {count}") for count, name in plans.items()}
        return Speeds.from_plans({count: plan_seconds(path, count) for count, path in found.items()})
    times = by_count(record["step_seconds"], "step_seconds")
    seconds = {count: checked_number(time, f"step_seconds, {count}") for count, time in times.items()}
    counts = record.get("counts")
    allowed = None if counts is None else [checked_number(count, "counts", int) for count in array(counts, "counts")]
    return Speeds.from_times(seconds, allowed=allowed)


def by_count(value: Any, field: str) -> dict[int, Any]:
    """An object whose fields are counts of devices."""
    found = {}
    for text, each in mapping(value, field).items():
        if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) in found:
            raise ValueError(f"{field}: {text!r} is not a count of devices, or it occurs twice")
        found[int(text)] = each
    return found


def named_file(value: Any, field: str) -> str:
    """A value that must name a file."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} is {value!r}, not the name of a file")
    return value
