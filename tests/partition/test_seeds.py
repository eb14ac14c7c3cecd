"""Plans do not depend on the order in which a process's sets are, which another process would have otherwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ahead import program

SEEDS = ("11", "13", "12") if os.environ.get("VNODE_TEST_ALL") == "1" else ("11", "13")


@pytest.mark.thorough
def test_plans_are_alike_in_all_processes():
    running = [
        subprocess.Popen(
            program("planned_with_hash_seed"),
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in SEEDS
    ]
    found = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    assert found[0] and found.count(found[0]) == len(SEEDS)
