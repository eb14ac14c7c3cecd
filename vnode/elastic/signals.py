"""Signals that ask for the end of a run.

Knows signals. Must not know what a run is.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterable, Iterator


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C came twice: the user does not want to wait for the end of the step."""


class Stop:
    """Whether a signal has asked for the end.

    The first signal asks. A second Ctrl-C interrupts at once, wherever the program is, except within
    `deferred_interrupts`: there
    it is remembered, and interrupts at the end. Other signals may come as often as they like: a scheduler that sends
    one twice does not want less to be saved.

    Attributes:
      asked: whether there was a signal.
      name: of the first one.
    """

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self._sheltered = 0
        self._interrupted = False

    def handle(self, number: int, frame: types.FrameType | None) -> None:
        """The signal handler."""
        if not self.asked:
            self.name = signal.Signals(number).name
            self.asked = True
        elif number == signal.SIGINT:
            self._interrupted = True
            self._interrupt()

    def _interrupt(self) -> None:
        if self._interrupted and not self._sheltered:
            self._interrupted = False
            raise SecondInterrupt

    @contextlib.contextmanager
    def deferred_interrupts(self) -> Iterator[None]:
        """Holds back the second Ctrl-C until the context ends, so that a file is written completely."""
        self._sheltered += 1
        try:
            yield
        finally:
            self._sheltered -= 1
        self._interrupt()

    @classmethod
    @contextlib.contextmanager
    def catch(cls, signals: Iterable[signal.Signals]) -> Iterator[Stop]:
        """Catches signals for as long as the context lasts, then gives them back to who had them.

        Only in the main thread: elsewhere signals cannot be caught.
        """
        stop, previous = cls(), {}
        try:
            if threading.current_thread() is threading.main_thread():
                for number in signals:
                    # One that is ignored stays so (nohup); a handler that is not Python's could not be restored.
                    if signal.getsignal(number) not in (signal.SIG_IGN, None):
                        previous[number] = signal.signal(number, stop.handle)
            yield stop
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
