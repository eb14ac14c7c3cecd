"""Times of a run's steps -> its speed, as metrics by name: wall time, examples a second and utilization.

Knows batches, clocks, and the peak rates of devices. Must not know who is told.

    told at 10.0 and 10.5 s, 2 steps of 64 examples  ->  {"time/seconds": 10.5, "time/examples_per_second": 256.0}
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from vnode.elastic.evaluation import size_of
from vnode.errors import VnodeError


class Speed:
    """The pace of a run from one told step to the next.

    Args:
      peak: operations a second of one device at its best; None for what is known of its kind.
    """

    def __init__(self, peak: float | None) -> None:
        self.peak = peak
        self.began = time.perf_counter()
        self.sizes: dict[int, int] = {}
        self.last: tuple[int, float] | None = None
        self.operations: int | None = None

    def launch(self, number: int, batch: Any) -> None:
        """Takes note of a step's batch."""
        self.sizes[number] = size_of(batch)

    def restart(self) -> None:
        """Starts a new measurement: the next step compiles, or is run again."""
        self.last = None
        self.sizes.clear()

    def metrics(self, number: int, step: Any, state: Any, batch: Any) -> dict[str, float]:
        """Metrics of the pace up to a step whose result is there.

        Args:
          number: of the step.
          step: that is run.
          state: of such a step, for its shapes.
          batch: likewise; None if it is not known.
        """
        now, before = time.perf_counter(), self.last
        self.last = number, now
        found = {"time/seconds": now - self.began}
        counted = [self.sizes.pop(i) for i in sorted(self.sizes) if i <= number]
        if before is None or number <= before[0] or now <= before[1]:
            return found
        seconds = now - before[1]
        found["time/examples_per_second"] = sum(counted) / seconds
        peak = self.peak if self.peak is not None else known_peak(step.placement.devices)
        if peak and batch is not None:
            work = self.work(step, state, batch) * (number - before[0])
            found["time/utilization"] = work / (seconds * peak * len(step.placement.devices))
        return found

    def work(self, step: Any, state: Any, batch: Any) -> int:
        """Scalar operations of a step as it was written, what is computed again not counted; 0 if nobody knows."""
        known = self.operations
        if known is None:
            known = 0
            with contextlib.suppress(VnodeError):
                known = int(step.explain(state, batch).flops)
            self.operations = known
        return known


def known_peak(devices: Sequence[Any]) -> float | None:
    """Operations a second in bfloat16 of the slowest of some devices, as their makers say; None if one is not known."""
    from vnode.partition.machine.known_kinds import JAX_NAMES, KINDS

    kinds = [KINDS.get(JAX_NAMES.get(device.device_kind, "")) for device in devices]
    peaks = [None if kind is None else kind.peak.get("bfloat16") for kind in kinds]
    return None if None in peaks else min(peak for peak in peaks if peak is not None)
