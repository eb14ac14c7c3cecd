"""Policies by name: each decides, from what it is given alone, how many devices every job has now.

Knows the names. Must not know who asks.

    POLICIES["goodput"](now, jobs, devices)   ->   array([4, 2, 2, 0])

A policy of your own is such a function. `jobs` is a table of those that are there (`vnode.cluster.Jobs`): a sequence of
rows, or arrays with an entry for each job. It returns devices as an array, or by name of job.
"""

from __future__ import annotations

from vnode.cluster.policies import gavel
from vnode.cluster.policies.goodput import goodput
from vnode.cluster.policies.guarantee import guarantee
from vnode.cluster.policies.heterogeneous import heterogeneous
from vnode.cluster.policies.max_min import max_min
from vnode.cluster.policies.shortest_remaining import shortest_remaining
from vnode.cluster.policies.static import fifo, static, static_backfill
from vnode.cluster.policies.wfs import wfs
from vnode.cluster.policies.wfs_any import wfs_any
from vnode.cluster.resize_costs import FREE, Costs
from vnode.cluster.simulator import Policy
from vnode.errors import ClusterError

POLICIES: dict[str, Policy] = {
    "fifo": fifo,
    "static": static,
    "static_backfill": static_backfill,
    "wfs": wfs,
    "wfs_any": wfs_any,
    "max_min": max_min,
    "goodput": goodput,
    "shortest_remaining": shortest_remaining,
}
"""Policies without arguments, by name."""


def named(name: str, *, costs: Costs = FREE, factor: float = 1.1, inner: str = "goodput") -> Policy:
    """A policy by its name.

    Args:
      name: one of `POLICIES`, or ``"guarantee"``.
      costs: what resizes cost, for a guarantee.
      factor: of a guarantee.
      inner: the policy inside a guarantee.

    Raises:
      ClusterError: there is none of that name.

    Example:
      >>> named("fifo").__name__
      'fifo'
    """
    if name == "guarantee":
        return guarantee(factor, named(inner), costs)
    if name == "heterogeneous":
        return heterogeneous()
    if name not in POLICIES:
        raise ClusterError(
            f"there is no policy {name!r}.",
            remedies=[f"use one of {', '.join([*POLICIES, 'guarantee', 'heterogeneous', *gavel.NAMES])}"],
        )
    return POLICIES[name]


__all__ = ["POLICIES", "guarantee", "named"]
