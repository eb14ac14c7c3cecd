"""Plans accepted ahead of time, by the real TPU compiler, for machines that are not there.

Knows how a plan is accepted on devices of a topology; in a process of its own because the compiler loads a
large library.
"""

from __future__ import annotations

import pytest

from tests.ahead import said

pytestmark = pytest.mark.tpu

WEIGHTS = 4 * 4096 * 16384 // 4
"""Bytes of one device's part of one weight."""


@pytest.mark.parametrize("reduction", ["fast", "invariant"])
def test_megatrons_split_is_accepted_for_a_tpu(reduction: str) -> None:
    """Gradients over two rows, once; in each of four turns the activations of 512 examples over four devices."""
    found = said("plan_accepted_on_tpus", reduction)
    assert found["accepted"] and abs(found["error"]) <= 0.1, found["said"]
    activations = 4 * (4 * 512 * 4096)
    if reduction == "fast":
        assert found["found"]["all-reduce"] == pytest.approx(activations + 2 * WEIGHTS, rel=1e-3)
    else:  # of both sums that four nodes leave in a tree of two and four branches, half to each row; and back
        assert found["found"]["all-reduce"] == pytest.approx(activations, rel=1e-3)
        assert found["found"]["all-to-all"] == pytest.approx(4 * WEIGHTS, rel=1e-3)
        assert found["found"]["all-gather"] == pytest.approx(2 * WEIGHTS, rel=1e-3)


def test_what_passes_read_is_gathered_when_they_run() -> None:
    """Batch norms make many passes of a step. Forward and backward, where the first weight is not read, weights are
    gathered in bfloat16 for each pass that reads them; the compiler does so for one in float32. A device has a quarter
    of the state, and a quarter of the gradients, which is all there is in the end; with them, of the last layer, what
    nodes have summed of the gradient and what is exchanged of it, all of each, and what a quarter of that is added to.
    With what is sent of the gradients while others are computed there would be a weight more.
    """
    found, weight = said("gathers_on_tpus"), 4 * 8192 * 8192
    assert found["gathered"] == pytest.approx((5 + 4 + 1) * weight / 2, rel=0.02), found["said"]
    examples = 4 * 2048 * 8192 // 4
    least = 5 * weight / 4 + examples + 5 * weight / 4 + 2 * weight
    assert found["memory"] <= least + weight / 4 + examples
