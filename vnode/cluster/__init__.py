"""A cluster that jobs share: policies that say how many devices each has, a simulator, and a scheduler.

Devices may be given and taken at any time, as the result of a job does not depend on them (`vnode.elastic`).

    jobs = vnode.cluster.read("jobs.json").jobs
    vnode.cluster.simulate(jobs, 8, "goodput").figures()["jct_mean"]

    vnode.cluster.run([Submission(command=["python", "train.py"], workers=(1, 8)), ...], 8, "goodput")
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from vnode.cluster import policies as policies
    from vnode.cluster.job_figures import Result
    from vnode.cluster.jobs import Job, Jobs
    from vnode.cluster.live.run_jobs import Run, run, submit
    from vnode.cluster.live.submission import Submission
    from vnode.cluster.resize_costs import FREE, VIRTUALFLOW, VNODE, Costs
    from vnode.cluster.simulation import simulate
    from vnode.cluster.simulator import Decision
    from vnode.cluster.speeds import Speeds
    from vnode.cluster.traces import read
    from vnode.cluster.traces.job_trace import Trace

__all__ = [
    "FREE",
    "VIRTUALFLOW",
    "VNODE",
    "Costs",
    "Decision",
    "Job",
    "Jobs",
    "Result",
    "Run",
    "Speeds",
    "Submission",
    "Trace",
    "policies",
    "read",
    "run",
    "simulate",
    "submit",
]

_LAZY = {  # the command line is imported without numpy
    "FREE": "vnode.cluster.resize_costs",
    "VIRTUALFLOW": "vnode.cluster.resize_costs",
    "VNODE": "vnode.cluster.resize_costs",
    "Costs": "vnode.cluster.resize_costs",
    "Decision": "vnode.cluster.simulator",
    "Job": "vnode.cluster.jobs",
    "Jobs": "vnode.cluster.jobs",
    "Result": "vnode.cluster.job_figures",
    "Run": "vnode.cluster.live.run_jobs",
    "Speeds": "vnode.cluster.speeds",
    "Submission": "vnode.cluster.live.submission",
    "Trace": "vnode.cluster.traces.job_trace",
    "read": "vnode.cluster.traces",
    "run": "vnode.cluster.live.run_jobs",
    "simulate": "vnode.cluster.simulation",
    "submit": "vnode.cluster.live.run_jobs",
}


if not _typing.TYPE_CHECKING:  # or type checkers would believe that any name is there

    def __getattr__(name: str) -> _typing.Any:
        if name == "policies":
            return _importlib.import_module("vnode.cluster.policies")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
