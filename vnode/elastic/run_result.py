"""The result of a run, and the records of its metrics and changes of devices.

Knows placements, and metrics on the host. Must not know how either came about.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax

from vnode.placement.placement import Placement
from vnode.show.units import several

HISTORY_BYTES = 64 << 20
"""Bytes of metrics that a history holds at most; but always the last entry."""


@dataclasses.dataclass(frozen=True)
class FormerPlacement:
    """A placement of workers whose client of JAX is gone: the same numbers, without its devices.

    Attributes:
      devices: their names.
      counts: how many nodes each computes.
      virtual_nodes: how many there are.
      size: how many devices, or groups of them, compute nodes of their own.
    """

    devices: tuple[str, ...]
    counts: tuple[int, ...]
    virtual_nodes: int
    size: int

    @classmethod
    def from_placement(cls, placement: Placement) -> FormerPlacement:
        """The numbers of a placement, without its devices."""
        return cls(tuple(map(str, placement.devices)), tuple(placement.counts), placement.virtual_nodes, placement.size)


@dataclasses.dataclass
class Resize:
    """One change of devices.

    Attributes:
      step: the number of the first step on the new devices.
      before: the placement until then; of workers a `FormerPlacement`.
      after: the placement from then on.
      lost: the devices that failed, if that is why.
      error: what was raised, if the run fell back to a copy of the state.
      repeated: steps that are run again because of it.
      move: seconds until the state was on the new devices.
      compile: seconds until the first call returned: tracing and compiling if the placement is new.
      first: seconds from there until the first result was there.
    """

    step: int
    before: Placement | FormerPlacement
    after: Placement | FormerPlacement
    lost: tuple[Any, ...] = ()
    error: str = ""
    repeated: int = 0
    move: float = 0.0
    compile: float = 0.0
    first: float = 0.0

    def __str__(self) -> str:
        why = f"lost {', '.join(map(str, self.lost))}, " if self.lost else "after an error, " if self.error else ""
        again = f", {several(self.repeated, 'step')} again" if self.repeated else ""
        sizes = f"{self.before.size} -> {several(self.after.size, 'device')}"
        return (
            f"step {self.step}: {why}{sizes} {list(self.after.counts)}: "
            f"state moved in {self.move:.3f} s, compiled in {self.compile:.3f} s, first step {self.first:.3f} s{again}"
        )


class History:
    """The last metrics of a run: so many entries, and no more than `HISTORY_BYTES`.

    Args:
      most: entries.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.entries: deque[tuple[int, Any, int]] = deque()
        self.bytes = 0

    def append(self, number: int, metrics: Any) -> None:
        """Adds the metrics of a step, and forgets the oldest ones where there are too many."""
        size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(metrics))
        self.entries.append((number, metrics, size))
        self.bytes += size
        while len(self.entries) > self.most or (self.bytes > HISTORY_BYTES and len(self.entries) > 1):
            self.bytes -= self.entries.popleft()[2]

    def back_to(self, number: int) -> None:
        """Forgets the steps from this one on: they will be run again."""
        while self.entries and self.entries[-1][0] >= number:
            self.bytes -= self.entries.pop()[2]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((number, metrics) for number, metrics, _ in self.entries)


@dataclasses.dataclass(repr=False)
class Result:
    """The result of a run.

    Attributes:
      state: the state after the last step.
      step: how many steps the state has behind it, those of earlier runs included.
      history: ``(step number, metrics)`` of the last steps of this run, with metrics on the host; each step once. In a
        worker also of those before it joined.
      evaluations: ``(steps behind the state, metrics)`` of the evaluations.
      resizes: the changes of devices.
      resumed: the step number of the checkpoint that this run began with, if it did.
      stopped: whether the run ended before `steps`.
      reason: why it did; empty if it did not.
      best: the step number and the metric of the best state, if `best_metric` was asked for; its checkpoint stays:
        ``vnode.elastic.restore(folder, step=result.best[0])``.
    """

    state: Any
    step: int
    history: list[tuple[int, Any]]
    evaluations: list[tuple[int, Any]]
    resizes: list[Resize]
    resumed: int | None
    stopped: bool
    reason: str = ""
    best: tuple[int, float] | None = None

    def __repr__(self) -> str:
        parts = [f"step={self.step}"]
        parts += [] if self.resumed is None else [f"resumed={self.resumed}"]
        parts += [f"stopped: {self.reason}"] if self.stopped else []
        parts += [] if self.best is None else [f"best={self.best[0]}"]
        parts += [f"{len(entries)} {name}" for name, entries in self._lists() if entries]
        return f"Result({', '.join(parts)})"

    def _lists(self) -> list[tuple[str, list[Any]]]:
        return [("steps in history", self.history), ("evaluations", self.evaluations), ("resizes", self.resizes)]
