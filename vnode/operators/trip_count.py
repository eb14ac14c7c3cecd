"""``while`` loop -> its trip count, if its condition compares a counter with a limit.

Knows how integers are compared and added. Must not know what the loop computes.

A condition may be anything, and in general the trip count is unknown. But most loops count: from a constant, by a
constant step, to a constant limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

COMPARED = {"lt": (1, 0), "le": (1, 1), "gt": (-1, 0), "ge": (-1, 1)}
"""For each comparison of a counter with a limit: the direction of counting; whether the limit itself is included."""

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def find_trip_count(condition: Jaxpr, body: Jaxpr, operands: Sequence[Any], constants: tuple[int, int]) -> int | None:
    """The trip count of a loop, or None if it is unknown.

    Args:
      condition: jaxpr of its constants and the carry.
      body: jaxpr of its own constants and the carry.
      operands: the loop's operands: both sets of constants, then the initial carry.
      constants: the numbers of constants of the condition and of the body.
    """
    for_condition, for_body = constants
    carry = for_condition + for_body
    compared = definition(condition, condition.outvars[0])
    if compared is None or compared.primitive.name not in COMPARED:
        return None

    def initial(atom: Any) -> tuple[int | None, int | None]:
        """The initial value of a comparison's operand, and its position in the carry."""
        if isinstance(atom, Literal) or atom not in condition.invars:
            return number(atom), None
        at = condition.invars.index(atom) - for_condition
        return number(operands[carry + at if at >= 0 else at + for_condition]), at if at >= 0 else None

    def step(at: int | None) -> int | None:
        """The increment of a carried number per iteration."""
        if at is None:
            return 0
        out, mine = origin(body, body.outvars[at]), body.invars[for_body + at]
        if out is mine:
            return 0
        eqn = definition(body, out)
        if eqn is None or eqn.primitive.name not in ("add", "sub"):
            return None
        first, second = (origin(body, atom) for atom in eqn.invars)
        if eqn.primitive.name == "sub":
            added = number(second) if first is mine else None
            return None if added is None else -added
        return number(second) if first is mine else number(first) if second is mine else None

    (first, first_at), (second, second_at) = (initial(origin(condition, atom)) for atom in compared.invars)
    if first is None or second is None:
        return None
    first_step, second_step, name = step(first_at), step(second_at), compared.primitive.name
    if second_step != 0:  # the counter is the right operand
        first, second, first_step, second_step, name = second, first, second_step, first_step, MIRRORED[name]
    direction, inclusive = COMPARED[name]
    distance = (second - first) * direction + inclusive
    if distance <= 0:
        return 0
    if second_step != 0 or first_step is None or first_step * direction <= 0:
        return None
    count = -(-distance // abs(first_step))
    range_of_type = np.iinfo(compared.invars[0].aval.dtype)
    last = first + count * first_step
    return count if range_of_type.min <= last <= range_of_type.max else None  # it would overflow


def definition(jaxpr: Jaxpr, atom: Any) -> JaxprEqn | None:
    """The equation that defines a variable; None for inputs."""
    return next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)


def origin(jaxpr: Jaxpr, atom: Any) -> Any:
    """The source of a number: jax writes conversions from a type to itself."""
    eqn = definition(jaxpr, atom)
    if eqn is None or eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != atom.aval.dtype:
        return atom
    return origin(jaxpr, eqn.invars[0])


def number(atom: Any) -> int | None:
    """A constant integer."""
    if not isinstance(atom, Literal) or np.ndim(atom.val) or not np.issubdtype(np.asarray(atom.val).dtype, np.integer):
        return None
    return int(atom.val)
