"""Runs a command that is no vnode program: one process, which has all devices of the job until it ends.

Knows exit codes. Must not know what the command does.

    begin        ->  Spawn(0)
    stop         ->  Terminate(0), and Kill(0) a little later
    exited, 3    ->  End(3)
"""

from __future__ import annotations

from typing import Any

from vnode.errors import WorkerError
from vnode.workers.actions import Action, EndService, Kill, Spawn, Terminate
from vnode.workers.supervision import Decisions, exit_code
from vnode.workers.worker_process import LOST, READY, Limits, Worker


class Rigid(Decisions):
    """Decides for a command whose number of devices stays.

    Args:
      devices: how many it has.
      limits: `end` is how long it may take to end after SIGTERM.
    """

    connects = False

    def __init__(self, devices: int, limits: Limits | None = None) -> None:
        super().__init__(devices, None, limits)
        self.kill_at: float | None = None

    def exited(self, number: int, code: int, now: float) -> list[Action]:
        """The command has ended, and the job with it."""
        if worker := self.workers.pop(number, None):
            self.record("exited", worker, f"exit code {exit_code(code)}")
            self.end(exit_code(code), f"Stopped: {self.stopping[0]}." if self.stopping else "")
        return self.settle(now)

    def service(self, generation: int, address: str, now: float) -> list[Action]:
        """Nobody has asked for one."""
        self.do(EndService(address))
        return self.take_actions()

    def handle_message(self, worker: Worker, kind: str, message: dict[str, Any], now: float) -> None:
        """Its process does not connect."""

    def settle(self, now: float) -> list[Action]:
        """Starts the command, and kills one that does not end."""
        if not self.over:
            if not self.workers:
                self.workers[0] = Worker(0, now, state=READY, doing="runs")
                self.trained = True
                self.record("start", self.workers[0], "")
                self.do(Spawn(0))
            elif self.kill_at is not None and now >= self.kill_at:
                self.kill_at = None
                self.do(Kill(0))
        return self.take_actions()

    def lose(self, worker: Worker, why: str, now: float) -> None:
        """Ends the command at once."""
        worker.state = LOST
        self.do(Kill(worker.number))

    def stopped(self, number: int, now: float) -> list[Action]:
        """A command that is stopped, as by SIGSTOP, is left alone: its owner goes on with it."""
        return self.settle(now)

    def check_resize(self, workers: int) -> None:
        """Refuses another number of devices.

        Raises:
          WorkerError: it is another one.
        """
        if workers != self.wanted:
            raise WorkerError(
                f"this job keeps its {self.wanted} devices: it is not a vnode program.",
                remedies=["end it, and submit it again"],
            )

    def resized(self, changed: bool, now: float) -> None:
        """The number stays."""

    def begin_stop(self, why: str, code: int, now: float) -> None:
        """Sends SIGTERM to the command, and SIGKILL some seconds later."""
        self.record("stop", None, why)
        self.stopping = why, code
        if self.workers:
            self.kill_at = now + self.limits.end
            self.do(Terminate(0))
        else:
            self.end(code, f"Stopped before it began: {why}.")

    def members(self) -> list[Worker]:
        """The one process."""
        return list(self.workers.values())

    def step(self) -> None:
        """Not known."""

    def standing_by(self) -> int:
        """Nobody."""
        return 0

    def speaker(self) -> int:
        """The one process."""
        return 0
