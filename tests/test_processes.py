"""A step in several processes has the bits that it has in one.

Knows the harness (`tests.processes`) and its cases. The reference is the same case in this process, on its eight
devices; that this is the plain step's result, other tests compare.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from etils import epath

import vnode
from benchmarks import tpu
from tests import process_cases, processes
from vnode.elastic.lock import FolderLock

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]

everything = pytest.mark.sweep


@pytest.mark.parametrize(
    ("case", "count", "devices", "options"),
    [
        ("fewer_devices", 2, 1, {"size": 32}),
        ("given_rows", 3, 1, {"size": 30}),
        pytest.param("whole_batches", 2, 1, {"size": 32}, marks=everything),
        pytest.param("whole_batches", 2, 1, {"size": 30, "model": "cnn"}, marks=everything),
        pytest.param("whole_batches", 3, 1, {"size": 30, "model": "cnn"}, marks=everything),
        pytest.param("whole_batches", 4, 1, {"size": 30, "model": "cnn"}, marks=everything),
        pytest.param("whole_batches", 2, 1, {"size": 30, "model": "transformer"}, marks=everything),
        pytest.param("whole_batches", 3, 1, {"size": 30, "model": "transformer"}, marks=everything),
        pytest.param("whole_batches", 4, 1, {"size": 30, "model": "transformer"}, marks=everything),
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
            assert "['params']['in']: float32[36,5]" in error
    if case == "explained":
        for result in found:
            assert f"{count} with {vnode.Placement(8).virtual_nodes // count} nodes each" in result.pop("text")
        del one["text"]
    assert found == [one] * count


@everything
def test_different_batches_are_refused(tmp_path):
    for error in processes.run("different_batches", tmp_path, processes=2):
        assert "2 processes were to put the same arrays" in error
        assert "['y']: float32[16,3]" in error
        assert "['x']" not in error
        assert "vnode.data.local_batch" in error


@everything
def test_a_run_stopped_in_one_process_goes_on_in_any_number_of_them(tmp_path):
    """With other counts of nodes on the way; 30 examples on 8 nodes."""
    bits = process_cases.trained(str(tmp_path / "one"), 30, 14)["bits"]
    stopped = processes.run(
        "trained", tmp_path / "2", processes=2, checkpoint=str(tmp_path / "a"), size=30, steps=14, stop_at=5
    )
    assert [result["why"] for result in stopped] == ["signal in another process", "signal SIGTERM"]
    assert len({result["step"] for result in stopped}) == 1
    assert 5 < stopped[0]["step"] < 14
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    wanted = {"bits": bits, "step": 14, "resumed": stopped[0]["step"], "why": ""}
    assert process_cases.trained(str(tmp_path / "b"), 30, 14) == wanted
    more = processes.run("trained", tmp_path / "3", processes=3, checkpoint=str(tmp_path / "a"), size=30, steps=14)
    assert more == [wanted] * 3


@everything
def test_a_run_goes_back_to_its_copies_on_the_devices_that_are_left(tmp_path):
    bits = process_cases.trained(str(tmp_path / "one"), 30, 6)["bits"]
    found = processes.run("trained", tmp_path, processes=2, devices=2, checkpoint=str(tmp_path / "a"), size=30, steps=6)
    assert [result["bits"] for result in found] == [bits] * 2


@everything
def test_one_process_that_cannot_have_the_folder_ends_all(tmp_path):
    lock = FolderLock(epath.Path(tmp_path))
    try:
        first, second = processes.run("refused", tmp_path / "out", processes=2, checkpoint=str(tmp_path), size=8)
    finally:
        lock.release()
    assert "another run is writing checkpoints" in first
    assert "another process cannot write checkpoints" in second


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_the_pod_script_compiles_for_sixteen_devices():
    """The step as it is on one host, by the real TPU compiler."""
    command = [sys.executable, str(ROOT / "examples" / "cloud_tpu" / "train.py"), "--compile-for", "v5e:4x4"]
    command += ["--layers", "1", "--width", "64", "--batch", "64"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **tpu.ENVIRONMENT}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"v5e:4x4: 16 devices, \d+\.\d MiB on each\n", done.stdout)


@everything
def test_the_pod_script_trains():
    command = [sys.executable, str(ROOT / "examples" / "cloud_tpu" / "train.py"), "--steps=2", "--batch=6"]
    command += ["--virtual-nodes=4", "--layers=1", "--width=16"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 2
    assert all(abs(loss - np.log(256)) < 1 for loss in losses)  # it has learned nothing yet


@everything
def test_a_late_process_says_what_it_waits_for(tmp_path):
    with pytest.raises(RuntimeError, match="process 0 ended with status 1; it waited for 2 processes to meet"):
        processes.run("whole_batches", tmp_path, processes=1, deadline=20, missing=1, size=8)


def test_rows_that_are_not_asked_for_are_refused():
    placement = vnode.Placement(4)
    with pytest.raises(vnode.BatchError, match=r"must give 6 of the batch's 6 rows\.\n  \['x'\]: shape \(5, 2\)"):
        vnode.data.local_batch({"x": np.ones((5, 2))}, 6, placement)
