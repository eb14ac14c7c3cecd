"""A row's flow as far as a plan does not decide it: how sums over nodes are added, and what is computed once.

Knows flows through the program of a row, and what leads them where a step is carried out (`vnode.runtime`). Must not
know machines, costs, nor how layouts were found.

A plan says how the nodes of each pass compute. Their pieces are added where the loop carries the total, and over the
rows as they lie there; what is computed once follows from that and from the layouts of the state. A search gives all of
these layouts of their own, which nobody would keep to.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import Var
from jax.sharding import PartitionSpec

from vnode.analysis.program import Atom, Program
from vnode.partition.plan.across import Across
from vnode.partition.plan.other_rows import OVER_ROWS, passes_among
from vnode.runtime.divided import followed, result
from vnode.runtime.handed import Among, Lying, handed_on
from vnode.runtime.loops import Sum
from vnode.runtime.once import wanted_in
from vnode.spmd.flow import Flow, Step
from vnode.spmd.layout import Axes, Layout, from_spec, replicated


def in_pieces(flow: Flow, axes: Axes) -> Flow:
    """The same flow, but the sums of passes lie as the loops over nodes carry them until they are added up over rows.

    So it is carried out (`vnode.runtime.emit`), whatever layout is wished after the pass: rows add in the order of a
    tree, and bits would depend on how many rows there are if pieces were combined on each before. What is split among
    nodes, and not kept by an earlier pass, is whole along the axes that divide a node's computation.

    Args:
      flow: through the program of a row.
      axes: of the mesh, those that nodes are not spread over and that are longer than one.
    """
    monoids = {step.eqn.invars[0]: step.eqn.params["monoid"] for step in flow.steps if step.eqn.primitive is OVER_ROWS}
    lies: dict[Atom, Layout] = {}
    kept: set[Var] = set()
    passes = passes_among(step.eqn for step in flow.steps)
    steps: list[Step] = []
    for step in flow.steps:
        if any(isinstance(atom, Var) and atom in kept for atom in step.eqn.invars):
            kept.update(step.eqn.outvars)
        if step.bodies:
            step = dataclasses.replace(step, bodies=tuple(in_pieces(body, axes) for body in step.bodies))
        totals = {
            j: result(layout, monoids[var], axes)
            for j, (var, layout) in enumerate(zip(step.eqn.outvars, step.made, strict=True))
            if var in monoids
        }
        lies.update((step.eqn.outvars[j], layout) for j, layout in totals.items())
        if step.region is not None and passes.intersection(step.eqn.outvars):
            split = [i for i in step.region.scanned if step.eqn.invars[i] not in kept]
            kept.update(step.eqn.outvars[len(step.region.carried) :])
            step = carrying(step, totals, split, axes)
        elif step.eqn.primitive is OVER_ROWS and (there := lies.get(step.eqn.invars[0])) is not None:
            step = dataclasses.replace(step, operands=(there,), made=(there,), results=(there.complete,))
        steps.append(step)
    return dataclasses.replace(flow, steps=tuple(steps))


def carrying(step: Step, totals: Mapping[int, Layout], split: Sequence[int], axes: Axes) -> Step:
    """A loop over nodes that carries totals, by their numbers, in some layouts, and adds to them as they lie.

    Some operands, by number, it is given whole. What it keeps of each node is no pieces.
    """
    assert step.region is not None
    (body,) = step.bodies
    (numbers,) = step.region.inputs
    operands, made, results = list(step.operands), list(step.made), list(step.results)
    inputs, outputs, steps = list(body.inputs), list(body.outputs), list(body.steps)
    for i in split:
        operands[i] = replicated(len(operands[i].dims))
        inputs[numbers.index(i)] = replicated(len(operands[i].dims) - 1)
    makers = {var: k for k, each in enumerate(steps) for var in each.eqn.outvars}
    lying = {var: layout for each in steps for var, layout in zip(each.eqn.outvars, each.results, strict=True)}
    for j, atom in enumerate(body.program.outputs[len(step.region.carried) :], len(step.region.carried)):
        if isinstance(atom, Var) and atom in lying:
            outputs[j] = result(lying[atom], None, axes)
            made[j] = results[j] = Layout((None, *outputs[j].dims))
    for j, layout in totals.items():
        i = step.region.carried[j]
        operands[i] = made[j] = results[j] = outputs[j] = inputs[numbers.index(i)] = layout
        var, total = body.program.outputs[j], body.program.inputs[numbers.index(i)]
        k = makers.get(var) if isinstance(var, Var) else None
        if k is not None and total in steps[k].eqn.invars:
            steps[k] = alike(steps[k], layout, axes)
    bodies = (dataclasses.replace(body, inputs=tuple(inputs), outputs=tuple(outputs), steps=tuple(steps)),)
    return dataclasses.replace(step, operands=tuple(operands), made=tuple(made), results=tuple(results), bodies=bodies)


def alike(step: Step, layout: Layout, axes: Axes) -> Step:
    """An equation of arrays of one shape, as it is carried out where all of them lie alike; else as it was."""
    operands = [*dict.fromkeys(atom for atom in step.eqn.invars if isinstance(atom, Var))]
    flow = followed(Program(operands, {}, [step.eqn], [*step.eqn.outvars]), [layout] * len(operands), axes)
    return flow.steps[0] if flow.ends[0] == layout else step


def once_followed(
    flow: Flow, sharded: Mapping[int, PartitionSpec], state: Mapping[int, int], axes: Axes, across: Across
) -> Flow:
    """The flow of a row, of which what is computed once is divided as the step itself does it (`vnode.runtime.once`).

    Totals and the state lead; where the state is sharded over the rows as well, passes gather what they read of it.

    Args:
      flow: through the program of a row.
      sharded: how inputs lie that are sharded over the rows as well, by number.
      state: for outputs, by number, the inputs that they become in the next step.
      axes: of the mesh, that of the rows too.
      across: how rows add.
    """
    if not sharded:  # then rows compute the same
        axes = {name: n for name, n in axes.items() if name != across.axis}
    if not axes:
        return flow
    program = flow.program
    exact = frozenset({across.axis} & axes.keys() if across.invariant else ())
    lies: dict[Var, Layout] = dict(zip(program.inputs, flow.inputs, strict=True))
    for i, spec in sharded.items():
        var = program.inputs[i]
        lies[var] = from_spec(spec, var.aval.shape, axes)
    inputs = tuple(lies[var] for var in program.inputs)
    loops = passes_among(step.eqn for step in flow.steps)
    before, after = parted(flow.steps, loops)
    passes: list[Step] = []
    for apart, several in itertools.groupby(before, lambda step: of_passes(step, loops)):
        steps = list(several)
        if not apart:
            made = [var for step in steps for var in step.eqn.outvars]
            steps = list(Leading.of(program, steps, made).flow(lies.__getitem__, axes, exact).steps)
        for step in steps:
            lies.update(zip(step.eqn.outvars, step.results, strict=True))
        passes += steps
    kept = [inputs[state[j]] if j in state else None for j in range(len(program.outputs))]
    rest = Leading.of(program, after, program.outputs, [None if end is None or end.whole else end for end in kept])
    inner = {name: n for name, n in axes.items() if name != across.axis}
    totals = {step.eqn.outvars[0]: step.results[0] for step in passes if step.eqn.primitive is OVER_ROWS}
    ends = handed_on(totals, lies.__getitem__, rest.wanted, inner, axes, exact)
    lies.update(ends)
    among = Among(across.axis, axes, across.invariant)
    passes = [
        in_parts(step, ends[step.eqn.outvars[0]], among) if step.eqn.outvars[0] in ends else step for step in passes
    ]
    following = rest.flow(lies.__getitem__, axes, exact)
    outputs = [own if end is None else end for own, end in zip(following.outputs, kept, strict=True)]
    steps = (*passes, *following.steps)
    ordered = program.derived(program.inputs, [step.eqn for step in steps], program.outputs)
    return Flow(ordered, inputs, steps, tuple(outputs), following.ends)


@dataclasses.dataclass(frozen=True)
class Leading:
    """A part of a program, divided as what it reads leads, and as some of its outputs shall lie."""

    program: Program
    ends: Sequence[Layout | None]

    @staticmethod
    def of(
        program: Program, steps: Sequence[Step], outputs: Sequence[Atom], ends: Sequence[Layout | None] = ()
    ) -> Leading:
        """The part that some steps of a program are."""
        eqns = [step.eqn for step in steps]
        made = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(a for a in (*(a for eqn in eqns for a in eqn.invars), *outputs) if isinstance(a, Var))
        given = [var for var in read if var not in made and var not in program.constants]
        return Leading(program.derived(given, eqns, [*outputs]), ends)

    def flow(self, lying: Lying, axes: Axes, exact: Collection[str]) -> Flow:
        """Layouts through it, of which those over some axes must not show in bits."""
        return followed(self.program, list(map(lying, self.program.inputs)), axes, exact, self.ends)

    def wanted(self, lying: Lying, axes: Axes, exact: Collection[str]) -> Mapping[Var, Sequence[Layout]]:
        """In which layouts each variable is read, each time."""
        return wanted_in(self.flow(lying, axes, exact))


def parted(steps: Sequence[Step], loops: Collection[Var]) -> tuple[list[Step], list[Step]]:
    """Steps that passes are, or need, and those that none does, each in order.

    Args:
      steps: in order.
      loops: what the loops of passes among them make.
    """
    needed = set[Var]()
    found: tuple[list[Step], list[Step]] = ([], [])
    for step in reversed(steps):
        needs = of_passes(step, loops) or bool(needed.intersection(step.eqn.outvars))
        found[not needs].append(step)
        if needs:
            needed.update(atom for atom in step.eqn.invars if isinstance(atom, Var))
    return found[0][::-1], found[1][::-1]


def in_parts(step: Step, end: Layout, among: Among) -> Step:
    """A total over rows of which devices are handed on parts."""
    var, (layout,) = step.eqn.outvars[0], step.made
    held = Sum(step.eqn.params["monoid"], layout.local(var.aval.shape, among.axes), var.aval.dtype)
    made = among.divided(layout, among.part(held, layout, end), var.aval.shape)
    return dataclasses.replace(step, made=(made,), results=(end,), leaves=True)


def of_passes(step: Step, loops: Collection[Var]) -> bool:
    """Whether a step, or one in its bodies, is of a pass: its loop, one of those that make `loops`, or its totals."""
    if step.eqn.primitive is OVER_ROWS or any(var in loops for var in step.eqn.outvars):
        return True
    bodies = ((body, passes_among(each.eqn for each in body.steps)) for body in step.bodies)
    return any(of_passes(each, inside) for body, inside in bodies for each in body.steps)
