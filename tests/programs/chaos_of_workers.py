"""Workers that are killed, stopped and asked to come and go at random moments end with the bits of one process.

    python -m tests.programs.chaos_of_workers --seed 7 --events 8 --model plain

Knows jobs, signals and files. Must not know what workers tell one another. Events and their moments are drawn from the
seed. After each, the job must train again within a deadline. The reference is the same script, alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vnode.data.batch_order import Order
from vnode.errors import WorkerError
from vnode.workers.launch import Job, launch

SCRIPT = Path(__file__).parent / "trained_by_workers.py"
ROOT = SCRIPT.parents[2]
EXAMPLES, BATCH = 256, 32
"""Of the script's data."""

DEADLINE = 300.0
"""Seconds within which a job must train again, or end."""

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}


def environment(model: str) -> dict[str, str]:
    """The variables of a process that trains a model."""
    return {**ENVIRONMENT, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"} if model == "axis" else ENVIRONMENT


def reference(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The hash, the losses and the checkpoint of the script in one process."""
    own = {**asked, "folder": str(folder / "alone"), "out": str(folder)} if asked.get("folder") else asked
    alone = {**own, "out": str(folder), "slow": None, "pause": 0}
    command = [sys.executable, str(SCRIPT)]
    variables = {**os.environ, **environment(asked["model"])}
    subprocess.run([*command, json.dumps(alone)], env=variables, check=True, timeout=120, stdout=subprocess.DEVNULL)
    left = json.loads((folder / "alone.json").read_text())
    if asked.get("folder"):
        left["saved"] = saved(asked["model"], alone["folder"])
    return left


def saved(model: str, folder: str) -> str:
    """The hash of the newest checkpoint."""
    command = [sys.executable, str(SCRIPT), "hash", model, folder]
    variables = {**os.environ, **environment(model)}
    return subprocess.run(
        command, env=variables, check=True, timeout=120, capture_output=True, text=True
    ).stdout.strip()


class Chaos:
    """One job, and what happens to it.

    Args:
      seed: of all that is drawn.
      asked: the script's argument.
      workers: how many begin.
      restart: whether all workers are replaced at each change.
    """

    def __init__(self, seed: int, asked: dict[str, Any], workers: int, restart: bool) -> None:
        self.random, self.asked, self.count, self.restart = random.Random(seed), asked, workers, restart
        self.folders: list[Path] = []
        self.job = self.launched()

    def launched(self) -> Job:
        """The job, begun or begun again."""
        folder = self.asked.get("folder")
        job = launch(
            str(SCRIPT),
            workers=self.count,
            checkpoint=folder,
            arguments=[json.dumps(self.asked)],
            max_restarts=100,
            restart=self.restart,
            env=environment(self.asked["model"]),
        )
        self.folders.append(job.folder)
        return job

    def over(self) -> bool:
        """Whether the job has ended."""
        return self.job.process.poll() is not None

    def until(self, found: Callable[[], Any], what: str) -> float:
        """Waits; returns for how long.

        Raises:
          TimeoutError: it has not come.
        """
        began = time.monotonic()
        while not self.over() and not found():
            if time.monotonic() - began > DEADLINE:
                raise TimeoutError(f"{what}: not within {DEADLINE:g} s: {self.job.status()}")
            time.sleep(0.02)
        return time.monotonic() - began

    def trains(self) -> float:
        """Waits for three steps more."""
        began = self.job.step or 0
        return self.until(lambda: (self.job.step or 0) >= began + 3, "to train again")

    def members(self) -> list[int]:
        """The processes that train, by rank."""
        return [each["pid"] for each in self.job.workers if each["pid"]]

    def hurt(self, count: int, number: signal.Signals, between: float = 0.0) -> str:
        """Sends a signal to some that train, never to all of them."""
        members = self.members()
        victims = self.random.sample(range(len(members)), max(0, min(count, len(members) - 1)))
        for victim in victims:
            try:
                os.kill(members[victim], number)
            except ProcessLookupError:
                return "came too late"
            time.sleep(between)
        return f"{number.name} of ranks {victims} of {len(members)}"

    def fill_disk(self, seconds: float) -> str:
        """For a while, no worker can write files of more than 2 KB, as on a disk that is full."""
        limited = []
        for member in self.members():
            with contextlib.suppress(ProcessLookupError):
                limited.append((member, resource.prlimit(member, resource.RLIMIT_FSIZE, (2048, -1))))
        time.sleep(seconds)
        for member, before in limited:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(member, resource.RLIMIT_FSIZE, before)
        return f"{len(limited)} workers write nothing for {seconds:.1f} s"

    def resize(self, workers: int) -> None:
        """Asks for another number."""
        try:
            self.job.resize(workers)
            self.count = workers
        except WorkerError as error:
            if "the run has come to its end" not in str(error) and not self.over():
                time.sleep(0.5)
                if not self.over():
                    raise

    def happens(self, kind: str) -> str:
        """One event; returns what it was."""
        draw = self.random
        if kind == "kill":
            return self.hurt(1, signal.SIGKILL)
        if kind == "stop":
            return self.hurt(1, signal.SIGSTOP)
        if kind == "slow":
            said = self.hurt(1, signal.SIGSTOP)
            time.sleep(draw.uniform(0.1, 0.6))
            for member in self.members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGCONT)
            return said + ", which goes on"
        if kind == "full disk":
            return self.fill_disk(draw.uniform(0.5, 1.5))
        if kind == "kill two":
            return self.hurt(2, signal.SIGKILL, between=draw.uniform(0, 1))
        if kind == "kill all but one":
            return self.hurt(9, signal.SIGKILL)
        if kind == "supervisor":
            self.job.process.kill()
            self.job.process.wait()
            time.sleep(draw.uniform(0, 1))
            self.job = self.launched()
            return "SIGKILL of the supervisor"
        before = self.count
        after = draw.choice([count for count in range(1, 5) if count != before])
        self.resize(after)
        said = f"{before} -> {after}"
        if kind == "resize and back":
            time.sleep(draw.uniform(0, 3))
            self.resize(before)
            said += f" -> {before}"
        if kind == "resize, kill":
            time.sleep(draw.uniform(0, 5))
            said += ", " + self.hurt(1, signal.SIGKILL)
        if kind == "switch, kill":
            seen = len(self.job.events)
            self.until(lambda: any(each["event"] == "go" for each in self.job.events[seen:]), "to switch")
            time.sleep(draw.choice([0, 0, 0.01, 0.05, 0.1]))
            said += ", " + self.hurt(1, signal.SIGKILL)
        if kind == "resize":
            self.until(lambda: len(self.job.workers) == after, f"{after} workers")
        return said

    def story(self) -> str:
        """The events in the supervisors' logs."""
        lines = []
        for folder in self.folders:
            path = folder / "events.jsonl"
            lines += path.read_text().splitlines() if path.exists() else [f"{folder} is gone"]
        return "\n".join(lines)


KINDS = ["kill", "kill", "stop", "kill two", "kill all but one", "resize", "resize", "resize and back"]
KINDS += ["resize, kill", "switch, kill", "switch, kill", "supervisor", "slow", "full disk"]
MODELS = ["plain", "donated", "sharded", "axis", "convolution", "attention"]


RESTART_KINDS = ["kill", "stop", "kill two", "kill all but one", "resize", "resize and back", "resize, kill", "slow"]
RESTART_KINDS += ["supervisor", "full disk"]
"""Those of workers that are all replaced at each change."""


def play(
    seed: int,
    events: int,
    model: str,
    steps: int = 400,
    say: Callable[[str], None] = print,
    restart: bool = False,
) -> None:
    """One job with random events.

    Raises:
      AssertionError: its result differs from that of one process.
      TimeoutError: it hung.
    """
    drawn = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        place = Path(name)
        slow = place / "slow"
        slow.touch()
        (place / "out").mkdir()
        asked = {"model": model, "steps": steps, "pause": 0.002, "slow": str(slow), "out": str(place / "out")}
        if model == "sharded" or restart or drawn.random() < 0.5:
            asked["folder"] = str(place / "checkpoints")
        expected = reference(asked, place)
        chaos = Chaos(seed, asked, drawn.randint(1, 4), restart)
        say(f"seed {seed}: {model}, {chaos.count} workers, {'saves' if 'folder' in asked else 'does not save'}")
        try:
            waited = chaos.until(lambda: chaos.job.step, "the first step")
            say(f"  the first step after {waited:.2f} s")
            for _ in range(events):
                if chaos.over():
                    break
                time.sleep(drawn.uniform(0.1, 2))
                kinds = RESTART_KINDS if restart else KINDS
                kinds = [each for each in kinds if chaos.count > 1 or "resize" in each or "switch" in each]
                kind = drawn.choice([each for each in kinds if each != "full disk" or "folder" in asked])
                said = chaos.happens(kind)
                say(f"  {kind}: {said}: step {chaos.job.step}, trains after {chaos.trains():.2f} s")
            slow.unlink()
            code = chaos.job.wait(DEADLINE)
            assert code == 0, f"exit code {code}"
            check(chaos, expected, place)
        except BaseException:
            say(chaos.story())
            if not chaos.over():
                chaos.job.kill()
                chaos.job.process.wait(DEADLINE)
            raise
        say(f"seed {seed}: the same bits after {len(chaos.job.events)} entries")


def check(chaos: Chaos, expected: dict[str, Any], place: Path) -> None:
    """Compares what the workers have left with what one process has."""
    found = [json.loads(path.read_text()) for path in sorted((place / "out").glob("*.json"))]
    assert found, "no worker has come to its end"
    losses = dict(expected["losses"])
    for each in found:
        assert each["step"] == expected["step"], (each["step"], expected["step"])
        assert each["used"] == used(each["step"]), "an example was left out, or twice"
        others = [number for number, loss in each["losses"] if losses[number] != loss]
        assert not others, f"other losses from step {others[0]} on"
        if each["hash"]:
            assert each["hash"] == expected["hash"], "another state"
        numbers = [number for number, _ in each["losses"]]
        assert numbers == sorted(set(numbers)), f"a step is told twice: {numbers}"
    if "saved" in expected:
        assert saved(chaos.asked["model"], chaos.asked["folder"]) == expected["saved"], "another checkpoint"


def used(steps: int) -> list[int]:
    """How often each example is in so many steps."""
    order = Order(EXAMPLES, BATCH, seed=0)
    return np.bincount(np.concatenate([order.rows(step) for step in range(steps)]), minlength=EXAMPLES).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=8)
    parser.add_argument("--model", choices=MODELS, default="plain")
    parser.add_argument("--restart", action="store_true", help="all workers are replaced at each change")
    options = parser.parse_args()
    say = functools.partial(print, flush=True)
    play(options.seed, options.events, options.model, say=say, restart=options.restart)


if __name__ == "__main__":
    main()
