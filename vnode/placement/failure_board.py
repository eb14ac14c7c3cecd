"""Failures of processes -> notices on a board that every process reads as they are written.

Knows the key-value store of the service that `jax.distributed.initialize` starts, and threads. Must not know what a
process waits for.

The board is a log in that store: notice i has the key ``vnode/board/i``, and is never overwritten. In each process a
  thread waits for the next notice, so all processes have it within milliseconds, and a waiting process only looks at a
  list in its own memory. As long as nobody fails, nothing is written, and the threads sleep.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Collection
from typing import Any, Literal

import jax

from vnode.threads import background

KEY = "vnode/board/"

READ_TIMEOUT = 3_600_000
"""Milliseconds per request for the next notice; the reader then asks again."""

logger = logging.getLogger("vnode")

NOTICE_DELAY = 1.5
"""Seconds within which a failed process's notice arrives, once others notice its failure."""


@dataclasses.dataclass(frozen=True)
class Notice:
    """A failure of a process that others may wait for in vain.

    Attributes:
      process: the process.
      kind: ``raised``: an error ended its part in a `scope`. ``ended``: it has exited. ``left``: it ended a run that
        may go on elsewhere. ``silent``, ``heard``: it gives no sign of life; it does again.
      scope: the run, or the meeting.
      text: its error, or the reason; may be empty.
      step: the step before which it left the run.
      lost: whether it will not reach the end of the program either.
    """

    process: int
    kind: Literal["raised", "ended", "left", "silent", "heard"]
    scope: str = ""
    text: str = ""
    step: int = -1
    lost: bool = False

    @property
    def description(self) -> str:
        """The process's fate, as the predicate of a sentence.

        >>> Notice(1, "raised", text="ValueError: no such file").description, Notice(1, "ended").description
        ('has failed: ValueError: no such file', 'has ended')
        """
        said = {"raised": "has failed", "ended": "has ended", "left": "has left the run", "silent": "is silent"}
        return said.get(self.kind, "is there") + (f": {self.text}" if self.text else "")


class Board:
    """The notices of all processes known to this one.

    Args:
      client: a client of the service.
      index: this process's number.
      reads: whether a thread reads the others' notices.

    Attributes:
      notices: the known notices.
      written: how many of them are on the service.
      step: the latest step of this process's run.
    """

    def __init__(self, client: Any, index: int, reads: bool = True) -> None:
        self.client, self.index = client, index
        self.notices: list[Notice] = []
        self.written = 0
        self.step = -1
        self.closed = False
        self.changed = threading.Condition()
        if reads:
            background(self.read, "vnode-board")

    @classmethod
    def silent(cls, index: int) -> Board:
        """A board without writers, for processes that never compute."""
        board = cls(None, index, reads=False)
        board.closed = True
        return board

    def read(self) -> None:
        """The reading thread; ends with the service, which is process 0."""
        while not self.closed:
            try:
                text = self.client.blocking_key_value_get(f"{KEY}{self.written}", READ_TIMEOUT)
            except Exception as error:  # at exit, jax's error classes may be gone
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                if not self.closed and self.index:
                    self.note(Notice(0, "ended", text=SERVICE_GONE, lost=True))
                return
            self.written += 1
            self.note(Notice(**json.loads(text)))

    def note(self, notice: Notice) -> None:
        """Records a notice without telling the others."""
        if notice.process == 0 and notice.lost and notice.kind == "ended" and not self.closed and not self.notices:
            logger.error("process 0 %s", notice.description)  # at once: jax is about to abort this process
        with self.changed:
            self.notices.append(notice)
            self.changed.notify_all()

    def post(self, notice: Notice) -> None:
        """Tells all processes; returns when the service has the notice, or is gone."""
        number = self.written
        while not self.closed:
            try:
                self.client.key_value_set(f"{KEY}{number}", json.dumps(dataclasses.asdict(notice)))
                return
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    return
                number += 1

    def find_failure(self, processes: Collection[int], scopes: Collection[str]) -> Notice | None:
        """The first notice that a process will not come to one of these scopes; notices with a reason take
        precedence."""
        if not self.notices:
            return None
        found, silent = [], {}
        for notice in list(self.notices):
            if notice.process == self.index or notice.process not in processes:
                continue
            left = notice.kind == "left" and notice.step <= self.step
            if notice.kind == "ended" or ((notice.kind == "raised" or left) and notice.scope in scopes):
                found.append(notice)
            if notice.kind in ("silent", "heard"):
                silent.pop(notice.process, None)
            if notice.kind == "silent":
                silent[notice.process] = notice
        return max([*found, *silent.values()], key=lambda notice: bool(notice.text), default=None)

    def await_failure(
        self, processes: Collection[int], scopes: Collection[str], seconds: float = NOTICE_DELAY
    ) -> Notice | None:
        """As `find_failure`; waits for a notice that may be on its way."""
        end = time.monotonic() + seconds
        with self.changed:
            while (found := self.find_failure(processes, scopes)) is None:
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self.changed.wait(left)
        return found

    def has_lost_process(self) -> bool:
        """Whether a known process will not reach the end of the program: it was killed, or is silent."""
        return any(notice.kind in ("ended", "silent") and notice.lost for notice in list(self.notices))

    def close(self) -> None:
        """Stops writing to the service, whose client is about to end."""
        self.closed = True


SERVICE_GONE = "its service does not answer; it was killed, or its host has failed"
"""The notice for process 0 when its service is gone."""
