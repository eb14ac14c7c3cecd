"""The loop of a run in a worker that is replaced at each change: that of any process, with reports to the supervisor.

Knows the loop of a run, and the supervisor's messages. Must not know why workers are replaced.

    stop, for good       ->  as after a signal: a checkpoint, and the script goes on behind `run`
    stop, to be replaced ->  a checkpoint, and the process ends: others go on with the run
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from vnode.elastic.driver import Driver
from vnode.elastic.membership import ORPHANED, WORD, Membership, Orphaned
from vnode.elastic.metrics import scalar_metrics
from vnode.elastic.run_identity import facts_of_run, script_checksum
from vnode.elastic.run_result import Result
from vnode.placement.process_barrier import meet
from vnode.placement.world import one_line

logger = logging.getLogger("vnode")


class Replaced(SystemExit):
    """Other workers go on with the run of this one: the process ends."""

    told = True  # the other processes know: they end, too


class ReplacedDriver(Driver):
    """One run, as one of the workers of a job that are all replaced at each change has part in it.

    Attributes:
      member: this process among the workers.
    """

    def __init__(self, member: Membership, *args: Any) -> None:
        self.member, self.number = member, -1
        with self.reporting_errors():
            super().__init__(*args)

    def begin(self, step: Any, state: Any) -> None:
        """Tells the supervisor that this worker has come to the run, and begins as any process."""
        facts = {"script": script_checksum(), **facts_of_run(step, state, self.data, self.options)}
        self.member.doing = "to begin the run"
        self.member.arrive(facts, step.options.virtual_nodes, self.options.checkpoint, self.options.steps)
        super().begin(step, state)
        self.member.nodes = self.step.placement.own_nodes

    def run(self) -> Result:
        """The loop."""
        with self.reporting_errors():
            return super().run()

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tells the supervisor of the error that ends this worker."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Orphaned) or (isinstance(error, SystemExit) and self.member.end is not None):
                raise
            self.member.send("error", text=one_line(error), step=self.number)
            raise

    def identify(self, batch: Any) -> None:
        """As in any process; an error ends the job, and is no loss of a worker.

        Raises:
          CheckpointError: the checkpoint is another run's.
        """
        with self.member.refusing(self.number):
            super().identify(batch)

    def agree(self) -> bool:
        """As in any process; the supervisor is told where this one is."""
        self.member.check_end()
        self.member.step, self.member.doing = self.number, f"step {self.number}"
        return super().agree()

    def flags(self) -> list[bool]:
        """As in any process, which a supervisor that asks to stop, or has died, stops as a signal does."""
        return [self.stop.asked or self.is_called_off(), self.is_late()]

    def asked_to_stop(self) -> bool:
        """As in any process."""
        return (self.stop.asked or self.is_called_off()) and not self.agreement.delay

    def is_called_off(self) -> bool:
        """Whether the supervisor asks for the end of the run, or has died."""
        return bool(self.member.stop) or self.member.closed

    def result(self) -> Result:
        """The result of the run, and why it was called off if it was."""
        if self.stopping and self.is_called_off():
            self.reason = self.reason or self.member.stop or "the supervisor has died"
        return super().result()

    def report_metrics(self, number: int, values: Any) -> None:
        """As in any process; the supervisor is told the numbers, too."""
        self.member.metrics = scalar_metrics(values)
        super().report_metrics(number, values)

    def end_run(self, result: Result) -> None:
        """Tells the supervisor that the run has ended, and is saved.

        Raises:
          CheckpointError: it is not.
          SystemExit: other workers go on with it, or the supervisor has died.
        """
        with self.reporting_errors():
            super().end_run(result)
        member = self.member
        member.step = result.step
        if self.stopping and not member.stop:  # a signal to one of the workers: what that means, the supervisor says
            if self.stop.asked:
                member.send("leaving", why=self.stop.name)
            member.wait(lambda: member.stop or member.closed, WORD)
        if self.stopping and member.replaced and not member.closed:
            meet("to let other workers go on")  # who ends sooner would be missed by those that still save
            member.send("saved", step=result.step)
            raise Replaced(0)
        member.doing = "the rest of the script"
        member.send("finished", step=result.step, reason=result.reason)
        if member.closed:
            logger.error("the supervisor has died; the run ends after %d steps", result.step)
            raise Orphaned(ORPHANED)
