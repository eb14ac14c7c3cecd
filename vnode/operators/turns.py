"""How often a ``while`` loop turns, where its condition compares a count with a limit.

Knows the comparisons and the addition of integers. Must not know what the loop computes.

A loop's condition may ask anything, and in general nobody knows how often it turns. But most count: from a number that
is written down, by a step that is written down, to a limit that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

COMPARED = {"lt": (1, 0), "le": (1, 1), "gt": (-1, 0), "ge": (-1, 1)}
"""For each comparison of a count with a limit: the direction in which it counts; whether the limit itself counts."""

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def turns(condition: Jaxpr, body: Jaxpr, operands: Sequence[Any], constants: tuple[int, int]) -> int | None:
    """How often a loop turns, or None if that is not written down.

    Args:
      condition: jaxpr of its constants and the carry.
      body: jaxpr of its own constants and the carry.
      operands: of the loop: both sets of constants, then the initial carry.
      constants: how many of them the condition has, and the body.
    """
    for_condition, for_body = constants
    carry = for_condition + for_body
    (answer,) = condition.outvars
    made = [eqn for eqn in condition.eqns if answer in eqn.outvars]
    if len(made) != 1 or made[0].primitive.name not in COMPARED:
        return None

    def initial(atom: Any) -> tuple[int | None, int | None]:
        """What an operand of the comparison is at first, and its place in the carry."""
        if isinstance(atom, Literal):
            return number(atom), None
        if atom not in condition.invars:
            return None, None
        at = condition.invars.index(atom) - for_condition
        return number(operands[carry + at if at >= 0 else at + for_condition]), at if at >= 0 else None

    def step(at: int | None) -> int | None:
        """What a turn adds to a number that is carried."""
        if at is None:
            return 0
        out, mine = body.outvars[at], body.invars[for_body + at]
        if out is mine:
            return 0
        for eqn in body.eqns:
            if out in eqn.outvars and eqn.primitive.name in ("add", "sub") and eqn.invars[0] is mine:
                added = number(eqn.invars[1])
                return added if added is None or eqn.primitive.name == "add" else -added
        return None

    (first, first_at), (second, second_at) = map(initial, made[0].invars)
    first_step, second_step = step(first_at), step(second_at)
    if first is None or second is None or first_step is None or second_step is None:
        return None
    name = made[0].primitive.name
    if second_step:  # the count stands on the right
        first, second, first_step, second_step, name = second, first, second_step, first_step, MIRRORED[name]
    direction, inclusive = COMPARED[name]
    if second_step or first_step * direction <= 0:
        return None
    distance = (second - first) * direction + inclusive
    return max(0, -(-distance // abs(first_step)))


def number(atom: Any) -> int | None:
    """An integer that is written down."""
    if (
        not isinstance(atom, Literal)
        or isinstance(atom, Var)
        or np.ndim(atom.val)
        or not np.issubdtype(np.asarray(atom.val).dtype, np.integer)
    ):
        return None
    return int(atom.val)
