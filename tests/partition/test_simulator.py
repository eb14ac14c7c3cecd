"""The simulator: task graphs and their timelines.

Knows the rule of service, in words of its own, and simpy's queues and networkx's paths. Must not know how the simulator
finds a timeline.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx
import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from vnode.errors import TaskGraphError
from vnode.partition.simulator import SECOND, TaskGraph, picoseconds, simulate
from vnode.partition.simulator.simulate import followers, serve
from vnode.partition.simulator.timeline import Timeline

RESOURCES = 5
Randoms = st.randoms(use_true_random=False)


def by_heap(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rule of service as a simulation of events: when each task is ready, begins and ends."""
    n = len(graph)
    missing = [len(graph.after[t]) for t in range(n)]
    followers: list[list[int]] = [[] for _ in range(n)]
    for t in range(n):
        for d in graph.after[t]:
            followers[d].append(t)
    ready, start, end, free = [0] * n, [0] * n, [0] * n, [0] * len(graph.resources)
    heap = [(0, t) for t in range(n) if not missing[t]]
    heapq.heapify(heap)
    while heap:
        _, t = heapq.heappop(heap)
        start[t] = max([ready[t], *(free[r] for r in graph.on[t])])
        end[t] = start[t] + int(graph.duration[t])
        for r in graph.on[t]:
            free[r] = end[t]
        for f in followers[t]:
            ready[f] = max(ready[f], end[t])
            missing[f] -= 1
            if not missing[f]:
                heapq.heappush(heap, (ready[f], f))
    return np.array(ready, np.int64), np.array(start, np.int64), np.array(end, np.int64)


def by_simpy(graph: TaskGraph) -> np.ndarray:
    """When each task ends where resources are queues of simpy, which a task joins all at once when it is ready."""
    world = simpy.Environment()
    queues = [simpy.Resource(world) for _ in graph.resources]
    ended = [world.event() for _ in range(len(graph))]
    end = np.zeros(len(graph), np.int64)

    def task(t: int):
        if len(graph.after[t]):
            yield simpy.AllOf(world, [ended[d] for d in graph.after[t]])
        places = [(queues[r], queues[r].request()) for r in graph.on[t]]
        yield simpy.AllOf(world, [place for _, place in places])
        yield world.timeout(int(graph.duration[t]))
        for queue, place in places:
            queue.release(place)
        end[t] = world.now
        ended[t].succeed()

    for t in range(len(graph)):
        world.process(task(t))
    world.run()
    return end


def random_graph(rng: random.Random, tasks: int, longest: int) -> TaskGraph:
    """Tasks on none to three of the resources, each after up to three of the eight before it."""
    graph = TaskGraph([f"r{r}" for r in range(RESOURCES)])
    for t in range(tasks):
        on = rng.sample(range(RESOURCES), rng.randint(0, 3))
        after = rng.sample(range(max(0, t - 8), t), min(t, rng.randint(0, 3), 8))
        graph.add(rng.randint(1, longest), on, after=after, label=f"kind {t % 3}")
    return graph


def assert_same(found: Timeline, expected: tuple[np.ndarray, ...]) -> None:
    for name, array in zip(("ready", "start", "end"), expected, strict=True):
        np.testing.assert_array_equal(getattr(found, name), array, err_msg=name, strict=True)


@given(Randoms, st.integers(0, 40), st.sampled_from([1, 3, 1000]))
def test_timeline_is_that_of_the_rule(rng: random.Random, tasks: int, longest: int) -> None:
    timeline = simulate(random_graph(rng, tasks, longest))
    assert_same(timeline, by_heap(timeline.graph))


@given(Randoms, st.integers(1, 40), st.integers(1, 3))
def test_the_delta_simulation_of_changed_tasks_is_that_of_the_rule(rng: random.Random, tasks: int, many: int) -> None:
    graph = random_graph(rng, tasks, 4)
    before = simulate(graph)
    changed = rng.sample(range(tasks), min(many, tasks))
    for t in changed:
        graph.duration[t], graph.on[t] = rng.randint(1, 4), tuple(rng.sample(range(RESOURCES), rng.randint(0, 3)))
    known, since = (before.ready.tolist(), before.end.tolist()), min(before.ready[changed].tolist())
    found = serve(graph.duration, graph.on, followers(graph.after), RESOURCES, known, since)
    expected = by_heap(graph)
    assert found == (expected[0].tolist(), expected[2].tolist())


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_timeline_is_that_of_queues(seed: int, tasks: int) -> None:
    """simpy has rules of its own for what happens at the same time: nothing does, durations are too long for that."""
    graph = random_graph(random.Random(seed), tasks, 10**12)
    np.testing.assert_array_equal(simulate(graph).end, by_simpy(graph))


def test_nobody_overtakes_a_collective() -> None:
    """While it waits for one of its links, the other serves nobody who was ready later; nothing is deadlocked."""
    graph = TaskGraph(["link 0", "link 1"])
    graph.add(10, [0])
    wait = graph.add(1)
    graph.add(5, [0, 1], after=[wait])
    later = graph.add(1, after=[wait])
    graph.add(2, [1], after=[later])
    crossed = [graph.add(1, on, after=[later]) for on in ([0, 1], [1, 0])]
    timeline = simulate(graph)
    assert timeline.start.tolist() == [0, 0, 10, 1, 15, 17, 18]
    assert timeline.start[crossed].tolist() == [17, 18]


