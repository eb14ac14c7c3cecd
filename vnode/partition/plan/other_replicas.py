"""Equations that only the program of a row has: numbers of nodes, and what needs the other rows.

Knows descriptions. Must not know schedules, machines, nor how rows exchange anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive, Var

from vnode.operators import Monoid, OperatorDescription, Whole
from vnode.operators.description import Factors
from vnode.operators.registry import register

NUMBERS = Primitive("numbers_of_nodes")
"""The numbers of a row's nodes, which the loops of passes run over, and no other loop."""


@NUMBERS.def_abstract_eval
def _(*, turns: int) -> Any:
    return ShapedArray((turns,), jnp.dtype("int32"))


@register(NUMBERS)
def numbers_of_nodes(eqn: JaxprEqn) -> OperatorDescription:
    """From nothing."""
    f = Factors()
    result = f.dims(eqn.outvars[0].aval.shape, Whole())
    return OperatorDescription(factors=f.all, operands=(), results=(result,))


def passes_among(equations: Iterable[JaxprEqn]) -> set[Var]:
    """What the loops of passes make."""
    numbers, found = set[Var](), set[Var]()
    for eqn in equations:
        if eqn.primitive is NUMBERS:
            numbers.update(eqn.outvars)
        elif numbers.intersection(var for var in eqn.invars if isinstance(var, Var)):
            found.update(eqn.outvars)
    return found


OVER_ROWS = Primitive("over_rows")
"""A total over all rows, of what one row has, by a monoid. It is carried out together with the others of its pass."""


@OVER_ROWS.def_abstract_eval
def _(value: Any, *, monoid: Monoid) -> Any:
    return value


@register(OVER_ROWS)
def over_rows(eqn: JaxprEqn) -> OperatorDescription:
    """Element by element; a sum is linear."""
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    linear = (frozenset({0}),) if eqn.params["monoid"] is Monoid.SUM else ()
    return OperatorDescription(factors=f.all, operands=(dims,), results=(dims,), linear=linear)


OF_ROWS = Primitive("of_rows")
"""What rows have parts of, along dimension `dim`, whole on each of them: its first `size` elements along that."""


@OF_ROWS.def_abstract_eval
def _(value: Any, *, dim: int, size: int) -> Any:
    return value.update(shape=(*value.shape[:dim], size, *value.shape[dim + 1 :]))


@register(OF_ROWS)
def of_rows(eqn: JaxprEqn) -> OperatorDescription:
    """Whole along the dimension; along others as it lies."""
    f = Factors()
    dim, operand = eqn.params["dim"], f.dims(eqn.invars[0].aval.shape)
    f.change(*operand[dim], split=Whole())
    result = (*operand[:dim], (f.new(eqn.params["size"], Whole()),), *operand[dim + 1 :])
    return OperatorDescription(factors=f.all, operands=(operand,), results=(result,))
