"""Turns a step, its data and versions into facts that identify a run; compares them with those of a checkpoint.

Knows steps, data, and versions of libraries. Must not know checkpoints, nor when they are compared.

There are three kinds of facts. A difference that changes the result by definition is refused: the number of virtual
nodes, how sums are formed, the order of examples. A difference that is likely to change it gives a warning, as a run
may continue with a smaller learning rate: other operations in the step, other values in the data, another version of
jax or of vnode, another kind of device. Facts that do not change the result (how many devices there are) are not kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vnode.analysis.fingerprint import Fingerprint, fingerprint
from vnode.data.source import description, same_examples
from vnode.data.source import fingerprint as data_fingerprint
from vnode.elastic.options import RunOptions
from vnode.errors import CheckpointError, layout_message, limit_lines
from vnode.placement.leaves import is_array
from vnode.placement.sharded import is_sharded_batch
from vnode.placement.static_scalars import array_leaves
from vnode.step.step_identity import step_facts, versions

logger = logging.getLogger("vnode")

SHOWN = 12
"""Differences that are named."""


class Identity(NamedTuple):
    """The facts that identify a run.

    Attributes:
      facts: fit for JSON.
      program: the step's operations, with their lines in the user's code; None if they are not known.
      program_for: the same for a batch whose arrays have other shapes.
    """

    facts: dict[str, Any]
    program: Fingerprint | None
    program_for: Callable[[Sequence[Sequence[int]]], Fingerprint | None]


def identity(step: Any, data: Any, state: Any, batch: Any) -> Identity:
    """Collects the facts that identify a run.

    Args:
      step: a `VirtualStep` ``(state, batch) -> (state, metrics)``.
      data: where the batches come from.
      state: a state, arrays or `jax.ShapeDtypeStruct`s.
      batch: a batch, likewise; None if there is none, and the program is not to be known.
    """
    program = None if batch is None else program_of(step, state, batch)
    facts = {
        "data": description(data),
        "step": step_facts(step.options),
        "order of sums": step.options.order,
        "program": None if program is None else program.to_json(),
        "batch": None if program is None else batch_shapes(batch),
        "examples": data_fingerprint(data),
        "versions": {name: versions()[name] for name in ("jax", "jaxlib")},
        "devices": step.placement.kinds,
    }
    facts = json.loads(json.dumps(facts))  # as they will be read: with lists for tuples
    return Identity(facts, program, lambda shapes: program_of(step, state, with_shapes(batch, shapes)))


def batch_shapes(batch: Any) -> list[list[int]]:
    """The shapes of a batch's arrays."""
    return [[*np.shape(leaf)] for leaf in jax.tree.leaves(batch, is_leaf=is_sharded_batch)]


