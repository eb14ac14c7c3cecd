"""Turns Pollux's workloads, and the times that it measured of six applications, into jobs.

Knows the columns of these files (OSDI 2021, its public simulator). Must not know policies.

    cifar10-0,53,cifar10,6,2048       ->   a job that arrives at 53 s and asks for 6 devices; 2048 examples a step
    cifar10-placements.csv: 24,363,.. ->   its time of a step on 6 devices, 4 of them of one node
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from vnode.cluster.jobs import Job
from vnode.cluster.resize_costs import Costs
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces.job_trace import Trace, located_errors, number_in, text_of
from vnode.errors import ClusterError

WORKLOAD = ("name", "time", "application", "num_replicas", "batch_size")
PLACEMENTS = ("placement", "local_bsz", "step_time", "sync_time")
SCALABILITY = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
"""Columns of the three files."""

NODE = 4
"""Devices of a node."""

DEVICES = 16 * NODE

COSTS = Costs(start=30, growth_stall=30, shrink=30, tick=60)
"""Those of Pollux's simulator: a job stands still for 30 s after each change; decisions are made every 60 s."""

LARGEST_PART = {"yolov3": 8}
"""Examples on a device at most, where Pollux's simulator allows fewer than were measured."""

STEPS = {
    "bert": {12: 14774, 24: 7427, 48: 3732, 96: 1885, 192: 940, 384: 480},
    "cifar10": {128: 39062, 256: 20377, 512: 10615, 1024: 5722, 2048: 3178, 4096: 2011},
    "deepspeech2": {20: 28536, 40: 14711, 80: 7683, 160: 4041, 320: 2264, 640: 1423},
    "imagenet": {200: 576525, 400: 292995, 800: 150231, 1600: 78453, 3200: 42123, 6400: 23972, 12800: 14461},
    "ncf": {256: 194174, 512: 97094, 1024: 48625, 2048: 24308, 4096: 12172, 8192: 6122, 16384: 3069, 32768: 1548},
    "yolov3": {8: 103444, 16: 52905, 32: 27430, 64: 14577, 128: 8075, 256: 4809, 512: 3143},
}
"""Steps to the last epoch by batch size: the last iterations of the validation runs beside Pollux's times."""


def is_workload(text: str) -> bool:
    """Whether a text begins with the names of a workload's columns.

    >>> is_workload("name,time,application,num_replicas,batch_size\\n")
    True
    """
    first = text.lstrip().partition("\\n")[0]
    return {"application", "num_replicas"} <= {name.strip() for name in first.split(",")}


def read(text: str, path: Path) -> Trace:
    """The jobs of a workload, by the times of its applications.

    Args:
      text: of the workload.
      path: of its file; times are in ``APPLICATION-placements.csv`` and ``-scalability.csv`` beside it.

    Raises:
      ClusterError: a line of one of the files cannot be read, or an application was not measured.
    """
    known: dict[str, Mapping[int, Sizes]] = {}
    jobs = []
    for place, row in rows(text, path, WORKLOAD, more=("steps",)):
        with located_errors(place):
            application, batch = row["application"], number_in(row["batch_size"], "batch_size", int)
            demand = number_in(row["num_replicas"], "num_replicas", int)
            if batch < 1 or demand < 1:
                raise ValueError("num_replicas and batch_size are at least 1")
            if application not in known:
                known[application] = measured(path.parent, application)
            times = step_seconds(known[application], batch)
            if demand > max(times, default=0):
                most = f"at most {max(times)}" if times else "none"
                raise ValueError(
                    f"num_replicas is {demand}; with a batch_size of {batch}, {application} was measured on {most}"
                )
            jobs.append(
                Job(
                    id=row["name"],
                    arrival=number_in(row["time"], "time"),
                    work=number_in(row["steps"], "steps") if "steps" in row else steps_of(application, batch),
                    speeds=Speeds.from_times(times, allowed=range(min(times), max(times) + 1)),
                    demand=demand,
                    minimum=min(times),
                    facts={"application": application, "batch_size": batch},
                )
            )
    return Trace(jobs, DEVICES, COSTS)


Sizes = Mapping[int, tuple[float, float]]
"""Seconds of a pass with its exchange, and of the exchange, by examples on a device."""


