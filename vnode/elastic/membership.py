"""Turns messages of the supervisor into this worker's orders, and this worker's state into messages.

Knows the channel to the supervisor, and worlds that end. Must not know steps, states, nor what is done about a message.

The supervisor gives a worker its address, a file with a token, and a number, in the environment. One thread receives
its messages: the supervisor gives a sign of life each second. Another thread gives one five times a second. Whoever
waits in a world looks at the board of that world: when the supervisor says that a worker is lost, the receiving thread
writes it there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vnode.errors import CheckpointError, ProcessError, layout_message
from vnode.placement.agreement import flatten_facts, shorten
from vnode.placement.failure_board import Notice
from vnode.placement.world import World
from vnode.threads import background
from vnode.workers import INTERFACE, NUMBER, PROTOCOL, SUPERVISOR, TOKEN_FILE
from vnode.workers.job_registry import real_path
from vnode.workers.wire import Channel, WireError

logger = logging.getLogger("vnode")

BEAT = 0.2
"""Seconds between two signs of life."""

SILENCE = 300.0
"""Seconds without a message of the supervisor, which sends one each second, after which its host counts as gone."""

WORD = 20.0
"""Seconds to wait for the supervisor's word after an error that another worker may be the cause of."""

ORPHANED = 75
"""The exit code of a worker whose supervisor has died (EX_TEMPFAIL of sysexits.h: try again later)."""


class Orphaned(SystemExit):
    """The supervisor has died: the process ends."""


