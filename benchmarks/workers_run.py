"""Draws one run of workers that come, go and are killed: steps per second and workers over time.

    python -m benchmarks.workers_run --picture docs/pictures/workers.png

A job begins with two workers. It is asked for four; one is killed; it is asked for two; rank 0 is killed; one is
stopped; it is asked for one, and for three. After each loss a new worker joins by itself. The same script then makes
as many steps alone, on one device. The picture shows the SHA-256 of both final states.

`--again FOLDER` draws a run that was made before from the folder of its job, which is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import workers_script as script
from benchmarks.report import Sheet

NODES = 12
WINDOW = 0.5
"""Seconds over which the picture averages steps."""
GAP = 10.0
"""The least seconds between two changes: as wide as their words are in the picture."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that is done to the job.

    Attributes:
      words: for the picture.
      workers: how many train, once the job has followed.
      resize: whether the job is asked for as many workers.
      rank: of the worker that gets a signal.
      signal: that it gets.
    """

    words: str
    workers: int
    resize: bool = False
    rank: int = 0
    signal: signal.Signals = signal.SIGKILL


BEGIN = 2
CHANGES = (
    Change("4 workers\nasked for", 4, resize=True),
    Change("SIGKILL\nof rank 2", 4, rank=2),
    Change("2 workers\nasked for", 2, resize=True),
    Change("SIGKILL\nof rank 0", 2, rank=0),
    Change("SIGSTOP\nof rank 1", 2, rank=1, signal=signal.SIGSTOP),
    Change("1 worker\nasked for", 1, resize=True),
    Change("3 workers\nasked for", 3, resize=True),
)


def disturbed(options: argparse.Namespace) -> Path:
    """Runs the job; returns its folder, which tells the rest."""
    job = script.launch(__file__, BEGIN, arguments(options), max_restarts=len(CHANGES))
    script.wait_steps(job, BEGIN, 20)
    done: list[float] = []
    for change in CHANGES:
        settle(done[-1] if done else time.time())
        done.append(time.time())
        if change.resize:
            job.resize(change.workers)
        else:
            victim = job.workers[change.rank]["pid"]
            os.kill(victim, change.signal)
            script.wait(lambda victim=victim: victim not in [worker["pid"] for worker in job.workers])
        script.wait_steps(job, change.workers, 10)
        print(f"{change.words!r}: step {job.step}, {len(job.workers)} workers", file=sys.stderr)
    settle(done[-1])
    script.end(job)
    script.put(job.folder / "changes.json", json.dumps(done))
    return job.folder


def settle(since: float) -> None:
    """Waits until a change may follow another one."""
    time.sleep(max(since + GAP - time.time(), 2.0))


def alone(options: argparse.Namespace, folder: Path) -> str:
    """The SHA-256 of the same steps on one device, in a process that nobody disturbs."""
    steps = (folder / "digest").read_text().split()[1]
    command = [sys.executable, "-m", "benchmarks.workers_run", "--alone", steps, *arguments(options)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    said = subprocess.run(command, env=environment, cwd=script.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    digest = said.stdout.split()[-1]
    script.put(folder / "alone", digest)
    return digest


def arguments(options: argparse.Namespace) -> list[str]:
    """The command line by which another process has the same network."""
    return ["--examples", str(options.examples), "--width", str(options.width)]


@dataclasses.dataclass(frozen=True)
class Story:
    """A run, with times in seconds since its first step.

    Attributes:
      changes: when each change was made.
      at: when each step was done by all that did it.
      workers: from when on how many train.
      starting: from when to when a process of a new worker started.
      making: from when to when the next generation was made.
      steps: how many.
      digests: of the final states of the job, and of the run alone.
    """

    changes: Sequence[float]
    at: Sequence[float]
    workers: Sequence[tuple[float, int]]
    starting: Sequence[tuple[float, float]]
    making: Sequence[tuple[float, float]]
    steps: int
    digests: tuple[str, str]

    @classmethod
    def from_folder(cls, folder: Path) -> Story:
        """That of a job's folder."""
        last: dict[int, float] = {}
        for moment, number in itertools.chain.from_iterable(script.stamps(folder).values()):
            last[number] = max(moment, last.get(number, 0.0))
        first = min(last.values())
        at = list(itertools.accumulate((last[number] - first for number in sorted(last)), max))
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        events = [{**event, "time": event["time"] - first} for event in events]
        digest, steps = (folder / "digest").read_text().split()
        changes = [moment - first for moment in json.loads((folder / "changes.json").read_text())]
        starts = spans(events, "start", ("arrived", "lost", "end"), lambda event: event["worker"])
        made = spans(events, "prepare", ("go", "cancel"), lambda event: None)
        other = (folder / "alone").read_text()
        return cls(changes, at, counts(events), starts, made, int(steps), (digest, other))

    def without_step(self, number: int) -> float:
        """The longest time between two steps, of those that ended between a change and the next one."""
        since, until = [*self.changes, self.at[-1]][number : number + 2]
        return max(b - a for a, b in itertools.pairwise(self.at) if since < b <= until)

    def settled(self, number: int) -> float:
        """Seconds from a change until as many workers train as there shall be."""
        since, wanted = self.changes[number], CHANGES[number].workers
        there = [(moment, count) for moment, count in self.workers if moment > since]
        return next(moment for moment, count in there if count == wanted) - since

    def speed(self) -> tuple[list[float], list[float]]:
        """Moments, and steps per second in a window around each; the time of a step counts evenly."""
        import numpy as np

        edges = np.arange(0.0, self.at[-1], WINDOW)
        done = np.interp(edges, self.at, np.arange(len(self.at)))
        return list(edges[:-1] + WINDOW / 2), list(np.diff(done) / WINDOW)


