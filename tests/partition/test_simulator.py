"""The simulator: task graphs, timelines, timelines of changed graphs.

Knows the rule of service, in words of its own, and simpy's queues and networkx's paths. Must not know how the simulator
finds a timeline.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx
import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples
from vnode.errors import TaskGraphError
from vnode.partition.simulator import (
    SECOND,
    Builder,
    Change,
    Edit,
    TaskGraph,
    Timeline,
    delta,
    picoseconds,
    resimulate,
    simulate,
)

ALL = os.environ.get("VNODE_TEST_ALL") == "1"
RESOURCES = 5
Randoms = st.randoms(use_true_random=False)


def by_heap(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rule of service as a simulation of events: when each task is ready, begins and ends."""
    n = len(graph)
    missing = [len(graph.after(t)) for t in range(n)]
    followers: list[list[int]] = [[] for _ in range(n)]
    for t in range(n):
        for d in graph.after(t):
            followers[d].append(t)
    ready, start, end, free = [0] * n, [0] * n, [0] * n, [0] * len(graph.resources)
    heap = [(0, int(graph.priority[t]), t) for t in range(n) if not missing[t]]
    heapq.heapify(heap)
    while heap:
        _, _, t = heapq.heappop(heap)
        start[t] = max([ready[t], *(free[r] for r in graph.on(t))])
        end[t] = start[t] + int(graph.duration[t])
        for r in graph.on(t):
            free[r] = end[t]
        for f in followers[t]:
            ready[f] = max(ready[f], end[t])
            missing[f] -= 1
            if not missing[f]:
                heapq.heappush(heap, (ready[f], int(graph.priority[f]), f))
    return np.array(ready, np.int64), np.array(start, np.int64), np.array(end, np.int64)


def by_simpy(graph: TaskGraph) -> np.ndarray:
    """When each task ends where resources are queues of simpy, which a task joins all at once when it is ready."""
    world = simpy.Environment()
    queues = [simpy.Resource(world) for _ in graph.resources]
    ended = [world.event() for _ in range(len(graph))]
    end = np.zeros(len(graph), np.int64)

    def task(t: int):
        if len(graph.after(t)):
            yield simpy.AllOf(world, [ended[d] for d in graph.after(t)])
        places = [(queues[r], queues[r].request()) for r in graph.on(t)]
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
    """Tasks on none to three of the resources, each after up to three others; numbered in any order."""
    builder = Builder([f"r{r}" for r in range(RESOURCES)])
    for t in range(tasks):
        on = rng.sample(range(RESOURCES), rng.randint(0, 3))
        builder.add(rng.randint(1, longest), on, label=f"kind {t % 3}", priority=rng.randint(-1, 1))
    order = rng.sample(range(tasks), tasks)
    for i, t in enumerate(order):
        for d in rng.sample(order[max(0, i - 8) : i], min(i, rng.randint(0, 3), 8)):
            builder.depend(t, d)
    return builder.build()


def random_edit(rng: random.Random, timeline: Timeline, longest: int) -> Change:
    """Tasks removed, added between others, and with other durations."""
    graph = timeline.graph
    edit, n = Edit(graph), len(graph)
    gone = rng.sample(range(n), rng.randint(0, min(4, n)))
    edit.remove(gone)
    left = sorted(set(range(n)) - set(gone), key=lambda t: (timeline.end[t], t))
    retimed = rng.sample(left, min(len(left), rng.randint(0, 3)))
    edit.retime(retimed, [rng.randint(1, longest) for _ in retimed])
    for _ in range(rng.randint(0, 4)):
        at = rng.randint(0, len(left))
        before, behind = left[max(0, at - 6) : at], left[at : at + 6]
        new = edit.add(
            rng.randint(1, longest),
            rng.sample(range(RESOURCES), rng.randint(0, 3)),
            after=rng.sample(before, min(len(before), rng.randint(0, 3))),
            priority=rng.randint(-1, 1),
        )
        edit.depend(rng.sample(behind, min(len(behind), rng.randint(0, 2))), new)
        if rng.random() < 0.3:
            edit.add([1, 2], [[0], [1]], after=new, label="new")
    return edit.build()


