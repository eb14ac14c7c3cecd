"""The simulator: tasks per second, and what delta simulation gains in a search.

`python -m benchmarks.simulator`. A training step of a transformer is split operator by operator, and a search in the
manner of Metropolis and Hastings splits one operator after another otherwise (FlexFlow, SysML 2019, section 6). For
each proposal the changed graph is simulated in full and from the timeline before, in turn; both must be the same.

This file knows what a transformer's task graph looks like. It must not know how one is simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.report import Sheet
from vnode.partition.simulator import Builder, Change, Edit, TaskGraph, Timeline, resimulate, simulate
from vnode.partition.simulator.graph_builder import Draft

US = 10**6
OPERATORS = {"norm": 60, "qkv": 700, "attention": 500, "out": 250, "norm 2": 60, "up": 950, "down": 950}
"""Of a layer, with the microseconds of the forward pass on a device that has its share of the batch."""
WAYS = "batch", "rows", "columns"
Key = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A transformer on a grid of devices.

    Attributes:
      layers: of seven operators each.
      rows, columns: of the grid of devices.
      placed: each operator is split over devices of its own, and tasks send to each other (the searches of FlexFlow);
        otherwise all devices compute each operator, split by batch or along one axis of the grid, with an all-gather
        where neighbours are split otherwise.
      uneven: how much slower the slowest device is than the fastest.
    """

    layers: int
    rows: int
    columns: int
    placed: bool
    uneven: float = 0.0

    @property
    def devices(self) -> int:
        return self.rows * self.columns

    @property
    def operators(self) -> int:
        return self.layers * len(OPERATORS)

    def __str__(self) -> str:
        kind = "placed" if self.placed else "grid"
        return f"{kind}, {self.devices} devices" + (f", uneven by {self.uneven:.0%}" if self.uneven else "")

    def draw(self, rng: random.Random) -> Any:
        """How an operator is split: over which devices, or along which axis."""
        if not self.placed:
            return rng.choice(WAYS)
        size = rng.choice([self.devices // 4, self.devices // 2, self.devices, self.devices])
        return tuple(sorted(rng.sample(range(self.devices), size)))

    def everywhere(self) -> list[Any]:
        """Data parallelism."""
        return [tuple(range(self.devices)) if self.placed else "batch"] * self.operators


class Strategy:
    """Splits of all operators, and the tasks that carry each out.

    Attributes:
      tasks: the numbers of the tasks of each part of the step.
    """

    def __init__(self, workload: Workload, splits: list[Any], tasks: dict[Key, np.ndarray] | None = None) -> None:
        self.workload, self.splits, self.tasks = workload, splits, tasks or {}
        members = np.arange(workload.devices).reshape(workload.rows, workload.columns)
        self.groups = {"columns": members.repeat(workload.columns, 0), "rows": members.T[None].repeat(workload.rows, 0)}
        self.groups["rows"] = self.groups["rows"].reshape(workload.devices, workload.rows)
        self.groups["batch"] = self.groups["rows"]
        self.slow = 1 + workload.uneven * np.random.default_rng(0).random(workload.devices)

    def graph(self) -> TaskGraph:
        """All of it."""
        devices = range(self.workload.devices)
        builder = Builder([f"{what}:{d}" for what in ("compute", "collective", "out", "in") for d in devices])
        for i in range(self.workload.operators):
            self._compute(builder, "forward", i)
        for i in reversed(range(self.workload.operators)):
            self._compute(builder, "backward", i)
            self._update(builder, i)
        return builder.build()

    def redrawn(self, graph: TaskGraph, i: int, split: Any) -> tuple[Strategy, Change]:
        """Another strategy, in which operator i is split otherwise."""
        last = self.workload.operators - 1
        splits = [*self.splits[:i], split, *self.splits[i + 1 :]]
        parts = [(what, i, "") for what in ("forward", "backward", "reduce", "again", "update")]
        parts += [("send", j, phase) for phase, j in self._edges(i)]
        edit, new = Edit(graph), Strategy(self.workload, splits, dict(self.tasks))
        edit.remove(np.concatenate([new.tasks.pop(part) for part in parts if part in new.tasks]))
        new._compute(edit, "forward", i)
        if i < last:
            new._wait(edit, "forward", i + 1)
            new._compute(edit, "backward", i)
        else:
            new._compute(edit, "backward", i)
        if i:
            new._wait(edit, "backward", i - 1)
        new._update(edit, i)
        return new, edit.build()

    def accept(self, change: Change) -> None:
        """Renumbers tasks once the change that made this strategy is accepted."""
        ids = change.ids(np.concatenate([*self.tasks.values()]))
        ends = np.cumsum([len(found) for found in self.tasks.values()]).tolist()
        self.tasks = {
            key: ids[end - len(found) : end] for (key, found), end in zip(self.tasks.items(), ends, strict=True)
        }

    def _edges(self, i: int) -> list[tuple[str, int]]:
        last = self.workload.operators - 1
        edges = [("forward", i)] + [("forward", i + 1)] * (i < last)
        return edges + [("backward", i)] + [("backward", i - 1)] * (i > 0)

    def _where(self, i: int) -> np.ndarray:
        return np.array(self.splits[i]) if self.workload.placed else np.arange(self.workload.devices)

    def _compute(self, draft: Draft, phase: str, i: int) -> None:
        where = self._where(i)
        name = [*OPERATORS][i % len(OPERATORS)]
        work = OPERATORS[name] * US * (1 if phase == "forward" else 2) * self.workload.devices / len(where)
        after = self._arrived(draft, phase, i)
        if phase == "backward":
            after = np.concatenate([after, self.tasks["forward", i, ""][:, None]], axis=1)
        times = (work * self.slow[where]).astype(np.int64)
        self.tasks[phase, i, ""] = draft.add(times, where[:, None], after=after, label=name)

    def _wait(self, draft: Draft, phase: str, i: int) -> None:
        """The same for an operator whose tasks are there already."""
        after = self._arrived(draft, phase, i)
        task, column = np.nonzero(after >= 0)
        draft.depend(self.tasks[phase, i, ""][task], after[task, column])

    def _arrived(self, draft: Draft, phase: str, i: int) -> np.ndarray:
        """What the tasks of an operator wait for: transfers that this adds, or tasks on the same devices."""
        j = i - 1 if phase == "forward" else i + 1
        if not 0 <= j < self.workload.operators:
            return np.zeros((len(self._where(i)), 0), np.int64)
        made = self.tasks[phase, j, ""]
        devices = self.workload.devices
        if not self.workload.placed:
            if self.splits[i] == self.splits[j]:
                return made[:, None]
            group = self.groups[self.splits[i] if self.splits[i] != "batch" else self.splits[j]]
            streams = devices + np.arange(devices)
            sent = draft.add(300 * US, streams[:, None], after=made[group], label="all-gather")
            self.tasks["send", i, phase] = sent
            return sent[:, None]
        source, target = self._where(j), self._where(i)
        k, n = len(source), len(target)
        low = np.arange(n) * k // n
        high = np.maximum(low + 1, -(-(np.arange(n) + 1) * k // n))
        part = low[:, None] + np.arange((high - low).max())
        part = np.where(part < high[:, None], part, -1)
        to, column = np.nonzero((part >= 0) & (source[part] != target[:, None]))
        giver = part[to, column]
        after = np.where(part >= 0, made[part], -1)
        if len(to):
            on = np.stack([2 * devices + source[giver], 3 * devices + target[to]], axis=1)
            sent = draft.add(3000 * US // max(k, n) + 5 * US, on, after=made[giver][:, None], label="send")
            self.tasks["send", i, phase] = after[to, column] = sent
        return after

    def _update(self, draft: Draft, i: int) -> None:
        """Gradients are summed, then parameters updated."""
        devices, where, made = self.workload.devices, self._where(i), self.tasks["backward", i, ""]
        if self.workload.placed:  # around a ring, in two rounds
            back = np.roll(np.arange(len(where)), 1)
            on = np.stack([2 * devices + where[back], 3 * devices + where], axis=1)
            time = 4000 * US // len(where) + 5 * US
            summed = draft.add(time, on, after=np.stack([made, made[back]], 1), label="reduce")
            self.tasks["again", i, ""] = done = draft.add(
                time, on, after=np.stack([summed, summed[back]], 1), label="reduce"
            )
        else:
            group = self.groups[self.splits[i] if self.splits[i] == "batch" else "columns"]
            done = summed = draft.add(400 * US, devices + where[:, None], after=made[group], label="reduce")
        self.tasks["reduce", i, ""] = summed
        self.tasks["update", i, ""] = draft.add(50 * US, where[:, None], after=done[:, None], label="update")


def python(graph: TaskGraph) -> list[int]:
    """The same simulation in plain Python, with lists and a heap; times of each end."""
    n = len(graph)
    duration, missing = graph.duration.tolist(), np.diff(graph.dependency_start).tolist()
    on = [graph.on(t).tolist() for t in range(n)]
    order = np.argsort(graph.dependency, kind="stable")
    waiting = np.repeat(np.arange(n), np.diff(graph.dependency_start))[order]
    bounds = np.searchsorted(graph.dependency[order], np.arange(n + 1)).tolist()
    followers = [waiting[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    ready, end, free = [0] * n, [0] * n, [0] * len(graph.resources)
    heap = [(0, t) for t in range(n) if not missing[t]]
    while heap:
        begin, t = heapq.heappop(heap)
        for r in on[t]:
            begin = max(begin, free[r])
        done = end[t] = begin + duration[t]
        for r in on[t]:
            free[r] = done
        for f in followers[t]:
            ready[f] = max(ready[f], done)
            missing[f] -= 1
            if not missing[f]:
                heapq.heappush(heap, (ready[f], f))
    return end


def timed(run: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds of this thread on a processor, in which other programs do not show: nothing here waits or has threads."""
    start = time.thread_time()
    found = run(*args)
    return time.thread_time() - start, found


def search(workload: Workload, proposals: int, start: str, seed: int = 0) -> dict[str, Any]:
    """Goes through proposals, and times both simulations of each.

    Returns:
      Tasks and edges; seconds of a simulation in plain Python; for each proposal its position in the step, and the
      seconds of the full and of the delta simulation and of the change itself; how many were accepted.
    """
    rng = random.Random(seed)
    splits = workload.everywhere() if start == "batch" else [workload.draw(rng) for _ in range(workload.operators)]
    strategy = Strategy(workload, splits)
    building, graph = timed(strategy.graph)
    timeline = simulate(graph)
    plain, ends = min((timed(python, graph) for _ in range(3)), key=lambda pair: pair[0])
    assert ends == timeline.end.tolist()
    rows, accepted = [], 0
    first = timeline.makespan
    while len(rows) < proposals:
        i = rng.randrange(workload.operators)
        split = workload.draw(rng)
        if split == strategy.splits[i]:
            continue
        edit, (other, change) = timed(strategy.redrawn, timeline.graph, i, split)
        runs = [(simulate, change.graph), (resimulate, timeline, change)]
        times: dict[Any, float] = {}
        found: dict[Any, Timeline] = {}
        for run, *args in runs if len(rows) % 2 else reversed(runs):
            # The better of two, as caches are emptied by whatever else the machine does.
            times[run], found[run] = min((timed(run, *args) for _ in range(2)), key=lambda pair: pair[0])
        new = found[resimulate]
        for field in ("ready", "start", "end"):
            assert np.array_equal(getattr(new, field), getattr(found[simulate], field))
        rows.append((i / workload.operators, times[simulate], times[resimulate], edit))
        worse = (new.makespan - timeline.makespan) / first
        if worse <= 0 or rng.random() < math.exp(-50 * worse):
            other.accept(change)
            strategy, timeline, accepted = other, new, accepted + 1
    return {
        "tasks": len(graph), "edges": len(graph.dependency), "python": plain, "building": building, "rows": rows,
        "accepted": accepted, "gain": first / timeline.makespan,
    }  # fmt: skip


def quartiles(values: list[float]) -> str:
    """The median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--proposals", type=int, default=300, help="of every search")
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    # Once a large array was freed, as in any process of some age, glibc keeps what is freed instead of giving it back
    # to the system page by page, which takes as long as a delta simulation.
    np.empty(1 << 24, np.uint8)
    cells, places = [], []
    for devices in ((4, 4), (8, 8)):
        for placed, uneven in ((False, 0.0), (False, 0.3), (True, 0.0)):
            for start in ("batch", "random"):
                workload = Workload(options.layers, *devices, placed, uneven)
                found = search(workload, options.proposals, start)
                rows, n = found["rows"], found["tasks"]
                ratios = [full / delta for _, full, delta, _ in rows]
                whole = [(full + edit) / (delta + edit) for _, full, delta, edit in rows]
                full, delta, edit = (statistics.median(row[i] for row in rows) for i in (1, 2, 3))
                cells.append(
                    [
                        f"{workload}, from {start}", f"{n:,}", f"{found['edges']:,}",
                        f"{n / found['python'] / 1e6:.2f}",
                        f"{n / full / 1e6:.1f}", f"{1e3 * full:.2f}", f"{1e3 * delta:.2f}", f"{1e3 * edit:.2f}",
                        quartiles(ratios), f"{min(ratios):.1f} to {max(ratios):.1f}", quartiles(whole),
                        f"{found['accepted']} of {len(rows)}",
                    ]
                )  # fmt: skip
                tenths = [[r for (at, *_), r in zip(rows, ratios, strict=True) if int(5 * at) == k] for k in range(5)]
                places.append(
                    [f"{workload}, from {start}", *(f"{statistics.median(t):.1f}" if t else "" for t in tenths)]
                )
                print(cells[-1], flush=True)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numba {version('numba')}"
    )
    sheets = [
        Sheet(
            f"{options.layers} layers; {machine}",
            ["graph", "tasks", "edges", "Python, M/s", "full, M/s", "full, ms", "delta, ms", "change, ms",
             "full : delta", "range", "with change", "accepted"],
            cells,
            "Medians over proposals, quartiles in parentheses. M/s: millions of tasks per second.",
        ),
        Sheet(
            "full : delta by position of the operator in the forward pass",
            ["graph", *(f"{20 * k}-{20 * k + 20}%" for k in range(5))],
            places,
            "Medians.",
        ),
    ]  # fmt: skip
    for sheet in sheets:
        sheet.draw(Console(width=200))
    print("\n".join(sheet.markdown() for sheet in sheets))


if __name__ == "__main__":
    main()
