"""Jobs of real workers: the state in the end is that of the same script in one process, whatever happens to workers.

Knows `vnode.workers.launch`, signals, and scripts in `tests.programs`. Must not know what workers tell one another.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import jobs
from tests.programs.chaos_of_workers import ENVIRONMENT, MODELS, SCRIPT, play, reference, saved
from vnode.errors import WorkerError
from vnode.workers.job_registry import find
from vnode.workers.launch import Job, launch

pytestmark = pytest.mark.quickly

DEADLINE = 300.0
until = functools.partial(jobs.until, seconds=DEADLINE)


@pytest.fixture(autouse=True)
def _own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of tests are not those of the user."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def started(asked: dict[str, Any], workers: int, **options: Any) -> Job:
    return launch(str(SCRIPT), workers, arguments=[json.dumps(asked)], env=ENVIRONMENT, **options)


def test_workers_that_come_and_go_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    """Grown from two workers to three, rank 0 sent SIGTERM, the next killed, then shrunk to one: the same state.

    The one that has a SIGTERM leaves without a loss, and with exit code 0.
    """
    slow, out = tmp_path / "slow", tmp_path / "out"
    slow.touch()
    out.mkdir()
    asked = {"model": "plain", "steps": 300, "slow": str(slow), "out": str(out)}
    expected = reference(asked, tmp_path)
    job = started(asked, 2)
    until(job, lambda: job.step, "the first step")
    job.resize(3)
    until(job, lambda: len(job.workers) == 3, "three workers")
    os.kill(job.workers[0]["pid"], signal.SIGTERM)
    until(job, lambda: any(each["event"] == "exited" for each in job.events), "worker 0 has ended")
    (gone,) = [(each["worker"], each["why"]) for each in job.events if each["event"] == "exited"]
    assert gone == (0, "ended with exit code 0")
    planned = [each["step"] for each in job.events if each["event"] in ("go", "lost", "left")]
    assert planned == [-1, None, None]  # no step was made again
    until(job, lambda: len(job.workers) > 1, "two workers")
    os.kill(job.workers[0]["pid"], signal.SIGKILL)
    until(job, lambda: any(each["event"] == "left" for each in job.events), "the others leave")
    job.resize(1)
    until(job, lambda: len(job.workers) == 1, "one worker")
    slow.unlink()
    assert job.wait(DEADLINE) == 0
    (left,) = [json.loads(path.read_text()) for path in out.glob("*.json")]
    assert (left["step"], left["hash"]) == (300, expected["hash"])
    assert left["losses"] == expected["losses"]  # those before it joined, too
    told = [each["event"] for each in job.events]
    assert told.count("lost") == 1 and told.count("trains") >= 4 and told[-1] == "ended"
    wanted = [each["why"] for each in job.events if each["event"] == "resize"]
    assert wanted == ["2 -> 3 workers asked for", "3 -> 1 workers asked for"]


@pytest.mark.thorough
def test_workers_that_rejoin_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    """They leave a generation, and let go of its client of JAX, before they make the next."""
    slow = tmp_path / "slow"
    slow.touch()
    asked = {"model": "plain", "steps": 200, "slow": str(slow), "out": str(tmp_path)}
    expected = reference(asked, tmp_path)
    job = started(asked, 2, rejoin=True)
    until(job, lambda: job.step, "the first step")
    job.resize(3)
    until(job, lambda: len(job.workers) == 3, "three workers")
    os.kill(job.workers[0]["pid"], signal.SIGKILL)
    until(job, lambda: any(each["event"] == "left" for each in job.events), "the others leave")
    job.resize(2)
    until(job, lambda: len(job.workers) == 2, "two workers")
    slow.unlink()
    assert job.wait(DEADLINE) == 0
    left = [json.loads(path.read_text()) for path in tmp_path.glob("[0-9].json")]
    assert [(each["step"], each["hash"]) for each in left] == [(200, expected["hash"])] * 2
    assert [each["clients"] for each in left] == [[2, 1]] * 2  # a loss leaves its generation's: its threads may wait


@pytest.mark.thorough
def test_workers_that_are_replaced_at_each_change_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    """Each is in one world of JAX, that of `jax.distributed`; a checkpoint goes from one set of workers to the next.

    Grown from two workers to three, one killed, one sent SIGTERM, then shrunk to one.
    """
    slow, out = tmp_path / "slow", tmp_path / "out"
    slow.touch()
    out.mkdir()
    asked = {"model": "sharded", "steps": 300, "slow": str(slow), "out": str(out), "folder": str(tmp_path / "saved")}
    expected = reference(asked, tmp_path)
    job = started(asked, 2, restart=True)

    def trains(times: int, workers: int) -> None:
        until(job, lambda: sum(each["event"] == "trains" for each in job.events) == times, f"to train, {times}")
        assert len(job.workers) == workers

    trains(1, 2)
    job.resize(3)
    trains(2, 3)
    os.kill(job.workers[0]["pid"], signal.SIGKILL)
    trains(3, 3)
    os.kill(job.workers[1]["pid"], signal.SIGTERM)
    trains(4, 3)
    job.resize(1)
    trains(5, 1)
    slow.unlink()
    assert job.wait(DEADLINE) == 0
    (left,) = [json.loads(path.read_text()) for path in out.glob("[0-9].json")]
    assert (left["step"], left["hash"], left["used"]) == (300, expected["hash"], expected["used"])
    losses = dict(expected["losses"])
    assert all(losses[number] == loss for number, loss in left["losses"])
    told = [each["event"] for each in job.events]
    assert told.count("lost") == told.count("leaving") == 1 and told[-1] == "ended"
    assert saved("sharded", asked["folder"]) == expected["saved"]


@pytest.mark.thorough
def test_an_error_in_all_workers_ends_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The job fails with the first error; who was a step behind may be given a new peer before it fails, too."""
    job = started({"model": "plain", "steps": 50, "raises": 7}, 2)
    with pytest.raises(WorkerError, match="step 7 is odd") as caught:
        job.wait(DEADLINE)
    assert caught.value.code == job.process.returncode == 1
    assert 2 <= sum(each["event"] == "start" for each in job.events) <= 3
    assert "ValueError: step 7 is odd" in capfd.readouterr().err


