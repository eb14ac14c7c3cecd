"""Sorting and selection along one dimension.

Knows which dimension is ordered; it must be whole, all others are independent. Must not
know which of them is split.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from vnode.operators.description import Factors, OperatorDescription, Work
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE


@rule("sort")
def sort(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    (axis,) = dims[eqn.params["dimension"]]
    f.change(axis, split=WHOLE)
    return OperatorDescription(
        factors=f.all,
        operands=(dims,) * len(eqn.invars),
        results=(dims,) * len(eqn.outvars),
        work=Work(f.size(axis).bit_length() * len(eqn.invars)),
    )


@rule("top_k", "approx_top_k")
def top_k(eqn: JaxprEqn) -> OperatorDescription:
    """Values and indices of the largest (or smallest) elements."""
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    axis = eqn.params["axis" if "axis" in eqn.params else "reduction_dimension"] % len(dims)
    f.change(*dims[axis], split=WHOLE)
    kept = f.new(eqn.outvars[0].aval.shape[axis], WHOLE, counted=False)
    result = (*dims[:axis], (kept,), *dims[axis + 1 :])
    return OperatorDescription(
        factors=f.all,
        operands=(dims,),
        results=(result,) * len(eqn.outvars),
        work=Work(f.size(kept).bit_length()),
    )
