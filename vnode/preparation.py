"""Compiles a step for other placements while training goes on.

Knows threads and how to ask a step for its compiled program. Must not know how a step is made or called.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any

from vnode.placement import Placement


class Preparation:
    """Programs that are being compiled in the background, one after another.

    Attributes:
      placements: for which, in this order.
    """

    def __init__(self, compilers: Mapping[Placement, Callable[[], Any]]) -> None:
        self.placements = tuple(compilers)
        # One thread: several compilations at once would take the processors from training.
        pool = concurrent.futures.ThreadPoolExecutor(1, "vnode-prepare")
        self._futures = {placement: pool.submit(timed, compiler) for placement, compiler in compilers.items()}
        pool.shutdown(wait=False)

    def done(self, placement: Placement | None = None) -> bool:
        """Whether the program for a placement, or all of them, is there (or has failed)."""
        return all(future.done() for future in self._asked(placement))

    def wait(self, placement: Placement | None = None, timeout: float | None = None) -> Preparation:
        """Waits for the program for a placement, or for all.

        Args:
          placement: which; all by default.
          timeout: seconds to wait at most.

        Returns:
          Itself.

        Raises:
          TimeoutError: it takes longer.
          Exception: what compiling raised.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for future in self._asked(placement):
            future.result(None if until is None else max(until - time.monotonic(), 0))
        return self

    def cancel(self) -> None:
        """Drops what has not been begun."""
        for future in self._futures.values():
            future.cancel()

    @property
    def seconds(self) -> dict[Placement, float]:
        """How long compiling took, for those that are there."""
        there = {p: f for p, f in self._futures.items() if f.done() and not f.cancelled() and f.exception() is None}
        return {placement: future.result() for placement, future in there.items()}

    def _asked(self, placement: Placement | None) -> list[concurrent.futures.Future[float]]:
        return list(self._futures.values()) if placement is None else [self._futures[placement]]


def timed(compiler: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    compiler()
    return time.perf_counter() - start