def assert_same(found: Timeline, expected: tuple[np.ndarray, ...]) -> None:
    for name, array in zip(("ready", "start", "end"), expected, strict=True):
        np.testing.assert_array_equal(getattr(found, name), array, err_msg=name, strict=True)


def assert_served(timeline: Timeline) -> None:
    """The order in which tasks were served is one: after those they wait for, and by the rule on each resource."""
    graph = timeline.graph
    place = np.empty(len(graph), np.int64)
    place[timeline.served] = np.arange(len(graph))
    assert sorted(timeline.served) == list(range(len(graph)))
    for t in range(len(graph)):
        assert (place[graph.after(t)] < place[t]).all()
    for r in range(len(graph.resources)):
        own = [t for t in timeline.served if r in graph.on(t)]
        assert own == sorted(own, key=lambda t: (timeline.ready[t], graph.priority[t], t))


@given(Randoms, st.integers(0, 40), st.sampled_from([1, 3, 1000]))
def test_timeline_is_that_of_the_rule(rng: random.Random, tasks: int, longest: int) -> None:
    timeline = simulate(random_graph(rng, tasks, longest))
    assert_same(timeline, by_heap(timeline.graph))
    assert_served(timeline)


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_timeline_is_that_of_queues(seed: int, tasks: int) -> None:
    """simpy has rules of its own for what happens at the same time: nothing does, durations are too long for that."""
    graph = without_priorities(random_graph(random.Random(seed), tasks, 10**12))
    np.testing.assert_array_equal(simulate(graph).end, by_simpy(graph))


def without_priorities(graph: TaskGraph) -> TaskGraph:
    rows = graph.resource_start, graph.resource, graph.dependency_start, graph.dependency
    return TaskGraph(graph.duration, *rows, resources=graph.resources)


@pytest.mark.parametrize("patience", [0.0, 0.05, 1000.0])
@settings(max_examples=examples(150 if ALL else 50))
@given(Randoms, st.integers(0, 60), st.sampled_from([1, 3, 1000]), st.integers(1, 6))
def test_delta_is_full(patience: float, rng: random.Random, tasks: int, longest: int, changes: int) -> None:
    """Change after change, each from the timeline that the last one gave; whether the order is mended or given up."""
    timeline = simulate(random_graph(rng, tasks, longest))
    before, delta.PATIENCE = delta.PATIENCE, patience
    try:
        for _ in range(changes):
            timeline = resimulate(timeline, random_edit(rng, timeline, longest))
            assert_same(timeline, by_heap(timeline.graph))
            assert_served(timeline)
    finally:
        delta.PATIENCE = before


def layered(rng: random.Random, layers: int, devices: int) -> tuple[TaskGraph, np.ndarray]:
    """Layers on all devices, at different speeds; each sends a device's result to its neighbour."""
    names = [f"{kind}:{d}" for kind in ("compute", "link") for d in range(devices)]
    builder, own = Builder(names), np.arange(devices)
    speed = [rng.randint(10, 14) for _ in range(devices)]
    made, tasks = np.full(devices, -1), []
    for _ in range(layers):
        made = builder.add([rng.randint(5, 9) * s for s in speed], own[:, None], after=made[:, None], label="layer")
        tasks.append(made)
        sent = builder.add(rng.randint(1, 40), devices + own[:, None], after=made[:, None], label="send")
        made = np.maximum(made, np.roll(sent, 1)) if rng.random() < 0.7 else made
    return builder.build(), np.array(tasks)


@pytest.mark.parametrize("seed", range(6))
def test_delta_is_full_on_larger_graphs(seed: int) -> None:
    rng = random.Random(seed)
    graph, tasks = layered(rng, 40, 8)
    timeline = simulate(graph)
    for _ in range(20):
        edit, i = Edit(timeline.graph), rng.randrange(len(tasks) - 1)
        if rng.random() < 0.5:
            edit.retime(tasks[i], rng.randint(1, 120))
        else:
            collective = edit.add(rng.randint(1, 30), np.arange(8, 16), after=tasks[i], label="all-reduce")
            edit.depend(tasks[rng.randrange(i + 1, len(tasks))], collective)
        change = edit.build()
        timeline, tasks = resimulate(timeline, change), change.ids(tasks)
        assert_same(timeline, by_heap(change.graph))


