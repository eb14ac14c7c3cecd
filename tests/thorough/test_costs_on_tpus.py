"""The stored calibration beside the TPU compiler, for machines that are not there.

Run in a process of its own, because the compiler loads a large library.
"""

import pytest

from tests.ahead import said

pytestmark = pytest.mark.tpu


@pytest.mark.sweep
def test_the_stored_calibration_is_what_the_compiler_says() -> None:
    """Otherwise `python -m vnode.partition.calibrate v5e` is due; and estimates are within a factor of two or so."""
    stored, found = said("calibration_on_tpus")
    for name in ("products", "passes", "launch"):
        assert found[name] == pytest.approx(stored[name], rel=0.1), name
    assert found["memory"] == pytest.approx(stored["memory"], rel=0.1)
    assert found["time"] == pytest.approx(stored["time"], rel=0.1)
    assert 0.6 < stored["memory"][0] <= stored["memory"][2] < 1.6
    assert 0.4 < stored["time"][0] <= stored["time"][2] < 2.0
