"""The base class of decisions about a job's workers: events of a supervisor come in, actions go out.

Knows workers and actions. Must not know what follows from an event.
"""

from __future__ import annotations

import abc
from typing import Any

from vnode.workers.actions import Action, End, Kill, Record, Send
from vnode.workers.messages import check_number, too_few_nodes
from vnode.workers.worker_process import FINISHED, Limits, Worker


class Decisions(abc.ABC):
    """Decides for one job. Each public method is an event; it returns actions, to be done in their order.

    Args:
      workers: the number of workers that train.
      most: how many may be asked for at most; None for as many as there are virtual nodes.
      limits: deadlines.

    Attributes:
      keeps_programs: whether a worker may read the programs that one before it with its number has compiled.
      connects: whether workers connect to the supervisor.
      wanted: how many workers shall train.
      ends_scripts: whether a stop ends the script, too, as others go on with the run later.
      least: the fewest that may; None if it must be as many as were asked for.
      workers: the processes that have not ended, by number.
      reference: the first worker that called `run`; None if none has.
      losses: by number, when workers of that number were lost.
      trained: whether a step was ever made.
      stopping: why the run is to end, and the exit code of the job if nothing trains.
      over: how the job ended; None if it has not.
      services: addresses of coordination services, with the workers that are connected to them.
    """

    keeps_programs = False
    connects = True

    def __init__(self, workers: int, most: int | None, limits: Limits | None) -> None:
        self.wanted, self.most, self.limits = workers, most, limits or Limits()
        self.least: int | None = None
        self.ends_scripts = False
        self.workers: dict[int, Worker] = {}
        self.reference: Worker | None = None
        self.losses: dict[int, list[float]] = {}
        self.trained = False
        self.stopping: tuple[str, int] | None = None
        self.over: End | None = None
        self.services: dict[str, list[Worker]] = {}
        self.actions: list[Action] = []

    # Events

    def begin(self, now: float) -> list[Action]:
        """The job begins."""
        return self.settle(now)

    def slept(self, seconds: float) -> None:
        """The supervisor was stopped for so long: nobody was silent to it meanwhile."""
        for worker in self.workers.values():
            worker.heard += seconds
            worker.started += seconds

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        for worker in self.workers.values():
            if worker.rest_until is not None and now >= worker.rest_until:
                self.put_to_rest(worker)
        return self.settle(now)

    def connected(self, number: int, pid: int, now: float) -> list[Action]:
        """A worker has connected."""
        if worker := self.workers.get(number):
            worker.connected, worker.pid, worker.heard = True, pid, now
            self.send(worker, kind="welcome")
        return self.settle(now)

    def message(self, number: int, message: dict[str, Any], now: float) -> list[Action]:
        """A worker has said something."""
        worker = self.workers.get(number)
        if worker is None or worker.is_lost:
            return []
        worker.heard = now
        try:
            self.handle_message(worker, message["kind"], message, now)
        except (KeyError, TypeError, ValueError) as error:
            self.lose(worker, f"sent a message that cannot be read ({type(error).__name__}: {error})", now)
        return self.settle(now)

    def closed(self, number: int, why: str, now: float) -> list[Action]:
        """The connection of a worker is closed."""
        worker = self.workers.get(number)
        if worker is not None and worker.may_train:
            self.lose(worker, why, now)
        return self.settle(now)

    def stopped(self, number: int, now: float) -> list[Action]:
        """The process of a worker has been stopped for a while, as by SIGSTOP."""
        worker = self.workers.get(number)
        if worker is not None and self.is_awaited(worker):
            self.lose(worker, "is stopped (SIGSTOP or a debugger)", now)
        elif worker is not None and worker.rest_until is not None:
            self.put_to_rest(worker)
        return self.settle(now)

    @abc.abstractmethod
    def exited(self, number: int, code: int, now: float) -> list[Action]:
        """The process of a worker has ended."""

    @abc.abstractmethod
    def service(self, generation: int, address: str, now: float) -> list[Action]:
        """A requested coordination service has started."""

    def resize(self, workers: int, now: float) -> list[Action]:
        """Someone asks for another number of workers.

        Raises:
          WorkerError: so many cannot be.
        """
        check_number(workers, self.most, self.reference.virtual_nodes if self.reference else None)
        self.check_resize(workers)
        changed = workers != self.wanted
        if changed:
            self.record("resize", None, f"{self.wanted} -> {workers} workers asked for")
            self.wanted = workers
            self.losses.clear()
        self.resized(changed, now)
        return self.settle(now)

    def stop(self, why: str, code: int, now: float) -> list[Action]:
        """Someone asks the run to end with a checkpoint.

        Args:
          why: for the log.
          code: the exit code of the job if nothing trains yet.
          now: the time.
        """
        self.begin_stop(why, code, now)
        return self.settle(now)

    # Decisions

    def is_awaited(self, worker: Worker) -> bool:
        """Whether training depends on a sign of life of a worker."""
        return worker.may_train

    @abc.abstractmethod
    def handle_message(self, worker: Worker, kind: str, message: dict[str, Any], now: float) -> None:
        """Handles one message of a worker."""

    @abc.abstractmethod
    def settle(self, now: float) -> list[Action]:
        """Takes all due decisions; returns the actions since the last event."""

    @abc.abstractmethod
    def lose(self, worker: Worker, why: str, now: float) -> None:
        """Marks a worker as lost, and ends its process."""

    @abc.abstractmethod
    def check_resize(self, workers: int) -> None:
        """Refuses another number of workers where it cannot be.

        Raises:
          WorkerError: it cannot.
        """

    @abc.abstractmethod
    def resized(self, changed: bool, now: float) -> None:
        """Handles a request for a number of workers; `changed` says whether it is a new number."""

    @abc.abstractmethod
    def begin_stop(self, why: str, code: int, now: float) -> None:
        """Makes the run end with a checkpoint, unless it ends already; as `stop`."""

    @abc.abstractmethod
    def members(self) -> list[Worker]:
        """The workers that train, in the order of their ranks."""

    # Small things

    def recent_losses(self, number: int, now: float) -> int:
        """The number of losses of a worker number within `Limits.forget` seconds; earlier ones are forgotten."""
        self.losses[number] = [t for t in self.losses.get(number, ()) if now - t < self.limits.forget]
        return len(self.losses[number])

    def first_ended(self, now: float) -> None:
        """The run is complete, and the process of its lowest rank has ended: the others have a while to end, too."""
        for worker in self.workers.values():
            if worker.state == FINISHED and worker.rest_until is None:
                worker.rest_until = now + self.limits.busy

    def put_to_rest(self, worker: Worker) -> None:
        """Ends a worker that does not end by itself, though the run is complete, and the lowest rank has ended."""
        worker.rest_until = None
        self.record("killed", worker, "the run is complete, and this worker has not ended")
        self.do(Kill(worker.number))

    def fit_nodes(self, worker: Worker, now: float) -> None:
        """Looks whether there are as many virtual nodes as workers; where fewer workers may be, has fewer."""
        nodes = worker.virtual_nodes
        if nodes >= self.wanted:
            return
        if self.least is None or nodes < self.least:
            self.end(1, too_few_nodes(nodes, self.wanted))
        else:
            self.record("resize", None, f"{self.wanted} -> {nodes} workers: the step has {nodes} virtual nodes")
            self.wanted = nodes
            self.resized(True, now)

    def take_progress(self, worker: Worker, message: dict[str, Any], now: float) -> None:
        """Records the progress of a worker; the step of a finished one stays its last."""
        if worker.busy and not message.get("busy"):
            worker.free_since = now
        worker.step = worker.step if worker.state == FINISHED else message["step"]
        worker.doing = str(message["doing"])
        worker.nodes, worker.metrics = int(message["nodes"]), dict(message["metrics"] or {})
        worker.waits, worker.busy = bool(message.get("waits")), bool(message.get("busy"))

    def do(self, action: Action) -> None:
        """Adds an action, unless the job has ended: whoever runs it ends all processes then."""
        if not self.over:
            self.actions.append(action)

    def take_actions(self) -> list[Action]:
        """The actions since the last event."""
        done, self.actions = self.actions, []
        return done

    def send(self, worker: Worker, **message: Any) -> None:
        """Adds a message to send."""
        self.do(Send(worker.number, message))

    def record(self, event: str, worker: Worker | None, why: str, step: int | None = None) -> None:
        """Adds an event to write down."""
        if worker is not None:
            step = worker.step
        self.do(Record(event, None if worker is None else worker.number, step, why))

    def end(self, code: int, why: str) -> None:
        """Ends the job."""
        if not self.over:
            self.over = End(code, why)
            self.actions += [Record("ended", None, None, f"exit code {code}" + (f": {why}" if why else "")), self.over]

    def status(self) -> dict[str, Any]:
        """The status of the job: its step, and the workers that train, in order of their ranks."""
        members = self.members()
        ranks = [
            {"rank": rank, "pid": w.pid, "nodes": w.nodes, "worker": w.number, "doing": w.doing}
            for rank, w in enumerate(members)
        ]
        return {
            "step": self.step(),
            "workers": ranks,
            "wanted": self.wanted,
            "metrics": members[0].metrics if members else {},
            "starting": sum(w.is_starting for w in self.workers.values()),
            "spares": self.standing_by(),
            "steps": self.reference.steps if self.reference else None,
            "virtual_nodes": self.reference.virtual_nodes if self.reference else None,
        }

    @abc.abstractmethod
    def step(self) -> int | None:
        """The number of steps known to be done."""

    @abc.abstractmethod
    def standing_by(self) -> int:
        """The number of workers that could join."""

    @abc.abstractmethod
    def speaker(self) -> int | None:
        """The worker whose output is passed on: the lowest rank that is there."""


def exit_code(code: int) -> int:
    """The exit code of a job whose lowest rank ended so.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code
