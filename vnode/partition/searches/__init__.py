"""A program, a mesh and a cost model -> the best strategy of each operator: several searches behind one interface."""

from vnode.partition.searches.exact import exact
from vnode.partition.searches.exhaustive import exhaustive
from vnode.partition.searches.experts import experts
from vnode.partition.searches.flexflow_walk import metropolis
from vnode.partition.searches.ilp_formulation import Search, as_problem
from vnode.partition.searches.problem import Edge, Problem
from vnode.partition.searches.search_costs import Estimate
from vnode.partition.searches.simulated_cost import Simulated
from vnode.partition.searches.solution import Solution
from vnode.partition.searches.tofu_bisection import bisection

__all__ = [
    "Edge",
    "Estimate",
    "Problem",
    "Search",
    "Simulated",
    "Solution",
    "as_problem",
    "bisection",
    "exact",
    "exhaustive",
    "experts",
    "metropolis",
]
