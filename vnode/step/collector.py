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
    """A context in which the collector rests: it would walk many equations again and again, with nothing to free.

    Afterwards what was made is put with what is old, or the collector would walk it as soon as it goes on. It walks
    everything once twice as much has been put there as it walked the last time.
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
    """Whether objects are frozen that must not thaw.

    Seen once is enough: Python counts them one by one, which takes 15 ms where all that was imported is frozen. Where
    they thaw later, the collector walks more than it would have to.
    """
    global kept_frozen
    kept_frozen = kept_frozen or gc.get_freeze_count() >= FROZEN
    return kept_frozen


walked: int | None = None
"""How many objects there were when the collector last walked all of them, as far as is known."""

unwalked = 0
"""How many have been put with the old ones since."""


def age_objects() -> None:
    """Has the collector take all objects for old, or walk all of them if many have not been walked since they were."""
    global walked, unwalked
    unwalked += gc.get_count()[0]
    if walked is not None and unwalked > 2 * walked:
        gc.collect()
        walked, unwalked = None, 0
    gc.freeze()
    if walked is None:
        walked = gc.get_freeze_count()
    gc.unfreeze()
