"""Turns events into actions of a supervisor that replaces all workers at each change of their number, and at each loss.

Knows which processes there are, and the deadlines of all waits. Must not know processes, sockets or clocks.

The workers of a job are the processes of one world of JAX, as `jax.distributed.initialize` makes it: it has no way out
but the end of the process. So this works wherever JAX does, on GPUs and TPUs, too. One set of workers
hands the run to the next by a checkpoint:

    begin                ->  Spawn(0 1)
    connected by all     ->  Send(0 1, world): how many they are, and where process 0 has its coordination service
    resize(3)            ->  Send(0 1, stop, anew): they save a checkpoint after the same step, and end
    exited by all        ->  Spawn(0 1 2)
    a loss               ->  Kill what is left, then Spawn(0 1 2): they begin with the newest checkpoint

Rank 0 saves. Once it has finished a run, a loss of another worker changes nothing: who is left goes on with the script.
A worker whose script has ended waits for the others in JAX. Once no script runs any longer, it is ended.
"""

from __future__ import annotations

from typing import Any

from vnode.errors import WorkerError, layout_message
from vnode.workers.actions import Action, EndService, Kill, Spawn
from vnode.workers.messages import (
    RUN_ENDED,
    ended_early,
    ending,
    last_unsaved,
    never_ran,
    not_come,
    one_line,
    other_script,
)
from vnode.workers.supervision import Decisions, exit_code
from vnode.workers.worker_process import ENDING, FINISHED, LOST, READY, STARTING, Limits, Worker

PASSING = ("ProcessError", "CheckpointError")
"""Beginnings of errors that another worker, or a full disk, may cause: then the start is tried again."""

FOLDER = "checkpoint=... in the script, or vnode run --checkpoint FOLDER"


