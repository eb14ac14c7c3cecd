"""The processes that run one program together: how many there are, which one this is, and by what they tell of ends.

Knows `jax.distributed`, clients of XLA, and how a process ends. Must not know what processes do together, nor wait for
any.

The world of JAX begins with the first question for it after `jax.distributed.initialize`, and ends with the process, or
with `jax.distributed.shutdown`. A process may be in other worlds besides, each with a client of XLA and devices of its
own: it trains in one while a thread prepares the next. A world is a value: what belongs to it (its client, the board,
how often its processes have met) is not shared with another one.

    with in_world(next_world):      # also for the threads that vnode starts in here
        world() is next_world
    world_of(next_world.devices) is next_world
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from vnode.errors import ProcessError, layout_message
from vnode.placement.failure_board import Board, Notice

if TYPE_CHECKING:
    from vnode.placement.lifeline import Lifeline


@dataclasses.dataclass(eq=False)
class World:
    """The processes that run one program together.

    Attributes:
      count: how many.
      index: which one this is.
      client: of the service by which they agree; None in one process.
      board: what is known of those that have failed; None in one process.
      lifeline: the connection by which an end is known.
      generation: which one it is of those that a job's processes were in; 0: the world of JAX.
      own_devices: the devices of a client of XLA that is this world's alone, those of all its processes. None: those of
        JAX.
      workers: the numbers by which people know its processes, if they are workers of a job.
      meetings: how often some of the processes have met, by which.
      runs: how often `vnode.elastic.run` was called.
      scopes: what this process does with the others just now: the runs that it is in.
      launches: how many programs of some of the processes this one has begun, by which processes.
      said: the last thing that this process has left for others to read, by which.
      saves: counts the folders of checkpoints that were opened, as all others do.
      told: when this process said last where it is.
      last: a result of the last program of several processes that this one has begun, on each of its devices.
      lock: of the meetings, which several threads count.
    """

    count: int = 1
    index: int = 0
    client: Any = None
    board: Board | None = None
    lifeline: Lifeline | None = None
    generation: int = 0
    own_devices: tuple[Any, ...] | None = None
    workers: tuple[int, ...] = ()
    meetings: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    runs: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    scopes: list[str] = dataclasses.field(default_factory=list)
    launches: collections.Counter[frozenset[int]] = dataclasses.field(default_factory=collections.Counter)
    posted: dict[str, str] = dataclasses.field(default_factory=dict)
    saves: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    told_at: float = 0.0
    last_result: dict[Any, Any] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    process: int = dataclasses.field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        if self.own_devices:
            OTHERS.add(self)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of all its processes, in order."""
        return tuple(jax.devices()) if self.own_devices is None else self.own_devices

    @property
    def has_others(self) -> bool:
        """Whether there are other processes."""
        return self.board is not None

    @property
    def others(self) -> list[int]:
        """The other processes."""
        return [process for process in range(self.count) if process != self.index]

    @contextlib.contextmanager
    def run(self) -> Iterator[str]:
        """While it lasts, this process is in a run with the others, which learn of the error that ends it."""
        scope = f"run {next(self.runs)}"
        self.scopes.append(scope)
        try:
            yield scope
        except BaseException as error:
            self.tell(error, scope)
            raise
        finally:
            self.scopes.remove(scope)

    def tell(self, error: BaseException, *scopes: str) -> None:
        """Tells the others of an error that ends what they do together, unless they know of it."""
        if self.board is None or getattr(error, "told", False):
            return
        for scope in scopes:
            self.board.post(Notice(self.index, "raised", scope, one_line(error)))
        with contextlib.suppress(AttributeError, TypeError):
            error.told = True  # pyright: ignore

    def close(self) -> None:
        """Before the process ends: says so, and why."""
        if self.board is None or os.getpid() != self.process:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        there = CURRENT.world is self and jax.distributed.is_initialized()
        if there and isinstance(error, BaseException) and not getattr(error, "told", False):
            self.board.post(Notice(self.index, "ended", text=one_line(error)))
        lost = there and self.board.has_lost_process()
        self.board.close()
        if self.lifeline is not None:
            self.lifeline.close(LINGER if lost else 0)
        if lost:
            abandon()


