"""A jaxpr with references (`jax.new_ref`) -> one without: arrays mutated in place become values that are passed on.

Knows how references get into calls, loops and branches. Must not know batches, nor which primitives read and write.

    r = new_ref(x);  for i: r[...] += f(i)   ->   for i, carry x: x = x + f(i)

jax does the same before it compiles. vnode does it before batch flow, so that forms and partial sums hold for
references too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from vnode.analysis.program import bind, context_of, message_about
from vnode.errors import UnsupportedPrimitiveError
from vnode.operators.control_flow import Body, Branches, Loop, While, call_of, region_of
from vnode.operators.references import access_of, initial_content, is_reference


class Reference:
    """The present value of an array that is mutated in place."""

    def __init__(self, held: Any) -> None:
        self.value = held


def discharge_references(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites a program without references.

    Args:
      closed: any closed jaxpr.

    Returns:
      The rewritten program, whose last arguments are the constants that jax is tracing. `closed` itself if it has no
      references, or if a reference comes from outside: its owner must see the writes.

    Raises:
      UnsupportedPrimitiveError: a reference is returned, or used by a primitive that vnode does not know.
    """
    outside = any(map(is_reference, (*closed.jaxpr.invars, *closed.jaxpr.constvars)))
    if outside or not has_references(closed.jaxpr, {}):
        return closed

    def run(*values: Any) -> list[Any]:
        return evaluate(Body(closed.jaxpr, tuple(closed.consts)), values)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(run)(*avals)


def has_references(jaxpr: Jaxpr, known: dict[int, bool]) -> bool:
    """Whether a jaxpr, or a body in it, makes or takes a reference.

    Args:
      jaxpr: the jaxpr.
      known: the answers so far, by the jaxprs' ids.
    """
    key = id(jaxpr)
    if key not in known:
        known[key] = any(map(is_reference, (*jaxpr.invars, *jaxpr.constvars))) or any(
            any(map(is_reference, eqn.outvars)) or any(has_references(body.jaxpr, known) for body in bodies_of(eqn))
            for eqn in jaxpr.eqns
        )
    return known[key]


def bodies_of(eqn: JaxprEqn) -> list[Body]:
    """The bodies of a call, loop or branch."""
    call, region = call_of(eqn), region_of(eqn)
    if call is not None:
        return [call.body]
    return [] if region is None else list(region.bodies)


