"""Runs jobs on a scheduler, and compares when they end with a simulation of the same jobs: `docs/cluster.md`.

    python -m benchmarks.cluster_live --policy goodput

Seven jobs share four workers. Steps are paced: one takes at least FIXED + REST / n seconds on n workers, as if each
worker had a device of its own; the cores of this machine do what else there is to do. The simulation knows the seconds
of a step that were measured in this run, the arrivals, the seconds that a job takes besides its steps (three short
jobs, each alone, before), and the median seconds of a growth in this run; stalls are those of docs/workers.md. The hash
of each job is compared with that of the job alone.

Knows the scheduler and the simulator. Must not know how either works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

import vnode.cluster
from vnode.cluster import VNODE, Job, Result, Submission

PROGRAM = str(Path(__file__).parents[1] / "tests" / "programs" / "paced_job.py")

JOBS = [  # arrival, steps, seed, fixed, rest, most workers, priority
    (0, 300, 1, 0.05, 0.25, 4, 1),
    (10, 200, 2, 0.10, 0.20, 2, 1),
    (25, 250, 3, 0.02, 0.30, 4, 2),
    (45, 150, 4, 0.20, 0.10, 2, 1),
    (70, 300, 5, 0.04, 0.20, 4, 5),
    (90, 200, 6, 0.05, 0.30, 4, 1),
    (110, 100, 7, 0.10, 0.40, 4, 1),
]


def command(steps: int, seed: int, fixed: float, rest: float) -> list[str]:
    return [sys.executable, PROGRAM, *map(str, (steps, seed, fixed, rest))]


def hash_of(output: str) -> str:
    return output.split("hash ")[-1].split()[0]


def overhead_of_a_job(runs: int = 3, steps: int = 20, pace: float = 0.1) -> float:
    """Seconds that a job takes besides its steps, before the first and behind the last: the median of some, alone."""
    found = []
    for seed in range(runs):
        job = Submission(command=command(steps, seed, pace, 0.0))
        found.append(vnode.cluster.run([job], 1).result.of_jobs()[0].jct - steps * pace)
    return statistics.median(found)


def growths_in(result: Result) -> list[float]:
    """Seconds from further devices to steps on them."""
    growths = []
    asked: dict[int, tuple[float, int]] = {}
    runs: dict[int, int] = {}
    for event in result.events:
        if event.kind == "holds":
            asked[event.job] = event.time, event.devices
        elif event.kind == "runs":
            if event.devices > runs.get(event.job, 0) > 0 and event.devices == asked[event.job][1]:
                growths.append(event.time - asked[event.job][0])
            runs[event.job] = event.devices
    return growths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--scale", type=float, default=1.0, help="of steps and arrivals")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    scale = chosen.scale
    submissions = [
        Submission(
            command=command(int(steps * scale), seed, fixed, rest),
            name=f"job-{seed}",
            workers=(1, most),
            priority=priority,
            arrival=arrival * scale,
            steps=int(steps * scale),
            step_seconds={n: fixed + rest / n for n in range(1, most + 1)},
        )
        for arrival, steps, seed, fixed, rest, most, priority in JOBS
    ]
    overhead = overhead_of_a_job()
    run = vnode.cluster.run(submissions, 4, chosen.policy, say=lambda line: print(line, file=sys.stderr))
    live = run.result
    growths = growths_in(live)
    costs = dataclasses.replace(VNODE, start=overhead, growth=statistics.median(growths or [5.0]))
    jobs = [
        Job(
            id=job.id,
            arrival=job.arrival,
            work=each.steps,
            speeds=job.speeds,  # as measured while it ran
            demand=each.range[1],
            priority=each.priority,
        )
        for job, each in zip(live.jobs, submissions, strict=True)
    ]
    simulated = vnode.cluster.simulate(jobs, 4, chosen.policy, costs=costs)
    there, would = live.of_jobs(), simulated.of_jobs()
    rows = []
    for job, other, each in zip(there, would, submissions, strict=True):
        alone = subprocess.run(command(each.steps, int(each.command[3]), 0, 0), capture_output=True, text=True)
        same = hash_of(alone.stdout) == hash_of(run.output(job.id))
        rows.append((each.name, job.jct, other.jct, other.jct / job.jct - 1, job.resizes, other.resizes, same))
    mean = statistics.mean(job.jct for job in would) / statistics.mean(job.jct for job in there) - 1
    if chosen.json:
        print(json.dumps({"jobs": rows, "mean": mean, "start": costs.start, "growth": costs.growth}))
        return
    print(f"a job's overhead {costs.start:.1f} s; {len(growths)} growths, median {costs.growth:.1f} s")
    print("job     live JCT  simulated  differs  resizes  simulated  same hash")
    for name, jct, other, differs, resizes, others, same in rows:
        print(f"{name:<7} {jct:8.1f}  {other:9.1f}  {differs:+7.1%}  {resizes:7}  {others:9}  {same}")
    print(f"mean JCT: the simulation differs by {mean:+.1%}")


if __name__ == "__main__":
    main()
