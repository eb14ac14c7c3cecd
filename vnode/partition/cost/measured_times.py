"""A timed op -> its seconds, measured once on a local device and then read from a cache.

Knows jax's devices, clocks, and timed ops. Must not know programs, or what times are compared with.

A timed op is compiled for one device and run in batches. A batch starts as many runs as take `BATCH` seconds, without
waiting in between, and then waits once. Batches of an empty program alternate with them, so that other load on the
machine affects both. The time of a run is the difference of the two medians: starting a program from Python is not
counted, because the equations of one program do not pay it each. The noise is half of the distance between the
quartiles of the batches, the larger of the two.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vnode.partition.cost.cache import Cache
from vnode.partition.cost.time_sources import Time
from vnode.partition.cost.timed_pieces import TimedOp
from vnode.partition.machine import Kind
from vnode.partition.machine.known_kinds import JAX_NAMES

BATCH = 2e-3
"""Seconds of runs between two looks at the clock: thousands of its resolutions."""
BATCHES = 25
MOST_RUNS = 1000


class Measured:
    """Times measured on one device of this machine.

    Args:
      device: the device to measure on; by default jax's first.
      cache: where times are kept; by default in the user's cache folder.
      batches: number of measured batches.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from vnode.partition import Cache, Measured
      >>> import tempfile
      >>> from vnode.partition.cost.timed_pieces import traced_op
      >>> from vnode.partition.machine import Machine
      >>> piece = traced_op(lambda a: a @ a, jnp.ones((256, 256)))
      >>> kind = Machine.here(jax.devices()[:1]).kinds[0]
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     found = Measured(cache=Cache(folder)).time(piece, kind)
      >>> found.source, found.seconds > 0
      ('measured', True)
    """

    def __init__(self, device: Any = None, cache: Cache | None = None, batches: int = BATCHES) -> None:
        self.device = jax.devices()[0] if device is None else device
        self.cache = Cache() if cache is None else cache
        self.batches = batches

    def key(self, piece: TimedOp) -> dict[str, str]:
        """The cache key of a timed op: the computation, the device, and the versions that compile it."""
        return {
            "source": "measured",
            "piece": piece.key,
            "device": self.device.device_kind,
            "platform": self.device.client.platform_version,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
        }

    def time(self, piece: TimedOp, kind: Kind) -> Time | None:
        """See `Source`: None for kinds of device other than this one, and for operands that are random keys."""
        mine = {self.device.device_kind, JAX_NAMES.get(self.device.device_kind)}
        if kind.name not in mine or any(jnp.issubdtype(each.dtype, jax.dtypes.extended) for each in piece.shapes):
            return None
        key = self.key(piece)
        found = self.cache.get(key)
        if found is None or not all(isinstance(found.get(name), float | int) for name in ("seconds", "noise")):
            seconds, noise = self.measure(piece)
            found = {"seconds": seconds, "noise": noise}
            self.cache.put(key, found)
        return Time(found["seconds"], "measured", found["noise"])

    def measure(self, piece: TimedOp) -> tuple[float, float]:
        """Seconds of a run, and the noise."""
        with jax.default_device(self.device):
            values = [example_array(shape, i) for i, shape in enumerate(piece.shapes)]
            run = jax.jit(piece.function)
            nothing = jax.jit(lambda x: x + 1)
            scalar = jnp.zeros((), jnp.float32)
            pair: Sequence[Callable[[], Any]] = (lambda: run(*values), lambda: nothing(scalar))
            counts = [runs_per_batch(function) for function in pair]
            samples = np.array(
                [[seconds_per_run(f, n) for f, n in zip(pair, counts, strict=True)] for _ in range(self.batches)]
            )
        middle = np.median(samples, axis=0)
        low, high = np.percentile(samples, [25, 75], axis=0)
        noise = float((high - low).max() / 2)
        return max(float(middle[0] - middle[1]), time.get_clock_info("perf_counter").resolution), noise


def example_array(shape: Any, seed: int) -> Any:
    """An array to measure with: floats in [0.5, 1.5), so that nothing overflows or is denormal; integers are 0 or 1, so
    that they are valid indices."""
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(shape.dtype, np.inexact):
        return jnp.asarray(generator.random(shape.shape, np.float32) + 0.5).astype(shape.dtype)
    return jnp.asarray(generator.integers(0, 2, shape.shape)).astype(shape.dtype)


def seconds_per_run(function: Callable[[], Any], runs: int) -> float:
    """Seconds of one run, averaged over `runs` that are started without waiting."""
    start = time.perf_counter()
    result = None
    for _ in range(runs):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / runs


def runs_per_batch(function: Callable[[], Any]) -> int:
    """The number of runs in a batch; compiles the function and warms it up."""
    seconds_per_run(function, 1)
    once = min(seconds_per_run(function, 1) for _ in range(3))
    return int(np.clip(BATCH / max(once, 1e-9), 1, MOST_RUNS))
