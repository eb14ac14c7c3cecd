"""Steps that call multi-threaded host libraries, on as many devices as there are cores and on fewer: nothing waits for
ever, and the bits are the same.

Knows that XLA's CPU backend has a pool of as many threads as the process may use cores. A program that hangs cannot be
stopped from inside, so each runs in a process of its own with two cores, two devices and a time limit.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.ahead import ROOT, program

pytestmark = pytest.mark.thorough

LIMIT = 180.0
"""Seconds after which a program counts as hanging. It takes some five, most of them to compile."""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot give a process fewer cores")
@pytest.mark.parametrize(
    "step",
    [
        "eigenvalues_per_example_and_summed",
        "several_decompositions_at_once",
        "preconditioners_computed_once_in_a_branch",
    ],
)
def test_as_many_devices_as_cores(step: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*program("decompositions"), step], cwd=ROOT, env=environment, timeout=LIMIT, check=False)
    assert done.returncode == 0
