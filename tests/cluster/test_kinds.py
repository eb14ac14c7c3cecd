"""Several kinds of devices at once: against all assignments, and against runs that were worked out by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples
from vnode.cluster import Costs, Job, Speeds, read, simulate
from vnode.cluster.jobs import balanced
from vnode.cluster.policies.heterogeneous import heterogeneous
from vnode.cluster.simulator import table_of
from vnode.errors import ClusterError

DEVICES = {"a": 1, "b": 2, "c": 4}


def job(name: str, speeds: tuple[float, float, float], work: float = 100.0, **more) -> Job:
    """A job that takes all devices of a kind, or of several."""
    alone = {k: Speeds((0.0,) * n + (s,)) for (k, n), s in zip(DEVICES.items(), speeds, strict=True)}
    return Job(id=name, arrival=more.pop("arrival", 0.0), work=work, speeds=alone, demand=4, **more)


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(
        st.tuples(st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, 5.0])] * 3), st.integers(10, 1000)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_shares_are_the_best_of_all(asked, mixes) -> None:
    """Of all ways to give three kinds to jobs."""
    jobs = [
        job(str(i), tuple(s or 1.0 if k == 0 else s for k, s in enumerate(speeds)), work)
        for i, (speeds, work) in enumerate(asked)
    ]
    table = table_of(jobs, Costs(), DEVICES)
    found = heterogeneous(mixes)(0.0, table, DEVICES)
    assert (found.sum(0) <= list(DEVICES.values())).all()
    full = [max(each.speed_on(DEVICES), *(each.speed_on({k: n}) for k, n in DEVICES.items())) for each in jobs]

    def value(shares: np.ndarray) -> float:
        total = 0.0
        for each, counts, best in zip(jobs, shares, full, strict=True):
            if mixes or (counts > 0).sum() < 2:
                total += (
                    each.speed_on(dict(zip(DEVICES, counts.tolist(), strict=True))) / best / (each.work / best) ** 0.5
                )
        return total

    every = []
    for owners in itertools.product(range(-1, len(jobs)), repeat=3):
        shares = np.zeros((len(jobs), 3), int)
        for kind, owner in enumerate(owners):
            if owner >= 0:
                shares[owner, kind] = list(DEVICES.values())[kind]
        every.append(value(shares))
    assert value(found) == pytest.approx(max(every))


def test_many_devices_are_given_one_by_one() -> None:
    """Eight devices of either kind, to jobs that are faster on one of them: each has those, and the rest is shared."""
    kinds = {"a": 8, "b": 8}
    jobs = []
    for name, ratio in (("1", 4.0), ("2", 0.25)):
        speeds = {"a": Speeds.linear(8 / ratio, 8), "b": Speeds.linear(8 * ratio, 8)}
        jobs.append(Job(id=name, arrival=0, work=100, speeds=speeds, demand=8))
    shares = heterogeneous()(0.0, table_of(jobs, Costs(), kinds), kinds)
    assert shares.tolist() == [[8, 0], [0, 8]]


def test_a_job_moves_between_kinds_and_mixes_them() -> None:
    """The first has all kinds, 10 units a second, until the second comes, which is much shorter, and takes the fastest.

    By then it has done 50; for 4 s it goes on at 5 units a second, then has all of them again.
    """
    first = job("first", (2.0, 3.0, 5.0), 200.0)
    second = job("second", (0.0, 0.0, 5.0), 20.0, arrival=5.0)
    found = {each.id: each.jct for each in simulate([first, second], DEVICES, "heterogeneous").of_jobs()}
    assert found == {"second": pytest.approx(4.0), "first": pytest.approx(5 + 4 + (200 - 50 - 20) / 10)}
    measured = job("first", (2.0, 3.0, 5.0), 200.0, together={(("a", 1), ("b", 2), ("c", 4)): 8.0})
    assert simulate([measured], DEVICES, "heterogeneous").makespan == pytest.approx(25)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0]), min_size=1, max_size=3), st.integers(1, 12))
def test_nodes_are_balanced_as_well_as_can_be(speeds, nodes) -> None:
    """Of all ways to share the nodes, the one whose slowest kind is soonest done."""
    times = [
        max((count / speed if speed else np.inf) if count else 0.0 for count, speed in zip(shares, speeds, strict=True))
        for shares in itertools.product(range(nodes + 1), repeat=len(speeds))
        if sum(shares) == nodes
    ]
    best = min(times)
    assert balanced(speeds, nodes) == pytest.approx(nodes / best if np.isfinite(best) else 0.0)


def test_published_traces_on_kinds_are_read(tmp_path: Path) -> None:
    speeds = {"m": {"16xK80": 10, "8xP100": 20, "4xV100": 30, "8xP100+4xV100": 45}}
    jobs = [{"job": 0, "arrival": 0, "kind": "m", "samples": 900}]
    path = tmp_path / "mixed.json"
    path.write_text(
        json.dumps(
            {"gpus": {"K80": 16, "P100": 8, "V100": 4}, "samples_per_s": speeds, "traces": {"4": {"jobs": jobs}}}
        )
    )
    trace = read(path)
    assert trace.devices == {"K80": 16, "P100": 8, "V100": 4}
    assert simulate(trace.jobs, trace.devices, "heterogeneous").makespan == 20  # as the best pair
    assert simulate(trace.jobs, {"P100": 8, "V100": 4}, "heterogeneous").makespan == 20
    with pytest.raises(ClusterError, match=r"no trace of '5' jobs per hour; it has 4"):
        read(path, "5")
    with pytest.raises(
        ClusterError, match=r"(?s)'heterogeneous' is for several kinds of device, not for one.*use one of fifo"
    ):
        simulate(trace.jobs, {"V100": 4}, "heterogeneous")
    with pytest.raises(ClusterError, match="job '0' has no speed on T4, H100, only on K80, P100, V100"):
        simulate(trace.jobs, {"T4": 4, "H100": 1}, "heterogeneous")
