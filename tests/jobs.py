"""Jobs of workers in tests: waits for something to come true while a job runs.

Knows jobs. Must not know what happens to their workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vnode.workers.launch import Job


def until(job: Job, found: Callable[[], Any], what: str, seconds: float) -> None:
    """Waits until something is so.

    Raises:
      AssertionError: the job has ended before, or it is not so in time.
    """
    end = time.monotonic() + seconds
    while not found():
        assert job.process.poll() is None, f"the job has ended: {what}: {job.events}"
        assert time.monotonic() < end, f"{what}: {job.events}"
        time.sleep(0.02)
