"""Batches loaded ahead of the step that needs them, in one background thread.

Knows threads. Must not know what is loaded, from where, or what a step is.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from vnode.threads import background

logger = logging.getLogger("vnode")

GRACE = 5.0
"""Seconds that a load may still take when nobody wants to wait for it any longer."""
POLL = 0.1
"""Seconds between two looks at whether to go on waiting."""
PATIENCE = 10.0
"""Seconds to wait for a load in the end."""


class Prefetch:
    """Loads for the steps to come while the current one runs.

    At most `depth` results wait, and one is being made. What fails fails in the call that asks for it, with the error
    as it was, and only there: a failure of a step that is never asked for is forgotten. Asking for another step
    than the next, or with another placement, throws away what was loaded ahead.

    Args:
      load: makes what belongs to a step number and a placement; called in the background, one call at a time.
      depth: how many steps ahead; with 0 there is no thread, and each call loads what it returns.
      stop: the step number at which to stop loading ahead; None for never.

    Example:
      >>> with Prefetch(lambda step, placement: step * step, depth=2, stop=10) as squares:
      ...     [squares.get(step, None) for step in (3, 4, 5)]
      [9, 16, 25]
    """

    def __init__(self, load: Callable[[int, Any], Any], *, depth: int = 2, stop: int | None = None) -> None:
        self.load = load
        self.depth = depth
        self.stop = stop
        self.turn = threading.Lock()
        self.changed = threading.Condition()
        self.ready: dict[int, tuple[Any, BaseException | None]] = {}
        self.asked = -1
        self.loading: int | None = None
        self.next = 0
        self.placement: Any = None
        self.course = 0
        self.paused = self.closed = False
        self.thread: threading.Thread | None = None
        self.context = contextvars.copy_context()

    def get(self, step: int, placement: Any) -> Any:
        """What belongs to a step; waits for it if it is not there yet.

        Raises:
          Exception: what loading it raised.
        """
        if self.depth < 1:
            return self.load_alone(step, placement)
        with self.changed:
            self.ask(step, placement)
            while step not in self.ready:
                self.changed.wait()
            value, error = self.ready.pop(step)
            self.changed.notify_all()
        if error is not None:
            raise error
        return value

    def give_back(self, step: int, value: Any) -> None:
        """Takes back what `get` returned last, as if nobody had asked for it."""
        with self.changed:
            self.ready[step] = value, None

    def wait(self, step: int, placement: Any, unless: Callable[[], bool]) -> bool:
        """Waits until what belongs to a step is there (or has failed); not much longer once `unless` is true.

        Returns:
          Whether it is there, so that `get` returns at once. Without a thread it is not waited for.
        """
        if self.depth < 1:
            return True
        until = math.inf
        with self.changed:
            self.ask(step, placement)
            while step not in self.ready and time.monotonic() < until:
                self.changed.wait(POLL)
                if until == math.inf and unless():
                    until = time.monotonic() + GRACE
            return step in self.ready

    def ask(self, step: int, placement: Any) -> None:
        """Has the background thread load a step, and those after it."""
        if self.closed:
            raise RuntimeError("the prefetch is closed")
        self.asked, self.context = step, contextvars.copy_context()
        for past in [number for number in self.ready if number < step]:
            del self.ready[past]
        coming = step in self.ready or step in (self.loading, self.next)
        if self.thread is None or self.paused or placement != self.placement or not coming:
            self.ready.clear()
            self.paused = False
            self.next, self.placement = step, placement
            self.loading = None
            self.course += 1
        if self.thread is None:
            self.thread = contextvars.Context().run(background, self.work, "vnode-prefetch")
        self.changed.notify_all()

    def forget(self) -> None:
        """Throws away what was loaded ahead, and the placement; loads again when the next step is asked for."""
        with self.changed:
            self.ready.clear()
            self.loading = self.placement = None
            self.context = contextvars.Context()
            self.paused = True
            self.course += 1

    def load_alone(self, step: int, placement: Any) -> Any:
        """The same, loaded now, by itself; what is loaded ahead stays.

        Raises:
          Exception: what loading it raised.
        """
        with self.turn:
            return self.load(step, placement)

    def work(self) -> None:
        """The background thread."""
        while True:
            with self.changed:
                while not self.closed and (len(self.ready) >= self.depth or self.is_exhausted):
                    self.changed.wait()
                if self.closed:
                    return
                step, placement, course, context = self.next, self.placement, self.course, self.context
                self.loading = step
                self.next += 1
            value, error = None, None
            try:
                value = context.run(self.load_alone, step, placement)
            except BaseException as caught:  # whatever it is, it belongs to the step that asks
                error = caught
            with self.changed:
                if course == self.course:  # or it was asked for something else meanwhile
                    self.loading = None
                    self.ready[step] = value, error
                    self.changed.notify_all()
            del value, error, context, placement

    @property
    def is_exhausted(self) -> bool:
        """Whether there is nothing more to load unasked."""
        return self.paused or (self.stop is not None and self.next >= max(self.stop, self.asked + 1))

    def close(self) -> None:
        """Ends the thread; waits for the load that it is in, but not for one that hangs."""
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                logger.warning(
                    "step %s of the data is still loading after %.0f s; it is left alone", self.loading, PATIENCE
                )

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
