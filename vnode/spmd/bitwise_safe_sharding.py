"""Flow over some axes -> flow over further axes, on whose size no bit of a result may depend.

Knows flows over other axes, and shardings of one equation. Must not know how those layouts were found, nor virtual
nodes.

    m, g: [data]     v = 0.9 * m + g   computed in shards
                     n = sum(g * g)    computed on every device, g * g too, from g gathered

Shardings over the other axes stay, so they do not depend on the further axes at all. Over these, two kinds
of equations are sharded: elementwise ones and those that move elements, and reductions that are exact in any order
(all, any, a count). Any other equation reads its operands gathered. It must be compiled to the same kernel as without
sharding, with the elementwise equations before it. So these are not sharded either: the gather is at their inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom
from vnode.operators import Algebra, Free, Monoid, OperatorDescription, Reduced
from vnode.operators.control_flow import Region
from vnode.spmd.layout import Axes, Layout, replicated, restrict_to_axes
from vnode.spmd.op_sharding import (
    FactorSharding,
    OperandSharding,
    OpSharding,
    build_sharding,
    candidates,
    memoized,
    reached_layouts,
    total_cost,
)
from vnode.spmd.resharding import finest_layout
from vnode.spmd.sharding_flow import Flow, Step


def shard_further(
    flow: Flow,
    inputs: Sequence[Layout],
    inner: Axes,
    axes: Axes,
    wishes: Mapping[Var, Layout] | None = None,
    outputs: Sequence[Layout | None] | None = None,
) -> Flow:
    """Shards a flow over further axes.

    Args:
      flow: layouts over some axes.
      inputs: the layout of each input over all axes; over those of `flow` as in `flow`.
      inner: the axes of `flow`.
      axes: all axes, in the mesh's order.
      wishes: wanted layouts of single variables, where only the further axes differ from `flow`.
      outputs: for each output its layout; None where any will do, or for all of them.

    Returns:
      A flow over all axes.
    """
    further = _FurtherFollower(inner, axes, wishes or {}).follow(flow, [OperandSharding(layout) for layout in inputs])
    ends = zip(further.outputs, outputs or [None] * len(further.outputs), strict=True)
    return dataclasses.replace(further, outputs=tuple(end if want is None else want for end, want in ends))


class _FurtherFollower:
    """Shards one program over further axes; `states` has the layouts of its variables."""

    def __init__(self, inner: Axes, axes: Axes, wishes: Mapping[Var, Layout]) -> None:
        self.inner, self.axes, self.wishes = inner, axes, wishes
        self.states: dict[Var, OperandSharding] = {}
        self.kept: set[int] = set()  # ids of steps that stay as they are

    def follow(self, flow: Flow, inputs: Sequence[OperandSharding]) -> Flow:
        """Shards a flow over the further axes, given the shardings of its inputs over all axes."""
        self.program = program = flow.program
        self.states.update(zip(program.inputs, inputs, strict=True))
        self.states.update((var, OperandSharding(replicated(len(var.aval.shape)))) for var in program.constants)
        steps = tuple(map(self.step, flow.steps))
        while more := self.needlessly_cut(flow.steps, steps):
            self.kept |= more
            steps = tuple(map(self.step, flow.steps))
        ends = tuple(self.state(atom).layout for atom in program.outputs)
        outputs = tuple(end.without_partial for end in ends)
        return Flow(program, tuple(given.layout for given in inputs), steps, outputs, ends)

    def state(self, atom: Atom) -> OperandSharding:
        if isinstance(atom, Literal):
            return OperandSharding(replicated(len(getattr(atom.aval, "shape", ()))), materializable=True)
        return self.states[atom]

    def needlessly_cut(self, before: Sequence[Step], after: Sequence[Step]) -> set[int]:
        """Ids of steps that were sharded over further axes although a reader gathers a result over them."""
        wanted: set[Var] = set()
        found: set[int] = set()
        for base, step in zip(reversed(before), reversed(after), strict=True):
            if step is not base and base.region is None and wanted.intersection(base.eqn.outvars):
                found.add(id(base))
                step = base
            for atom, layout in zip(step.eqn.invars, step.operands, strict=True):
                lost = self.state(atom).layout.cut_axes.keys() - self.inner.keys() - layout.cut_axes.keys()
                if isinstance(atom, Var) and lost:
                    wanted.add(atom)
        return found

    def step(self, base: Step) -> Step:
        """A step over all axes, from the one over the former axes; records the shardings of its results."""
        given = [self.state(atom) for atom in base.eqn.invars]
        step = self.region_step(base, base.region, given) if base.region is not None else self.divide_step(base, given)
        self.states.update(
            (var, OperandSharding(layout, step.materializable))
            for var, layout in zip(base.eqn.outvars, step.results, strict=True)
        )
        return step

    def divide_step(self, base: Step, given: Sequence[OperandSharding]) -> Step:
        """An equation, sharded over further axes if it can be; otherwise as before, with gathered operands."""
        eqn, ways = base.eqn, base.choice.ways if base.choice is not None else ()
        description = self.program.describe(eqn) if base.branches is None else None
        partial = any(layout.partial for layout in (*base.operands, *base.made))
        if id(base) in self.kept or base.is_constraint or partial or description is None:
            return base
        if not (description.by_element or is_order_independent(eqn, description)):
            return base
        wishes = [self.wishes.get(var) for var in eqn.outvars]
        choice = choose_further(eqn, description, ways, given, wishes, self.inner, self.axes)
        if choice is None:
            return base
        made = reached_layouts(eqn, choice)
        several = zip(eqn.outvars, base.results, wishes, (layout.without_partial for layout in made), strict=True)
        results = [self.first_extending(var, layout, *finer) for var, layout, *finer in several]
        return Step(eqn, choice.operands, made, tuple(results), choice)

    def first_extending(self, atom: Atom, base: Layout, *several: Layout | None) -> Layout:
        """The first of several layouts that is `base` over the former axes; `base` if none is."""
        shape = getattr(atom.aval, "shape", ())
        fitting = (each for each in several if each is not None and restrict_to_axes(self.inner, each, shape) == base)
        return next(fitting, base)

    # Loops and branches

    def region_step(self, base: Step, region: Region, given: Sequence[OperandSharding]) -> Step:
        """A loop or branch; its carry is sharded over further axes if the bodies return it as they receive it."""
        atoms, results = base.eqn.invars, base.eqn.outvars
        operands = [
            self.first_extending(atom, layout, g.layout)
            for atom, layout, g in zip(atoms, base.operands, given, strict=True)
        ]
        if region.chooser is not None:
            operands[region.chooser] = base.operands[region.chooser]
        tested = any(atom.aval.shape for flow in base.bodies[: region.tests] for atom in flow.program.outputs)
        for i in range(len(operands)):
            cut = operands[i].dims[0] if i in region.scanned else None
            if (cut is not None and base.operands[i].dims[0] is None) or (tested and i in region.carried):
                operands[i] = base.operands[i]
        while True:
            bodies = self.bodies(base, region, operands)
            ends = [body.ends for body in bodies[region.tests :]]
            changed = [
                i
                for i, *several in zip(region.carried, *ends, strict=False)
                if operands[i] != base.operands[i] and any(end != operands[i] for end in several)
            ]
            if not changed:
                break
            for i in changed:
                operands[i] = base.operands[i]
        made = []
        for j, (var, layout) in enumerate(zip(results, base.made, strict=True)):
            if j < len(region.carried):
                made.append(operands[region.carried[j]])
                continue
            several = {Layout((None, *e[j].dims), e[j].partial) if region.stacks else e[j] for e in ends}
            one = (
                several.pop()
                if len(several) == 1
                else finest_layout(several, var.aval.shape, self.axes, var.aval.dtype)
            )
            made.append(self.first_extending(var, layout, one))
        bodies = [
            dataclasses.replace(
                body, outputs=base.bodies[k].outputs if k < region.tests else body_result_layouts(made, region)
            )
            for k, body in enumerate(bodies)
        ]
        finished = [self.first_extending(*each) for each in zip(results, base.results, made, strict=True)]
        return dataclasses.replace(
            base, operands=tuple(operands), made=tuple(made), results=tuple(finished), bodies=tuple(bodies)
        )

    def bodies(self, base: Step, region: Region, operands: Sequence[Layout]) -> list[Flow]:
        """Follows each body once."""
        flows = []
        for flow, inputs in zip(base.bodies, region.inputs, strict=True):
            given = [
                OperandSharding(Layout(operands[i].dims[1:]) if i in region.scanned else operands[i]) for i in inputs
            ]
            flows.append(_FurtherFollower(self.inner, self.axes, self.wishes).follow(flow, given))
        return flows


def is_order_independent(eqn: JaxprEqn, description: OperatorDescription) -> bool:
    """Whether an equation's results are the same in any order: it reduces bitwise, or no floating-point numbers.

    A maximum of floating-point numbers does not count: it may be either of the two zeros.
    """
    monoids = {*description.reduced.values()}
    whole = not any(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in (*eqn.invars, *eqn.outvars))
    only = all(isinstance(factor.split, Free | Reduced) for factor in description.factors)
    return only and not description.has(Algebra.CONTRACTS) and (monoids <= BITWISE or whole)


BITWISE = {Monoid.AND, Monoid.OR, Monoid.XOR}


@memoized
def choose_further(
    eqn: JaxprEqn,
    description: OperatorDescription,
    ways: tuple[FactorSharding, ...],
    given: Sequence[OperandSharding],
    wishes: Sequence[Layout | None],
    inner: Axes,
    axes: Axes,
) -> OpSharding | None:
    """Shards an equation that is sharded already over further axes as well; None if it cannot be.

    Args:
      eqn: the equation.
      description: its description.
      ways: its sharding over `inner`; an `OpSharding`'s may count elements where the description counts blocks.
      given: the shardings of its operands.
      wishes: for each result its wanted layout, if there is one.
      inner: the former axes.
      axes: all axes.
    """
    ways = tuple(dataclasses.replace(way, split=description.factors[way.lead[0]].split) for way in ways)
    found, best = ways, total_cost(eqn, description, ways, given, axes, (), wishes)
    for axis in (name for name in axes if name not in inner):
        for more in with_minor_or_major_axis(description, given, wishes, found, axis, axes):
            cost = total_cost(eqn, description, more, given, axes, (), wishes)
            if cost is not None and (best is None or cost < best):
                found, best = more, cost
    return build_sharding(eqn, description, found, given, axes, ()) if found != ways else None


def with_minor_or_major_axis(
    description: OperatorDescription,
    given: Sequence[OperandSharding],
    wishes: Sequence[Layout | None],
    ways: tuple[FactorSharding, ...],
    axis: str,
    axes: Axes,
) -> Iterator[tuple[FactorSharding, ...]]:
    """Shardings with one more axis: alone, or as the minor or the major one beside axes that divide the same factor."""
    layouts = [each.layout for each in given]
    for more in candidates(description, layouts, given, wishes, ways, axis, axes):
        yield more
        for k, way in enumerate(more):
            if axis in way.axes and len(way.axes) > 1:
                others = tuple(name for name in way.axes if name != axis)
                yield (*more[:k], dataclasses.replace(way, axes=(axis, *others)), *more[k + 1 :])


def body_result_layouts(made: Sequence[Layout], region: Region) -> tuple[Layout, ...]:
    """The layouts in which bodies return the results of a loop or branch; of a stack, one iteration's element."""
    first = len(region.carried)
    return tuple(
        Layout(layout.dims[1:], layout.partial) if region.stacks and j >= first else layout
        for j, layout in enumerate(made)
    )
