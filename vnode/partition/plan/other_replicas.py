"""The primitives of a replica's program: numbers of nodes, and sums over and gathers from all replicas.

Knows descriptions. Must not know schedules, machines, nor how replicas exchange anything.
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

NODE_NUMBERS = Primitive("numbers_of_nodes")
"""The numbers of a replica's nodes. The loops of passes, and no other loops, run over them."""


@NODE_NUMBERS.def_abstract_eval
def _(*, turns: int) -> Any:
    return ShapedArray((turns,), jnp.dtype("int32"))


@register(NODE_NUMBERS)
def describe_node_numbers(eqn: JaxprEqn) -> OperatorDescription:
    """It has no operands."""
    f = Factors()
    result = f.dims(eqn.outvars[0].aval.shape, Whole())
    return OperatorDescription(factors=f.all, operands=(), results=(result,))


def totals_of_passes(equations: Iterable[JaxprEqn]) -> set[Var]:
    """The results of the loops of passes."""
    numbers, found = set[Var](), set[Var]()
    for eqn in equations:
        if eqn.primitive is NODE_NUMBERS:
            numbers.update(eqn.outvars)
        elif numbers.intersection(var for var in eqn.invars if isinstance(var, Var)):
            found.update(eqn.outvars)
    return found


SUM_OVER_REPLICAS = Primitive("sum_over_replicas")
"""Combines one replica's total with those of all replicas, by a monoid; all totals of a pass are combined together."""


@SUM_OVER_REPLICAS.def_abstract_eval
def _(value: Any, *, monoid: Monoid) -> Any:
    return value


@register(SUM_OVER_REPLICAS)
def describe_sum_over_replicas(eqn: JaxprEqn) -> OperatorDescription:
    """Element by element; a sum is linear."""
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    linear = (frozenset({0}),) if eqn.params["monoid"] is Monoid.SUM else ()
    return OperatorDescription(factors=f.all, operands=(dims,), results=(dims,), linear=linear)


GATHER_FROM_REPLICAS = Primitive("gather_from_replicas")
"""Gathers the replicas' parts of a value along dimension `dim`, and takes the first `size` elements."""


@GATHER_FROM_REPLICAS.def_abstract_eval
def _(value: Any, *, dim: int, size: int) -> Any:
    return value.update(shape=(*value.shape[:dim], size, *value.shape[dim + 1 :]))


@register(GATHER_FROM_REPLICAS)
def describe_gather_from_replicas(eqn: JaxprEqn) -> OperatorDescription:
    """Unsharded along the dimension; unchanged along the others."""
    f = Factors()
    dim, operand = eqn.params["dim"], f.dims(eqn.invars[0].aval.shape)
    f.change(*operand[dim], split=Whole())
    result = (*operand[:dim], (f.new(eqn.params["size"], Whole()),), *operand[dim + 1 :])
    return OperatorDescription(factors=f.all, operands=(operand,), results=(result,))
