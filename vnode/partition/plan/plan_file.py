"""A plan <-> a JSON file.

Knows JSON, plans, and which entries describe one. Must not know how a plan is found or carried out.

A file holds the machine (as `Machine.save` writes it), the step's fingerprint, specs by name, the division of each
pass, and the prediction. Reading a file analyses the step again, and refuses the file if the step is another. Files of
other versions are refused: today's model may predict other figures for the same layouts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from vnode import files
from vnode.analysis.fingerprint import Fingerprint
from vnode.errors import MachineError, PartitionError, limit_lines
from vnode.partition.hlo import Collective
from vnode.partition.machine import Machine
from vnode.partition.machine.machine_file import machine_from_json as read_machine
from vnode.partition.machine.machine_file import machine_to_json
from vnode.partition.plan.divisions import DividedOperation
from vnode.partition.plan.predict import Figures, Prediction
from vnode.partition.plan.search_subject import check_args, on_nodes, subject_of, with_recomputation
from vnode.placement.trace_context import with_jit
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.show.units import several
from vnode.spmd.flow_record import RecordedFlow
from vnode.step.pipeline import Options
from vnode.step.virtual import VirtualStep
from vnode.transform import lane_count

T = TypeVar("T")

FORMAT = "vnode plan"
VERSION = 6
"""The file's version, the only one that is read."""

SHOWN = 12
"""The number of differences that an error lists."""

WRITTEN = "plans are written by plan.save(path)"


def write_plan(plan: Any, path: str | os.PathLike[str]) -> None:
    """Writes a plan; an old file stays until the new one is complete.

    Args:
      plan: the plan.
      path: of the file.

    Raises:
      PartitionError: it cannot be written.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": plan.subject.fingerprint.to_json(),
        "arguments": argument_types(plan.args),
        "machine": json.loads(machine_to_json(plan.machine.name, plan.machine.devices, plan.machine.networks)),
        "limit": plan.limit,
        "virtual_nodes": plan.virtual_nodes,
        "options": saved_options(plan.pattern.options),
        "donate_argnums": list(plan.pattern.spec.donate_argnums),
        "name": plan.name,
        "mesh": dict(plan.mesh),
        "counts": list(plan.counts),
        "specs": {name: spec_to_json(spec) for name, spec in plan.specs.items()},
        "passes": [record.to_json() for record in plan.records.values()],
        "prediction": {
            "figures": dataclasses.asdict(plan.prediction.figures),
            "exchanges": [dataclasses.asdict(each) for each in plan.prediction.exchanges],
            "platform": plan.prediction.platform,
            "turns": plan.prediction.iterations,
        },
        "compiled": None if plan.compiled is None else dataclasses.asdict(plan.compiled),
        "notes": list(plan.notes),
        "beside": {name: dataclasses.asdict(figures) for name, figures in plan.beside.items()},
        "gap": plan.gap,
        "divisions": [dataclasses.asdict(each) for each in plan.divisions],
        "host": list(plan.host),
        "far": plan.far,
        "again": [list(each) for each in plan.recomputed],
        "away": [list(each) for each in plan.offloaded],
    }
    content["checksum"] = checksum(content)
    files.write_text(path, json.dumps(content, separators=(",", ":")), PartitionError)


def checksum(content: Mapping[str, Any]) -> str:
    """The checksum of a plan's content. Without it, an edited layout could pass for the layout of other values."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def saved_options(options: Options) -> dict[str, Any]:
    """The options of a step that decide about its results, time and memory."""
    return {
        "reduction": options.reduction,
        "lanes": options.lanes,
        "coupling": options.coupling if isinstance(options.coupling, str) else dict(options.coupling),
        "accumulate_dtype": None if options.accumulate_dtype is None else str(options.accumulate_dtype),
    }


def argument_types(args: Sequence[Any]) -> dict[str, str]:
    """The types of a step's arguments, leaf by leaf; an error about a plan for another step lists the changed ones."""
    leaves = jax.tree.leaves_with_path(tuple(args))
    return {f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])}": type_text(leaf) for path, leaf in leaves}


def type_text(leaf: Any) -> str:
    """Dtype and shape of an array; of another leaf its type, as it may be shown with its address."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def other_arguments(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The arguments that differ, with both types.

    >>> other_arguments({"argument 0": "int8[2]", "argument 1": "int8[2]"}, {"argument 0": "int8[3]"})
    ['argument 0 then: int8[2], now: int8[3]', 'argument 1 then: int8[2], now: none']
    """
    names = dict.fromkeys((*then, *now))
    pairs = [(name, then.get(name, "none"), now.get(name, "none")) for name in names]
    return [f"{name} then: {before}, now: {after}" for name, before, after in pairs if before != after]


def spec_to_json(spec: PartitionSpec | UnevenSpec) -> Any:
    """A leaf's spec as plain data: a list of axes for each dimension, or the counts of one dimension."""
    if isinstance(spec, UnevenSpec):
        return dataclasses.asdict(spec)
    return [list(e) if isinstance(e, tuple) else e for e in spec]


