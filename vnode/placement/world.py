"""The processes that run one program together: their number, this process's index, and how they learn of failures.

Knows `jax.distributed`, clients of XLA, and how a process ends. Must not know what processes do together, nor wait for
any.

The world of JAX begins with the first use of it after `jax.distributed.initialize`, and ends with the process, or with
`jax.distributed.shutdown`. A process may be in other worlds besides, each with its own XLA client and devices: it
trains in one while a thread prepares the next. A world is a value: its client, board and counts of meetings are not
shared with another one.

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

from vnode.compat import distributed_state
from vnode.errors import ProcessError, layout_message
from vnode.placement.failure_board import Board, Notice

if TYPE_CHECKING:
    from vnode.placement.lifeline import Lifeline


@dataclasses.dataclass(eq=False)
class World:
    """The processes that run one program together.

    Attributes:
      count: the number of processes.
      index: this process's number.
      client: a client of the coordination service; None in one process.
      board: notices of failures; None in one process.
      lifeline: the connection by which ends of processes are known.
      generation: the generation of a job's processes; 0: the world of JAX.
      own_devices: devices of all its processes, of an XLA client that is this world's alone. None: those of JAX.
      workers: numbers of its processes for messages, if they are workers of a job.
      meetings: number of meetings, by the processes that met.
      runs: counts the calls of `vnode.elastic.run`.
      scopes: the runs that this process is currently in with the others.
      launches: number of programs that this process has begun, by the processes of the program.
      posted: the latest text that this process has left for others, by key.
      saves: counts the checkpoint folders that were opened, as in all other processes.
      told_at: time of this process's latest post of its place.
      last_result: a result of the last program of several processes, on each of its devices.
      lock: guards the meetings, which several threads count.
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
        """A context in which this process is in a run with the others, which learn of the error that ends it."""
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
        """Tells the others of an error that ends their joint work, unless they know of it."""
        if self.board is None or getattr(error, "told", False):
            return
        for scope in scopes:
            self.board.post(Notice(self.index, "raised", scope, one_line(error)))
        with contextlib.suppress(AttributeError, TypeError):
            error.told = True  # pyright: ignore

    def close(self) -> None:
        """Before the process ends, tells the others, with the reason."""
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
    """The text of an error for others.

    >>> one_line(ValueError("no such file\\nWhat to do: ..."))
    'ValueError: no such file'
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}{': ' if lines and lines[0] else ''}{lines[0][:300] if lines else ''}"


LINGER = 5.0
"""Seconds that process 0, without whose service jax aborts the others, waits for them at exit if one was killed."""


def abandon() -> None:
    """Keeps jax from waiting at exit for a process that will never come: it would abort after minutes."""
    state = distributed_state()
    for name in ("preemption_sync_manager", "client", "service"):
        held = getattr(state, name, None)
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # its destructor would wait, too
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
"""The world chosen by `in_world`."""


@contextlib.contextmanager
def in_world(chosen: World) -> Iterator[None]:
    """Makes `world` return a given world, in this context and in the threads that vnode starts in it.

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
    """The processes that run this program together: those chosen by `in_world`, else those that JAX knows."""
    return CHOSEN.get() or world_of_jax()


def world_of(devices: Sequence[Any]) -> World:
    """The world of devices: the one with their XLA client, else the one of JAX.

    Args:
      devices: devices of one world.
    """
    client = getattr(devices[0], "client", None) if OTHERS and devices else None
    for other in list(OTHERS) if client is not None else ():
        if other.devices[0].client is client:
            return other
    return world_of_jax()


def uses_gloo(devices: Sequence[Any]) -> bool:
    """Whether gloo runs collectives among devices: on CPUs, once a process knows of others.

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

    jax has no public way to the service by which processes find one another: its waiting functions
    (`jax.experimental.multihost_utils`) are collectives. So its private state is read (`vnode.compat`), here and in
    `abandon` alone, and only with several processes.
    """
    if not jax.distributed.is_initialized():
        return ALONE
    state = distributed_state()
    if CURRENT.world.client is state.client:
        return CURRENT.world
    with CURRENT.lock:
        if CURRENT.world.client is not state.client:
            CURRENT.world = contextvars.Context().run(new_world, state)  # its threads are of no other world
    return CURRENT.world


def is_shared(here: World | None = None) -> bool:
    """Whether the devices of a world are those of several processes.

    Args:
      here: the world; by default the context's.

    Raises:
      ProcessError: there are several processes without a coordination service.
    """
    here = world() if here is None else here
    count = len({device.process_index for device in here.devices})
    if count == 1:
        return False
    if not here.has_others:
        raise ProcessError(
            layout_message(
                f"there are {count} processes, but no jax.distributed service through which they can agree.",
                remedies=["call jax.distributed.initialize() in each of them before anything asks for a device"],
            )
        )
    return True


def new_world(state: Any) -> World:
    """A new world of JAX.

    Args:
      state: jax's distributed state.
    """
    count, index, client = state.num_processes, state.process_id, state.client
    if count < 2:
        return World(client=client)
    board = Board(client, index)
    from vnode.placement.lifeline import Lifeline  # only for several processes

    lifeline = Lifeline(client, index, count, state.coordinator_address or "", board)
    made = World(count, index, client, board, lifeline)
    atexit.register(made.close)  # registered after jax's own, hence called before it
    return made


ALONE = World()
"""The world of a single process."""
