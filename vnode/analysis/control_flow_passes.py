"""A loop or branch whose body reduces over the batch -> one step, whose bodies have passes of their own.

Knows how regions pass values on. Must not know how passes are scheduled. Inside such a body levels start again at 0,
and a batched value exists for all nodes at once.

    for minibatch:  w = w - grad(w, minibatch)   ->   for minibatch:  pass over nodes: g += grad;  once: w = w - g
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jax.extend.core import Var

from vnode.analysis.dispatch_sums import NO_DIMENSIONS, places_of
from vnode.analysis.equation_view import EquationView
from vnode.analysis.forms import WHOLE, Batch, Form, Partial, Slice, Varying, Whole
from vnode.analysis.program import Atom, Program, inline
from vnode.analysis.states import BatchFollower, CouplingReason, Flow, State, Step
from vnode.operators.control_flow import Body, Region


def nested_step(follower: BatchFollower, view: EquationView, region: Region) -> Step:
    """The step of a loop or branch whose bodies have passes of their own. It is evaluated once.

    Args:
      follower: of the program.
      view: the equation.
      region: the loop or branch that the equation is.
    """
    if view.body:
        return view.evaluate_once()
    sums = all(isinstance(form, Whole | Partial) for form in view.forms)
    view.complete([i for i, form in enumerate(view.forms) if isinstance(form, Partial | Varying)])
    if sums and not any(state.examples for state in view.states):
        return view.evaluate_once()  # no batched value enters the body, so it has no passes
    if region.chooser is not None:
        view.materialize([region.chooser], CouplingReason.BRANCH)
    for i in region.scanned:
        form = view.forms[i]
        if isinstance(form, Slice) and form.dim == 0:
            view.materialize([i], CouplingReason.IN_ORDER)
            view.states[i] = dataclasses.replace(
                view.states[i], examples=example_dims_beside(form, view.eqn.invars[i].aval.shape, follower.nodes)
            )
    given = [body_input_state(form, state) for form, state in zip(view.forms, view.states, strict=True)]
    places = places_of(view.flow)
    for i, atom in enumerate(view.eqn.invars):
        if isinstance(given[i].form, Slice) and isinstance(atom, Var):
            given[i] = dataclasses.replace(given[i], places=places.get(atom, NO_DIMENSIONS))
    for i in region.scanned:
        given[i] = scanned_element_state(given[i])
    carried = list(region.carried)
    while True:
        flows = body_flows(follower, view, region.bodies, [[given[i] for i in inputs] for inputs in region.inputs])
        after = [
            functools.reduce(either_state, states)
            for states in zip(
                *(
                    [body_output_state(f, atom, k in range(len(carried))) for k, atom in enumerate(f.program.outputs)]
                    for f in flows[region.tests :]
                ),
                strict=True,
            )
        ]
        joined = [either_state(given[i], state) for i, state in zip(carried, after[: len(carried)], strict=True)]
        if joined == [given[i] for i in carried]:
            break
        for i, state in zip(carried, joined, strict=True):
            given[i] = state
    after[: len(carried)] = joined
    for i in carried:
        view.forms[i] = given[i].form
    for flow in flows[region.tests :]:
        flow.output_forms = [state.form for state in after]
    if region.stacks:
        after[len(carried) :] = [stacked_result_state(state) for state in after[len(carried) :]]
    return view.evaluate_nested(region, tuple(flows), after)


def example_dims_beside(form: Slice, shape: Sequence[int], nodes: int) -> frozenset[int]:
    """The dimensions beside the batched one that may hold examples: ``[microbatches, size]``, ``[chunks, tokens]``.

    Empty if such a dimension has fewer examples than there are nodes.
    """
    grain = form.grain
    if grain < max(nodes, 2):
        return frozenset()
    return frozenset(
        d for d, n in enumerate(shape) if (d != form.dim and n == grain) or (d == form.dim + 1 and n % grain == 0)
    )


def body_flows(
    follower: BatchFollower, view: EquationView, bodies: Sequence[Body], inputs: Sequence[Sequence[State]]
) -> list[Flow]:
    """Batch flow of bodies with passes of their own; levels start again at 0."""
    flows = []
    for body, states in zip(bodies, inputs, strict=True):
        program = inline(body.jaxpr, body.constants, view.eqn)
        flows.append(body_follower(follower, states, program).follow(program, states))
    return flows


def body_follower(follower: BatchFollower, states: Sequence[State], program: Program) -> BatchFollower:
    """The follower of a body with passes of its own, with a new batch if no input carries the present one."""
    given = {state.form.batch for state in states if isinstance(state.form, Slice)}
    if given <= follower.batches and given:
        return follower.for_nested_program(None)
    if given:
        (batch,) = given
        return follower.for_nested_program(batch)
    sizes = [var.aval.shape[d] for var, state in zip(program.inputs, states, strict=True) for d in state.examples]
    return follower.for_nested_program(Batch(max(sizes, default=1)))


def body_input_state(form: Form, state: State) -> State:
    """The state of an input of a body with passes of its own."""
    if isinstance(form, Slice):
        return State(form, materialized=True, model=state.model, places=state.places)
    return State(
        WHOLE,
        zero=state.zero,
        model=state.model,
        examples=state.examples,
        estimated_inside=state.estimated_inside,
        counted_outside=state.counted_outside or (state.estimable and not state.ghost),
    )


def body_output_state(flow: Flow, atom: Atom, carried: bool) -> State:
    """The state in which a body with passes of its own returns a value.

    Args:
      flow: batch flow of the body.
      atom: the output.
      carried: whether the output is a carry.
    """
    state = flow.state(atom)
    estimated_inside = state.estimated_inside or (state.estimated and not carried)
    return dataclasses.replace(
        body_input_state(state.form, state), estimated_inside=estimated_inside, counted_outside=False
    )


def either_state(a: State, b: State) -> State:
    """The join of two states around passes: batched if either is."""
    model, zero = a.model or b.model, a.zero and b.zero
    forms = {state.form for state in (a, b) if isinstance(state.form, Slice)}
    if len(forms) == 1:
        return State(forms.pop(), materialized=True, model=model, places=a.places | b.places)
    return State(
        WHOLE,
        zero=zero,
        model=model,
        examples=a.examples | b.examples,
        estimated_inside=a.estimated_inside or b.estimated_inside,
        counted_outside=a.counted_outside or b.counted_outside,
    )


def scanned_element_state(state: State) -> State:
    """The state of one iteration's element of a scanned array."""
    if isinstance(state.form, Slice):
        places = frozenset(d - 1 for d in state.places if d > 0)
        return dataclasses.replace(state, form=state.form.move(state.form.dim - 1), places=places)
    return dataclasses.replace(state, examples=frozenset(d - 1 for d in state.examples if d > 0))


def stacked_result_state(state: State) -> State:
    """The state of a loop's stacked result, given the state that its body returns."""
    if isinstance(state.form, Slice):
        return dataclasses.replace(state, form=state.form.move(state.form.dim + 1))
    return dataclasses.replace(state, examples=frozenset(d + 1 for d in state.examples))
