"""A machine <-> JSON that people can read and write.

Knows JSON, and the entries that describe a kind, a device, a network. Must not know the queries of machines.

A file looks like this::

    {
     "format": "vnode machine",
     "version": 1,
     "name": "two old hosts",
     "kinds": {
      "P100": {"peak": {"float32": 1.06e13, "float16": 2.12e13}, "vector": 1.06e13, "memory": 17179869184,
               "bandwidth": 7.32e11, "host_bandwidth": 1.575e10, "host_latency": 1e-05, "source": "data sheet"}
     },
     "devices": [
      {"kind": "P100", "host": 0, "count": 4},
      {"kind": "P100", "host": 1, "count": 4}
     ],
     "networks": [
      {"type": "switch", "name": "NVLink", "ports": [[0], [1], [2], [3]], "bandwidth": 6e10, "latency": 2e-06},
      {"type": "switch", "name": "NVLink", "ports": [[4], [5], [6], [7]], "bandwidth": 6e10, "latency": 2e-06},
      {"type": "switch", "name": "InfiniBand", "ports": [[0, 1, 2, 3], [4, 5, 6, 7]], "bandwidth": 1.25e10,
       "latency": 4e-06}
     ]
    }

A torus has ``"axes": [{"size": 4, "wrap": false}, ...]``, ``"devices": [0, 1, ...]`` and ``"points": [[0, 0], ...]``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vnode.errors import MachineError
from vnode.partition.machine.description_checks import (
    MOST_DEVICES,
    error_context,
    nonempty_list,
    one_line,
    whole_number,
    wrong_value,
)
from vnode.partition.machine.device_kind import Kind
from vnode.partition.machine.machine_builders import Device, Parts
from vnode.partition.machine.networks import Network, Switch
from vnode.partition.machine.torus import Axis, Torus

FORMAT = "vnode machine"
VERSION = 1

TYPES: dict[str, type[Network]] = {"switch": Switch, "torus": Torus}


def machine_to_json(name: str, devices: Sequence[Device], networks: Sequence[Network]) -> str:
    """A machine as JSON; one line for each kind, run of devices and network."""
    kinds = {device.kind.name: dataclasses.asdict(device.kind) for device in devices}
    for kind in kinds.values():
        del kind["name"]
    runs = [(device, len(list(run))) for device, run in itertools.groupby(devices)]
    types = {made: called for called, made in TYPES.items()}
    rows = {
        "kinds": [f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in kinds.items()],
        "devices": [json.dumps({"kind": d.kind.name, "host": d.host, "count": n}) for d, n in runs],
        "networks": [json.dumps({"type": types[type(net)], **dataclasses.asdict(cast(Any, net))}) for net in networks],
    }
    head = {"format": FORMAT, "version": VERSION, "name": name}
    said = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, lines in rows.items():
        opened, closed = "{}" if key == "kinds" else "[]"
        said.append(f" {json.dumps(key)}: {opened}" + ",".join(f"\n  {line}" for line in lines) + f"\n {closed}")
    return "{\n" + ",\n".join(said) + "\n}\n"


def machine_from_json(said: str) -> Parts:
    """Reads the parts of a machine from JSON.

    Raises:
      MachineError: the text is not JSON, or of another version; or an entry is missing, unknown or wrong (named).
    """
    try:
        content = json.loads(said, object_pairs_hook=entries, parse_constant=reject_number)
    except (ValueError, RecursionError) as error:
        raise MachineError(f"the file is not JSON: {error or type(error).__name__}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise wrong_value("format", repr(FORMAT), content.get("format") if isinstance(content, dict) else content)
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise wrong_value(
            "version", f"{VERSION}, the only one that this version of vnode reads", content.get("version")
        )
    found = record(content, "", ("format", "version", "name", "kinds", "devices", "networks"))
    if not isinstance(found["kinds"], Mapping):
        raise wrong_value("kinds", "a kind by each name", found["kinds"])
    kinds = dict[str, Kind]()
    for name, entry in found["kinds"].items():
        with error_context(f"kinds[{json.dumps(name)}]"):
            kinds[name] = dataclass_from_entry(Kind, entry, name=name)
    devices = list[Device]()
    for i, entry in enumerate(nonempty_list(found["devices"], "devices", "devices")):
        with error_context(f"devices[{i}]"):
            row = record(entry, "", ("kind", "host"), ("count",))
            if not isinstance(row["kind"], str) or row["kind"] not in kinds:
                raise wrong_value("kind", f"one of the kinds {', '.join(kinds) or '(there are none)'}", row["kind"])
            room = MOST_DEVICES - len(devices)
            count = whole_number(row.get("count", 1), "count", "devices", 1, max(room, 1))
            devices += [Device(kinds[row["kind"]], row["host"])] * count
    if not isinstance(found["networks"], list):
        raise wrong_value("networks", "a list of networks", found["networks"])
    networks = list[Network]()
    for i, entry in enumerate(found["networks"]):
        with error_context(f"networks[{i}]"):
            networks.append(network(entry))
    return one_line(found["name"], "name"), tuple(devices), tuple(networks)


def network(entry: Any) -> Network:
    """A network from its entry."""
    if not isinstance(entry, Mapping) or "type" not in entry:
        raise wrong_value("", f"an object with a type, {' or '.join(TYPES)}", entry)
    if not isinstance(entry["type"], str) or entry["type"] not in TYPES:
        raise wrong_value("type", f"{' or '.join(TYPES)}", entry["type"])
    kind, rest = TYPES[entry["type"]], {key: value for key, value in entry.items() if key != "type"}
    if kind is Torus and isinstance(rest.get("axes"), list):
        axes = list[Axis]()
        for i, axis in enumerate(rest["axes"]):
            with error_context(f"axes[{i}]"):
                axes.append(dataclass_from_entry(Axis, axis))
        rest["axes"] = axes
    return dataclass_from_entry(kind, rest)


def dataclass_from_entry(kind: Callable[..., Any], entry: Any, **given: Any) -> Any:
    """A dataclass instance from an entry whose keys are its attributes."""
    fields = [field for field in dataclasses.fields(kind) if field.name not in given]  # pyright: ignore
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    more = [field.name for field in fields if field.default is not dataclasses.MISSING]
    return kind(**record(entry, "", needed, more), **given)


def record(value: Any, place: str, needed: Sequence[str], more: Sequence[str] = ()) -> dict[str, Any]:
    """Checks that an object has the needed keys, perhaps the optional keys `more`, and no others."""
    if not isinstance(value, dict):
        raise wrong_value(place, f"an object with {', '.join(needed)}", value)
    for name in needed:
        if name not in value:
            raise MachineError(
                f"expected an entry {name!r}; there is {', '.join(map(repr, value)) or 'none'}", place=place
            )
    for name in value:
        if name not in needed and name not in more:
            raise MachineError(f"expected entries {', '.join((*needed, *more))}, not {name!r}", place=place)
    return value


def entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The entries of a JSON object. Raises on a repeated key: Python's JSON reader would silently keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in [other for other, _ in pairs[:i]])
        raise ValueError(f"an object has the entry {twice!r} twice")
    return found


def reject_number(name: str) -> Any:
    """Refuses NaN and infinity, which JSON does not have."""
    raise ValueError(f"{name} is no number")
