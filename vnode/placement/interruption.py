"""Work of a thread that another thread can end: by an exception that is raised in the middle of it.

Knows Python's threads. Must not know what is done, nor why it is to end.

A long computation in Python (a trace) does not look at whether anybody still wants its result. Python can raise an
exception in a thread from outside, between two instructions. In a call of C it waits for the end of the call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from vnode.threads import background

T = TypeVar("T")

AGAIN = 0.5
"""Seconds after which the exception is raised once more: a destructor, or code that catches all, may swallow it."""


class Interrupted(BaseException):
    """Raised within work that is to end; no `Exception`, for which the work may have an answer of its own."""


def interruptible(work: Callable[[], T], watch: Callable[[threading.Event], Any]) -> T:
    """Does something in this thread until an error of a watching thread ends it.

    Args:
      work: what to do.
      watch: called in another thread with an event that is set when the work is done; the error that it raises ends it.

    Returns:
      What `work` returns.

    Raises:
      Exception: what `work` raises, or `watch`.

    Example:
      >>> def deadline(done):
      ...     if not done.wait(0.1):
      ...         raise TimeoutError("0.1 s are over")
      >>> def endless():
      ...     while True:
      ...         pass
      >>> interruptible(lambda: 1, deadline)
      1
      >>> interruptible(endless, deadline)
      Traceback (most recent call last):
      TimeoutError: 0.1 s are over
    """
    thread, lock, done = threading.get_ident(), threading.Lock(), threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            watch(done)
        except BaseException as error:
            errors.append(error)
        while errors and not done.is_set():
            with lock:
                if not done.is_set():
                    raise_in(thread, Interrupted)
            done.wait(AGAIN)

    def end() -> None:
        """From here on nothing is raised in this thread."""
        with lock:
            done.set()
        raise_in(thread, None)

    background(look, "vnode-watch")
    try:
        try:
            return work()
        finally:
            end()
    except BaseException as error:
        end()  # the first time may have been interrupted itself
        if errors:
            raise errors[0] from (None if isinstance(error, Interrupted) else error)
        raise


def raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Has an exception raised in a thread; None: the one that is not raised yet is forgotten."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind and ctypes.py_object(kind))
