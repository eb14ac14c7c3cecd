"""Searches for the best strategies, all with one interface and one cost; and programs as what is searched."""

from vnode.partition.searches.bisection import bisection
from vnode.partition.searches.costs import CostModel, Estimate, of_machine
from vnode.partition.searches.exact import exact
from vnode.partition.searches.exhaustive import exhaustive
from vnode.partition.searches.experts import experts
from vnode.partition.searches.flows import seconds_of
from vnode.partition.searches.metropolis import Walk, metropolis
from vnode.partition.searches.problem import Edge, Problem
from vnode.partition.searches.solution import Solution
from vnode.partition.searches.steps import Search, as_problem
from vnode.partition.searches.unequal import Cut, SharedEdge, recursively, shared

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
