"""Turns jobs, a number of devices and a policy into simulated events and figures.

Knows the simulator, and policies by name. Must not know formats, nor pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vnode.cluster.gavel_rounds import simulate_rounds
from vnode.cluster.job_figures import Result
from vnode.cluster.jobs import Job
from vnode.cluster.policies import POLICIES, gavel, named
from vnode.cluster.resize_costs import FREE, Costs
from vnode.cluster.simulator import Policy, Simulator
from vnode.errors import ClusterError


def simulate(
    jobs: Sequence[Job],
    devices: int | Mapping[str, int],
    policy: str | Policy,
    *,
    costs: Costs = FREE,
    factor: float = 1.1,
    inner: str = "goodput",
    round_seconds: float = 360.0,
) -> Result:
    """Simulates jobs that share devices.

    Args:
      jobs: in any order.
      devices: how many there are; by kind for Gavel's policies (in the order in which they look at kinds) and for
        ``"heterogeneous"``.
      policy: its name, or a function ``decide(now, jobs, devices) -> shares``.
      costs: seconds that starts and resizes take.
      factor: of the policy ``"guarantee"``.
      inner: the policy inside a guarantee.
      round_seconds: of Gavel's policies, whose jobs take turns.

    Returns:
      The result: events, and figures of them.

    Raises:
      ClusterError: two jobs have one name, one needs more devices than there are, or the policy decides what cannot be.

    Example:
      >>> from vnode.cluster import Job, Speeds, simulate
      >>> speeds = Speeds((0.0, 1.0, 2.0))
      >>> jobs = [Job(id=name, arrival=at, work=60, speeds=speeds, demand=2) for name, at in [("a", 0), ("b", 10)]]
      >>> [(job.id, job.jct) for job in simulate(jobs, 2, "goodput").of_jobs()]
      [('a', 50.0), ('b', 50.0)]
    """
    there = {"": devices} if isinstance(devices, int) else devices
    allocate = gavel.allocation(policy) if isinstance(policy, str) else None
    if allocate is not None:
        shuffles = not str(policy).endswith("_aware")
        return simulate_rounds(jobs, there, allocate, seconds=round_seconds, shuffles=shuffles, policy=str(policy))
    several = len(there) > 1
    if isinstance(policy, str) and several != (policy == "heterogeneous"):
        knows, kinds = ("one kind", ", ".join(there)) if several else ("several kinds", "one")
        others = ["heterogeneous", *gavel.NAMES] if several else [*POLICIES, "guarantee"]
        raise ClusterError(
            f"policy {policy!r} is for {knows} of device, not for {kinds}.",
            remedies=[f"use one of {', '.join(others)}"],
        )
    decide = named(policy, costs=costs, factor=factor, inner=inner) if isinstance(policy, str) else policy
    simulator = Simulator(jobs, devices, decide, costs)
    simulator.run()
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "policy")
    return Result(simulator.jobs, sum(simulator.kinds.values()), simulator.events, name)
