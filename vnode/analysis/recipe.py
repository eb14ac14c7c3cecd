"""Requested values with forms -> a recipe: the equations to evaluate in order, each with the forms of its operands.

Knows batch flow's steps and how one form is made from another. Must not know devices or how an equation is evaluated.

A recipe is found by one backward sweep: dead-code elimination over pairs of variable and form. Where nodes need slices
of a whole value, its cheap producers are cloned at the node's size (`clone_for_slice`). A dropout mask or an iota then
never exists at the size of the batch.

    want y: slice, with y = x * mask, mask = whole   ->   mask' = mask's producer at the node's size;  y = x * mask'
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Var

from vnode.analysis.forms import VARYING, WHOLE, Batch, Form, Location, Partial, Slice, Varying, Whole, locate, project
from vnode.analysis.program import Atom
from vnode.analysis.states import Flow, Step
from vnode.operators import Algebra, OperatorDescription
from vnode.operators.control_flow import Region

Key = tuple[Var, Form]

Sizes = Mapping[Batch, int]
"""Examples per node, of each batch."""


@dataclasses.dataclass(eq=False)  # not frozen only because many are made
class Evaluation:
    """One evaluation of an equation.

    Attributes:
      step: the equation, as batch flow decided about it.
      operands: the form in which each operand is read.
      results: the form of each result; None for a result without a reader.
      description: for an equation that is neither loop nor branch, unless it is evaluated whole.
      location: the factor that is split, if one is.
      bodies: for a loop or branch evaluated by nodes, the recipe of each body.
      returned_results: the numbers of the results that the bodies return (conditions return their own).
      schedules: for a loop or branch with passes of its own, the schedule of each body.
    """

    step: Step
    operands: tuple[Form | None, ...]
    results: tuple[Form | None, ...]
    description: OperatorDescription | None = None
    location: Location | None = None
    bodies: tuple[Recipe, ...] = ()
    returned_results: tuple[int, ...] = ()
    schedules: tuple[Any, ...] = ()

    @property
    def produced(self) -> list[tuple[Var, Form]]:
        """The variables that the evaluation makes, with their forms.

        Another evaluation of the same loop or branch may make its other results.
        """
        pairs = zip(self.step.eqn.outvars, self.results, strict=True)
        return [(var, form) for var, form in pairs if form is not None]

    @property
    def trip_count(self) -> int:
        """The trip count of a loop; 1 for a ``while`` of unknown trip count, and for any other equation."""
        return self.step.region.run_count if self.step.region is not None else 1

    @property
    def read_whole(self) -> set[int]:
        """The numbers of the fixed operands that an equation in a body with passes of its own reads whole."""
        region = self.step.region
        if region is None or not self.schedules:
            return set()
        return {
            i
            for made, given in zip(self.schedules, region.inputs, strict=True)
            for i, var in zip(given, made.flow.program.inputs, strict=True)
            if i in region.fixed and var in made.read_whole
        }


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion of a variable from one form to another."""

    var: Var
    source: Form
    target: Form


@dataclasses.dataclass(eq=False)
class Recipe:
    """Evaluations and conversions, in order.

    Attributes:
      flow: batch flow of the program.
      actions: in order of evaluation.
      requests: the outputs, with their forms.
      leaves: the inputs, with their forms.
    """

    flow: Flow
    actions: list[Evaluation | Conversion]
    requests: list[tuple[Atom, Form]]
    leaves: dict[Key, None]


def evaluated_steps(recipe: Recipe) -> set[Step]:
    """The steps that a recipe evaluates, without those in bodies."""
    return {action.step for action in recipe.actions if isinstance(action, Evaluation)}


