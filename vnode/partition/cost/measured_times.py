"""How long a piece takes, measured on a device that is here; once, and then from a cache.

Knows jax's devices, clocks, and pieces. Must not know programs, or what times are compared with.

A piece is compiled for one device and run in batches: as many runs, one after the other without waiting, as take
`BATCH` seconds together, and then one wait. As often a program that does nothing is run, in turns with the piece, so
that whatever else happens on the machine hits both. The time of a run is the median of the batches less that of
nothing, which is what starting a program from Python takes and what the equations of one program do not pay each.
The noise is half of the distance between the quartiles of the batches of either; where it is large, there is
a second measurement, or a third.
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
from vnode.partition.cost.roofline import Time
from vnode.partition.cost.timed_pieces import TimedOp
from vnode.partition.machine import Kind
from vnode.partition.machine.known_kinds import JAX_NAMES

BATCH = 2e-3
"""Seconds of runs between two looks at the clock: thousands of its resolutions."""
BATCHES = 25
MOST_RUNS = 1000
TRIES = 3
QUIET = 0.1
"""What share of a time its noise may be without another try: something else runs on the machine, for a while."""


class Measured:
    """Times measured on one device of this machine.

    Args:
      device: on which; by default the first that jax has.
      cache: where times are kept; by default in the user's cache folder.
      batches: how often is measured.

    Example:
      >>> import tempfile
      >>> from vnode.partition.cost.timed_pieces import traced_piece
      >>> from vnode.partition.machine import Machine
      >>> piece = traced_piece(lambda a: a @ a, jnp.ones((256, 256)))
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
        """Under which a piece's time is kept: the computation, where, and with what it is compiled."""
        return {
            "source": "measured",
            "piece": piece.key,
            "device": self.device.device_kind,
            "platform": self.device.client.platform_version,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
        }

    def time(self, piece: TimedOp, kind: Kind) -> Time | None:
        """See `Source`: None for another kind of device than the one that is here, and for operands that are keys."""
        mine = {self.device.device_kind, JAX_NAMES.get(self.device.device_kind)}
        if kind.name not in mine or not all(map(is_numeric, piece.shapes)):
            return None
        key = self.key(piece)
        found = self.cache.numbers(key)
        if found is None or not {"seconds", "noise"} <= found.keys():
            seconds, noise = self.measure(piece)
            found = {"seconds": seconds, "noise": noise}
            self.cache.put(key, found)
        return Time(found["seconds"], "measured", found["noise"])

    def measure(self, piece: TimedOp) -> tuple[float, float]:
        """Seconds of a run, and the noise: of the quietest of some measurements, the first that is quiet enough."""
        found = list[tuple[float, float]]()
        while len(found) < TRIES and not (found and found[-1][1] <= QUIET * found[-1][0]):
            found.append(self.measure_once(piece))
        return min(found, key=lambda each: each[1])

    def measure_once(self, piece: TimedOp) -> tuple[float, float]:
        """Seconds of a run, and the noise, of one measurement."""
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


def is_numeric(shape: Any) -> bool:
    """Whether arrays of a type can be made of numbers."""
    return not jnp.issubdtype(shape.dtype, jax.dtypes.extended)


def example_array(shape: Any, seed: int) -> Any:
    """An array to measure with: numbers in [0.5, 1.5), so that nothing overflows or is denormal; whole ones are 0 or 1,
    which are indices of everything."""
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(shape.dtype, np.inexact):
        return jnp.asarray(generator.random(shape.shape, np.float32) + 0.5).astype(shape.dtype)
    return jnp.asarray(generator.integers(0, 2, shape.shape)).astype(shape.dtype)


def seconds_per_run(function: Callable[[], Any], runs: int) -> float:
    """Seconds of a run, of so many in a row."""
    start = time.perf_counter()
    result = None
    for _ in range(runs):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / runs


def runs_per_batch(function: Callable[[], Any]) -> int:
    """How many runs make up a batch; compiles the function, and warms it up."""
    seconds_per_run(function, 1)
    once = min(seconds_per_run(function, 1) for _ in range(3))
    return int(np.clip(BATCH / max(once, 1e-9), 1, MOST_RUNS))
