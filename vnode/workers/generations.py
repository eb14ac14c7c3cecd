"""Turns events (a worker arrived, died, said something; time passed) into actions (send, spawn, kill) of a supervisor.

Knows which workers train together, and the deadlines of all waits. Must not know processes, sockets or clocks.

A generation is a set of workers that train together, with a coordination service of its own. The next one is prepared
while the current one trains:

    resize(3)            ->  Spawn(2)
    arrived(worker 2)    ->  StartService(2), then Send(0 1 2, prepare)
    prepared by all      ->  Send(0 1 2, go)
    switched by all      ->  the next generation is the current one
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vnode.errors import WorkerError, layout_message
from vnode.workers.actions import Action, EndService, Kill, Spawn, StartService
from vnode.workers.messages import (
    RUN_ENDED,
    SAME,
    difference,
    ended_early,
    ending,
    is_out_of_memory,
    last_unsaved,
    never_ran,
    not_come,
    one_line,
)
from vnode.workers.supervision import Decisions, exit_code
from vnode.workers.worker_process import ENDING, FINISHED, LOST, READY, STARTING, Limits, Worker


@dataclasses.dataclass(eq=False)
class Generation:
    """Workers, in the order of their ranks, that train or will train together."""

    number: int
    members: list[Worker]
    started: float
    service: str | None = None
    prepared: set[Worker] = dataclasses.field(default_factory=set)
    switched: set[Worker] = dataclasses.field(default_factory=set)
    go: float | None = None
    seen: int | None = None
    finishing: float | None = None


@dataclasses.dataclass(eq=False)
class Leave:
    """Generations that are broken (two, if a switch was under way): who is to leave, and which state each holds."""

    generations: list[int]
    asked: list[Worker]
    started: float
    steps: dict[Worker, int] = dataclasses.field(default_factory=dict)
    first: float | None = None
    complete: bool = False


class Generations(Decisions):
    """Decides for one job whose generations follow one another while processes stay.

    Args:
      workers: the number of workers that train.
      spares: how many more shall stand by.
      most: how many may be asked for at most; None for as many as there are virtual nodes.
      limits: deadlines.
      rejoin: whether workers make a generation only after they have left the one before, and not beside it.

    Attributes:
      current: the generation that trains.
      next: the one that is prepared, or switched to.
      leave: the survivors of a broken one, from the loss until they train again.
    """

    def __init__(
        self,
        workers: int,
        *,
        spares: int = 0,
        most: int | None = None,
        limits: Limits | None = None,
        rejoin: bool = False,
    ) -> None:
        super().__init__(workers, most, limits)
        self.spares = spares
        self.rejoin, self.no_room = rejoin, False
        self.current: Generation | None = None
        self.next: Generation | None = None
        self.leave: Leave | None = None
        self.joining: list[Worker] = []  # those that stood by at the last loss: they wait for no others that start
        self.last: list[Worker] = []  # in order of ranks: those of the last generation that trained
        self.anew: list[float] = []  # when all were asked to leave, though none was lost
        self.saver: Worker | None = None  # rank 0 of the last generation that trained
        self.unsaved = ""  # the message, if it was lost before it had reported the last checkpoint
        self.refused: dict[int, str] = {}  # numbers that are not started again until others are asked for, and why
        self.generation, self.call, self.failures = 0, 0, 0

    # Events

    def exited(self, number: int, code: int, now: float) -> list[Action]:
        """The process of a worker has ended."""
        worker = self.workers.pop(number, None)
        if worker is not None and not self.over:
            worker.code = code
            if worker.state == STARTING and not self.trained and code >= 0 and not self.stopping:
                self.end(code or 1, never_ran(worker) if code == 0 else ended_early(worker))
            elif worker.state in (STARTING, READY):
                self.lose(worker, ending(code), now)
            elif worker.state in (FINISHED, ENDING):
                self.record("exited", worker, ending(code))
                if self.last and worker is self.last[0]:
                    self.first_ended(now)
        return self.settle(now)

    def service(self, generation: int, address: str, now: float) -> list[Action]:
        """A requested service has started."""
        following = self.next
        if self.over or following is None or following.number != generation:
            self.do(EndService(address))
        else:
            following.service, self.services[address] = address, list(following.members)
            members = [holder(worker) for worker in following.members]
            for worker in following.members:
                self.send(
                    worker,
                    kind="prepare",
                    generation=generation,
                    members=members,
                    service=address,
                    rejoin=self.rejoin or self.no_room,
                )
        return self.settle(now)

    def check_resize(self, workers: int) -> None:
        """Refuses new workers after the run.

        Raises:
          WorkerError: so it is.
        """
        if self.call > 0 and workers > self.wanted:
            raise WorkerError(RUN_ENDED)

    def resized(self, changed: bool, now: float) -> None:
        """Cancels a prepared generation of another size; refused workers may try again."""
        self.refused.clear()
        if changed:
            self.failures = 0
        if changed and self.current is not None:
            self.cancel("another number of workers was asked for")

    def begin_stop(self, why: str, code: int, now: float) -> None:
        """Makes the run end with a checkpoint, unless it ends already; as `stop`."""
        if not self.stopping and not self.over:
            self.record("stop", None, why)
            self.stopping = why, code
            if self.current is not None:
                self.cancel("the run is to stop")
                self.send_stop()
            elif not self.trained:
                self.end(code, f"Stopped before it trained: {why}.")

    def is_awaited(self, worker: Worker) -> bool:
        """Not if it is the last one; also after its run, if others have come to the script's next run."""
        others = [w for w in self.workers.values() if w is not worker]
        between = worker.state == FINISHED and worker.connected and worker.again is None and self.current is None
        if between:
            return any(w.again is not None or w.state == READY for w in others)
        return worker.may_train and any(w.is_usable for w in others)

    # Messages of workers

    def handle_message(self, worker: Worker, kind: str, message: dict[str, Any], now: float) -> None:
        """Handles one message of a worker."""
        if kind == "progress":
            self.take_progress(worker, message, now)
        elif kind == "arrived":
            if worker.state == FINISHED:
                worker.again = message
            elif worker.state == STARTING:
                self.arrive(worker, message, now)
        elif kind == "prepared":
            if self.next is not None and message["generation"] == self.next.number:
                self.next.prepared.add(worker)
                self.record("prepared", worker, f"generation {self.next.number}, {float(message['seconds']):.2f} s")
        elif kind == "unprepared":
            if self.next is not None and message["generation"] == self.next.number:
                self.unprepared(worker, str(message["error"]), message.get("differs"), now)
        elif kind == "switched":
            worker.step = int(message["step"])
            if self.next is not None and message["generation"] == self.next.number:
                self.next.switched.add(worker)
        elif kind == "left":
            leave = self.leave
            if leave is not None and worker in leave.asked and int(message["generation"]) in leave.generations:
                leave.steps.setdefault(worker, int(message["step"]))
                leave.first = leave.first or now
        elif kind == "leaving":
            if not worker.leaving and worker.state in (STARTING, READY):
                self.leaves(worker, str(message["why"]), now)
        elif kind == "lost_peer":  # a hint: who is lost, the supervisor finds out itself
            self.record("lost peer", worker, str(message["text"]))
            if message.get("vain"):
                worker.vain = int(message["generation"]), now
        elif kind == "disconnected":
            if worker in (members := self.services.get(message["service"], [])):
                members.remove(worker)
        elif kind == "finished":
            if worker.state == READY:
                worker.state, worker.step = FINISHED, int(message["step"])
                self.record("finished", worker, str(message.get("reason") or ""))
        elif kind == "error":
            if worker.error is None:
                worker.error, worker.errored = str(message["text"]), now
                worker.kill_at = now + self.limits.end
                self.record("error", worker, worker.error)
                if message.get("of_all"):
                    self.end(1, worker.error)
                if not self.trained and not self.active():
                    self.end(1, f"Worker {worker.number} failed before the first step.\n{worker.error}")
        else:
            raise ValueError(f"kind {kind!r}")

    def arrive(self, worker: Worker, message: dict[str, Any], now: float) -> None:
        """Handles a worker that has called `run`; refuses it if it differs from the others."""
        worker.call, worker.handover = int(message["call"]), str(message["handover"])
        worker.facts, worker.virtual_nodes = dict(message["facts"]), int(message["virtual_nodes"])
        worker.steps = message.get("steps")
        worker.checkpoint = message.get("checkpoint") or None
        if worker.call != self.call:
            self.tell_end(worker, "the other workers are in another run of the script", 0, now)
            return
        worker.state = READY
        self.record("arrived", worker, "")
        if self.reference is None or self.reference.call != self.call:
            self.reference = worker
            self.fit_nodes(worker, now)
        elif why := difference(self.reference, worker):
            if not self.trained:
                self.end(1, why)
            else:
                self.refuse(worker, why, now)

    def refuse(self, worker: Worker, why: str, now: float) -> None:
        """Ends a worker that differs from the others; another process with its number is likely to, too."""
        self.record("refused", worker, why)
        self.refused[worker.number] = one_line(why)
        self.tell_end(worker, why, 1, now)

    def leaves(self, worker: Worker, why: str, now: float) -> None:
        """A worker was told to end by others, as by a notice of preemption: the others go on without it.

        One that trains does so until the next generation, which it is not in, has begun.
        """
        worker.leaving = why
        self.record("leaving", worker, why)
        if worker not in self.active() + (self.leave.asked if self.leave else []):
            self.tell_end(worker, f"it leaves: {why}", 0, now)
        elif self.current is not None and self.next is not None and worker in self.next.members:
            self.cancel(f"worker {worker.number} leaves")

    def unprepared(self, worker: Worker, error: str, differs: int | None, now: float) -> None:
        """A worker could not prepare the next generation; perhaps since another one differs."""
        assert self.next is not None
        self.record("unprepared", worker, error)
        trains = self.current.members if self.current else self.leave.asked if self.leave else self.next.members
        odd = next((w for w in self.next.members if w.number == differs and w not in trains), None)
        if odd is not None:
            self.refuse(odd, layout_message(error, remedies=[SAME]), now)
        elif not self.trained and self.leave is None:
            self.end(1, f"Worker {worker.number} could not prepare the first step.\n{error}")
        elif self.current is not None and worker in self.current.members:
            self.cancel(f"worker {worker.number} could not prepare it")
            if is_out_of_memory(error) and not (self.rejoin or self.no_room):
                self.no_room = True  # beside this generation: there may be once it is left
                return
            self.failures += 1
            if self.failures > 1:
                self.wanted = len(self.current.members)
                self.record("gave up", None, f"goes on with {self.wanted} workers: {error}")
        else:
            self.lose(worker, f"could not prepare generation {self.next.number}: {error}", now)

    # Decisions

    def settle(self, now: float) -> list[Action]:
        """Takes all due decisions; returns the actions since the last event."""
        while not self.over and (self.expired(now) or self.advance(now)):
            pass
        if not self.over:
            self.fill(now)
            self.end_services()
        return self.take_actions()

    def expired(self, now: float) -> bool:
        """Handles passed deadlines. Returns whether there was one."""
        limits = self.limits
        for worker in list(self.workers.values()):
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill_at = None
                if worker.state == LOST or worker.state == ENDING:
                    self.do(Kill(worker.number))
                elif worker.state != FINISHED:
                    self.lose(worker, "did not end after its error", now)
                    self.do(Kill(worker.number))
            elif worker.state != STARTING and self.is_awaited(worker) and now - worker.heard > limits.silence:
                self.lose(worker, f"has given no sign of life for {limits.silence:g} s", now)
            elif worker.state == STARTING and now - worker.started > limits.start:
                if not self.trained:
                    self.end(1, self.not_come())
                    return False
                self.lose(worker, f"did not call vnode.elastic.run within {limits.start:g} s", now)
            else:
                continue
            return True
        if self.leave is not None and not self.leave.complete:
            late = self.late_to_leave(self.leave, now)
            for worker in late:
                self.lose(worker, f"did not leave generation {self.leave.generations[-1]} ({worker.doing})", now)
            return bool(late)
        if self.next is not None:
            return self.expired_next(self.next, now)
        return False

    def late_to_leave(self, leave: Leave, now: float) -> list[Worker]:
        """Workers that have not left a broken generation in time.

        A worker that is busy by itself has longer, and looks for losses only after that: its time to leave begins then.
        """
        limits, since = self.limits, now - leave.started
        others_left = leave.first is not None and now - leave.first >= limits.left

        def is_late(worker: Worker) -> bool:
            if since >= limits.busy:
                return True
            if worker.busy:
                return False
            if worker.free_since > leave.started:
                return now - worker.free_since >= limits.leave
            return others_left or since >= limits.leave

        return [w for w in leave.asked if w.is_usable and w not in leave.steps and is_late(w)]

    def expired_next(self, following: Generation, now: float) -> bool:
        """Looks at the deadlines of the next generation."""
        if following.go is None:
            if now - following.started <= self.limits.start:
                return False
            if following.service is None:
                self.end(1, f"No coordination service of jax has started within {self.limits.start:g} s.")
                return False
            late = [w for w in following.members if w.state == READY and w not in following.prepared]
            trains = set(self.current.members) if self.current else set()
            if outside := [w for w in late if w not in trains]:
                for worker in outside:
                    self.lose(worker, f"did not prepare generation {following.number} in time ({worker.doing})", now)
            elif late:
                self.unprepared(late[0], f"not ready after {self.limits.start:g} s ({late[0].doing})", None, now)
            return bool(late)
        steps = [worker.step for worker in following.members if worker.step is not None]
        if steps and max(steps) != following.seen:  # the old generation still trains
            following.seen, following.go = max(steps), now
        if now - following.go <= self.limits.start:
            return False
        late = [w for w in following.members if w.state == READY and w not in following.switched]
        for worker in [w for w in late if not w.waits] or late:
            self.lose(worker, f"did not switch to generation {following.number} ({worker.doing})", now)
        return bool(late)

    def advance(self, now: float) -> bool:
        """Takes one decision towards the wanted workers. Returns whether there was one to take."""
        following = self.next
        if following is not None and following.go is None and not all(w.is_usable for w in following.members):
            gone = next(w for w in following.members if not w.is_usable)
            self.cancel(f"worker {gone.number} {gone.why or gone.state}")
            return True
        active = self.active()
        lost = [w for w in active if w.state != FINISHED and not w.is_usable]
        if lost:
            return self.broken(active, lost, now)
        if self.current is not None and self.finish_stalls(self.current, now):
            return self.broken(active, [], now)
        if self.waits_in_vain(active, now):
            return self.broken(active, [], now)
        if following is not None and following.go is not None:
            if all(w in following.switched or w.state == FINISHED for w in following.members):
                self.adopt(following, now)
                return True
            trained = self.current.members if self.current else []
            if trained and all(w.state == FINISHED and w not in following.switched for w in trained):
                self.next = None  # the run came to its end first
                self.complete(trained, now)
                return True
            return False
        if self.leave is not None:
            return self.recover(self.leave, now)
        if self.current is not None and all(w.state == FINISHED for w in self.current.members):
            self.complete(self.current.members, now)
            return True
        if following is not None:
            if following.service is None or not following.prepared.issuperset(following.members):
                return False
            if self.current is not None:
                if any(w.state == FINISHED for w in self.current.members):
                    self.cancel("the run ends")
                    return True
                self.start(following, None, self.current.members, now)
            else:
                self.start(following, -1, [], now)
            return True
        members = self.desired()
        if members is None or (self.current is not None and members == self.current.members):
            return False
        if members:
            self.propose(members, now)
        else:
            assert self.current is not None
            self.begin_stop(f"all workers leave: {self.current.members[0].leaving}", 143, now)
        return True

    def finish_stalls(self, current: Generation, now: float) -> bool:
        """Whether some workers have finished, and the others stall: their next step may need those."""
        others = [w for w in current.members if w.state != FINISHED]
        if len(others) in (0, len(current.members)):
            return False
        seen = sum(w.step or 0 for w in others)
        if current.finishing is None or seen != current.seen:
            current.finishing, current.seen = now, seen
        return now - current.finishing > self.limits.finish

    def waits_in_vain(self, active: list[Worker], now: float) -> bool:
        """Whether a worker has waited for others in vain, and none of them is known to be lost.

        All are then asked to leave: the one at fault does not, and is lost. If all do, they train again. As often as
        a worker is started again, this is tried; after that, the worker's error counts.
        """
        numbers = {g.number for g in (self.current, self.next) if g is not None}
        hints = [w.vain[1] for w in active if w.vain is not None and w.vain[0] in numbers]
        recent = [t for t in self.anew if now - t < self.limits.forget]
        if not hints or now - min(hints) < self.limits.vain or len(recent) >= self.limits.restarts:
            return False
        self.anew = [*recent, now]
        return True

    def active(self) -> list[Worker]:
        """The workers on which training depends: the current generation's, and those told to switch to the next."""
        found = list(self.current.members) if self.current else []
        if self.next is not None and self.next.go is not None:
            found += [w for w in self.next.members if w not in found]
        return found

    def broken(self, active: list[Worker], lost: list[Worker], now: float) -> bool:
        """Handles lost workers of a generation: tells the others to leave it."""
        errors = [w.errored for w in active if w.error is not None]
        survivors = [w for w in active if w.is_usable]
        if not survivors and self.leave is not None:  # of the generation before, those that the next one left out
            survivors = [w for w in self.leave.asked if w.is_usable]
        if errors and survivors and now < min(errors) + self.limits.errors:
            return False
        for worker in lost:
            if worker.state == READY:
                self.lose(worker, "failed", now)
        self.last = [w for w in active if w.state in (READY, FINISHED)] or self.last
        left = [g for g in (self.current, self.next) if g is not None and (g is self.current or g.go is not None)]
        if self.next in left:
            self.next = None
        self.leave, self.current = Leave([g.number for g in left], survivors, now), None
        for generation in left:  # a worker may still be in the old one, or in the new one already
            ranks = {worker: rank for rank, worker in enumerate(generation.members)}
            gone = lost or [w for w in active if w.state == FINISHED]
            said = [{"worker": w.number, "rank": ranks.get(w, -1), "why": w.why or w.state} for w in gone]
            said = said or [{"worker": -1, "rank": -1, "why": "some wait for others in vain: all begin anew"}]
            for worker in survivors:
                self.send(worker, kind="leave", generation=generation.number, lost=said)
        if not survivors:
            self.nobody_left(active, now)
        return True

    def nobody_left(self, active: list[Worker], now: float) -> None:
        """Handles the loss of all workers: the run is over, or new workers begin from its checkpoint."""
        self.leave = None
        self.cancel("nobody is left")
        if finished := [w for w in active if w.state == FINISHED]:
            if self.checkpoint is not None and self.saver not in finished:
                self.lose_checkpoint(self.checkpoint)
            self.complete(finished, now)
            return
        if self.checkpoint is not None and self.respawns() and not any(w.error for w in active):
            self.last, self.reference = [], next(iter(self.spare()), None)
            self.refused.clear()
            self.record("all lost", None, "new workers begin with the newest checkpoint")
            return
        first = min((w for w in active if w.error), key=lambda w: w.errored, default=None)
        facts = [f"worker {w.number} {w.why}" for w in active]
        text = first.error if first is not None and first.error else ""
        self.end(1, layout_message("All workers are lost.", facts=facts) + (f"\n{text}" if text else ""))

    def lose_checkpoint(self, folder: str) -> None:
        """The run has ended without the report of its last checkpoint: the job fails in the end."""
        assert self.saver is not None
        self.unsaved = last_unsaved(self.saver, folder)
        self.record("unsaved", self.saver, self.unsaved)

    def recover(self, leave: Leave, now: float) -> bool:
        """Has the survivors of a broken generation train again, from the highest step that one of them holds."""
        survivors = [w for w in leave.asked if w.is_usable]
        if not survivors:
            self.nobody_left(list(dict.fromkeys(leave.asked + self.last)), now)
            return True
        if not leave.complete:
            if any(w not in leave.steps for w in survivors):
                return False
            leave.complete = True
            self.record("left", None, ", ".join(f"worker {w.number}: step {leave.steps[w]}" for w in survivors))
        if self.next is None:
            # others compile first, and join while these train; in the same change if each one restarts workers
            trained = [w for w in survivors if leave.steps[w] >= 0] or survivors
            self.joining = [w for w in self.spare() if w not in trained]
            others = self.joining if self.rejoin or self.no_room else []
            self.propose((trained + others)[: max(self.wanted, 1)], now)
            return True
        if self.next.service is None or not self.next.prepared.issuperset(self.next.members):
            return False
        step = max(leave.steps[w] for w in survivors)
        if step < 0 and self.trained and self.checkpoint is None:
            self.record("all repeated", None, "no worker that is left has a state, and there are no checkpoints")
        self.start(self.next, step, [w for w in survivors if leave.steps[w] == step] if step >= 0 else [], now)
        return True

    def start(self, following: Generation, step: int | None, holders: list[Worker], now: float) -> None:
        """Tells the workers of both generations to switch to the next one."""
        following.go = now
        told = list(following.members) + [w for w in holders if w not in following.members]
        said = [holder(worker) for worker in holders]
        for worker in told:
            self.send(worker, kind="go", generation=following.number, holders=said, step=step)
        begins = "from the start" if self.checkpoint is None else "from the newest checkpoint, or the start"
        where = {None: "from the last step that all have", -1: begins}.get(step, f"from step {step}")
        self.record("go", None, f"generation {following.number} {where}", step)

    def adopt(self, following: Generation, now: float) -> None:
        """Makes the next generation the current one, once all have switched."""
        old = list(self.current.members) if self.current else self.leave.asked if self.leave else []
        self.current, self.next, self.leave, self.trained, self.failures = following, None, None, True, 0
        self.last, self.saver, self.no_room = list(following.members), following.members[0], False
        names = " ".join(str(w.number) for w in following.members)
        step = max((w.step for w in following.members if w.step is not None), default=None)
        self.record("trains", None, f"generation {following.number}: workers {names}", step)
        for worker in old:
            if worker in following.members or worker.state != READY:
                continue
            if worker.leaving:
                self.tell_end(worker, f"it leaves: {worker.leaving}", 0, now)
            else:
                self.send(worker, kind="release", generation=following.number)
                worker.state, worker.started, worker.doing = STARTING, now, "is released"
        if self.stopping:
            self.send_stop()

    def complete(self, members: list[Worker], now: float) -> None:
        """The run has come to its end: its workers go on to the ends of their scripts, or to the next run."""
        self.record("complete", None, "", max((w.step for w in members if w.step is not None), default=None))
        self.current, self.leave, self.last = None, None, list(members)
        self.cancel("the run has ended")
        self.call += 1
        for worker in list(self.workers.values()):
            if worker.state in (STARTING, READY):
                self.tell_end(worker, "the run has ended", 0, now)

    def desired(self) -> list[Worker] | None:
        """The workers that shall train next, or None as long as some are waited for, or nothing is to be changed.

        An empty list if all that train leave, and no other is ready.
        """
        if self.call > 0 and self.current is None:
            return self.desired_again()
        coming = any(w.state == STARTING for w in self.workers.values()) or self.respawns()
        if self.current is None:
            ready = self.spare()
            if len(ready) >= self.wanted or (ready and self.trained and not coming):
                return ready[: self.wanted]
            if not coming and not self.over:
                self.end(1, self.not_come())
            return None
        if self.stopping or any(w.state == FINISHED for w in self.current.members):
            return None
        members = [w for w in self.current.members if not w.leaving]
        coming = coming and len(members) == len(self.current.members)  # who leaves waits for nobody
        wanted = min(self.wanted, self.current.members[0].virtual_nodes)
        if len(members) >= wanted:
            return members[:wanted]
        ready = self.spare()[: wanted - len(members)]
        waits = coming and len(members) + len(ready) < wanted and not any(w in self.joining for w in ready)
        return None if waits else members + ready

    def desired_again(self) -> list[Worker] | None:
        """The workers of a later run of the script: those that have come to it, when all have, or have ended."""
        alive = [w for w in self.workers.values() if w.state in (FINISHED, STARTING, READY)]
        for worker in alive:
            if worker.state == FINISHED and worker.again is not None:
                message, worker.again, worker.state = worker.again, None, STARTING
                self.arrive(worker, message, worker.heard)
        ready = [w for w in alive if w.state == READY]
        if not self.workers:
            well = any(w.state == FINISHED for w in self.last)
            why = self.unsaved if well else "All workers were lost after their run."
            self.end(self.code() or int(bool(why)), why)
        return sorted(ready, key=lambda w: w.number) if ready and len(ready) == len(alive) else None

    def spare(self) -> list[Worker]:
        """Workers that could join, by number."""
        taken = self.active()
        return sorted((w for w in self.workers.values() if w.is_usable and w not in taken), key=lambda w: w.number)

    def propose(self, members: list[Worker], now: float) -> None:
        """Begins to prepare a generation."""
        self.generation += 1
        self.next = Generation(self.generation, list(members), now)
        names = " ".join(str(w.number) for w in members)
        self.record("prepare", None, f"generation {self.generation}: workers {names}")
        self.do(StartService(self.generation))

    def cancel(self, why: str) -> None:
        """Cancels the next generation, unless workers were told to switch to it."""
        following = self.next
        if following is None or following.go is not None:
            return
        self.next = None
        self.record("cancel", None, f"generation {following.number}: {why}")
        for worker in following.members:
            if worker.state == READY and following.service is not None:
                self.send(worker, kind="cancel", generation=following.number, why=why)

    def fill(self, now: float) -> None:
        """Starts workers that are missing, and ends those that nobody needs."""
        if self.call > 0 or self.stopping or self.over:
            return
        alive = [w for w in self.workers.values() if w.state in (STARTING, READY)]
        if not any(w.state == FINISHED for w in self.active() + self.last):
            missing = self.wanted + self.spares - sum(not w.leaving for w in alive)
            for number in self.vacant(now)[: max(missing, 0)]:
                self.workers[number] = Worker(number, now)
                self.record("start", self.workers[number], "")
                self.do(Spawn(number))
        if self.current is None or self.next is not None or self.leave is not None:
            return
        extra = len(alive) - max(self.wanted + self.spares, len(self.current.members))
        idle = [w for w in alive if w not in self.current.members]
        idle.sort(key=lambda w: (w.state == STARTING, w.number), reverse=True)
        for worker in idle[: max(extra, 0)] if len(self.current.members) <= self.wanted else []:
            self.tell_end(worker, "it is not needed any more", 0, now)

    def vacant(self, now: float) -> list[int]:
        """The worker numbers for which a process may be started."""
        free = []
        for number in range(self.wanted + self.spares):
            recent = self.recent_losses(number, now)
            if number not in self.workers and number not in self.refused and recent <= self.limits.restarts:
                free.append(number)
        return free

    def respawns(self) -> bool:
        """Whether a worker that is missing will be started once its process has ended, or is about to be."""
        restarts = self.limits.restarts
        numbers = [number for number in range(self.wanted + self.spares) if number not in self.refused]
        alive = sum(w.state in (STARTING, READY) and not w.leaving for w in self.workers.values())
        if self.call > 0 or self.stopping or alive >= self.wanted + self.spares:
            return False
        ending = {n for n, w in self.workers.items() if w.state in (LOST, ENDING) or w.leaving}
        return any((n in ending or n not in self.workers) and len(self.losses.get(n, ())) <= restarts for n in numbers)

    def end_services(self) -> None:
        """Ends services from which all workers have disconnected, or whose processes have ended.

        A client of jax does not survive its service: it aborts its process.
        """
        kept = {g.service for g in (self.current, self.next) if g is not None}
        for address, members in list(self.services.items()):
            if address not in kept and all(self.workers.get(w.number) is not w for w in members):
                del self.services[address]
                self.do(EndService(address))

    # Small things

    def lose(self, worker: Worker, why: str, now: float) -> None:
        """Marks a worker as lost, and ends its process."""
        alive = self.workers.get(worker.number) is worker
        failed = worker.error is not None and alive  # it ends by itself, with a traceback
        worker.state, worker.why = LOST, f"failed: {one_line(worker.error)}" if worker.error else why
        worker.kill_at = now + self.limits.end if failed else None
        self.losses.setdefault(worker.number, []).append(now)
        self.record("lost", worker, worker.why)
        often = self.recent_losses(worker.number, now)
        if often > self.limits.restarts and self.trained and not self.stopping:
            within = f"{self.limits.forget / 60:.0f} minutes"
            self.record("not replaced", worker, f"it was lost {often} times within {within} (--max-restarts)")
        if alive and not failed:
            self.do(Kill(worker.number))

    def tell_end(self, worker: Worker, why: str, code: int, now: float) -> None:
        """Tells a worker to end; kills one that cannot hear it."""
        worker.state, worker.why = ENDING, why
        self.record("end", worker, why)
        if worker.connected:
            self.send(worker, kind="end", why=why, code=code)
            worker.kill_at = now + self.limits.end
        else:
            self.do(Kill(worker.number))

    def send_stop(self) -> None:
        """Asks those that train to stop."""
        assert self.current is not None and self.stopping is not None
        for worker in self.active():
            if worker.state == READY:
                self.send(worker, kind="stop", why=self.stopping[0], anew=self.ends_scripts)

    def members(self) -> list[Worker]:
        """The workers that train, in the order of their ranks; after the end of a run those that were last."""
        return self.current.members if self.current else [w for w in self.last if w.state == READY]

    def step(self) -> int | None:
        """The number of steps known to be done."""
        return max((w.step for w in self.last if w.step is not None), default=None)

    @property
    def checkpoint(self) -> str | None:
        """The run's folder of checkpoints."""
        return None if self.reference is None else self.reference.checkpoint

    def standing_by(self) -> int:
        """The number of workers that could join."""
        return len(self.spare()) if self.current else 0

    def speaker(self) -> int | None:
        """The worker whose output is passed on: the lowest rank that is there."""
        there = [w for w in self.active() or self.last if self.workers.get(w.number) is w and w.state != LOST]
        if there:
            return there[0].number
        return None if self.trained else min(self.workers, default=None)

    def code(self) -> int:
        """The exit code of a run that came to its end: that of its lowest rank."""
        codes = [w.code for w in self.last if w.state == FINISHED and w.code is not None]
        return exit_code(codes[0]) if codes else 0

    def not_come(self) -> str:
        """The message of workers that did not come to `run`."""
        there, limits = list(self.workers.values()), self.limits
        missing = [w for w in there if w.state != READY]
        lost = {number: len(times) for number, times in self.losses.items() if len(times) > limits.restarts}
        return not_come(len(there) - len(missing), self.wanted, missing, lost, self.refused, limits.start)


def holder(worker: Worker) -> dict[str, Any]:
    """A worker, and where its state can be fetched."""
    return {"worker": worker.number, "handover": worker.handover}
