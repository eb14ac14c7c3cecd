"""The process of a worker as its supervisor sees it, and how long it may take for what it does.

Knows what workers say of themselves. Must not know what is decided because of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

STARTING, READY, FINISHED, ENDING, LOST = "starting", "ready", "finished", "ending", "lost"
"""States of a worker: its process runs; `run` was called; its run ended well; it was told to end; it is gone."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of waits, in seconds, and the number of restarts of workers.

    Attributes:
      start: from the start of a process to its call of `run`, of a preparation, of a switch without a further step.
      silence: of a worker that sends nothing.
      restarts: of each worker number within `forget`.
      forget: after this long a restart does not count any more.
      errors: how long to wait for errors of other workers, once one has reported its own.
      left: from the first answer to `leave` to the last.
      leave: from `leave` to the last answer.
      busy: the same, of workers in a callback, an evaluation or a save; and how long workers have for the rest of the
        script once that of the lowest rank has ended.
      vain: from the report that others are waited for in vain until all leave, so that the one at fault is found.
      finish: of workers that do no further step while others have finished.
      end: from `end`, or the report of an error, to the end of the process.
    """

    start: float = 300
    silence: float = 10
    restarts: int = 3
    forget: float = 600
    errors: float = 0.3
    left: float = 1
    leave: float = 5
    busy: float = 300
    vain: float = 2
    finish: float = 30
    end: float = 10


@dataclasses.dataclass(eq=False)
class Worker:
    """One process with a number; a replacement of it is another `Worker` with the same number."""

    number: int
    started: float
    state: str = STARTING
    pid: int | None = None
    connected: bool = False
    heard: float = 0
    call: int = 0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    handover: str = ""
    virtual_nodes: int = 0
    steps: int | None = None
    checkpoint: str | None = None
    step: int | None = None
    doing: str = "starts"
    nodes: int = 0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    waits: bool = False
    busy: bool = False
    free_since: float = 0
    vain: tuple[int, float] | None = None
    error: str | None = None
    errored: float = 0
    why: str = ""
    leaving: str = ""
    kill_at: float | None = None
    rest_until: float | None = None
    again: dict[str, Any] | None = None
    code: int | None = None
    script_code: int | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it can train: it has called `run`, and has not failed."""
        return self.state == READY and self.error is None

    @property
    def is_starting(self) -> bool:
        """Whether it has not called `run` yet."""
        return self.state == STARTING

    @property
    def may_train(self) -> bool:
        """Whether it is neither lost, nor told to end, nor at the end of its run."""
        return self.state in (STARTING, READY)

    @property
    def is_lost(self) -> bool:
        """Whether it is gone, or is being killed."""
        return self.state == LOST
