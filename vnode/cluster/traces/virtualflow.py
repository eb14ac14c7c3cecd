"""Turns the published runs of VirtualFlow (arXiv 2009.09523) into jobs, on one kind of device and on several.

Knows the fields of these files. Must not know policies.

The logs tell how long each job ran on its full demand, and when its share changed in the elastic run. The fixed part of
its time, which more devices do not shorten, follows from both (`fixed_part`), unless the file has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vnode.cluster.jobs import Job
from vnode.cluster.resize_costs import VIRTUALFLOW
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces.job_trace import Trace, array, checked_number, located_errors, mapping, number
from vnode.errors import ClusterError


def read(found: Mapping[str, Any], path: str, run: str | None) -> Trace:
    """The jobs of a file, or of one of the runs in it.

    Raises:
      ClusterError: a field is missing or wrong, or there is no such run.
    """
    with located_errors(path):
        logged = mapping(found.get("published", {}), "published")
        records = found.get("jobs")
        if records is None:
            runs = {str(mapping(each, "a run").get("run")): each for each in array(found["runs"], "runs")}
            chosen = one_of(runs, run, f"{path} has no run {run!r}")
            records = chosen["jobs"]
            logged = {policy: {"makespan": chosen.get(f"{policy}_makespan")} for policy in ("static", "wfs")}
        elif run is not None:
            raise ClusterError(f"{path} has one run; leave run={run!r} out")
        records = array(records, "jobs")
        devices = number(found, "gpus", int)
    jobs, starts = [], {"static": [], "wfs": []}
    for index, record in enumerate(records):
        with located_errors(f"{path}, jobs[{index}]"):
            job, begun = read_job(mapping(record, "a job"))
            jobs.append(job)
            for policy, seconds in begun.items():
                starts[policy].append(seconds)
    return Trace(jobs, devices, VIRTUALFLOW, logged, starts)


def one_of(traces: Mapping[str, Any], name: str | None, otherwise: str) -> Mapping[str, Any]:
    """The trace of a name, or the last one.

    Raises:
      ClusterError: there is none of that name.
      ValueError: it is no object with fields, or there is none at all.
    """
    if not traces:
        raise ValueError("there is no trace in it")
    chosen = name if name is not None else list(traces)[-1]
    if chosen not in traces:
        raise ClusterError(f"{otherwise}; it has {', '.join(traces)}")
    return mapping(traces[chosen], chosen)


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
    with located_errors(path):
        traces = mapping(found["traces"], "traces")
        trace = one_of(traces, run, f"{path} has no trace of {run!r} jobs per hour")
        place = f"{path}, traces[{run if run is not None else list(traces)[-1]!r}]"
        gpus = mapping(found["gpus"], "gpus")
        kinds = {kind: number(gpus, kind, int) for kind in gpus}
        if not kinds or min(kinds.values()) < 1:
            raise ValueError(f"gpus is {dict(kinds)}; there is at least one of each kind")
    speeds = {}
    for model, measured in mapping(found["samples_per_s"], "samples_per_s").items():
        with located_errors(f"{path}, samples_per_s, {model}"):
            speeds[model] = speeds_of(mapping(measured, "the value"), kinds)
    with located_errors(place):
        records = array(trace["jobs"], "jobs")
        logged = {key: number(trace, key) for key in ("gavel_avg_jct", "mixed_avg_jct") if key in trace}
    jobs = []
    for index, record in enumerate(records):
        with located_errors(f"{place}, jobs[{index}]"):
            kind = mapping(record, "a job")["kind"]
            if kind not in speeds:
                raise ValueError(f"kind is {kind!r}; samples_per_s has {', '.join(speeds)}")
            alone, together = speeds[kind]
            jobs.append(
                Job(
                    id=str(record["job"]),
                    arrival=number(record, "arrival"),
                    work=number(record, "samples"),
                    speeds=alone,
                    together=together,
                    demand=max(kinds.values()),
                    facts={"model": kind},
                )
            )
    return Trace(jobs, kinds, logged=logged)


def speeds_of(
    measured: Mapping[str, Any], kinds: Mapping[str, int]
) -> tuple[dict[str, Speeds], dict[tuple[tuple[str, int], ...], float]]:
    """The speeds of a model on kinds alone, and on several kinds at once."""
    pairs = {}
    for key in measured:
        speed, parts = number(measured, key), parts_of(key)
        if speed < 0 or any(kind not in kinds for kind, _ in parts):
            raise ValueError(f"{key} is {speed}; it must be at least 0, on kinds of {', '.join(kinds)}")
        pairs[parts] = speed
    alone = {parts[0][0]: Speeds((0.0,) * parts[0][1] + (speed,)) for parts, speed in pairs.items() if len(parts) == 1}
    together = {parts: speed for parts, speed in pairs.items() if len(parts) > 1}
    together.setdefault(tuple(sorted(kinds.items())), max(pairs.values(), default=0.0))
    return alone, together


def parts_of(text: str) -> tuple[tuple[str, int], ...]:
    """Devices by kind, in the order of names.

    >>> parts_of("8xP100+16xK80")
    (('K80', 16), ('P100', 8))
    """
    pairs = []
    for part in text.split("+"):
        count, _, kind = part.partition("x")
        if not (count.isascii() and count.isdigit() and len(count) < 6 and int(count) and kind):
            raise ValueError(f"{text!r} does not give devices by kind, such as 8xP100+16xK80")
        pairs.append((kind, int(count)))
    return tuple(sorted(pairs))


def read_job(record: Mapping[str, Any]) -> tuple[Job, dict[str, float]]:
    """One job, and how long its start took by policy."""
    demand = number(record, "demand", int)
    if demand < 1:
        raise ValueError(f"demand is {demand}; it must be at least 1")
    elastic = mapping(record["wfs"], "wfs")
    run = number(mapping(record["static"], "static"), "run_s")
    resized = [resize_of(each) for each in array(elastic["resized"], "resized")]
    first = resized[0][0] if resized else None
    if fitted := mapping(record.get("fitted") or {}, "fitted"):
        alone, fixed = number(fitted, "seconds_at_demand"), number(fitted, "fixed_part_s")
        begun = {"static": run - alone, "wfs": first if first is not None and demand > 1 else run - alone}
    else:
        start = first or VIRTUALFLOW.start
        begun, alone = {"static": start, "wfs": start}, run - start
        fixed = fixed_part(alone, demand, at_least_one(elastic, "first"), resized, number(elastic, "run_s"))
    if not alone > 0:
        raise ValueError(f"it ran for {alone:g} s on all its devices; that must be above 0")
    if min(begun.values()) < 0:
        raise ValueError(f"its start took {min(begun.values()):g} s; that must be at least 0")
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


def at_least_one(record: Mapping[str, Any], field: str) -> int:
    """A number of devices."""
    count = number(record, field, int)
    if count < 1:
        raise ValueError(f"{field} is {count}; it must be at least 1")
    return count


def resize_of(pair: Any) -> tuple[float, int]:
    """After how many seconds a job had how many devices."""
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"resized has {pair!r}, not [seconds, devices]")
    return checked_number(pair[0], "resized"), at_least_one({"resized": pair[1]}, "resized")


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