def one_line(error: BaseException) -> str:
    """An error for others.

    >>> one_line(ValueError("no such file\\nWhat to do: ..."))
    'ValueError: no such file'
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}{': ' if lines and lines[0] else ''}{lines[0][:300] if lines else ''}"


LINGER = 5.0
"""Seconds that process 0, without whose service jax aborts the others, waits for them at its end if one was killed."""


def abandon() -> None:
    """Has jax not wait, at the end of this process, for one that will never come: it would abort after minutes."""
    from jax._src import distributed

    state = distributed.global_state
    for name in ("preemption_sync_manager", "client", "service"):
        held = getattr(state, name, None)
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # what destroys it would wait, too
            setattr(state, name, None)


class Current:
    """The world of JAX that this process is in."""

    def __init__(self) -> None:
        self.world = World()
        self.lock = threading.Lock()


CURRENT = Current()

OTHERS: weakref.WeakSet[World] = weakref.WeakSet()
"""The worlds with devices of their own."""

CHOSEN: contextvars.ContextVar[World | None] = contextvars.ContextVar("world", default=None)
"""The world that `in_world` names."""


@contextlib.contextmanager
def in_world(chosen: World) -> Iterator[None]:
    """Has `world` answer with a world, in this context and in the threads that vnode starts in it.

    Args:
      chosen: the world, whatever `jax.distributed` says.

    Example:
      >>> with in_world(World(count=3, index=1)):
      ...     world().count, world().index
      (3, 1)
      >>> world().count
      1
    """
    token = CHOSEN.set(chosen)
    try:
        yield
    finally:
        CHOSEN.reset(token)


def world() -> World:
    """The processes that run this program together: those that `in_world` names, else those that JAX knows."""
    return CHOSEN.get() or world_of_jax()


def world_of(devices: Sequence[Any]) -> World:
    """The world that devices belong to: one that has their client of XLA, else the one of JAX.

    Args:
      devices: of one world.
    """
    client = getattr(devices[0], "client", None) if OTHERS and devices else None
    for other in list(OTHERS) if client is not None else ():
        if other.devices[0].client is client:
            return other
    return world_of_jax()


def uses_gloo(devices: Sequence[Any]) -> bool:
    """Whether gloo carries out collectives among devices: so it does for CPUs, once a process knows of others.

    >>> uses_gloo(jax.devices()[:1])
    False
    """
    on_cpus = bool(devices) and getattr(devices[0], "platform", "") == "cpu"
    return on_cpus and (jax.distributed.is_initialized() or world_of(devices).has_others)


def own_index(device: Any) -> int:
    """The number of this process in the world of a device."""
    client = getattr(device, "client", None)
    return world().index if client is None else client.process_index()


def is_local(device: Any) -> bool:
    """Whether a device is one of this process, in whatever world.

    >>> is_local(jax.devices()[0])
    True
    """
    return device.process_index == own_index(device)


def world_of_jax() -> World:
    """The processes that JAX knows.

    jax shows no way to the service by which they find one another: what it has for waiting
    (`jax.experimental.multihost_utils`) are collective operations. So one of its inner modules is asked, in this file
    alone (here and in `abandon`), and only where there are several processes.
    """
    if not jax.distributed.is_initialized():
        return ALONE
    from jax._src import distributed

    state = distributed.global_state
    if CURRENT.world.client is state.client:
        return CURRENT.world
    with CURRENT.lock:
        if CURRENT.world.client is not state.client:
            CURRENT.world = contextvars.Context().run(new_world, state)  # its threads are of no other world
    return CURRENT.world


def is_shared(here: World | None = None) -> bool:
    """Whether the devices of a world are those of several processes.

    Args:
      here: the world; by default that of the context.

    Raises:
      ProcessError: they are, and the processes have no service by which to agree.
    """
    here = world() if here is None else here
    count = len({device.process_index for device in here.devices})
    if count == 1:
        return False
    if not here.has_others:
        raise ProcessError(
            layout_message(
                f"there are {count} processes, which have no service by which to agree.",
                remedies=["call jax.distributed.initialize() in each of them before anything asks for a device"],
            )
        )
    return True


def new_world(state: Any) -> World:
    """A new world of JAX.

    Args:
      state: what jax knows of it.
    """
    count, index, client = state.num_processes, state.process_id, state.client
    if count < 2:
        return World(client=client)
    board = Board(client, index)
    from vnode.placement.lifeline import Lifeline  # a single process needs none

    lifeline = Lifeline(client, index, count, state.coordinator_address or "", board)
    made = World(count, index, client, board, lifeline)
    atexit.register(made.close)  # after jax's own, hence called before it
    return made


ALONE = World()
"""The world of a process that is alone."""
