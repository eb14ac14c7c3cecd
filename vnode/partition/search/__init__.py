"""Searches for the best strategies, all with one interface and one cost."""

from vnode.partition.search.bisection import bisection
from vnode.partition.search.exact import exact
from vnode.partition.search.exhaustive import exhaustive
from vnode.partition.search.metropolis import metropolis
from vnode.partition.search.problem import Edge, Problem
from vnode.partition.search.solution import Solution

__all__ = ["Edge", "Problem", "Solution", "bisection", "exact", "exhaustive", "metropolis"]
