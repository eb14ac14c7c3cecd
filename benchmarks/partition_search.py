"""Searches for splits: how long, how far from the best. `python -m benchmarks.partition_search`.

  graphs   the exact search against every assignment, on 20 small graphs drawn at random, with memory limits
  scale    graphs of the size of a transformer, drawn at random: 24 layers x 30 operators x 49 strategies
  models   train steps as their users wrote them, on 16 devices: from the program to a plan, beside experts' plans,
           Tofu's recursive bisection and FlexFlow's walk. All costs are predicted, from data sheets: nothing is run
  papers   models of papers on the clusters of the papers and a slice of TPUs: the best plan beside data parallel
           and the experts, what it moves, and how near Tofu's and FlexFlow's searches come. Predicted as well; with
           `--results FILE` each case is kept as it is done, and is not done again
  timeline the exact plan, data parallel, and a walk from the exact plan, on a timeline where exchanges overlap

This file knows problems, models and clocks. It must not know how any search works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from rich.console import Console

from benchmarks.paper_clusters import k80, p100
from benchmarks.partition_models import MODELS
from benchmarks.program_seconds import seconds_of
from benchmarks.report import Sheet
from vnode.analysis.program import Program, inline
from vnode.errors import MemoryLimitError
from vnode.partition.cost.time_sources import Roofline, Times
from vnode.partition.machine import Machine
from vnode.partition.searches import (
    Edge,
    Estimate,
    Problem,
    Search,
    Simulated,
    Solution,
    as_problem,
    bisection,
    exact,
    exhaustive,
    experts,
    metropolis,
)
from vnode.partition.searches.search_costs import fetched
from vnode.spmd.layout import Layout
from vnode.spmd.op_sharding import OpSharding

GIB = 2**30

TIMES = Times((Roofline(2e-6, calibrated=False),))
"""So that tables from different revisions can be compared; searches know better times of TPUs' kernels."""


def drawn(generator: np.random.Generator, operators: int, strategies: int, points: int) -> Problem:
    """A small graph: a chain with shortcuts, and a limit that bites."""
    sizes = generator.integers(2, strategies + 1, operators)
    edges = [(i, i + 1) for i in range(operators - 1)]
    edges += [(i, j) for i in range(operators) for j in range(i + 2, operators) if generator.random() < 0.2]
    problem = Problem(
        tuple(generator.random(n) for n in sizes),
        tuple(Edge(i, j, generator.random((sizes[i], sizes[j]))) for i, j in edges),
        tuple(generator.random((points, n)) for n in sizes),
    )
    least = max(sum(held[p].min() for held in problem.memory) for p in range(points))
    return dataclasses.replace(problem, limit=float(least + 0.5 * (problem.most.max() - least)))


def graphs(seed: int) -> Sheet:
    """The exact search and all others on 20 small graphs."""
    rows = []
    for number in range(20):
        problem = drawn(np.random.default_rng(seed + number), 7, 6, 1 + number % 3)
        every, found = exhaustive(problem), exact(problem)
        off = [
            each.cost / every.cost - 1 for each in (halves(problem), metropolis(problem, proposals=20_000, seed=seed))
        ]
        rows.append(
            [
                str(number),
                f"{every.evaluations:,}",
                f"{every.elapsed:.2f}",
                f"{found.elapsed:.3f}",
                "yes" if np.isclose(found.cost, every.cost, rtol=1e-12) and found.gap == 0 else "NO",
                *(f"{100 * x:.1f}" for x in off),
            ]
        )
    heads = ["graph", "assignments", "all, s", "exact, s", "equal, gap 0", "bisection, % off", "walk, % off"]
    return Sheet("Every assignment", heads, rows)


