"""Actions that a decision about a job's workers asks for, as plain values.

Knows nothing else. Must not know why something is asked, nor how it is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Send(NamedTuple):
    """Sends a message to a worker."""

    worker: int
    message: dict[str, Any]


class Spawn(NamedTuple):
    """Starts the process of a worker."""

    worker: int


class Kill(NamedTuple):
    """Ends the process of a worker with SIGKILL."""

    worker: int


class Terminate(NamedTuple):
    """Asks the process of a worker to end, with SIGTERM."""

    worker: int


class StartService(NamedTuple):
    """Starts a coordination service; `Generations.service` is told its address."""

    generation: int


class EndService(NamedTuple):
    """Ends a coordination service, to which no process is connected any more."""

    service: str


class Record(NamedTuple):
    """Writes an event down."""

    event: str
    worker: int | None
    step: int | None
    why: str


class End(NamedTuple):
    """Ends the job with an exit code. `why` is empty if it ended well."""

    code: int
    why: str


Action = Send | Spawn | Kill | Terminate | StartService | EndService | Record | End
