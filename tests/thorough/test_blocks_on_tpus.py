"""Loops over blocks beside the TPU compiler: what a block takes, by its own estimates.

Run in a process of its own, because the compiler loads a large library.
"""

import pytest

from tests.ahead import said

pytestmark = pytest.mark.tpu


def test_a_block_takes_what_the_compiler_says() -> None:
    """A kernel for each of five products: slices, activations, sums and what is put in place are within."""
    found = said("blocks_on_tpus")
    assert found["kernels"] == 5
    assert 0.5 * found["compiled"] < found["predicted"] < 2 * found["compiled"]
