"""The step as it was written, on one device, and how much of its results is rounding.

Knows steps and what fits in a device's memory. Must not know virtual nodes, nor what is said of a difference.

The tolerance is measured: the plain step is run again with its roundings changed (`vnode.runtime.rounding_noise`). Each
element may differ by a small multiple of the change that this causes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from vnode.analysis.tracing import meshless_function
from vnode.placement.sharded import is_sharded_batch
from vnode.placement.trace_context import call_in_mesh, current_mesh, use_mesh
from vnode.plan.check.arrays import distance, to_host
from vnode.plan.nodes.device_memory import compiler_planned_bytes, memory_refusal, program_memory, reported_bytes
from vnode.runtime.rounding_noise import with_rounding_noise
from vnode.show.units import size
from vnode.step.call import OutputTree
from vnode.step.resolved import Resolved

SAMPLES = 4
"""Runs of the plain step with other roundings."""

QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options of these runs on a CPU: they need not be fast, and compiling takes most of the time."""


class Reference:
    """The step as it was written, on one device, and how much of its results is rounding.

    Args:
      here: the step and its arguments.
      device: the device.

    Attributes:
      absent: why there are no results; nothing if there are.
      noisy: whether it is known how much of them is rounding.
    """

    def __init__(self, here: Resolved, device: Any) -> None:
        spec = here.step.spec
        call = spec.call(here.args, here.kwargs)
        fun, leaves = call.flat_function(spec.fun, OutputTree()), call.leaves
        self.absent, self.noisy = "", False
        self._wants: list[Any] = []
        self._spreads: list[Any] = []
        leaves = [leaf.whole() if is_sharded_batch(leaf) else leaf for leaf in leaves]
        mesh, there = current_mesh(), SingleDeviceSharding(device)  # a device alone would leave the mesh in the type
        outside = use_mesh(None) if mesh is not None else contextlib.nullcontext()
        with jax.default_device(device), outside:
            try:
                placed = [jax.device_put(leaf, there) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
                if mesh is not None:
                    fun = call_in_mesh(mesh, meshless_function, fun, *placed)
                compiled = compile_fitting(jax.jit(fun), device, *placed)
                self._wants = list(map(to_host, compiled(*placed)))
            except TooLarge as error:
                self.absent = f"{error}; a smaller batch would fit, with as many nodes"
                return
            try:
                other = jax.jit(
                    with_rounding_noise(fun), compiler_options=QUICK_COMPILE if device.platform == "cpu" else None
                )
                compiled = compile_fitting(other, device, np.uint32(0), *placed)
                for seed in range(1, SAMPLES + 1):
                    others = map(to_host, compiled(np.uint32(seed), *placed))
                    moved = [distance(other, want) for other, want in zip(others, self._wants, strict=True)]
                    self._spreads = list(map(np.fmax, self._spreads, moved)) if self._spreads else moved
                self.noisy = True
            except TooLarge:
                pass

    def results(self, count: int) -> list[tuple[Any, Any]]:
        """The results, and how far each element moves with other roundings; None where they are unknown."""
        wants = [None] * count if self.absent else self._wants
        return list(zip(wants, self._spreads if self.noisy else [None] * count, strict=True))


class TooLarge(Exception):
    """A program does not fit in a device's memory."""


def compile_fitting(program: Any, device: Any, *args: Any) -> Any:
    """A function compiled for a device, that raises `TooLarge` where it does not fit."""
    room = reported_bytes(device) or compiler_planned_bytes(device) or free_memory()
    compiled = None

    def guarded(attempt: Any, *values: Any) -> Any:
        try:
            return jax.block_until_ready(attempt(*values))
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or memory_refusal(error)[0]:
                raise TooLarge("does not fit in the device's memory") from None
            raise

    compiled = guarded(lambda: program.lower(*args).compile())
    needed = program_memory(compiled)
    if room and needed > room:
        raise TooLarge(f"takes {size(needed)}, there are {size(room)}")
    return lambda *values: guarded(compiled, *values)


def free_memory() -> int:
    """Bytes of the host's memory that are free, where the system says so (Linux); else 0."""
    try:
        entries = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
