"""Partial sums in float16 (or another dtype of small range) -> the equations that must read their completed total.

Knows steps and their forms. Must not know passes, devices or how anything is evaluated.

    s = sum(x: float16);  y = cast(s, float32)      s is completed, and rounded to float16, before the cast

A sum overflows in the dtype that the user gave it. If each node's piece were cast to float32 first, the total would not
overflow, and a step with loss scaling would not be skipped. So casts come after the sum. The same holds of a difference
of two such sums, or a product with one half. If a cast is the last equation of a loop's or branch's body, the total is
rounded to the dtype before the cast once it is complete. Any other use in a body reads the total within the iteration.

A sum outside of loops and branches is completed, too, before it is rounded to fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from vnode.analysis.forms import Partial
from vnode.analysis.states import Flow, Step
from vnode.operators import Algebra


def values_after_sums(flow: Flow, rounded: dict[Var, Any]) -> set[Var]:
    """Partial values that are computed from completed operands: casts of sums, and uses of sums of small range.

    Args:
      flow: batch flow of the program.
      rounded: results of loops and branches, with the dtypes that they are rounded to (`rounded_results`).
    """
    return partial_descendants(
        flow, rounded, lambda step: computes_with_narrow_sum(step) or widens_sum(step) or narrows_sum(step)
    ).difference(rounded)


def partials_to_round_first(flow: Flow) -> set[Var]:
    """Partial values that have no pieces, because a sum must be completed and rounded before they are computed."""
    return partial_descendants(flow, rounded_results(flow), computes_with_narrow_sum)


def partial_descendants(flow: Flow, rounded: Iterable[Var], late: Callable[[Step], bool]) -> set[Var]:
    """`rounded`, partial results of equations for which `late` holds, and partial results computed from them."""
    found = set(rounded)
    for step in flow.steps:
        if step.region is not None or step.location is not None:
            continue
        if late(step) or any(operand in found for operand, _ in partial_operands(step)):
            results = zip(step.eqn.outvars, step.results, strict=True)
            found.update(var for var, form in results if isinstance(form, Partial))
    return found


def rounded_results(flow: Flow) -> dict[Var, Any]:
    """Partial results of loops and branches whose bodies end in a cast from a dtype of smaller range, with that dtype.

    The total of such a result is rounded to that dtype first.
    """
    found: dict[Var, Any] = {}
    for step in flow.steps:
        if step.region is None or step.nested or not step.per_node:
            continue
        for body in step.bodies[step.region.tests :]:
            casts = final_casts(body)
            outputs = zip(step.eqn.outvars, body.program.outputs, strict=True)
            found.update((var, casts[out]) for var, out in outputs if isinstance(out, Var) and out in casts)
    return found


def final_casts(body: Flow) -> dict[Var, Any]:
    """Partial values that a body casts from a dtype of smaller range and then only moves, with that dtype."""
    found = rounded_results(body)
    for step in body.steps:
        operands = [operand for operand, _ in partial_operands(step)]
        types = {found.get(operand) for operand in operands}
        if step.description is None or len(types) != 1:
            continue
        (before,) = types
        if is_cast(step) and before is None:
            now = operands[0].aval.dtype if computes_with_narrow_sum(step) else None
        elif is_cast(step):
            now = before if represents_all(operands[0].aval.dtype, before) else None
        else:
            now = before if only_moves(step) else None
        if now is not None:
            found.update((var, now) for var in step.eqn.outvars)
    return found


def find_unrounded_use(step: Step) -> JaxprEqn | None:
    """An equation in a loop or branch that computes with partial sums of small range; None if there is none.

    It would hide an overflow within an iteration or a branch. A final cast does not, unless its result is a carry, or
    another branch returns something else than zeros.
    """
    assert step.region is not None
    bodies = step.bodies[step.region.tests :]
    casts: dict[Var, Any] = {}
    for body in bodies:
        last = final_casts(body)
        casts |= last
        for inner in body.steps:
            reads = computes_with_narrow_sum(inner) or any(operand in last for operand, _ in partial_operands(inner))
            if reads and (inner.description is None or not last.keys() >= set(inner.eqn.outvars)):
                return inner.eqn
    definitions = {var: eqn for body in bodies for var, eqn in body.program.definitions.items()}
    for k in range(len(step.eqn.outvars)):
        outputs = [body.program.outputs[k] for body in bodies if not body.state(body.program.outputs[k]).zero]
        rounded = [out for out in outputs if isinstance(out, Var) and out in casts]
        alike = len(rounded) == len(outputs) and len({casts[out] for out in rounded}) == 1
        if rounded and (not alike or k < len(step.region.carried)):
            return definitions[rounded[0]]
    return None


def is_narrow(var: Var, form: Partial) -> bool:
    """Whether nodes' pieces of a sum have a dtype of more bits than the sum."""
    return form.dtype(var.aval.dtype) != var.aval.dtype


def may_overflow(var: Var, form: Partial) -> bool:
    """Whether nodes' pieces of a sum have a dtype of larger range than the sum."""
    return is_narrow(var, form) and not represents_all(var.aval.dtype, "bfloat16")


def partial_operands(step: Step) -> list[tuple[Var, Partial]]:
    """The partial operands of an equation, with their forms."""
    return [
        (atom, form)
        for atom, form in zip(step.eqn.invars, step.operands, strict=True)
        if isinstance(atom, Var) and isinstance(form, Partial)
    ]


def computes_with_narrow_sum(step: Step) -> bool:
    """Whether an equation computes with a partial sum of small range (`may_overflow`), rather than move it."""
    return (
        step.description is not None
        and not only_moves(step)
        and any(may_overflow(var, form) for var, form in partial_operands(step))
    )


def only_moves(step: Step) -> bool:
    """Whether an equation returns its elements unchanged, as a move or as a sum over a dimension of size one."""
    description = step.description
    return description is not None and (
        description.has(Algebra.MOVES) or (description.has(Algebra.ADDS) and len(step.eqn.invars) == 1)
    )


def is_cast(step: Step) -> bool:
    """Whether an equation casts its only operand."""
    description = step.description
    return (
        description is not None
        and len(step.eqn.invars) == len(step.eqn.outvars) == 1
        and description.operands == description.results
        and description.widen is not None
    )


def represents_all(wide: Any, narrow: Any) -> bool:
    """Whether a floating-point dtype represents every number of another one."""
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp)


def widens_sum(step: Step) -> bool:
    """Whether a result of an equation has more bits than a partial operand."""
    return any(itemsize(operand) < itemsize(var) for operand, _ in partial_operands(step) for var in step.eqn.outvars)


def narrows_sum(step: Step) -> bool:
    """Whether an equation rounds a partial operand to fewer bits.

    Pieces that are rounded before they are added leave their errors where they cancel.
    """
    bits = [precision(var.aval.dtype) for var, _ in partial_operands(step)]
    return bool(bits) and max(bits) > max((precision(var.aval.dtype) for var in step.eqn.outvars), default=0)


def precision(dtype: Any) -> int:
    """Bits of a floating-point number of a dtype, or of a complex number's part; 0 for other dtypes."""
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.inexact) else 0


def itemsize(atom: Any) -> int:
    return getattr(getattr(atom.aval, "dtype", None), "itemsize", 4)
