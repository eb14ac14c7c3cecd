"""Contractions: sums over products of two operands.

Knows the dimension numbers of matrix products. A contracted factor gives a partial sum (Tofu's partition-n-reduce).
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from vnode.operators.description import Factors, Monoid, OperatorDescription, rule


@rule("dot_general")
def dot_general(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs = list(f.dims(eqn.invars[0].aval.shape))
    rhs: list[tuple[int, ...]] = [()] * len(eqn.invars[1].aval.shape)
    for d, e in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        rhs[e] = lhs[d]
    for e, n in enumerate(eqn.invars[1].aval.shape):
        if e not in rhs_batch and e not in rhs_contract:
            rhs[e] = (f.new(n),)
    result = (
        *(lhs[d] for d in lhs_batch),
        *(dim for d, dim in enumerate(lhs) if d not in lhs_batch and d not in lhs_contract),
        *(dim for e, dim in enumerate(rhs) if e not in rhs_batch and e not in rhs_contract),
    )
    return OperatorDescription(
        sizes=f.sizes,
        operands=(tuple(lhs), tuple(rhs)),
        results=(result,),
        reduced={lhs[d][0]: Monoid.SUM for d in lhs_contract},
        linear=(frozenset({0}), frozenset({1})),
        contraction=True,
    )