@pytest.mark.thorough
def test_a_job_whose_workers_are_all_told_to_leave_saves_and_ends(tmp_path: Path) -> None:
    """As on a host that goes down. The same job goes on from there."""
    slow, folder = tmp_path / "slow", tmp_path / "checkpoints"
    slow.touch()
    asked = {"model": "plain", "folder": str(folder), "slow": str(slow), "out": str(tmp_path), "steps": 60}
    expected = reference(asked, tmp_path)
    job = started(asked, 2)
    until(job, lambda: job.step, "the first step")
    for worker in job.workers:
        os.kill(worker["pid"], signal.SIGTERM)
    assert job.wait(DEADLINE) == 0
    assert [each["why"] for each in job.events if each["event"] == "stop"] == ["all workers leave: SIGTERM"]
    assert not any(each["event"] in ("lost", "left") for each in job.events)
    assert job.step is not None and 0 < job.step < 60 and (folder / str(job.step)).exists()
    slow.unlink()
    job = started(asked, 1)
    assert job.wait(DEADLINE) == 0
    assert json.loads((tmp_path / "0.json").read_text())["hash"] == expected["hash"]


@pytest.mark.thorough
def test_a_spare_takes_over_from_all_that_leave(tmp_path: Path) -> None:
    """No worker of the old generation is in the new one; no step is made again."""
    slow = tmp_path / "slow"
    slow.touch()
    asked = {"model": "plain", "slow": str(slow), "out": str(tmp_path), "steps": 1000}
    expected = reference(asked, tmp_path)
    job = started(asked, 1, spares=1)
    until(job, lambda: job.step and job.status()["spares"], "the first step, and a spare")
    (first,) = job.workers
    os.kill(first["pid"], signal.SIGTERM)
    until(job, lambda: [each["worker"] for each in job.workers] not in ([], [first["worker"]]), "the spare trains")
    slow.unlink()
    assert job.wait(DEADLINE) == 0
    assert [each["step"] for each in job.events if each["event"] in ("go", "lost", "left")] == [-1, None]
    assert json.loads((tmp_path / f"{1 - first['worker']}.json").read_text())["hash"] == expected["hash"]


