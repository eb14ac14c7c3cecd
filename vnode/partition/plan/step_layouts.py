"""A flow through a replica's program -> the specs of the state and the records of the passes that a step gets.

Knows replicas, flows and records. Must not know machines, costs, nor how flows were found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal, Var
from jax.sharding import PartitionSpec

from vnode.errors import PartitionError
from vnode.partition.plan.meshes import NODES
from vnode.partition.plan.replica import NodeFlow, ReplicaProgram
from vnode.partition.plan.search_subject import Subject
from vnode.placement.patterns import Exactly, Patterns
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.runtime.mesh_function import result_layout
from vnode.spmd.flow_record import RecordedFlow, digest_of, record_step
from vnode.spmd.layout import Axes, Layout, replicated_atom
from vnode.spmd.sharded_program import as_spec_layout, spec_of
from vnode.spmd.sharding_flow import Flow
from vnode.spmd.uneven_blocks import Share


def record_of(flow: NodeFlow, axes: Axes) -> RecordedFlow:
    """A node's part of a loop body's flow, as a flow through the node's own program.

    Args:
      flow: layouts through a node's program.
      axes: sizes of the mesh axes other than the nodes', those longer than one.
    """
    node, program, body, steps = flow.node, flow.node.program, flow.body, flow.steps
    lies: dict[Any, Layout] = dict(zip(body.program.inputs, body.inputs, strict=True))
    for step in body.steps[: flow.start]:
        lies.update(zip(step.eqn.outvars, step.results, strict=True))
    there: dict[Any, Layout] = {}  # by the node's own variables
    for var, k, i in flow.readers():
        atom = steps[k].eqn.invars[i]
        if not isinstance(atom, Literal) and atom in lies:
            there.setdefault(var, lies[atom])
    for eqn, step in zip(program.equations, steps, strict=True):
        there.update(zip(eqn.outvars, step.results, strict=True))
    inputs = []
    for i, var in enumerate(program.inputs):
        none = replicated_atom(var)
        apart = i == 0 or i - 1 in node.given  # its number, and what each device is given whole
        inputs.append(none if apart else as_spec_layout(there.get(var, none), axes))
    there.update(zip(program.inputs, inputs, strict=True))
    for var, k, i in flow.readers():
        if not set(steps[k].operands[i].partial) <= set(there[var].partial):
            raise PartitionError(f"{steps[k].eqn.primitive.name!r} reads pieces of a value that nodes are given whole")
    ends = tuple(
        body.outputs[j] if j < len(node.sums) or isinstance(atom, Literal) else there[atom]
        for j, atom in enumerate(program.outputs)
    )
    written = tuple(map(record_step, steps))
    return RecordedFlow(
        digest_of(node.written), tuple(axes.items()), tuple(inputs), written, ends, ends, groups=node.groups
    )


def parts_of_sums(
    replica: ReplicaProgram, records: Mapping[str, RecordedFlow], axes: Axes, share: Share | None
) -> dict[Var, tuple[int, ...]]:
    """The shapes of one device's parts of accumulators, by the accumulated variable.

    Args:
      replica: the program of a replica.
      records: the sharding of its passes.
      axes: sizes of the mesh axes other than the nodes', those longer than one.
      share: the number of blocks of each device, of a program in blocks; all parts have room for the most blocks.
    """
    found: dict[Var, tuple[int, ...]] = {}
    for node in replica.nodes:
        record = records.get(digest_of(node.written))
        for a, end in zip(node.sums, () if record is None else record.ends, strict=False):
            found[a.var] = result_layout(end, a.monoid, axes).local_shape(a.var.aval.shape, axes)
        for a, dim in zip(node.sums, node.dims, strict=True):
            if dim is not None and share is not None:
                shape = list(a.var.aval.shape)
                shape[dim] = shape[dim] // share.blocks * share.max_blocks
                found[a.var] = tuple(shape)
    return found


def specs_of(
    subject: Subject, flow: Flow, axes: Axes, sharded: Mapping[int, PartitionSpec]
) -> dict[str, PartitionSpec]:
    """The specs of the leaves of a step's arguments that are not split among nodes, by name.

    Args:
      subject: the step.
      flow: layouts through the program of a replica.
      axes: sizes of the mesh axes other than the nodes', those longer than one.
      sharded: layouts of the inputs that are sharded over the replicas as well, by number.

    Returns:
      A spec for each of the subject's `leaves`.
    """
    found: dict[str, PartitionSpec] = {}
    for i, (name, layout) in enumerate(zip(subject.leaves, flow.inputs, strict=False)):
        if name is not None:
            found[name] = sharded[i] if i in sharded else spec_of(as_spec_layout(layout, axes))
    return found


def shard_over_replicas(spec: PartitionSpec, shape: Sequence[int], replicas: int, axes: Axes) -> PartitionSpec | None:
    """Shards a spec over the replicas too, along the largest local dimension that they divide evenly."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    cut = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]
    local = [n // math.prod(axes[name] for name in names) for n, names in zip(shape, cut, strict=True)]
    fitting = [d for d, n in enumerate(local) if n % replicas == 0 and n > 1]
    if not fitting:
        return None
    d = max(fitting, key=lambda d: (not cut[d], local[d]))
    return PartitionSpec(*[(*names, NODES) if k == d else names or None for k, names in enumerate(cut)])


def patterns(specs: Mapping[str, PartitionSpec | UnevenSpec]) -> Patterns:
    """Specs by name as specs by pattern, each of which matches one name only."""
    return tuple((Exactly(name), spec) for name, spec in specs.items())