@given(Randoms, st.integers(1, 40))
def test_critical_path(rng: random.Random, tasks: int) -> None:
    """It is as long as the longest path where resources' tasks wait for each other as they were served."""
    timeline = simulate(random_graph(rng, tasks, 9))
    graph, path = timeline.graph, timeline.critical_path
    waits = networkx.DiGraph()
    waits.add_node("end")
    for t in range(tasks):
        waits.add_edges_from((d, t, {"weight": int(graph.duration[d])}) for d in map(int, graph.after[t]))
        waits.add_edge(t, "end", weight=int(graph.duration[t]))
    for r in range(RESOURCES):
        own = sorted((t for t in range(tasks) if r in graph.on[t]), key=lambda t: timeline.start[t])
        waits.add_edges_from((a, b, {"weight": int(graph.duration[a])}) for a, b in itertools.pairwise(own))
    assert networkx.dag_longest_path_length(waits) == timeline.makespan == sum(graph.duration[t] for t in path)
    assert timeline.start[path[0]] == 0
    assert all(waits.has_edge(a, b) for a, b in zip(path.tolist(), path[1:].tolist(), strict=False))


@given(Randoms, st.integers(0, 30))
def test_utilization(rng: random.Random, tasks: int) -> None:
    timeline = simulate(random_graph(rng, tasks, 4))
    for r in range(RESOURCES):
        busy = sum(int(timeline.end[t] - timeline.start[t]) for t in range(tasks) if r in timeline.graph.on[t])
        assert timeline.busy[r] == busy
        assert timeline.utilization[r] == (busy / timeline.makespan if tasks else 0)


def test_empty_graph() -> None:
    timeline = simulate(TaskGraph([]))
    assert timeline.makespan == 0 and len(timeline.critical_path) == 0
    ET.fromstring(timeline.svg())


def test_chrome_trace(tmp_path: Path) -> None:
    timeline = simulate(random_graph(random.Random(1), 30, 9_999_999))
    timeline.chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    for t in range(30):
        own = [e for e in bars if e["args"]["task"] == t]
        on = [timeline.graph.resources[r] for r in timeline.graph.on[t]]
        assert sorted(names[e["tid"]] for e in own) == sorted(on or ["(no resource)"])
        for e in own:
            assert (e["ts"], e["dur"]) == (timeline.start[t] / 1e6, timeline.graph.duration[t] / 1e6)
            assert e["name"] == f"kind {t % 3}"
    assert [e["ts"] for e in bars] == sorted(e["ts"] for e in bars)


def test_picture() -> None:
    """One bar with a tooltip for each place of a task, where it was and as long; a path for each colour of many."""
    timeline = simulate(random_graph(random.Random(2), 30, 50))
    picture = ET.fromstring(timeline.svg())
    space = "{http://www.w3.org/2000/svg}"
    bars = [x for x in picture.iter(f"{space}rect") if x.find(f"{space}title") is not None]
    assert len(bars) == sum(map(len, timeline.graph.on))
    places = {(b.find(f"{space}title").text.split(" ")[1], float(b.get("x"))) for b in bars}
    scale = max(x for _, x in places) - min(x for _, x in places)
    begins = [timeline.start[t] for t, on in enumerate(timeline.graph.on) if on]
    first, last = min(begins), max(begins)
    for task, x in places:
        share = (timeline.start[int(task)] - first) / (last - first)
        assert x - min(x for _, x in places) == pytest.approx(share * scale, abs=0.02)
    assert all(name in "".join(picture.itertext()) for name in ("r0", "kind 1", "critical path"))

    graph = TaskGraph(["busy", "idle", "<b>"])
    for _ in range(4000):
        graph.add(10, [0], label="<i>")
    graph.add(10, [2])
    text = simulate(graph).svg()
    assert "idle" not in text and "&lt;b&gt;" in text and "<i>" not in text
    assert len(text) < 20_000, "bars that touch are one"


def test_picoseconds() -> None:
    assert picoseconds([[1e-12, 0.4e-12], [2.5e-6, 3600]]).tolist() == [[1, 1], [2_500_000, 3600 * SECOND]]
    for wrong in (-1e-3, np.nan, np.inf, 1e8):
        with pytest.raises(TaskGraphError, match="seconds"):
            picoseconds([1.0, wrong])


def test_malformed_tasks() -> None:
    graph = TaskGraph(["r", "s"])
    graph.add(1, [0])
    graph.add(2, [0])
    for arguments, says in [
        ((0,), "from 1 to"),
        ((-7,), "not -7"),
        ((2**62,), "picoseconds"),
        ((1, [2]), "resource 2 is not known: there are 2"),
        ((1, [-1]), "resource -1 is not known"),
        ((1, [0, 0]), "task 2 names a resource twice"),
        ((1, [0], [2]), "task 2 is not known: there are 2 so far"),
        ((1, [0], [-2]), "task -2 is not known"),
    ]:
        with pytest.raises(TaskGraphError, match=says):
            graph.add(*arguments[:2], after=arguments[2] if len(arguments) > 2 else ())
    assert len(graph) == 2, "what was refused is not there"
    graph.add(2**61, [0])
    graph.add(2**61, [0])
    with pytest.raises(TaskGraphError, match=r"all tasks take 4\.61e\+06 s"):
        simulate(graph)


def test_arrays_stay_as_they_are() -> None:
    graph = TaskGraph(["r"])
    graph.add(1, [0])
    timeline = simulate(graph)
    for array in (timeline.ready, timeline.end):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
