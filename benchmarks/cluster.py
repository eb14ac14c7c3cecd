"""Simulates policies for jobs that share a cluster, and compares them with published runs.

    python -m benchmarks.cluster --data DIR            # published logs: virtualflow/*.json, gavel/*, pollux/*
    python -m benchmarks.cluster --scale               # needs no data

DIR holds what was read from public logs and traces: VirtualFlow's 20 jobs on 8 GPUs, its 3 jobs, its mixed traces;
Gavel's traces and throughputs; a workload of Pollux's and its measured times. Everything is deterministic, but for the
seconds of `--scale`. All seeds are counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vnode.cluster import VIRTUALFLOW, VNODE, Costs, Job, Speeds, policies, read, simulate
from vnode.cluster.job_figures import Result
from vnode.cluster.policies.heterogeneous import Worth, heterogeneous
from vnode.cluster.simulator import Simulator
from vnode.cluster.traces.draw_traces import draw

ELASTIC = ("wfs", "wfs_any", "max_min", "goodput", "shortest_remaining")
SEEDS = 20


def change(new: float, old: float) -> str:
    """A change in percent."""
    return f"{100 * (new / old - 1):+.1f}%"


def against_static(jobs: Sequence[Job], devices: int, costs: Costs, names: Sequence[str], **more: Any) -> None:
    """A table of policies against static priority on the same jobs."""
    static = simulate(jobs, devices, "static", costs=costs)
    base = static.figures()
    print("| policy | makespan | median JCT | mean JCT | effective | resizes | jobs later by 10% | worst |")
    print("|:--|--:|--:|--:|--:|--:|--:|--:|")
    for name in names:
        result = simulate(jobs, devices, name, costs=costs, **more)
        found, later = result.figures(), result.against(static)
        cells = [change(found[key], base[key]) for key in ("makespan", "jct_median", "jct_mean")]
        cells += [
            f"{found['utilisation_effective']:.2f}",
            found["resizes"],
            int((later > 1.1).sum()),
            f"{later.max():.2f}",
        ]
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    print(
        f"\nstatic: makespan {base['makespan']:.0f}, median {base['jct_median']:.0f}, mean {base['jct_mean']:.0f} s\n"
    )


def replay(data: Path) -> None:
    """Logged runs of VirtualFlow against the simulation of the same jobs."""
    print("### Replay\n\n| run | policy | logged | simulated | change | first shares that differ |")
    print("|:--|:--|--:|--:|--:|--:|")
    path = data / "virtualflow" / "vf_20jobs_8gpus.json"
    trace = read(path)
    records = json.loads(path.read_text())["jobs"]
    assert isinstance(trace.devices, int)
    for name in ("static", "wfs"):
        result = simulate(trace.jobs_for(name), trace.devices, name, costs=trace.costs)
        logged = trace.logged[name]["makespan"]
        first = [job.first for job in result.of_jobs()]
        odd = sum(a != b["wfs"]["first"] for a, b in zip(first, records, strict=True)) if name == "wfs" else 0
        print(f"| 20 jobs | {name} | {logged} | {result.makespan:.0f} | {change(result.makespan, logged)} | {odd} |")
    path = data / "virtualflow" / "vf_3jobs_4gpus.json"
    runs = {run["run"]: run for run in json.loads(path.read_text())["runs"]}
    for name in ("static", "wfs"):
        trace = read(path, "9-13")
        assert isinstance(trace.devices, int)
        for job in simulate(trace.jobs_for(name), trace.devices, name, costs=trace.costs).of_jobs():
            logged = runs["9-13"]["jobs"][int(job.id)][name]["jct"]
            print(f"| 9-13, job {job.id} | {name}, JCT | {logged} | {job.jct:.0f} | {change(job.jct, logged)} | |")
    print()


def without_starts(jobs: Sequence[Job]) -> list[Job]:
    """Jobs that take as long to start as the costs of the cluster say."""
    return [dataclasses.replace(job, start=None) for job in jobs]


def published(data: Path) -> None:
    """All policies on the published 20 jobs."""
    trace = read(data / "virtualflow" / "vf_20jobs_8gpus.json")
    names = ("static_backfill", *ELASTIC, "guarantee")
    print("### The published 20 jobs, with the published costs\n")
    against_static(trace.jobs, 8, VIRTUALFLOW, names)
    print("### The same, with the costs of vnode's workers\n")
    against_static(without_starts(trace.jobs), 8, VNODE, names)


def seeds(data: Path) -> None:
    """Twenty seeds at three loads and two kinds of scaling."""
    published = without_starts(read(data / "virtualflow" / "vf_20jobs_8gpus.json").jobs)
    print(f"### {SEEDS} seeds each, medians against static priority\n")
    print(
        "| scaling | jobs/h | policy | makespan | median JCT | mean JCT | worst job, all seeds | resizes a job, most "
        "| mean JCT against wfs | no worse than wfs |"
    )
    print("|:--|--:|:--|--:|--:|--:|--:|--:|--:|--:|")
    for linear in (False, True):
        for rate in (8, 12, 18):
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in (*ELASTIC, "guarantee")}
            for seed in range(SEEDS):
                jobs = draw(published, seed, rate=rate, linear=linear)
                static = simulate(jobs, 8, "static", costs=VIRTUALFLOW)
                base, fair = static.figures(), simulate(jobs, 8, "wfs", costs=VIRTUALFLOW).figures()["jct_mean"]
                for name, rows in found.items():
                    result = simulate(jobs, 8, name, costs=VIRTUALFLOW)
                    figures = result.figures()
                    rows.append(
                        (
                            *(figures[key] / base[key] - 1 for key in ("makespan", "jct_median", "jct_mean")),
                            float(result.against(static).max()),
                            figures["resizes"] / len(jobs),
                            figures["jct_mean"] / fair - 1,
                        )
                    )
            for name, rows in found.items():
                table = np.array(rows)
                middle = np.median(table, axis=0)
                cells = [f"{100 * middle[i]:+.0f}%" for i in range(3)]
                cells += [f"{table[:, 3].max():.3f}", f"{table[:, 4].max():.2f}", f"{100 * middle[5]:+.1f}%"]
                cells.append(f"{int((table[:, 5] <= 1e-9).sum())} of {SEEDS}")
                print(f"| {'linear' if linear else 'as fitted'} | {rate} | {name} | " + " | ".join(cells) + " |")
    print()


def speed_at_proportional_share(job: Job, devices: Mapping[str, int]) -> float:
    """The mean speed of a job on the kinds, each counted by its devices."""
    return sum(job.speed_on({kind: count}) * count for kind, count in devices.items()) / sum(devices.values())


def speed_in_devices_alike(job: Job, counts: Mapping[str, int], devices: Mapping[str, int]) -> float:
    """The speed over that of one device of the same kind, if n devices are n times as fast: how many there are."""
    return float(sum(counts.values()))


WORTHS: dict[str, Worth] = {
    "by the mean of kinds": lambda job, counts, all_: job.speed_on(counts) / speed_at_proportional_share(job, all_),
    "by one device of the same kind": speed_in_devices_alike,
    "by nothing": lambda job, counts, all_: job.speed_on(counts),
}
"""Normalisations besides that of the policy, by the speed of the job alone on the cluster."""


def by_worth(worth: Worth, trace: Any) -> Result:
    """A simulation at events, of jobs that may have several kinds."""
    return simulate(trace.jobs, trace.devices, heterogeneous(worth=worth))


def mixed(data: Path) -> None:
    """Kinds of devices: what events, mixing, rounds and normalisation contribute."""
    path = data / "virtualflow" / "vf_heterogeneous.json"
    rounds = Costs(tick=360)
    ways: dict[str, Callable[[Any], Result]] = {
        "rounds of 360 s, one kind": lambda t: simulate(t.jobs, t.devices, heterogeneous(False), costs=rounds),
        "rounds of 360 s, mixed": lambda t: simulate(t.jobs, t.devices, heterogeneous(), costs=rounds),
        "at events, one kind": lambda t: simulate(t.jobs, t.devices, heterogeneous(False)),
        "at events, mixed": lambda t: simulate(t.jobs, t.devices, heterogeneous()),
    }
    for name, worth in WORTHS.items():
        ways[f"at events, mixed, {name}"] = functools.partial(by_worth, worth)
    print(
        "### 4 V100, 8 P100, 16 K80: mean JCT, s\n\n| jobs/h | logged: Gavel | logged: mixed | "
        + " | ".join(ways)
        + " |\n|--:|--:|--:|"
        + "--:|" * len(ways)
    )
    for rate in range(1, 13):
        trace = read(path, str(rate))
        cells = [f"{run(trace).figures()['jct_mean']:.0f}" for run in ways.values()]
        print(
            f"| {rate} | {trace.logged['gavel_avg_jct']:.0f} | {trace.logged['mixed_avg_jct']:.0f} | "
            + " | ".join(cells)
            + " |"
        )
    print()


def gavel(data: Path) -> None:
    """Gavel's traces by its policies, against its own code (seed 0, ECOS)."""
    folder = data / "gavel"
    own = {
        ("small_test.trace", "gavel_max_min"): (1346.3, 633.7),
        ("small_test.trace", "gavel_max_min_aware"): (769.7, 276.9),
        ("max_min_fairness.trace", "gavel_max_min"): (77141, 19989),
        ("max_min_fairness.trace", "gavel_max_min_aware"): (63945, 14623),
    }
    clusters = {"small_test.trace": (2, 2, 2), "max_min_fairness.trace": (8, 16, 24)}
    print(
        "### Gavel's traces\n\n| trace | policy | makespan | its own code | change | mean JCT | its own code | change |"
    )
    print("|:--|:--|--:|--:|--:|--:|--:|--:|")
    for (name, policy), (makespan, jct) in own.items():
        devices = dict(zip(("v100", "p100", "k80"), clusters[name], strict=True))
        trace = read(folder / name, throughputs=folder / "simulation_throughputs.json", kinds=list(devices))
        found = simulate(trace.jobs, devices, policy).figures()
        cells = [f"{found['makespan']:.1f}", makespan, change(found["makespan"], makespan)]
        cells += [f"{found['jct_mean']:.1f}", jct, change(found["jct_mean"], jct)]
        print(f"| {name} | {policy} | " + " | ".join(map(str, cells)) + " |")
    print()


