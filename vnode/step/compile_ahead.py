"""Compiles a step for other placements, and runs it there once, while training goes on.

Knows threads and how to ask a step for its compiled program or for a run. Must not know how a step is made or called.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextvars
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from vnode import threads
from vnode.compat import carry_settings
from vnode.errors import BatchError
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import wait_until
from vnode.placement.world import world
from vnode.step.argument_checks import check_arguments


class Worker:
    """A background thread that runs tasks in order, and ends when there are none.

    When the process ends, tasks that have not begun are dropped, unlike in the executors of `concurrent.futures`. The
    process does not wait for a running task (but see `vnode.threads`).
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tasks: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self.thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Queues a task, to run in a copy of the present context unless its future is cancelled before.

        It runs under the settings of jax that the caller's thread has, too.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self.lock:
            self.tasks.append((future, functools.partial(contextvars.copy_context().run, carry_settings(task))))
            if self.thread is None:
                self.thread = threads.background(self.work, "vnode-prepare")
        return future

    def close(self) -> None:
        """Drops the queued tasks when the process ends, and joins the thread where it cannot be abandoned."""
        with self.lock:
            dropped, thread = [future for future, _ in self.tasks], self.thread
            self.tasks.clear()
        for future in dropped:
            future.cancel()
        if thread is not None and threads.glibc() is None:
            thread.join()

    def work(self) -> None:
        """Runs queued tasks until there are none; the body of the background thread."""
        while True:
            with self.lock:
                if not self.tasks:
                    self.thread = None
                    return
                future, task = self.tasks.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:  # raised where the future is read
                    future.set_exception(error)
            del future, task


WORKER = Worker()
"""A single worker: several compilations at once would take the processors from training."""
atexit.register(WORKER.close)


class Preparation:
    """Programs that are being compiled in the background, one after another.

    Attributes:
      placements: the placements for which programs are compiled, in this order.
    """

    def __init__(self, compilers: Mapping[Placement, Callable[[], Any]]) -> None:
        self.placements = tuple(compilers)
        self._futures = {
            placement: WORKER.submit(functools.partial(call_seconds, compiler))
            for placement, compiler in compilers.items()
        }

    def __repr__(self) -> str:
        ready = sum(future.done() for future in self._futures.values())
        more = ", ..." if len(self.placements) > 2 else ""
        return f"Preparation({ready} of {len(self._futures)} ready: {', '.join(map(str, self.placements[:2]))}{more})"

    def done(self, placement: Placement | None = None) -> bool:
        """Whether the program for a placement, or all of them, is there (or has failed)."""
        return all(future.done() for future in self._asked(placement))

    def wait(self, placement: Placement | None = None, timeout: float | None = None) -> Preparation:
        """Waits for the program for a placement, or for all.

        Args:
          placement: one of the placements; all by default.
          timeout: the most seconds to wait; no limit by default.

        Returns:
          Itself.

        Raises:
          TimeoutError: it takes longer.
          ProcessError: another process has failed meanwhile.
          Exception: what compiling (or running) raised.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for future in self._asked(placement):
            if until is None and world().has_others:
                sleep = functools.partial(concurrent.futures.wait, [future], 0.05)
                wait_until(future.done, sleep, "to compile", world().others, patience=math.inf)
            future.result(None if until is None else max(until - time.monotonic(), 0))
        return self

    def cancel(self) -> None:
        """Cancels the compilations that have not begun."""
        for future in self._futures.values():
            future.cancel()

    @property
    def seconds(self) -> dict[Placement, float]:
        """The seconds of compiling, for the compiled programs."""
        there = {p: f for p, f in self._futures.items() if f.done() and not f.cancelled() and f.exception() is None}
        return {placement: future.result() for placement, future in there.items()}

    def _asked(self, placement: Placement | None) -> list[concurrent.futures.Future[float]]:
        return list(self._futures.values()) if placement is None else [self._futures[placement]]


def call_seconds(compiler: Callable[[], Any]) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    compiler()
    return time.perf_counter() - start


def warm_up_tasks(
    runs: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Callable[[], None]]:
    """Tasks that call each of several functions with copies of the arguments as they are now.

    Args:
      runs: each may donate what it is called with.
      args: arguments of the step.
      kwargs: keyword arguments of the step.

    Returns:
      Callables without arguments, which wait for the run to end.

    Raises:
      BatchError: there are no arguments, or shapes only.
      VnodeError: arrays are gone.
    """
    leaves = jax.tree.leaves((args, kwargs))
    if not leaves or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise BatchError("warm_up runs the step, so it needs arrays: step.warm_up(placements, state, batch)")
    check_arguments(dict(enumerate(args)), kwargs)
    now = copy_arrays((args, kwargs))  # training continues and donates its own

    def warm_up_once(run: Callable[..., Any]) -> None:
        own_args, own_kwargs = copy_arrays(now)
        jax.block_until_ready(run(*own_args, **own_kwargs))

    return [functools.partial(warm_up_once, run) for run in runs]


def copy_arrays(tree: Any) -> Any:
    """A tree with copies of its arrays, where they are."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)
