"""How long a piece takes by the TPU compiler's own estimate, of a build for a machine that need not be there.

Knows libtpu's topologies, compiled text, and pieces. Must not know programs, or what times are compared with.

The compiler writes ``estimated_cycles`` at every kernel of a scheduled program. They hold no transfer over links and no
time of a launch. Cycles become seconds by the clock, which follows from a chip's peak rate as the documentation has it:
operations a second / (units x rows x columns x 2).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import warnings
from typing import Any

import jax

from vnode.errors import MachineError
from vnode.partition.cost.cache import Cache
from vnode.partition.cost.pieces import Piece
from vnode.partition.cost.time import Time
from vnode.partition.hlo import cycles, parse
from vnode.partition.machine import Kind

CLOCKS = {
    # "How to scale your model" (Austin and others, 2025), appendix on TPU internals: units of 128 x 128 (256 x 256 on
    # v6e); two cores a chip on v4 and v5p, whose peak is that of both.
    "TPU v4": 275e12 / (2 * 4 * 128 * 128 * 2),
    "TPU v5e": 197e12 / (4 * 128 * 128 * 2),
    "TPU v5p": 459e12 / (2 * 4 * 128 * 128 * 2),
    "TPU v6e": 918e12 / (4 * 256 * 256 * 2),
}
"""Cycles a second, by the name of a kind."""

TOPOLOGIES = {"TPU v4": "v4:2x2x1", "TPU v5e": "v5e:2x2", "TPU v5p": "v5p:2x2x1", "TPU v6e": "v6e:2x2"}
"""The smallest machine of each kind that the compiler knows."""

ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""What the compiler reads when it is loaded: not to ask a metadata server which machine this is."""


class Compiler:
    """The TPU compiler's estimates.

    It needs the package ``libtpu`` (extra ``tpu-aot``), and some seconds for each piece that is not in the cache.

    Args:
      cache: where estimates are kept; by default in the user's cache folder.

    Raises:
      MachineError: the compiler is not installed.
    """

    def __init__(self, cache: Cache | None = None) -> None:
        if importlib.util.find_spec("libtpu") is None:
            raise MachineError("the TPU compiler is not installed.", remedies=["pip install 'vnode[tpu-aot]'"])
        self.cache = Cache() if cache is None else cache
        self._devices: dict[str, Any] = {}

    def device(self, kind: Kind) -> Any:
        """A device of a kind, to compile for."""
        if kind.name not in self._devices:
            from jax.experimental import topologies

            for name, value in ALONE.items():
                os.environ.setdefault(name, value)
            name = TOPOLOGIES[kind.name]
            options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}  # both cores as one device
            found = topologies.get_topology_desc(name, platform="tpu", **options)
            self._devices[kind.name] = found.devices[0]
        return self._devices[kind.name]

    def time(self, piece: Piece, kind: Kind) -> Time | None:
        """See `Source`: None for kinds that are no TPUs, and where the compiler estimates nothing."""
        if kind.name not in CLOCKS:
            return None
        key = {
            "source": "compiler",
            "piece": piece.key,
            "device": kind.name,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "libtpu": importlib.metadata.version("libtpu"),
        }
        found = self.cache.numbers(key)
        if found is None or "cycles" not in found:
            found = {"cycles": float(self.cycles(piece, kind))}
            self.cache.put(key, found)
        return Time(found["cycles"] / CLOCKS[kind.name], "compiler") if found["cycles"] else None

    def cycles(self, piece: Piece, kind: Kind) -> int:
        """The estimate for one run, loops counted as often as they run."""
        place = jax.sharding.SingleDeviceSharding(self.device(kind))
        given = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place) for shape in piece.shapes]
        with warnings.catch_warnings():  # jax's cache of compiled programs cannot be read without such a device
            warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")
            compiled = jax.jit(piece.function, out_shardings=place).lower(*given).compile()
        return cycles(parse(compiled.as_text() or ""), {})
