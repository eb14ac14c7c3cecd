"""A flat program -> clusters of equations that share one strategy: element-wise equations join their neighbours.

Knows lists of equations and the sizes of values. Must not know layouts, costs, nor strategies.

A contraction, a convolution or a look-up starts a cluster of its own. Every other equation joins the maker of a value
that it reads, the largest values first. A chain of element-wise and data-moving equations so becomes one cluster. A
value that is small beside the values on both sides (a mean, a learning rate) joins nothing.
"""

from __future__ import annotations

from collections.abc import Hashable

from vnode.operators.cost import all_bytes
from vnode.partition.searches.flattened_program import FlatProgram, UnionFind, has_own_strategy, variables

SMALL = 0.5
"""A value is small if it has less than this share of the largest value on either side."""


def clusters(program: FlatProgram) -> list[list[int]]:
    """The clusters as lists of node numbers, in the order of the program."""
    nodes = program.nodes
    alone = [has_own_strategy(node.description) for node in nodes]
    makers = {var: number for number, node in enumerate(nodes) for var in node.eqn.outvars}
    names = UnionFind()
    largest: dict[Hashable, float] = {
        number: max((all_bytes(a.aval) for _, a in variables((*node.eqn.outvars, *node.eqn.invars))), default=0)
        for number, node in enumerate(nodes)
    }
    pairs = [
        (all_bytes(var.aval), makers[var], number)
        for number, node in enumerate(nodes)
        if not alone[number]
        for _, var in variables(node.eqn.invars)
        if var in makers and not alone[makers[var]] and nodes[makers[var]].path[:-1] == node.path[:-1]
    ]
    for size, a, b in sorted(pairs, key=lambda pair: -pair[0]):
        first, second = names.find(a), names.find(b)
        if first != second and size >= SMALL * min(largest[first], largest[second]):
            names.join(first, second)
            largest[names.find(first)] = max(largest[first], largest[second])
    found: dict[Hashable, list[int]] = {}
    for number in range(len(nodes)):
        found.setdefault(names.find(number), []).append(number)
    return sorted(found.values())
