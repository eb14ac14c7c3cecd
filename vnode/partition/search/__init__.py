"""Searches for the best strategies, all with one interface and one cost; and programs as what is searched."""

from vnode.partition.search.bisection import bisection
from vnode.partition.search.costs import CostModel, Estimate, of_machine
from vnode.partition.search.exact import exact
from vnode.partition.search.exhaustive import exhaustive
from vnode.partition.search.experts import experts
from vnode.partition.search.flows import seconds_of
from vnode.partition.search.metropolis import Walk, metropolis
from vnode.partition.search.problem import Edge, Problem
from vnode.partition.search.solution import Solution
from vnode.partition.search.steps import Search, as_problem
from vnode.partition.search.unequal import Cut, SharedEdge, recursively, shared

__all__ = [
    "CostModel",
    "Cut",
    "Edge",
    "Estimate",
    "Problem",
    "Search",
    "SharedEdge",
    "Solution",
    "Walk",
    "as_problem",
    "bisection",
    "exact",
    "exhaustive",
    "experts",
    "metropolis",
    "of_machine",
    "recursively",
    "seconds_of",
    "shared",
]
