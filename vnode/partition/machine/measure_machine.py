"""Devices of one kind -> their measured rates and the bandwidth and latency of their links.

Knows jax, devices and clocks. Must not know machines, or which kinds have data sheets.

All devices of a kind run at once, as in a step, so that devices that share a resource get their share of it: the CPU
devices of a process share its cores. The programs run in interleaved rounds, and the median of each one's times counts.
Transfers are timed at two sizes: the difference gives the bandwidth, the smaller size the latency.

Links are measured by an all-reduce over all devices, the most frequent collective of steps. Bandwidth and latency are
fitted to a ring of 2 (p - 1) steps. The time of starting a program is subtracted.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.partition.machine.device_kind import Kind
from vnode.partition.machine.machine_builders import Link

ROUNDS = 7
TARGET = 0.02
"""Seconds of consecutive matrix products: much more than their launches take."""
ROWS = {"cpu": 512, "gpu": 4096}
"""Rows and columns of the matrices: large enough that products are not bound by memory."""
MOST_PRODUCTS = 1000
TOTAL = 2.5
"""Seconds after which no further round begins."""
SMALL, LARGE = 1 << 12, 1 << 23
"""Bytes that each device sends."""
STREAM = 1 << 24
"""Bytes that each device reads, and writes."""
STEPS = 64
"""Multiplications and additions with every element, in place of one."""
DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float8": jnp.float8_e4m3fn,
    "int8": jnp.int8,
}
LEAST = 1e-9
"""Seconds, where differences of times vanish in noise."""

Run = Callable[[], float]


def measure_kind(name: str, devices: Sequence[Any], memory: int) -> tuple[Kind, Link | None]:
    """Measures devices of one kind of this process, all at once; each has `memory` bytes.

    Returns:
      The kind, and the link from each device to the next in a ring of all; None for a single device.
    """
    mesh = Mesh(np.array(devices), ("d",))
    rows = ROWS.get(devices[0].platform, ROWS["gpu"])
    products = {name: found for name, dtype in DTYPES.items() if (found := product(mesh, dtype, rows))}
    runs: dict[str, Run] = {f"product {name}": run for name, (run, _) in products.items()}
    stream = max(1, min(STREAM, memory // 16) // 4)
    runs["stream"] = program(mesh, lambda x: x + 1, stream)
    runs["steps"] = program(mesh, many_steps, stream // 16 + 1)
    runs["start"] = program(mesh, lambda x: -x, SMALL // 4)
    for size in (SMALL, LARGE):
        runs[f"host {size}"] = copy_from_host(mesh, size)
        if len(devices) > 1:
            runs[f"send {size}"] = program(mesh, sum_over_devices(mesh), size // 4)
    seconds = median_seconds(runs)
    link = None
    if len(devices) > 1:
        steps = 2 * (len(devices) - 1)
        whole, start = fit_bandwidth(seconds[f"send {SMALL}"], seconds[f"send {LARGE}"], seconds["start"])
        link = Link("measured", whole * steps / len(devices), start / steps)
    host, host_latency = fit_bandwidth(seconds[f"host {SMALL}"], seconds[f"host {LARGE}"], 0.0)
    kind = Kind(
        name,
        {name: 2 * rows**3 * times / seconds[f"product {name}"] for name, (_, times) in products.items()},
        vector=2 * STEPS * (stream // 16 + 1) / seconds["steps"],
        memory=memory,
        bandwidth=8 * stream / seconds["stream"],
        host_bandwidth=host,
        host_latency=host_latency,
        source=f"measured on {len(devices)} at once, jax {jax.__version__}",
    )
    return kind, link


def fit_bandwidth(small: float, large: float, nothing: float) -> tuple[float, float]:
    """Fits bandwidth (bytes a second) and latency (seconds) to the times of two sizes, less the time of an empty run.

    At least half of the larger time counts as the time of its bytes, whatever the noise.
    """
    per_byte = max(large - small, large / 2) / (LARGE - SMALL)
    return 1 / per_byte, min(max(small - nothing - SMALL * per_byte, LEAST), 1.0)


def median_seconds(runs: dict[str, Run]) -> dict[str, float]:
    """The median seconds of each run, in interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(run())
        if time.perf_counter() - began > TOTAL:
            break
    return {name: max(statistics.median(found), LEAST) for name, found in times.items()}


def timer_of(run: Callable[[], Any]) -> Run:
    """A function that times one run, after a warm-up."""

    def seconds() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - began

    jax.block_until_ready(run())
    return seconds


def program(mesh: Mesh, function: Callable[[Any], Any], elements: int) -> Run:
    """Compiles a function of `elements` float32 numbers on each device."""
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    values = jax.jit(functools.partial(jnp.ones, (mesh.size * elements,)), out_shardings=sharding)()
    compiled = jax.jit(function).lower(values).compile()
    return timer_of(lambda: compiled(values))


def product(mesh: Mesh, dtype: Any, n: int) -> tuple[Run, int] | None:
    """A loop of n x n matrix products on each device, and their number; None if the compiler lacks the dtype."""
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    wide = jnp.int32 if dtype == jnp.int8 else dtype

    def one_product(_: Any, a: Any) -> Any:
        return jnp.einsum("dij,djk->dik", a, b, preferred_element_type=wide).astype(dtype)

    try:
        a, b = jax.jit(lambda: (jnp.ones((mesh.size, n, n), dtype),) * 2, out_shardings=sharding)()
        compiled = jax.jit(lambda a, times: jax.lax.fori_loop(0, times, one_product, a)).lower(a, 1).compile()
        one = timer_of(lambda: compiled(a, 1))
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    times = int(min(max(TARGET / max(min(one(), one()), LEAST), 1), MOST_PRODUCTS))
    return timer_of(lambda: compiled(a, times)), times


def many_steps(x: Any) -> Any:
    """A program bound by arithmetic, not by memory."""
    for _ in range(STEPS):
        x = x * x + 1e-3
    return x


def sum_over_devices(mesh: Mesh) -> Callable[[Any], Any]:
    """An all-reduce over all devices."""
    add = functools.partial(jax.lax.psum, axis_name="d")
    return jax.shard_map(add, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec())


def copy_from_host(mesh: Mesh, size: int) -> Run:
    """Copies `size` bytes from the host to each device."""
    sharding, values = NamedSharding(mesh, PartitionSpec("d")), np.ones(mesh.size * size, np.uint8)
    return timer_of(lambda: jax.device_put(values, sharding, may_alias=False))


def host_memory(devices: int) -> int:
    """Bytes of the host's memory, divided by the number of devices."""
    return max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices, 1)
