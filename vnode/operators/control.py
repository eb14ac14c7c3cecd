"""Equations that hold other jaxprs: calls to inline, and loops and branches to keep as regions.

Knows the parameter names of jax's higher-order primitives in every supported version. Must not know what is done with
the regions. Everything else asks `call_of` and `region_of` and sees plain data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr and the values of its constants."""

    jaxpr: Jaxpr
    constants: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """An equation that means its body applied to some of its operands.

    Attributes:
      body: what is called.
      operands: the positions of the operands that are passed, in order.
      barrier: whether the body must not be merged with equal computations outside (rematerialization).
      custom_derivative: whether the equation carries a derivative rule that the body does not have.
      reverse_only: whether that rule is for reverse mode only.
    """

    body: Body
    operands: tuple[int, ...]
    barrier: bool = False
    custom_derivative: bool = False
    reverse_only: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """``scan``: operands are constants, initial carries, then arrays that are sliced along dimension 0."""

    body: Body
    constants: int
    carries: int
    length: int
    reverse: bool
    unroll: int


@dataclasses.dataclass(frozen=True)
class While:
    """``while``: operands are the condition's constants, the body's constants, then initial carries.

    The condition may return an array of booleans, as many leading dimensions as every carry has: then each element
    of the carry stops for itself, and the loop runs until all have stopped.
    """

    condition: Body
    body: Body
    condition_constants: int
    body_constants: int


@dataclasses.dataclass(frozen=True)
class Branches:
    """``cond``: operand 0 chooses the branch, the others are passed to it."""

    bodies: tuple[Body, ...]


Region = Loop | While | Branches


def body_of(jaxpr: Any) -> Body:
    """Takes the closed and the open representation alike."""
    return Body(getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())))


CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr",
    "xla_metadata_call": "jaxpr",
}
"""Primitives that call one jaxpr on all of their operands, and the parameter that holds it."""

CUSTOM_DERIVATIVES = {"custom_jvp_call", "custom_vjp_call"}


def call_of(eqn: JaxprEqn) -> Call | None:
    """The call that an equation stands for, or None."""
    name = eqn.primitive.name
    if name in CALLS:
        return Call(
            body_of(eqn.params[CALLS[name]]),
            tuple(range(len(eqn.invars))),
            barrier=bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse")),
            custom_derivative=name in CUSTOM_DERIVATIVES,
            reverse_only=name == "custom_vjp_call",
        )
    if name == "custom_linear_solve":  # the solver alone gives the result; the other jaxprs serve its derivatives
        lengths = eqn.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        constants = range(start, start + lengths.solve)
        rights = range(sum(lengths), len(eqn.invars))
        return Call(body_of(eqn.params["jaxprs"].solve), (*constants, *rights), custom_derivative=True)
    return None


def region_of(eqn: JaxprEqn) -> Region | None:
    """The loop or branch that an equation is, or None."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            if "num_consts" in params:
                constants, carries = params["num_consts"], params["num_carry"]
            else:
                groups = params["ft_in"].update(list(range(len(eqn.invars)))).unpack()
                constants, carries = len(list(groups[0])), len(list(groups[1]))
            return Loop(
                body_of(params["jaxpr"]), constants, carries, params["length"], params["reverse"], params["unroll"]
            )
        case "while":
            return While(
                body_of(params["cond_jaxpr"]),
                body_of(params["body_jaxpr"]),
                params["cond_nconsts"],
                params["body_nconsts"],
            )
        case "cond":
            return Branches(tuple(body_of(branch) for branch in params["branches"]))
    return None


def bind_while(
    eqn: JaxprEqn, condition: Any, body: Any, condition_constants: Sequence[Any], constants: Sequence[Any], init: Any
) -> list[Any]:
    """Runs a ``while`` equation with other jaxprs (whose condition may return an array of booleans).

    Args:
      eqn: the equation; its primitive is bound.
      condition: closed jaxpr from condition constants and carries to booleans.
      body: closed jaxpr from constants and carries to carries.
      condition_constants: values.
      constants: values.
      init: initial carries.

    Returns:
      The final carries.
    """
    if not hasattr(eqn.params["body_jaxpr"], "eqns") or type(eqn.params["body_jaxpr"]) is type(body):
        jaxprs = condition, body
    else:
        jaxprs = condition.jaxpr, body.jaxpr
    params = {
        **eqn.params,
        "cond_jaxpr": jaxprs[0],
        "body_jaxpr": jaxprs[1],
        "cond_nconsts": len(condition_constants),
        "body_nconsts": len(constants),
    }
    return eqn.primitive.bind(*condition_constants, *constants, *init, **params)
