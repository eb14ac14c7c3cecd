"""A flow through a replica's program -> the flow with the shardings that the runtime gives accumulators and updates.

Knows flows through the program of a replica, and how the runtime shards them (`vnode.runtime`). Must not know machines,
costs, nor how layouts were found.

A plan decides the layouts of each pass's node computation only. Accumulators are sharded as the loop carries them, and
are reduced across replicas in that sharding. The replicated region follows from them and from the state's layouts. A
search chooses other layouts for these values, which the runtime does not use.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from jax.extend.core import Var
from jax.sharding import PartitionSpec

from vnode.analysis.program import Atom, Program
from vnode.operators.ordering_barrier import can_be_awaited
from vnode.partition.plan.meshes import NODES
from vnode.partition.plan.other_replicas import SUM_OVER_REPLICAS, totals_of_passes
from vnode.partition.plan.replica_reduction import ReplicaReduction
from vnode.runtime.mesh_function import follow_layouts, result_layout
from vnode.runtime.node_loops import Sum
from vnode.runtime.output_sharding import Lying, SummingDevices, choose_output_layouts
from vnode.spmd.layout import Axes, Layout, from_spec, replicated
from vnode.spmd.resharding_collectives import grows
from vnode.spmd.sharding_backprop import read_layouts
from vnode.spmd.sharding_flow import Flow, Step


def shard_carries(flow: Flow, axes: Axes) -> Flow:
    """Shards the accumulators of passes in the loop carry too, not only in the results that replicas add up.

    The runtime does so (`vnode.runtime.emit`) whatever layout the readers want: replicas add in the order of a tree,
    and bits would depend on the number of replicas if each combined its pieces before. Arguments that are split among
    nodes are whole along the axes that divide a node's computation.

    Args:
      flow: layouts through the program of a replica.
      axes: sizes of the mesh axes other than the nodes', those longer than one.
    """
    monoids = {
        step.eqn.invars[0]: step.eqn.params["monoid"] for step in flow.steps if step.eqn.primitive is SUM_OVER_REPLICAS
    }
    lies: dict[Atom, Layout] = {}
    kept: set[Var] = set()
    passes = totals_of_passes(step.eqn for step in flow.steps)
    steps: list[Step] = []
    for step in flow.steps:
        if step.bodies:
            step = dataclasses.replace(step, bodies=tuple(shard_carries(body, axes) for body in step.bodies))
        totals = {
            j: result_layout(layout, monoids[var], axes)
            for j, (var, layout) in enumerate(zip(step.eqn.outvars, step.made, strict=True))
            if var in monoids
        }
        lies.update((step.eqn.outvars[j], layout) for j, layout in totals.items())
        if step.region is not None and passes.intersection(step.eqn.outvars):
            split = [i for i in step.region.scanned if step.eqn.invars[i] not in kept]
            kept.update(step.eqn.outvars[len(step.region.carried) :])
            step = shard_loop_carry(step, totals, split, axes)
        elif step.eqn.primitive is SUM_OVER_REPLICAS and (there := lies.get(step.eqn.invars[0])) is not None:
            step = dataclasses.replace(step, operands=(there,), made=(there,), results=(there.without_partial,))
        steps.append(step)
    return dataclasses.replace(flow, steps=tuple(steps))


def shard_loop_carry(step: Step, totals: Mapping[int, Layout], split: Sequence[int], axes: Axes) -> Step:
    """Sets the layouts of a loop over nodes: of its accumulators, by number, and of operands that it reads whole.

    Its stacked results are not partial.
    """
    assert step.region is not None
    (body,) = step.bodies
    (numbers,) = step.region.inputs
    operands, made, results = list(step.operands), list(step.made), list(step.results)
    inputs, outputs = list(body.inputs), list(body.outputs)
    for i in split:
        operands[i] = replicated(len(operands[i].dims))
        inputs[numbers.index(i)] = replicated(len(operands[i].dims) - 1)
    lying = {var: layout for each in body.steps for var, layout in zip(each.eqn.outvars, each.results, strict=True)}
    for j, atom in enumerate(body.program.outputs[len(step.region.carried) :], len(step.region.carried)):
        if isinstance(atom, Var) and atom in lying:
            outputs[j] = result_layout(lying[atom], None, axes)
            made[j] = results[j] = Layout((None, *outputs[j].dims))
    for j, layout in totals.items():
        i = step.region.carried[j]
        operands[i] = made[j] = results[j] = outputs[j] = inputs[numbers.index(i)] = layout
    bodies = (dataclasses.replace(body, inputs=tuple(inputs), outputs=tuple(outputs)),)
    return dataclasses.replace(step, operands=tuple(operands), made=tuple(made), results=tuple(results), bodies=bodies)


def shard_replicated_region(
    flow: Flow,
    sharded: Mapping[int, PartitionSpec],
    state: Mapping[int, int],
    axes: Axes,
    across: ReplicaReduction,
    wait: bool,
) -> Flow:
    """Shards the replicated region of a replica's flow as `vnode.runtime.replicated_region` does.

    The layouts of totals and of the state decide. Passes gather state that is sharded over the replicas as well. Loops
    and branches around passes stay as they are.

    Args:
      flow: layouts through the program of a replica.
      sharded: layouts of the inputs that are sharded over the replicas as well, by number.
      state: for outputs, by number, the inputs that they become in the next step.
      axes: sizes of the mesh axes, the replicas' too.
      across: the reduction across replicas.
      wait: whether a pass gathers its state only after the totals of the passes before it.
    """
    if not sharded:  # then replicas compute the same
        axes = {name: n for name, n in axes.items() if name != NODES}
    if not axes:
        return flow
    program, lies = flow.program, dict(zip(flow.program.inputs, flow.inputs, strict=True))
    for i, spec in sharded.items():
        var = program.inputs[i]
        lies[var] = from_spec(spec, var.aval.shape, axes)
    inputs = [lies[var] for var in program.inputs]
    ends = [inputs[state[j]] if j in state else None for j in range(len(program.outputs))]
    wanted = [None if end is None or end.is_whole else end for end in ends]
    exact = frozenset({NODES} & axes.keys() if across.invariant else ())
    inner = {name: n for name, n in axes.items() if name != NODES}
    among = SummingDevices(NODES, axes, across.invariant)
    loops = totals_of_passes(step.eqn for step in flow.steps)
    before, after = split_steps(flow.steps, loops)
    parts = [
        (kind, list(several)) for kind, several in itertools.groupby(before, lambda step: kind_of_step(step, loops))
    ]

    def layout_of(var: Var) -> Layout:  # values without a layout so far count as replicated
        return lies[var] if var in lies else replicated(len(var.aval.shape))

    passes: list[Step] = []
    unawaited: list[Var] = []  # totals that no pass has waited for
    for k, (kind, steps) in enumerate(parts, 1):
        if kind == "once":
            made = [var for step in steps for var in step.eqn.outvars]
            steps = list(layouts_through(program, steps, made)(layout_of, axes, exact).steps)
        elif kind == "totals":
            later = [step for other, several in parts[k:] if other == "once" for step in several]
            totals = {step.eqn.outvars[0]: step.results[0] for step in steps}
            readers = layouts_through(program, steps_around(totals, [*later, *after]), program.outputs, wanted)
            handed = choose_output_layouts(
                totals, layout_of, lambda *how, of=readers: read_layouts(of(*how)), inner, axes, exact
            )
            steps = [scatter_total(step, handed[step.eqn.outvars[0]], among) for step in steps]
            unawaited += [var for var in totals if can_be_awaited(var.aval)]
        elif kind == "loop" and wait and any(gathers(step, layout_of, axes) for step in steps):
            steps = [dataclasses.replace(step, gather_after=tuple(unawaited)) for step in steps]
            unawaited = []
        for step in steps:
            lies.update(zip(step.eqn.outvars, step.results, strict=True))
        passes += steps
    following = layouts_through(program, after, program.outputs, wanted)(layout_of, axes, exact)
    outputs = [own if end is None else end for own, end in zip(following.outputs, ends, strict=True)]
    steps = (*passes, *following.steps)
    ordered = program.derive(program.inputs, [step.eqn for step in steps], program.outputs)
    return Flow(ordered, tuple(inputs), steps, tuple(outputs), following.ends)


def gathers(step: Step, lying: Lying, axes: Axes) -> bool:
    """Whether a pass gathers an operand that its nodes read whole."""
    assert step.region is not None
    whole = {*range(len(step.eqn.invars))} - {*step.region.carried, *step.region.scanned}
    several = ((atom, step.operands[i]) for i in whole if isinstance(atom := step.eqn.invars[i], Var))
    return any(grows(lying(var), end, var.aval.shape, axes, var.aval.dtype) for var, end in several)


def layouts_through(
    program: Program, steps: Sequence[Step], outputs: Sequence[Atom], ends: Sequence[Layout | None] = ()
) -> Callable[[Lying, Axes, Collection[str]], Flow]:
    """Layouts through a part of a program, by the layouts of its inputs and the wanted ones of its outputs.

    Args:
      program: the program.
      steps: the part.
      outputs: its outputs.
      ends: their wanted layouts.

    Returns:
      A function of layouts, of sizes of axes, and of the axes along which a sharding must not change bits.
    """
    eqns = [step.eqn for step in steps]
    made = {var for eqn in eqns for var in eqn.outvars}
    read = dict.fromkeys(a for a in (*(a for eqn in eqns for a in eqn.invars), *outputs) if isinstance(a, Var))
    part = program.derive([v for v in read if v not in made and v not in program.constants], eqns, [*outputs])
    return lambda lying, axes, exact: follow_layouts(part, list(map(lying, part.inputs)), axes, exact, ends)


def steps_around(values: Collection[Var], steps: Sequence[Step]) -> list[Step]:
    """The steps that depend on some values, and all that these steps need; the others do not decide about the values.

    A step with a pass for each normalization has many totals, each with few such steps.
    """
    reached, needed, kept = set(values), set[Var](), set[int]()
    for k, step in enumerate(steps):
        if not reached.isdisjoint(variables_of(step)):
            reached.update(step.eqn.outvars)
            kept.add(k)
    for k, step in reversed([*enumerate(steps)]):
        if k in kept or not needed.isdisjoint(step.eqn.outvars):
            kept.add(k)
            needed.update(variables_of(step))
    return [step for k, step in enumerate(steps) if k in kept]


def variables_of(step: Step) -> list[Var]:
    """The variables that a step reads."""
    return [atom for atom in step.eqn.invars if isinstance(atom, Var)]


def split_steps(steps: Sequence[Step], loops: Collection[Var]) -> tuple[list[Step], list[Step]]:
    """Splits steps into those up to the last pass, with all that passes need, and the others.

    Args:
      steps: the steps, in order.
      loops: results of the loops of passes.
    """
    needed = set[Var]()
    found: tuple[list[Step], list[Step]] = ([], [])
    for step in reversed(steps):
        needs = kind_of_step(step, loops) != "once" or bool(needed.intersection(step.eqn.outvars))
        found[not needs].append(step)
        if needs:
            needed.update(variables_of(step))
    return found[0][::-1], found[1][::-1]


def scatter_total(step: Step, end: Layout, among: SummingDevices) -> Step:
    """A total over replicas whose result is scattered."""
    var, (layout,) = step.eqn.outvars[0], step.made
    held = Sum(step.eqn.params["monoid"], layout.local_shape(var.aval.shape, among.axes), var.aval.dtype)
    made = among.divide_dim(layout, among.divided_dim(held, layout, end), var.aval.shape)
    return dataclasses.replace(step, made=(made,), results=(end,), leaves=True)


def kind_of_step(step: Step, loops: Collection[Var]) -> str:
    """The kind of a step: ``"totals"``, the ``"loop"`` of a pass, a loop ``"around"`` passes, or ``"once"``."""
    if step.eqn.primitive is SUM_OVER_REPLICAS:
        return "totals"
    if any(var in loops for var in step.eqn.outvars):
        return "loop"
    return "around" if any(map(has_passes, step.bodies)) else "once"


def has_passes(flow: Flow) -> bool:
    """Whether a flow, or a body in it, contains passes."""
    loops = totals_of_passes(step.eqn for step in flow.steps)
    return any(kind_of_step(step, loops) != "once" for step in flow.steps)
