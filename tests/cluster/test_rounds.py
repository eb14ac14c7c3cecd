"""Rounds on kinds of devices, against runs that were worked out by hand; Gavel's files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vnode import cli
from vnode.cluster import Job, Speeds, read, simulate
from vnode.cluster.gavel_rounds import simulate_rounds
from vnode.errors import ClusterError

KINDS = ["fast", "slow"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two jobs on one device of either kind; the first is faster on one of them, the second on none."""
    lines = (
        ["A", "cmd", "dir", "-n", "1", "4000", "1", "1", "-1", "0"],
        ["B", "cmd", "dir", "-n", "1", "500", "1", "1", "-1", "100"],
    )
    trace, throughputs = tmp_path / "a.trace", tmp_path / "t.json"
    trace.write_text("".join("\t".join(line) + "\n" for line in lines))
    known = {"fast": {"('A', 1)": {"null": 10.0}, "('B', 1)": {"null": 1.0}}, "slow": {"('A', 1)": {"null": 2.0}}}
    known["slow"]["('B', 1)"] = {"null": 1.0}
    throughputs.write_text(json.dumps(known))
    return trace, throughputs


def test_rounds_that_were_worked_out_by_hand(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The first job has the fast device for a round of 360 s, does 3600 steps, and 400 more in 40 s of the next.

    The second arrives at 100 s, waits for the end of the round, and has the slow device: 360 steps until 720 s, 140
    until 860 s. The second round lasts until its micro-task is over.
    """
    arguments = ["--trace", str(files[0]), "--throughputs", str(files[1]), "--devices", "fast=1,slow=1"]
    assert cli.main(["cluster", "simulate", *arguments, "--policy", "gavel_max_min_aware", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["gavel_max_min_aware"]
    assert [job["jct"] for job in found["jobs"]] == [400, 760]
    assert [job["queueing"] for job in found["jobs"]] == [0, 260]
    assert found["makespan"] == 860
    assert found["utilisation_allocated"] == pytest.approx((720 + 500) / (2 * 860))
    assert found["utilisation_effective"] == pytest.approx((400 + 500) / (2 * 860))


def test_a_job_is_never_placed_where_it_has_no_throughput(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    known = json.loads(files[1].read_text())
    known["fast"]["('B', 1)"]["null"] = 0.0
    files[1].write_text(json.dumps(known))
    with caplog.at_level(logging.WARNING, "vnode"):
        trace = read(files[0], throughputs=files[1], kinds=KINDS)
    assert "B on 1 x fast" in caplog.text and "never placed there" in caplog.text
    only = lambda jobs: np.tile([1.0, 0.0], (len(jobs), 1))  # noqa: E731  # whatever a policy says
    found = simulate_rounds(trace.jobs, {"fast": 1, "slow": 1}, only)
    assert [job.jct for job in found.of_jobs()] == [400, 760]


def test_jobs_take_turns_by_their_shares() -> None:
    """Three equal jobs on one device for 30 rounds of 10 s: each has had ten, and never two more than another."""
    jobs = [Job(id=str(i), arrival=0, work=100, demand=1, speeds={"": Speeds((0.0, 1.0))}) for i in range(3)]
    found = simulate(jobs, 1, "gavel_max_min", round_seconds=10.0)
    ends = sorted(job.jct for job in found.of_jobs())
    assert ends == [280, 290, 300]
    turns = [event.job for event in found.events if event.kind == "runs" and event.devices]
    for number in range(1, 30):
        counts = np.bincount(turns[:number], minlength=3)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines, known: lines.append("A\tcmd\n"), "line 3: 2 columns; Gavel's traces have 10 or 7"),
        (
            lambda lines, known: lines.append(lines[0].replace("4000", "many")),
            "line 3: the number of steps is 'many', not a number",
        ),
        (
            lambda lines, known: lines.append(lines[0].replace("A", "C", 1)),
            "line 3: 'C' on 1 devices has no throughput",
        ),
        (
            lambda lines, known: known["slow"].update({"('A', 1)": {"null": -1}}),
            r"slow, \('A', 1\): a throughput is -1.0, less than 0",
        ),
        (lambda lines, known: known.pop("slow"), "has no throughputs of 'slow'; it has fast"),
    ],
)
def test_malformed_files_of_gavel_name_the_place(change: Any, message: str, files: tuple[Path, Path]) -> None:
    lines, known = files[0].read_text().splitlines(keepends=True), json.loads(files[1].read_text())
    change(lines, known)
    files[0].write_text("".join(lines))
    files[1].write_text(json.dumps(known))
    with pytest.raises(ClusterError, match=message):
        read(files[0], throughputs=files[1], kinds=KINDS)


def test_what_is_missing_for_kinds_is_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"(?s)looks like a trace of Gavel's; it needs throughputs.*--throughputs FILE"
    ):
        read(files[0])
    jobs = read(files[0], throughputs=files[1], kinds=KINDS).jobs
    with pytest.raises(
        ClusterError,
        match=r"(?s)for one kind of device, not for fast, slow.*heterogeneous, gavel_fifo, gavel_fifo_aware",
    ):
        simulate(jobs, {"fast": 1, "slow": 1}, "goodput")
    big = [Job(id="a", arrival=0, work=1, demand=2, speeds={"fast": Speeds((0.0, 1.0, 2.0))})]
    with pytest.raises(ClusterError, match=r"(?s)job 'a' can run nowhere: it takes 2 devices.*fast: 1 devices"):
        simulate(big, {"fast": 1, "slow": 4}, "gavel_max_min_aware")
    for seconds, message in [(0.0, "a round takes 0 s"), (0.5, "job '1' makes no step in a round of 0.5 s on fast")]:
        with pytest.raises(ClusterError, match=message):  # it would never end
            simulate(jobs, {"fast": 1, "slow": 1}, "gavel_max_min", round_seconds=seconds)
    older = tmp_path / "older.trace"  # seven columns
    older.write_text("A\tcmd\t-n\t1\t4000\t7.5\t1\n")
    (job,) = read(older, throughputs=files[1], kinds=KINDS).jobs
    assert (job.arrival, job.work, job.demand, job.priority) == (7.5, 4000, 1, 1)
