"""One equation under batch flow's decision -> its step, the states of its results, and the couplings it meets.

Knows states, levels and couplings. Must not know how an equation should be evaluated: batch flow decides that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.forms import VARYING, WHOLE, Form, Location, Partial, Slice, Varying, Whole
from vnode.analysis.program import message_about
from vnode.analysis.states import BatchFollower, CoupledInBody, Coupling, CouplingReason, Flow, State, Step
from vnode.errors import CouplingError
from vnode.operators import Monoid, OperatorDescription
from vnode.operators.control_flow import Region, region_of


@dataclasses.dataclass(eq=False)
class EquationView:
    """An equation under batch flow's decision, with the forms in which it reads its operands so far.

    Attributes:
      follower: of the program.
      flow: batch flow of the equations before it.
      eqn: the equation.
      body: whether it is in a body that nodes run, in which nothing can be completed or materialized.
      reducers: for values computed from a reduction, the reducing equation.
    """

    follower: BatchFollower
    flow: Flow
    eqn: JaxprEqn
    body: bool
    reducers: dict[Var, JaxprEqn]

    def __post_init__(self) -> None:
        self.states = [self.flow.state(atom) for atom in self.eqn.invars]
        self.forms: list[Form] = [state.form for state in self.states]
        self.gathered: dict[int, CouplingReason] = {}
        self.coupled: CoupledInBody | None = None
        self.level = 0

    def complete(self, positions: Iterable[int]) -> None:
        """Reads partial operands as completed reductions, one level later.

        Raises:
          CoupledInBody: the equation is in a body that nodes run.
        """
        for i in positions:
            if self.body:
                raise CoupledInBody(self.eqn, CouplingReason.SUM)
            self.forms[i] = WHOLE

    def materialize(self, positions: Iterable[int], why: CouplingReason) -> None:
        """Reads batched operands whole, one level later.

        Raises:
          CoupledInBody: the equation is in a body that nodes run.
        """
        for i in positions:
            if self.body:
                raise CoupledInBody(self.eqn, why)
            if isinstance(self.forms[i], Slice | Varying):
                self.gathered[i] = why
                atom = self.eqn.invars[i]
                if isinstance(atom, Var):
                    self.flow.gathered.add(atom)
            self.forms[i] = WHOLE

    def evaluate_nested(self, region: Region, bodies: tuple[Flow, ...], results: Sequence[State]) -> Step:
        """The step of a loop or branch that is evaluated once, with passes of its own in its bodies."""
        level = max((state.whole_level for state in self.states), default=0)
        self.results = [self.state_outside(state) for state in results]
        return Step(
            self.eqn,
            False,
            level,
            tuple(self.forms),
            tuple(state.form for state in self.results),
            region=region,
            bodies=bodies,
            nested=True,
        )

    def state_outside(self, state: State) -> State:
        """A result's state outside of the bodies. A batch that only the bodies divide is whole outside."""
        form = state.form
        if not isinstance(form, Slice) or form.batch in self.follower.batches:
            return state
        return State(WHOLE, model=state.model, examples=frozenset({form.dim}))

    def evaluate_once(self) -> Step:
        """The step of an equation that is evaluated once, on whole values."""
        level = max((state.whole_level for state in self.states), default=0)
        return Step(self.eqn, False, level, (WHOLE,) * len(self.forms), (WHOLE,) * len(self.eqn.outvars), region=None)

    def evaluate_per_node(
        self,
        results: tuple[Form, ...],
        description: OperatorDescription | None,
        location: Location | None = None,
        region: Region | None = None,
        bodies: tuple[Flow, ...] = (),
        over_batch: bool = False,
    ) -> Step:
        """The step of an equation that every node evaluates.

        Args:
          results: forms of the results.
          description: of the equation, if it has one.
          location: the factor that is split, if one is.
          region: the loop or branch that the equation is.
          bodies: batch flow of the region's bodies.
          over_batch: whether the region is a loop over the examples.
        """
        level = 0
        for i, form in enumerate(self.forms):
            state = self.states[i]
            if form == state.form and not isinstance(form, Whole):
                level = max(level, state.level)
            elif state.estimated:
                if isinstance(form, Whole):
                    self.forms[i] = VARYING
                level = max(level, state.local_level)
            else:
                level = max(level, state.whole_level)
        return Step(
            self.eqn, True, level, tuple(self.forms), results, description, location, region, bodies, over_batch
        )

    def record(self, step: Step) -> None:
        """Records the states of a step's results, and its couplings."""
        model = any(state.model for state in self.states)
        if step.nested:
            for var, state in zip(self.eqn.outvars, self.results, strict=True):
                state = dataclasses.replace(state, level=step.level, local_level=step.level, zero=False)
                self.flow.states[var] = self.flow.interned(state)
            if self.coupled is not None:
                self.follower.couplings.append(
                    Coupling(self.flow, self.eqn, "loop", step.level, source=self.coupled.eqn, why=self.coupled.why)
                )
            return
        if step.per_node:
            self.check_borders(step)
        zero = self.results_zero(step)
        estimates = step.per_node and any(
            isinstance(form, Varying) or (state.estimates and not isinstance(form, Whole))
            for form, state in zip(step.operands, self.states, strict=True)
        )
        crossing = [state for state in self.states if state.crosses_region]
        states = [
            dataclasses.replace(state, examples=state.examples | {state.form.dim})
            if isinstance(state.form, Slice) and isinstance(form, Whole)
            else state
            for state, form in zip(self.states, step.operands, strict=True)
        ]
        descends = any(state.examples for state in states)
        description = step.description
        if descends and description is None and region_of(self.eqn) is None:
            description = self.flow.program.describe(self.eqn)
        inherited = [self.reducers[a] for a in self.eqn.invars if isinstance(a, Var) and a in self.reducers]
        adds = {state for state, form in zip(self.states, step.operands, strict=True) if isinstance(form, Partial)}
        if any(isinstance(form, Slice | Varying) for form in step.operands):
            adds.clear()  # the sum is formed here
        for k, (var, form) in enumerate(zip(self.eqn.outvars, step.results, strict=True)):
            local, ghost = step.level, False
            examples: set[int] = set()
            match form:
                case Whole():
                    if descends and not step.per_node:
                        examples = examples_of(self.eqn, k, states, description)
                    local = min(local, max((state.local_level for state in self.states), default=0))
                    # A gathered value needs the whole batch, so that no node can estimate it.
                    ghost = any(state.estimated for state in self.states) and not self.gathered
                case Partial():
                    self.reducers[var] = inherited[0] if inherited else self.eqn
                    if adds:
                        ghost = any(state.ghost for state in adds)
                        local += not all(state.estimable for state in adds)
                    elif form.monoid is not Monoid.SUM or var in self.follower.dispatch_sums:
                        local += 1  # a node's own maximum is no estimate
                    elif model:
                        ghost = self.follower.mode(self.reducers[var]) == "local"
                        local += not ghost
                case _:
                    local += 1
            state = State(form, step.level, local, ghost, zero, model, estimates, False, frozenset(examples))
            if crossing:
                state = dataclasses.replace(
                    state,
                    estimated_inside=any(other.estimated_inside for other in crossing),
                    counted_outside=any(other.counted_outside for other in crossing) and not isinstance(form, Slice),
                )
            self.flow.states[var] = self.flow.interned(state)
            if isinstance(form, Whole) and inherited:
                self.reducers[var] = inherited[0]
        if self.gathered:
            why = next(iter(self.gathered.values()))
            self.follower.couplings.append(Coupling(self.flow, self.eqn, "materialize", step.level, why=why))
        elif step.per_node:
            for i, form in enumerate(step.operands):
                atom = self.eqn.invars[i]
                reads_reduction = isinstance(form, Whole | Varying | Slice) and isinstance(
                    self.states[i].form, Whole | Partial
                )
                if not reads_reduction or self.states[i].whole_level == 0:
                    continue
                mode = "local" if self.states[i].estimated else "exact"
                source = self.reducers.get(atom) if isinstance(atom, Var) else None
                self.follower.couplings.append(Coupling(self.flow, self.eqn, "reduction", step.level, mode, source))

    def check_borders(self, step: Step) -> None:
        """Checks that the two sides of a loop's or branch's border do not mix a sum with an estimate of it.

        Raises:
          CouplingError: they do.
        """
        for state, form in zip(self.states, step.operands, strict=True):
            if state.estimated_inside:
                what = "that a loop or branch computes from its own estimate of a sum, which does not exist outside"
                remedy = "compute it again where it is read: jax.checkpoint around the body of the loop or branch"
            elif state.counted_outside and state.estimated and not isinstance(form, Partial):
                what = "that a loop or branch computes from an estimate inside and a count of the batch from outside"
                remedy = "normalize in the loop or branch by a number that does not depend on the batch"
            else:
                continue
            raise CouplingError(
                message_about(
                    self.eqn,
                    f"coupling='local' cannot be kept: {self.eqn.primitive.name!r} applies to single examples a value "
                    f"{what}.",
                    remedies=[remedy, "or write the loop out (a Python loop), or the branch", "or coupling='exact'"],
                )
            )

    def results_zero(self, step: Step) -> bool:
        """Whether the results are known to be zeros: the equation is linear in operands that are."""
        if not any(state.zero for state in self.states):
            return False
        description = step.description
        if description is None:
            description = self.flow.program.describe(self.eqn) if region_of(self.eqn) is None else None
        if description is None:
            return False
        return any(all(self.states[i].zero for i in group) for group in description.linear)


def examples_of(
    eqn: JaxprEqn, result: int, states: Sequence[State], description: OperatorDescription | None
) -> set[int]:
    """Dimensions of a whole result that descend from the batch, by the description or by equal sizes."""
    found: set[int] = set()
    shape = getattr(eqn.outvars[result].aval, "shape", ())
    for i, state in enumerate(states):
        have = getattr(eqn.invars[i].aval, "shape", ())
        for d in state.examples:
            factors = description.operands[i][d] if description is not None else ()
            dims = (
                {e for e, dim in enumerate(description.results[result]) if set(dim) & set(factors)}
                if description is not None
                else set()
            )
            if not dims and len(have) == len(shape) and shape[d] > 1:
                dims = {d}
            elif not dims:
                dims = {e for e, n in enumerate(shape) if n == have[d]}
            found |= dims
    return {d for d in found if shape[d] > 1}