def with_shapes(batch: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """A batch with abstract values of these shapes in place of arrays that have others."""
    leaves, treedef = jax.tree.flatten(batch, is_leaf=is_sharded_batch)
    changed = [
        leaf
        if [*np.shape(leaf)] == [*shape]
        else jax.ShapeDtypeStruct(tuple(shape), shape_of(leaf).dtype, weak_type=shape_of(leaf).weak_type)
        for leaf, shape in zip(leaves, shapes, strict=True)
    ]
    return jax.tree.unflatten(treedef, changed)


def facts_of_run(step: Any, state: Any, data: Any, options: RunOptions) -> dict[str, Any]:
    """The facts that must be equal in all processes of a run and are known before the first batch; fit for JSON.

    Options that may differ between processes are left out: callbacks, writers, signals, progress, batches to load
    ahead, the path to a shared folder. The step's operations are compared before its first run.

    Args:
      step: a virtualized step.
      state: the state that was given.
      data: where the batches come from.
      options: of the run.
    """
    asked = {name: getattr(options, name) for name in COMPARED}
    asked |= {f"{name} is given": getattr(options, name) is not None for name in ("checkpoint", "evaluate")}
    if options.on_nan == "stop":  # what is looked at decides where the run ends
        asked["metrics_every"] = options.metrics_every
    chosen = getattr(step, "spec", None)
    return {
        "versions": versions(),
        "step": {} if chosen is None else step_facts(step.options),
        "options": asked,
        "data": description(data) or {},
        "examples": examples_of(data),
        "state": [
            f"{jax.tree_util.keystr(path)}: {type_name(leaf)}" for path, leaf in jax.tree.leaves_with_path(state)
        ],
    }


@functools.cache
def script_checksum() -> str | None:
    """A checksum of the script that this process runs, as its file was when this was asked first; None if it has none.

    That of a function which `vnode.elastic.launch` was given is the file that has it.
    """
    for name in ("__mp_main__", sys.argv[0], "__main__"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and os.path.isfile(path):
            with open(path, "rb") as file:
                return hashlib.sha256(file.read()).hexdigest()[:24]
    return None


COMPARED = (
    "steps",
    "start",
    "compile_ahead",
    "keep_every",
    "checkpoint_every",
    "checkpoint_seconds",
    "checkpoints_kept",
    "evaluate_every",
    "on_nan",
)
"""Options of a run that must be the same in all of its processes."""


def examples_of(data: Any) -> str | None:
    """A checksum of examples that every process can read; None where one cannot read those of the others."""
    try:
        return data.digest() if hasattr(data, "digest") else data_fingerprint(data)
    except Exception as error:
        logger.info("the examples of the processes are not compared, as they cannot be read here: %s", error)
        return None


def type_name(leaf: Any) -> str:
    """The type of an array, or what else a leaf is."""
    return str(shape_of(leaf)) if is_array(leaf) else type(leaf).__name__


def differing_lines(one: list[str], other: list[str]) -> list[str]:
    """The lines that one list has and another has not, and the reverse."""
    now = [f"now:  {line}" for line in one if line not in other]
    return [*now, *(f"then: {line}" for line in other if line not in one)][:SHOWN]


def program_of(step: Any, state: Any, batch: Any) -> Fingerprint | None:
    """The fingerprint of what the user's step computes on a whole batch; None if it cannot be traced by itself."""
    leaves, treedef = jax.tree.flatten((state, batch), is_leaf=is_sharded_batch)
    given = array_leaves((state, batch))
    arrays = [shape_of(leaf) for leaf, array in zip(leaves, given, strict=True) if array]

    def on_arrays(*values: Any) -> list[Any]:
        rest = iter(values)
        filled = [next(rest) if array else leaf for leaf, array in zip(leaves, given, strict=True)]
        out = step.__wrapped__(*jax.tree.unflatten(treedef, filled))
        return [leaf for leaf, array in zip(jax.tree.leaves(out), array_leaves(out), strict=True) if array]

    try:
        return fingerprint(on_arrays, *arrays)
    except Exception as error:  # the run itself will tell, if it is an error there too
        logger.warning("a change of the step's code will not be noticed, as it cannot be traced by itself: %s", error)
        return None


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, wherever it is."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or is_sharded_batch(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def compare(before: dict[str, Any], run: Identity, where: str) -> list[str]:
    """Compares the facts of a checkpoint with those of the run that would go on from it.

    Args:
      before: of the checkpoint; facts that it does not have are not compared.
      run: this one.
      where: the checkpoint, for messages.

    Returns:
      Warnings: what may change the result.

    Raises:
      CheckpointError: the result would be another one by definition.
    """
    now = run.facts
    refuse("data", before, now, f"{where} was made with other batches.", "give the data the options that they had")
    refuse("step", before, now, f"{where} was made with another kind of step.", "virtualize the step as it was then")
    warnings = []
    if before.get("versions") and before["versions"] != now["versions"]:
        facts = changes(before["versions"], now["versions"])
        warnings.append(f"{where} was written under other versions, whose bits may differ: {'; '.join(facts)}")
    if (order := before.get("order of sums", tree_branches(before))) is not None and order != now["order of sums"]:
        orders = f"a tree of {order} branches then, of {now['order of sums']} now"
        warnings.append(f"{where} was written by a version that adds in another order, whose bits may differ: {orders}")
    if before.get("devices") and before["devices"] != now["devices"]:
        kinds = f"{before['devices']} then, {now['devices']} now"
        warnings.append(f"{where} was written on another kind of device, whose bits may differ: {kinds}")
    if not same_examples(before.get("examples"), now["examples"]):
        warnings.append(f"{where} was made with other examples: a sample of their values has another checksum")
    if (before.get("data") is None) != (now["data"] is None) and "data" in before:
        whose = "the checkpoint's" if before["data"] is None else "this run's"
        warnings.append(f"{where} may have been made with other batches: {whose} data do not describe themselves")
    program, then, shapes = run.program, before.get("batch"), now["batch"]
    if then and shapes and then != shapes and len(then) == len(shapes):
        if now["data"] is None:
            said = f"arrays {shapes_text(then)} in its first batch, {shapes_text(shapes)} in this run's"
            warnings.append(f"{where} may have been made with other batches: {said}")
        program = run.program_for(then)  # as the last batch of an epoch may be smaller
    if before.get("program") and program:
        facts = program.differences(Fingerprint.from_json(before["program"]))
        if facts:
            shown = limit_lines(facts, SHOWN)
            warnings.append(layout_message(f"{where} was made by a step with another computation.", facts=shown))
    return warnings


def shapes_text(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes in a few words.

    >>> shapes_text([[4, 3], [4]])
    '(4, 3), (4,)'
    """
    return ", ".join(map(str, map(tuple, shapes[:4])))


def tree_branches(before: dict[str, Any]) -> list[int] | None:
    """The branches of the tree, in checkpoints of versions that had no other and did not say; None if that is unknown.

    >>> tree_branches({"step": {"virtual_nodes": 16, "reduction": "invariant", "nodes in a lane": 4}})
    [4, 2, 2]
    """
    said = before.get("step") or {}
    if said.get("reduction") != "invariant" or not {"virtual_nodes", "nodes in a lane"} <= said.keys():
        return [] if said.get("reduction") == "fast" else None
    lane = said["nodes in a lane"]
    levels = (-(-said["virtual_nodes"] // lane) - 1).bit_length()
    return [lane] * (lane > 1) + [2] * max(levels, 1)


def refuse(name: str, before: dict[str, Any], now: dict[str, Any], what: str, remedy: str) -> None:
    """Refuses facts that must be equal.

    Raises:
      CheckpointError: they are not.
    """
    old, new = before.get(name), now[name]
    if old is not None and new is not None and old != new:
        raise CheckpointError(
            layout_message(
                what,
                facts=changes(old, new),
                remedies=[remedy, "or use another folder", "or begin a new run with the state: start=..."],
            )
        )


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two dictionaries."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [f"{name}: {before.get(name)!r} then, {now.get(name)!r} now" for name in names]
