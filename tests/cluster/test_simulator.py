"""The simulator against small steps of time, and against a run that was worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples
from tests.cluster import cases
from vnode import cli
from vnode.cluster import Costs, Decision, Job, Speeds, policies, read, simulate
from vnode.errors import ClusterError

TICK = 0.25


@settings(max_examples=examples(30), deadline=None)
@given(cases.jobs(most=4), st.sampled_from(["fifo", "static_backfill", "goodput", "max_min", "wfs_any"]))
def test_ends_are_those_of_small_steps(jobs, name) -> None:
    """Where resizes take no time: but for a step of time with each event."""
    expected = cases.by_small_steps(jobs, 8, policies.POLICIES[name], TICK)
    found = [job.arrival + job.jct for job in simulate(jobs, 8, name).of_jobs()]
    assert np.abs(expected - found).max() <= TICK * (2 * len(jobs) + 2)


def record(
    job: int, arrival: float, demand: int, priority: int, run: float, first: int, resized: Any
) -> dict[str, Any]:
    return {
        "job": job,
        "arrival": arrival,
        "demand": demand,
        "priority": priority,
        "static": {"run_s": run},
        "fitted": {"seconds_at_demand": run - 60, "fixed_part_s": 0},
        "wfs": {"first": first, "resized": resized, "run_s": 885.5 if job == 0 else 360},
    }


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two jobs on four devices, twice and four times as fast on two and four; in VirtualFlow's format."""
    jobs = [record(0, 0, 4, 1, 660, 4, [[60, 4], [100.5, 2], [550.5, 4]]), record(1, 100, 2, 5, 360, 2, [[60, 2]])]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"gpus": 4, "runs": [{"run": "a", "jobs": jobs[:1]}, {"run": "b", "jobs": jobs}]}))
    return path


