"""A cluster that jobs share: policies that say how many devices each has, and a simulator of what comes of them.

Devices may be given and taken at any time, as the result of a job does not depend on them (`vnode.elastic`).

    jobs = vnode.cluster.read("jobs.json").jobs
    vnode.cluster.simulate(jobs, 8, "goodput").figures()["jct_mean"]
"""

from vnode.cluster import policies
from vnode.cluster.costs import FREE, VIRTUALFLOW, VNODE, Costs
from vnode.cluster.jobs import Job, Jobs
from vnode.cluster.result import Result
from vnode.cluster.simulate import simulate
from vnode.cluster.simulator import Decision
from vnode.cluster.speeds import Speeds
from vnode.cluster.traces import Trace, read

__all__ = [
    "FREE",
    "VIRTUALFLOW",
    "VNODE",
    "Costs",
    "Decision",
    "Job",
    "Jobs",
    "Result",
    "Speeds",
    "Trace",
    "policies",
    "read",
    "simulate",
]
