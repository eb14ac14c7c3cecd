"""Programs -> their costs, calls, loops and branches included.

Knows descriptions and regions. Must not know batches, machines, nor how costs are used.
"""

from __future__ import annotations

import math

from jax.extend.core import JaxprEqn, Var

from vnode.operators.control_flow import Body, call_of, region_of
from vnode.operators.cost import Cost, described_cost, nbytes
from vnode.operators.registry import describe


def equation_cost(eqn: JaxprEqn) -> Cost:
    """The cost of an equation: a loop's times its trip count, if known; a branch's most expensive body."""
    call = call_of(eqn)
    if call is not None:
        return body_cost(call.body)
    region = region_of(eqn)
    if region is not None:
        return region.cost([body_cost(body) for body in region.bodies])
    description = describe(eqn)
    return undescribed_cost(eqn) if description is None else described_cost(eqn, description)


def equation_flops(eqn: JaxprEqn) -> int:
    """The scalar operations of an equation, as `equation_cost` counts them; bytes take longer to count."""
    description = None if call_of(eqn) or region_of(eqn) else describe(eqn)
    return equation_cost(eqn).flops if description is None else description.flops


def undescribed_cost(eqn: JaxprEqn) -> Cost:
    """The least cost of an equation without a description: one operation per element of its results.

    An access of a reference, as in kernels, only moves elements that are counted elsewhere.
    """
    if any(hasattr(atom.aval, "inner_aval") for atom in eqn.invars):
        return Cost()
    read = {atom: nbytes(atom.aval) for atom in eqn.invars if isinstance(atom, Var)}
    results = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
    return Cost(
        vector=sum(map(math.prod, results)),
        read=sum(read.values()),
        written=sum(nbytes(var.aval) for var in eqn.outvars),
    )


def body_cost(body: Body) -> Cost:
    """The cost of a jaxpr."""
    return sum((equation_cost(eqn) for eqn in body.jaxpr.eqns), Cost())