def clone_for_slice(flow: Flow, step: Step, result: int, form: Slice, node_sizes: Sizes) -> Evaluation | None:
    """A clone of an equation of whole values that computes a node's slice of its result; None if it is not cheap.

    A linear equation of partial values is cloned on the completed values.

    Args:
      flow: batch flow of the program.
      step: the equation.
      result: number of the result.
      form: the slice.
      node_sizes: examples per node, of each batch.
    """
    if step.eqn.effects or step.location is not None or step.region is not None:
        return None
    if not isinstance(step.results[result], Whole | Partial):
        return None
    description = flow.program.describe(step.eqn)
    if description is None or description.has(Algebra.CONTRACTS) or description.reduced:
        return None
    location, node_size = locate(form, description.results[result], description.sizes), node_sizes[form.batch]
    if location is None or location.factor in description.whole or node_size % location.ratio.denominator:
        return None
    results = [project(location, dims, description.sizes) for dims in description.results]
    operands = [project(location, dims, description.sizes) for dims in description.operands]
    if any(f is None or node_size % f.grain for f in results) or any(f and node_size % f.grain for f in operands):
        return None
    if results[result] != form:
        return None
    wanted: tuple[Form | None, ...] = tuple(form if i == result else None for i in range(len(results)))
    read = tuple(operand or node_read_form(flow, atom) for operand, atom in zip(operands, step.eqn.invars, strict=True))
    return Evaluation(step, read, wanted, description, location)


def node_read_form(flow: Flow, atom: Atom) -> Form:
    """The form in which a node reads a whole value: whole, or its own estimate (varying)."""
    return VARYING if flow.state(atom).estimated else WHOLE


def build_recipe(
    flow: Flow,
    requests: Iterable[tuple[Atom, Form]],
    node_sizes: Sizes,
    *,
    is_leaf: Callable[[Var, Form], bool] | None = None,
    effects: Sequence[Step] = (),
    cut: Collection[Var] = (),
) -> Recipe:
    """Finds the evaluations that compute `requests`.

    Args:
      flow: batch flow of the program.
      requests: atoms, each with the form wanted.
      node_sizes: examples per node, of each batch.
      is_leaf: whether a pair of variable and form is given; by default the program's inputs and constants in the form
        that batch flow found for them.
      effects: steps to evaluate whether or not their results are wanted.
      cut: whole inputs of which slices are given, too, where slices are wanted.

    Returns:
      The recipe; `Recipe.leaves` holds the pairs that must be given.
    """
    program = flow.program
    given = set(program.inputs) | set(program.constants)

    def is_given(var: Var, form: Form) -> bool:
        return var in given and (flow.states[var].form == form or (var in cut and isinstance(form, Slice)))

    leaf = is_leaf or is_given
    wanted: dict[Var, dict[Form, None]] = {}
    waiting: list[int] = []
    leaves: dict[Key, None] = {}
    actions: list[Evaluation | Conversion] = []
    requests = list(requests)

    def want(atom: Atom, form: Form) -> None:
        if not isinstance(atom, Var):
            return
        if leaf(atom, form):
            leaves[(atom, form)] = None
        elif atom in wanted:
            wanted[atom][form] = None
        else:
            wanted[atom] = {form: None}
            if atom in flow.position:
                heapq.heappush(waiting, -flow.position[atom])

    def convert(var: Var, target: Form) -> None:
        source = flow.states[var].form
        if isinstance(target, Slice) and source != target:
            source = node_read_form(flow, var)  # a completed reduction, or a value gathered for another dimension
        if source == target:
            raise AssertionError(f"{var} is wanted as {target} where it cannot be evaluated")
        actions.append(Conversion(var, source, target))
        want(var, source)

    def visit(step: Step, forced: bool) -> None:
        results = step.eqn.outvars
        forms = wanted.get(results[0], ()) if len(results) == 1 else ()
        if len(forms) == 1 and step.results[0] in forms and step.region is None:
            add(Evaluation(step, step.operands, step.results, step.description, step.location))  # the common case
            return
        native = [step.results[i] in wanted.get(var, ()) for i, var in enumerate(results)]
        whole = [isinstance(form, Whole) for form in step.results]
        for i, var in enumerate(results):
            for form in list(wanted.get(var, ())):
                if not isinstance(form, Slice) or form == step.results[i]:
                    continue
                clone = clone_for_slice(flow, step, i, form, node_sizes)
                if clone is not None:
                    add(clone)
                else:
                    convert(var, form)  # maybe from a node's own estimate, which is then wanted as well
            for form in list(wanted.get(var, ())):
                if isinstance(form, Slice) or form == step.results[i]:
                    continue
                if isinstance(form, Varying) and whole[i] and flow.states[var].estimable:
                    add(estimated_evaluation(flow, step, i))
                else:
                    convert(var, form)
            native[i] = step.results[i] in wanted.get(var, ())
        in_whole = [n and w for n, w in zip(native, whole, strict=True)]
        in_nodes = [n and not w for n, w in zip(native, whole, strict=True)]
        if any(in_nodes) or (forced and step.per_node):
            add(native_evaluation(step, in_nodes, node_sizes))
        if any(in_whole) or (forced and not step.per_node):
            add(native_evaluation(step, in_whole, node_sizes))

    def add(action: Evaluation) -> None:
        actions.append(action)
        for atom, form in zip(action.step.eqn.invars, action.operands, strict=True):
            if form is not None:
                want(atom, form)

    for atom, form in requests:
        want(atom, form)
    forced = {-flow.steps.index(step) for step in effects}
    for position in forced:
        heapq.heappush(waiting, position)
    last = None
    while waiting:
        position = heapq.heappop(waiting)
        if position != last:  # wanted for several results
            visit(flow.steps[-position], position in forced)
        last = position
    for var in [*program.inputs, *program.constants]:
        for form in list(wanted.get(var, ())):
            convert(var, form)
    actions.reverse()
    return Recipe(flow, actions, requests, leaves)


