"""The loop of a run: step after step, and what is due between two of them.

Knows steps as callables with placements, data by step number, and whom to ask for copies, metrics' writers and signals.
Must not know jaxprs, nor how a state is copied or saved.

Why the result is the same bits whatever happens to the devices: a step's result does not depend on them
(`docs/same-bits.md`), the examples of step t depend on t only, and after a failure the run goes on from a copy of the
state that was complete before it. Steps in between are run again, and give again what they gave.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from vnode.data.prefetch import Prefetch
from vnode.elastic.evaluation import Evaluation
from vnode.elastic.integrity import OwnCopy, vote_words
from vnode.elastic.metrics import are_computed, by_name, metrics_line, not_finite, scalars
from vnode.elastic.options import RunOptions, takes
from vnode.elastic.process_agreement import Agreement, Checked, check_copies, check_present
from vnode.elastic.recovery import Recovery, has_nan, may_be_a_device
from vnode.elastic.run_checks import check_kept, check_results, check_start
from vnode.elastic.run_devices import Request, requests
from vnode.elastic.run_identity import compare, identity, shape_of
from vnode.elastic.run_result import History, Resize, Result
from vnode.elastic.signals import SecondInterrupt, Stop
from vnode.elastic.throughput import Speed
from vnode.errors import CheckpointError, DeviceLost, ProcessError, VnodeError
from vnode.placement.agreement import check_same
from vnode.placement.failure_board import Notice
from vnode.placement.host_copy import abstract, to_numpy
from vnode.placement.leaves import shapes_of
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import gather_from_all, replicate_in_processes
from vnode.placement.process_barrier import (
    block_until_ready,
    check_failed,
    check_others,
    interruptible,
    run_watched,
    tell,
)
from vnode.placement.static_scalars import map_arrays
from vnode.placement.world import world
from vnode.show.progress import Display
from vnode.step.compile_ahead import Preparation
from vnode.step.step_identity import program_differences

if TYPE_CHECKING:
    from vnode.elastic.checkpoints import Checkpoints

logger = logging.getLogger("vnode")

AHEAD = 4
"""Steps that may be under way before the loop waits for the first of them: enough to keep devices busy, few enough to
bound the memory of their batches."""

CHECK_EVERY = 128
"""Steps between two comparisons of the copies of the state that processes have."""


class Driver:
    """One run.

    Args:
      step: a `VirtualStep`.
      data: where the batches come from.
      feed: the batches, loaded ahead.
      state: the state before step `options.start`.
      options: the options of the run.
      checkpoints: where to save, if anywhere.
      stop: whether a signal has asked for the end.

    Attributes:
      number: the step to come.
      end: the step to end before; less than `options.steps` if a callback asked for it.
      diverged: the first number of steps behind a state that is known to be bad, if there is one.
    """

    def __init__(
        self,
        step: Any,
        data: Any,
        feed: Prefetch,
        state: Any,
        options: RunOptions,
        checkpoints: Checkpoints | None,
        stop: Stop,
    ) -> None:
        self.data = data
        self.feed = feed
        self.options = options
        self.checkpoints = checkpoints
        self.stop = stop
        self.agreement = Agreement(AHEAD)
        self.stopping = False
        self.late = False
        self.ahead = AHEAD
        self.display: Display
        self.shapes = map_arrays(shape_of, state)
        self.recovery = Recovery(options.alive, checkpoints, map_arrays(abstract, state))
        self.requests = requests(options.devices, step)
        self.facts: dict[str, Any] | None = None
        self.compiling: dict[Placement, Preparation] = {}
        self.asked: Request | None = None
        self.pending: deque[tuple[int, Any]] = deque()
        self.history = History(options.history_kept)
        self.evaluations: list[tuple[int, Any]] = []
        self.resizes: list[Resize] = []
        self.resized: Resize | None = None
        self.reason = ""
        self.diverged: int | None = None
        self.own: OwnCopy | None = None
        self.sums: deque[tuple[int, list[jax.Array]]] = deque()
        self.warned = False
        self.end = options.steps
        self.told = 0
        """How many steps the state has behind it at the last evaluation."""
        self.exact = any(takes(callback, 3) for callback in options.callbacks)
        """Whether a callback is given the state, so that it must be called before the next step."""
        self.speed = Speed(options.peak_flops)
        self.batch: Any = None
        """The last batch, for its shapes."""
        self.begin(step, state)

    def begin(self, step: Any, state: Any) -> None:
        """Places the state before the first step, or the one of the last checkpoint."""
        self.step = step
        found = self.recovery.resume(self.place_to_resume)
        if found is None:
            self.move_to_first_devices(self.options.start)
            found = self.options.start, self.step.put(state)
        else:
            logger.info("resumed from step %d", found[0])
        self.number, self.state = found
        if self.agreement.delay:
            self.own = OwnCopy(self.state)
            self.own.prepare()
            self.agreement.holders = self.own.holders
        self.resumed = self.recovery.saved
        self.best: tuple[int, float] | None = None
        """The step number, and the metric, of the best state."""
        if self.resumed is not None and self.checkpoints is not None and self.options.best_metric is not None:
            number, value, metric = self.checkpoints.facts(self.resumed).get("best") or (0, 0.0, None)
            if metric == self.options.best_metric and number in self.checkpoints.folders():
                self.best, self.checkpoints.best = (number, value), number
        self.first = self.number
        self.told = self.number
        self.last_save = time.monotonic()
        if self.options.keep_every is not None:
            self.recovery.copy_to_host(self.number, self.state)

    def move_to_first_devices(self, number: int) -> Placement:
        """Moves the step to the devices that are requested for the first step.

        Raises:
          CheckpointError: the run cannot begin with that step.
        """
        check_start(number, self.options, self.checkpoints)
        try:
            self.asked = self.requests(number)
        except DeviceLost as error:
            self.recovery.lost |= set(error.devices)
        self.step = self.recovery.sibling(self.step, self.asked or Request(self.step.placement))
        check_present(self.step.placement)
        return self.step.placement

    def place_to_resume(self, number: int) -> Placement:
        """As `move_to_first_devices`; before processes restore a checkpoint, they compare their steps' programs.

        The step is traced for that, with the first batch, as its first call needs it.

        Raises:
          ProcessError: some compute something else.
        """
        placement, program = self.move_to_first_devices(number), None
        if not self.agreement.delay:
            return placement
        self.number = number
        try:
            if self.feed.depth and self.feed.wait(number, placement, self.no_longer_waits):
                batch = self.feed.get(number, placement)
                self.feed.give_back(number, batch)
                args, kwargs = self.step.spec.bind_positional((self.recovery.like, batch), {})
                trace = functools.partial(self.step.executor.trace_for, args, kwargs)
                program = interruptible(trace, "to trace the step", world().others)
        except ProcessError:
            raise
        except Exception as error:  # the first step will raise it, and say more
            logger.info("the step cannot be traced before a checkpoint is restored: %s", error)
        what, fact = f"to restore checkpoint {number}", None if program is None else program.to_json()
        check_same(what, {"program": fact}, shows={"program": program_differences})
        return placement

    def run(self) -> Result:
        """The loop, begun again after each failure.

        Raises:
          BaseException: the error that ended it; the state is saved before, if there is a folder.
        """
        failure: Exception | None = None
        try:
            while True:
                try:
                    if failure is not None:
                        self.recover(failure)
                        failure = None
                    while self.number < self.end and not self.stopping and self.diverged is None:
                        self.advance()
                    self.finish()
                    return self.result()
                except Exception as error:
                    if self.agreement.delay:
                        check_failed(f"to step {self.number}", cause=error)
                    if error is failure or not may_be_a_device(error) or self.fails_unnoticed(error):
                        raise
                    traceback.clear_frames(error.__traceback__)  # they hold the state that failed
                    failure = error
        except SecondInterrupt:
            raise
        except BaseException as error:
            if self.agreement.delay:
                world().tell(error, world().scopes[-1])
            self.rescue(error)
            raise

    def end_run(self, result: Result) -> None:
        """Ends the run: waits until all checkpoints are written.

        Raises:
          CheckpointError: one cannot be; the error has the state.
        """
        if self.checkpoints is None:
            return
        try:
            with self.stop.deferred_interrupts():
                self.checkpoints.wait()
        except CheckpointError as error:
            error.step, error.state = result.step, result.state
            raise

    def fails_unnoticed(self, error: Exception) -> bool:
        """Whether other processes may not see an error, and would continue."""
        return bool(self.agreement.delay) and not isinstance(error, DeviceLost)

    def result(self) -> Result:
        """The result of the run."""
        stopped = self.number < self.options.steps
        reason = self.reason
        if not reason and (self.stopping or self.asked_to_stop()):
            reason = f"signal {self.stop.name or 'in another process'}"
        if stopped:
            logger.info("stopped after %d steps: %s", self.number, reason)
        history, reason = list(self.history), reason if stopped else ""
        return Result(
            self.state, self.number, history, self.evaluations, self.resizes, self.resumed, stopped, reason, self.best
        )

    def advance(self) -> None:
        """One step, and what is due after it."""
        if not self.agree():
            return
        self.follow(self.requests(self.number))
        if not self.feed.wait(self.number, self.step.placement, self.no_longer_waits):
            self.stopping = True
            return
        batch = self.feed.get(self.number, self.step.placement)
        self.identify(batch)
        if self.options.writers:
            self.speed.launch(self.number, batch)
            self.batch = shapes_of(batch)
        began = time.perf_counter()
        results = self.step(self.state, batch)
        check_results(results, self.state)
        self.state, metrics = results[0], replicate_in_processes(results[1])
        self.pending.append((self.number, metrics))
        self.number += 1  # now: should a wait fail, the state has its right number
        if self.resized is not None:
            returned = time.perf_counter()
            block_until_ready(results, f"step {self.number - 1}")
            self.resized.compile, self.resized.first = returned - began, time.perf_counter() - returned
            self.log_message(str(self.resized))
            self.resized = None
        self.fetch(0 if self.exact and (self.number - 1) % self.options.metrics_every == 0 else self.ahead)
        self.sum_up()
        if due(self.number, self.options.keep_every):
            self.copy_to_host()
        if self.options.best_metric is None and self.save_is_due() and self.is_good():
            self.save()
        if due(self.number, self.options.evaluate_every):
            self.evaluate()
        if self.options.best_metric is not None and self.save_is_due() and self.is_good():  # knows what is best by then
            self.save()

    def save_is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        late = self.late if self.agreement.delay else self.is_late()
        return self.checkpoints is not None and (late or due(self.number, self.options.checkpoint_every))

    def is_late(self) -> bool:
        """Whether the last checkpoint is so old that another one is due, by this process's clock."""
        return time.monotonic() - self.last_save >= self.options.save_seconds

    def agree(self) -> bool:
        """Learns whether any process was asked to stop, or finds that a checkpoint is due.

        Returns:
          Whether the next step is to be made now.
        """
        tell(f"to step {self.number}")
        check_others(f"to step {self.number}", self.number)
        checked = () if self.own is None else self.take_checksums(self.own, AHEAD)
        return self.take_flags(self.agreement.vote(self.number, self.flags(), checked))

    def flags(self) -> list[bool]:
        """The flags that this process votes for: the end of the run, a checkpoint."""
        return [self.stop.asked, self.is_late()]

    def take_flags(self, flags: list[bool]) -> bool:
        """Takes note of what the processes have agreed about; says whether the next step is to be made."""
        self.stopping, self.late = flags
        return not self.stopping

    def sum_up(self) -> None:
        """Begins to compare this process's copy of the state with those of the others, now and then."""
        if self.own is not None and (self.number == self.first + 1 or self.number % CHECK_EVERY == 0):
            found = self.own.begin(self.state)
            if found is not None:
                self.sums.append((self.number, found))

    def take_checksums(self, own: OwnCopy, ahead: int) -> Checked:
        """Checksums of this process's copies of the state, if any were begun more than `ahead` steps ago."""
        if not self.sums or self.sums[0][0] + ahead >= self.number:
            return own.unchecked
        number, sums = self.sums.popleft()
        return [number, *vote_words(block_until_ready(sums, f"the checksum of the state after {number} steps"))]

    def compare_copies(self, own: OwnCopy) -> None:
        """Compares the final state of this process with those of the others.

        Raises:
          ProcessError: they are not the same.
        """
        run_watched(own.prepare().join, "to compile the checksum of the state", world().others)
        sums = own.begin(self.state)
        mine = own.unchecked if sums is None else [self.number, *vote_words(block_until_ready(sums, "the final state"))]
        check_copies(gather_from_all(mine, "to end a run").tolist(), own.holders)

    def no_longer_waits(self) -> bool:
        """As `asked_to_stop`, for whom waits for data meanwhile.

        Raises:
          ProcessError: another process has failed.
        """
        check_others(f"to load the batch of step {self.number}")
        return self.asked_to_stop()

    def asked_to_stop(self) -> bool:
        """Whether waiting for data is to end; several processes then wait for one another."""
        return self.stop.asked and not self.agreement.delay

    def identify(self, batch: Any) -> None:
        """Before the first step, or where none is left: what this run is, and whether the checkpoint is of it.

        Args:
          batch: of the first step, or one like it; None if there is none.

        Raises:
          CheckpointError: it is another one.
        """
        if self.checkpoints is None or self.facts is not None:
            return
        this = interruptible(
            lambda: identity(self.step, self.data, self.shapes, batch), "to identify a run", world().others
        )
        if self.resumed:  # before its first step, no run has computed anything
            there = self.checkpoints.folders()
            number = self.resumed if self.resumed in there else max(there, default=self.resumed)  # another worker's
            where = f"checkpoint {number} in {self.checkpoints.folder}"
            for warning in compare(self.checkpoints.facts(number), this, where):
                self.log_message(warning, logging.WARNING)
        self.facts = this.facts

    def log_message(self, text: str, level: int = logging.INFO) -> None:
        """Writes a message to the log, and above the progress bar."""
        logger.log(level, text)
        self.display.line(text)

    def follow(self, request: Request | None) -> None:
        """Moves to other devices if they are requested."""
        if request is None or request == self.asked:
            return
        step = self.recovery.sibling(self.step, request)
        check_present(step.placement)
        if self.options.compile_ahead and not self.is_compiled(step.placement):
            return
        self.asked = request
        if step.placement == self.step.placement:
            return
        block_until_ready(self.state, f"step {self.number - 1}")  # or the steps under way would count as moving
        began = time.perf_counter()
        self.state = block_until_ready(step.put(self.state), "the state on other devices")
        self.record_resize(
            step, Resize(self.number, self.step.placement, step.placement, move=time.perf_counter() - began)
        )

    def is_compiled(self, placement: Placement) -> bool:
        """Whether the program for a placement is compiled, or failed; if not, compiles it in the background."""
        warming_up = self.options.compile_ahead == "warm_up"
        if placement == self.step.placement or self.number == self.first:
            return True  # nothing can be compiled before the first step has told shapes
        if len(placement.groups) > 1 and not warming_up:
            return True
        if self.agreement.delay:  # all processes must go on there before the same step
            self.step.prepare(placement).wait(placement)
            return True
        if placement not in self.compiling:
            self.compiling[placement] = (
                self.step.warm_up(placement, self.state, self.feed.load_alone(self.number, placement))
                if warming_up
                else self.step.prepare(placement)
            )
        return self.compiling[placement].done()

    def record_resize(self, step: Any, change: Resize) -> None:
        """Records a change of devices; the next step measures how long it took."""
        self.step = step
        self.speed.restart()
        self.resizes.append(change)
        self.resized = change

    def fetch(self, ahead: int) -> None:
        """Takes the metrics of finished steps to the host, and waits until no more than `ahead` are unfinished."""
        while (
            self.diverged is None and self.pending and (len(self.pending) > ahead or are_computed(self.pending[0][1]))
        ):
            number, metrics = self.pending[0]
            wanted, visible = number % self.options.metrics_every == 0, self.display.due
            block_until_ready(metrics, f"step {number}")
            values = jax.tree.map(to_numpy, metrics) if wanted or visible else metrics
            self.pending.popleft()
            if visible:
                self.display.update(number + 1, metrics_line(values, self.step.placement))
            if wanted:
                self.report_metrics(number, values)

    def report_metrics(self, number: int, values: Any) -> None:
        """Reports the metrics of a step to history, callbacks and writers."""
        self.history.append(number, values)
        named = by_name(values)
        writing = self.options.writers and world().index == 0
        self.write(number, named | (self.speed.metrics(number, self.step, self.state, self.batch) if writing else {}))
        self.check_finite(number, named)
        end = number + 1 + (0 if self.exact else AHEAD)
        for callback in self.options.callbacks:
            self.call_callback(callback, takes(callback, 3), number, values, end)

    def write(self, number: int, named: dict[str, Any]) -> None:
        """Gives metrics to the writers."""
        for writer in self.options.writers if world().index == 0 else ():
            writer(number, named)

    def call_callback(self, callback: Callable[..., Any], with_state: bool, number: int, values: Any, end: int) -> None:
        """Calls a callback; if it returns True, the run ends before a step.

        That step is the same however far the loop has got, so that the result does not depend on how fast devices are.
        """
        answer = callback(number, values, self.state) if with_state else callback(number, values)
        if isinstance(answer, bool | np.bool_) and answer and end < self.end:
            self.end, self.reason = end, f"the callback asked for it at step {number}"

    def check_finite(self, number: int, named: dict[str, Any]) -> None:
        """Looks for losses that are not finite."""
        names = not_finite(named)
        if not names:
            return
        if self.options.on_nan == "stop":
            self.diverged = number + 1
            self.reason = f"{', '.join(names)} of step {number} is not finite"
        elif not self.warned:
            self.warned = True
            self.log_message(f"{', '.join(names)} of step {number} is not finite; the run goes on", logging.WARNING)

    def is_good(self) -> bool:
        """Whether all steps so far, and the state behind them, are good; waits for them.

        The metrics come first: those of steps that are behind a copy would not be told again.
        """
        self.fetch(0)
        if self.diverged is None and self.options.on_nan == "stop" and has_nan(self.state):
            self.diverged = self.number
            self.reason = f"the state after step {self.number - 1} holds numbers that are none"
        return self.diverged is None

    def copy_to_host(self) -> None:
        """Copies the state to the host. The steps behind it are then known to be good."""
        if self.is_good():
            self.recovery.copy_to_host(self.number, self.state)

    def save(self) -> None:
        """Saves the state, unless a step that is run again was saved the first time."""
        saved = self.recovery.saved
        if self.checkpoints is not None and (saved is None or self.number > saved):
            self.write_checkpoint(self.number, self.state)

    def write_checkpoint(self, number: int, state: Any) -> None:
        """Saves a state.

        Raises:
          CheckpointError: it cannot be; the error has the state.
        """
        assert self.checkpoints is not None
        try:
            with self.stop.deferred_interrupts():
                # Before its first step a run has computed nothing that another step could change.
                facts = dict((self.facts if number > self.options.start else None) or {})
                if self.best is not None:
                    facts["best"] = [*self.best, self.options.best_metric]
                self.checkpoints.save(number, state, facts)
                self.recovery.saved = number
        except CheckpointError as error:
            error.step, error.state = number, state
            raise
        self.last_save = time.monotonic()
        logger.info("checkpoint of step %d", number)

    def evaluate(self) -> None:
        """Evaluates the state, and passes the metrics on.

        Raises:
          VnodeError: the evaluation gave the state away.
        """
        evaluate = self.options.evaluate
        if evaluate is None or not self.is_good():
            return
        with_placement = isinstance(evaluate, Evaluation)
        values = evaluate(self.state, self.step.placement) if with_placement else evaluate(self.state)
        values = jax.tree.map(to_numpy, block_until_ready(values, "an evaluation"))
        check_kept(self.state)
        self.told = self.number
        self.evaluations.append((self.number, values))
        self.write(self.number, by_name(values, "evaluate/"))
        logger.info("evaluated after %d steps: %s", self.number, scalars(values))
        if self.options.best_metric is not None:
            self.save_if_best(by_name(values, "evaluate/"), self.options.best_metric)
        for callback in self.options.evaluate_callbacks:
            self.call_callback(callback, takes(callback, 3), self.number, values, self.number)

    def save_if_best(self, named: dict[str, Any], metric: str) -> None:
        """Saves the state if it is the best so far, as the checkpoint that stays.

        Raises:
          VnodeError: the evaluation has no such metric.
        """
        name = metric if metric.startswith("evaluate/") else f"evaluate/{metric}"
        value = named.get(name)
        if not isinstance(value, bool | int | float):
            raise VnodeError(
                f"best_metric={metric!r} is not a number among the metrics of an evaluation.",
                facts=[f"there are {', '.join(each.removeprefix('evaluate/') for each in named) or 'none'}"],
                remedies=["name one of them that is a number"],
            )
        assert self.checkpoints is not None
        better = self.best is None or (
            value < self.best[1] if self.options.best_mode == "min" else value > self.best[1]
        )
        if better and value == value and self.number > self.options.start:
            self.best = self.number, float(value)
            self.checkpoints.best = self.number
            self.save()

    def finish(self) -> None:
        """Waits for the last step, saves the state, and evaluates it."""
        voted = self.stopping  # then the others leave, too
        if self.reason and self.agreement.delay and not voted:
            here = world()
            assert here.board is not None
            why = f"before step {self.number}, as {self.reason}"
            here.board.post(Notice(here.index, "left", here.scopes[-1], why, self.number))
        block_until_ready(self.state, f"step {self.number - 1}")
        if self.own is not None:
            self.compare_copies(self.own)
        if self.resumed is not None and self.facts is None:
            self.identify(self.last_batch())
        good = self.is_good()
        if not good:
            self.last_good()
        if self.options.best_metric is None:
            self.save()
        if good and self.told < self.number and not (self.stopping or self.asked_to_stop()):
            self.evaluate()
        self.save()
        self.display.update(self.number, "")

    def last_batch(self) -> Any:
        """A batch of a run that was finished before, to see what its step computes; None if there is none any more."""
        try:
            return (
                self.feed.load_alone(self.number - 1, self.step.placement)
                if self.number and not self.stopping
                else None
            )
        except Exception as error:
            self.log_message(
                f"a change of the step would not be noticed, as no batch can be had: {error}", logging.WARNING
            )
            return None

    def last_good(self) -> None:
        """Goes back to the last good state: it contains no NaN, and the losses of its steps were finite.

        The first time round finds out which it is; a state that was donated is not there to go back to.
        """
        assert self.diverged is not None
        self.pending.clear()
        for last in (False, True):
            self.state = None  # makes room for the copy
            self.number, self.state = self.recovery.go_back(self.step.placement)
            while self.number < self.diverged:
                batch = self.feed.load_alone(self.number, self.step.placement)
                self.state, metrics = self.step(self.state, batch)
                bad = self.number % self.options.metrics_every == 0 and not_finite(
                    by_name(jax.tree.map(to_numpy, metrics))
                )
                if not last and (bad or has_nan(self.state)):
                    self.diverged = self.number
                    break
                self.number += 1
        self.back_to(self.number)
        self.log_message(f"{self.reason}: back to the state after {self.number} steps", logging.WARNING)

    def back_to(self, number: int) -> None:
        """Drops the recorded metrics of the steps from this one on."""
        self.history.back_to(number)
        self.evaluations = [entry for entry in self.evaluations if entry[0] <= number]
        self.told = min(self.told, number)

    def recover(self, error: Exception) -> None:
        """Goes back to the last copy of the state, on the devices that are left.

        Raises:
          PlacementError: no device is left.
          VnodeError: there is no copy.
          Exception: the error, if no device is to blame and it came before.
        """
        self.pending.clear()
        self.sums.clear()
        self.state = None  # makes room for the copy
        before = self.step.placement
        logger.warning("step %d failed: %s", self.number, error)
        gone = self.recovery.blame(error, self.number, before.devices)
        try:
            step = self.recovery.sibling(self.step, Request(before))
        except VnodeError as none:
            raise none from error
        began = time.perf_counter()
        try:
            found: tuple[int, Any] = self.recovery.go_back(step.placement)
            good, self.state = found[0], block_until_ready(found[1], "the copy of the state")
        except ProcessError as none:
            raise none from error
        moved, message = time.perf_counter() - began, f"{type(error).__name__}: {error}"
        change = Resize(good, before, step.placement, gone, message, self.number - good, moved)
        self.number = good
        self.back_to(good)
        self.asked, self.end, self.reason, self.diverged = None, self.options.steps, "", None
        self.record_resize(step, change)

    def rescue(self, error: BaseException) -> None:
        """Saves the last good state before an error ends the run; the error says so."""
        if self.checkpoints is None or isinstance(error, CheckpointError):
            return
        if self.agreement.delay:
            error.add_note("The last checkpoint stands: a state of several processes is saved by all of them together.")
            return
        try:
            found = self.recovery.last_state(self.number, self.state, self.step.placement)
            if found is not None and found[1] is self.state and self.resumed is None and self.number == self.first:
                return  # no step was made, and the caller has the state
            if found is not None:
                self.write_checkpoint(*found)
                error.add_note(f"The state after {found[0]} steps was saved before; the same call goes on from there.")
        except Exception as failed:
            logger.exception("the state could not be saved after an error")
            error.add_note(f"The state could not be saved: {type(failed).__name__}: {failed}")

    def close(self) -> None:
        """Cancels compilations that have not begun."""
        for preparation in self.compiling.values():
            preparation.cancel()


def due(number: int, every: int | None) -> bool:
    """Whether an action that is done every so many steps is due."""
    return every is not None and number % every == 0
