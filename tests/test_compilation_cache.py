"""Programs for several CPU devices are not taken from jax's persistent compilation cache, where they lose their order.

Knows how to run a step in a process of its own, with a cache.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ahead import program


def programs(devices: int, cache: Path) -> int:
    """How many programs of the step are in the cache after another process has run it."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [*program("compiled_with_cache"), str(devices)]
    subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    return len(list(cache.glob("jit_train_step-*-cache")))


@pytest.mark.thorough
def test_programs_of_several_cpu_devices_are_compiled_in_each_process(tmp_path: Path) -> None:
    assert [programs(2, tmp_path), programs(2, tmp_path)] == [1, 2]


def test_programs_of_one_device_are_taken_from_the_cache(tmp_path: Path) -> None:
    assert [programs(1, tmp_path), programs(1, tmp_path)] == [1, 1]
