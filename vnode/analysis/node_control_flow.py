"""A loop or branch with batched operands -> one step that every node runs on its own examples.

Knows how regions pass values on, and how the forms of carries are found (a fixpoint). Must not know passes: a body that
would need one raises `CoupledInBody`.

    scan over layers: h = tanh(h @ w)      h: batched carry, w: whole      ->   each node scans its own h
"""

from __future__ import annotations

import dataclasses
import functools

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.equation_view import EquationView
from vnode.analysis.forms import VARYING, Partial, Slice, Varying, Whole
from vnode.analysis.low_precision_sums import find_unrounded_use, may_overflow, partials_to_round_first
from vnode.analysis.program import Atom, Program, inline
from vnode.analysis.states import BatchFollower, CoupledInBody, CouplingReason, Flow, State, Step
from vnode.operators import Algebra, Monoid
from vnode.operators.control_flow import Region, region_of

SUM = Partial(Monoid.SUM)


def region_step(follower: BatchFollower, view: EquationView, region: Region) -> Step:
    """The step of a loop or branch that batched values reach.

    Raises:
      CoupledInBody: examples meet inside it.
    """
    partial = {i: atom for i, atom in enumerate(view.eqn.invars) if isinstance(view.forms[i], Partial)}
    late = partials_to_round_first(view.flow) if partial else set()
    view.complete([i for i, atom in partial.items() if i not in region.passed_through or atom in late])
    if region.chooser is not None and isinstance(view.forms[region.chooser], Slice | Varying):
        raise CoupledInBody(view.eqn, CouplingReason.BRANCH)
    if all(isinstance(form, Whole) for form in view.forms):
        return view.evaluate_once()
    programs = [inline(body.jaxpr, body.constants, view.eqn) for body in region.bodies]
    scanned = {form for i in region.scanned if isinstance(form := view.forms[i], Slice) and form.dim == 0}
    if scanned:
        return loop_over_batch(follower, view, region, programs[0], scanned)
    given = inputs_of(view)
    for i in region.scanned:
        form = given[i].form
        if isinstance(form, Slice):
            given[i] = dataclasses.replace(given[i], form=form.move(form.dim - 1))
    carried = list(region.carried)

    def follow(bodies: slice) -> list[Flow]:
        return [
            follower.follow(program, [given[i] for i in inputs], body=True)
            for program, inputs in zip(programs[bodies], region.inputs[bodies], strict=True)
        ]

    def settled(joined: list[State]) -> bool:
        """Updates the carries' states; whether they were the same before."""
        before = [given[i] for i in carried]
        for i, state in zip(carried, joined, strict=True):
            given[i] = state
        return joined == before

    while True:
        flows = follow(slice(region.tests, None))
        after = [
            functools.reduce(lambda a, b: join_states(view.eqn, a, b), states)
            for states in zip(*([flow.state(atom) for atom in flow.program.outputs] for flow in flows), strict=True)
        ]
        if not settled([join_states(view.eqn, given[i], state) for i, state in zip(carried, after, strict=False)]):
            continue
        tests = follow(slice(region.tests))
        forms = [form for test in tests for form in test.output_forms if not isinstance(form, Whole)]
        if any(isinstance(form, Partial) for form in forms):
            raise CoupledInBody(view.eqn, CouplingReason.CONDITION)
        if all(settled([join_states(view.eqn, given[i], State(form)) for i in carried]) for form in forms):
            break
    returned = [*(given[i].form for i in carried), *(state.form for state in after[len(carried) :])]
    for flow in flows:
        flow.output_forms = list(returned)
    for i in carried:
        view.forms[i] = given[i].form
    results = [
        form.move(form.dim + 1) if region.stacks and k >= len(carried) and isinstance(form, Slice) else form
        for k, form in enumerate(returned)
    ]
    step = view.evaluate_per_node(tuple(results), None, region=region, bodies=(*tests, *flows))
    early = find_unrounded_use(step)
    if early is not None:
        raise CoupledInBody(early, CouplingReason.OVERFLOW)
    return step


