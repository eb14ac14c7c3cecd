"""Turns the published runs of VirtualFlow (arXiv 2009.09523) into jobs, on one kind of device and on several.

Knows the fields of these files. Must not know policies.

The logs tell how long each job ran on what it demanded, and when its share changed in the elastic run. What does not
get shorter on more devices, the fixed part of its time, follows from both (`fixed_part`), unless the file has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vnode.cluster.costs import VIRTUALFLOW
from vnode.cluster.jobs import Job
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces.trace import Trace, at, number
from vnode.errors import ClusterError


def read(found: Mapping[str, Any], path: str, run: str | None) -> Trace:
    """The jobs of a file, or of one of the runs in it.

    Raises:
      ClusterError: a field is missing or wrong, or there is no such run.
    """
    records, logged = found.get("jobs"), found.get("published", {})
    if records is None:
        runs = {str(each.get("run")): each for each in found["runs"]}
        name = run if run is not None else list(runs)[-1]
        if name not in runs:
            raise ClusterError(f"{path} has no run {run!r}; it has {', '.join(runs)}")
        records = runs[name]["jobs"]
        logged = {policy: {"makespan": runs[name].get(f"{policy}_makespan")} for policy in ("static", "wfs")}
    elif run is not None:
        raise ClusterError(f"{path} has one run; leave run={run!r} out")
    jobs, starts = [], {"static": [], "wfs": []}
    for index, record in enumerate(records):
        with at(f"{path}, jobs[{index}]"):
            job, begun = read_job(record)
            jobs.append(job)
            for policy, seconds in begun.items():
                starts[policy].append(seconds)
    with at(path):
        return Trace(jobs, number(found, "gpus", int), VIRTUALFLOW, logged, starts)


def read_mixed(found: Mapping[str, Any], path: str, run: str | None) -> Trace:
    """The jobs of a file of traces on several kinds of devices, of which each job takes all of a kind.

    Speeds on pairs of kinds are in the file; all three are taken to be as fast as the best pair.

    Args:
      found: the file.
      path: of the file, for errors.
      run: jobs per hour, by which the file tells traces apart.

    Raises:
      ClusterError: a field is missing or wrong, or there is no such trace.
    """
    traces = found["traces"]
    name = run if run is not None else list(traces)[-1]
    if name not in traces:
        raise ClusterError(f"{path} has no trace of {run!r} jobs per hour; it has {', '.join(traces)}")
    with at(path):
        kinds = {kind: int(count) for kind, count in found["gpus"].items()}
        alone, together = {}, {}
        for model, measured in found["samples_per_s"].items():
            pairs = {parts_of(key): float(speed) for key, speed in measured.items()}
            alone[model] = {
                kind: Speeds((0.0,) * count + (speed,))
                for parts, speed in pairs.items()
                if len(parts) == 1
                for kind, count in parts
            }
            together[model] = {parts: speed for parts, speed in pairs.items() if len(parts) > 1}
            together[model].setdefault(tuple(sorted(kinds.items())), max(pairs.values()))
    jobs = []
    for index, record in enumerate(traces[name]["jobs"]):
        with at(f"{path}, traces[{name!r}], jobs[{index}]"):
            jobs.append(
                Job(
                    id=str(record["job"]),
                    arrival=number(record, "arrival"),
                    work=number(record, "samples"),
                    speeds=alone[record["kind"]],
                    together=together[record["kind"]],
                    demand=max(kinds.values()),
                    facts={"model": record["kind"]},
                )
            )
    logged = {key: traces[name][key] for key in ("gavel_avg_jct", "mixed_avg_jct") if key in traces[name]}
    return Trace(jobs, kinds, logged=logged)


def parts_of(text: str) -> tuple[tuple[str, int], ...]:
    """Devices by kind, in the order of names.

    >>> parts_of("8xP100+16xK80")
    (('K80', 16), ('P100', 8))
    """
    pairs = (part.split("x", 1) for part in text.split("+"))
    return tuple(sorted((kind, int(count)) for count, kind in pairs))


def read_job(record: Mapping[str, Any]) -> tuple[Job, dict[str, float]]:
    """One job, and how long its start took by policy."""
    demand = number(record, "demand", int)
    run = number(record["static"], "run_s")
    resized = [(float(after), int(count)) for after, count in record["wfs"]["resized"]]
    first = resized[0][0] if resized else None
    if fitted := record.get("fitted"):
        alone, fixed = number(fitted, "seconds_at_demand"), number(fitted, "fixed_part_s")
        begun = {"static": run - alone, "wfs": first if first is not None and demand > 1 else run - alone}
    else:
        start = first or VIRTUALFLOW.start
        begun, alone = {"static": start, "wfs": start}, run - start
        fixed = fixed_part(alone, demand, int(record["wfs"]["first"]), resized, number(record["wfs"], "run_s"))
    job = Job(
        id=str(record["job"]),
        arrival=number(record, "arrival_s" if "arrival_s" in record else "arrival"),
        work=1.0,
        speeds=Speeds.with_fixed_part(alone, fixed, demand),
        demand=demand,
        priority=number(record, "priority"),
        start=begun["static"],
        facts={key: record[key] for key in ("model", "data", "work") if key in record},
    )
    return job, begun


def fixed_part(alone: float, demand: int, first: int, resized: Sequence[tuple[float, int]], end: float) -> float:
    """The part of a job's time that no devices shorten, by when an elastic run of it came to its end.

    Args:
      alone: seconds on all that it demands, without its start.
      demand: how many devices that is.
      first: its first share.
      resized: seconds from its start after which it ran on so many devices; the first of them is the end of the start.
      end: seconds from its start to its end.

    Example:
      >>> round(fixed_part(600, 4, 2, [(60, 2), (660, 4)], 960))
      0
      >>> round(fixed_part(600, 4, 2, [(60, 2), (460, 4)], 760))
      400
    """
    spans = [*(after for after, _ in resized), end]
    counts = [first, *(count for _, count in resized[1:])]

    def done(fixed: float) -> float:
        times = [fixed + (alone - fixed) * demand / count for count in counts]
        return sum((spans[i + 1] - spans[i]) / time for i, time in enumerate(times))

    low, high = 0.0, alone  # the larger the fixed part, the more a small share has done
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if done(middle) < 1 else (low, middle)
    return (low + high) / 2
