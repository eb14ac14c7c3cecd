"""Python's cyclic garbage collector, paused while a step is traced and rewritten.

Knows the collector. Must not know what is made meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

FROZEN = 10_000
"""Frozen objects that an interpreter may have of its own. More are the user's, and must not thaw."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector would walk the many equations again and again, with nothing to free.

    What was made meanwhile is put with what is old, or the collector would walk it as soon as it goes on.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if gc.get_freeze_count() < FROZEN:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
