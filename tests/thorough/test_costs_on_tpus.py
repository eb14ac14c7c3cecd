"""Costs beside the TPU compiler, for machines that are not there.

Run in a process of its own, because the compiler loads a large library. The references are arithmetic for times, and
the compiler's own analysis of memory.
"""

from pathlib import Path

import pytest

from tests.ahead import said

pytestmark = pytest.mark.tpu

def test_the_compilers_estimates_and_memory() -> None:
    found = said("costs_on_tpus")
    source, seconds, again = found["product"]
    peak = 2 * 4096**3 / 197e12
    assert source == "compiler" and again == seconds and found["other"]
    assert peak <= seconds <= 1.5 * peak
    assert abs(found["error"]) <= 0.1, found["report"]
    assert len(found["passes"]) == 9 * 4
    for name, ratio in found["passes"].items():
        assert 0.75 <= ratio <= 1.25, (name, ratio)
    assert len(found["memory"]) == 3
    for error, report in found["memory"].values():
        assert abs(error) <= 0.12, report
    accepted, gathered, report = found["sharded"]
    assert accepted, report
    assert gathered == 2 * 512 * 1024 * 2, "each matrix once, however many products read it, in bfloat16"
    exact, exchanged, report = found["loops"]
    assert exact, report
    assert exchanged == {
        "all-to-all": 2 * 4096 * 256,  # once, before the loop, in bfloat16
        "all-gather": 16 * 2 * 256 * 1024,  # at every turn, in bfloat16, since only products read it, then and later
        "reduce-scatter": 4 * 1024 * 1024 + 16 * 4 * 256 * 256,  # of the gradient, once, after the loop
        "all-reduce": 4 * 1024 + 16 * 4 * 64 * 256,  # once, after the loop; and of parts, not of the whole
    }


def test_what_the_compiler_holds() -> None:
    found = said("memory_held_on_tpus")
    taken, predicted = found["room"]
    assert taken == predicted
    assert found["planned sums"] == found["compiled sums"] and len(found["compiled sums"]) > 1
    assert found["planned arrays"] == found["compiled arrays"] == {"bf16": True, "pred": True, "f32": False}


@pytest.mark.sweep
def test_what_is_written_and_when(tmp_path: Path) -> None:
    found = said("kernels_written_on_tpus", str(tmp_path))
    assert len(found) == 18
    for name, (predicted, held) in found.items():
        assert abs(predicted / held - 1) <= 0.05, (name, predicted, held)