def test_a_run_that_was_worked_out_by_hand(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Starts of 60 s, growth 70 s, a shrink of 0.5 s, devices free after 10 s, decisions at whole seconds.

    The first job runs on 4 devices from 60 s to 100, has done 40/600, and shrinks to 2. The second has devices at
    110.5 s, runs from 170.5 s, and ends at 470.5 s. At 471 s the first grows: its devices are there at 480.5 s, it runs
    on them from 550.5 s, has done 40/600 + 450/1200 by then, and needs 335 s more.
    """
    assert (
        cli.main(["cluster", "simulate", "--trace", str(trace), "--policy", "wfs", "--policy", "static", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [job["jct"] for job in found["wfs"]["jobs"]] == pytest.approx([885.5, 370.5], abs=0.01)
    assert found["wfs"]["makespan"] == pytest.approx(885.5, abs=0.01) and found["wfs"]["resizes"] == 2
    assert [job["queueing"] for job in found["wfs"]["jobs"]] == [0, 10.5]
    held = 4 * 110.5 + 2 * 360 + 2 * 10 + 2 * (480.5 - 110.5) + 4 * (885.5 - 480.5)
    assert found["wfs"]["utilisation_allocated"] == pytest.approx(held / (4 * 885.5), abs=1e-3)
    runs = 4 * 40 + 2 * 450 + 4 * 335 + 2 * 300
    assert found["wfs"]["utilisation_effective"] == pytest.approx(runs / (4 * 885.5), abs=1e-3)
    assert [job["jct"] for job in found["static"]["jobs"]] == [660, 930]  # it waits for 570 s, of which 10 for devices
    assert cli.main(["cluster", "simulate", "--trace", str(trace), "--run", "a"]) == 0
    assert "goodput       660" in capsys.readouterr().out


def test_an_estimate_of_the_fixed_part_comes_from_the_log(trace: Path) -> None:
    """A job that ended later than on devices that are twice as fast when there are twice as many."""
    text = json.loads(trace.read_text())
    first = text["runs"][1]["jobs"][0]
    del first["fitted"]
    first["wfs"]["run_s"] = 785.5  # 40.5/600 + 450/t + 235/600 = 1
    trace.write_text(json.dumps(text))
    times = [1 / speed for speed in read(trace).jobs[0].by_kind[""].per_second[1:]]
    assert times[1] == pytest.approx(450 / (1 - 275.5 / 600), abs=0.1) and times[3] == pytest.approx(600)


def test_devices_are_given_when_they_are_free(tmp_path: Path) -> None:
    """A job that starts while another shrinks waits until its workers are gone; who starts again pays again."""
    path = tmp_path / "own.json"
    jobs = [
        {"id": "a", "arrival": 0, "steps": 100, "step_seconds": {"1": 4, "4": 1}},
        {"id": "b", "arrival": 50, "steps": 10, "step_seconds": {"4": 1}, "counts": [4], "minimum": 4},
    ]
    path.write_text(json.dumps({"devices": 4, "costs": {"start": 10, "shrink": 2, "release": 3}, "jobs": jobs}))
    trace = read(path)
    last = lambda now, jobs, devices: {jobs[len(jobs) - 1].id: 4}  # noqa: E731
    found = {job.id: job for job in simulate(trace.jobs, 4, last, costs=trace.costs).of_jobs()}
    assert found["b"].jct == 3 + 10 + 10  # stopped at once, free after 3 s, 10 to start, 10 steps
    assert found["a"].jct == 50 + 23 + 3 + 10 + 60  # 40 steps are done by 50 s

    def changes_its_mind(now: float, jobs: Any, devices: int) -> Decision:
        return Decision({"a": 1 if now < 30 else 4}, again=30 if now < 30 else None)

    (alone,) = simulate(trace.jobs[:1], 4, changes_its_mind, costs=Costs(growth=5, growth_stall=2)).of_jobs()
    assert alone.jct == pytest.approx(37 + (100 - 35 / 4)) and alone.resizes == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda jobs: jobs[0].pop("arrival"), r"jobs\[0\]: the field 'arrival' is missing"),
        (lambda jobs: jobs[1].update(steps="ten"), r"jobs\[1\]: steps is 'ten', not a number"),
        (lambda jobs: jobs[1].update(demand=4.5), r"jobs\[1\]: demand is 4.5, not a whole number"),
        (
            lambda jobs: jobs[1].update(demand=8, virtual_nodes=4),
            r"jobs\[1\]: job 'b': demand is 8; it must be at most",
        ),
        (lambda jobs: jobs[0].update(workers=3), r"jobs\[0\]: unknown field 'workers'; known are arrival, counts"),
        (lambda jobs: jobs[0].update(step_seconds={"0": 1}), r"jobs\[0\]: times are needed on 1 device or more"),
        (
            lambda jobs: jobs[0].update(priority=-1),
            r"jobs\[0\]: job 'a': priority is -1.0; it must be a number above 0",
        ),
    ],
)
def test_a_malformed_trace_names_file_place_and_field(change: Any, message: str, tmp_path: Path) -> None:
    jobs = [{"id": name, "arrival": 0, "steps": 10, "step_seconds": {"1": 1}} for name in "ab"]
    change(jobs)
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"jobs": jobs}))
    with pytest.raises(ClusterError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_or_run_is_said(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text('{"jobs": [\n 1,, ]}')
    for arguments, message in [
        ([str(tmp_path / "none.json")], "none.json cannot be read"),
        ([str(tmp_path / "broken.json")], "broken.json, line 2: no JSON"),
        ([str(trace), "--run", "c"], "has no run 'c'; it has a, b"),
        ([str(trace), "--policy", "best"], "there is no policy 'best'"),
        ([str(trace), "--policy", "guarantee", "--guarantee", "0.5"], "a factor of at least 1, not 0.5"),
    ]:
        assert cli.main(["cluster", "simulate", "--trace", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ClusterError, match="job 'a' needs 3 devices; there are 2"):
        simulate([Job(id="a", arrival=0, work=1, speeds=Speeds.linear(1, 4), demand=4, minimum=3)], 2, "fifo")


def test_a_report_shows_every_job_and_seed(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page that is well-formed, with a bar for each span for which a job holds devices."""
    out = tmp_path / "report"
    arguments = ["--trace", str(trace), "--policy", "wfs", "--policy", "static", "--seeds", "3", "--out", str(out)]
    assert cli.main(["cluster", "simulate", *arguments]) == 0
    said = capsys.readouterr()
    assert "wfs, 3 seeds: mean JCT" in said.out and str(out / "index.html") in said.err
    page = (out / "index.html").read_text()
    pictures = [
        ElementTree.fromstring(part.split("</svg>")[0].join(["<svg", "</svg>"])) for part in page.split("<svg")[1:]
    ]
    assert len(pictures) == 2 + 1 + 1 + 2  # devices by policy, completion times, seeds, who has devices by policy
    spans = [title.text for title in pictures[-2].iter("title")]
    assert spans == [
        "0: 4 of 4, 0 to 110 s",
        "0: 2 of 4, 110 to 480 s",
        "0: 4 of 4, 480 to 886 s",
        "1: 2 of 2, 110 to 480 s",
    ]
    assert [title.text for title in pictures[-1].iter("title")] == ["0: 4 of 4, 0 to 670 s", "1: 2 of 2, 670 to 1030 s"]
