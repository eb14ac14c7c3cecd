"""Work in one thread -> work that another thread can end, by raising an exception inside it.

Knows Python's threads. Must not know the work, nor why it ends.

A long computation in Python (a trace) does not check whether its result is still needed. Python can raise an exception
in a thread from outside, between two instructions. Inside a call of C it is raised after the call.
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
"""Seconds after which the exception is raised again: a destructor, or code that catches all, may swallow it."""

PAUSE = 0.001
"""Seconds between two looks at another thread's state."""


class Interrupted(BaseException):
    """Raised inside interrupted work; no `Exception`, which the work might handle."""


def interruptible(work: Callable[[], T], watch: Callable[[Callable[[], bool]], Any]) -> T:
    """Does work in this thread until an error of a watching thread ends it.

    Args:
      work: the work.
      watch: called in another thread with a function that returns whether the work is done; an error that it raises
        ends the work.

    Returns:
      The result of `work`.

    Raises:
      Exception: raised by `work` or `watch`.

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
    # lists, whose operations are atomic: this thread may be interrupted while it holds a lock
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
        """Allows no more exceptions in this thread."""
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
        end()  # the first call may have been interrupted itself
        if errors:
            raise errors[0] from (None if isinstance(error, Interrupted) else error)
        raise


def raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raises an exception in a thread; None cancels one that is not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind and ctypes.py_object(kind))
