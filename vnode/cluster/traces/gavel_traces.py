"""Turns Gavel's traces, and its file of measured throughputs, into jobs with speeds on kinds of devices.

Knows the columns of its traces (10, or 7 of the older form) and the keys of its throughputs. Must not know policies.

    ResNet-18 (batch size 128) ... 925982  4  1  -1  0   ->   a job of 925982 steps on 4 devices of one kind
    {"v100": {"('ResNet-18 (batch size 128)', 4)": {"null": 98.5}}}   ->   98.5 steps per second there
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from typing import Any

from vnode.cluster.jobs import Job
from vnode.cluster.speeds import MOST, Speeds
from vnode.cluster.traces.job_trace import Trace, located_errors, mapping, number, number_in
from vnode.errors import ClusterError, layout_message

logger = logging.getLogger("vnode")

COLUMNS = {
    10: {"type": 0, "steps": 5, "scale": 6, "priority": 7, "arrival": 9},
    7: {"type": 0, "steps": 4, "arrival": 5, "scale": 6},
}
"""The places of fields, by the number of columns of a trace."""


def read(text: str, path: str, throughputs: Mapping[str, Any], source: str, kinds: list[str]) -> Trace:
    """The jobs of a trace, with their speeds on some kinds of devices.

    A speed of 0.0 means that a job did not run there: it is never placed there. Such kinds are logged.

    Args:
      text: of the trace.
      path: of its file, for errors.
      throughputs: of all job types.
      source: their file, for errors.
      kinds: of devices.

    Raises:
      ClusterError: a line cannot be read, or a job has no speed on any kind.
    """
    if not kinds:
        raise ClusterError(f"{source} needs kinds of devices: kinds=['v100', ...]")
    with located_errors(source):
        if unknown := [kind for kind in kinds if kind not in mapping(throughputs, "the whole")]:
            raise ClusterError(f"{source} has no throughputs of {unknown[0]!r}; it has {', '.join(throughputs)}")
    known = {kind: speeds_of(throughputs[kind], source, kind) for kind in kinds}
    jobs, nowhere = [], {}
    for line_number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {line_number}"
        fields = line.split("\t")
        if len(fields) not in COLUMNS:
            raise ClusterError(f"{place}: {len(fields)} columns; Gavel's traces have 10 or 7, with tabs between them")
        with located_errors(place):
            column = {name: fields[index] for name, index in COLUMNS[len(fields)].items()}
            scale = number_in(column["scale"], "the scale factor", int)
            name = column["type"]
            found = {kind: known[kind].get((name, scale), 0.0) for kind in kinds}
            for kind, speed in found.items():
                if speed == 0:
                    nowhere.setdefault((kind, name, scale), place)
            if not any(found.values()):
                raise ValueError(f"{name!r} on {scale} devices has no throughput in {source} on {', '.join(kinds)}")
            jobs.append(
                Job(
                    id=str(len(jobs)),
                    arrival=number_in(column["arrival"], "the arrival"),
                    work=number_in(column["steps"], "the number of steps"),
                    speeds={kind: Speeds((0.0,) * scale + (speed,)) for kind, speed in found.items() if speed},
                    demand=scale,
                    minimum=scale,
                    priority=number_in(column.get("priority", "1"), "the priority"),
                    facts={"type": name},
                )
            )
    if nowhere:
        facts = [f"{name} on {scale} x {kind} ({place})" for (kind, name, scale), place in nowhere.items()]
        logger.warning(
            layout_message(f"{source} has no throughput for some jobs: they are never placed there.", facts=facts)
        )
    return Trace(jobs)


def speeds_of(found: Any, source: str, kind: str) -> dict[tuple[str, int], float]:
    """Steps per second alone, by job type and number of devices.

    Raises:
      ClusterError: a key or a value is not what it must be.
    """
    speeds = {}
    with located_errors(source):
        mapping(found, kind)
    for key, measured in found.items():
        with located_errors(f"{source}, {kind}, {key}"):
            name, scale = key_of(key)
            speed = number(mapping(measured, "the value"), "null")
            if speed < 0:
                raise ValueError(f"a throughput is {speed}, less than 0")
            speeds[name, scale] = speed
    return speeds


def key_of(text: str) -> tuple[str, int]:
    """The job type and the number of devices that a key stands for.

    >>> key_of("('ResNet-18 (batch size 128)', 4)")
    ('ResNet-18 (batch size 128)', 4)
    """
    try:
        name, scale = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        name = scale = None
    if not isinstance(name, str) or type(scale) is not int or not 1 <= scale <= MOST:
        raise ValueError("a key is a job type and a number of devices: ('ResNet-18 (batch size 128)', 4)")
    return name, scale
