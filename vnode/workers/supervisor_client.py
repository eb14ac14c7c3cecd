"""Turns requests (another number of workers, stop, status) into messages to a running supervisor, and its answers back.

Knows jobs of this machine and their control channels. Must not know how requests are carried out.
"""

from __future__ import annotations

from typing import Any

from vnode.errors import WorkerError
from vnode.workers.job_registry import Found
from vnode.workers.wire import Channel, WireError

SECONDS = 10
"""Seconds that a supervisor may take to answer."""


def request(job: Found, kind: str, **facts: Any) -> dict[str, Any]:
    """Asks a supervisor.

    Args:
      job: whose.
      kind: of the request: status, resize, stop, kill.
      facts: its particulars.

    Returns:
      The answer: the job's status.

    Raises:
      WorkerError: it refuses, or does not answer.
    """
    try:
        channel = Channel.connect(job.facts["address"], SECONDS)
        try:
            channel.send({"kind": "control", "token": job.token})
            channel.send({"kind": kind, **facts})
            answer = channel.receive(SECONDS)
        finally:
            channel.close()
    except (OSError, WireError, KeyError) as error:  # TimeoutError is an OSError
        raise WorkerError(
            f"the supervisor of {job.name} does not answer.",
            facts=[f"process {job.facts.get('pid')}", f"{type(error).__name__}: {error}"],
            remedies=["see whether it still runs: vnode runs"],
        ) from error
    if answer["kind"] == "error":
        raise WorkerError(answer["text"])
    return answer