def pollux(data: Path) -> None:
    """A workload of Pollux's on 16 x 4 devices, beside what its simulator says (mean JCT, s)."""
    own = "Pollux 2446 (it changes batch sizes), Tiresias 3470, Optimus 5302"
    print(f"### Pollux's workload 6; its own simulator: {own}\n")
    print("| policy | makespan | mean JCT | median | p99 | effective | resizes |\n|:--|--:|--:|--:|--:|--:|--:|")
    trace = read(data / "pollux" / "workload-6.csv")
    assert isinstance(trace.devices, int)
    for name in (*policies.POLICIES, "guarantee"):
        found = simulate(trace.jobs, trace.devices, name, costs=trace.costs).figures()
        cells = [f"{found[key]:.0f}" for key in ("makespan", "jct_mean", "jct_median", "jct_p99")]
        print(
            f"| {name} | " + " | ".join([*cells, f"{found['utilisation_effective']:.2f}", str(found["resizes"])]) + " |"
        )
    print()


def crowd(count: int, devices: int, load: float, seed: int = 0) -> list[Job]:
    """So many jobs of 18 kinds, that ask for 1 to 32 devices at a load of so many devices' time."""
    rng, now, made = np.random.default_rng(seed), 0.0, []
    kinds = [
        (demand, Speeds.with_fixed_part(600.0, part * 600, demand))
        for demand in (1, 2, 4, 8, 16, 32)
        for part in (0.2, 0.5, 0.8)
    ]
    gap = float(np.mean([demand for demand, _ in kinds])) * 600 * 1.5 / devices / load
    for number in range(count):
        now += rng.exponential(gap)
        demand, speeds = kinds[rng.integers(len(kinds))]
        priority, work = float([1, 5, 10][rng.integers(3)]), float(rng.uniform(0.2, 2.8))
        made.append(Job(id=str(number), arrival=now, work=work, speeds=speeds, demand=demand, priority=priority))
    return made


def scale(most: int) -> None:
    """Processor seconds of simulations, deciding at each arrival and end."""
    print("### 1,000 devices, load 0.9, deciding at each event: processor seconds\n")
    counts = [count for count in (100, 1_000, 10_000, 100_000) if count <= most]
    print("| policy | " + " | ".join(f"{count:,} jobs" for count in counts) + " |\n|:--|" + "--:|" * len(counts))
    for name in (*policies.POLICIES, "guarantee"):
        cells = []
        for count in counts:
            jobs = crowd(count, 1000, 0.9)
            began = time.process_time()
            Simulator(jobs, 1000, policies.named(name, costs=VNODE), VNODE).run()
            cells.append(f"{time.process_time() - began:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print()


def main() -> None:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="published logs and traces")
    parser.add_argument("--scale", action="store_true", help="how long simulations take")
    parser.add_argument("--most", type=int, default=100_000, help="jobs, with --scale")
    options = parser.parse_args()
    if options.data is not None:
        for table in (replay, published, seeds, mixed, gavel, pollux):
            table(options.data)
    if options.scale:
        scale(options.most)


if __name__ == "__main__":
    main()
