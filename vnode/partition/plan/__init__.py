"""Plans: found for a step and a machine, printed, saved, and turned into a step."""

from vnode.partition.plan.plan import Figures, Plan
from vnode.partition.plan.search import search

__all__ = ["Figures", "Plan", "search"]
