"""Decisions about generations, under random deaths, delays and resizes of workers that obey the protocol.

Knows `vnode.workers.generations`, with time as a number. Must not know processes.
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
from vnode.workers.actions import End, EndService, Kill, Record, Send, Spawn, StartService
from vnode.workers.generations import Generations, Limits

LIMITS = Limits(start=30, finish=3)


@dataclasses.dataclass
class Fake:
    """A worker that obeys the protocol; `step` is what its state has behind it, -1 for none.

    Until the time `hung` it only gives signs of life; `busy` says whether it tells why.
    """

    number: int
    arrives: float
    arrived: bool = False
    stopped: bool = False
    generation: int = 0
    step: int = -1
    prepared: set[int] = dataclasses.field(default_factory=set)
    finished: bool = False
    leaves: float | None = None
    hung: float = 0
    busy: bool = False
    waited: float = 0


class World:
    """Workers, services and time. The messages of each worker are delivered in order, late, interleaved at random.

    Args:
      seed: of all that happens.
      workers: how many are asked for.
      nodes: virtual nodes.
      spares: how many stand by.
      steps: of the run.
      saves: whether it has a folder of checkpoints.
    """

    def __init__(
        self, seed: int, workers: int, nodes: int, spares: int, steps: int = 10**9, saves: bool = False
    ) -> None:
        self.saves = saves
        self.draw = random.Random(seed)
        self.job = Generations(workers, spares=spares, limits=LIMITS)
        self.now, self.nodes, self.steps = 0.0, nodes, steps
        self.fakes: dict[int, Fake] = {}
        self.inbox: dict[int, list[dict[str, Any]]] = {}
        self.outbox: dict[int, list[tuple[float, dict[str, Any]]]] = {}
        self.exits: list[tuple[float, int, int]] = []
        self.asked: list[tuple[float, int]] = []
        self.over: End | None = None
        self.services = 0
        self.alive_services: dict[str, set[int]] = {}
        self.left: dict[int, dict[int, int]] = {}  # of each generation: steps that workers have said
        self.members: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.do(self.job.begin(0.0))

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            assert self.over is None or not isinstance(action, Send | Spawn), "nothing after the end"
            if isinstance(action, Spawn):
                assert action.worker not in self.fakes, "a number has one process"
                self.fakes[action.worker] = Fake(action.worker, self.now + self.draw.uniform(0.1, 3))
                self.inbox[action.worker], self.outbox[action.worker] = [], []
            elif isinstance(action, Kill):
                self.kill(action.worker, -9)
            elif isinstance(action, StartService):
                self.asked.append((self.now + self.draw.uniform(0, 0.2), action.generation))
            elif isinstance(action, EndService):
                pass
            elif isinstance(action, End):
                self.over = action
            elif isinstance(action, Send) and action.worker in self.fakes:
                self.check(action.message)
                self.inbox[action.worker].append(action.message)

    def check(self, message: dict[str, Any]) -> None:
        """Checks a message against those before it."""
        if message["kind"] == "prepare":
            members = [m["worker"] for m in message["members"]]
            assert len(set(members)) == len(members) <= self.nodes
            self.members[message["generation"]] = members
        if message["kind"] == "go" and message["step"] is not None and message["step"] >= 0:
            living = [f for f in self.fakes.values() if f.generation == 0 and f.step >= 0 and not f.finished]
            held = {h["worker"] for h in message["holders"]}
            assert held and all(self.fakes[w].step == message["step"] for w in held if w in self.fakes)
            told = self.members[message["generation"]]
            assert message["step"] >= max((f.step for f in living if f.number in told), default=-1), "a step is lost"

    def kill(self, number: int, code: int) -> None:
        """A process is killed: it says nothing more; the supervisor learns of it a little later."""
        if number in self.fakes and all(number != n for _, n, _ in self.exits):
            self.exits.append((self.now + self.draw.uniform(0, 0.2), number, code))
            self.fakes[number].stopped = True

    def say(self, fake: Fake, **message: Any) -> None:
        self.outbox[fake.number].append((self.now + self.draw.uniform(0, 0.05), message))

    def turn(self) -> None:
        """A twentieth of a second."""
        self.now += 0.05
        order = list(self.fakes.values())
        self.draw.shuffle(order)
        for fake in order:
            if not fake.stopped:
                self.live(fake)
        for due, generation in [a for a in self.asked if a[0] <= self.now]:
            self.asked.remove((due, generation))
            self.services += 1
            self.do(self.job.service(generation, f"s{self.services}", self.now))
        numbers = list(self.outbox)
        self.draw.shuffle(numbers)
        for number in numbers:
            box = self.outbox[number]
            while box and box[0][0] <= self.now and self.over is None:
                message = box.pop(0)[1]
                if message["kind"] == "connect":
                    self.do(self.job.connected(number, 1000 + number, self.now))
                else:
                    self.do(self.job.message(number, message, self.now))
        for due, number, code in [e for e in self.exits if e[0] <= self.now]:
            if code == 0 and self.outbox[number]:
                continue  # what it said comes first
            self.exits.remove((due, number, code))
            del self.fakes[number], self.inbox[number], self.outbox[number]
            if self.over is None:
                self.do(self.job.exited(number, code, self.now))
        if self.over is None:
            self.do(self.job.tick(self.now))

    def live(self, fake: Fake) -> None:
        """Does one thing as a worker would."""
        if not fake.arrived and self.now >= fake.arrives:
            fake.arrived = True
            self.say(fake, kind="connect")
            self.arrive(fake)
        if not fake.arrived:
            return
        if self.now >= fake.hung:
            while self.inbox[fake.number] and self.draw.random() < 0.9:
                self.hear(fake, self.inbox[fake.number].pop(0))
            if fake.stopped or (fake.generation and fake.step >= 0 and self.advance(fake)):
                return
        busy = fake.busy and self.now < fake.hung
        doing = {"doing": "trains", "nodes": 1, "metrics": {}, "waits": False, "busy": busy}
        self.say(fake, kind="progress", generation=fake.generation, step=max(fake.step, 0), **doing)

    def advance(self, fake: Fake) -> bool:
        """Does a step with the others, or waits for them; returns whether the run is over."""
        members = self.members[fake.generation]
        if fake.generation in self.ended:  # in the last step all had their part
            fake.step = self.steps
        elif all(self.is_there(m) and self.fakes[m].generation == fake.generation for m in members):
            fake.step, fake.waited = fake.step + (self.draw.random() < 0.8), 0
        else:
            before, fake.waited = fake.waited, fake.waited + 0.05
            if before < 3 <= fake.waited:
                self.say(fake, kind="lost_peer", generation=fake.generation, text="waits", vain=True)
            elif before < 23 <= fake.waited:
                self.say(fake, kind="error", text="ProcessError: waited", step=fake.step)
                self.kill(fake.number, 1)
                return True
        if fake.step >= self.steps:
            self.finish(fake, "steps")
        return fake.stopped

    def is_there(self, number: int) -> bool:
        """Whether a worker does what it should."""
        fake = self.fakes.get(number)
        return fake is not None and not fake.stopped and self.now >= fake.hung

    def arrive(self, fake: Fake) -> None:
        about = {"handover": str(fake.number), "virtual_nodes": self.nodes, "checkpoint": "c" if self.saves else None}
        self.say(fake, kind="arrived", call=0, facts={"jax": 1}, **about)

    def hear(self, fake: Fake, message: dict[str, Any]) -> None:
        kind, number = message["kind"], message.get("generation")
        if kind == "prepare":
            if self.draw.random() < 0.05:
                self.say(fake, kind="unprepared", generation=number, error="no memory")
            else:
                fake.prepared.add(number)
                self.say(fake, kind="prepared", generation=number, seconds=0.1)
        elif kind == "go":
            if fake.number not in self.members[number]:
                return  # its state is wanted, not itself
            assert number in fake.prepared and number > fake.generation
            fake.generation = number
            if message["step"] is not None:
                fake.step = max(message["step"], 0)
            elif fake.step < 0:
                fake.step = max((f.step for f in self.fakes.values()), default=0)
            self.say(fake, kind="switched", generation=number, step=fake.step)
        elif kind == "leave":
            fake.generation, fake.waited = 0, 0
            self.say(fake, kind="left", generation=number, step=fake.step)
        elif kind == "release":
            fake.generation, fake.step = 0, -1
            self.arrive(fake)
        elif kind in ("end", "stop"):
            if kind == "stop":
                self.finish(fake, "stopped")
            else:
                fake.stopped = True
                self.exits.append((self.now + 0.1, fake.number, message["code"]))

    def finish(self, fake: Fake, reason: str) -> None:
        """Its run ends well, and its process does soon after."""
        fake.finished = fake.stopped = True
        self.ended |= {fake.generation} if reason == "steps" else set()
        self.say(fake, kind="finished", generation=fake.generation, step=fake.step, reason=reason)
        self.exits.append((self.now + self.draw.uniform(0, 1), fake.number, 0))

    def trains(self) -> list[int]:
        """The workers of the generation in which all of its members are."""
        if self.job.current is None or self.job.next is not None:
            return []
        number, members = self.job.current.number, self.members[self.job.current.number]
        there = all(self.is_there(m) for m in members)
        there = there and all(self.fakes[m].generation == number for m in members)
        return members if there else []

    def settled(self) -> bool:
        """Whether as many train as were asked for, or as many as there are, and none may be started any more."""
        trains = len(self.trains())
        used_up = not self.job.vacant(self.now) and trains == len(self.fakes)
        return trains > 0 and (trains == self.job.wanted or used_up)


KINDS = ("kill", "stop", "close", "resize", "error", "hang", "busy", "leave")


@settings(max_examples=examples(150))
@given(
    st.integers(0, 2**32), st.integers(1, 4), st.integers(4, 6), st.integers(0, 1), st.sampled_from((60, 10**9)),
    st.booleans(), st.lists(st.tuples(st.integers(0, 60), st.sampled_from(KINDS), st.integers(0, 5)), max_size=8),
)  # fmt: skip
def test_after_any_events_a_job_trains_with_as_many_workers_as_were_asked_for(
    seed: int, workers: int, nodes: int, spares: int, steps: int, saves: bool, events: list[tuple[int, str, int]]
) -> None:
    """Or has ended, well or with an error; and nothing is waited for without end."""
    world = World(seed, workers, nodes, spares, steps, saves)
    for turns, event, number in events:
        for _ in range(turns):
            world.turn()
        if world.over is not None:
            break
        if event == "resize":
            try:
                world.do(world.job.resize(number, world.now))
            except WorkerError:
                assert number < 1 or number > nodes or world.job.call > 0
        elif number in world.fakes:
            fake = world.fakes[number]
            if event == "kill":
                world.kill(number, -9)
            elif event == "stop":
                fake.stopped = True
            elif event == "busy":
                fake.hung, fake.busy = world.now + 20, True
            elif event == "hang" and number in (trains := world.trains()) and len(trains) > 1:  # one alone: for ever
                fake.hung, fake.busy = 1e9, False
            elif fake.arrived and not fake.stopped:
                if event == "leave":
                    world.say(fake, kind="leaving", why="SIGTERM")
                elif event == "error":
                    world.say(fake, kind="error", text="ValueError: odd", step=fake.step)
                    world.kill(number, 1)
                    fake.stopped = True
                else:
                    fake.stopped = True
                    world.do(world.job.closed(number, "closed its connection", world.now))
    for _ in range(4000):
        if world.over is not None or (world.settled() and steps > 60):
            break
        world.turn()
    assert world.over is not None or world.settled(), [vars(f) for f in world.fakes.values()]
    if world.over is None:
        world.do(world.job.stop("the end", 130, world.now))
        for _ in range(2000):
            if world.over is not None:
                break
            world.turn()
        assert world.over is not None and world.over.code == 0
    else:
        assert (world.over.code != 0) == bool(world.over.why)
        assert world.over.code != 0 or steps == 60 or world.job.stopping


def test_more_workers_than_nodes_are_refused() -> None:
    world = World(1, 5, 4, 0)
    while world.over is None:
        world.turn()
    assert "5 workers cannot share 4 virtual nodes" in world.over.why
    world = World(1, 2, 4, 0)
    while len(world.trains()) < 2:
        world.turn()
    with pytest.raises(WorkerError, match="5 workers cannot share 4 virtual nodes"):
        world.job.resize(5, world.now)


def test_a_worker_that_differs_is_refused_and_not_started_again() -> None:
    """On arrival, or by those that prepare its first step with it; until somebody asks for workers again."""
    for late in (False, True):
        script = training(2)
        script.call("resize", 3)
        script.call("connected", 2, 102)
        facts = {} if late else {"script": "edited"}
        script.job.reference.facts = {"script": "as it was"}
        script.says(2, "arrived", call=0, facts=facts, handover="h2", virtual_nodes=8)
        if late:
            script.call("service", 2, "s2")
            script.says(0, "unprepared", generation=2, error="ProcessError: worker 2 does not do that", differs=2)
        assert [m["code"] for m in script.sent()[2] if m["kind"] == "end"] == [1]
        (why,) = [a.why for a in script.done if isinstance(a, Record) and a.event == "refused"]
        assert "worker 2" in why.lower() and "What to do:\n  - have all workers use the same script" in why
        script.call("exited", 2, 1)
        assert script.job.vacant(script.now + 10 * LIMITS.forget) == [] and script.job.current.number == 1
        assert Spawn(2) in script.call("resize", 3)


class Script:
    """Calls events one after another, each a second later, and tells what was sent to whom.

    Args:
      workers: how many are asked for; they arrive.
      checkpoint: the folder of checkpoints.
    """

    def __init__(self, workers: int, checkpoint: str | None = None, **more: Any) -> None:
        self.job, self.now, self.done = Generations(workers, limits=LIMITS, **more), 0.0, []
        self.checkpoint = checkpoint
        self.call("begin")
        for number in range(workers + more.get("spares", 0)):
            self.arrive(number)

    def call(self, event: str, *arguments: Any) -> list[Any]:
        self.now += 0.1
        self.done = getattr(self.job, event)(*arguments, self.now)
        return self.done

    def says(self, number: int, kind: str, **facts: Any) -> None:
        self.call("message", number, {"kind": kind, **facts})

    def arrive(self, number: int, call: int = 0) -> None:
        if call == 0:
            self.call("connected", number, 100 + number)
        known = {"call": call, "facts": {}, "handover": f"h{number}", "virtual_nodes": 8}
        self.says(number, "arrived", checkpoint=self.checkpoint, **known)

    def prepare(self, generation: int, *numbers: int) -> None:
        """A service is there, and workers prepare themselves."""
        self.call("service", generation, f"s{generation}")
        for number in numbers:
            self.says(number, "prepared", generation=generation, seconds=1.0)

    def switch(self, generation: int, step: int, *numbers: int) -> None:
        for number in numbers:
            self.says(number, "switched", generation=generation, step=step)

    def sent(self) -> dict[int, list[dict[str, Any]]]:
        """The last messages."""
        found: dict[int, list[dict[str, Any]]] = {}
        for action in self.done:
            if isinstance(action, Send):
                found.setdefault(action.worker, []).append(action.message)
        return found


def training(workers: int, **more: Any) -> Script:
    """A job of which the first generation trains; other arguments are those of `Script`."""
    script = Script(workers, **more)
    script.prepare(1, *range(workers))
    script.switch(1, 0, *range(workers))
    return script


def alone(step: int) -> Script:
    """Two workers trained until worker 1 was killed; worker 0 goes on from a step."""
    script = training(2)
    script.call("exited", 1, -9)
    script.says(0, "left", generation=1, step=step)
    script.prepare(2, 0)
    script.switch(2, step, 0)
    return script


def test_a_world_that_stands_ready_without_the_victim_is_used_at_once() -> None:
    """Worker 2, who is about to be left out, dies: the next generation needs no other preparation."""
    script = training(3)
    script.call("resize", 2)
    script.prepare(2, 0)
    script.call("exited", 2, -9)
    lost = [{"worker": 2, "rank": 2, "why": "was killed by SIGKILL"}]
    assert script.sent() == {n: [{"kind": "leave", "generation": 1, "lost": lost}] for n in (0, 1)}
    script.says(0, "left", generation=1, step=41)
    script.says(1, "left", generation=1, step=40)
    assert script.sent() == {}
    script.says(1, "prepared", generation=2, seconds=1.0)
    holders = [{"worker": 0, "handover": "h0"}]
    assert script.sent() == {n: [{"kind": "go", "generation": 2, "holders": holders, "step": 41}] for n in (0, 1)}


def test_a_loss_while_survivors_leave_begins_again_with_the_rest() -> None:
    """The one that held the highest step is lost, too: the next one counts."""
    script = training(3)
    script.call("exited", 0, -9)
    script.says(1, "left", generation=1, step=41)
    script.call("exited", 1, -9)
    script.says(2, "left", generation=1, step=40)
    script.prepare(2, 2)
    (go,) = script.sent()[2]
    assert go["step"] == 40 and go["holders"] == [{"worker": 2, "handover": "h2"}]


@pytest.mark.parametrize("rejoin", [False, True])
def test_survivors_train_on_while_a_spare_prepares_to_take_the_place_of_a_lost_worker(rejoin: bool) -> None:
    """In one change if each of them restarts the workers."""
    script = training(2, spares=1, rejoin=rejoin)
    script.call("exited", 0, -9)
    script.says(1, "left", generation=1, step=7)
    proposed = [[1], [1, 2]][rejoin:]
    for generation, members in enumerate(proposed, 2):
        script.call("service", generation, f"s{generation}")
        assert [m["worker"] for m in script.sent()[1][0]["members"]] == members
        for number in members:
            script.says(number, "prepared", generation=generation, seconds=0.0)
        script.switch(generation, 7, *members)
    assert script.job.current.number == 1 + len(proposed)


def test_a_spare_that_stood_by_does_not_wait_for_others_that_start() -> None:
    script = training(3, spares=1)
    script.call("exited", 0, -9)
    script.call("exited", 1, -9)  # both start again, and take their time
    script.says(2, "left", generation=1, step=7)
    script.prepare(2, 2)
    script.switch(2, 7, 2)
    script.call("service", 3, "s3")
    assert [m["worker"] for m in script.sent()[2][0]["members"]] == [2, 3]


def test_a_newcomer_without_a_state_is_not_waited_for_after_a_loss() -> None:
    """It was about to join when another died: who has the state goes on alone."""
    script = training(3)
    script.call("exited", 2, -9)
    for number in (0, 1):
        script.says(number, "left", generation=1, step=7)
    script.prepare(2, 0, 1)
    script.switch(2, 7, 0, 1)
    script.arrive(2)
    script.prepare(3, 0, 1, 2)
    script.call("exited", 0, -9)
    script.says(1, "left", generation=3, step=20)
    script.says(2, "left", generation=3, step=-1)
    script.call("service", 4, "s4")
    assert [m["worker"] for m in script.sent()[1][0]["members"]] == [1]


def test_the_last_worker_is_not_lost_because_it_is_stopped() -> None:
    """Nobody else may have the state; it has as long to leave its generation as any other."""
    script = training(2)
    assert Kill(0) in script.call("stopped", 0)
    script.call("exited", 0, -9)
    assert Kill(1) not in script.call("stopped", 1), "nor while another one starts"


def test_a_state_that_only_a_worker_left_out_has_is_not_lost() -> None:
    """Fewer workers are asked for while the others leave; the one that is to go on alone dies as it begins."""
    script = training(3)
    script.call("exited", 2, -9)
    script.call("resize", 1)
    for number in (0, 1):
        script.says(number, "left", generation=1, step=40)
    script.prepare(2, 0)
    script.call("exited", 0, -9)
    assert script.job.over is None and script.sent()[1][0]["kind"] == "leave"
    script.says(1, "left", generation=2, step=40)
    script.prepare(3, 1)
    assert script.sent()[1][-1]["step"] == 40


def test_steps_that_are_all_made_again_are_told() -> None:
    """The only worker that has a state dies before a newcomer has it."""
    script = alone(7)
    script.arrive(1)
    script.prepare(3, 0, 1)
    script.call("exited", 0, -9)
    script.says(1, "left", generation=3, step=-1)
    script.prepare(4, 1)
    assert "all repeated" in [action.event for action in script.done if isinstance(action, Record)]


def test_a_generation_without_room_beside_the_one_that_trains_is_made_after_it() -> None:
    """Once; the one after that is made beside it again."""
    script, error = Script(3), "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    script.prepare(1, 0, 1, 2)
    script.switch(1, 0, 0, 1, 2)
    rejoins = []
    for generation, workers in ((2, 2), (3, 2), (4, 1)):
        script.call("resize", workers)
        script.call("service", generation, f"s{generation}")
        rejoins.append(script.sent()[0][0]["rejoin"])
        if generation == 2:
            script.says(0, "unprepared", generation=2, error=error, differs=None)
            continue
        for number in range(workers):
            script.says(number, "prepared", generation=generation, seconds=0.0)
        script.switch(generation, 9, *range(workers))
    assert rejoins == [False, True, False] and script.job.current.number == 4


def test_a_worker_that_is_told_to_leave_is_left_out_without_a_loss() -> None:
    """It trains until the others have switched, ends with code 0, and another process takes its number."""
    script = training(3)
    script.says(1, "leaving", why="SIGTERM")
    script.prepare(2, 0)
    assert Spawn(1) not in script.done
    script.says(2, "prepared", generation=2, seconds=1.0)
    go = script.sent()
    assert sorted(go) == [0, 1, 2] and go[1][0]["step"] is None
    assert [holder["worker"] for holder in go[0][0]["holders"]] == [0, 1, 2]
    script.switch(2, 9, 0, 2)
    assert [(m["kind"], m["code"]) for m in script.sent()[1]] == [("end", 0)]
    script.call("exited", 1, 0)
    assert Spawn(1) in script.done and not script.job.losses[1]


def test_the_run_stops_when_all_workers_are_told_to_leave() -> None:
    """As those of a host that goes down: with a checkpoint, by those that would be left last."""
    script = training(2)
    script.says(0, "leaving", why="SIGTERM")
    script.says(1, "leaving", why="SIGTERM")
    assert {n: m[-1]["kind"] for n, m in script.sent().items()} == {0: "stop", 1: "stop"}
    for number in (0, 1):
        script.says(number, "finished", generation=1, step=10, reason="signal SIGTERM")
    script.call("exited", 0, 75)
    script.call("exited", 1, 75)
    assert script.job.over == End(75, "")


def test_a_script_may_run_twice() -> None:
    """Its workers come to the second run; the exit code is that of rank 0."""
    script = training(2)
    for number in (0, 1):
        script.says(number, "finished", generation=1, step=10, reason="")
    script.arrive(1, call=1)
    script.arrive(0, call=1)
    assert [type(action) for action in script.done].count(StartService) == 1
    script.prepare(2, 0, 1)
    assert script.sent()[0][0]["step"] == -1
    script.switch(2, 0, 0, 1)
    for number in (0, 1):
        script.says(number, "finished", generation=2, step=10, reason="")
    script.call("exited", 1, 0)
    script.call("exited", 0, 5)
    assert script.job.over == End(5, "")


def test_who_is_silent_between_two_runs_is_lost_to_those_that_wait_in_the_second() -> None:
    """Not while nobody waits: the rest of a script may take long."""
    script = training(2)
    for number in (0, 1):
        script.says(number, "finished", generation=1, step=10, reason="")
    script.now += 2 * LIMITS.silence
    assert Kill(0) not in script.call("tick")
    script.arrive(1, call=1)
    assert Kill(0) in script.done
    script.call("exited", 0, -9)
    script.prepare(2, 1)
    assert script.sent()[1][0]["kind"] == "go"


def test_a_run_whose_last_checkpoint_is_not_reported_fails() -> None:
    """Rank 0, which saves, is killed while the others have finished; the rest of their scripts is run."""
    script = training(2, checkpoint="runs/7")
    script.says(1, "finished", generation=1, step=10, reason="")
    script.call("exited", 0, -9)
    assert script.job.over is None
    script.call("exited", 1, 0)
    assert script.job.over.code == 1 and "worker 0, which saves in runs/7, was killed" in script.job.over.why


def test_a_service_ends_when_nobody_is_connected_to_it() -> None:
    """That is when each worker has said so, or its process has ended; never while a generation needs it."""
    script = training(3)
    script.call("resize", 2)
    script.prepare(2, 0, 1)
    script.switch(2, 5, 0, 1)
    script.says(0, "disconnected", service="s1")
    script.says(1, "disconnected", service="s1")
    assert EndService("s1") not in script.done
    script.call("exited", 2, 0)
    assert EndService("s1") in script.done and EndService("s2") not in script.done


def test_a_loss_within_a_switch_breaks_both_generations() -> None:
    """Each world is told by its own ranks; an answer to an earlier order does not count."""
    script = training(3)
    script.call("resize", 2)
    script.prepare(2, 0, 1)
    script.switch(2, 9, 0)
    script.call("exited", 2, -9)
    said = [(m["generation"], m["lost"][0]["rank"]) for m in script.sent()[1]]
    assert said == [(1, 2), (2, -1)]
    script.says(0, "left", generation=0, step=50)
    script.says(0, "left", generation=2, step=9)
    script.says(1, "left", generation=1, step=8)
    script.prepare(3, 0, 1)
    assert script.sent()[1][0]["step"] == 9


def progress(script: Script, number: int, *, busy: bool) -> None:
    script.says(number, "progress", step=5, doing="the callbacks of step 5", nodes=1, metrics={}, busy=busy)


def test_a_survivor_in_a_callback_has_longer_to_leave() -> None:
    """Otherwise a loss within a long callback of all workers would be the loss of all."""
    script = training(3)
    script.job.limits = dataclasses.replace(LIMITS, silence=1000)
    progress(script, 0, busy=True)
    progress(script, 1, busy=True)
    script.call("exited", 2, -9)
    script.now += LIMITS.busy - LIMITS.leave - 1
    script.call("tick")
    assert Kill(0) not in script.done and Kill(1) not in script.done
    progress(script, 1, busy=False)
    assert Kill(1) not in script.done  # it needs a moment to see the loss
    script.now += LIMITS.leave  # but it hangs
    progress(script, 0, busy=True)
    assert Kill(1) in script.done and "(the callbacks of step 5)" in script.job.workers[1].why
    script.says(0, "left", generation=1, step=5)
    assert StartService(2) in script.done


def test_all_leave_when_one_waits_in_vain_for_another_that_lives() -> None:
    """The one that does not leave is lost; where all do, this is done some times, and then the error counts."""
    script = training(3)
    for generation in range(1, 1 + LIMITS.restarts):
        script.says(0, "lost_peer", generation=generation, text="waited", vain=True)
        assert script.sent() == {}
        script.now += LIMITS.vain
        script.call("tick")
        assert {number: m["kind"] for number, (m,) in script.sent().items()} == {0: "leave", 1: "leave", 2: "leave"}
        for number in range(3):
            script.says(number, "left", generation=generation, step=5)
        script.prepare(generation + 1, 0, 1, 2)
        script.switch(generation + 1, 5, 0, 1, 2)
    script.says(0, "lost_peer", generation=generation + 1, text="waited", vain=True)
    script.now += LIMITS.vain
    script.call("tick")
    assert script.sent() == {}


def test_one_that_waits_in_vain_in_a_switch_has_both_generations_left() -> None:
    """A joiner cannot fetch the state from a worker that lives."""
    script = training(2)
    script.call("resize", 3)
    script.arrive(2)
    script.prepare(2, 0, 1, 2)
    script.says(2, "lost_peer", generation=2, text="the state cannot be fetched", vain=True)
    script.now += LIMITS.vain
    script.call("tick")
    assert {n: [m["generation"] for m in messages] for n, messages in script.sent().items()} == {
        number: [1, 2] for number in range(3)
    }


def test_a_worker_that_the_kernel_kills_every_time_is_not_started_for_ever() -> None:
    """As where its memory does not suffice; the other one trains."""
    script = alone(5)
    started = 0
    while 1 in script.job.workers:
        started += 1
        script.call("exited", 1, -9)
    assert started == LIMITS.restarts
    told = [each for each in script.done if isinstance(each, Record) and each.event == "not replaced"]
    assert [each.worker for each in told] == [1]
    assert script.job.over is None and [w.number for w in script.job.current.members] == [0]


def trained(workers: int) -> Script:
    """Workers that train together."""
    script = training(workers)
    return script


def test_a_worker_that_does_not_end_after_the_run_is_ended_some_time_after_the_first() -> None:
    """At once if it is stopped; and what it says of its step then does not count."""
    script = trained(3)
    for number in range(3):
        script.says(number, "finished", step=20, reason="")
    script.says(1, "progress", generation=1, step=19, doing="rests", nodes=0, metrics={})
    assert script.job.status()["step"] == 20
    script.call("stopped", 1)
    script.now += LIMITS.busy + 1
    script.call("tick")
    assert not [action for action in script.done if isinstance(action, Kill)], "the first may take its time"
    script.call("exited", 0, 0)
    script.call("stopped", 1)
    assert [action for action in script.done if isinstance(action, Kill)] == [Kill(1)]
    script.call("exited", 1, -9)
    script.now += LIMITS.busy + 1
    script.call("tick")
    assert [action for action in script.done if isinstance(action, Kill)] == [Kill(2)]
    script.call("exited", 2, -9)
    assert script.job.over == End(0, "")


def test_fewer_virtual_nodes_than_workers_are_enough_where_fewer_may_be() -> None:
    for least, ends in ((None, True), (3, True), (2, False)):
        job = Generations(4, limits=LIMITS)
        job.least = least
        job.begin(0.0)
        job.connected(0, 100, 1.0)
        said = {"facts": {}, "handover": "h", "virtual_nodes": 2, "checkpoint": None, "call": 0, "steps": 9}
        job.message(0, {"kind": "arrived", **said}, 2.0)
        assert (job.over is not None) == ends
        if not ends:
            status = job.status()
            assert (status["wanted"], status["virtual_nodes"], status["steps"]) == (2, 2, 9)


def test_a_checkpoint_that_one_worker_refuses_ends_the_job() -> None:
    script = trained(2)
    script.says(0, "error", text="checkpoint 40 was made with other batches", step=0, of_all=True)
    assert script.job.over == End(1, "checkpoint 40 was made with other batches")


def test_a_supervisor_that_was_stopped_does_not_take_its_workers_for_silent() -> None:
    script = trained(2)
    script.now += 100
    script.job.slept(100)
    script.call("tick")
    assert not [action for action in script.done if isinstance(action, Kill)]
    script.now += LIMITS.silence + 1
    script.call("tick")
    assert [action for action in script.done if isinstance(action, Kill)]
