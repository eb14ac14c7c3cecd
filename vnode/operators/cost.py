"""What equations cost, calls, loops and branches included.

Knows descriptions and regions. Must not know batches, nor what else a cost is compared with.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from vnode.operators.control import Body, call_of, region_of
from vnode.operators.description import describe


def equation_flops(eqn: JaxprEqn) -> int:
    """Scalar operations of an equation; a ``while`` is counted as one iteration, branches as the dearest."""
    call = call_of(eqn)
    if call is not None:
        return body_flops(call.body)
    region = region_of(eqn)
    if region is not None:
        return region.work([body_flops(body) for body in region.bodies])
    description = describe(eqn)
    return 0 if description is None else description.flops


def body_flops(body: Body) -> int:
    """Scalar operations of a jaxpr."""
    return sum(equation_flops(eqn) for eqn in body.jaxpr.eqns)
