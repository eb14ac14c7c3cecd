"""A kind of device -> the share of its peak rates that programs reach, read from ``calibration.json``.

    {"TPU v5e": {"products": 0.9, "passes": 0.8, "launch": 1e-6, "recomputes": true, "memory": [0.9, 1.1], ...}}

`python -m vnode.partition.calibrate v5e` writes an entry again, when a compiler changes. Knows names of platforms and
kinds, and the file. Must not know programs, nor how an entry is found.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

from vnode.partition.machine import Kind
from vnode.partition.machine.known_kinds import KINDS

FILE = importlib.resources.files("vnode.partition.cost") / "calibration.json"
"""Entries by kind of device, and by platform for kinds without one."""

Quantiles = Sequence[float]
"""10%, 50% and 90% of some programs."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The rates that programs reach on a kind of device, and the errors of estimates.

    Attributes:
      products: the share of the peak rate that matrix products reach.
      passes: the share of the memory bandwidth that other fused operations reach.
      launch: seconds of launch overhead per fused operation.
      recomputes: whether arithmetic is cheaper than memory: products fuse element-wise operations, and results computed
        from one array are recomputed by each reader (`vnode.partition.cost.fusion`).
      on_chip: bytes of temporary arrays that stay on the chip instead of in the device's memory.
      memory: compiled / estimated bytes of a device: quantiles 10%, 50% and 90% of the programs of the calibration.
      time: the same of seconds of computation.
    """

    products: float = 1.0
    passes: float = 1.0
    launch: float = 2e-6
    recomputes: bool = False
    on_chip: int = 0
    memory: Quantiles | None = None
    time: Quantiles | None = None

    @staticmethod
    def for_platform(platform: str, kind: str = "") -> Calibration:
        """The entry of a kind, if it belongs to the platform that is compiled for; otherwise that of the platform.

        >>> Calibration.for_platform("tpu", "TPU v5e").recomputes, Calibration.for_platform("cpu", "TPU v5e").recomputes
        (True, False)
        """
        own = kind if kind in entries() and kind.lower().startswith(platform) else platform
        return entries().get(own, Calibration())

    @staticmethod
    def for_kind(kind: Kind) -> Calibration:
        """The entry of a kind with its data sheet's figures; a measured kind needs no correction."""
        sheet = KINDS.get(kind.name)
        same = sheet is not None and (kind.bandwidth, kind.peak) == (sheet.bandwidth, sheet.peak)
        return entries().get(kind.name, Calibration()) if same else Calibration()


@functools.cache
def entries() -> dict[str, Calibration]:
    """All entries of the file."""
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: Calibration(**entry) for name, entry in content.items()}