def spans(
    events: Sequence[dict[str, Any]], begin: str, ends: Sequence[str], key: Callable[[dict[str, Any]], Any]
) -> list[tuple[float, float]]:
    """From each event of a kind to the next one of another kind with the same key; those that overlap are one."""
    found: list[tuple[float, float]] = []
    for number, event in enumerate(events):
        if event["event"] == begin:
            later = (e["time"] for e in events[number:] if e["event"] in ends and key(e) == key(event))
            since, until = event["time"], next(later, event["time"])
            if found and since <= found[-1][1]:
                since, until = found[-1][0], max(until, found.pop()[1])
            found.append((since, until))
    return found


def counts(events: Sequence[dict[str, Any]]) -> list[tuple[float, int]]:
    """From when on how many workers train, or are left of those that did."""
    found: list[tuple[float, int]] = []
    members: set[int] = set()
    for event in events:
        if event["event"] == "trains":
            members = {int(name) for name in event["why"].split("workers ")[1].split()}
        elif event["event"] == "lost" and event["worker"] in members:
            members = members - {event["worker"]}
        else:
            continue
        found.append((event["time"], len(members)))
    return found


def table(story: Story) -> Sheet:
    """The changes."""
    rows = [
        [
            change.words.replace("\n", " "),
            f"{moment:.1f}",
            str(change.workers),
            f"{story.settled(number):.1f}",
            f"{story.without_step(number):.2f}",
        ]
        for number, (change, moment) in enumerate(zip(CHANGES, story.changes, strict=True))
    ]
    heads = ["change", "at second", "workers after it", "s until they train", "longest time without a step, s"]
    usual = sorted(b - a for a, b in itertools.pairwise(story.at))[len(story.at) // 2]
    note = f"{story.steps} steps in {story.at[-1]:.0f} s; the median step took {usual:.3f} s."
    return Sheet("One run", heads, rows, note)


def draw(story: Story, path: Path) -> None:
    """Draws steps per second above, workers below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 4.8), sharex=True, layout="constrained", height_ratios=[2.2, 1]
    )
    moments, speed = story.speed()
    for number, (begin, end) in enumerate(story.starting):
        label = None if number else "a process of a new worker starts"
        above.axvspan(begin, end, color="#999999", alpha=0.25, linewidth=0, label=label)
    for number, (begin, end) in enumerate(story.making):
        label = None if number else "the next generation is made"
        above.axvspan(begin, end, color="#b3541e", alpha=0.25, linewidth=0, label=label)
    above.plot(moments, speed, color="#1f7a5c", label=f"steps per second, over {WINDOW} s")
    top = 1.15 * max(speed)
    above.set_ylim(0, top)
    above.set_ylabel("steps per second")
    begins = [moment for moment, _ in story.workers]
    number = [count for _, count in story.workers]
    below.stairs(number, [*begins, story.at[-1]], fill=True, color="#6c5aa8", alpha=0.7)
    below.set_ylim(0, max(number) + 0.5)
    below.set_yticks(range(max(number) + 1))
    below.set_ylabel("workers\nthat train")
    below.set_xlabel(f"seconds since the first step; all workers share {os.cpu_count()} cores, whatever their number")
    for panel in (above, below):
        panel.set_xlim(0, story.at[-1])
        panel.grid(alpha=0.3)
        for moment in story.changes:
            panel.axvline(moment, color="black", linewidth=0.8, linestyle="--")
    for number, (change, moment) in enumerate(zip(CHANGES, story.changes, strict=True)):
        words = f"{change.words}\n{story.without_step(number):.2f} s"
        above.annotate(words, (moment, top), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8)
    above.annotate(
        "without\na step:", (0, top), (-4, 3), textcoords="offset points", ha="right", va="bottom", fontsize=8
    )
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    job, other = story.digests
    same = "the same bits" if job == other else "DIFFERENT BITS"
    figure.suptitle(
        f"SHA-256 of the state after {story.steps} steps: {same}\nthis run           {job}\none device, alone  {other}",
        fontsize=8,
        family="monospace",
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Runs the job and its twin, prints a table and draws the picture; in a worker, trains."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers_run", description="One run of workers that come, go and are killed."
    )
    parser.add_argument("--picture", type=Path, help="draw the run into this file")
    parser.add_argument("--examples", type=int, default=3840, help="in a batch: how long a step takes")
    parser.add_argument("--width", type=int, default=256, help="of the four layers")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="of a job whose run shall be drawn again")
    parser.add_argument("--alone", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone or script.job_folder():
        problem = script.perceptron([options.width] * 5, options.examples, NODES)
        print(script.train(*problem, options.alone or 10**9, script.job_folder()))
        return
    folder = options.again
    if folder is None:
        folder = disturbed(options)
        alone(options, folder)
    story = Story.from_folder(folder)
    print(table(story).markdown())
    job, other = story.digests
    print(f"SHA-256 {job[:16]}, alone {other[:16]}: {'equal' if job == other else 'DIFFERENT'}")
    print(f"{script.machine()}; {folder}")
    if options.picture:
        draw(story, options.picture)
    sys.exit(job != other)


if __name__ == "__main__":
    main()