def estimated_evaluation(flow: Flow, step: Step, result: int) -> Evaluation:
    """The evaluation of a whole equation on a node's own estimates of its operands."""
    operands = [VARYING if flow.state(atom).estimable else WHOLE for atom in step.eqn.invars]
    results: tuple[Form | None, ...] = tuple(VARYING if i == result else None for i in range(len(step.eqn.outvars)))
    return Evaluation(step, tuple(operands), results)


def native_evaluation(step: Step, wanted: Sequence[bool], node_sizes: Sizes) -> Evaluation:
    """The evaluation of an equation in the forms that batch flow found, for some of its results."""
    results = tuple(form if w else None for form, w in zip(step.results, wanted, strict=True))
    if not step.per_node:
        return Evaluation(step, step.operands, results, step.description)
    if step.region is None:
        return Evaluation(step, step.operands, results, step.description, step.location)
    return region_evaluation(step, step.region, results, node_sizes)


def region_evaluation(step: Step, region: Region, results: tuple[Form | None, ...], node_sizes: Sizes) -> Evaluation:
    """The evaluation of a loop or branch by nodes, without the carries that no wanted result or condition depends on.

    A fixed whole operand is read as a slice if the bodies need only one slice of it.
    """
    first, carries = region.carried.start, len(region.carried)
    returned = {i for i, form in enumerate(results) if form is not None}
    cut = {i for i in region.fixed if isinstance(step.operands[i], Whole) and not step.over_batch}
    while True:
        bodies = []
        read: dict[int, set[Form]] = {} if region.chooser is None else {region.chooser: {WHOLE}}
        for k, (flow, given) in enumerate(zip(step.bodies, region.inputs, strict=True)):
            outputs = list(zip(flow.program.outputs, flow.output_forms, strict=True))
            requests = outputs if k < region.tests else [outputs[i] for i in sorted(returned)]
            effects = [s for s in flow.steps if s.eqn.effects]
            positions = dict(zip(flow.program.inputs, given, strict=True))
            may_be_cut = {var for var, i in positions.items() if i in cut}
            bodies.append(build_recipe(flow, requests, node_sizes, effects=effects, cut=may_be_cut))
            for var, form in bodies[-1].leaves:
                if var in positions:
                    read.setdefault(positions[var], set()).add(form)
        more = {i - first for i in read if i in region.carried}
        several = {i for i, forms in read.items() if i in cut and len(forms) > 1}
        if more <= returned and not several:
            break
        returned |= more
        cut -= several
    kept = read.keys() | {first + i for i in returned if i < carries}
    asked = {i: form for i in cut & read.keys() for form in read[i]}
    operands = tuple(asked.get(i, form) if i in kept else None for i, form in enumerate(step.operands))
    return Evaluation(step, operands, results, bodies=tuple(bodies), returned_results=tuple(sorted(returned)))
