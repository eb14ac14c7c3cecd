"""Pauses Python's cyclic garbage collector while a step is traced and rewritten.

Knows the collector. Must not know what is made meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

FROZEN = 10_000
"""The number of frozen objects that an interpreter itself may have. More are the user's, and stay frozen."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A context in which the collector is paused: it would walk many equations again and again, with nothing to free.

    Afterwards the new objects join the oldest generation, or the collector would walk them at once. A full collection
    runs once twice as many objects have joined as it last walked.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not frozen_by_others():
                age_objects()
            gc.enable()


kept_frozen = False
"""Whether more than `FROZEN` objects were once seen to be frozen."""


def frozen_by_others() -> bool:
    """Whether the user has frozen objects, which must stay frozen.

    A positive answer is cached: Python counts frozen objects one by one, which may take 15 ms.
    """
    global kept_frozen
    kept_frozen = kept_frozen or gc.get_freeze_count() >= FROZEN
    return kept_frozen


walked: int | None = None
"""The number of objects at the last full collection, if it is known."""

unwalked = 0
"""The number of objects that have joined the oldest generation since."""


def age_objects() -> None:
    """Moves all objects to the oldest generation, after a full collection if many have joined it since the last one."""
    global walked, unwalked
    unwalked += gc.get_count()[0]
    if walked is not None and unwalked > 2 * walked:
        gc.collect()
        walked, unwalked = None, 0
    gc.freeze()
    if walked is None:
        walked = gc.get_freeze_count()
    gc.unfreeze()