def test_change_says_what_became_of_tasks() -> None:
    builder = Builder(["a", "b"])
    first = builder.add([3, 4, 5], [[0], [1], [0]], label="old")
    last = builder.add(6, [1], after=first)
    edit = Edit(builder.build())
    edit.remove(first[1])
    new = edit.add([7, 8], [0], after=first[[0, 2]], label="new", priority=[1, 2])
    edit.depend(last, new[:1])
    edit.retime(first[2], 50)
    change = edit.build()
    assert change.ids([*first, *last, *new]).tolist() == [0, -1, 1, 2, 3, 4]
    graph = change.graph
    assert graph.duration.tolist() == [3, 50, 6, 7, 8]
    assert [graph.on(t).tolist() for t in range(5)] == [[0], [0], [1], [0], [0]]
    assert [graph.after(t).tolist() for t in range(5)] == [[], [], [0, 1, 3], [0, 1], [0, 1]]
    assert [graph.labels[k] for k in graph.label] == ["old", "old", "", "new", "new"]
    assert graph.priority.tolist() == [0, 0, 0, 1, 2]
    assert sorted(change.moved) == [2, 3, 4] and change.retimed.tolist() == [1] and change.removed.tolist() == [1]
    assert len(change.before) == 4, "the graph itself stays"


@given(Randoms, st.integers(0, 30))
def test_a_changed_graph_is_the_one_that_was_described(rng: random.Random, tasks: int) -> None:
    """Beside a dictionary of what each task should be, whose tasks are never renumbered."""
    graph = random_graph(rng, tasks, 9)
    edit = Edit(graph)
    told = {
        t: [int(graph.duration[t]), graph.on(t).tolist(), graph.after(t).tolist(), graph.labels[graph.label[t]]]
        for t in range(tasks)
    }
    gone = set(rng.sample([*told], min(tasks, rng.randint(0, 5))))
    edit.remove([*gone])
    for _ in range(rng.randint(0, 6)):
        stay = [t for t in told if t not in gone]
        duration, label = rng.randint(1, 9), rng.choice("xyz")
        on, after = rng.sample(range(RESOURCES), rng.randint(0, 3)), rng.sample(stay, min(len(stay), 2))
        (new,) = edit.add(duration, on, after=after, label=label).tolist()
        told[new] = [duration, on, after, label]
        if stay:
            waits = rng.choice(stay)
            edit.depend(waits, new)
            told[waits][2] = [*told[waits][2], new]
            longer = rng.choice(stay)
            if longer < tasks:
                edit.retime(longer, 77)
                told[longer][0] = 77
    change = edit.build()
    kept = [t for t in told if t not in gone]
    assert change.ids(kept).tolist() == list(range(len(kept))) and (change.ids([*gone]) == -1).all()
    for number, t in enumerate(kept):
        duration, on, after, label = told[t]
        new = change.graph
        assert (new.duration[number], new.on(number).tolist(), new.labels[new.label[number]]) == (duration, on, label)
        assert sorted(new.after(number)) == sorted(change.ids([d for d in after if d not in gone]))
    waiting_for_others = {t for t in kept if t >= tasks or set(told[t][2]) != set(graph.after(t).tolist()) - gone}
    waiting_for_others |= {t for t in kept if t < tasks and gone & set(graph.after(t).tolist())}
    assert sorted(change.moved) == sorted(change.ids([*waiting_for_others]))


