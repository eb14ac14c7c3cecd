"""A step in several processes has the bits that it has in one.

Knows the harness (`tests.processes`) and its cases. The reference is the same case in this process, on its eight
devices; that this is the plain step's result, other tests compare.
"""

import os

import numpy as np
import pytest

import vnode
from tests import process_cases, processes

ALL = bool(os.environ.get("VNODE_TEST_ALL"))
everything = pytest.mark.skipif(not ALL, reason="part of make test-all")


@pytest.mark.parametrize(
    ("case", "count", "devices", "options"),
    [
        ("fewer_devices", 2, 1, {"size": 32}),
        ("given_rows", 3, 1, {"size": 30}),
        pytest.param("whole_batches", 2, 1, {"size": 32}, marks=everything),
        pytest.param("whole_batches", 2, 2, {"size": 32}, marks=everything),
        pytest.param("whole_batches", 3, 1, {"size": 30}, marks=everything),
        pytest.param("whole_batches", 4, 1, {"size": 30}, marks=everything),
        pytest.param("given_rows", 2, 1, {"size": 9, "counts": [3, 5]}, marks=everything),
        pytest.param("given_rows", 4, 1, {"size": 9}, marks=everything),  # the last has no example of its own
        pytest.param("given_rows", 3, 1, {"size": 8, "counts": [8, 0, 0]}, marks=everything),
        pytest.param("explained", 2, 1, {"size": 32}, marks=everything),
    ],
)
def test_bits_of_one_process(case, count, devices, options, tmp_path):
    found = processes.run(case, tmp_path, processes=count, devices=devices, **options)
    one = getattr(process_cases, case)(**{name: value for name, value in options.items() if name != "counts"})
    if case == "given_rows":
        given = [row for result in found for row in result.pop("rows")]
        assert sorted({*given}) == list(range(options["size"]))
        del one["rows"]
    if case == "fewer_devices":
        for result in found:
            error = result.pop("error")
            assert "have different ones" in error
            assert "['params']['a']: float32[6,5]" in error
    if case == "explained":
        for result in found:
            assert f"{count} with {vnode.Placement(8).virtual_nodes // count} nodes each" in result.pop("text")
        del one["text"]
    assert found == [one] * count


@everything
def test_different_batches_are_refused(tmp_path):
    for error in processes.run("different_batches", tmp_path, processes=2):
        assert "2 processes were to put the same arrays" in error
        assert "float32[16,3]" in error  # y differs, x does not
        assert "float32[16,6]" not in error
        assert "vnode.data.local_batch" in error


def test_a_late_process_says_what_it_waits_for(tmp_path):
    with pytest.raises(RuntimeError, match="process 0 ended with status 1; it waited for 2 processes to meet"):
        processes.run("whole_batches", tmp_path, processes=1, deadline=8, missing=1, size=8)


def test_rows_that_are_not_asked_for_are_refused():
    placement = vnode.Placement(4)
    with pytest.raises(vnode.BatchError, match=r"must give 6 of the batch's 6 rows\.\n  \['x'\]: shape \(5, 2\)"):
        vnode.data.local_batch({"x": np.ones((5, 2))}, 6, placement)
