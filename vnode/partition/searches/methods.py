"""The name of a search method -> the search: every published one behind one signature, for `vnode.partition.search`.

Knows the searches, and what each needs besides a problem. Must not know machines or plans.

    METHODS["walk"](search, problem, budget=60.0, gap=0.01, candidates=[fsdp, megatron])   ->   Solution
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from vnode.errors import PartitionError
from vnode.partition.searches.exact import exact
from vnode.partition.searches.exhaustive import exhaustive
from vnode.partition.searches.flexflow_walk import metropolis
from vnode.partition.searches.ilp_formulation import Search
from vnode.partition.searches.problem import Array, Problem
from vnode.partition.searches.simulated_cost import Simulated
from vnode.partition.searches.solution import Solution
from vnode.partition.searches.tofu_bisection import bisection

STARTS = 2
"""The number of experts' assignments that the walk starts from, the best ones. Random starts are often impossible."""

Method = Callable[[Search, Problem, float, float, Sequence[Array]], Solution]
"""A search. Arguments: the program as a problem; the same problem with its memory limit in bytes; the budget in
seconds; the gap to the lower bound at which a search may end, as a share; and assignments that the result must not be
worse than. Raises MemoryLimitError if no assignment fits, SearchError if no assignment has a finite cost."""


def by_walk(search: Search, problem: Problem, budget: float, gap: float, candidates: Sequence[Array]) -> Solution:
    """FlexFlow's Markov chain over assignments, each costed by its simulated timeline."""
    whole = np.zeros(problem.operators, np.int64)  # each operator's first strategy divides nothing
    starts = sorted([*candidates, whole], key=problem.cost)[:STARTS]
    return metropolis(
        problem,
        starts=starts,
        random_starts=0,
        cost=Simulated(search),
        candidates=candidates,
        budget=budget,
    )


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "exact": lambda _, problem, budget, gap, known: exact(problem, gap=gap, budget=budget, candidates=known),
        "walk": by_walk,
        # Tofu's search does not consider the experts' assignments.
        "bisection": lambda search, problem, budget, *_: bisection(problem, search.steps(), budget=budget),
        "exhaustive": lambda _, problem, budget, gap, known: exhaustive(problem, candidates=known),
    }
)
"""Search methods by the name that `vnode.partition.search` takes."""


def method_named(name: str) -> Method:
    """The search method with a name.

    Args:
      name: one of `METHODS`.

    Raises:
      PartitionError: there is no search of that name.

    Example:
      >>> method_named("walk").__name__
      'by_walk'
    """
    if not isinstance(name, str) or name not in METHODS:
        raise PartitionError(f"method: expected one of {', '.join(map(repr, METHODS))}, not {name!r}")
    return METHODS[name]
