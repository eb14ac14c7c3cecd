"""Jobs of real processes, whose workers only speak the protocol: supervisor, keeper, folders, the command line.

Knows `launch`, signals and the command line. Nothing here imports jax but the keeper's part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vnode.errors import WorkerError
from vnode.workers import job_registry
from vnode.workers.launch import Job, launch
from vnode.workers.on_ray import LEASH
from vnode.workers.supervisor_client import request

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "programs" / "fake_worker.py"
SECONDS = 60


@pytest.fixture(autouse=True)
def _folder_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@contextlib.contextmanager
def fake_job(workers: int = 3, *, options: dict[str, Any] | None = None, **more: Any) -> Iterator[Job]:
    """A job of fake workers, which is killed in the end."""
    job = launch(FAKE, workers, arguments=[json.dumps(options or {})], **more)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            with contextlib.suppress(WorkerError):
                job.kill()
        job.process.wait(SECONDS)
        job.process.stdin.close()


def until(condition: Callable[[], Any]) -> Any:
    """Waits for something."""
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.02)
    return found


def train(job: Job, workers: int) -> list[dict[str, Any]]:
    """Waits until so many train."""

    def there() -> Any:
        found = job.workers
        return found if len(found) == workers else None

    return until(there)


def whys(job: Job, event: str) -> str:
    return "\n".join(f"{e['worker']}: {e['why']}" for e in job.events if e["event"] == event)


def vnode(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vnode", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, **more)


def test_a_job_grows_shrinks_and_stops(tmp_path: Path) -> None:
    """And is found by its folder of checkpoints, in which a second one is refused."""
    with fake_job(2, checkpoint=tmp_path / "runs") as job:
        first = train(job, 2)
        assert [w["rank"] for w in first] == [0, 1]
        said = vnode("workers", str(tmp_path / "runs"), "3")
        assert said.returncode == 0, said.stderr
        assert [w["pid"] for w in train(job, 3)][:2] == [w["pid"] for w in first]
        (listed,) = json.loads(vnode("runs", "--json").stdout)
        assert set(listed) == {"folder", "pid", "step", "workers"}
        assert listed["folder"] == str(tmp_path / "runs") and listed["pid"] == job.pid and listed["step"] > 0
        assert [set(w) for w in listed["workers"]] == [{"rank", "pid", "nodes"}] * 3
        with pytest.raises(WorkerError, match=rf"already runs a job in .*\n  process {job.pid} on "):
            launch(FAKE, 1, checkpoint=tmp_path / "runs")
        with pytest.raises(WorkerError, match="9 workers cannot share 8 virtual nodes"):
            job.resize(9)
        job.resize(1)
        assert [w["pid"] for w in train(job, 1)] == [first[0]["pid"]]
        modes = [path.stat().st_mode & 0o777 for path in (job.folder, job.folder / "token")]
        assert modes == [0o700, 0o600]
        job.stop()
        assert job.wait(SECONDS) == 0 and job.workers == [] and job.step > 0
    assert "ended (0)" in vnode("runs").stdout and "resize: 2 -> 3 workers" in vnode("runs", "--events").stdout


def test_a_job_is_found_by_the_folder_that_its_script_names(tmp_path: Path) -> None:
    with fake_job(1, options={"checkpoint": str(tmp_path / "its")}) as job:
        train(job, 1)
        until(lambda: job.found().name == str(tmp_path / "its"))
        assert job_registry.find(tmp_path / "its").folder == job.folder


def test_workers_that_are_killed_or_stopped_are_replaced() -> None:
    with fake_job(3) as job:
        for rank, number in ((0, signal.SIGKILL), (2, signal.SIGSTOP), (1, signal.SIGTERM)):
            before = train(job, 3)
            lost = before[rank]["pid"]
            os.kill(lost, number)
            until(lambda lost=lost: lost not in [w["pid"] for w in job.workers])
        after = train(job, 3)
        assert not {w["pid"] for w in after} & {lost}
        steps = [e["step"] for e in job.events if e["event"] == "trains"]
        assert steps == sorted(steps)
        said = whys(job, "lost")
        assert "0: was killed by SIGKILL" in said and "is stopped" in said and "was killed by SIGTERM" in said


def test_a_joiner_that_never_arrives_or_differs_stops_nobody() -> None:
    odd = {"2": {"never": True}, "3": {"other": True}, "4": {"unprepared": True}}
    with fake_job(2, options={"odd": odd}, start_timeout=2, max_restarts=0) as job:
        first = train(job, 2)
        job.resize(5)
        until(lambda: "did not call vnode.elastic.run within 2 s" in whys(job, "lost"))
        until(lambda: "MemoryError" in whys(job, "lost"))
        assert [w["pid"] for w in job.workers] == [w["pid"] for w in first]
        refused = next(e["why"] for e in job.events if e["event"] == "refused")
        assert "differs from worker" in refused and "script: 'the same'" in refused and "'changed' in it" in refused


def test_one_that_does_not_leave_is_killed() -> None:
    with fake_job(3, options={"odd": {"1": {"deaf": True}}}, max_restarts=0) as job:
        os.kill(train(job, 3)[2]["pid"], signal.SIGKILL)
        train(job, 1)
        assert "1: did not leave generation 1" in whys(job, "lost")


def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """With a code of their own; then another one takes over the folder."""
    with fake_job(2, checkpoint=tmp_path) as job:
        pids = [w["pid"] for w in train(job, 2)]
        os.kill(job.pid, signal.SIGKILL)
        until(lambda: all(job_registry.started(pid) is None for pid in pids))
        assert "the supervisor is gone" in (job.folder / "worker-0.err").read_text()
        with pytest.raises(WorkerError, match="has ended with exit code -9"):
            job.wait()
    assert "killed" in vnode("runs").stdout
    with fake_job(1, options={"steps": 10}, checkpoint=tmp_path) as job:
        assert job.wait(SECONDS) == 0


def test_the_run_stops_when_whoever_launched_it_ends() -> None:
    with fake_job(2) as job:
        train(job, 2)
        job.process.stdin.close()
        assert job.process.wait(SECONDS) == 0
        assert "the process that launched it has ended" in whys(job, "stop")


@pytest.mark.parametrize(
    ("workers", "options", "more", "message"),
    [
        (2, {"odd": {"1": {"never": True}}}, {"start_timeout": 2}, r"Only 1 of 2 workers have called[^$]*worker 1"),
        (2, {"odd": {"0": {"quiet": True}}}, {}, "Worker 0 ended without a call of vnode.elastic.run"),
        (3, {"nodes": 2}, {}, "3 workers cannot share 2 virtual nodes"),
        (2, {"odd": {"1": {"other": True}}}, {}, "Worker . differs from worker . in script"),
        (2, {"odd": {"0": {"error": 20}, "1": {"error": 20}}}, {}, "All workers are lost[^$]*ValueError"),
    ],
)
def test_jobs_that_fail_say_why(workers: int, options: Any, more: Any, message: str) -> None:
    with fake_job(workers, options=options, **more) as job, pytest.raises(WorkerError, match=message) as error:
        job.wait(SECONDS)
    assert error.value.code == 1 and job_registry.load(job.folder).facts["code"] == 1


def test_what_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match=r"the script 'nothing\.py' is not there"):
        launch("nothing.py", 1)
    with pytest.raises(WorkerError, match="a lambda, or defined inside another function"):
        launch(lambda: None, 1)
    with pytest.raises(WorkerError, match="backend 'slurm' is not known"):
        launch(FAKE, 1, backend="slurm")
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(WorkerError, match=r"backend 'ray' needs Ray[^$]*pip install 'vnode\[ray\]'"):
            launch(FAKE, 1, backend="ray")
    with pytest.raises(WorkerError, match="backend 'processes' does not know resources"):
        launch(FAKE, 1, resources={"CPU": 1})
    with pytest.raises(WorkerError, match="cannot have 0 workers"):
        launch(FAKE, 0)
    with fake_job(1) as job:
        port = int(job_registry.load(job.folder).facts["address"].rpartition(":")[2])
        with pytest.raises(WorkerError, match=rf"cannot listen at 127.0.0.1:{port}"):
            launch(FAKE, 1, port=port)
    (tmp_path / "run" / "vnode").chmod(0o755)
    with pytest.raises(WorkerError, match="only this user can read"):
        launch(FAKE, 1)


def test_strangers_are_refused() -> None:
    """Without the token nothing is done; a worker that nobody waits for is told to end."""
    from vnode.workers.wire import Channel, WireError

    with fake_job(1) as job:
        train(job, 1)
        address = job.found().facts["address"]
        channel = Channel.connect(address)
        channel.send({"kind": "control", "token": "guessed"})
        with pytest.raises(WireError):
            channel.send({"kind": "kill"})
            channel.receive(10)
        channel.close()
        channel = Channel.connect(address)
        channel.send({"kind": "hello", "protocol": 1, "worker": 7, "pid": 1, "host": "", "token": job.found().token})
        assert channel.receive(10)["kind"] == "end"
        channel.close()
        assert len(request(job.found(), "status")["workers"]) == 1
        assert whys(job, "refused").count("\n") == 1


def test_the_command_passes_output_and_the_exit_code() -> None:
    """The output of rank 0 goes to stdout, errors of all to stderr; the arguments of the script come after `--`."""
    options = {"steps": 20, "odd": {"0": {"code": 3}}}
    said = vnode("run", str(FAKE), "--workers", "2", "--", json.dumps(options))
    assert said.returncode == 3 and said.stdout == "I am 0\n", said
    assert {"[worker 0] worker 0 complains", "[worker 1] worker 1 complains"} <= set(said.stderr.splitlines())
    assert "vnode: trains: generation 1: workers 0 1" in said.stderr or "workers 0 1" in said.stderr
    said = vnode("run", "nothing.py", "--workers", "2")
    assert said.returncode == 2 and "the script 'nothing.py' is not there" in said.stderr
    said = vnode("workers", "nowhere", "2")
    assert said.returncode == 1 and "no job is running in 'nowhere'" in said.stderr


def test_signals_of_the_command() -> None:
    """SIGUSR1 asks for one more, SIGUSR2 for one less, SIGTERM ends the run with a checkpoint."""
    command = [sys.executable, "-m", "vnode", "run", str(FAKE), "--workers", "1", "--", "{}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            found = until(lambda: next((job for job in job_registry.jobs() if "address" in job.facts), None))

            def trains(count: int) -> bool:
                return len(request(found, "status")["workers"]) == count

            until(lambda: trains(1))
            run.send_signal(signal.SIGUSR1)
            until(lambda: trains(2))
            run.send_signal(signal.SIGUSR2)
            until(lambda: trains(1))
            run.send_signal(signal.SIGTERM)
            out, _ = run.communicate(timeout=SECONDS)
        finally:
            run.kill()
    assert run.returncode == 0 and out == "I am 0\n"


def test_neither_the_command_nor_the_supervisor_imports_jax() -> None:
    code = (
        "import sys, vnode, vnode.cli, vnode.errors, vnode.workers.launch, vnode.workers.__main__\n"
        "assert not {'jax', 'jaxlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_leash_of_a_worker_of_ray(tmp_path: Path) -> None:
    """Its process and folder go when the actor's pipe breaks; after "ended", the folder alone."""
    for said, code in ((b"", -signal.SIGKILL), (b"ended\n", None)):
        (tmp_path / "own").mkdir()
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
            leash = ["sh", "-c", LEASH, str(child.pid), str(tmp_path / "own")]
            subprocess.run(leash, input=said, check=True, timeout=SECONDS)
            assert not (tmp_path / "own").exists()
            assert (child.wait(SECONDS) if code else child.poll()) == code
            child.kill()