def halves(problem: Problem) -> Solution:
    """Tofu's search where strategies mean nothing: their numbers as two steps."""
    return bisection(problem, [np.stack([np.arange(n) // 7, np.arange(n) % 7], 1) for n in problem.sizes])


def layered(seed: int, layers: int, operators: int, strategies: int, tight: float) -> Problem:
    """A graph of the size of a transformer: chains, shortcuts, and activations that the way back reads."""
    generator = np.random.default_rng(seed)
    kinds = [generator.random(strategies) * generator.choice([1, 5, 20]) + 0.5 for _ in range(operators)]
    held = [generator.random(strategies) * 10 for _ in range(operators)]
    seconds, memory, edges = [], [], []

    def move() -> np.ndarray:
        table = generator.random((strategies, strategies)) * 6
        np.fill_diagonal(table, 0)
        return table

    for layer in range(layers):
        first, half = layer * operators, operators // 2
        pairs = [(first + i, first + i + 1) for i in range(operators - 1)]
        pairs += [(first - 1, first)] * (layer > 0) + [(first, first + half), (first + half, first + operators - 1)]
        pairs += [(first + 2, first + 5), (first + 3, first + 5)]
        edges += [Edge(a, b, move()) for a, b in pairs]
        for kind, bytes_ in zip(kinds, held, strict=True):
            seconds.append(kind * (1 + 0.05 * generator.random(strategies)))
            own = bytes_ * (1 + 0.05 * generator.random(strategies))
            memory.append(np.stack([own if point >= layer / layers else 0 * own for point in (0.25, 0.5, 1.0)]))
    problem = Problem(tuple(seconds), tuple(edges), tuple(memory))
    least = max(sum(each[p].min() for each in memory) for p in range(3))
    free = exact(problem).footprint
    return dataclasses.replace(problem, limit=least + tight * (free - least))


def scale(seed: int, layers: int) -> Sheet:
    """Time to gaps, and other searches beside the best."""
    rows = []
    for tight in (0.1, 0.3, 0.7):
        problem = layered(seed, layers, 30, 49, tight)
        best = exact(problem)
        runs: list[tuple[str, Callable[[], Solution]]] = [
            ("exact, gap 1%", lambda p=problem: exact(p, gap=0.01)),
            ("exact", lambda s=best: s),
            ("bisection (Tofu)", lambda p=problem: halves(p)),
            ("walk (FlexFlow)", lambda p=problem: metropolis(p, proposals=300_000, seed=seed, budget=60)),
        ]
        for name, run in runs:
            rows.append([f"{problem.operators} x 49, limit at {tight:.0%}", *told(name, run, best)])
    return Sheet("Scale", ["graph", *TOLD], rows, "limit: between the least footprint and that without a limit")


TOLD = ["search", "s", "cost", "gap, %", "% off the bound", "how"]


def told(name: str, run: Callable[[], Solution], best: Solution) -> list[str]:
    try:
        found = run()
    except MemoryLimitError:
        return [name, "", "nothing fits", "", "", ""]
    gap = f"{100 * found.gap:.3f}" if found.lower_bound else ""
    off = 100 * (found.cost / best.lower_bound - 1)
    return [name, f"{found.elapsed:.2f}", f"{found.cost:.5g}", gap, f"{off:.2f}", found.how]


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step on a mesh of 16 devices."""

    model: str
    axes: dict[str, int]
    memory: float = float("inf")
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    machine: Callable[[], Machine] = lambda: Machine.tpu("v5e:4x4")

    def __str__(self) -> str:
        name = self.machine().name
        limit = f", {self.memory / GIB:g} GiB" if np.isfinite(self.memory) else ""
        sizes = "".join(f", {name} {value}" for name, value in self.sizes.items())
        return f"{self.model}{sizes}, {'x'.join(map(str, self.axes.values()))} of {name}{limit}"


GRID = {"x": 4, "y": 4}
CASES = [
    Case("transformer", GRID),
    Case("transformer", GRID, sizes={"batch": 32}),
    Case("transformer", GRID, 8 * GIB, sizes={"batch": 32}),
    Case("transformer", {"a": 2, "b": 2, "c": 2, "d": 2}, sizes={"batch": 32}),
    Case("transformer-scan", GRID, sizes={"batch": 32}),
    Case("alexnet", GRID),
    Case("alexnet", GRID, machine=p100),
    Case("wresnet-50-x4", GRID),
    Case("lstm-4k", GRID),
]


def plans(case: Case, proposals: int, seed: int) -> list[list[str]]:
    """From a step to a plan."""
    model = MODELS[case.model]("paper", **case.sizes)
    began = time.perf_counter()
    jaxpr = jax.make_jaxpr(model.step)(model.state, model.batch)
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    traced = time.perf_counter() - began
    inner = Estimate(case.machine(), case.axes, TIMES)
    leaves = len(jax.tree.leaves(model.state))
    began = time.perf_counter()
    search = as_problem(program, case.axes, inner, carried={i: i for i in range(leaves)}, memory=case.memory)
    built = time.perf_counter() - began
    problem = search.problem
    batch = range(leaves, leaves + len(jax.tree.leaves(model.batch)))
    known = experts(search, batch)
    rough = exact(problem, gap=0.01, candidates=list(known.values()))
    best = exact(problem, candidates=list(known.values()))
    carried = seconds_of(search.flow(best.strategies), inner)
    head = [
        str(case),
        f"{len(program.equations):,} equations, {len(search.clusters) + len(search.values):,} operators, "
        f"{problem.operators} where those alike are one",
    ]
    size = f"{best.footprint / GIB:.1f} GiB"
    rows = [
        [*head, "traced", f"{traced:.1f}", "", "", "", ""],
        [*head, "as a problem", f"{built:.1f}", "", "", "", ""],
        [*head, *told("exact, gap 1%", lambda: rough, best)],
        [*head, *told("exact", lambda: best, best)],
        [
            *head,
            "its program's layouts",
            "",
            f"{carried:.5g}",
            "",
            f"{100 * (carried / best.lower_bound - 1):.2f}",
            size,
        ],
        [*head, *told("bisection (Tofu)", lambda: bisection(problem, search.steps()), best)],
        [
            *head,
            *told(
                "walk (FlexFlow)",
                lambda: metropolis(problem, starts=list(known.values())[:1], proposals=proposals, seed=seed, budget=60),
                best,
            ),
        ],
    ]
    for name, strategies in known.items():
        cost, fits = problem.cost(strategies), problem.fits(strategies)
        off = 100 * (cost / best.lower_bound - 1)
        size = f"{problem.footprint(strategies) / GIB:.1f} GiB" + ("" if fits else ", does not fit")
        rows.append([*head, name, "", f"{cost:.5g}", "", f"{off:.2f}", size])
    return rows


MACHINES: dict[str, tuple[Callable[[], Machine], dict[str, int]]] = {
    "p100": (p100, {"x": 4, "y": 4}),
    "k80": (k80, {"x": 16, "y": 4}),
    "v5e": (lambda: Machine.tpu("v5e:4x4"), {"x": 4, "y": 4}),
}
PAPERS = (
    "nmt",
    "alexnet",
    "lstm-4k",
    "transformer",
    "wresnet-50",
    "wresnet-50-x4",
    "resnet-101",
    "experts",
    "inception-v3",
)


class Sent(Estimate):
    """Bytes that a device sends in place of seconds."""

    def compute_time(self, eqn: JaxprEqn, choice: OpSharding) -> float:
        return sum(each.bytes_sent for each in fetched(eqn, choice, self.axes))

    def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
        return sum(each.bytes_sent for each in self.transfers(start, end, shape, dtype))


def paper(name: str, machines: Sequence[str], size: str, proposals: int, seed: int, path: Path | None) -> None:
    """One model on several machines; what is in the file is not done again."""
    done = json.loads(path.read_text()) if path is not None and path.exists() else {}
    left = [machine for machine in machines if f"{name} {machine}" not in done]
    if not left:
        return
    model = MODELS[name](size)
    began = time.process_time()
    jaxpr = jax.make_jaxpr(model.step)(model.state, model.batch)
    program = inline(jaxpr.jaxpr, jaxpr.consts)
    traced = time.process_time() - began
    leaves = len(jax.tree.leaves(model.state))
    batch = range(leaves, leaves + len(jax.tree.leaves(model.batch)))
    for machine in left:
        make, axes = MACHINES[machine]
        cost = Estimate(make(), axes, TIMES)
        began = time.process_time()
        search = as_problem(program, axes, cost, carried={i: i for i in range(leaves)})
        built = time.process_time() - began
        problem, known = search.problem, experts(search, batch)
        runs: dict[str, Callable[[], Solution]] = {
            "exact": lambda p=problem, k=known: exact(p, gap=0.001, candidates=list(k.values())),
            "bisection": lambda p=problem, s=search: bisection(p, s.steps(), budget=60),
            "walk": lambda p=problem, k=known: metropolis(
                p, starts=[k["data parallel"]], random_starts=1, proposals=proposals, seed=seed, budget=60
            ),
        }
        found: dict[str, Solution] = {}
        took: dict[str, float] = {}
        for how, run in runs.items():
            began = time.process_time()
            found[how] = run()
            took[how] = time.process_time() - began
        best, sent, devices = found["exact"], Sent(make(), axes, TIMES), int(np.prod(list(axes.values())))
        moved = {
            how: devices * seconds_of(search.flow(strategies), sent)
            for how, strategies in (("best", best.strategies), ("data parallel", known["data parallel"]))
        }
        done[f"{name} {machine}"] = {
            "size": size,
            "equations": len(program.equations),
            "operators": problem.operators,
            "traced": traced,
            "built": built,
            "bound": best.lower_bound,
            "gap": best.gap,
            "carried": seconds_of(search.flow(best.strategies), cost),
            "seconds": {how: each.cost for how, each in found.items()},
            "took": took,
            "experts": {how: problem.cost(each) for how, each in known.items()},
            "moved": moved,
            "footprint": {"best": best.footprint, "data parallel": problem.footprint(known["data parallel"])},
        }
        if path is not None:
            path.write_text(json.dumps(done, indent=1))
        else:
            papers(done).draw(Console(width=200))


def papers(done: Mapping[str, Any]) -> Sheet:
    """What was found, a row for each case."""
    rows = []
    for case, each in done.items():
        known, best = each["experts"], each["seconds"]["exact"]
        rest = {how: cost for how, cost in known.items() if how != "data parallel"}
        expert = min(rest, key=lambda how: rest[how])
        off = [f"{100 * (each['seconds'][how] / each['bound'] - 1):.1f}" for how in ("bisection", "walk")]
        rows.append(
            [
                f"{case}, {each['size']}",
                f"{1e3 * best:.4g}",
                f"{100 * each['gap']:.2f}",
                f"{known['data parallel'] / best:.2f}",
                f"{rest[expert] / best:.2f} ({expert})",
                f"{each['moved']['best'] / 1e9:.2f} / {each['moved']['data parallel'] / 1e9:.2f}",
                *off,
                " / ".join(f"{each['took'][how]:.1f}" for how in ("exact", "bisection", "walk")),
                f"{each['traced']:.1f} + {each['built']:.1f}",
            ]
        )
    heads = ["case", "best, ms", "gap, %", "DP / best", "best expert / best", "GB moved, best / DP"]
    heads += ["Tofu, % off", "walk, % off", "searches, CPU s", "trace + build, CPU s"]
    return Sheet("Papers", heads, rows, "predicted seconds of a step; off the lower bound; nothing is run")


def searched(name: str, machine: str) -> tuple[Search, range]:
    """A model of the papers on a machine, and the numbers of the inputs that count examples."""
    program, leaves, batch = traced(name)
    make, axes = MACHINES[machine]
    return as_problem(program, axes, Estimate(make(), axes, TIMES), carried={i: i for i in range(leaves)}), batch


def traced(name: str, **sizes: Any) -> tuple[Program, int, range]:
    """A model's step as a program, how many inputs are its state, and which are its batch."""
    model = MODELS[name]("paper", **sizes)
    jaxpr = jax.make_jaxpr(model.step)(model.state, model.batch)
    leaves = len(jax.tree.leaves(model.state))
    return inline(jaxpr.jaxpr, jaxpr.consts), leaves, range(leaves, leaves + len(jax.tree.leaves(model.batch)))


def timeline(seed: int) -> Sheet:
    """Plans on a simulated timeline."""
    rows = []
    for name, machine in (("alexnet", "p100"), ("lstm-4k", "v5e")):
        search, batch = searched(name, machine)
        best, simulated = exact(search.problem), Simulated(search)
        began = time.process_time()
        polished = metropolis(search.problem, starts=[best.strategies], proposals=3000, cost=simulated, seed=seed)
        took = time.process_time() - began
        plain = simulated(experts(search, batch)["data parallel"])
        costs = [best.cost, simulated(best.strategies), polished.cost, plain]
        tasks = str(len(simulated.resource))
        rows.append([f"{name} {machine}", tasks, *(f"{1e3 * x:.4g}" for x in costs), f"{took:.1f}"])
    heads = ["case", "tasks", "exact, sum, ms", "exact, ms", "polished, ms", "data parallel, ms", "walk, CPU s"]
    return Sheet("Timeline", heads, rows, "simulated; the sum is without overlap")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["graphs", "scale", "models", "papers", "timeline"], help="one table")
    parser.add_argument("--models", nargs="*", default=PAPERS, choices=list(MODELS), help="of the papers")
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--size", choices=["paper", "small"], default="paper")
    parser.add_argument("--results", type=Path, help="a JSON file to keep cases of the papers in")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the models' cases")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--proposals", type=int, default=100_000, help="of each walk")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=200)
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, numpy {np.__version__}")
    if args.only in (None, "graphs"):
        graphs(args.seed).draw(console)
    if args.only in (None, "scale"):
        scale(args.seed, args.layers).draw(console)
    if args.only in (None, "timeline"):
        timeline(args.seed).draw(console)
    if args.only in (None, "papers"):
        for name in args.models:
            paper(name, args.machines, args.size, args.proposals, args.seed, args.results)
        if args.results is not None and args.results.exists():
            papers(json.loads(args.results.read_text())).draw(console)
    if args.only in (None, "models"):
        for number, case in enumerate(CASES):
            if args.cases is None or number in args.cases:
                rows = plans(case, args.proposals, args.seed)
                title = f"{rows[0][0]}: {rows[0][1]}"
                Sheet(title, TOLD, [row[2:] for row in rows], "seconds of a step, predicted").draw(console)


if __name__ == "__main__":
    main()
