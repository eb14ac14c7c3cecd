"""Caches whose entries hold devices, and with them a client of XLA: they can be emptied, so that the client goes.

Knows caches of Python and of JAX. Must not know what is cached, nor which client nobody needs any more.

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
"""Empties each of the caches."""


def device_cache(maxsize: int) -> Callable[[Function], Function]:
    """As `functools.lru_cache`, for functions of devices, placements or shardings.

    Args:
      maxsize: entries.

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
    """Empties these caches and JAX's, and collects what they alone held: clients of XLA, their threads and memory.

    Programs that JAX has compiled are taken from its persistent cache when they are needed again, if it is on.
    """
    for empty in EMPTY:
        empty()
    jax.clear_caches()
    for _ in range(2):  # a client holds its devices, and they hold it: the first pass leaves some
        gc.collect()
