"""Decisions about workers that are all replaced at each change, under random deaths, resizes and signals.

Knows `vnode.workers.restarts`, with time as a number. Must not know processes.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples
from vnode.errors import WorkerError
from vnode.workers.actions import End, Kill, Record, Send, Spawn
from vnode.workers.restarts import Restarts
from vnode.workers.worker_process import Limits

LIMITS = Limits(start=30, restarts=20)
STEPS = 60


@dataclasses.dataclass
class Fake:
    """A worker that obeys the protocol; `count` is the size of its world, which trains once all have arrived."""

    number: int
    connects: float
    connected: bool = False
    count: int = 0
    arrives: float = 0
    ready: bool = False
    stop: dict[str, Any] | None = None
    signal: bool = False
    fails: float = 0
    ends: float = 0
    code: int = 0
    gone: bool = False


class World:
    """Workers and time. Workers that train make a step each tenth of a second, and save every tenth step.

    Args:
      seed: of all that happens.
      workers: how many are asked for.
    """

    def __init__(self, seed: int, workers: int) -> None:
        self.draw = random.Random(seed)
        self.job = Restarts(workers, limits=LIMITS)
        self.now, self.step, self.saved = 0.0, -1, 0
        self.fakes: dict[int, Fake] = {}
        self.over: End | None = None
        self.events: list[str] = []
        self.sizes: list[int] = []
        self.done: list[int] = []
        self.do(self.job.begin(0.0))

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Spawn):
                assert action.worker not in self.fakes, "a number has one process"
                assert not any(fake.count for fake in self.fakes.values()), "another world is still there"
                self.fakes[action.worker] = Fake(action.worker, self.now + self.draw.uniform(0.1, 3))
            elif isinstance(action, Kill):
                self.end(self.fakes[action.worker], -9)
            elif isinstance(action, Send) and action.worker in self.fakes:
                self.hear(self.fakes[action.worker], action.message)
            elif isinstance(action, Record):
                self.events.append(action.event)
            elif isinstance(action, End):
                self.over = action

    def hear(self, fake: Fake, message: dict[str, Any]) -> None:
        if message["kind"] == "world":
            assert fake.connected and not fake.count and message["coordinator"] == "there"
            assert message["count"] == len(self.fakes) and {*self.fakes} == {*range(message["count"])}
            fake.count, fake.arrives = message["count"], self.now + self.draw.uniform(0.1, 2)
            self.sizes += [fake.count] * (fake.number == 0)
        elif message["kind"] == "stop":
            fake.stop = message

    def end(self, fake: Fake, code: int) -> None:
        """A process ends soon, and says nothing more."""
        if not fake.gone:
            fake.gone, fake.ends, fake.code = True, self.now + self.draw.uniform(0, 0.2), code

    def say(self, fake: Fake, kind: str, **facts: Any) -> None:
        if self.over is None:
            self.do(self.job.message(fake.number, {"kind": kind, **facts}, self.now))

    def turn(self) -> None:
        """A tenth of a second."""
        self.now += 0.1
        for fake in self.draw.sample(list(self.fakes.values()), len(self.fakes)):
            if fake.gone and self.now >= fake.ends and self.over is None:
                del self.fakes[fake.number]
                self.do(self.job.exited(fake.number, fake.code, self.now))
            elif not fake.gone:
                self.live(fake)
        self.train([fake for fake in self.fakes.values() if fake.ready and not fake.gone])
        if self.over is None:
            self.do(self.job.tick(self.now))

    def live(self, fake: Fake) -> None:
        """A worker connects, arrives, fails or gives a sign of life."""
        if not fake.connected and self.now >= fake.connects and self.over is None:
            fake.connected = True
            self.do(self.job.connected(fake.number, 100 + fake.number, self.now))
            if fake.number == 0:
                self.say(fake, "leads", address="there")
        elif fake.count and not fake.ready and self.now >= fake.arrives:
            fake.ready = True
            self.say(fake, "arrived", facts={}, virtual_nodes=8, checkpoint="somewhere")
            self.step = self.saved
        elif fake.ready and len(self.fakes) == fake.count and any(each.gone for each in self.fakes.values()):
            fake.fails = fake.fails or self.now + self.draw.uniform(0, 2)
            if self.now >= fake.fails:
                self.say(fake, "error", text="ProcessError: another has ended", step=self.step)
                self.end(fake, 1)
        if fake.connected and not fake.gone:
            self.say(fake, "progress", step=self.step if fake.ready else -1, doing="", nodes=1, metrics={})

    def train(self, ready: list[Fake]) -> None:
        """One step of all, if all are there."""
        if not ready or len(ready) < ready[0].count:
            return
        if self.step >= STEPS:
            for fake in ready:
                self.say(fake, "finished", step=self.step, reason="")
                self.end(fake, 0)
                self.done.append(self.step)
        elif any(fake.signal or fake.stop is not None for fake in ready):  # they have voted
            self.saved = self.step
            for fake in ready:
                if fake.signal and fake.stop is None:
                    self.say(fake, "leaving", why="SIGTERM")
            for fake in ready if all(fake.stop is not None for fake in ready) else []:
                assert fake.stop is not None
                self.say(fake, "saved" if fake.stop["anew"] else "finished", step=self.step)
                self.end(fake, 0)
        else:
            self.step += 1
            self.saved = self.step if self.step % 10 == 0 else self.saved

    def disturb(self) -> None:
        """Something that happens to workers."""
        kind, fakes = self.draw.choice(["kill", "kill", "resize", "signal", "stopped"]), list(self.fakes.values())
        if kind == "resize" and not self.done:  # after the run it is refused
            self.do(self.job.resize(self.draw.randint(1, 4), self.now))
        elif fakes:
            fake = self.draw.choice(fakes)
            if kind == "kill":
                self.end(fake, -9)
            elif kind == "signal" and fake.ready:
                fake.signal = True
            elif kind == "stopped":
                self.do(self.job.stopped(fake.number, self.now))


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4))
def test_whatever_happens_the_run_comes_to_its_last_step(seed: int, workers: int) -> None:
    """No worker of a new world is started while one of the world before is there; each world has all its workers."""
    world = World(seed, workers)
    for number in range(4000):
        if world.over is not None:
            break
        if number % 23 == 0 and number < 200:
            world.disturb()
        world.turn()
    if "stop" in world.events:  # the only worker had a signal
        assert world.over is not None and world.over.code in (0, 143) and not world.done
        return
    assert world.over == End(0, ""), (world.over, world.events)
    assert set(world.done) == {STEPS}
    assert world.sizes[-1] == world.job.wanted == len(world.done)


def quiet(workers: int = 2, **saves: Any) -> World:
    """A world that trains."""
    world = World(0, workers)
    if saves:
        world.say = lambda fake, kind, **facts: World.say(world, fake, kind, **{**facts, **saves})
    while world.job.members() == []:
        world.turn()
    return world


def test_without_checkpoints_changes_are_refused_and_a_loss_ends_the_job() -> None:
    world = quiet(checkpoint=None)
    assert "no checkpoints" in world.events  # said beforehand
    with pytest.raises(WorkerError, match=r"(?s)folder of checkpoints.*--checkpoint FOLDER"):
        world.job.resize(3, world.now)
    for _ in range(10):
        world.turn()
    world.end(world.fakes[1], -9)
    while world.over is None:
        world.turn()
    assert world.over.code == 1 and "no checkpoint to begin again with" in world.over.why


def test_a_stop_ends_the_job_and_an_error_of_all_is_not_tried_again() -> None:
    world = quiet()
    world.do(world.job.stop("SIGTERM", 143, world.now))
    while world.over is None:
        world.turn()
    assert world.over == End(0, "") and world.step < STEPS
    world = quiet()
    for fake in world.fakes.values():
        world.say(fake, "progress", step=3, doing="", nodes=1, metrics={})
    for fake in world.fakes.values():
        world.say(fake, "error", text="ValueError: step 3 is odd", step=3)
        world.end(fake, 1)
    while world.over is None:
        world.turn()
    assert world.over.code == 1 and "worker 1: ValueError: step 3 is odd" in world.over.why
    assert world.events.count("start") == 2


def test_a_stop_behind_a_first_run_stops_the_second_and_not_the_script() -> None:
    """In the rest of the script nothing is ended; a further run is told to stop when it is called."""
    job = Restarts(1, limits=LIMITS)
    job.ends_scripts = True
    job.begin(0.0)
    job.connected(0, 100, 1.0)
    said = {"facts": {}, "virtual_nodes": 2, "checkpoint": "folder", "steps": 9}
    job.message(0, {"kind": "leads", "address": "there"}, 1.5)
    job.message(0, {"kind": "arrived", **said}, 2.0)
    job.message(0, {"kind": "finished", "step": 9, "reason": ""}, 3.0)
    job.stop("others", 143, 4.0)
    assert job.over is None
    done = job.message(0, {"kind": "arrived", **said}, 5.0)
    assert Send(0, {"kind": "stop", "why": "others", "anew": True}) in done
    job.message(0, {"kind": "saved", "step": 0}, 6.0)
    job.exited(0, 0, 7.0)
    assert job.over is not None and job.over.code == 143


class Pair:
    """Two workers that have trained: what they say, and what is done."""

    def __init__(self, **said: Any) -> None:
        self.job, self.now, self.done = Restarts(2, limits=LIMITS), 0.0, list[Any]()
        self.said = {"facts": {}, "virtual_nodes": 2, "checkpoint": "folder", "steps": 9, **said}
        self.job.begin(0.0)
        self.begin()

    def begin(self) -> None:
        for number in (0, 1):
            self.after(0, "connected", number, 100 + number)
        self.says(0, "leads", address="there")
        for number in (0, 1):
            self.says(number, "arrived", **self.said)
            self.says(number, "progress", step=9, doing="", nodes=1, metrics={})

    def says(self, number: int, kind: str, **facts: Any) -> None:
        self.after(0.1, "message", number, {"kind": kind, **facts})

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self.says(number, "finished", step=9, reason="")

    def after(self, seconds: float, event: str, *args: Any) -> list[Any]:
        self.now += seconds
        self.done = getattr(self.job, event)(*args, self.now)
        return self.done


def test_a_run_that_rank_0_has_not_finished_is_made_again_unless_the_job_is_to_stop() -> None:
    """Rank 0 saves: with it the last checkpoint may be gone, though another worker has finished."""
    pair = Pair()
    pair.finish(1)
    pair.after(0.1, "exited", 0, -9)
    assert Kill(1) in pair.after(LIMITS.left, "tick")
    assert pair.after(0.1, "exited", 1, -9).count(Spawn(0)) == 1 and pair.job.over is None
    pair.begin()
    pair.after(0, "stop", "SIGTERM", 143)
    pair.finish(1)
    pair.after(0.1, "exited", 0, -9)
    pair.after(LIMITS.left, "tick")
    pair.after(0.1, "exited", 1, 0)
    assert pair.job.over is not None and pair.job.over.code == 1
    assert "worker 0, which saves in folder, was killed by SIGKILL" in pair.job.over.why


def test_the_rest_of_a_script_outlives_the_loss_of_another_worker() -> None:
    """Behind the scripts JAX waits for all processes, also for those that are gone."""
    pair = Pair()
    pair.finish(0, 1)
    pair.after(0.1, "exited", 1, -9)
    assert not [each for each in pair.after(1000, "tick") if isinstance(each, Kill)], "it may work for long"
    pair.says(0, "script_ended", code=3, error=None)
    assert Kill(0) in pair.after(LIMITS.end + 1, "tick")
    pair.after(0.1, "exited", 0, -9)
    assert pair.job.over == End(3, "")


def test_a_worker_whose_script_ends_has_the_others_work_on_and_is_ended_with_them() -> None:
    pair = Pair()
    pair.finish(0, 1)
    pair.says(1, "script_ended", code=0, error=None)
    assert not [each for each in pair.after(1000, "tick") if isinstance(each, Kill)]
    pair.says(0, "script_ended", code=0, error=None)
    pair.after(0.1, "exited", 1, 0)
    pair.after(0.1, "exited", 0, 0)
    assert pair.job.over == End(0, "")


def test_a_worker_that_is_lost_between_two_runs_is_replaced_with_the_others() -> None:
    """The other one is in the next run, or has ended with an error for want of the lost one, or JAX has aborted it."""
    pair = Pair()
    pair.finish(0, 1)
    pair.after(0.1, "exited", 1, -9)
    pair.says(0, "arrived", **pair.said)
    assert Kill(0) in pair.after(LIMITS.left + 0.1, "tick")
    assert Spawn(1) in pair.after(0.1, "exited", 0, -9)
    pair.begin()
    pair.finish(0, 1)
    pair.after(0.1, "exited", 1, -9)
    pair.says(0, "script_ended", code=1, error="ProcessError: process 1 has ended")
    assert Spawn(1) in pair.after(0.1, "exited", 0, 1)
    pair.begin()
    pair.finish(0, 1)
    pair.after(0.1, "exited", 0, -9)
    assert Spawn(0) in pair.after(0.1, "exited", 1, -6)


def test_an_error_behind_the_run_ends_the_job() -> None:
    pair = Pair()
    pair.finish(0, 1)
    pair.says(0, "script_ended", code=1, error="ValueError: no such picture")
    pair.after(0.1, "exited", 0, 1)
    pair.says(1, "script_ended", code=0, error=None)
    pair.after(0.1, "exited", 1, 0)
    assert pair.job.over == End(1, "")


def test_an_error_that_only_the_script_has_seen_is_told_and_a_full_disk_is_tried_again() -> None:
    """As where the folder of checkpoints cannot be opened, before the run begins."""
    pair = Pair()
    pair.after(0.1, "exited", 1, -9)
    pair.after(LIMITS.left, "tick")
    assert Spawn(0) in pair.after(0.1, "exited", 0, -9)
    for number in (0, 1):
        pair.after(0, "connected", number, 200 + number)
        pair.says(number, "script_ended", code=1, error="CheckpointError: no space is left")
    assert pair.after(LIMITS.left + 0.1, "tick").count(Kill(0)) == 1
    pair.after(0.1, "exited", 0, -9)
    assert Spawn(0) in pair.after(0.1, "exited", 1, -9)


def test_a_script_that_was_edited_ends_the_job() -> None:
    pair = Pair(facts={"script": "a"})
    pair.after(0.1, "exited", 1, -9)
    pair.after(LIMITS.left, "tick")
    pair.after(0.1, "exited", 0, -9)
    pair.said["facts"] = {"script": "b"}
    pair.begin()
    assert pair.job.over is not None and "another version of the script" in pair.job.over.why
