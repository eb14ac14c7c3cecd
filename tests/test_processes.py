"""A step in several processes has the bits that it has in one.

Knows the harness (`tests.processes`) and its cases. The reference is the same case in this process, on its eight
devices; that this is the plain step's result, other tests compare.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

import vnode
from benchmarks import tpu
from tests import process_cases, processes
from vnode.elastic.lock import FolderLock
from vnode.placement.lifeline import STOPPED, why_silent
from vnode.placement.process_barrier import VARIABLE, absence_error, timeout
from vnode.plan.nodes import node_search
from vnode.plan.nodes.device_memory import program_memory
from vnode.stopped import Resident

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]

everything = pytest.mark.sweep


SAME = [("whole_batches", {"size": 30, "model": model}) for model in process_cases.MODELS]
"""What must have the same bits in any number of processes; 8 nodes do not divide 30 examples."""

ALL = os.environ.get("VNODE_TEST_ALL") == "1"

MORE = {
    2: [
        ("fewer_devices", {"size": 30}),
        ("batch_on_other_devices", {"size": 30}),
        ("explained", {"size": 32}),
        ("given_rows", {"size": 9, "counts": [3, 5]}),
        ("large", {"size": 32}),
    ],
    3: [("given_rows", {"size": 30}), ("given_rows", {"size": 9})],  # of 9 examples the last has none
    4: [("given_rows", {"size": 9})],
}


@functools.cache
def in_one_process(case: str, options: str) -> Any:
    """What a case gives in this process, on all of its devices."""
    return getattr(process_cases, case)(**json.loads(options))


def compare(cases: list, found: list[list]) -> None:
    """Whether several processes have the bits of one.

    Args:
      cases: what they did.
      found: what each of them gave.
    """
    count = len(found)
    for number, (case, options) in enumerate(cases):
        here = {name: value for name, value in options.items() if name != "counts"}
        one, given = in_one_process(case, json.dumps(here)), [results[number] for results in found]
        if case == "given_rows":
            rows = [row for result in given for row in result.pop("rows")]
            assert sorted({*rows}) == list(range(options["size"]))
        if case == "fewer_devices":
            for result in given:
                error = result.pop("error")
                assert "have different ones" in error
                assert "['params']['in']: float32[36,5]" in error
        if case == "explained":
            for result in given:
                assert f"{count} with {8 // count} nodes each" in result.pop("text")
        if isinstance(one, dict):
            one = {name: value for name, value in one.items() if name not in ("rows", "text")}
        assert given == [json.loads(json.dumps(one))] * count, (case, options)


@pytest.mark.parametrize("count", [2, *(pytest.param(n, marks=everything) for n in (3, 4))])
def test_bits_of_one_process(count, tmp_path):
    """Each model in every number of processes, or in one of them."""
    cases = [*(SAME if ALL else SAME[count - 2 :][:1]), *MORE[count]]
    compare(cases, processes.run_all(cases, tmp_path, processes=count))


@everything
def test_bits_of_one_process_with_two_devices_in_each(tmp_path):
    cases = [*SAME, ("whole_batches", {"size": 32}), ("given_rows", {"size": 30})]
    compare(cases, processes.run_all(cases, tmp_path, processes=2, devices=2))


@everything
def test_other_steps_and_states(tmp_path):
    cases = [(case, {"size": 30}) for case in ("objects", "jitted", "sharded", "evaluated")]
    compare(cases, processes.run_all(cases, tmp_path, processes=2, deadline=300.0))


@everything
def test_processes_without_nodes(tmp_path):
    cases = [("given_rows", {"size": 8, "counts": [8, 0, 0]})]
    compare(cases, processes.run_all(cases, tmp_path, processes=3))


def test_processes_agree_or_say_why_not(tmp_path):
    """Never a decision that differs between processes, and nobody who is waited for without end."""
    memory = 110 * 1024
    cases = [
        ("different_batches", {}),
        ("other_trees", {}),
        ("chosen_nodes", {"size": 64, "memory": memory}),
        ("unknown_memory", {"size": 16}),
        ("plans", {"folder": str(tmp_path)}),
        ("slow_process", {"seconds": 7, "patience": 60}),
        ("slow_process", {"seconds": 10, "patience": 1}),
        ("stuck_run", {"seconds": 4, "patience": 2}),  # the last: they have lost one another
    ]
    found = processes.run_all(cases, tmp_path, processes=2, deadline=300.0)
    different, trees, nodes, unknown, plans, patient, _, _ = found[0]
    asked_for = [results[4].pop("errors") for results in found]
    for i in (0, 2, 3, 4, 5):
        assert found[0][i] == found[1][i]

    assert "2 processes must put the same arrays" in different
    assert "['y']: float32[16,3]" in different
    assert "['x']" not in different
    assert "vnode.data.local_batch" in different

    assert all("each puts others" in error for error in trees)
    assert "numbers of arrays, by process: 2, 1" in trees[0]
    assert "on Placement(8 nodes on 2 x cpu: [3, 5])" in trees[1]

    step = process_cases.step_of().__wrapped__
    with unittest.mock.patch.object(node_search, "program_memory", lambda compiled: 4 * program_memory(compiled)):
        alone = vnode.virtualize(step, virtual_nodes="auto", memory=memory).on(jax.devices()[:2])
        result, _ = alone(process_cases.state(), alone.put(process_cases.examples(64)))
    assert nodes == {
        "nodes": alone.placement.virtual_nodes,
        "limit": memory,
        "bits": process_cases.bits(result),
    }
    assert alone.placement.virtual_nodes > 2

    assert "those of process 0 report none" in unknown
    assert "memory='16GiB'" in unknown

    for rank, (check, profile) in enumerate(asked_for):
        was = f"runs in one process, and was to use devices of process {1 - rank} in process {rank}"
        assert f"vnode.check {was}" in check
        assert f"vnode.profile {was}" in profile
    assert plans["ok"] and sum(plans["counts"]) == 8 and plans["fits"] == {"cpu:2": 2}
    assert "on 1 or 16 instead of 2" in plans["explain"]

    assert patient == process_cases.slow_process(0, 60)
    first, second = (results[-2] for results in found)
    assert re.match(r"process 0 waited \d s for process 1.\n  process 0 came to run 'step' for the first time", first)
    assert "VNODE_PROCESS_TIMEOUT=4" in first
    assert re.match(r"process 0 has failed: ProcessError: process 0 waited \d s for process 1", second)

    assert re.match(r"process 0 waited \d+ s for step \d, which the processes compute together", found[0][-1])
    assert "process 1 was seen last when it came to" in found[0][-1]


@pytest.mark.quickly
def test_processes_that_differ_are_refused(tmp_path):
    """Nothing is trained; what a process may have for itself is its own; copies of the state are compared."""
    first, second = processes.run_all([("differing", {}), ("corrupted", {"at": 9})], tmp_path, processes=2)
    assert first == second
    errors, corrupted = first
    facts = {
        "seed": "data.seed: 1 in process 1, 0 in process 0",
        "batch size": "data.batch_size: 4 in process 1, 8 in process 0",
        "values": r'examples: "\w+" in process 1, "\w+" in process 0',
        "option": 'options.keep_every: "None" in process 1, 4 in process 0',
        "state": r"state, process 1 \(now\) and process 0 \(then\):\n +now: +\['more'\]: .*shape=\(2,\)",
        "nodes": "step.virtual_nodes: 4 in process 1, 8 in process 0",
        "version": r'versions.jax: "0.0" in process 1, "[\d.]+" in process 0',
        "program": r"now:  mul\(0.5, float32\[36, 3\]\).*\n +then: mul\(0.25, float32\[36, 3\]\)",
        "program of a step alone": r"now:  mul\(0.5, float32\[36, 3\]\).*\n +then: mul\(0.25, float32\[36, 3\]\)",
    }
    begun = errors.pop("program begun")
    assert re.search(r"programs begun together: \d+ in process 1, \d+ in process 0", begun)
    assert "start all processes again" in begun
    assert errors.pop("nothing") == "ended after 8 steps"
    assert facts.keys() == errors.keys()
    for name, fact in facts.items():
        assert re.search("process 1 does not do what the others do", errors[name]), name
        assert re.search(fact, errors[name]), errors[name]
    assert "the state of process 1 differs from the others' after 12 steps" in corrupted


@pytest.mark.quickly
@pytest.mark.parametrize("at", ["data", pytest.param("callback", marks=everything)])
def test_all_learn_of_an_error(at, tmp_path):
    """With default timeouts, which are half an hour; where no program is left over they go on with the next run."""
    cases = [("folders", {"folder": str(tmp_path)}), ("failures", {"folder": str(tmp_path), "at": at})]
    (folders, first), (others, second) = processes.run_all(cases, tmp_path, processes=2)
    print({name: round(seconds, 2) for name, (_, seconds) in first.items()})
    assert "process 0 came to trace 'refuses'" in first["trace"][0]
    assert "process 0 came to compile 'refuses'" in first["compile"][0]
    for name in ("trace", "compile", "save", at):
        assert first[name][1] < process_cases.LONG / 3
        raised = "CheckpointError: could not write a checkpoint" if name == "save" else "ValueError: no luck with the"
        assert raised in second[name][0]
        assert re.match(f"ProcessError: process 1 has failed: {raised}", first[name][0]), first[name]

    assert "CheckpointError: could not write a checkpoint" in first["commit"][0]
    assert "process 0 has failed: CheckpointError: could not write" in second["commit"][0]
    assert max(first["commit"][1], second["commit"][1]) < process_cases.LONG / 3

    assert folders["other program"] == others["other program"]
    assert "process 1 does not do what the others do: program" in folders["other program"]
    assert re.search(r"(now|then): +mul\(0.5, float32\[\]\)|now: +mul\(.*0.5", folders["other program"])
    assert "the processes came to restore checkpoint 4; nothing was run" in folders["other program"]
    assert folders["other folder"] == others["other folder"]
    assert "not shared: process 1 cannot see what process 0 writes" in folders["other folder"]
    assert f"process 1: {tmp_path}/of-1 on " in folders["other folder"]
    assert "checkpoint 4, which process 0 has chosen, is not there in process 1" in others["older listing"]
    assert "process 1 came to look at checkpoint 4, and failed" in folders["older listing"]
    assert "checkpoint 4, which process 0 has chosen" in others["restored from an older listing"]
    assert folders["restored"] == others["restored"]
    assert folders["first"] == others["first"] == "ended after 4 steps"
    assert folders["again"] == others["again"] == "ended after 6 steps"


@pytest.mark.quickly
def test_examples_of_another_form_in_one_process(tmp_path):
    """They are an error before their step, and no process waits for a collective that the other will not join."""
    (first,), (second,) = processes.run_all([("other_forms", {})], tmp_path, processes=2)
    assert "BatchError: examples of different structures do not make up a batch" in second
    assert "process 1 has failed: BatchError: examples of different structures" in first


@pytest.mark.quickly
@pytest.mark.parametrize("at", ["compile", "save", pytest.param("restore", marks=everything)])
def test_a_process_that_is_killed_is_named(at, tmp_path):
    if at == "restore":
        process_cases.killed("compile", str(tmp_path / "a"))  # it lives, and is process 0 of one
    with pytest.raises(RuntimeError) as ended:
        processes.run("killed", tmp_path / "out", processes=2, at=at, checkpoint=str(tmp_path / "a"))
    story = str(ended.value)
    assert "process 1 ended with status -9" in story
    assert "process 0 ended with status 1" in story
    assert "ProcessError: process 1 has ended: without a word" in story
    assert "make room" not in story


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_process_that_is_stopped_is_told_from_one_that_says_nothing():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        there = Resident(Resident.this_process().host, other.pid)
        try:
            assert not why_silent(STOPPED + 1, there)
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
            assert "it is stopped" in why_silent(STOPPED + 1, there)
            assert not why_silent(STOPPED - 1, there)
            assert not why_silent(STOPPED + 1, Resident("another host", other.pid))
        finally:
            other.kill()


@pytest.mark.quickly
def test_the_process_with_the_service_ends_last(tmp_path):
    """Of the harness: without that, the others end by SIGABRT where they are a little slower than it."""
    with pytest.raises(RuntimeError) as ended:
        processes.run("failing", tmp_path, processes=2, seconds=1)
    for rank in (0, 1):
        assert f"process {rank} ended with status 1" in str(ended.value)
        assert f"RuntimeError: process {rank} has failed" in str(ended.value)


def test_a_run_that_lost_a_process_goes_on_in_any_number_of_them(tmp_path):
    """One of three is killed, then one of two is stopped; with other counts of nodes on the way. 30 examples."""
    bits = process_cases.trained(str(tmp_path / "one"), 30, 20)["bits"]
    folder = str(tmp_path / "a")
    with pytest.raises(RuntimeError) as ended:
        processes.run(
            "trained",
            tmp_path / "3",
            processes=3,
            checkpoint=folder,
            size=30,
            steps=20,
            kill_at=8,
        )
    story = str(ended.value)
    assert "process 2 ended with status -9" in story
    for rank in (0, 1):
        assert f"process {rank} ended with status 1" in story
    assert story.count("ProcessError: process 2 has ended: without a word") == 2
    assert story.count("The last checkpoint stands") == 2

    stopped = processes.run("trained", tmp_path / "2", processes=2, checkpoint=folder, size=30, steps=20, stop_at=9)
    assert [result["why"] for result in stopped] == ["signal in another process", "signal SIGTERM"]
    assert [result["resumed"] for result in stopped] in ([4, 4], [8, 8])  # the second was being written
    assert len({result["step"] for result in stopped}) == 1
    assert 9 < stopped[0]["step"] < 20
    wanted = {"bits": bits, "step": 20, "resumed": stopped[0]["step"], "why": ""}
    assert process_cases.trained(folder, 30, 20) == wanted


@everything
def test_a_run_is_resumed_by_more_processes(tmp_path):
    bits = process_cases.trained(str(tmp_path / "one"), 30, 14)["bits"]
    shutil.copytree(tmp_path / "one", tmp_path / "a", ignore=shutil.ignore_patterns("14", "12"))
    more = processes.run("trained", tmp_path / "3", processes=3, checkpoint=str(tmp_path / "a"), size=30, steps=14)
    assert more == [{"bits": bits, "step": 14, "resumed": 8, "why": ""}] * 3


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
    assert "process 0 came to open the folder of checkpoints, and failed: another run is writing" in second


@pytest.mark.tpu
def test_the_pod_script_compiles_for_sixteen_devices():
    """The step as it is on one host, by the real TPU compiler."""
    command = [sys.executable, str(ROOT / "examples" / "cloud_tpu" / "train.py"), "--compile-for", "v5e:4x4"]
    command += ["--layers", "1", "--width", "64", "--batch", "64"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **tpu.ENVIRONMENT}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"v5e:4x4: 16 x TPU v5 lite: V = \d+, .*the step's own 64 fit\n.* MiB  chosen\n", done.stdout, re.DOTALL
    )


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


def test_a_batch_in_shares_is_put_on_other_devices():
    batches = vnode.data.Batches(np.arange(10.0).reshape(5, 2), 5, shuffle=False)
    step = vnode.virtualize(lambda w, x: w - x.mean(), virtual_nodes=4)
    loaded, few = batches.load(0, step.placement), step.on(jax.devices()[:2])
    put = few.put(loaded)
    assert put.devices() == {*jax.devices()[:2]}
    assert put.tolist() == np.arange(10.0).reshape(5, 2).tolist()
    assert step.put(loaded) is loaded


@pytest.mark.parametrize(
    "waited, found, said",
    [
        (9, {1: ("here", ""), 2: ("there", "to save")}, ["waited 9 s for process 0.", "process 0 was not seen"]),
        (9, {0: ("there", "to save"), 1: ("here", ""), 2: ("here", "")}, ["seen last when it came to save"]),
        (9, {0: ("here", ""), 1: ("here", ""), 2: ("here", "")}, ["process 1 came too late", "the service's words"]),
        (0, {}, ["process 1 came too late", "the service's words"]),
        (
            9,
            {},
            ["waited 9 s for others, and process 0", "is gone", "the service's words", "see what the others wrote"],
        ),
    ],
)
def test_who_did_not_come(waited, found, said):
    """Nobody is blamed when it cannot be known who it was."""
    error = str(
        absence_error(
            "to test",
            "here",
            1,
            [0, 1] if 0 not in found else [0, 1, 2],
            waited,
            found,
            RuntimeError("the service's words"),
        )
    )
    assert all(words in error for words in said), error


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_time_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(vnode.VnodeError, match="VNODE_PROCESS_TIMEOUT must be a number of seconds above 0"):
        timeout()