def evaluate(body: Body, values: Sequence[Any]) -> list[Any]:
    """Evaluates a body. Operands may be `Reference`s, which it may write."""
    env: dict[Var, Any] = dict(zip(body.jaxpr.constvars, body.constants, strict=True))
    env.update(zip(body.jaxpr.invars, values, strict=True))
    for eqn in body.jaxpr.eqns:
        operands = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
        for atom, value in zip(eqn.invars, operands, strict=True):
            if is_reference(atom) and not isinstance(value, Reference):
                raise reference_error(eqn, "it was made outside of the step")
        with context_of(eqn):
            results = evaluate_equation(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [a.val if isinstance(a, Literal) else env[a] for a in body.jaxpr.outvars]


def evaluate_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluates an equation, whose operands may be `Reference`s."""
    held = initial_content(eqn, operands)
    if held is not None:
        return [Reference(jnp.asarray(held))]
    access = access_of(eqn)
    if access is not None:
        reference, *others = operands
        try:
            reference.value, results = access(eqn, reference.value, others)
        except NotImplementedError as error:
            raise reference_error(eqn, str(error)) from error
        return results
    passed = [value for value in operands if isinstance(value, Reference)]
    known: dict[int, bool] = {}
    if not passed and not any(has_references(body.jaxpr, known) for body in bodies_of(eqn)):
        return bind(eqn, operands)
    call = call_of(eqn)
    if call is not None:
        return evaluate(call.body, [operands[i] for i in call.operands])
    match region_of(eqn):
        case Loop() as loop:
            return evaluate_loop(loop, operands, passed)
        case While() as loop if not loop.bodies[0].jaxpr.outvars[0].aval.shape:
            return evaluate_while(loop, operands, passed)
        case Branches() as branches:
            return evaluate_branches(branches, operands, passed)
    raise reference_error(eqn, f"{eqn.primitive.name!r} takes it")


def reference_error(eqn: JaxprEqn, why: str) -> UnsupportedPrimitiveError:
    """The error for a reference that cannot be followed; `why` completes its first sentence."""
    return UnsupportedPrimitiveError(
        message_about(
            eqn,
            f"vnode cannot follow an array that is mutated in place: {why}.",
            remedies=["use x.at[...].set(...) or a carry of the loop", "or make the array in the step: jax.new_ref(x)"],
        )
    )


def store_values(passed: Sequence[Reference], values: Sequence[Any]) -> None:
    """Stores new values in references."""
    for reference, value in zip(passed, values, strict=True):
        reference.value = value


def substitute_references(operands: Sequence[Any], passed: Sequence[Reference], values: Sequence[Any]) -> list[Any]:
    """New references that hold `values`, followed by the operands, in which they replace those of `passed`."""
    new = {id(old): Reference(value) for old, value in zip(passed, values, strict=True)}
    return [*new.values(), *(new.get(id(value), value) for value in operands)]


def evaluate_loop(loop: Loop, operands: list[Any], passed: list[Reference]) -> list[Any]:
    """Evaluates a scan. The contents of its references, `passed`, become further carries."""
    first, split = loop.constants, loop.constants + loop.carries
    count = len(passed)

    def turn(carry: Any, xs: Any) -> Any:
        inside = substitute_references(operands[:first], passed, carry[0])
        out = evaluate(loop.bodies[0], [*inside[count:], *carry[1], *xs])
        return ([r.value for r in inside[:count]], out[: loop.carries]), out[loop.carries :]

    init = [r.value for r in passed], [jnp.asarray(value) for value in operands[first:split]]
    (held, carries), ys = lax.scan(turn, init, operands[split:], loop.length, loop.reverse, loop.unroll)
    store_values(passed, held)
    return [*carries, *ys]


def evaluate_while(loop: While, operands: list[Any], passed: list[Reference]) -> list[Any]:
    """Evaluates a ``while``. The contents of its references, `passed`, become further carries."""
    split = loop.condition_constants
    first = split + loop.body_constants
    count = len(passed)

    def test(carry: Any) -> Any:
        inside = substitute_references(operands[:split], passed, carry[0])
        return evaluate(loop.bodies[0], [*inside[count:], *carry[1]])[0]

    def turn(carry: Any) -> Any:
        inside = substitute_references(operands[split:first], passed, carry[0])
        out = evaluate(loop.bodies[1], [*inside[count:], *carry[1]])
        return [r.value for r in inside[:count]], out

    init = [r.value for r in passed], [jnp.asarray(value) for value in operands[first:]]
    held, carries = lax.while_loop(test, turn, init)
    store_values(passed, held)
    return carries


def evaluate_branches(branches: Branches, operands: list[Any], passed: list[Reference]) -> list[Any]:
    """Evaluates a branch. The contents of its references, `passed`, become further operands and results."""
    count = len(passed)
    given = [i for i, value in enumerate(operands[1:]) if not isinstance(value, Reference)]

    def branch(body: Body) -> Any:
        def run(held: list[Any], values: list[Any]) -> Any:
            all_operands = list(operands[1:])
            for i, value in zip(given, values, strict=True):
                all_operands[i] = value
            inside = substitute_references(all_operands, passed, held)
            out = evaluate(body, inside[count:])
            return [r.value for r in inside[:count]], out

        return run

    held, out = lax.switch(
        operands[0],
        [branch(body) for body in branches.bodies],
        [r.value for r in passed],
        [operands[1 + i] for i in given],
    )
    store_values(passed, held)
    return out
