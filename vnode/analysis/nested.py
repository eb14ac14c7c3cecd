"""Loops and branches in which examples meet: evaluated once, around passes of their own in their bodies.

Knows how regions pass values on. Inside such a body levels start again at 0, and a batched value exists for all nodes
at once. Must not know how passes are scheduled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from vnode.analysis.forms import WHOLE, Batch, Partial, Slice, Varying
from vnode.analysis.program import Atom, Program, inline
from vnode.analysis.states import Flow, Follows, State, Step, Why
from vnode.analysis.view import View
from vnode.operators.control import Body, Branches, Loop, Region, While


def nested_step(follower: Follows, view: View, region: Region) -> Step:
    """A loop or branch in which examples meet: evaluated once, with passes of its own in its bodies."""
    if view.body:
        return view.once()
    view.complete([i for i, form in enumerate(view.forms) if isinstance(form, Partial | Varying)])
    match region:
        case Loop():
            return nested_loop(follower, view, region)
        case While():
            return nested_while(follower, view, region)
        case _:
            return nested_branches(follower, view, region)


def body_flows(follower: Follows, view: View, bodies: Sequence[Body], inputs: Sequence[Sequence[State]]) -> list[Flow]:
    """Batch flow of bodies that have passes of their own; levels start again at 0."""
    flows = []
    for body, states in zip(bodies, inputs, strict=True):
        program = inline(body.jaxpr, body.constants, view.eqn)
        flows.append(inner(follower, states, program).follow(program, states))
    return flows


def inner(follower: Follows, states: Sequence[State], program: Program) -> Follows:
    """Who follows a body with passes of its own: with a batch of its own if it is not given this one."""
    given = {state.form.batch for state in states if isinstance(state.form, Slice)}
    if given:
        (batch,) = given
        return follower.anew(None if batch == follower.batch else batch)
    sizes = [var.aval.shape[d] for var, state in zip(program.inputs, states, strict=True) for d in state.examples]
    return follower.anew(Batch(max(sizes, default=1)))


def outside(follower: Follows, view: View, positions: Iterable[int]) -> list[State]:
    """States of the inputs of a body with passes of its own."""
    states = []
    for i in positions:
        form, state = view.forms[i], view.states[i]
        if isinstance(form, Slice):
            states.append(State(form, given=True, model=state.model))
        else:
            states.append(State(WHOLE, zero=state.zero, model=state.model, examples=state.examples))
    return states


def nested_loop(follower: Follows, view: View, loop: Loop) -> Step:
    first, split = loop.constants, loop.constants + loop.carries
    for i, form in enumerate(view.forms):
        if i >= split and isinstance(form, Slice) and form.dim == 0:
            view.materialize([i], Why.IN_ORDER)
    constants, carries, xs = (
        outside(follower, view, positions)
        for positions in (range(first), range(first, split), range(split, len(view.forms)))
    )
    xs = [inside(state) for state in xs]
    while True:
        (flow,) = body_flows(follower, view, [loop.body], [[*constants, *carries, *xs]])
        after = [meet(flow, atom) for atom in flow.program.outputs]
        joined = [either(carry, state) for carry, state in zip(carries, after[: loop.carries], strict=True)]
        if joined == carries:
            break
        carries = joined
    view.forms[first:split] = [state.form for state in carries]
    results = [*carries, *(behind(state) for state in after[loop.carries :])]
    flow.output_forms = [*(s.form for s in carries), *(s.form for s in after[loop.carries :])]
    return view.nested(loop, (flow,), results)


def nested_while(follower: Follows, view: View, loop: While) -> Step:
    split = loop.condition_constants
    first = split + loop.body_constants
    tested, constants, carries = (
        outside(follower, view, positions)
        for positions in (range(split), range(split, first), range(first, len(view.forms)))
    )
    while True:
        test, flow = body_flows(
            follower, view, [loop.condition, loop.body], [[*tested, *carries], [*constants, *carries]]
        )
        after = [meet(flow, atom) for atom in flow.program.outputs]
        joined = [either(carry, state) for carry, state in zip(carries, after, strict=True)]
        if joined == carries:
            break
        carries = joined
    view.forms[first:] = [state.form for state in carries]
    flow.output_forms = [state.form for state in carries]
    return view.nested(loop, (test, flow), carries)


def nested_branches(follower: Follows, view: View, branches: Branches) -> Step:
    view.materialize([0], Why.BRANCH)
    inputs = outside(follower, view, range(1, len(view.forms)))
    flows = body_flows(follower, view, branches.bodies, [inputs] * len(branches.bodies))
    results = [meet(flows[0], atom) for atom in flows[0].program.outputs]
    for flow in flows[1:]:
        results = [either(state, meet(flow, atom)) for state, atom in zip(results, flow.program.outputs, strict=True)]
    for flow in flows:
        flow.output_forms = [state.form for state in results]
    return view.nested(branches, tuple(flows), results)


def meet(flow: Flow, atom: Atom) -> State:
    """The state in which a body with passes of its own returns a value."""
    state = flow.state(atom)
    if isinstance(state.form, Slice):
        return State(state.form, given=True, model=state.model)
    return State(WHOLE, zero=state.zero, model=state.model, examples=state.examples)


def either(a: State, b: State) -> State:
    """The state of a value around passes that is sometimes `a` and sometimes `b`: batched if either is."""
    model, zero = a.model or b.model, a.zero and b.zero
    forms = {state.form for state in (a, b) if isinstance(state.form, Slice)}
    if len(forms) == 1:
        return State(forms.pop(), given=True, model=model)
    return State(WHOLE, zero=zero, model=model, examples=a.examples | b.examples)


def inside(state: State) -> State:
    """The state of a scanned array inside the loop's body."""
    if isinstance(state.form, Slice):
        return dataclasses.replace(state, form=state.form.move(state.form.dim - 1))
    return dataclasses.replace(state, examples=frozenset(d - 1 for d in state.examples if d > 0))


def behind(state: State) -> State:
    """The state of a stacked result of a loop whose body returns `state`."""
    if isinstance(state.form, Slice):
        return dataclasses.replace(state, form=state.form.move(state.form.dim + 1))
    return dataclasses.replace(state, examples=frozenset(d + 1 for d in state.examples))
