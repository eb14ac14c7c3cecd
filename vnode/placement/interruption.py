"""Work of a thread that another thread can end: by an exception that is raised in the middle of it.

Knows Python's threads. Must not know what is done, nor why it is to end.

A long computation in Python (a trace) does not look at whether anybody still wants its result. Python can raise an
exception in a thread from outside, between two instructions. In a call of C it waits for the end of the call.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from vnode.threads import background

T = TypeVar("T")

AGAIN = 0.5
"""Seconds after which the exception is raised once more: a destructor, or code that catches all, may swallow it."""

PAUSE = 0.001
"""Seconds between two looks at what another thread is about to do."""


class Interrupted(BaseException):
    """Raised within work that is to end; no `Exception`, for which the work may have an answer of its own."""


def interruptible(work: Callable[[], T], watch: Callable[[Callable[[], bool]], Any]) -> T:
    """Does something in this thread until an error of a watching thread ends it.

    Args:
      work: what to do.
      watch: called in another thread with a function that says whether the work is done; the error that it raises ends
        the work.

    Returns:
      What `work` returns.

    Raises:
      Exception: what `work` raises, or `watch`.

    Example:
      >>> def deadline(is_done):
      ...     end = time.monotonic() + 0.1
      ...     while not is_done():
      ...         if time.monotonic() > end:
      ...             raise TimeoutError("0.1 s are over")
      >>> def endless():
      ...     while True:
      ...         pass
      >>> interruptible(lambda: 1, deadline)
      1
      >>> interruptible(endless, deadline)
      Traceback (most recent call last):
      TimeoutError: 0.1 s are over
    """
    thread = threading.get_ident()
    # Lists, whose operations are one instruction each: this thread may be interrupted while it holds a lock.
    begun: list[bool] = []
    done: list[bool] = []
    raising: list[bool] = []
    errors: list[BaseException] = []

    def look() -> None:
        try:
            watch(lambda: bool(done))
        except BaseException as error:
            errors.append(error)
        while errors and not done:
            raising.append(True)
            if begun and not done:
                raise_in(thread, Interrupted)
            raising.clear()
            time.sleep(AGAIN if begun else PAUSE)

    def end() -> None:
        """From here on nothing is raised in this thread."""
        done.append(True)
        while raising:
            time.sleep(PAUSE)
        raise_in(thread, None)

    background(look, "vnode-watch")
    try:
        try:
            begun.append(True)
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
