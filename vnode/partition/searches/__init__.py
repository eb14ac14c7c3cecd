"""Searches for the best strategies, all with one interface and one cost; and programs as what is searched."""

from vnode.partition.searches.bisection import bisection
from vnode.partition.searches.carried import CarriedOut, carried_out
from vnode.partition.searches.costs import CostModel, Estimate, of_machine
from vnode.partition.searches.exact import exact
from vnode.partition.searches.exhaustive import exhaustive
from vnode.partition.searches.experts import experts
from vnode.partition.searches.flows import seconds_of
from vnode.partition.searches.groups import Group, between
from vnode.partition.searches.metropolis import Walk, metropolis
from vnode.partition.searches.problem import Edge, Problem
from vnode.partition.searches.simulated import Simulated
from vnode.partition.searches.solution import Solution
from vnode.partition.searches.steps import Search, as_problem
from vnode.partition.searches.unequal import Cut, SharedEdge, recursively, shared

__all__ = [
    "CarriedOut",
    "CostModel",
    "Cut",
    "Edge",
    "Estimate",
    "Group",
    "Problem",
    "Search",
    "SharedEdge",
    "Simulated",
    "Solution",
    "Walk",
    "as_problem",
    "between",
    "bisection",
    "carried_out",
    "exact",
    "exhaustive",
    "experts",
    "metropolis",
    "of_machine",
    "recursively",
    "seconds_of",
    "shared",
]
