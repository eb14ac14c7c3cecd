"""Reductions along dimensions, by a monoid or by position.

Knows the reduced dimensions and the monoid. Must not know how partial results are used.
"""

from __future__ import annotations

import numpy as np
from jax.extend.core import JaxprEqn

from vnode.operators.description import NOTHING, Algebra, Factors, OperatorDescription
from vnode.operators.monoid import Monoid
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE, Reduced

MONOIDS = {
    "reduce_sum": Monoid.SUM,
    "reduce_prod": Monoid.PROD,
    "reduce_max": Monoid.MAX,
    "reduce_min": Monoid.MIN,
    "reduce_and": Monoid.AND,
    "reduce_or": Monoid.OR,
    "reduce_xor": Monoid.XOR,
}

COLLECTIVES = {"psum": Monoid.SUM, "psum_invariant": Monoid.SUM, "pmax": Monoid.MAX, "pmin": Monoid.MIN}
"""After `jax.vmap(..., axis_name=...)` a collective is a reduction along positional axes."""


def over_axes(eqn: JaxprEqn, monoid: Monoid) -> OperatorDescription:
    """The description of a reduction along the dimensions in the parameter ``axes``."""
    f = Factors()
    operands = tuple(f.dims(atom.aval.shape) for atom in eqn.invars)
    axes = {int(axis) for axis in eqn.params["axes"]}
    reduced = [factor for dims in operands for d, dim in enumerate(dims) if d in axes for factor in dim]
    f.change(*reduced, split=Reduced(monoid))
    linear = monoid is Monoid.SUM and len(operands) == 1
    adds = linear and all(f.size(factor) == 1 for factor in reduced)  # a gradient of a broadcast
    return OperatorDescription(
        factors=f.all,
        operands=operands,
        results=tuple(tuple(dim for d, dim in enumerate(dims) if d not in axes) for dims in operands),
        linear=(frozenset({0}),) if linear else (),
        algebra=Algebra.ADDS if adds else NOTHING,
    )


@rule(*MONOIDS)
def reduction(eqn: JaxprEqn) -> OperatorDescription:
    return over_axes(eqn, MONOIDS[eqn.primitive.name])


@rule(*COLLECTIVES)
def collective(eqn: JaxprEqn) -> OperatorDescription | None:
    """Undescribed while it names a mesh axis: that is the user's own device program, not a whole-batch step."""
    if any(not isinstance(axis, int | np.integer) for axis in eqn.params["axes"]) or eqn.params.get(
        "axis_index_groups"
    ):
        return None
    return over_axes(eqn, COLLECTIVES[eqn.primitive.name])


UNVMAP = {"unvmap_any": Monoid.OR, "unvmap_all": Monoid.AND, "unvmap_max": Monoid.MAX}
"""Equinox's reductions over everything, dimensions added by vmap included."""


@rule(*UNVMAP)
def unvmap(eqn: JaxprEqn) -> OperatorDescription:
    """Equinox reduces over all examples to decide whether any still needs a branch or another iteration."""
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape, Reduced(UNVMAP[eqn.primitive.name]))
    return OperatorDescription(factors=f.all, operands=(dims,), results=((),))


@rule("argmax", "argmin")
def argument(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    axes = {int(axis) for axis in eqn.params["axes"]}
    f.change(*(dims[d][0] for d in axes), split=WHOLE)
    return OperatorDescription(
        factors=f.all,
        operands=(dims,),
        results=(tuple(dim for d, dim in enumerate(dims) if d not in axes),),
    )


@rule("reduce")
def reduce(eqn: JaxprEqn) -> OperatorDescription:
    """Any computation along dimensions, from initial values that are scalar operands."""
    f = Factors()
    count = len(eqn.outvars)
    dims = f.dims(eqn.invars[0].aval.shape)
    axes = set(eqn.params["dimensions"])
    f.change(*(factor for d in axes for factor in dims[d]), split=WHOLE)
    return OperatorDescription(
        factors=f.all,
        operands=(dims,) * count + ((),) * (len(eqn.invars) - count),
        results=(tuple(dim for d, dim in enumerate(dims) if d not in axes),) * count,
    )
