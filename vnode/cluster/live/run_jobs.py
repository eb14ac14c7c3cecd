"""Turns jobs into a run on devices of this machine: a scheduler in this process, as long as they last.

Knows the scheduler. Must not know what it decides.

    run([Submission(command=["python", "a.py"], workers=(1, 4)), ...], devices=4, policy="goodput").result.figures()
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vnode.cluster.job_figures import Result
from vnode.cluster.live.history import result_of
from vnode.cluster.live.scheduler import Scheduler, Setup
from vnode.cluster.live.socket_server import request
from vnode.cluster.live.submission import Submission
from vnode.cluster.simulator import Policy
from vnode.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of jobs that shared devices.

    Attributes:
      result: events, and figures of them, as of a simulation.
      jobs: by id, what is known of each: state, code, why, folder, as ``vnode status --json`` says.
      state: the scheduler's file.
    """

    result: Result
    jobs: Mapping[str, Mapping[str, Any]]
    state: Path

    def __repr__(self) -> str:
        states = ", ".join(f"{name} {job['state']}" for name, job in self.jobs.items())
        return f"Run({states}; {self.state})"

    def output(self, job: str) -> str:
        """The output of a job.

        Args:
          job: its id: "1" is the first that arrived.
        """
        return (Path(self.jobs[job]["folder"]) / "out").read_text(encoding="utf-8")


def run(
    jobs: Sequence[Submission],
    devices: int | Sequence[str] | None = None,
    policy: str | Policy = "goodput",
    *,
    state: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str = "processes",
    restart: bool = False,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    """Runs jobs that share the devices of this machine, and waits for their ends.

    Each job arrives at its `arrival`. While they run, `vnode queue --state` and the other commands work. An exception,
    as by Ctrl-C, cancels the jobs.

    Args:
      jobs: what is to run.
      devices: how many there are, or their names; by default the GPUs of ``CUDA_VISIBLE_DEVICES``, or else as many as
        this machine has processors.
      policy: the name of a policy, or a function ``decide(now, jobs, devices) -> shares``.
      state: the scheduler's file; by default one in a new folder for temporary files, which stays.
      options: `factor` and `inner` of a guarantee; `counts`: the numbers of devices that a job may have.
      backend: what places workers: "processes" or "ray".
      restart: whether jobs replace all workers at each change (GPUs, TPUs).
      env: variables of all workers; ``{device}`` in a value is the worker's device.
      say: called with each line about decisions and ends.

    Returns:
      Their outcome. A job that has failed raises nothing: see `Run.jobs`.

    Raises:
      ClusterError: a job cannot run here, the policy fails, or the file cannot be used.
    """
    if devices is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else os.cpu_count() or 1
    names = [str(number) for number in range(devices)] if isinstance(devices, int) else list(devices)
    path = Path(tempfile.mkdtemp(prefix="vnode-cluster-")) / "cluster.db" if state is None else Path(state)
    setup = Setup(devices=names, policy=policy, options=options or {}, backend=backend, restart=restart, env=env or {})
    scheduler = Scheduler(path, setup, say)
    try:
        waiting = sorted(jobs, key=lambda job: job.arrival)
        began, mine = time.monotonic(), []
        while waiting or any(not scheduler.book.jobs[name].is_over for name in mine):
            while waiting and time.monotonic() - began >= waiting[0].arrival:
                mine.append(scheduler.submit({"job": waiting.pop(0).facts()}))
            scheduler.turn()
            check_progress(scheduler, bool(waiting))
        shown = {job["id"]: job for job in scheduler.snapshot()["jobs"]}
        return Run(result_of(scheduler.state.records()), {name: shown[name] for name in mine}, scheduler.state.path)
    except BaseException:
        for job in scheduler.book.active():
            scheduler.cancel({"job": job.id})
        scheduler.run(until=lambda: not scheduler.book.active())
        raise
    finally:
        scheduler.close()


def check_progress(scheduler: Scheduler, waits: bool) -> None:
    """Looks whether the policy does what it must, or the run would never end.

    Args:
      scheduler: after a turn.
      waits: whether other jobs are to arrive.

    Raises:
      ClusterError: the policy fails, or leaves all jobs without devices for ever.
    """
    if (trouble := scheduler.troubles.get("decide")) is not None:
        raise ClusterError(trouble[0])
    active = scheduler.book.active()
    idle = active and not any(job.share or job.alive or job.cancel for job in active)
    if idle and not waits and not scheduler.dirty and scheduler.again is None:
        names = ", ".join(job.called for job in active[:3])
        raise ClusterError(f"the policy leaves {len(active)} jobs without devices for ever: {names}.")


def submit(job: Submission, state: str | None = None) -> str:
    """Hands a job to the scheduler that runs on this machine.

    Args:
      job: what is to run.
      state: the scheduler's file, if several run.

    Returns:
      The job's id, once it is on the disk.

    Raises:
      ClusterError: no scheduler runs, or it refuses the job.
    """
    return request("submit", state, job=job.facts())["answer"]
