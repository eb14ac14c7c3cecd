"""Keeps orbax's progress reports out of the log: dozens of lines for each checkpoint.

Knows loggers. Must not know checkpoints.

    INFO:absl:[process=0][thread=MainThread] Initiated Pytree async_save. Time taken: 0.002s  ->  (nothing)
    INFO:vnode:checkpoint of step 100                                                         ->  the same

Warnings and errors stay, and all of it does where the logger ``"vnode"`` is at level DEBUG.
"""

from __future__ import annotations

import logging


class Quiet(logging.Filter):
    """Holds back what orbax reports to absl's logger, from now until `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.getLogger("absl")
        self.logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        own = "orbax" not in record.pathname
        return own or record.levelno >= logging.WARNING or logging.getLogger("vnode").isEnabledFor(logging.DEBUG)

    def end(self) -> None:
        """Stops holding back; a second call does nothing."""
        self.logger.removeFilter(self)

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
