"""Programs split over a mesh, compiled by the real TPU compiler: the planned collectives are in them, and no others.

Knows what the experts' splits exchange. The programs (`tpu_programs`) are compiled in a process of its own,
because the compiler loads a large library. The reference is arithmetic on shapes: what each device receives, in rings.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import tpu
from tests.thorough.tpu_programs import BATCH, CHANNELS, HIDDEN, IMAGE, LENGTH, WIDTH

pytestmark = pytest.mark.tpu

DATA, MODEL = 2, 4
FLOAT = 4
CONTEXT = 8
"""Bytes that the compiler adds to what a permutation sends."""


def ring(numbers: float, devices: int) -> float:
    """Bytes that a device receives while so many numbers are summed over devices."""
    return 2 * FLOAT * numbers * (devices - 1) / devices


@functools.cache
def compiled() -> Mapping[str, dict]:
    """What each program consists of: its collectives, by `collectives`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.thorough.tpu_programs"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **tpu.ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


def exchanged(name: str) -> dict[str, list[int]]:
    """Bytes received, by kind of collective."""
    found: dict[str, list[int]] = {}
    for collective in compiled()[name]["collectives"]:
        assert not collective["inside"]
        found.setdefault(collective["opcode"], []).append(collective["bytes"])
    return found


ACTIVATIONS = BATCH * LENGTH // DATA * WIDTH
HALO = BATCH // DATA * 1 * IMAGE * CHANNELS
LOSS = 1


def test_columns_then_rows() -> None:
    """Shoeybi et al., "Megatron-LM" (2019), section 3: one sum forward; backward none, as the input has no gradient."""
    weights = 2 * WIDTH * HIDDEN // MODEL
    assert sorted(exchanged("perceptron")["all-reduce"]) == sorted(
        [ring(ACTIVATIONS, MODEL), ring(weights + LOSS, DATA)]
    )
    assert set(exchanged("perceptron")) == {"all-reduce"}


def test_heads() -> None:
    """The same, with heads as the columns: nothing is exchanged inside of attention."""
    weights = 4 * WIDTH * WIDTH // MODEL
    assert sorted(exchanged("attention")["all-reduce"]) == sorted(
        [ring(ACTIVATIONS, MODEL), ring(weights + LOSS, DATA)]
    )
    assert set(exchanged("attention")) == {"all-reduce"}


def test_space() -> None:
    """A row of the image from either neighbour."""
    assert exchanged("convolution") == {"collective-permute": [FLOAT * HALO + CONTEXT] * 2}


def test_gradients_over_space() -> None:
    """The rows once more, or still; the kernel's gradient is summed over all devices."""
    kernel = 3 * 3 * CHANNELS * CHANNELS
    assert exchanged("convolution's gradient") == {
        "collective-permute": [FLOAT * HALO + CONTEXT] * 2,
        "all-reduce": [ring(kernel, DATA * MODEL)],
    }


def test_sequence() -> None:
    """Each position is normalized for itself; gradients of scale and bias are summed over all devices."""
    assert exchanged("normalization") == {"all-reduce": [ring(2 * WIDTH + LOSS, DATA * MODEL)]}


def test_blocks() -> None:
    """One sum forward, along the axis of the blocks, and none in a loop along it; loops of run-time length. What a
    block takes does not depend on how many the others have."""
    first, second = "blocks (5, 3, 2, 2)", "blocks (11, 3, 1, 1)"
    for name in (first, second):
        row = compiled()[name]
        assert row["turns"] == [None, None]
        along = [c for c in row["collectives"] if not c["inside"]]
        assert ring(ACTIVATIONS, MODEL) in [c["bytes"] for c in along]
        assert {c["opcode"] for c in row["collectives"]} == {"all-reduce"}
    assert compiled()[first]["cycles of a block"] == compiled()[second]["cycles of a block"]


def test_what_an_all_to_all_brings_is_held_once() -> None:
    """The compiler reorders it in each reader, and holds it once for each order: of a program by hand it does."""
    ours, by_hand = (compiled()[f"to and fro {name}"]["temporary"] for name in ("by us", "by hand"))
    assert ours <= 0.9 * by_hand