def measured(folder: Path, application: str) -> Mapping[int, Sizes]:
    """The measured times of an application by number of devices, on as few nodes as hold them.

    Raises:
      ClusterError: a file is not there, or a line of it cannot be read.
    """
    if not application or Path(application).name != application:
        raise ValueError(f"application is {application!r}, which names no files")
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for name, columns in (("placements", PLACEMENTS), ("scalability", SCALABILITY)):
        path = folder / f"{application}-{name}.csv"
        for place, row in rows(text_of(path), path, columns):
            with located_errors(place):
                size = number_in(row["local_bsz"], "local_bsz", int)
                step, sync = (number_in(row[field], field) for field in ("step_time", "sync_time"))
                if size < 1 or not 0 <= sync <= step or not step:
                    raise ValueError("local_bsz is at least 1, step_time above 0, and sync_time a part of it")
                if name == "placements":
                    nodes = digits(row["placement"])
                else:
                    nodes = [number_in(row[field], field, int) for field in ("num_nodes", "num_replicas")]
                if name == "placements":
                    count, packed = sum(nodes), sorted(nodes) == packing(sum(nodes))
                else:
                    count, packed = nodes[1], nodes[0] == math.ceil(nodes[1] / NODE)
                if packed and size <= LARGEST_PART.get(application, size):
                    sizes = found.setdefault(count, {})
                    if size in sizes:
                        raise ValueError(f"{size} examples on each of {count} devices were measured before")
                    sizes[size] = step, sync
    return found


def digits(text: str) -> list[int]:
    """Replicas on each node, of which a placement has a digit each.

    >>> digits("144")
    [1, 4, 4]
    """
    nodes = [int(digit) for digit in text.strip() if digit in "123456789"]
    if not nodes or len(nodes) < len(text.strip()):
        raise ValueError(f"placement is {text!r}, not a digit for each node")
    return nodes


def packing(count: int) -> list[int]:
    """Replicas on each of as few nodes as hold so many, fullest last.

    >>> packing(9)
    [1, 4, 4]
    """
    return [count % NODE] * bool(count % NODE) + [NODE] * (count // NODE)


def step_seconds(measured: Mapping[int, Sizes], batch: int) -> dict[int, float]:
    """Seconds of a step of so many examples by number of devices, where so few on a device were measured.

    Each device has an equal part, in as few passes as the largest measured one allows; all but the last do without the
    exchange. Between measured sizes time is a line.

    Example:
      >>> step_seconds({1: {8: (1.0, 0.1), 16: (1.8, 0.1)}, 2: {8: (1.2, 0.3), 16: (2.0, 0.3)}}, 32)
      {1: 3.5, 2: 2.0}
    """
    times = {}
    for count, sizes in sorted(measured.items()):
        known = sorted(sizes)
        part = math.ceil(batch / count)
        passes = math.ceil(part / known[-1])
        size = math.ceil(part / passes)
        if size >= known[0] and count <= batch:
            step, sync = (float(np.interp(size, known, [sizes[each][i] for each in known])) for i in (0, 1))
            times[count] = step + (passes - 1) * (step - sync)
    return times


def steps_of(application: str, batch: int) -> float:
    """Steps of a whole training.

    Raises:
      ValueError: they are not known.
    """
    known = STEPS.get(application, {})
    if batch not in known:
        said = f"only with a batch_size of {', '.join(map(str, known))}" if known else "not at all"
        raise ValueError(
            f"the number of steps of {application!r} at batch_size {batch} is unknown, {said}; add a column steps"
        )
    return float(known[batch])


def rows(
    text: str, path: Path, columns: Sequence[str], more: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a table with commas between its columns: the place of each, and its fields by column.

    Args:
      text: of the file.
      path: of the file, for errors.
      columns: that it must have.
      more: that it may have.

    Raises:
      ClusterError: a column is missing, unknown or there twice, or a line has fewer or more fields.
    """
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] = []
    try:
        for fields in lines:
            place = f"{path}, line {lines.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if not names:
                names = [field.strip() for field in fields]
                missing = [name for name in columns if name not in names]
                if missing or len(set(names)) < len(names) or not set(names) <= {*columns, *more}:
                    said = f"the column {missing[0]!r} is missing" if missing else f"the columns are {', '.join(names)}"
                    raise ClusterError(f"{place}: {said}; needed are {', '.join(columns)}")
                continue
            if len(fields) != len(names):
                raise ClusterError(f"{place}: {len(fields)} fields under {len(names)} columns")
            yield place, {name: field.strip() for name, field in zip(names, fields, strict=True)}
    except csv.Error as error:
        raise ClusterError(f"{path}, line {lines.line_num}: {error}") from error
    if not names:
        raise ClusterError(f"{path} is empty; its columns are {', '.join(columns)}")