def spec_from_json(content: Any) -> PartitionSpec | UnevenSpec:
    """The spec from the data of `spec_to_json`."""
    if isinstance(content, dict):
        return UnevenSpec(content["dim"], content["axis"], tuple(content["counts"]))
    return PartitionSpec(*[tuple(e) if isinstance(e, list) else e for e in content])


@with_jit
def read_plan(
    make: Callable[..., T], path: str | os.PathLike[str], step: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> T:
    """Reads a plan; `make` is `Plan`, and the other arguments are those of `Plan.load`."""
    check_args(args)
    text = files.read_text(path, PartitionError, [WRITTEN])
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT}")
        if content.get("version") != VERSION:
            raise ValueError(
                f"it is of version {content.get('version')!r}, and this library reads version {VERSION}: search again, "
                "vnode.partition.search(...)"
            )
        if content["checksum"] != checksum(content):
            raise ValueError("it was changed after it was written: its checksum differs")
        fingerprint = Fingerprint.from_json(content["step"])
        nodes, before, model = content["virtual_nodes"], content["options"], content["prediction"]
        again, away = ([(k, j) for k, j in content[name]] for name in ("again", "away"))
        records = [RecordedFlow.from_json(each) for each in content["passes"]]
        exchanges = tuple(map(Collective.from_json, model["exchanges"]))
        parts: dict[str, Any] = {
            "machine": Machine(*read_machine(json.dumps(content["machine"]))),
            "counts": tuple(content["counts"]),
            "specs": {name: spec_from_json(spec) for name, spec in content["specs"].items()},
            "records": {record.digest: record for record in records},
            "prediction": Prediction(Figures(**model["figures"]), exchanges, model["platform"], model["turns"]),
            "beside": {name: Figures(**each) for name, each in content["beside"].items()},
            "divisions": tuple(DividedOperation(**each) for each in content["divisions"]),
            "host": tuple(content["host"]),
            "compiled": None if content["compiled"] is None else Figures(**content["compiled"]),
            "notes": tuple(content["notes"]),
            **{name: content[name] for name in ("limit", "name", "mesh", "gap", "far")},
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MachineError) as error:
        said = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise PartitionError(
            f"the plan in {os.fspath(path)} cannot be read.",
            facts=[said or type(error).__name__],
            remedies=[WRITTEN],
        ) from error
    virtualized = isinstance(step, VirtualStep)
    if options.get("lanes") in (None, "auto") and not virtualized:
        options = {**options, "lanes": lane_count(before["lanes"], nodes)}
    wanted = options.get("virtual_nodes", "auto")
    options = {name: value for name, value in options.items() if name != "virtual_nodes"}
    step = on_nodes(step, nodes if wanted == "auto" else wanted, options)
    subject = subject_of(step, args)
    facts = subject.fingerprint.differences(fingerprint)
    others: dict[str, Any] = {}  # options whose values differ from the plan's
    if step.options.virtual_nodes != nodes:
        facts, others = [f"virtual nodes then: {nodes}, now: {step.options.virtual_nodes}"], {"virtual_nodes": nodes}
    elif facts:  # with other arguments everything else differs, too
        facts = other_arguments(content["arguments"], argument_types(subject.args)) or facts
    else:
        now = saved_options(step.options)
        others = {name: before.get(name) for name in now if before.get(name) != now[name]}
        facts = [f"{name} then: {value}, now: {now[name]}" for name, value in others.items()]
        donated = sorted(content["donate_argnums"])
        if {*donated} - {*step.spec.donate_argnums}:
            facts.append(f"donate_argnums then: {donated}, now: {sorted(step.spec.donate_argnums)}")
            others["donate_argnums"] = tuple(donated)
    if facts:
        remedies = ["search a plan for this step", "or give the step and the shapes that it was made for"]
        if others:
            where = "vnode.virtualize(..., {})" if virtualized else "vnode.partition.Plan.load(..., {})"
            had = ", ".join(f"{name}={value!r}" for name, value in others.items())
            remedies = [f"give the options it was made with: {where.format(had)}", "or search a plan for this step"]
        raise PartitionError(
            f"the plan in {os.fspath(path)} is for another step.",
            facts=limit_lines(facts, SHOWN),
            remedies=remedies,
        )
    if again or away:
        subject = subject_of(with_recomputation(step, again, away), args)
    plan: Any = make(subject, **parts)
    unknown = plan.unknown()
    if unknown:
        raise PartitionError(
            f"the plan in {os.fspath(path)} is for another step.",
            facts=[f"the nodes' computation differs in {several(unknown, 'pass', 'passes')} of the step"],
            remedies=[
                "pass the plan's options of vnode.virtualize: in_axes, recompute_budget, coupling",
                "or search a plan for this step",
            ],
        )
    return plan
