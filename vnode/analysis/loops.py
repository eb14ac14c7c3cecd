"""Loops and branches that every node runs on its own examples.

Knows how regions pass values on, and how the forms of carries are found (a fixpoint). Must not know passes: what would
need one inside a body raises `Coupled`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.forms import VARYING, Form, Partial, Slice, Varying, Whole
from vnode.analysis.program import Atom, Program, inline
from vnode.analysis.states import Coupled, Flow, Follows, State, Step, Why
from vnode.analysis.view import View
from vnode.operators import Monoid
from vnode.operators.control import Branches, Loop, Region, While, region_of


def region_step(follower: Follows, view: View, region: Region) -> Step:
    """Decides about a loop or branch that batched values reach.

    Raises:
      Coupled: examples meet inside it.
    """
    match region:
        case Loop():
            return loop_step(follower, view, region)
        case While():
            return while_step(follower, view, region)
        case _:
            return branch_step(follower, view, region)


def inputs_of(follower: Follows, view: View, positions: Iterable[int]) -> list[State]:
    """States of a body's inputs: as the equation reads its operands, all available from the start."""
    return [State(view.forms[i], zero=view.states[i].zero, model=view.states[i].model) for i in positions]


def loop_step(follower: Follows, view: View, loop: Loop) -> Step:
    first, split = loop.constants, loop.constants + loop.carries
    count = len(view.forms)
    view.complete([i for i in range(count) if isinstance(view.forms[i], Partial) and not first <= i < split])
    if all(isinstance(form, Whole) for form in view.forms):
        return view.once()
    body = inline(loop.body.jaxpr, loop.body.constants, view.eqn)
    scanned = {form for form in view.forms[split:] if isinstance(form, Slice) and form.dim == 0}
    if scanned:
        return loop_over_batch(follower, view, loop, body, scanned)
    xs = [
        dataclasses.replace(s, form=s.form.move(s.form.dim - 1)) if isinstance(s.form, Slice) else s
        for s in inputs_of(follower, view, range(split, count))
    ]
    constants = inputs_of(follower, view, range(first))
    carries = inputs_of(follower, view, range(first, split))
    carries, flow = fixpoint(
        follower,
        view.eqn,
        carries,
        lambda states: follower.follow(body, [*constants, *states, *xs], body=True),
        loop.carries,
    )
    forms = [state.form for state in carries]
    results: list[Form] = [
        *forms,
        *(form.move(form.dim + 1) if isinstance(form, Slice) else form for form in flow.output_forms[loop.carries :]),
    ]
    flow.output_forms = [*forms, *flow.output_forms[loop.carries :]]
    view.forms[first:split] = forms
    return view.per_node(tuple(results), None, region=loop, bodies=(flow,))


def fixpoint(
    follower: Follows, eqn: JaxprEqn, carries: list[State], follow: Callable[[list[State]], Flow], count: int
) -> tuple[list[State], Flow]:
    """Follows a body until its carries keep their forms."""
    while True:
        flow = follow(carries)
        joined = [
            join(eqn, carry, flow.state(atom))
            for carry, atom in zip(carries, flow.program.outputs[:count], strict=True)
        ]
        if joined == carries:
            return carries, flow
        carries = joined


def loop_over_batch(follower: Follows, view: View, loop: Loop, body: Program, scanned: set[Slice]) -> Step:
    """A loop that takes the examples one after another, without passing anything on, is a plain split."""
    first, split = loop.constants, loop.constants + loop.carries
    (form, *others) = scanned
    if others or form.outer != 1 or form.ratio.denominator != 1:
        raise Coupled(view.eqn, Why.SEVERAL)
    for i, other in enumerate(view.forms):
        if i >= split and isinstance(other, Whole):
            view.forms[i] = form
        elif isinstance(other, Slice | Varying) and (i < split or other != form):
            raise Coupled(view.eqn, Why.READS)
    states = [
        *inputs_of(follower, view, range(split)),
        *(State(VARYING, model=view.states[i].model) for i in range(split, len(view.forms))),
    ]
    for i in range(loop.carries):
        carry, out = body.inputs[first + i], body.outputs[i]
        if out is carry:
            continue
        added = added_up(body, carry, out)
        if not added:
            raise Coupled(view.eqn, Why.CARRIES)
        follower.sums |= added
        states[first + i] = State(Partial(Monoid.SUM), model=view.states[first + i].model)
        view.forms[first + i] = Partial(Monoid.SUM)
    flow = follower.follow(body, states, body=True)
    ys = flow.output_forms[loop.carries :]
    if any(isinstance(f, Partial | Slice) for f in ys):
        raise Coupled(view.eqn, Why.READS)
    flow.output_forms[loop.carries :] = [VARYING] * len(ys)
    results = (*view.forms[first:split], *(form for _ in view.eqn.outvars[loop.carries :]))
    return view.per_node(results, None, region=loop, bodies=(flow,), over_batch=True)


