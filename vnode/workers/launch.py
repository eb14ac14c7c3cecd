"""Turns a script or a function into a job that trains with several workers: `launch`.

Knows the supervisor's process and its requests. Must not know what it decides.

    with launch("train.py", workers=3) as job:
        job.resize(5)
    print(job.step)
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vnode.errors import WorkerError
from vnode.workers import job_registry
from vnode.workers.start_job import Spec, target_command
from vnode.workers.supervisor import search_path
from vnode.workers.supervisor_client import request

KILL_SECONDS = 30
"""Seconds that a supervisor may take to end a killed job."""


class Job:
    """A job that runs. Leaving a `with` block waits for its end; an exception in the block stops it first.

    Attributes:
      folder: where its events and the output of its workers are.
      pid: the process number of its supervisor.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder, self.pid = process, folder, process.pid
        self.ended: dict[str, Any] | None = None

    def found(self) -> job_registry.Found:
        """The job as its folder tells."""
        found = job_registry.load(self.folder)
        if found is None:
            raise WorkerError(f"the folder of the job, {self.folder}, is gone.")
        return found

    def resize(self, workers: int) -> None:
        """Asks for another number of workers, and returns at once; the last request counts.

        Args:
          workers: the number of workers that train.

        Raises:
          WorkerError: so many cannot be, or the job has ended.
        """
        request(self.found(), "resize", workers=workers)

    def stop(self) -> None:
        """Asks the run to end with a checkpoint, as SIGTERM does."""
        if self.process.poll() is None:
            request(self.found(), "stop", why="job.stop()")

    def kill(self) -> None:
        """Ends all workers at once."""
        if self.process.poll() is None:
            request(self.found(), "kill")

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the job.

        Args:
          timeout: seconds; None waits for as long as it takes.

        Returns:
          The exit code of the script's lowest rank.

        Raises:
          TimeoutError: the job still runs.
          WorkerError: the job has failed; `code` is its exit code.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job still runs after {timeout} s") from None
        self.process.stdin.close()  # type: ignore[union-attr]
        facts = self.found().facts
        if "code" not in facts:
            raise WorkerError(f"the supervisor of the job has ended with exit code {code}.", code=code)
        if facts["why"]:
            raise WorkerError(facts["why"], code=facts["code"])
        return code

    def status(self) -> dict[str, Any]:
        """The supervisor's status; once it has ended, its last one."""
        if self.process.poll() is None:
            try:
                return request(self.found(), "status")
            except WorkerError:  # it is about to end
                self.process.wait(KILL_SECONDS)
        return {"workers": [], "step": self.found().facts.get("step")}

    @property
    def workers(self) -> list[dict[str, Any]]:
        """The workers that train, in order of their ranks: rank, pid, nodes, worker."""
        return [{key: w[key] for key in ("rank", "pid", "nodes", "worker")} for w in self.status()["workers"]]

    @property
    def step(self) -> int | None:
        """The number of steps done."""
        return self.status()["step"]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far: time, event, worker, step, why."""
        return self.found().events()

    @property
    def result(self) -> Any:
        """The content of ``$VNODE_JOB/result.json``, which rank 0 writes; None if there is none."""
        try:
            return json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.wait()
            return
        if self.process.poll() is None:
            self.process.stdin.close()  # type: ignore[union-attr]  # it stops, and kills if that takes too long
            self.process.wait()

    def __del__(self) -> None:
        if self.process.poll() is not None and self.process.stdin is not None:
            self.process.stdin.close()  # nobody has waited for the end

    def __repr__(self) -> str:
        state = "runs" if self.process.poll() is None else f"ended with exit code {self.process.returncode}"
        return f"Job({str(self.folder)!r}, process {self.pid}, {state})"


def launch(
    target: str | os.PathLike[str] | Callable[..., Any],
    workers: int,
    *,
    backend: str = "processes",
    checkpoint: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
    spares: int = 0,
    max_workers: int | None = None,
    start_timeout: float = 300,
    max_restarts: int = 3,
    silence: float = 10,
    rejoin: bool = False,
    restart: bool = False,
    interface: str = "127.0.0.1",
    port: int = 0,
    env: Mapping[str, str] | None = None,
    resources: Mapping[str, float] | None = None,
) -> Job:
    """Trains with several workers that come and go.

    The supervisor runs in a process of its own, and ends the run with a checkpoint if this process ends.

    Args:
      target: a script that calls `vnode.elastic.run`; or a function at the top of a file, or ``"module:name"``, that
        returns step, state, data and a dict of options for `vnode.elastic.run`.
      workers: the number of workers that train.
      backend: "processes" for child processes on this host, or "ray": processes on the nodes of ``RAY_ADDRESS``, or on
        this host if it is not set.
      checkpoint: the folder of checkpoints: `vnode.elastic.run` uses it where the script names none.
      arguments: of the script.
      spares: how many workers stand by, so that one that is lost is replaced sooner.
      max_workers: how many may be asked for; by default as many as there are virtual nodes.
      start_timeout: seconds that a worker has from its start to its call of `run`.
      max_restarts: how often each worker is started again within ten minutes.
      silence: seconds without a sign of life after which a worker is killed.
      rejoin: whether workers leave a generation before they make the next one. A change then takes seconds, and less
        memory: otherwise two clients of JAX are in each worker meanwhile.
      restart: whether all workers are replaced at each change, and go on from a checkpoint: as GPUs and TPUs need it.
      interface: the address of this host at which supervisor and services listen.
      port: at which the supervisor listens; 0 for any that is free.
      env: further environment variables of the workers. ``{worker}`` in a value is the number of the worker, as in
        ``{"CUDA_VISIBLE_DEVICES": "{worker}"}``.
      resources: with "ray", what Ray must have for each worker, as ``{"CPU": 4, "TPU": 4}``.

    Returns:
      The job, which has begun.

    Raises:
      WorkerError: it cannot be started so.
    """
    command, name, variables = target_command(target, arguments)
    spec = Spec(
        command=command,
        name=name,
        workers=workers,
        backend=backend,
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        spares=spares,
        max_workers=max_workers,
        start_timeout=start_timeout,
        max_restarts=max_restarts,
        silence=silence,
        rejoin=rejoin,
        restart=restart,
        interface=interface,
        port=port,
        env={**variables, **(env or {})},
        resources=resources,
    )
    spec.check()
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as report:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vnode.workers", str(writer)],
                stdin=subprocess.PIPE,
                pass_fds=(writer,),
                env={**os.environ, "PYTHONPATH": search_path()},
                start_new_session=True,
            )
        finally:
            os.close(writer)
        assert process.stdin is not None
        process.stdin.write(json.dumps([dataclasses.asdict(spec), os.environ.get("PYTHONPATH")]).encode() + b"\n")
        process.stdin.flush()
        said = json.loads(report.readline() or '{"error": "the supervisor has ended at once."}')
    if "error" in said:
        process.wait()
        process.stdin.close()
        raise WorkerError(said["error"])
    return Job(process, Path(said["folder"]))