def test_rows_are_broadcast() -> None:
    builder = Builder(["a", "b", "c"])
    first = builder.add(1, np.arange(3)[:, None])
    builder.add(2, [0, 2], after=(first, -1))
    builder.add([3, 4, 5], [[0, -1], [1, 2], [-1, -1]], after=(first[:, None], [3, -1]), label=["x", "y", "x"])
    graph = builder.build()
    assert graph.duration.tolist() == [1, 1, 1, 2, 3, 4, 5]
    assert [graph.on(t).tolist() for t in range(7)] == [[0], [1], [2], [0, 2], [0], [1, 2], []]
    assert [graph.after(t).tolist() for t in range(7)] == [[], [], [], [0, 1, 2], [0, 3], [1, 3], [2, 3]]
    assert [graph.labels[k] for k in graph.label] == ["", "", "", "", "x", "y", "x"]


def test_nobody_overtakes_a_collective() -> None:
    """While it waits for one of its links, the other serves nobody who was ready later; nothing is deadlocked."""
    builder = Builder(["link 0", "link 1"])
    builder.add(10, [0])
    wait = builder.add(1)
    builder.add(5, [0, 1], after=wait)
    later = builder.add(1, after=wait)
    builder.add(2, [1], after=later)
    crossed = builder.add([1, 1], [[0, 1], [1, 0]], after=later)
    timeline = simulate(builder.build())
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
        waits.add_edges_from((d, t, {"weight": int(graph.duration[d])}) for d in map(int, graph.after(t)))
        waits.add_edge(t, "end", weight=int(graph.duration[t]))
    for r in range(RESOURCES):
        own = sorted((t for t in range(tasks) if r in graph.on(t)), key=lambda t: timeline.start[t])
        waits.add_edges_from((a, b, {"weight": int(graph.duration[a])}) for a, b in itertools.pairwise(own))
    assert networkx.dag_longest_path_length(waits) == timeline.makespan == graph.duration[path].sum()
    assert timeline.start[path[0]] == 0
    assert all(waits.has_edge(a, b) for a, b in zip(path.tolist(), path[1:].tolist(), strict=False))


@given(Randoms, st.integers(0, 30), st.integers(0, 20))
def test_memory_and_utilization(rng: random.Random, tasks: int, events: int) -> None:
    timeline = simulate(random_graph(rng, tasks, 4))
    which = [rng.randrange(tasks) for _ in range(events if tasks else 0)]
    taken, given_back = [rng.randint(0, 9) for _ in which], [-rng.randint(0, 9) for _ in which]
    held = timeline.memory(np.array(which, int), taken, given_back)
    happens = [(int(timeline.start[t]), b) for t, b in zip(which, taken, strict=True)]
    happens += [(int(timeline.end[t]), b) for t, b in zip(which, given_back, strict=True)]
    for time, level in zip(held.time, held.bytes, strict=True):
        assert level == sum(b for at, b in happens if at <= time)
    assert sorted({at for at, _ in happens}) == held.time.tolist()
    assert held.peak == max([0, *held.bytes])
    for r in range(RESOURCES):
        busy = sum(int(timeline.end[t] - timeline.start[t]) for t in range(tasks) if r in timeline.graph.on(t))
        assert timeline.busy[r] == busy
        assert timeline.utilization[r] == (busy / timeline.makespan if tasks else 0)


def test_empty_graph() -> None:
    timeline = simulate(Builder([]).build())
    assert timeline.makespan == 0 and len(timeline.critical_path) == 0 and timeline.memory([]).peak == 0
    ET.fromstring(timeline.svg())
    edit = Edit(timeline.graph)
    edit.add(3)
    assert resimulate(timeline, edit.build()).makespan == 3


def test_chrome_trace(tmp_path: Path) -> None:
    timeline = simulate(random_graph(random.Random(1), 30, 9_999_999))
    timeline.chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    for t in range(30):
        own = [e for e in bars if e["args"]["task"] == t]
        on = [timeline.graph.resources[r] for r in timeline.graph.on(t)]
        assert sorted(names[e["tid"]] for e in own) == sorted(on or ["(no resource)"])
        for e in own:
            assert (e["ts"], e["dur"]) == (timeline.start[t] / 1e6, timeline.graph.duration[t] / 1e6)
            assert e["name"] == f"kind {t % 3}"
    assert [e["ts"] for e in bars] == sorted(e["ts"] for e in bars)


