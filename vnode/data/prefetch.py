"""Loader of batches -> batches loaded ahead of their steps, in one background thread.

Knows threads. Must not know the data, their source, or what a step is.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from vnode.compat import thread_settings, under_settings
from vnode.threads import background

logger = logging.getLogger("vnode")

GRACE = 5.0
"""Seconds that a load may still take when nobody needs it any longer."""
POLL = 0.1
"""Seconds between two checks whether to go on waiting."""
PATIENCE = 10.0
"""Seconds to wait for a load at the end."""


class Prefetch:
    """Loads values for coming steps while the current one runs.

    At most `depth` results wait, and one is being loaded. An error is raised unchanged in the call for its step, and
    only there: the error of a step that is never requested is dropped. Requesting another step than the next, or
    another placement, discards the loaded values.

    Args:
      load: loads the value of a step number and a placement; called in the background, one call at a time.
      depth: number of steps to load ahead; with 0 there is no thread, and each call loads its result.
      stop: the step number at which loading ahead stops; None for never.

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
        self.context, self.settings = contextvars.copy_context(), thread_settings()

    def get(self, step: int, placement: Any) -> Any:
        """The value of a step; waits for it if it is not loaded yet.

        Raises:
          Exception: raised by the load.
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
        """Takes back the latest result of `get`, as if it had not been requested."""
        with self.changed:
            self.ready[step] = value, None

    def wait(self, step: int, placement: Any, unless: Callable[[], bool]) -> bool:
        """Waits until a step's value is loaded (or its load has failed); not much longer once `unless` returns true.

        Returns:
          Whether it is loaded, so that `get` returns at once. Without a thread there is no wait.
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
        """Makes the background thread load a step, and those after it."""
        if self.closed:
            raise RuntimeError("the prefetch is closed")
        settings, before = thread_settings(), self.settings
        self.asked, self.context, self.settings = step, contextvars.copy_context(), settings
        for past in [number for number in self.ready if number < step]:
            del self.ready[past]
        coming = step in self.ready or step in (self.loading, self.next)
        if self.thread is None or self.paused or placement != self.placement or settings != before or not coming:
            self.ready.clear()
            self.paused = False
            self.next, self.placement = step, placement
            self.loading = None
            self.course += 1
        if self.thread is None:
            self.thread = contextvars.Context().run(background, self.work, "vnode-prefetch")
        self.changed.notify_all()

    def forget(self) -> None:
        """Discards loaded values and the placement; loading restarts at the next request."""
        with self.changed:
            self.ready.clear()
            self.loading = self.placement = None
            self.context = contextvars.Context()
            self.paused = True
            self.course += 1

    def load_alone(self, step: int, placement: Any) -> Any:
        """Loads a step's value now; values loaded ahead stay.

        Raises:
          Exception: raised by the load.
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
                step, placement, course = self.next, self.placement, self.course
                context, settings = self.context, self.settings
                self.loading = step
                self.next += 1
            value, error = None, None
            try:
                with under_settings(settings):  # of jax, such as x64: it cuts a batch to 32 bits, and draws by a key
                    value = context.run(self.load_alone, step, placement)
            except BaseException as caught:  # raised in the call for this step
                error = caught
            with self.changed:
                if course == self.course:  # otherwise the requests have changed meanwhile
                    self.loading = None
                    self.ready[step] = value, error
                    self.changed.notify_all()
            del value, error, context, placement

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing is left to load ahead."""
        return self.paused or (self.stop is not None and self.next >= max(self.stop, self.asked + 1))

    def close(self) -> None:
        """Ends the thread; waits for a load in progress, but not for one that hangs."""
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
