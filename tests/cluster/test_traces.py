"""Files of traces: Pollux's, profiles and plans that a trace names, and files that are damaged in any way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.budget import examples
from vnode.cluster import Speeds, Trace, read, simulate
from vnode.errors import ClusterError
from vnode.plan.balance.profiles import Measurement, Profile, Profiles

PLACEMENTS = """placement,local_bsz,step_time,sync_time
1,8,1.0,0.1
1,16,1.8,0.1
2,8,1.2,0.3
2,16,2.0,0.3
11,8,9.0,8.0
44,2,0.6,0.2
44,8,1.5,0.5
"""
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n6,24,1,0.4,0.2\n6,24,4,0.7,0.2\n8,24,4,9,8\n"
WORKLOAD = "name,time,application,num_replicas,batch_size,steps\na-0,53,a,8,32,100\na-1,60,a,2,96,5\n"


def write_pollux(folder: Path, workload: str = WORKLOAD, **others: str) -> Path:
    """A workload of one application, with the times that were measured of it."""
    files = {"placements": PLACEMENTS, "scalability": SCALABILITY, **others}
    for name, text in files.items():
        (folder / f"a-{name}.csv").write_text(text)
    (folder / "workload.csv").write_text(workload)
    return folder / "workload.csv"


def test_pollux_times_are_those_of_the_batch_size_on_as_few_nodes_as_hold_the_devices(tmp_path: Path) -> None:
    """Worked out by hand: 32 examples are two passes of 16 on one device, one of 16 on two, one of 4 on eight."""
    trace = read(write_pollux(tmp_path))
    first, second = trace.jobs
    assert (first.id, first.arrival, first.work, first.demand, trace.devices) == ("a-0", 53, 100, 8, 64)
    times = [1 / speed for speed in first.by_kind[""].per_second[1:]]
    assert times[:2] == pytest.approx([1.8 + 1.7, 2.0])
    assert times[7] == pytest.approx(0.6 + (1.5 - 0.6) * 2 / 6)  # 4 examples, between 2 and 8
    assert times[3] == pytest.approx(times[7] + (times[1] - times[7]) * (1 / 4 - 1 / 8) / (1 / 2 - 1 / 8))
    assert times[23] == pytest.approx(0.5) and len(times) == 24  # 2 examples, between 1 and 4
    # 96 examples: six passes of 16; three of 16; on eight devices, two of 6, of which one waits for the exchange
    times = [1 / speed for speed in second.by_kind[""].per_second[1:]]
    whole, exchange = 0.6 + 0.9 * 4 / 6, 0.2 + 0.3 * 4 / 6
    assert [times[0], times[1], times[7]] == pytest.approx([1.8 + 5 * 1.7, 2.0 + 2 * 1.7, whole + (whole - exchange)])


@pytest.mark.parametrize(
    ("changed", "old", "new", "message"),
    [
        ("workload", "53", "soon", r"workload.csv, line 2: time is 'soon', not a number"),
        ("workload", "a-1,60,a", "a-1,60,b", r"b-placements.csv cannot be read"),
        ("workload", "a-1", "a-0", r"workload.csv: jobs 0 and 1, counted from 0, are both called 'a-0'"),
        ("workload", "8,32", "80,32", r"line 2: num_replicas is 80; with .* of 32, a was measured on at most 24"),
        ("workload", "8,32", "8,4", r"line 2: num_replicas is 8; with a batch_size of 4, a was measured on none"),
        ("workload", "batch_size,", "batch_sizes,", r"line 1: the column 'batch_size' is missing"),
        ("workload", "32,100", "32", r"line 2: 5 fields under 6 columns"),
        ("workload", ",a,", ",../a,", r"line 2: application is '../a', which names no files"),
        ("placements", "1.8,0.1", "1.8,nan", r"a-placements.csv, line 3: sync_time is 'nan', not a number"),
        ("placements", "1.8,0.1", "1.8,2.1", r"a-placements.csv, line 3: .*sync_time a part of it"),
        ("placements", "1,16", "1,8", r"placements.csv, line 3: 8 examples on each of 1 devices were measured"),
        ("placements", "11,8", "1x,8", r"a-placements.csv, line 6: placement is '1x', not a digit for each node"),
        ("scalability", "6,24,1,", "6,24,1.5,", r"a-scalability.csv, line 2: local_bsz is 1.5, not a whole number"),
        ("scalability", SCALABILITY, "", r"a-scalability.csv is empty"),
    ],
)  # fmt: skip
def test_damaged_tables_of_pollux_name_the_place(
    changed: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    texts = {"workload": WORKLOAD, "placements": PLACEMENTS, "scalability": SCALABILITY}
    assert old in texts[changed]
    texts[changed] = texts[changed].replace(old, new, 1)
    with pytest.raises(ClusterError, match=message):
        read(write_pollux(tmp_path, **texts))


def test_steps_are_the_published_ones_or_those_of_a_column(tmp_path: Path) -> None:
    lines = "name,time,application,num_replicas,batch_size\r\n\r\nx,0,bert,1,384\r\n"
    for name, text in (
        ("placements", "placement,local_bsz,step_time,sync_time\n1,12,0.9,0\n"),
        ("scalability", SCALABILITY),
    ):
        (tmp_path / f"bert-{name}.csv").write_text(text)
    (tmp_path / "w.csv").write_bytes(b"\xef\xbb\xbf" + lines.encode())  # as spreadsheets write it
    (job,) = read(tmp_path / "w.csv").jobs
    assert job.work / job.by_kind[""].at(1) == pytest.approx(480 * 32 * 0.9)
    (tmp_path / "w.csv").write_text(lines.replace("384", "385"))
    with pytest.raises(ClusterError, match=r"line 3: the number of steps of 'bert' at batch_size 385 is unknown"):
        read(tmp_path / "w.csv")


def test_a_job_may_name_a_profile_or_plans(tmp_path: Path) -> None:
    """A step of 8 nodes takes 0.1 s for each on the fullest device, 0.1 s more, and 0.1 s for each further device."""
    measured = Measurement(1, 2, 0.3), Measurement(1, 4, 0.5), Measurement(2, 4, 0.6)
    profiles = Profiles((Profile("V100", 8, measured),), lane=2)
    profiles.save(tmp_path / "times.json")
    by_profile = Speeds.from_profile(profiles, 8)
    assert [round(1 / speed, 6) for speed in by_profile.per_second[1:]] == [0.9, 0.6, 0.7, 0.6]  # lanes of two nodes
    jobs: list[dict[str, Any]] = [{"id": "a", "arrival": 0, "steps": 10, "profile": "times.json", "virtual_nodes": 8}]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"devices": 4, "jobs": jobs}))
    assert read(path).jobs[0].speeds == by_profile
    for change, message in [
        ({"virtual_nodes": 7}, r"jobs\[0\]: .*times.json: 7 virtual nodes do not divide into lanes of 2"),
        ({"kind": "T4"}, r"no device of kind 'T4' was measured: V100"),
        ({"profile": "none.json"}, "none.json' cannot be read"),
        ({"step_seconds": {"1": 2}}, "step_seconds and profile both give its speed"),
        ({"counts": [1]}, "counts belongs to step_seconds, not to profile"),
    ]:
        path.write_text(json.dumps({"jobs": [{**jobs[0], **change}]}))
        with pytest.raises(ClusterError, match=message):
            read(path)
    with pytest.raises(ValueError, match="several kinds were measured; name one: V100, T4"):
        Speeds.from_profile(Profiles((Profile("V100", 1, measured), Profile("T4", 1, measured))), 8)


def test_the_best_plan_that_there_is_room_for_is_used() -> None:
    assert Speeds.from_plans({2: 0.5, 4: 0.25, 5: 0.4}).per_second == (0, 0, 2, 2, 4, 4)
    for plans, message in [({}, "needed on 1 device"), ({0: 1.0}, "needed on 1"), ({2: math.nan}, "2 devices is nan")]:
        with pytest.raises(ValueError, match=message):
            Speeds.from_plans(plans)


def own(folder: Path) -> Path:
    jobs = [
        {"id": "a", "arrival": 0, "steps": 10, "step_seconds": {"1": 4, "4": 1.5}, "counts": [1, 4], "priority": 5},
        {"id": "b", "arrival": 1e1, "steps": 5, "step_seconds": {"2": 1}, "demand": 2, "virtual_nodes": 4, "start": 2},
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps({"devices": 4, "costs": {"start": 1, "settles": True}, "jobs": jobs}, indent=1))
    return path


def virtualflow(folder: Path) -> Path:
    job = {"job": 0, "arrival": 0, "demand": 4, "priority": 1, "static": {"run_s": 660}}
    job["wfs"] = {"first": 4, "resized": [[60, 4], [100.5, 2]], "run_s": 885.5}
    path = folder / "vf.json"
    path.write_text(json.dumps({"gpus": 4, "runs": [{"run": "a", "jobs": [job]}]}))
    return path


def mixed(folder: Path) -> Path:
    speeds = {"m": {"16xK80": 10, "8xP100+4xV100": 45}}
    traces = {"4": {"jobs": [{"job": 0, "arrival": 0, "kind": "m", "samples": 900}], "gavel_avg_jct": 5}}
    path = folder / "mixed.json"
    path.write_text(json.dumps({"gpus": {"K80": 16, "P100": 8, "V100": 4}, "samples_per_s": speeds, "traces": traces}))
    return path


def gavel(folder: Path) -> Path:
    path = folder / "g.trace"
    path.write_text("A\tcmd\tdir\t-n\t1\t4000\t1\t1\t-1\t0\r\nA\tcmd\t-n\t1\t4000\t7.5\t1\n")
    (folder / "t.json").write_text(json.dumps({"v": {"('A', 1)": {"null": 2.0}}, "k": {"('A', 1)": {"null": 0.0}}}))
    return path


FORMATS = {each.__name__: each for each in (own, virtualflow, mixed, gavel, write_pollux)}
PIECES = [
    "",
    "0",
    "-1",
    "1e999",
    "NaN",
    "null",
    "true",
    "[]",
    "{}",
    '"',
    ",",
    "\t",
    "\n",
    "\x00",
    "\ufeff",
    "9" * 5000,
    "[" * 20000,
]


def damaged(data: st.DataObject, text: str) -> str:
    """A text of which a part is replaced: cut off, a piece that numbers and files have, or a part of itself."""
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.sampled_from([start, start + 1, start + 3, len(text)]))
    other = data.draw(st.integers(0, len(text)))
    return text[:start] + data.draw(st.sampled_from([*PIECES, text[other : other + 9]])) + text[end:]


@settings(max_examples=examples(600), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from([*FORMATS]))
def test_a_damaged_file_is_read_or_refused_by_name(data: st.DataObject, name: str, tmp_path: Path) -> None:
    """Whatever stands in a file: jobs that can be simulated, or an error that names one of the files."""
    path = FORMATS[name](tmp_path)
    options: Any = {"throughputs": tmp_path / "t.json", "kinds": ["v", "k"]} if name == "gavel" else {}
    beside = {"gavel": ["t.json"], "write_pollux": ["a-placements.csv", "a-scalability.csv"]}.get(name, [])
    chosen = tmp_path / data.draw(st.sampled_from([path.name, *beside]))
    chosen.write_bytes(damaged(data, chosen.read_bytes().decode()).encode())
    try:
        trace = read(path, **options)
    except ClusterError as error:
        assert str(tmp_path) in str(error)
        return
    assert isinstance(trace, Trace) and trace.jobs
    for job in trace.jobs:
        assert 0 <= job.arrival < math.inf and 0 < job.work < math.inf and 0 < job.priority < math.inf
        assert all(math.isfinite(speed) for speeds in job.by_kind.values() for speed in speeds.per_second)
    if isinstance(trace.devices, int):
        simulate(trace.jobs, max(job.demand for job in trace.jobs), "static", costs=trace.costs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no JSON"),
        ('{"jobs": [', "line 1: no JSON"),
        ("[" * 100_000, "no JSON: .*recursion"),
        ('{"jobs": [{"id": 1' + "0" * 5000 + "}]}", "no JSON: .*digits"),
        ('{"jobs": []}', "has no jobs"),
        ('{"jobs": {}}', r"jobs is \{\}, not an array"),
        ('{"jobs": [], "jobs": []}', "the field 'jobs' occurs twice"),
        ('{"jobs": [3]}', r"jobs\[0\]: a job is 3, not an object with fields"),
        ('{"device": 8, "jobs": []}', "unknown field 'device'; known are costs, devices, jobs"),
        ('{"devices": 0, "jobs": []}', "devices is 0; there must be at least 1"),
        ('{"costs": {"start": "x"}, "jobs": []}', "costs: start is 'x', not a number"),
        ('{"costs": {"stop": 3}, "jobs": []}', "costs: unknown field 'stop'"),
        ('{"jobs": [{"id": null}]}', r"jobs\[0\]: id is None, not a text or a number"),
    ],
)
def test_files_that_hold_no_jobs(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(text)
    with pytest.raises(ClusterError, match=message) as caught:
        read(tmp_path / "jobs.json")
    assert "jobs.json" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arrival", math.nan, "arrival is nan, not a number"),
        ("steps", True, "steps is True, not a number"),
        ("priority", "5", "priority is '5', not a number"),
        ("minimum", [1], r"minimum is \[1\], not a number"),
        ("demand", 10**9, "demand is 1000000000; it must be from 1 to 100000"),
        ("virtual_nodes", 0, "virtual_nodes is 0; it must be at least 1"),
        ("counts", "14", "counts is '14', not an array"),
        ("counts", [8], "counts of devices are from 1 to 4"),
        ("step_seconds", {"1": "4"}, "step_seconds, 1 is '4', not a number"),
        ("step_seconds", {"1_0": 4}, "step_seconds: '1_0' is not a count of devices"),
        ("step_seconds", {"1": 4, "01": 3}, "step_seconds: '01' is not a count of devices, or it occurs twice"),
        ("step_seconds", {"999999999": 4}, "there is a time on 999999999 devices, and 100000 are the most"),
    ],
)
def test_fields_that_are_not_what_they_must_be(field: str, value: Any, message: str, tmp_path: Path) -> None:
    job = {"id": "a", "arrival": 0, "steps": 10, "step_seconds": {"1": 4, "4": 1.5}}
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": [{**job, field: value}]}))
    with pytest.raises(ClusterError, match=rf"jobs.json, jobs\[0\]: .*{message}"):
        read(tmp_path / "jobs.json")
