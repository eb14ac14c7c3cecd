"""Prices of memory and work -> the values to keep for a later pass, by a minimum cut.

Knows batch flow, and what values weigh and equations cost. Must not know passes, levels or how anything is evaluated.

    x -> a = f(x) -> b = g(a) -> loss         keep b: the later pass recomputes neither f nor g

A later pass reads a kept value on every path from its inputs: the kept values are a cut. A kept value costs memory for
all nodes. An equation after the cut costs work. The cheapest cut is a minimum cut of a network in which both have a
price. It keeps the smallest value of a chain, and recomputes cheap equations after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from jax.extend.core import Var

from vnode.analysis.states import Flow, Step

UNITS = 1 << 29
"""The price of all work in units of the network's capacities, which are 32-bit integers."""


def cheapest_cut(
    flow: Flow,
    wanted: Iterable[Var],
    is_leaf: Callable[[Var], bool],
    memory: Callable[[Var], float | None],
    cost: Callable[[Step], float],
) -> set[Var]:
    """The values to keep so that the sum of memory and work costs least.

    Args:
      flow: batch flow of the program.
      wanted: the values to compute.
      is_leaf: whether a value is given in any case.
      memory: the price of keeping a value; None if it cannot be kept.
      cost: the price of evaluating a step again.

    Returns:
      The values to keep: among cuts of equal price, the one nearest to the wanted values.
    """
    number: dict[Var | Step, int] = {}
    edges: dict[tuple[int, int], float] = {}
    source, sink = 0, 1
    stack: list[Var] = []

    def node_number(one: Var | Step) -> int:
        return number.setdefault(one, len(number) + 2)

    def meet(origin: int, atom: object) -> None:
        if isinstance(atom, Var) and atom in flow.position and not is_leaf(atom):
            if atom not in number:
                stack.append(atom)
            edges[origin, node_number(atom)] = np.inf

    for var in wanted:
        meet(source, var)
    prices: dict[Var, float] = {}
    while stack:
        var = stack.pop()
        step = flow.steps[flow.position[var]]
        known = step in number
        price = memory(var)
        if price is not None:
            prices[var] = price
        edges[node_number(var), node_number(step)] = np.inf if price is None else price
        if not known:
            edges[node_number(step), sink] = cost(step)
            if price is not None and price <= cost(step) and len(step.eqn.outvars) == 1:
                continue  # cheaper to keep than to evaluate again, whatever its operands cost
            for atom in step.eqn.invars:
                meet(node_number(step), atom)
    if not prices:
        return set()
    # The search above ends at values that are free to keep, so the total may be 0.
    total = sum(price for (_, end), price in edges.items() if end == sink) or 1.0
    from scipy.sparse import csr_array  # here, because it is slow to import, and most steps have one pass
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    most = 2 * total  # more than any flow
    capacities = [round(min(price, most) / total * UNITS) for price in edges.values()]
    size = len(number) + 2
    ends = np.array(list(edges)).T
    network = csr_array((np.array(capacities, np.int32), (ends[0], ends[1])), shape=(size, size))
    left = network - maximum_flow(network, source, sink).flow
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    made = {var: number[flow.steps[flow.position[var]]] for var in prices}
    return {var for var, step in made.items() if number[var] in reached and step not in reached}