def while_step(follower: Follows, view: View, loop: While) -> Step:
    first = loop.condition_constants + loop.body_constants
    count = len(view.forms)
    view.complete([i for i in range(first) if isinstance(view.forms[i], Partial)])
    if all(isinstance(form, Whole) for form in view.forms):
        return view.once()
    body = inline(loop.body.jaxpr, loop.body.constants, view.eqn)
    condition = inline(loop.condition.jaxpr, loop.condition.constants, view.eqn)
    condition_constants = inputs_of(follower, view, range(loop.condition_constants))
    constants = inputs_of(follower, view, range(loop.condition_constants, first))
    carries = inputs_of(follower, view, range(first, count))
    while True:
        carries, flow = fixpoint(
            follower,
            view.eqn,
            carries,
            lambda states: follower.follow(body, [*constants, *states], body=True),
            len(carries),
        )
        test = follower.follow(condition, [*condition_constants, *carries], body=True)
        (form,) = test.output_forms
        if isinstance(form, Whole):
            break
        if isinstance(form, Partial):
            raise Coupled(view.eqn, Why.CONDITION)
        if isinstance(form, Varying):
            joined = [join(view.eqn, state, State(VARYING)) for state in carries]
        else:
            joined = [join(view.eqn, state, State(form)) for state in carries]
        if joined == carries:
            break
        carries = joined
    forms = tuple(state.form for state in carries)
    flow.output_forms = list(forms)
    view.forms[first:] = forms
    return view.per_node(forms, None, region=loop, bodies=(test, flow))


def branch_step(follower: Follows, view: View, branches: Branches) -> Step:
    view.complete([0] if isinstance(view.forms[0], Partial) else [])
    if isinstance(view.forms[0], Slice | Varying):
        raise Coupled(view.eqn, Why.BRANCH)
    if all(isinstance(form, Whole) for form in view.forms):
        return view.once()
    inputs = inputs_of(follower, view, range(1, len(view.forms)))
    flows = [
        follower.follow(inline(body.jaxpr, body.constants, view.eqn), inputs, body=True) for body in branches.bodies
    ]
    joined = [flows[0].state(atom) for atom in flows[0].program.outputs]
    for flow in flows[1:]:
        joined = [
            join(view.eqn, state, flow.state(atom)) for state, atom in zip(joined, flow.program.outputs, strict=True)
        ]
    forms = tuple(state.form for state in joined)
    for flow in flows:
        flow.output_forms = list(forms)
    return view.per_node(forms, None, region=branches, bodies=tuple(flows))


def added_up(body: Program, carry: Var, out: Atom) -> set[Var]:
    """The values between a carry and its successor, if terms that do not depend on it are merely added to it."""
    users: dict[Var, list[JaxprEqn]] = {}
    for eqn in body.equations:
        for atom in eqn.invars:
            if isinstance(atom, Var):
                users.setdefault(atom, []).append(eqn)
    added: set[Var] = set()
    while carry is not out:
        if len(users.get(carry, ())) != 1 or carry in body.outputs:
            return set()
        (eqn,) = users[carry]
        description = body.describe(eqn) if region_of(eqn) is None else None
        if description is None or not description.adds:
            return set()
        (carry,) = eqn.outvars
        added.add(carry)
    return added


def join(eqn: JaxprEqn, a: State, b: State) -> State:
    """The state of a value that is sometimes `a` and sometimes `b`: the form that both can be brought to."""
    zero, model = a.zero and b.zero, a.model or b.model
    for form, other, is_zero in ((a.form, b.form, b.zero), (b.form, a.form, a.zero)):
        if form == other or isinstance(other, Whole):
            if isinstance(form, Partial) and form.monoid is not Monoid.SUM and form != other and not is_zero:
                break
            if isinstance(form, Partial) and form.monoid is not Monoid.SUM and form != other:
                break
            return State(form, zero=zero and isinstance(form, Whole), model=model)
    raise Coupled(eqn, Why.FORMS)