class Restarts(Decisions):
    """Decides for one job whose workers are all replaced at each change.

    Args:
      workers: the number of workers that train.
      most: how many may be asked for at most; None for as many as there are virtual nodes.
      limits: deadlines.

    Attributes:
      furthest: the highest step that a worker has come to.
      anew: why workers are asked to save and end, so that others take their place; empty if they are not.
      broken: when the first worker of this set was lost; None if none was.
      size: how many workers this set has.
      told: whether they know their world.
      repeats: whether this set begins before the step that the one before it had come to.
      coordinator: where process 0 will have its coordination service; empty if it has not said so.
      codes: exit codes of the workers of this set that have come to the end of their run.
      failures: errors of the workers of this set that have failed.
      lost: whether one of this set was lost for another reason.
      saver: rank 0 of this set, once it has come to the run: it saves.
      complete: whether rank 0 of this set has finished its run, and saved it.
    """

    keeps_programs = True

    def __init__(self, workers: int, *, most: int | None = None, limits: Limits | None = None) -> None:
        super().__init__(workers, most, limits)
        self.furthest: int | None = None
        self.broken: float | None = None
        self.begin_set()

    def begin_set(self) -> None:
        """Resets the facts about the set of workers."""
        self.repeats = self.broken is not None
        self.anew, self.told, self.coordinator, self.lost = "", False, "", False
        self.size, self.broken = self.wanted, None
        self.asked: float | None = None
        self.codes: dict[int, int] = {}
        self.saver: Worker | None = None
        self.complete = False
        self.failures: dict[int, str] = {}

    # Events

    def exited(self, number: int, code: int, now: float) -> list[Action]:
        """The process of a worker has ended."""
        worker = self.workers.pop(number, None)
        if worker is None or self.over:
            return self.settle(now)
        worker.code = code if worker.script_code is None else worker.script_code
        if worker.state == FINISHED and self.leaves_work(worker):
            self.complete = False
            self.lose(worker, ending(worker.code), now)
        elif worker.state in (FINISHED, ENDING):
            self.record("exited", worker, ending(worker.code))
            if worker.state == FINISHED:
                self.codes[number] = worker.code
                if number == 0:
                    self.first_ended(now)
        elif worker.state == STARTING and not self.trained and worker.code >= 0 and not self.stopping:
            self.end(worker.code or 1, never_ran(worker) if worker.code == 0 else ended_early(worker))
        elif worker.state != LOST:
            worker.error = worker.error or (ending(worker.code) if worker.code > 0 else None)
            self.lose(worker, ending(worker.code), now)
        return self.settle(now)

    def leaves_work(self, worker: Worker) -> bool:
        """Whether the script is to be run again though a worker has ended behind its run, or between two runs.

        That is so if the process of rank 0 was killed, or if another one's end was in the way of the next run.
        """
        killed = worker.number == 0 and worker.script_code is None and (worker.code or 0) < 0
        return self.saves and not self.stopping and (killed or (worker.error or "").startswith(PASSING))

    def service(self, generation: int, address: str, now: float) -> list[Action]:
        """Nobody has asked for one."""
        self.do(EndService(address))
        return self.settle(now)

    def check_resize(self, workers: int) -> None:
        """Refuses another number of workers after the run, and where there is no folder of checkpoints.

        Raises:
          WorkerError: so it is.
        """
        if self.codes or any(w.state == FINISHED for w in self.workers.values()):
            raise WorkerError(RUN_ENDED)
        if workers != self.wanted and self.reference is not None and not self.saves:
            raise WorkerError(
                "workers that are replaced at each change need a folder of checkpoints.", remedies=[FOLDER]
            )

    def resized(self, changed: bool, now: float) -> None:
        """Replaces the workers."""
        if changed:
            self.replace(f"{self.wanted} workers are wanted", now)

    def begin_stop(self, why: str, code: int, now: float) -> None:
        """Makes the run end with a checkpoint, unless it ends already; as `stop`."""
        if self.stopping or self.over:
            return
        self.record("stop", None, why)
        self.stopping = why, code
        if any(w.state == FINISHED for w in self.workers.values()):
            return  # the rest of the script, or the next run, which stops at once
        if not any(w.state == READY for w in self.workers.values()):
            self.end(code, f"Stopped before it trained{' again' if self.trained else ''}: {why}.")
        elif not self.anew:
            self.request_end(why, now, anew=self.ends_scripts)

    # Messages of workers

    def handle_message(self, worker: Worker, kind: str, message: dict[str, Any], now: float) -> None:
        """Handles one message of a worker."""
        if kind == "progress":
            self.take_progress(worker, message, now)
            if worker.state == READY and (worker.step or 0) > (self.furthest or 0):
                self.furthest, self.trained = worker.step, True
        elif kind == "leads":
            if worker.number == 0:
                self.coordinator = str(message["address"])
        elif kind == "arrived":
            self.arrive(worker, message, now)
        elif kind == "leaving":
            if not worker.leaving and worker.may_train:
                worker.leaving = str(message["why"])
                self.record("leaving", worker, worker.leaving)
                self.asked = self.asked or now + self.limits.errors
        elif kind == "saved":
            if worker.state == READY:
                worker.state, worker.kill_at = ENDING, now + self.limits.end
        elif kind == "finished":
            if worker.state == READY:
                worker.state, worker.step = FINISHED, int(message["step"])
                self.furthest = worker.step
                self.complete = self.complete or worker.number == 0
                self.record("finished", worker, str(message.get("reason") or ""))
        elif kind == "script_ended":
            worker.script_code = int(message["code"])
            worker.error = worker.error or message.get("error")
            if worker.may_train:
                worker.kill_at = now + self.limits.left  # it only waits for others any more
            elif worker.state == FINISHED and worker.number == 0:
                self.first_ended(now)
        elif kind == "error" and worker.error is None:
            worker.error, worker.errored = str(message["text"]), now
            worker.kill_at = now + self.limits.end
            self.record("error", worker, worker.error)
            if message.get("of_all"):
                self.end(1, worker.error)

    def arrive(self, worker: Worker, message: dict[str, Any], now: float) -> None:
        """A worker has called `run`."""
        worker.facts, worker.checkpoint = dict(message["facts"]), message["checkpoint"]
        worker.virtual_nodes, worker.state = int(message["virtual_nodes"]), READY
        worker.steps = message.get("steps")
        worker.script_code = None
        self.record("arrived", worker, f"process {worker.pid}")
        if worker.number == 0:
            self.saver, self.complete = worker, False
        if self.reference is not None and worker.facts.get("script") != self.reference.facts.get("script"):
            self.end(1, other_script(worker))
            return
        if self.reference is None:
            self.reference = worker
            if not self.saves:
                self.record("no checkpoints", None, f"a loss of a worker ends the job: it has none. Use {FOLDER}")
        self.fit_nodes(worker, now)
        if self.stopping and not self.anew:
            self.send(worker, kind="stop", why=self.stopping[0], anew=self.ends_scripts)
        if all(w.state == READY for w in self.workers.values()) and self.is_whole:
            names = " ".join(str(number) for number in sorted(self.workers))
            self.record("trains", None, f"workers {names}", None if self.repeats else self.furthest)

    # Decisions

    def settle(self, now: float) -> list[Action]:
        """Takes all due decisions; returns the actions since the last event."""
        if not self.over:
            self.expire(now)
            self.follow(now)
        return self.take_actions()

    def expire(self, now: float) -> None:
        """Looks at the deadlines."""
        limits = self.limits
        for worker in list(self.workers.values()):
            silent = worker.connected and now - worker.heard > limits.silence
            if worker.state == LOST:
                continue
            if worker.kill_at is not None and now >= worker.kill_at:
                if worker.state == ENDING:
                    self.put_down(worker)
                elif worker.script_code is not None:
                    worker.kill_at = None
                    self.do(Kill(worker.number))
                else:
                    self.lose(worker, "did not end after its error", now)
            elif silent and worker.may_train:
                self.lose(worker, f"has given no sign of life for {limits.silence:g} s", now)
            elif worker.state == STARTING and now - worker.started > limits.start:
                if not self.trained:
                    self.end(1, self.not_come())
                    return
                self.lose(worker, f"did not call vnode.elastic.run within {limits.start:g} s", now)
        if self.asked is not None and now >= self.asked:
            self.expire_asked(now)
        if self.broken is not None and now >= self.broken + limits.left:
            for worker in list(self.workers.values()):
                if worker.state not in ((LOST,) if self.begins_again else (LOST, FINISHED)):
                    self.put_down(worker)
        self.end_waiting(now)

    def end_waiting(self, now: float) -> None:
        """Ends workers that wait in JAX for one that is gone: no script runs any longer.

        They have a while to end by themselves. JAX ends all others with process 0, so that no other may run a script.
        """
        there = [w for w in self.workers.values() if w.state != LOST]
        if not there or any(w.script_code is None or w.state != FINISHED for w in there):
            return
        for worker in there:
            if worker.kill_at is None:
                worker.kill_at = now + self.limits.end

    def expire_asked(self, now: float) -> None:
        """Handles a deadline: replaces workers that leave, or loses workers that did not save and end in time."""
        self.asked = None
        if self.anew or self.stopping:
            for worker in list(self.workers.values()):
                if worker.may_train:
                    self.lose(worker, f"did not save and end in {self.limits.busy:g} s ({worker.doing})", now)
            return
        leaving = [w for w in self.workers.values() if w.leaving]
        staying = [w for w in self.workers.values() if w.may_train and not w.leaving]
        if staying and self.saves:
            self.replace(f"worker {leaving[0].number} leaves: {leaving[0].leaving}", now)
        elif leaving:
            self.begin_stop(f"workers leave: {leaving[0].leaving}", 143, now)

    def follow(self, now: float) -> None:
        """Begins the next phase, once all workers of this set have arrived, or have ended."""
        if self.over:
            return
        if self.codes and self.broken is None and any(w.state == READY for w in self.workers.values()):
            self.lose_between(now)
        if not self.workers:
            if self.stopping or (self.codes and not self.begins_again):
                self.end(*self.outcome())
            elif self.broken is None or self.may_begin_again(now):
                self.begin_set()
                for number in range(self.wanted):
                    self.workers[number] = Worker(number, now)
                    self.record("start", self.workers[number], "")
                    self.do(Spawn(number))
        elif not self.told and self.coordinator and self.is_whole and all(w.connected for w in self.workers.values()):
            self.told = True
            for worker in self.workers.values():
                self.send(worker, kind="world", coordinator=self.coordinator, count=len(self.workers))

    @property
    def begins_again(self) -> bool:
        """Whether a new set makes the rest of a run that rank 0 of this one has not finished."""
        return self.broken is not None and self.saves and not self.complete and not self.stopping

    def lose_between(self, now: float) -> None:
        """Handles workers that have ended behind a run, while others have come to the script's next one."""
        self.broken, self.lost, self.complete = now, True, False
        for number, code in self.codes.items():
            self.losses.setdefault(number, []).append(now)
            self.record("lost", Worker(number, now), f"{ending(code)} before the script's next run")

    def outcome(self) -> tuple[int, str]:
        """The exit code of a job whose run has ended, and why if it has not ended well."""
        folder = self.reference.checkpoint if self.reference is not None else None
        if self.codes and 0 not in self.codes and self.saver is not None and folder is not None:
            text = last_unsaved(self.saver, folder)
            self.record("unsaved", self.saver, text)
            return 1, text
        if self.codes:
            return exit_code(self.codes[min(self.codes)]), ""
        assert self.stopping is not None
        why, code = self.stopping
        return code, f"Stopped ({why}). The newest checkpoint has what was done."

    def may_begin_again(self, now: float) -> bool:
        """Whether new workers begin with the newest checkpoint after a loss; ends the job otherwise."""
        limits = self.limits
        counts = {n: self.recent_losses(n, now) for n in list(self.losses)}
        often = [n for n, times in counts.items() if times > limits.restarts]
        facts = [f"worker {number}: {error}" for number, error in sorted(self.failures.items())]
        errors = [one_line(error) for error in self.failures.values()]
        passing = any(error.startswith(PASSING) for error in errors)
        if len(self.failures) == self.size and not self.lost and not passing:
            self.end(1, layout_message("All workers have failed.", facts=facts))
        elif not self.trained and not all(error.startswith("ProcessError") for error in errors):
            self.end(1, layout_message("Workers failed before the first step.", facts=facts))
        elif often:
            facts = [f"worker {n} was lost {counts[n]} times in {limits.forget:g} s" for n in often] + facts
            self.end(1, layout_message("Workers are lost again and again.", facts=facts))
        elif self.trained and not self.saves:
            text = "A worker is lost, and the run has no checkpoint to begin again with."
            self.end(1, layout_message(text, facts=facts, remedies=[FOLDER]))
        else:
            self.record("all replaced", None, "new workers begin with the newest checkpoint")
            return True
        return False

    def replace(self, why: str, now: float) -> None:
        """Has the workers save and end, so that others take their place; those that have not begun are killed."""
        if self.anew or self.stopping or self.broken is not None:
            return
        if all(w.state == READY for w in self.workers.values()):
            self.request_end(why, now, anew=True)
        else:
            for worker in list(self.workers.values()):
                self.put_down(worker)
        self.anew = why

    def request_end(self, why: str, now: float, *, anew: bool) -> None:
        """Asks all workers to save a checkpoint and end: for good, or so that others go on."""
        self.asked = now + self.limits.busy
        for worker in self.workers.values():
            if worker.may_train:
                self.send(worker, kind="stop", why=why, anew=anew)

    def put_down(self, worker: Worker) -> None:
        """Kills a worker whose set is over; that is no loss of its own."""
        worker.state, worker.why = LOST, "its set of workers is over"
        self.do(Kill(worker.number))

    def lose(self, worker: Worker, why: str, now: float) -> None:
        """Marks a worker as lost; the others of its set are ended a little later, as they may report more errors."""
        alive = self.workers.get(worker.number) is worker
        worker.state, worker.why = LOST, f"failed: {one_line(worker.error)}" if worker.error else why
        if worker.error:
            self.failures[worker.number] = worker.error
        else:
            self.lost = True
        first = self.broken is None  # the others end because of it
        if first:
            self.losses.setdefault(worker.number, []).append(now)
            self.broken = now
        self.record("lost" if first else "exited", worker, worker.why)
        if alive:
            self.do(Kill(worker.number))

    # Status

    @property
    def is_whole(self) -> bool:
        """Whether all workers of this set are there, and stay."""
        return len(self.workers) == self.size and self.broken is None and not self.anew

    @property
    def saves(self) -> bool:
        """Whether the run has a folder of checkpoints."""
        return self.reference is not None and self.reference.checkpoint is not None

    def members(self) -> list[Worker]:
        """The workers that train, in the order of their ranks."""
        there = [w for _, w in sorted(self.workers.items())]
        return there if self.is_whole and all(w.state == READY for w in there) else []

    def step(self) -> int | None:
        """The number of steps known to be done."""
        return max((w.step for w in self.workers.values() if w.step is not None and w.step >= 0), default=self.furthest)

    def standing_by(self) -> int:
        """None: all of them train."""
        return 0

    def speaker(self) -> int | None:
        """The lowest rank."""
        return 0

    def not_come(self) -> str:
        """The message of workers that did not come to `run`."""
        there = list(self.workers.values())
        missing = [w for w in there if w.state != READY]
        return not_come(len(there) - len(missing), self.wanted, missing, {}, {}, self.limits.start)
