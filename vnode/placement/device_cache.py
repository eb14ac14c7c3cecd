"""Function of devices -> cached function, whose cache can be emptied to free XLA clients.

Knows caches of Python and of JAX. Must not know the cached values, nor which client is no longer needed.

    @device_cache(maxsize=16)
    def programs(sharding): ...

    empty_device_caches()       # `programs` is called again for all shardings, and JAX traces all functions again
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import jax

Function = TypeVar("Function", bound=Callable[..., Any])

EMPTY: list[Callable[[], None]] = []
"""Functions that empty the caches."""


def device_cache(maxsize: int) -> Callable[[Function], Function]:
    """As `functools.lru_cache`, for functions of devices, placements or shardings.

    Args:
      maxsize: the most entries.

    Example:
      >>> @device_cache(maxsize=2)
      ... def numbers(devices): return [device.id for device in devices]
      >>> numbers(tuple(jax.devices()[:1])) is numbers(tuple(jax.devices()[:1]))
      True
    """

    def decorate(function: Function) -> Function:
        cached = functools.lru_cache(maxsize)(function)
        EMPTY.append(cached.cache_clear)
        return cached  # pyright: ignore[reportReturnType]

    return decorate


def empty_device_caches() -> None:
    """Empties these caches and JAX's, and collects garbage: XLA clients, their threads and memory.

    If JAX's persistent cache is on, compiled programs are read from it when they are needed again.
    """
    for empty in EMPTY:
        empty()
    jax.clear_caches()
    for _ in range(2):  # clients and devices refer to each other: the first pass leaves some
        gc.collect()
