"""How often a ``while`` loop turns, where its condition compares a count with a limit.

Knows how integers are compared and added. Must not know what the loop computes.

A loop's condition may ask anything, and in general nobody knows how often it turns. But most count: from a number that
is written down, by a step that is written down, to a limit that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

COMPARED = {"lt": (1, 0), "le": (1, 1), "gt": (-1, 0), "ge": (-1, 1)}
"""For each comparison of a count with a limit: the direction in which it counts; whether the limit itself counts."""

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def find_trip_count(condition: Jaxpr, body: Jaxpr, operands: Sequence[Any], constants: tuple[int, int]) -> int | None:
    """How often a loop turns, or None if that is not written down.

    Args:
      condition: jaxpr of its constants and the carry.
      body: jaxpr of its own constants and the carry.
      operands: of the loop: both sets of constants, then the initial carry.
      constants: how many of them the condition has, and the body.
    """
    for_condition, for_body = constants
    carry = for_condition + for_body
    compared = definition(condition, condition.outvars[0])
    if compared is None or compared.primitive.name not in COMPARED:
        return None

    def initial(atom: Any) -> tuple[int | None, int | None]:
        """What an operand of the comparison is at first, and its place in the carry."""
        if isinstance(atom, Literal) or atom not in condition.invars:
            return number(atom), None
        at = condition.invars.index(atom) - for_condition
        return number(operands[carry + at if at >= 0 else at + for_condition]), at if at >= 0 else None

    def step(at: int | None) -> int | None:
        """What a turn adds to a number that is carried."""
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
    if second_step != 0:  # the count stands on the right
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
    return count if range_of_type.min <= last <= range_of_type.max else None  # it would begin anew at the other end


def definition(jaxpr: Jaxpr, atom: Any) -> JaxprEqn | None:
    """The equation that defines a variable; None for what comes from outside."""
    return next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)


def origin(jaxpr: Jaxpr, atom: Any) -> Any:
    """What a number is a copy of: jax writes conversions from a type to itself."""
    eqn = definition(jaxpr, atom)
    if eqn is None or eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != atom.aval.dtype:
        return atom
    return origin(jaxpr, eqn.invars[0])


def number(atom: Any) -> int | None:
    """An integer that is written down."""
    if not isinstance(atom, Literal) or np.ndim(atom.val) or not np.issubdtype(np.asarray(atom.val).dtype, np.integer):
        return None
    return int(atom.val)