def test_picture() -> None:
    """One bar with a tooltip for each place of a task, where it was and as long; a path for each colour of many."""
    timeline = simulate(random_graph(random.Random(2), 30, 50))
    picture = ET.fromstring(timeline.svg(width=1000))
    space = "{http://www.w3.org/2000/svg}"
    bars = [x for x in picture.iter(f"{space}rect") if x.find(f"{space}title") is not None]
    assert len(bars) == len(timeline.graph.resource)
    places = {(b.find(f"{space}title").text.split(" ")[1], float(b.get("x"))) for b in bars}
    scale = max(x for _, x in places) - min(x for _, x in places)
    begins = timeline.start[np.diff(timeline.graph.resource_start) > 0]
    first, last = min(begins), max(begins)
    for task, x in places:
        share = (timeline.start[int(task)] - first) / (last - first)
        assert x - min(x for _, x in places) == pytest.approx(share * scale, abs=0.02)
    assert all(name in "".join(picture.itertext()) for name in ("r0", "kind 1", "critical path"))

    builder = Builder(["busy", "idle", "<b>"])
    builder.add(np.full(4000, 10), [[0]] * 4000, label="<i>")
    builder.add(10, [2])
    text = simulate(builder.build()).svg()
    assert "idle" not in text and "&lt;b&gt;" in text and "<i>" not in text
    assert len(text) < 20_000, "bars that touch are one"
    assert "idle" in simulate(builder.build()).svg(resources=[1])
    with pytest.raises(TaskGraphError, match="numbers from 0 to 2"):
        simulate(builder.build()).svg(resources=[3])


def test_picoseconds() -> None:
    assert picoseconds([[1e-12, 0.4e-12], [2.5e-6, 3600]]).tolist() == [[1, 1], [2_500_000, 3600 * SECOND]]
    for wrong in (-1e-3, np.nan, np.inf, 1e8):
        with pytest.raises(TaskGraphError, match="seconds"):
            picoseconds([1.0, wrong])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"duration": [5, 0]}, "at least one picosecond, not 0"),
        ({"duration": [5, -7]}, "at least one picosecond, not -7"),
        ({"duration": [5.0, 7.0]}, "duration must be a row of whole numbers, not float64"),
        ({"duration": [2**62, 2**62]}, "too long for times in picoseconds"),
        ({"duration": np.array([5, 2**63], np.uint64)}, r"duration\[1\] is 9223372036854775808"),
        ({"resource": [0, 1]}, r"resource\[1\] is 1, where 0 to 0"),
        ({"resource": [0, -1]}, r"resource\[1\] is -1"),
        ({"resource_start": [0, 2, 1]}, "resource_start must rise from 0 to 2"),
        ({"resource_start": [0, 2]}, "in 3 entries, for 2 tasks"),
        ({"resource_start": [0, 0, 2], "resource": [0, 0]}, "task 1 names resource 0 twice"),
        ({"dependency": [2]}, r"dependency\[0\] is 2, where 0 to 1"),
        ({"dependency_start": [0, 0, 2]}, "dependency_start must rise from 0 to 1"),
        ({"priority": [1]}, "priority has 1 entries for 2 tasks"),
        ({"label": [0, 1]}, r"label\[1\] is 1"),
        ({"dependency": [1]}, "task 1 waits for itself"),
    ],
)
def test_malformed_graphs(fields: dict, says: str) -> None:
    good = {
        "duration": [5, 7], "resource_start": [0, 1, 2], "resource": [0, 0], "dependency_start": [0, 0, 1],
        "dependency": [0], "resources": ["r"],
    }  # fmt: skip
    assert simulate(TaskGraph(**good)).makespan == 12
    with pytest.raises(TaskGraphError, match=says):
        simulate(TaskGraph(**{**good, **fields}))


