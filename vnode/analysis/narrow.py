"""Where the whole of a sum is rounded to a narrow type before something else is made of it.

Knows steps and their forms. Must not know passes, devices or how anything is evaluated.

A sum overflows, or wraps around, in the type that the user gave it. Were each node's piece cast to more bits before
they are added, it would not where there are several nodes, and a step that is to be skipped for it would not be. So
the cast comes after the sum, as do a difference of two such sums, or a product with one half, which may be finite
where they are not. Where a cast stands in a loop or branch, whose results are sums of pieces, the whole of a result is
rounded to the narrow type once it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn, Var

from vnode.analysis.forms import Partial
from vnode.analysis.states import Flow, Step


def after_sums(flow: Flow, rounded: dict[Var, Any]) -> set[Var]:
    """Partial values that are made, of a sum that may have overflowed or of one of `rounded`, after it is complete."""
    found = set(rounded)
    for step in flow.steps:
        if step.region is not None or step.location is not None:
            continue
        for var, form in zip(step.eqn.outvars, step.results, strict=True):
            late = overflowing(step) or widening(step, var) or any(o in found for o, _ in partial_operands(step))
            if isinstance(form, Partial) and late:
                found.add(var)
    return found.difference(rounded)


def rounded_results(flow: Flow) -> dict[Var, Any]:
    """Partial results of loops and branches whose bodies make them by casts from sums of fewer bits: of which type.

    What a loop adds up in a carry has gone through several such casts, and is not among them; nor is what a body
    computes after the cast, or what only some branches cast while others return something else than zeros.
    """
    found: dict[Var, Any] = {}
    for step in flow.steps:
        if step.region is None or step.nested or not step.per_node:
            continue
        bodies = step.bodies[step.region.tests :]
        casts = [cast_outputs(body) for body in bodies]
        for k, (var, form) in enumerate(zip(step.eqn.outvars, step.results, strict=True)):
            types = {
                made[k]  # what is zero is so in any type
                for made, body in zip(casts, bodies, strict=True)
                if not body.state(body.program.outputs[k]).zero
            }
            if isinstance(form, Partial) and k >= len(step.region.carried) and len(types) == 1 and types != {None}:
                (found[var],) = types
    return found


def cast_outputs(body: Flow) -> list[Any]:
    """Of each output of a body the type with fewer bits that it was cast from as a sum of pieces; None for others."""
    found = rounded_results(body)
    for step in body.steps:
        operands = partial_operands(step)
        if step.description is None or step.location is not None or len(operands) != 1:
            continue
        ((operand, _),) = operands
        for var in step.eqn.outvars:
            if operand in found and step.description.movement:
                found[var] = found[operand]
            elif widening(step, var):
                found[var] = operand.aval.dtype
    return [found.get(atom) if isinstance(atom, Var) else None for atom in body.program.outputs]


def unrounded(flow: Flow) -> Iterator[JaxprEqn]:
    """What a loop or branch computes with sums of few bits, or of what it casts them to, before they are rounded.

    An overflow that would show there does not, unless the result overflows as well.
    """
    for step in flow.steps:
        if step.region is None or step.nested or not step.per_node:
            continue
        for body in step.bodies[step.region.tests :]:
            cast: set[Var] = set()
            for inner in body.steps:
                operands = [var for var, form in partial_operands(inner) if var in cast or is_narrow(var, form)]
                if not operands or inner.description is None:
                    continue
                if inner.description.movement or any(widening(inner, var) for var in inner.eqn.outvars):
                    cast.update(inner.eqn.outvars)
                else:
                    yield inner.eqn
            yield from unrounded(body)


def is_narrow(var: Var, form: Partial) -> bool:
    """Whether nodes' pieces of a sum are of a type of larger range than the sum."""
    return form.dtype(var.aval.dtype) != var.aval.dtype


def partial_operands(step: Step) -> list[tuple[Var, Partial]]:
    """What an equation reads in pieces."""
    return [
        (atom, form)
        for atom, form in zip(step.eqn.invars, step.operands, strict=True)
        if isinstance(atom, Var) and isinstance(form, Partial)
    ]


def overflowing(step: Step) -> bool:
    """Whether an equation computes with sums of a type of smaller range than that of the nodes' pieces of them."""
    return (
        step.description is not None
        and not step.description.movement
        and any(is_narrow(var, form) for var, form in partial_operands(step))
    )


def widening(step: Step, var: Var) -> bool:
    """Whether an equation makes a result of a sum of fewer bits."""
    return any(itemsize(operand) < itemsize(var) for operand, _ in partial_operands(step))


def itemsize(atom: Any) -> int:
    return getattr(getattr(atom.aval, "dtype", None), "itemsize", 4)
