"""A program and its batched inputs -> batch flow: the form of every value, and how every equation is evaluated.

Knows operator descriptions and what they say about the batch's factor. Must not know devices, nor how anything is
evaluated. The number of nodes only decides which grains are acceptable. For ``w: whole`` and ``x: batched``::

    h = x @ w           h: batched (dim 0)           evaluated by every node
    g = h.T @ x         g: partial (sum)             evaluated by every node
    u = w - g           u: whole, one level later    evaluated once
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.control_flow_passes import nested_step
from vnode.analysis.dispatch_sums import find_dispatch_sums
from vnode.analysis.equation_view import EquationView
from vnode.analysis.forms import (
    VARYING,
    WHOLE,
    Batch,
    Form,
    Location,
    Partial,
    Slice,
    Varying,
    Whole,
    contains_factor,
    locate,
    project,
)
from vnode.analysis.low_precision_sums import may_overflow
from vnode.analysis.node_control_flow import region_step
from vnode.analysis.program import Program, message_about
from vnode.analysis.states import (
    CoupledInBody,
    Coupling,
    CouplingMode,
    CouplingReason,
    Flow,
    State,
    Step,
    constant_state,
)
from vnode.errors import CouplingError, UnsupportedPrimitiveError
from vnode.operators import Algebra, Monoid, OperatorDescription, advice
from vnode.operators.control_flow import Region, region_of

SUM = Partial(Monoid.SUM)
IDEMPOTENT = {Monoid.MAX, Monoid.MIN, Monoid.AND, Monoid.OR}


@dataclasses.dataclass(eq=False)
class Precedent:
    """A decision that is reused for every equation of the same description whose operands have the same states.

    Only steps with batched results are reused. Reductions and gathers depend on more than the operands' states.

    Attributes:
      step: the decision.
      operands: states of the operands.
      results: states of the results.
    """

    step: Step
    operands: list[State]
    results: list[State]

    @staticmethod
    def is_precedent(step: Step) -> bool:
        """Whether a step that met no coupling can be reused."""
        return step.description is not None and all(isinstance(form, Slice) for form in step.results)

    @property
    def key(self) -> Hashable:
        """Identifies the equations that reuse the decision. States are compared by identity: a flow interns them."""
        return (id(self.step.description), *map(id, self.operands))


@dataclasses.dataclass(eq=False)
class Follower:
    """Follows batches through a program and its bodies.

    Attributes:
      batch: the batch; the largest one if there are several.
      nodes: the number of nodes; decides which grains are acceptable.
      mode: the coupling mode (``"exact"``, ``"local"``, ``"error"``) of a reducing or materializing equation.
      couplings: found so far.
      grains: for each batch, the number of its examples that a node must hold a multiple of, so far.
      sums: values that a loop over the examples adds up in a carry.
      dispatch_sums: sums that no node can estimate, because examples pick their place in them.
      divides_chunks: whether nodes have turns of their own of a loop whose turns take several examples each.
    """

    batch: Batch
    nodes: int
    mode: CouplingMode
    couplings: list[Coupling] = dataclasses.field(default_factory=list)
    grains: dict[Batch, int] = dataclasses.field(default_factory=dict)
    sums: set[Var] = dataclasses.field(default_factory=set)
    dispatch_sums: set[Var] = dataclasses.field(default_factory=set)
    divides_chunks: bool = True

    def for_nested_program(self, batch: Batch | None) -> Follower:
        """A follower for a program with passes of its own; for `batch` if the program has its own batch."""
        if batch is not None:
            return Follower(batch, self.nodes, self.mode, self.couplings, divides_chunks=self.divides_chunks)
        return dataclasses.replace(self, couplings=self.couplings, grains=dict(self.grains))

    @property
    def batches(self) -> set[Batch]:
        """The batches that are divided. A node has a share of each."""
        return {self.batch, *self.grains}

    def accept(self, form: Slice | Location) -> bool:
        """Whether nodes may hold multiples of the form's grain without leaving most of them empty."""
        grain = math.lcm(self.grains.get(form.batch, 1), form.ratio.denominator)
        node = -(-form.batch.size // self.nodes)
        if grain > max(2 * node, 1) and node % grain:
            return False
        self.grains[form.batch] = grain
        return True

    def follow(self, program: Program, inputs: Sequence[State], *, body: bool = False) -> Flow:
        """Runs batch flow over `program`, again where it finds sums that cannot be estimated.

        Args:
          program: the program.
          inputs: states of its inputs.
          body: the program is a loop's body or a branch: nothing can be completed or materialized inside it.

        Returns:
          The flow.

        Raises:
          CoupledInBody: a value in a body would have to be completed or materialized.
          UnsupportedPrimitiveError: a batched value meets a primitive that has an effect and no description.
        """
        met = len(self.couplings)
        while True:
            flow = self.follow_once(program, inputs, body)
            if body or not any(coupling.mode == "local" for coupling in self.couplings[met:]):
                return flow
            found = find_dispatch_sums(flow) - self.dispatch_sums
            if not found:
                return flow
            self.dispatch_sums |= found
            del self.couplings[met:]

    def follow_once(self, program: Program, inputs: Sequence[State], body: bool) -> Flow:
        """Runs batch flow over `program` once."""
        flow = Flow(program, {}, [])
        flow.states.update(zip(program.inputs, map(flow.interned, inputs), strict=True))
        flow.states.update((var, constant_state(value)) for var, value in program.constants.items())
        for state in inputs:
            if isinstance(state.form, Slice):
                self.grains.setdefault(state.form.batch, 1)
        reducers: dict[Var, JaxprEqn] = {}
        precedents: dict[Any, Precedent] = {}
        for eqn in program.equations:
            step = None
            if not eqn.effects and self.sums.isdisjoint(eqn.outvars):
                step = self.whole_value_step(flow, eqn, reducers) or self.step_from_precedent(flow, eqn, precedents)
            if step is None:
                view = EquationView(self, flow, eqn, body, reducers)
                met = len(self.couplings)
                step = self.step(view)
                view.record(step)
                if eqn.effects:
                    keep_order(flow, step)
                elif len(self.couplings) == met and Precedent.is_precedent(step):
                    precedent = Precedent(step, view.states, [flow.states[var] for var in eqn.outvars])
                    precedents[precedent.key] = precedent
            flow.steps.append(step)
        flow.output_forms = [flow.state(atom).form for atom in program.outputs]
        flow.batch = self.batch
        flow.node_sizes = {
            batch: math.ceil(batch.size / (self.nodes * grain)) * grain
            for batch, grain in {self.batch: 1, **self.grains}.items()
        }
        flow.node_size = flow.node_sizes[self.batch]
        return flow

    @staticmethod
    def whole_value_step(flow: Flow, eqn: JaxprEqn, reducers: dict[Var, JaxprEqn]) -> Step | None:
        """The step of an equation of whole values only, as most of an optimizer's are; None for any other."""
        level = local = 0
        ghost = model = False
        source = None
        for atom in eqn.invars:
            state = flow.state(atom)
            if state.form is not WHOLE or state.zero or state.examples or state.crosses_region:
                return None
            level, local = max(level, state.level), max(local, state.local_level)
            ghost, model = ghost or state.ghost, model or state.model
            if source is None and isinstance(atom, Var):
                source = reducers.get(atom)
        state = flow.whole_state(level, local, ghost, model)
        for var in eqn.outvars:
            flow.states[var] = state
            if source is not None:
                reducers[var] = source
        return Step(eqn, False, level, whole_forms(len(eqn.invars)), whole_forms(len(eqn.outvars)))

    @staticmethod
    def step_from_precedent(flow: Flow, eqn: JaxprEqn, precedents: Mapping[Any, Precedent]) -> Step | None:
        """The step of an equation for which an earlier layer set a precedent; None if there is none."""
        description = flow.program.describe(eqn)
        precedent = precedents.get((id(description), *[id(flow.state(atom)) for atom in eqn.invars]))
        if precedent is None:
            return None
        flow.states.update(zip(eqn.outvars, precedent.results, strict=True))
        step = precedent.step
        return Step(eqn, True, step.level, step.operands, step.results, description, step.location)

    def step(self, view: EquationView) -> Step:
        """Decides how one equation is evaluated."""
        eqn = view.eqn
        forms = view.forms
        if not self.sums.isdisjoint(eqn.outvars):
            return view.evaluate_per_node((Partial(Monoid.SUM),), None)
        region = region_of(eqn)
        if all(isinstance(form, Whole) for form in forms):
            if not any(state.examples for state in view.states):
                return view.evaluate_once()
            if region is not None:
                return nested_step(self, view, region)
            description = view.flow.program.describe(eqn)
            return view.evaluate_once() if description is None else self.described_step(view, description)
        if region is not None:
            return self.region_step(view, region)
        if eqn.effects and not eqn.outvars:
            return self.effect_step(view)
        description = view.flow.program.describe(eqn)
        return self.undescribed_step(view) if description is None else self.described_step(view, description)

    def undescribed_step(self, view: EquationView) -> Step:
        """The step of an equation without a description: evaluated once, on the whole batch.

        Raises:
          UnsupportedPrimitiveError: the equation has an effect, and a batched operand.
        """
        eqn, forms = view.eqn, view.forms
        whole = all(isinstance(form, Whole | Partial) for form in forms)
        if not whole and not is_ordered(eqn) and not any(isinstance(form, Slice | Partial) for form in forms):
            return view.evaluate_per_node(
                (VARYING,) * len(eqn.outvars), None
            )  # of a single example, or a node's own estimate
        if eqn.effects and not whole:
            raise UnsupportedPrimitiveError(
                message_about(
                    eqn,
                    f"{eqn.primitive.name!r} is applied to a batched value and has an effect; no description of it "
                    "says how often that happens if each virtual node has a part of the batch.",
                    facts=[f"effects: {', '.join(sorted(map(str, eqn.effects)))}"],
                    remedies=[*advice(eqn), "or apply it to values that are reduced over the batch"],
                )
            )
        view.complete([i for i, form in enumerate(forms) if isinstance(form, Partial)])
        view.materialize(
            [i for i, form in enumerate(forms) if isinstance(form, Slice | Varying)], CouplingReason.UNDESCRIBED
        )
        return view.evaluate_once()

    def described_step(self, view: EquationView, description: OperatorDescription) -> Step:
        """The step of an equation with a description."""
        partial = [i for i, form in enumerate(view.forms) if isinstance(form, Partial)]
        if partial:
            monoid = self.stays_partial(view, description, partial)
            if monoid is not None:
                return view.evaluate_per_node((Partial(monoid),) * len(view.eqn.outvars), description)
            view.complete(partial)
        location = self.find_batch_factor(view, description) or self.resplit_whole_value(view, description)
        if location is None:
            if any(isinstance(form, Varying) for form in view.forms):
                return view.evaluate_per_node((VARYING,) * len(view.eqn.outvars), description)
            return view.evaluate_once()
        for i, dims in enumerate(description.operands):
            if isinstance(view.forms[i], Whole) and contains_factor(location.factor, dims):
                view.forms[i] = project(location, dims, description.sizes) or WHOLE
        results: list[Form] = []
        for k, dims in enumerate(description.results):
            form = project(location, dims, description.sizes)
            if form is not None:
                results.append(form)
            elif location.factor in description.reduced:
                results.append(Partial(description.reduced[location.factor]))
            else:
                results.append(SUM if k in description.summed else VARYING)  # without a reader
        return view.evaluate_per_node(tuple(results), description, location)

    @staticmethod
    def stays_partial(view: EquationView, description: OperatorDescription, partial: Sequence[int]) -> Monoid | None:
        """The monoid of an equation's partial results; None if its partial operands must be completed first.

        Args:
          view: the equation.
          description: of the equation.
          partial: positions of the partial operands.
        """
        monoids = {form.monoid for form in view.forms if isinstance(form, Partial)}
        if len(monoids) != 1:
            return None
        (monoid,) = monoids
        if any(not isinstance(form, Whole | Partial) for form in view.forms):
            return None
        made = max(view.states[i].level for i in partial)
        wholes = [state for state, form in zip(view.states, view.forms, strict=True) if isinstance(form, Whole)]
        if any(state.ready_level > made for state in wholes):
            return None  # one whole operand would move the equation to a later pass (gradient clipping)
        if any(view.states[i].ghost for i in partial) and (
            any(state.estimable and not state.ghost for state in wholes)
            or not all(view.states[i].estimable for i in partial)
        ):
            return None  # an estimate needs estimates of both, or of neither
        if not all(view.states[i].estimates for i in partial) and any(
            state.estimated and isinstance(form, Whole) for state, form in zip(view.states, view.forms, strict=True)
        ):
            return None  # a sum that leaves the step exactly must not include estimates
        if len(view.forms) == 1 and description.reduced and set(description.reduced.values()) == {monoid}:
            return monoid
        if monoid is not Monoid.SUM and not description.has(Algebra.MOVES):
            return None
        for group in description.linear:
            if not group.issuperset(partial):
                continue
            if all(
                i in partial or view.states[i].zero or (monoid in IDEMPOTENT and description.has(Algebra.MOVES))
                for i in group
            ) and (monoid in (Monoid.SUM, *IDEMPOTENT) or len(group) == 1):
                return monoid
        return None

    def find_batch_factor(self, view: EquationView, description: OperatorDescription) -> Location | None:
        """The one factor that holds the batch; materializes the operands that do not agree with it."""
        locations: dict[int, Location] = {}
        for i, form in enumerate(view.forms):
            if not isinstance(form, Slice):
                continue
            location = locate(form, description.operands[i], description.sizes)
            if location is None or location.factor in description.whole or not self.accept(location):
                view.materialize([i], CouplingReason.WHOLE)
            elif location.factor not in description.reduced and not self.keeps_batch_in_results(
                view, description, location.factor
            ):
                view.materialize([i], CouplingReason.RESULTS)
            else:
                locations[i] = location
        if not locations:
            return None
        free = {loc.factor for loc in locations.values() if loc.factor not in description.reduced}
        if len(free) > 1:
            view.materialize(locations, CouplingReason.PAIRS)
            return None

        def weight(i: int) -> tuple[bool, int]:
            return locations[i].factor in free, math.prod(view.eqn.invars[i].aval.shape)

        location = locations[max(locations, key=weight)]
        if self.contracts_gathered(view, description, locations, location):
            view.materialize(locations, CouplingReason.GATHERED)
            return None
        view.materialize([i for i, other in locations.items() if other != location], CouplingReason.REORDERS)
        for dims in description.results:
            form = project(location, dims, description.sizes)
            if form is not None:
                self.accept(form)
        for i, dims in enumerate(description.operands):
            form = project(location, dims, description.sizes)
            if form is not None and not isinstance(view.forms[i], Slice) and not self.accept(form):
                raise AssertionError("a projection is never finer than its factor")
        return location

    @staticmethod
    def keeps_batch_in_results(view: EquationView, description: OperatorDescription, factor: int) -> bool:
        """Whether copies on parts of a free factor give every result that is read, or a term of it."""
        program = view.flow.program
        for k, var in enumerate(view.eqn.outvars):
            if k in description.summed and not may_overflow(var, SUM):
                continue
            stands = contains_factor(factor, description.results[k])
            if not stands and (var in program.readers or any(var is atom for atom in program.outputs)):
                return False
        return True

    @staticmethod
    def contracts_gathered(
        view: EquationView, description: OperatorDescription, locations: Iterable[int], location: Location
    ) -> bool:
        """Whether gathered values are contracted over the batch with a whole value made from gathered values.

        The backward pass of an all-pairs loss does this. The sum is then formed once, not over nodes in another pass.
        """
        if location.factor not in description.reduced or view.body:
            return False
        gathered = all(view.eqn.invars[i] in view.flow.gathered for i in locations)
        return gathered and any(
            isinstance(form, Whole)
            and view.states[i].examples
            and contains_factor(location.factor, description.operands[i])
            for i, form in enumerate(view.forms)
        )

    def resplit_whole_value(self, view: EquationView, description: OperatorDescription) -> Location | None:
        """Splits the examples of a whole value over the nodes again, at a contraction; None if there are none.

        Example: a shuffle of the batch needs the whole batch, but the network after it does not.
        """
        if (
            not description.has(Algebra.CONTRACTS)
            or view.body
            or not all(isinstance(form, Whole) for form in view.forms)
        ):
            return None
        having = [i for i, state in enumerate(view.states) if state.examples]
        if len(having) != 1:
            return None
        (i,) = having
        shape = view.eqn.invars[i].aval.shape
        for dim in sorted(view.states[i].examples, key=lambda d: -shape[d]):
            # Concatenated batches without a common number of parts become a batch of their own.
            own = [Batch(shape[dim])] if len(self.batches) > 1 else []
            default = [Slice(batch, dim, 1, Fraction(shape[dim], batch.size)) for batch in (self.batch, *own)]
            # as activations hold it: two concatenated views of the batch are two runs of it
            for form in (*view.flow.slices_of(shape[dim], dim), *default):
                location = locate(form, description.operands[i], description.sizes)
                if location is None or location.factor in description.whole or location.factor in description.reduced:
                    continue
                if shape[dim] > 1 and self.accept(location):
                    return location
        return None

    def effect_step(self, view: EquationView) -> Step:
        """The step of an equation without results: evaluated by every node if a batched value reaches it, else once.

        Raises:
          CouplingError: the effect is ordered, and nodes would run it.
        """
        view.complete([i for i, form in enumerate(view.forms) if isinstance(form, Partial)])
        if all(isinstance(form, Whole) for form in view.forms):
            return view.evaluate_once()
        if is_ordered(view.eqn):
            raise CouplingError(
                message_about(
                    view.eqn,
                    f"the ordered effect of {view.eqn.primitive.name!r} cannot be kept: nodes run in parallel.",
                    remedies=["use ordered=False", "or pass values that are reduced over the batch"],
                )
            )
        return view.evaluate_per_node((), None)

    def region_step(self, view: EquationView, region: Region) -> Step:
        """The step of a loop or branch: evaluated by every node, else once with passes of its own."""
        kept = list(view.forms), view.level
        try:
            return region_step(self, view, region)
        except CoupledInBody as coupled:
            if view.body:
                raise
            view.forms[:], view.level = kept
            view.coupled = coupled
            return nested_step(self, view, region)


def is_ordered(eqn: JaxprEqn) -> bool:
    """Whether an equation has an ordered effect."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)


@functools.cache
def whole_forms(count: int) -> tuple[Whole, ...]:
    return (WHOLE,) * count


def keep_order(flow: Flow, step: Step) -> None:
    """Raises the level of the references that a step accesses, so that later accesses stay after it.

    Raises:
      UnsupportedPrimitiveError: nodes would read or write the reference (`jax.new_ref`).
    """
    references = [atom for atom in step.eqn.invars if isinstance(atom, Var) and hasattr(atom.aval, "inner_aval")]
    if references and (step.per_node or step.nested):
        raise UnsupportedPrimitiveError(
            message_about(
                step.eqn,
                f"{step.eqn.primitive.name!r} mutates an array in place with values that depend on single examples.",
                remedies=[
                    "use x.at[...].set(...) or a carry of the loop",
                    "or write only values that are reduced over the batch",
                ],
            )
        )
    for var in references:
        flow.states[var] = flow.interned(
            dataclasses.replace(flow.states[var], level=step.level, local_level=step.level)
        )
