"""The decisions of a scheduler, from records alone: the book, measured speeds, shares, the outcome of a job.

Knows the pure parts of the scheduler. Must not start processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vnode.cluster
from tests.budget import examples
from vnode.cluster.live.estimates import step_times
from vnode.cluster.live.event_forms import Forms
from vnode.cluster.live.event_log import Record
from vnode.cluster.live.history import result_of, simulated
from vnode.cluster.live.job_book import Book, least
from vnode.cluster.live.job_outcome import outcome
from vnode.cluster.live.policy_shares import decide, policy_of, reasons, replay
from vnode.cluster.live.submission import Submission
from vnode.cluster.policies import POLICIES
from vnode.cluster.simulator import Decision
from vnode.errors import ClusterError

NAMES = [*POLICIES, "guarantee"]


def submission(**options) -> Submission:
    return Submission(**{"command": ["x"], "env": {}, "directory": "/", **options})


def began(count: int, policy: str = "goodput", **options) -> Record:
    return Record(0.0, "began", None, {"devices": [str(i) for i in range(count)], "policy": policy, "options": options})


class World:
    """Makes records as a scheduler would: decides, grants what is free, and lets jobs train, shrink and end."""

    def __init__(self, devices: int, policy: str, **options) -> None:
        self.records: list[Record] = []
        self.book, self.time, self.forms = Book(), 0.0, Forms()
        self.add(began(devices, policy, **options))
        self.name, self.options = policy, options

    def add(self, record: Record) -> None:
        record = Record(record.time, record.kind, record.job, json.loads(json.dumps(record.facts)))
        self.forms.check(record)
        self.records.append(record)
        self.book.add(record)

    def note(self, job: str | None, kind: str, **facts) -> None:
        self.add(Record(self.time, kind, job, facts))

    def decide(self) -> None:
        decided = decide(self.book, policy_of(self.name, self.options), self.time)
        why = reasons(self.book, decided.shares, ["something happened"])
        self.note(None, "decided", shares=decided.shares, again=decided.again, why=why)

    def carry_out(self) -> None:
        for job in self.book.active():
            if job.share < len(job.devices) and not job.keeps:
                self.note(job.id, "holds", devices=job.devices[: job.share])
            if job.devices and not job.share and not job.keeps:
                self.note(job.id, "stopping", why="others")
            if job.alive and not job.devices:
                self.note(job.id, "pending", why="it made room", step=job.step, counts=False)
        for job in self.book.active():
            more = job.share - len(job.devices)
            if more > 0 and len(self.book.free()) >= more:
                self.note(job.id, "granted", devices=self.book.free()[:more])
                if not job.alive:
                    self.note(job.id, "starting", attempt=job.attempt + 1)
            if job.devices:
                self.note(job.id, "trains", workers=len(job.devices), step=job.step)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "rigid", "end", "cancel", "measure", "learn", "priority", "wait"]), st.integers(0, 9)
    ),
    max_size=25,
)


@settings(max_examples=examples(150), deadline=None)
@given(EVENTS, st.sampled_from(NAMES), st.integers(1, 7), st.sampled_from([None, [1, 2, 4]]))
def test_whatever_happens(events: list[tuple[str, int]], policy: str, devices: int, counts: list[int] | None) -> None:
    """No device has two jobs, shares fit, rigid jobs keep theirs, the log gives the same book and decisions again."""
    world = World(devices, policy, **({} if counts is None else {"counts": counts}))
    for what, number in events:
        world.time += 1 + number
        active = world.book.active()
        job = active[number % len(active)] if active else None
        if what in ("submit", "rigid"):
            low = min(1 + number % 3, devices) if what == "rigid" else 1
            asked = submission(workers=(low, low if what == "rigid" else 1 + number), rigid=what == "rigid")
            world.note(world.book.next_id(), "submitted", **asked.facts())
        elif job is not None and what == "end":
            world.note(job.id, "ended", state="succeeded", code=0, why="", step=5)
        elif job is not None and what == "cancel":
            world.note(job.id, "cancel")
            world.note(job.id, "ended", state="cancelled", code=None, why="", step=5)
        elif job is not None and what == "measure" and not job.submission.rigid:
            world.note(job.id, "measured", step=job.step + number, seconds={str(1 + number % 4): 0.1 + number})
        elif job is not None and what == "learn" and not job.submission.rigid:
            world.note(job.id, "learned", nodes=1 + number % 4, steps=20 + number)
        elif job is not None and what == "priority":
            world.note(job.id, "priority", priority=1.0 + number)
        world.decide()
        world.carry_out()
        book = world.book
        held = [name for job in book.active() for name in job.devices]
        assert len(held) == len(set(held)) and set(held) <= set(book.devices)
        assert sum(job.share for job in book.active()) <= devices
        for job in book.active():
            low, high = job.submission.range
            assert job.share == 0 or low <= job.share <= high
            assert counts is None or job.submission.rigid or job.share in (0, *counts)
            assert not job.keeps or len(job.devices) == low
        runnable = [job for job in book.active() if least(book, job) <= devices]
        assert not runnable or any(job.share for job in book.active()), "somebody has devices"
    again = Book(world.records)
    assert [vars(job) for job in again.jobs.values()] == [vars(job) for job in world.book.jobs.values()]
    for record, decided in replay(world.records):
        assert dict(decided.shares) == dict(record.facts["shares"]) and decided.again == record.facts["again"]
    if world.book.jobs:
        result = result_of(world.records)
        assert result.devices == devices and len(result.jobs) == len(world.book.jobs)


@pytest.mark.parametrize("policy", NAMES)
def test_a_live_table_is_decided_as_a_simulated_one(policy: str) -> None:
    """Jobs that arrive at once with declared speeds: the first shares are those of the simulator."""
    world = World(8, policy)
    asked = [(1, 4, 1, 0.2, 0.8), (1, 8, 5, 0.1, 2.0), (1, 2, 10, 0.5, 0.5), (1, 8, 1, 0.0, 1.0)]
    for low, high, priority, fixed, rest in asked:
        times = {n: fixed + rest / n for n in range(1, high + 1)}
        job = submission(workers=(low, high), priority=priority, step_seconds=times, steps=100)
        world.note(world.book.next_id(), "submitted", **job.facts())
    world.decide()
    jobs = [simulated(job, 0.0, 8) for job in world.book.jobs.values()]
    result = vnode.cluster.simulate(jobs, 8, policy)
    first = {event.job: event.devices for event in reversed(result.events) if event.kind == "share" and not event.time}
    assert {job.number: job.share for job in world.book.active() if job.share} == first


def test_a_policy_that_fails_or_gives_too_much_is_said() -> None:
    world = World(4, "goodput")
    for _ in range(2):
        world.note(world.book.next_id(), "submitted", **submission(workers=(1, 4)).facts())
    bad = {
        "it gives": lambda now, jobs, devices: [4, 4],
        "ZeroDivisionError": lambda now, jobs, devices: 1 // 0,
        "whole number": lambda now, jobs, devices: [0.5, 1],
        "jobs that do not exist": lambda now, jobs, devices: {"7": 1},
        "NaN|nan|whole": lambda now, jobs, devices: [float("nan"), 1],
        "'soon', which is no time": lambda now, jobs, devices: Decision([1, 1], again="soon"),  # type: ignore[arg-type]
        "nan, which is no time": lambda now, jobs, devices: Decision([1, 1], again=float("nan")),
    }
    for words, policy in bad.items():
        with pytest.raises(ClusterError, match=f"the policy fails: (.|\n)*({words})"):
            decide(world.book, policy, 1.0)
    never = decide(world.book, lambda now, jobs, devices: Decision([0, 0], again=float("inf")), 1.0)
    assert never.again is None
    with pytest.raises(ClusterError, match="no policy 'gavel_max_min'"):
        policy_of("gavel_max_min", {})


@given(
    st.dictionaries(st.integers(1, 8), st.floats(0.01, 10), max_size=4),
    st.dictionaries(st.integers(1, 8), st.floats(0.01, 10), max_size=3),
    st.integers(1, 8),
)
def test_measured_times_are_kept_and_the_rest_has_the_declared_shape(measured, declared, most: int) -> None:
    times = step_times(measured, declared, most)
    assert list(times) == list(range(1, most + 1)) and all(0 < s < 1e9 for s in times.values())
    known = {n: s for n, s in measured.items() if n <= most}
    assert all(times[n] == pytest.approx(s) for n, s in known.items())
    if known and declared:
        shape = step_times({}, declared, most)
        last = max(known)
        ratios = [times[n] / shape[n] for n in range(last, most + 1)]
        assert np.allclose(ratios, known[last] / shape[last])


DONE, STOPPED = {"event": "finished", "why": ""}, {"event": "finished", "why": "signal SIGTERM"}
STOP = {"event": "stop", "why": "SIGTERM"}


@pytest.mark.parametrize(
    ("facts", "options", "kind", "state"),
    [
        ({"pid": 1, "code": 0, "events": [DONE]}, {}, "ended", "succeeded"),
        ({"pid": 1, "code": 3, "events": [DONE]}, {}, "ended", "failed"),
        ({"pid": 1, "code": 0, "events": [STOP, STOPPED]}, {}, "pending", "pending"),
        ({"pid": 1, "code": 0, "events": [STOP, STOPPED]}, {"stopping": True}, "pending", "pending"),
        ({"pid": 1, "code": 143, "events": [STOP]}, {"stopping": True}, "pending", "pending"),
        ({"pid": 1, "code": 0, "events": [STOP, DONE]}, {"stopping": True}, "ended", "succeeded"),
        ({"pid": 1, "code": 0, "events": [DONE, STOP, STOPPED]}, {}, "pending", "pending"),
        ({"pid": 1, "code": 143, "events": [DONE, STOP]}, {"stopping": True}, "pending", "pending"),
        ({"pid": 1, "code": 137, "events": [DONE]}, {}, "pending", "pending"),
        ({"pid": 1, "code": 0, "events": [STOP, STOPPED]}, {"cancel": True}, "ended", "cancelled"),
        ({"pid": 1, "code": 0, "events": [DONE]}, {"cancel": True}, "ended", "succeeded"),
        ({"pid": 1}, {}, "pending", "pending"),
        ({"pid": 1}, {"interrupted": [1.0, 2.0, 3.0]}, "ended", "failed"),
        ({"pid": 1}, {"interrupted": [1.0, 2.0, 3.0], "stopping": True}, "pending", "pending"),
        ({"pid": 1}, {"cancel": True}, "ended", "cancelled"),
        ({"pid": 1, "children": []}, {"rigid": True}, "ended", "failed"),
        ({"pid": 1}, {"rigid": True}, "pending", "pending"),
        ({"blameless": True}, {"interrupted": [1.0, 2.0, 3.0]}, "pending", "pending"),
        ({}, {"rigid": True}, "pending", "pending"),
        ({"pid": 1, "code": 0, "events": []}, {"rigid": True}, "ended", "succeeded"),
        ({"pid": 1, "code": 143, "events": [STOP]}, {"rigid": True}, "ended", "failed"),
        ({"refused": "a supervisor already runs"}, {}, "ended", "failed"),
    ],
)
def test_what_becomes_of_a_job(tmp_path: Path, facts, options, kind: str, state: str) -> None:
    book = Book([began(2), Record(0.5, "submitted", "1", submission(rigid=options.pop("rigid", False)).facts())])
    job = book.jobs["1"]
    for name, value in options.items():
        setattr(job, name, value)
    (tmp_path / "worker-0.err").write_text(
        "before\nTraceback (most recent call last):\n  File\nValueError: oops\nafter\n"
    )
    record = outcome(job, facts, tmp_path, 10.0)
    assert record.kind == kind and record.facts.get("state", "pending") == state
    if state == "failed" and facts.get("code") == 3:
        assert record.facts["why"].endswith("ValueError: oops") and record.facts["code"] == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"command": []}, "its command is"),
        ({"command": "python train.py"}, "its command is"),
        ({"workers": (0, 4)}, "workers are 0:4"),
        ({"workers": (4, 1)}, "workers are 4:1"),
        ({"workers": (1, 4), "rigid": True}, "a rigid job keeps its devices"),
        ({"priority": float("nan")}, "its priority is nan"),
        ({"priority": 0}, "its priority is 0"),
        ({"priority": 1e308}, "its priority is 1e"),
        ({"name": 7}, "name is 7"),
        ({"env": {"SEED": 1}}, "its variables are not all texts"),
        ({"env": {"A=B": "1"}}, "its variables are not all texts"),
        ({"workers": (1.0, 2.5)}, "workers are"),
        ({"step_seconds": {10**9: 1.0}}, "on 1000000000 workers"),
        ({"step_seconds": {1: 5e-324}}, "seconds on 1 workers"),
        ({"steps": 10**400}, "steps"),
        ({"step_seconds": {1: -1.0}}, "-1.0 seconds on 1 workers"),
        ({"steps": 0}, "0 steps"),
        ({"directory": "/nowhere"}, "no folder '/nowhere'"),
        ({"command": ["caf\ud800"]}, "its command is"),
        ({"env": {"A": "\ud800"}}, "its variables are not all texts"),
    ],
)
def test_a_submission_that_cannot_be_names_its_field(options, problem: str) -> None:
    with pytest.raises(ClusterError, match=f"cannot be submitted: .*{problem}"):
        submission(**options)


@given(st.sampled_from([(1, 1), (1, 8)]), st.text(st.characters(exclude_characters="\0")), st.floats(0.1, 9))
def test_a_submission_comes_back_from_plain_data(workers: tuple[int, int], name: str, priority: float) -> None:
    job = submission(step_seconds={1: 2.0}, workers=workers, name=name, priority=priority)
    assert Submission.from_facts(json.loads(json.dumps(job.facts()))) == job
    with pytest.raises(ClusterError, match="cannot be read"):
        Submission.from_facts({**job.facts(), "workers": None})
