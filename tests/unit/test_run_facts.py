"""A run's facts, names and folders: what small parts of a run say, without a run.

Knows `vnode.elastic`'s identity of a run, names of metrics, evaluations and readers. Must not know the driver.
"""

import os
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from vnode.elastic.evaluation import batches_in
from vnode.elastic.metrics import by_name
from vnode.elastic.reader import located
from vnode.elastic.run_identity import compare, identity
from vnode.errors import BatchError, CheckpointError, VnodeError


def step_with(rate: float) -> Any:
    return vnode.virtualize(lambda w, b: (w - rate * b.mean(), {}), virtual_nodes=2)


@pytest.mark.parametrize("described", [True, False])
def test_a_run_that_resumes_at_a_smaller_batch(described: bool) -> None:
    """The step is compared for the batch of which the checkpoint tells: it is the same one, or another."""
    data = vnode.data.Batches(np.arange(10, dtype=np.float32), 4, last="keep")
    given = data if described else data.batch
    before = identity(step_with(0.1), given, jnp.float32(1), data.batch(0)).facts
    small = data.batch(2)
    assert len(small) == 2

    def warnings(rate: float) -> list[str]:
        return compare(before, identity(step_with(rate), given, jnp.float32(1), small), "it")

    other_batches = (
        []
        if described
        else ["it may have been made with other batches: arrays (4,) in its first batch, (2,) in this run's"]
    )
    assert warnings(0.1) == other_batches
    *rest, last = warnings(0.2)
    assert rest == other_batches
    assert "another computation" in last and "mul(0.2" in last and "reduce_sum" not in last


def test_metrics_whose_names_are_equal() -> None:
    """Each of them has a name of its own, and others keep theirs."""
    named = by_name({"a": {"b": 1, "c": 4}, "a/b": 2, "loss": 3}, "evaluate/")
    assert named == {"evaluate/['a']['b']": 1, "evaluate/a/c": 4, "evaluate/['a/b']": 2, "evaluate/loss": 3}
    assert sorted(by_name({"a": {"b": 1}, "a/b": 2, "['a/b']": 3}).values()) == [1, 2, 3]


def test_batches_of_something_with_a_length() -> None:
    """Their number is its length, though it is no `Sequence`; data without an end, and data sets, have none."""

    class ByNumber:
        def __init__(self, length: int) -> None:
            self.length = length

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, number: int) -> Any:
            return np.ones(2)

    assert batches_in(ByNumber(5)) == 5
    for endless in (sys.maxsize, 2**63):
        with pytest.raises(VnodeError, match=r"batches=\.\.\."):
            batches_in(ByNumber(endless))
    with pytest.raises(VnodeError, match="has no batch"):
        batches_in(ByNumber(0))
    with pytest.raises(BatchError, match="count twice"):
        batches_in(vnode.data.Batches(np.ones(5), 2))


def test_a_relative_folder_without_a_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CheckpointError, match=r"cannot use runs: it is a path from the current folder.* deleted"):
        located("runs")
    assert os.fspath(located(tmp_path / "runs")) == str(tmp_path / "runs")
