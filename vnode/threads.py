"""Background threads that may still be inside XLA, which has no way to stop, when the process ends.

Knows what Python and the C library (glibc) do when threads and processes end. Must not know what a thread does.

Two things go wrong if nothing is done. A thread that waits for XLA asks for Python's lock a few times a second; once
the interpreter is ending, Python before 3.14 answers with ``pthread_exit``, which unwinds the thread's stack through
C++ frames that allow no such thing: the process aborts. Python 3.14 lets the thread hang instead, and `parked` has
older ones do the same. And when the interpreter has ended, ``exit`` destroys the static objects of XLA under the hands
of its compiler: `exit_without_cleanup` skips that, when all that Python does at its end is done and the exit status is
known.

A thread that makes or destroys clients of XLA is better not left there at all: the end of the process waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

CLEANUP, LOCK = 64, 64
"""Bytes that hold glibc's ``struct _pthread_cleanup_buffer`` and ``pthread_mutex_t`` on every processor."""

STARTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

AWAITED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads for which the end of the process waits."""

TELL_SECONDS, MOST_SECONDS = 5, 8
"""Seconds of waiting before it logs, and in total: less than a supervisor waits for a worker's end."""

logger = logging.getLogger("vnode")


def background(work: Callable[[], None], name: str, *, awaited: bool = False) -> threading.Thread:
    """Starts a thread that does not keep the process from its end, nor is the process aborted because of it.

    It works in a copy of the caller's context: what `contextvars` say here, they say there.

    Args:
      work: what it does.
      name: of the thread.
      awaited: whether the end of the process waits for it, though not for ever; it has been told to come to an end.
    """
    task = [functools.partial(contextvars.copy_context().run, work)]
    del work

    def run() -> None:
        with parked():
            task.pop()()  # and all that it holds goes here: to destroy a client of XLA takes and gives back the lock

    thread = threading.Thread(target=run, name=name, daemon=True)
    STARTED.add(thread)
    if awaited:
        AWAITED.add(thread)
    thread.start()
    return thread


def await_threads(most: float = MOST_SECONDS) -> None:
    """Waits for threads that were told to come to an end; says so if it takes long, as a program that is compiled does.

    Args:
      most: seconds.
    """
    began = time.monotonic()
    for limit in (min(TELL_SECONDS, most), most):
        for thread in list(AWAITED):
            thread.join(max(0.0, began + limit - time.monotonic()))
        names = ", ".join(sorted(thread.name for thread in AWAITED if thread.is_alive()))
        if not names:
            return
        if limit < most:
            logger.warning("the process ends when %s has ended, in %.0f s at most", names, most - limit)


@functools.cache
def glibc() -> ctypes.CDLL | None:
    """The C library, if it is one that does what is said above."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    wanted = ("gnu_get_libc_version", "_pthread_cleanup_push", "_pthread_cleanup_pop", "on_exit")
    return library if all(hasattr(library, name) for name in wanted) else None


@contextlib.contextmanager
def parked() -> Iterator[None]:
    """In a thread: should Python end it within the context, it sleeps for ever where it is."""
    c = glibc()
    if c is None:
        yield
        return
    memory = ctypes.create_string_buffer(CLEANUP + LOCK)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # outlives the modules, which go before the thread does
    cleanup, lock = ctypes.byref(memory), ctypes.byref(memory, CLEANUP)
    c.pthread_mutex_lock(lock)  # zeros are an open lock; to lock it again is to wait for ever, whatever signals come
    c._pthread_cleanup_push(cleanup, c.pthread_mutex_lock, lock)
    try:
        yield
    finally:
        c._pthread_cleanup_pop(cleanup, 0)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(memory))


@atexit.register
def exit_without_cleanup() -> None:
    """Ends the process right after Python, without destructors of C++, if a background thread is left."""
    await_threads()
    c = glibc()
    if c is not None and any(thread.is_alive() for thread in STARTED):
        c.on_exit(c._exit, None)  # called with the exit status
        c.__cxa_atexit(c.fflush, None, None)  # the last one comes first: output of C is written