def inputs_of(view: EquationView) -> list[State]:
    """The states of the bodies' inputs: the forms in which the equation reads its operands, at level 0."""
    return [
        State(form, zero=state.zero, model=state.model) for form, state in zip(view.forms, view.states, strict=True)
    ]


def loop_over_batch(
    follower: BatchFollower, view: EquationView, loop: Region, body: Program, scanned: set[Slice]
) -> Step:
    """The step of a loop over the examples that carries nothing but sums: it is split over nodes.

    Args:
      follower: of the program.
      view: the equation.
      loop: the loop.
      body: its body, with calls inlined.
      scanned: the forms of batched scanned operands.

    Raises:
      CoupledInBody: the loop carries something else from example to example.
    """
    first, split = loop.carried.start, loop.scanned.start
    (form, *others) = scanned
    if others or form.outer != 1 or not divides_turns(follower, form):
        raise CoupledInBody(view.eqn, CouplingReason.SEVERAL)
    for i, other in enumerate(view.forms):
        if i >= split and isinstance(other, Whole):
            view.forms[i] = form
        elif isinstance(other, Slice | Varying) and (i < split or other != form):
            raise CoupledInBody(view.eqn, CouplingReason.READS)
    states = [
        *inputs_of(view)[:split],
        *(State(VARYING, model=view.states[i].model) for i in range(split, len(view.forms))),
    ]
    carries = len(loop.carried)
    for i in range(carries):
        carry, out = body.inputs[first + i], body.outputs[i]
        if out is carry:
            continue
        added = accumulated_values(body, carry, out)
        if not added:
            raise CoupledInBody(view.eqn, CouplingReason.CARRIES)
        follower.sums |= added
        if may_overflow(carry, SUM):
            raise CoupledInBody(view.eqn, CouplingReason.CARRIES)  # it may overflow between two examples
        states[first + i] = State(SUM, model=view.states[first + i].model)
        view.forms[first + i] = SUM
    flow = follower.follow(body, states, body=True)
    ys = flow.output_forms[carries:]
    if any(isinstance(f, Partial | Slice) for f in ys):
        raise CoupledInBody(view.eqn, CouplingReason.READS)
    flow.output_forms[carries:] = [VARYING] * len(ys)
    results = (*view.forms[first:split], *(form for _ in view.eqn.outvars[carries:]))
    return view.evaluate_per_node(results, None, region=loop, bodies=(flow,), over_batch=True)


def divides_turns(follower: BatchFollower, turns: Slice) -> bool:
    """Whether nodes should have turns of their own of a loop over the examples.

    A turn may take several examples, as many as the grain. If there are fewer turns than nodes, and each turn has an
    example for each node, then all nodes together work on each turn.
    """
    shared = turns.grain > 1 and turns.units < follower.nodes <= turns.grain
    takes_several = turns.ratio.denominator > 1
    return not shared and (follower.divides_chunks or not takes_several) and follower.accept(turns)


def accumulated_values(body: Program, carry: Var, out: Atom) -> set[Var]:
    """The values between a carry and its successor, if the body only adds terms to the carry; else an empty set."""
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
        if description is None or not (description.has(Algebra.ADDS) or description.keeps_elements):
            return set()
        if carry.aval.dtype != eqn.outvars[0].aval.dtype:
            return set()
        (carry,) = eqn.outvars
        added.add(carry)
    return added


def join_states(eqn: JaxprEqn, a: State, b: State) -> State:
    """The join of two states: the form that both can be converted to.

    Raises:
      CoupledInBody: there is no such form.
    """
    for form, other in ((a.form, b.form), (b.form, a.form)):
        sums = not isinstance(form, Partial) or form.monoid is Monoid.SUM
        if form != other and not (isinstance(other, Whole) and sums):
            continue
        return State(form, zero=a.zero and b.zero and isinstance(form, Whole), model=a.model or b.model)
    raise CoupledInBody(eqn, CouplingReason.FORMS)
