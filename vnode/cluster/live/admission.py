"""Says of a job that is handed in whether it can ever run on a cluster.

Knows devices, and numbers of them that jobs may have. Must not know which jobs are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from vnode.cluster.live.submission import Submission
from vnode.errors import ClusterError


def check_runs(job: Submission, devices: int, counts: Sequence[int] | None, backend: str) -> None:
    """Refuses a job that would wait for ever.

    Args:
      job: what is asked for.
      devices: how many there are.
      counts: the numbers of devices that an elastic job may have; None for any.
      backend: what places workers.

    Raises:
      ClusterError: it can never run.
    """
    low, high = job.range
    if low > devices:
        raise ClusterError(
            f"a job that needs {low} workers never runs here.",
            facts=[f"the cluster has {devices} devices, one for each worker"],
            remedies=[f"ask for fewer: --workers 1:{min(high, devices)}"],
        )
    if counts and not job.rigid and not any(low <= count <= high for count in counts):
        raise ClusterError(
            f"a job with {low}:{high} workers never runs here.",
            facts=[f"jobs have {', '.join(map(str, counts))} workers"],
            remedies=["ask for a range that holds one of these"],
        )
    if job.rigid and backend != "processes":
        raise ClusterError(
            "a rigid job never runs here.",
            facts=[f"{backend} places the workers, and knows only vnode programs"],
            remedies=["hand it to a scheduler with --backend processes"],
        )