@pytest.mark.thorough
def test_the_loss_of_a_part_of_the_state_that_nobody_else_has_ends_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which is said beforehand, with what to do."""
    slow = tmp_path / "slow"
    slow.touch()
    job = started({"model": "sharded", "steps": 10**6, "slow": str(slow)}, 2)
    until(job, lambda: (job.step or 0) > 2, "some steps")
    os.kill(job.workers[1]["pid"], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"no remaining worker holds all of state\['slots'\].*one is lost") as caught:
        job.wait(DEADLINE)
    assert caught.value.code == 1
    said = capfd.readouterr().err
    assert said.count("has no checkpoint: the loss of a worker ends the job.") == 1
    assert "vnode run --checkpoint FOLDER" in said


@pytest.mark.thorough
def test_a_script_that_is_edited_while_a_job_runs_is_for_the_next_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The worker that would run it is refused, told of, and not started again; the others go on."""
    script, slow = tmp_path / "train.py", tmp_path / "slow"
    slow.touch()
    script.write_text(SCRIPT.read_text())
    asked = {"model": "plain", "steps": 10**6, "slow": str(slow)}
    job = launch(script, 2, arguments=[json.dumps(asked)], env=ENVIRONMENT)
    until(job, lambda: job.step, "the first step")
    script.write_text(SCRIPT.read_text().replace("adamw(1e-2)", "adamw(2e-2)"))
    os.kill(job.workers[1]["pid"], signal.SIGKILL)
    until(job, lambda: any(each["event"] == "exited" for each in job.events), "the new worker has ended")
    there = job.step or 0
    until(job, lambda: (job.step or 0) > there + 20, "the other one goes on")
    assert [each["worker"] for each in job.events if each["event"] == "start"] == [0, 1, 1]
    (why,) = [each["why"] for each in job.events if each["event"] == "refused"]
    assert re.match(r"Worker 1 differs from (worker 0|the one before it) in script\.\n", why)  # who arrived first
    assert "What to do:\n  - have all" in why
    job.stop()
    assert job.wait(DEADLINE) == 0


IN_CI = ("axis",)
"""Models that the thorough run has; more than a minute each."""


@pytest.mark.parametrize(
    ("seed", "model"),
    [
        pytest.param(5 + i, model, marks=pytest.mark.thorough if model in IN_CI else pytest.mark.sweep)
        for i, model in enumerate(MODELS)
    ],
)
def test_chaos(seed: int, model: str) -> None:
    """Random kills, stops, full disks and resizes, and the supervisor's death: the bits of one process."""
    play(seed, 5, model)


@pytest.mark.thorough
def test_a_job_that_resumed_outlives_its_rank_0_and_its_first_checkpoint(tmp_path: Path) -> None:
    """Another worker saves from then on; the checkpoint from which the job went on is removed meanwhile."""
    slow, folder = tmp_path / "slow", tmp_path / "checkpoints"
    asked = {"model": "plain", "folder": str(folder), "every": 5, "slow": str(slow), "out": str(tmp_path)}
    expected = reference({**asked, "steps": 60}, tmp_path)
    assert started({**asked, "steps": 13}, 2).wait(DEADLINE) == 0
    slow.touch()
    job = started({**asked, "steps": 60}, 2)
    until(job, lambda: (job.step or 0) > 35, "three later checkpoints")
    assert find(str(folder)).folder == job.folder  # the script names it, and no option of the job
    os.kill(job.workers[0]["pid"], signal.SIGKILL)
    assert job.wait(DEADLINE) == 0
    assert json.loads((tmp_path / "1.json").read_text())["hash"] == expected["hash"]
    assert not (folder / "13").exists() and saved("plain", str(folder)) == expected["saved"]


@pytest.mark.thorough
def test_a_job_of_which_all_workers_are_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """New workers begin with the newest; without a folder the job would be lost."""
    slow, folder = tmp_path / "slow", tmp_path / "checkpoints"
    slow.touch()
    asked = {"model": "plain", "folder": str(folder), "every": 5, "slow": str(slow), "out": str(tmp_path), "steps": 60}
    expected = reference(asked, tmp_path)
    job = started(asked, 2)
    until(job, lambda: (job.step or 0) > 20, "some checkpoints")
    for worker in job.workers:
        os.kill(worker["pid"], signal.SIGKILL)
    assert job.wait(DEADLINE) == 0
    assert json.loads((tmp_path / "0.json").read_text())["hash"] == expected["hash"]
    begun = [each["step"] for each in job.events if each["event"] == "trains"]
    assert len(begun) == 2 and begun[1] >= 15
    assert saved("plain", str(folder)) == expected["saved"]


@pytest.mark.thorough
def test_an_error_in_one_worker_is_a_loss(tmp_path: Path) -> None:
    """The others go on, and the run comes to its end."""
    asked = {"model": "plain", "steps": 120, "raises": 40, "raiser": "1", "out": str(tmp_path)}
    expected = reference(asked, tmp_path)
    job = started(asked, 2)
    assert job.wait(DEADLINE) == 0
    assert json.loads((tmp_path / "0.json").read_text())["hash"] == expected["hash"]
    (error,) = {each["why"] for each in job.events if each["event"] == "error"}
    assert "step 40 is odd" in error
