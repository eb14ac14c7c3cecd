"""Loops and branches -> parts of a compiled program.

Knows jax's control flow, and how a loop reads outer values. Must not know what bodies compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from vnode.operators.control_flow import Loop, Run, bind_while


def as_array(value: Any, like: Any) -> Any:
    """Gives a Python or NumPy scalar the dtype of `like`, as an array."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value, dtype=like.aval.dtype)


class InProgram:
    """Runs loops and branches as jax does, as part of a program.

    Args:
      eqn: the loop or branch.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        self._eqn = eqn

    def scan(self, body: Callable[[Any, Any], Any], carry: list[Any], xs: list[Any], loop: Loop) -> Any:
        return lax.scan(body, carry, xs, loop.length, loop.reverse, loop.unroll)

    def repeat(
        self, condition: Run, body: Run, condition_constants: list[Any], constants: list[Any], carry: list[Any]
    ) -> list[Any]:
        test, test_constants = closed(lambda *values: condition(list(values))[0], condition_constants, carry)
        turn, turn_constants = closed(lambda *values: body(list(values)), constants, carry)
        final = bind_while(self._eqn, test, turn, test_constants, turn_constants, jax.tree.leaves(carry))
        return jax.tree.unflatten(jax.tree.structure(carry), final)

    def switch(self, index: Any, branches: Sequence[Run], operands: list[Any]) -> list[Any]:
        return lax.switch(index, branches, operands)


def closed(run: Callable[..., Any], constants: list[Any], carry: list[Any]) -> tuple[Any, list[Any]]:
    """Traces a part of a loop to a closed jaxpr of its constants and the carry; also returns these constants.

    The given constants come last: captured outer values, such as the node's number, become constants too.
    """
    made = jax.make_jaxpr(run)(*constants, *carry)
    given, state = jax.tree.leaves(constants), jax.tree.leaves(carry)
    if made.consts:

        def lifted(around: list[Any], *values: Any) -> list[Any]:
            return jaxpr_as_fun(made.replace(consts=around))(*values)

        return jax.make_jaxpr(lifted)(list(made.consts), *given, *state), [*made.consts, *given]
    return made, given
