"""Turns files of measured times (`vnode.profile`) and of plans (`vnode.partition.search`) into speeds.

Knows the files of both. Must not know steps, nor how plans are found: what is predicted stands in the file.

    speeds_of_profile("times.json", 16)   ->   steps per second with 16 virtual nodes on 1, 2, ... devices
    plan_seconds("plan4.json", 4)         ->   seconds of a step by a plan for 4 devices
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from vnode import files
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces.job_trace import number
from vnode.errors import ClusterError, ProfileError
from vnode.plan.balance.profiles import Profiles

CHECKED, PREDICTED = 4, 2
"""The first versions of plan files that have a checksum, and whose predictions hold."""


def speeds_of_profile(path: Path, nodes: int, kind: str | None = None) -> Speeds:
    """Speeds by a file of `vnode.profile`.

    Raises:
      ClusterError: it cannot be read.
      ValueError: it has several kinds and none is named, or nodes cannot be shared as its step does.
    """
    try:
        profiles = Profiles.load(path)
    except ProfileError as error:
        raise ClusterError(str(error)) from error
    try:
        return Speeds.from_profile(profiles, nodes, kind=kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def plan_seconds(path: Path, count: int) -> float:
    """Seconds of a step that a plan's file predicts.

    Args:
      path: of a file that `vnode.partition.Plan.save` wrote.
      count: the devices that the plan must be for.

    Raises:
      ClusterError: the file cannot be read.
      ValueError: it is no plan, is not as it was written, predicts nothing, or is for another number of devices.
    """
    text = files.read_text(path, ClusterError, ["save it there: plan.save(path)"])
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != "vnode plan":
            raise ValueError("it is not a plan of vnode.partition.search")
        version, devices = (
            number(found, "version", int),
            math.prod(number(found["mesh"], name, int) for name in found["mesh"]),
        )
        rest = {key: value for key, value in found.items() if key != "checksum"}
        sums = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        if version >= CHECKED and sums != found.get("checksum"):
            raise ValueError("it was changed after it was written: its checksum differs")
        if version < PREDICTED or found.get("prediction") is None:
            raise ValueError("it has no predicted time; search the plan again")
        if devices != count:
            raise ValueError(f"it is for {devices} devices, not for {count}")
        return number(found["prediction"]["figures"], "seconds")
    except KeyError as error:
        raise ValueError(f"{path}: the field {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
