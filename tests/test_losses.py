"""Losses at the worst moments, forced: something happens to a worker at a point of vnode's code (`kill_points`).

Knows jobs, names of vnode's functions, and events. Must not know moments by the clock. Each job comes to its end with
the bits of one process, and its events tell what happened.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import jobs
from tests.programs.chaos_of_workers import ENVIRONMENT, ROOT, reference, saved, used
from vnode.errors import WorkerError
from vnode.workers.launch import Job, launch
from vnode.workers.supervisor import KEEP_ALL

pytestmark = pytest.mark.quickly

SCRIPT = ROOT / "tests" / "programs" / "kill_points.py"
DEADLINE = 300.0
until = functools.partial(jobs.until, seconds=DEADLINE)
STEPS = 400
EVERY = 10
"""Steps between two checkpoints."""

COMPILE = "vnode.step.executor:Executor.compile_for"
VOTE = "vnode.elastic.process_agreement:Agreement.vote"
RENAME = "os:rename"
RESTORE = "vnode.elastic.checkpoints:Checkpoints.restore"
TELL = "vnode.elastic.driver:Driver.report_metrics"
MANIFEST = "vnode.elastic.state_handover:manifest_of"
SEND_BOX = "vnode.elastic.state_handover:send_box"
ARRIVE = "vnode.elastic.worker_loop:WorkerDriver.arrive"
ENTER = "vnode.elastic.worker_loop:WorkerDriver.enter"
ADVANCE = "vnode.elastic.worker_loop:WorkerDriver.advance"
LAST_WHOLE = "vnode.elastic.worker_loop:WorkerDriver.last_held_state"
SAY_LEFT = "vnode.elastic.worker_loop:WorkerDriver.say_left"
BEGIN_IN = "vnode.elastic.worker_loop:WorkerDriver.begin_in"
TAKE_OVER = "vnode.elastic.worker_loop:WorkerDriver.take_over"
SWITCH = "vnode.elastic.worker_loop:WorkerDriver.switch"


@dataclasses.dataclass(frozen=True)
class Case:
    """The events of the workers of one job.

    Attributes:
      name: for people.
      workers: how many begin.
      points: of `kill_points`.
      told: how events begin that must be there, in this order: event, worker, why.
      resize: the number of workers that is asked for after the first step, if not 0.
      saves: whether there is a folder of checkpoints.
      first: steps of a job before this one, from whose checkpoint this one goes on.
      asked: more for the script.
      launch: more for `launch`.
    """

    name: str
    workers: int
    points: list[dict[str, Any]]
    told: list[str]
    resize: int = 0
    saves: bool = False
    first: int = 0
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)
    launch: dict[str, Any] = dataclasses.field(default_factory=dict)


def point(worker: int, at: str, does: str = "kill", **when: int) -> dict[str, Any]:
    return {"worker": str(worker), "at": at, "does": does, **when}


def killed(worker: int) -> list[dict[str, Any]]:
    """A worker dies when all have computed the state after 16 steps, and none a further one."""
    return [point(worker, ADVANCE, "settle", step=15), point(worker, ADVANCE, step=15)]


CASES = [
    Case("first compile", 2, [point(1, COMPILE)], ["lost 1 was killed", "cancel None generation 1"]),
    Case("vote", 2, [point(1, VOTE, step=12)], ["lost 1 was killed", "left None worker 0: step 1"]),
    Case("save", 2, [point(0, RENAME, step=20)], ["lost 0 was killed", "left None worker 1: step"], saves=True),
    Case("restore", 2, [point(0, RESTORE)], ["lost 0 was killed", "left None worker 1: step -1"], saves=True, first=25),
    Case(
        "survivors disagree by a step",
        3,
        [point(1, LAST_WHOLE, "forget"), *killed(2)],
        ["lost 2 was killed", "left None worker 0: step 16, worker 1: step 15", "go None generation 2 from step 16"],
    ),
    Case(
        "second loss before its word",
        3,
        [point(1, SAY_LEFT), *killed(2)],
        ["lost 2 was killed", "lost 1 was killed", "left None worker 0: step 16"],
    ),
    Case(
        "second loss after the order to go on",
        3,
        [point(1, BEGIN_IN, step=5), *killed(2)],
        ["lost 2 was killed", "go None generation 2", "lost 1 was killed", "left None worker 0: step 16"],
    ),
    Case(
        "second loss in the handover of the state",
        3,
        [point(0, LAST_WHOLE, "forget"), point(1, MANIFEST, step=5), *killed(2)],
        ["lost 2 was killed", "left None worker 0: step 15, worker 1: step 16", "left None worker 0: step 15"],
    ),
    Case("old member in a resize", 2, [point(0, SWITCH)], ["go None generation 2", "lost 0 was killed"], resize=3),
    Case("joiner in a resize", 2, [point(2, TAKE_OVER)], ["go None generation 2", "lost 2 was killed"], resize=3),
    Case("holder in a resize", 2, [point(1, SEND_BOX)], ["go None generation 2", "lost 1 was killed"], resize=3),
    Case("all but one", 4, [point(3, ADVANCE, "kill 0 1 2", step=15)], ["left None worker 3: step"]),
    Case(
        "a survivor hangs, and a spare is there",
        3,
        [
            point(1, ADVANCE, "hang", step=15),
            point(3, ARRIVE, "wait 0"),
            point(3, ENTER, "mark"),
            point(2, ADVANCE, "wait 2", step=15),
            point(2, ADVANCE, step=15),
        ],
        ["lost 2 was killed", "lost 1 did not leave generation 1 (step 15)", "prepare None generation 2: workers 0 3"],
        launch={"spares": 1},
    ),
    Case(
        "a worker hangs, and nobody is lost",
        2,
        [point(1, ADVANCE, "hang", step=15)],
        ["lost peer 0 ProcessError", "lost 1 did not leave generation 1 (step 15)", "left None worker 0"],
        launch={"env": {"VNODE_PROCESS_TIMEOUT": "5"}},
    ),
    Case(
        "a loss while the others are in a callback",
        3,
        [point(0, TELL, "sleep 7", step=15), point(1, TELL, "sleep 7", step=15), point(2, TELL, step=15)],
        ["lost 2 was killed", "left None worker 0: step 1"],
    ),
    Case(
        "a worker whose threads all stand",
        2,
        [point(1, ADVANCE, "freeze", step=15)],
        ["lost 1 has given no sign of life for 3 s"],
        launch={"silence": 3},
    ),
    Case("a closed connection", 2, [point(1, ADVANCE, "close", step=15)], ["lost 1 closed its connection"]),
    Case(
        "a half-open connection",
        2,
        [point(1, ADVANCE, "mute", step=15)],
        ["lost 1 has given no sign of life for 3 s"],
        launch={"silence": 3},
    ),
    Case(
        "a connection half-open one way",
        2,
        [point(1, ADVANCE, "silence", step=15)],
        ["lost 1 closed its connection", "left None worker 0"],
        asked={"silence": 3},
    ),
    Case(
        "no memory left on a device",
        2,
        [point(1, ADVANCE, "memory", step=15)],
        ["error 1 JaxRuntimeError: RESOURCE_EXHAUSTED", "lost 1 failed: JaxRuntimeError: RESOURCE_EXHAUSTED"],
    ),
    Case("no memory left", 2, [point(1, ADVANCE, "allocate", step=15)], ["lost 1 failed: MemoryError"]),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of compiled programs."""
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True)
def _own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: str) -> None:
    """Jobs of tests are not those of the user; they have their programs from one another."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    for name, value in {"JAX_COMPILATION_CACHE_DIR": programs, **KEEP_ALL}.items():
        monkeypatch.setenv(name, value)


@functools.cache
def expected(saves: bool) -> dict[str, Any]:
    """The result of one process."""
    with tempfile.TemporaryDirectory() as name:
        return reference({"model": "plain", "steps": STEPS, **({"folder": name} if saves else {})}, Path(name))


@dataclasses.dataclass
class Run:
    """One job, and where its script leaves what it has."""

    place: Path
    asked: dict[str, Any]

    @classmethod
    def from_case(cls, case: Case, place: Path) -> Run:
        for name in ("marks", "out"):
            (place / name).mkdir()
        (place / "slow").touch()
        asked = {"model": "plain", "steps": STEPS, "slow": str(place / "slow"), "out": str(place / "out")}
        if case.saves:
            asked |= {"folder": str(place / "checkpoints"), "every": EVERY}
        return cls(place, {**asked, **case.asked, "marks": str(place / "marks"), "points": case.points})

    def launched(self, workers: int, *, env: dict[str, str] | None = None, asked: Any = None, **more: Any) -> Job:
        arguments = [json.dumps(self.asked | (asked or {}))]
        return launch(str(SCRIPT), workers, arguments=arguments, env={**ENVIRONMENT, **(env or {})}, **more)

    def ends(self, job: Job) -> None:
        """The job comes to its end, at full speed, with the bits of one process."""
        (self.place / "slow").unlink()
        assert job.wait(DEADLINE) == 0
        saves = "folder" in self.asked
        found = [json.loads(path.read_text()) for path in (self.place / "out").glob("*.json")]
        assert found
        for each in found:
            assert (each["step"], each["hash"]) == (STEPS, expected(saves)["hash"])
            assert each["used"] == used(STEPS)
            assert dict(each["losses"]).items() <= dict(expected(saves)["losses"]).items()
        if saves:
            assert saved("plain", self.asked["folder"]) == expected(saves)["saved"]


def story(job: Job) -> Iterator[str]:
    """The events, in short."""
    return (f"{each['event']} {each['worker']} {each['why']}" for each in job.events)


def trains_after_loss(job: Job) -> bool:
    """Whether workers train after the last loss."""
    told = [each["event"] for each in job.events]
    return "lost" in told and "trains" in told[len(told) - told[::-1].index("lost") :]


def play(case: Case, place: Path) -> None:
    """Runs the job of a case."""
    run = Run.from_case(case, place)
    if case.first:
        asked = {"steps": case.first, "points": [], "out": str(place / "marks")}
        assert run.launched(1, asked=asked).wait(DEADLINE) == 0
    job = run.launched(case.workers, **case.launch)
    try:
        if case.resize:
            until(job, lambda: job.step, "the first step")
            job.resize(case.resize)
        marks = [place / "marks" / str(i) for i in range(len(case.points))]
        until(job, lambda: all(mark.exists() for mark in marks), "all points are come to")
        until(job, lambda: trains_after_loss(job), "to train after the last loss")
        run.ends(job)
    finally:
        if job.process.poll() is None:
            job.kill()
            job.process.wait(DEADLINE)
    told = story(job)  # is used up: each is looked for behind the one before
    for text in case.told:
        assert any(each.startswith(text) for each in told), f"{text!r}: {list(story(job))}"


@pytest.mark.sampled(0, thorough=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loss_at_the_worst_moment(case: Case, tmp_path: Path) -> None:
    play(case, tmp_path)


@pytest.mark.thorough
def test_workers_save_when_the_supervisor_dies(tmp_path: Path) -> None:
    """All of them see it, and agree on a step: the run goes on from there, though no checkpoint was due."""
    run = Run.from_case(Case("", 2, [point(1, ADVANCE, "kill supervisor", step=15)], [], saves=True), tmp_path)
    run.asked["every"] = STEPS
    with pytest.raises(WorkerError, match="has ended with exit code -9"):
        run.launched(2).wait(DEADLINE)
    job = run.launched(2)
    until(job, lambda: any(each["event"] == "trains" for each in job.events), "to train again")
    assert next(each["step"] for each in job.events if each["event"] == "trains") >= 15
    run.ends(job)