def test_malformed_additions() -> None:
    builder = Builder(["r", "s"])
    builder.add([1, 2], [0])
    for arguments, says in [
        ((0,), "at least one picosecond"),
        ((1.5,), "duration must be a row of whole numbers"),
        ((1, [2]), "resource 2 is not known: there are 2"),
        ((1, [0, 0]), "task 2 names resource 0 twice"),
        ((1, [0], [2]), "task 2 is not known: there are 2 so far"),
        ((1, [0], [-2]), "task -2 is not known"),
        ((1, [0], [0.5]), "after must be whole numbers, not float64"),
        (([1, 2, 3], [[0], [1]]), "different numbers of tasks"),
        ((1, [[[0]]]), r"rows, of shape \(m,\) or \(k, m\)"),
    ]:
        with pytest.raises(TaskGraphError, match=says):
            builder.add(*arguments[:2], after=arguments[2] if len(arguments) > 2 else ())
    with pytest.raises(TaskGraphError, match="task 5 is not known"):
        builder.depend(5, 0)
    with pytest.raises(TaskGraphError, match="do not fit"):
        builder.depend([0, 1], [0, 1, 0])
    assert len(builder.build()) == 2, "what was refused is not there"
    builder.add([2**61, 2**61], [0])
    with pytest.raises(TaskGraphError, match="too long"):
        builder.build()


def test_circles_are_named() -> None:
    builder = Builder(["r"])
    a, b, c, d = builder.add([1, 1, 1, 1], [0], label=["a", "b", "c", "d"])
    builder.depend([b, c, d], [a, b, c])
    timeline = simulate(builder.build())
    builder.depend(b, d)
    with pytest.raises(TaskGraphError, match="3 tasks wait for each other in a circle") as caught:
        simulate(builder.build())
    expected = r"task 1 \(b\) waits for task 3 \(d\) waits for task 2 \(c\) waits for task 1 \(b\)"
    assert re.search(expected, str(caught.value))
    edit = Edit(timeline.graph)
    edit.depend(b, d)
    with pytest.raises(TaskGraphError, match="3 tasks wait for each other in a circle"):
        resimulate(timeline, edit.build())


def test_malformed_changes() -> None:
    builder = Builder(["r"])
    builder.add([1, 2], [0])
    timeline = simulate(builder.build())
    edit = Edit(timeline.graph)
    with pytest.raises(TaskGraphError, match="task 2 is not known"):
        edit.remove(2)
    with pytest.raises(TaskGraphError, match="at least one picosecond"):
        edit.retime(0, 0)
    with pytest.raises(TaskGraphError, match="2 durations for 1 task"):
        edit.retime(0, [1, 2])
    edit.remove(1)
    edit.add(1, after=[1])
    with pytest.raises(TaskGraphError, match=r"task 1 is removed"):
        edit.build()
    with pytest.raises(TaskGraphError, match="task -1 is not known"):
        Edit(timeline.graph).build().ids([0, -1])
    with pytest.raises(TaskGraphError, match="another graph"):
        resimulate(timeline, Edit(builder.build()).build())
    with pytest.raises(TaskGraphError, match="no task 0 to 7"):
        timeline.memory([0, 7])
    with pytest.raises(TaskGraphError, match="do not fit"):
        timeline.memory([0, 1], [1, 2, 3])


def test_arrays_stay_as_they_are() -> None:
    builder = Builder(["r"])
    builder.add([1, 2], [0])
    timeline = simulate(builder.build())
    for array in (*timeline.graph.arrays, timeline.start, Edit(timeline.graph).build().graph.duration):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


def test_loops_without_a_cache() -> None:
    """Source that is in no file has no place beside which to cache, as one in a folder where nothing can be written."""
    from vnode.partition.simulator.event_loops import compiled

    session: dict = {}
    exec("def double(x):\n    return 2 * x", session)
    assert compiled(session["double"])(21) == 42


def test_timelines_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "vnode.partition.simulator.event_loops", raising=False)
    graph = random_graph(random.Random(0), 40, 9)
    timeline = simulate(graph)
    assert sys.modules["vnode.partition.simulator.event_loops"].numba is None
    assert_same(timeline, by_heap(graph))
    change = random_edit(random.Random(1), timeline, 9)
    assert_same(resimulate(timeline, change), by_heap(change.graph))