class Membership:
    """This process among the workers of a job.

    Args:
      address: of the supervisor, ``host:port``.
      token: which it asks for.
      number: of this worker.

    Attributes:
      doing: what this worker does, for people.
      busy: whether that is something that waits for no other worker, and that a loss does not interrupt.
      stop: why the supervisor has asked for the end of the run; empty if it has not.
      replaced: whether other workers go on with the run that is to end.
      order: the world that this worker is to be in, where it is in one for all of its life.
      closed: whether the channel is.
      released: whether the workers that train need this one no more, which it has not taken note of.
      answered: the newest generation which it has left because of a loss.
      leaves: says why this process is to leave the others, who go on; empty if it is not.
    """

    def __init__(self, address: str, token: str, number: int) -> None:
        self.number, self.token = number, token
        self.interface = os.environ.get(INTERFACE) or address.rsplit(":", 1)[0].strip("[]")
        self.channel = Channel.connect(address)
        self.changed = threading.Condition()
        self.prepare: dict[str, Any] | None = None
        self.gone: dict[int, dict[str, Any]] = {}
        self.left: dict[int, dict[str, Any]] = {}
        self.cancelled: dict[int, str] = {}
        self.released, self.answered = False, 0
        self.end: dict[str, Any] | None = None
        self.stop, self.replaced, self.closed = "", False, False
        self.order: dict[str, Any] | None = None
        self.worlds: dict[int, World] = {}
        self.step, self.doing, self.waits, self.nodes, self.generation = -1, "to start", False, 0, 0
        self.busy = False
        self.metrics: dict[str, float] = {}
        self.calls = 0
        self.leaves: Callable[[], str] = str
        self.send("hello", protocol=PROTOCOL, worker=number, pid=os.getpid(), host=socket.gethostname(), token=token)
        background(self.receive, "vnode-member")
        background(self.beat, "vnode-member")

    @classmethod
    def from_environment(cls) -> Membership:
        """The membership of this process, which a supervisor has started.

        Raises:
          ProcessError: the supervisor cannot be reached.
        """
        global _OWN
        address = os.environ[SUPERVISOR]
        if _OWN is None or _OWN[0] != os.getpid():
            try:
                token = pathlib.Path(os.environ[TOKEN_FILE]).read_text().strip()
                _OWN = os.getpid(), cls(address, token, int(os.environ[NUMBER]))
            except (KeyError, OSError, ValueError, WireError) as error:
                raise ProcessError(
                    layout_message(
                        f"the supervisor at {address} cannot be reached: {type(error).__name__}: {error}",
                        remedies=[
                            "start the script by vnode run",
                            f"or without workers: unset {SUPERVISOR} in the environment",
                        ],
                    )
                ) from error
        return _OWN[1]

    def send(self, kind: str, **message: Any) -> None:
        """Tells the supervisor something; nothing if it is gone, which the receiving thread finds out."""
        with contextlib.suppress(WireError):
            self.channel.send({"kind": kind, **message})

    def arrive(self, facts: Mapping[str, Any], virtual_nodes: int, checkpoint: Any, steps: int, **more: Any) -> None:
        """Tells the supervisor that this worker has come to `run`, and can be used.

        Args:
          facts: of the run, by name; those that are None are not known.
          virtual_nodes: of its step.
          checkpoint: the folder of checkpoints, or None.
          steps: of the run in all.
          more: for the supervisor.
        """
        said = {name: shorten(value) for name, value in flatten_facts(facts, ["state"]).items() if value is not None}
        folder = None if checkpoint is None else real_path(str(checkpoint))
        self.send("arrived", facts=said, virtual_nodes=virtual_nodes, checkpoint=folder, steps=steps, **more)

    @contextlib.contextmanager
    def refusing(self, step: int) -> Iterator[None]:
        """Ends the whole job by a `CheckpointError`: what one worker refuses, the others must not go on with.

        Args:
          step: where this worker is.
        """
        try:
            yield
        except CheckpointError as error:
            self.send("error", text=str(error), step=step, of_all=True)
            raise

    def beat(self) -> None:
        """The thread that gives signs of life."""
        told = ""
        while not self.closed:
            if not told and (told := self.leaves()):
                self.send("leaving", why=told)
            self.send(
                "progress",
                generation=self.generation,
                step=self.step,
                doing=self.doing,
                waits=self.waits,
                busy=self.busy,
                nodes=self.nodes,
                metrics=self.metrics,
            )
            time.sleep(BEAT)

    def receive(self) -> None:
        """The thread that receives messages."""
        while True:
            try:
                message = self.channel.receive(SILENCE)
            except TimeoutError:
                logger.error("no sign of life of the supervisor for %g s: its host or the network is gone", SILENCE)
                self.channel.close()
                break
            except (WireError, OSError):
                break
            with self.changed:
                self.handle_message(message)
                self.changed.notify_all()
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def handle_message(self, message: dict[str, Any]) -> None:
        """Handles one message of the supervisor."""
        kind, generation = message["kind"], message.get("generation", 0)
        if kind == "prepare":
            self.prepare = message
        elif kind == "go":
            self.gone[generation] = message
        elif kind == "cancel":
            self.cancelled[generation] = message.get("why", "")
            if self.prepare is not None and self.prepare["generation"] == generation:
                self.prepare = None
            self.lose(generation, [{"rank": -1, "why": f"it is not used: {message.get('why', '')}"}])
        elif kind == "leave":
            self.left[generation] = message
            for known in self.worlds:  # who has not switched waits in an earlier one
                if known <= generation:
                    self.lose(known, message["lost"], known == generation)
        elif kind == "release":
            self.released = True
        elif kind == "stop":
            self.stop = message.get("why") or "the supervisor asked for it"
            self.replaced = bool(message.get("anew"))
        elif kind == "world":
            self.order = message
        elif kind == "end":
            self.end = message
            self.lose(self.generation, [{"rank": -1, "why": "the supervisor ends this worker"}])

    def lose(self, generation: int, lost: list[dict[str, Any]], aloud: bool = True) -> None:
        """Interrupts threads that wait in a world."""
        world = self.worlds.get(generation)
        if world is None or world.board is None:
            return
        for each in lost:
            rank = each["rank"] if 0 <= each["rank"] < world.count and each["rank"] != world.index else world.others[0]
            world.board.note(Notice(rank, "ended", text=each["why"] or "it was lost", lost=aloud and each["rank"] >= 0))

    def enter(self, world: World) -> None:
        """From now on, this process may wait in a world."""
        with self.changed:
            number = world.generation
            self.worlds = {known: other for known, other in self.worlds.items() if known >= self.generation}
            self.worlds[number] = world
            if number in self.left:
                self.lose(number, self.left[number]["lost"])
            if number in self.cancelled:
                self.lose(number, [{"rank": -1, "why": f"it is not used: {self.cancelled[number]}"}])

    def forget(self, generation: int) -> None:
        """This process waits no more in a world."""
        with self.changed:
            self.worlds.pop(generation, None)

    def wait(self, found: Callable[[], Any], seconds: float | None = None) -> Any:
        """Waits until something is there.

        Args:
          found: returns it, or None or False.
          seconds: to wait; None for as long as it takes.

        Returns:
          The result of `found`; None after so many seconds.

        Raises:
          SystemExit: the supervisor ends this worker, or has died.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self.changed:
            while not (value := found()):
                self.check()
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self.changed.wait(left)
            return value

    def check(self) -> None:
        """Ends this process where the supervisor wants it, or has died.

        Raises:
          SystemExit: so it is.
        """
        self.check_end()
        if self.closed:
            raise Orphaned(ORPHANED)

    def check_end(self) -> None:
        """Ends this process where the supervisor wants it.

        Raises:
          SystemExit: so it is.
        """
        if self.end is not None:
            raise SystemExit(self.end.get("code", 0))

    @contextlib.contextmanager
    def busy_with(self, doing: str) -> Iterator[None]:
        """While it lasts, this worker does something by itself, after which it looks for losses again."""
        before = self.doing, self.busy
        self.doing, self.busy = doing, True
        try:
            yield
        finally:
            self.doing, self.busy = before

    def take_prepare(self) -> dict[str, Any] | None:
        """Takes the order to prepare a generation, if there is one."""
        with self.changed:
            order, self.prepare = self.prepare, None
            return order

    def take_release(self) -> bool:
        """Takes the order that releases this worker, if there is one."""
        with self.changed:
            released, self.released = self.released, False
            return released

    def loss(self) -> dict[str, Any] | None:
        """The newest order to leave a generation, unless this worker has answered it."""
        with self.changed:
            newest = max(self.left, default=0)
            return self.left[newest] if newest > self.answered else None


_OWN: tuple[int, Membership] | None = None
"""The membership of this process, and its process number: a forked process has none."""
