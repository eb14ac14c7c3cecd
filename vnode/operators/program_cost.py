"""What programs cost: calls, loops and branches included.

Knows descriptions and regions. Must not know batches, machines, nor what else a cost is compared with.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from vnode.operators.control import Body, call_of, region_of
from vnode.operators.cost import Cost, described_cost
from vnode.operators.registry import describe


def equation_cost(eqn: JaxprEqn) -> Cost:
    """The cost of an equation: a loop's by its turns, as far as they are known, branches as the dearest."""
    call = call_of(eqn)
    if call is not None:
        return body_cost(call.body)
    region = region_of(eqn)
    if region is not None:
        return region.cost([body_cost(body) for body in region.bodies])
    description = describe(eqn)
    return Cost() if description is None else described_cost(eqn, description)


def body_cost(body: Body) -> Cost:
    """The cost of a jaxpr."""
    return sum((equation_cost(eqn) for eqn in body.jaxpr.eqns), Cost())
