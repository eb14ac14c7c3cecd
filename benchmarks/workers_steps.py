"""Measures steps of several workers against those of one process with as many devices, and steps during a compilation.

    python -m benchmarks.workers_steps

First table: N workers with a CPU device each, and one process with N CPU devices, train the same network. They take
turns, a block of steps each, while the other side waits. The first steps of a block are not counted, because some were
under way before it. A ratio is that of two neighbouring blocks' medians; the table has the median of all, and the
least and the most.

Second table: two workers are asked for a third. Steps before that are compared with those while the third process
starts, and with those while all three make the next generation (the events `prepare` and `go`): they compile a network
of many layers of different widths, beside the training. Each time it is a new job, so that nothing is compiled yet.
jax's cache of programs is off in all of this: with it, workers compile in the background for the loss of one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import workers_script as script
from benchmarks.report import Sheet

NODES = 8
WARM = 8
"""Steps before the first block."""

UNDER_WAY = 6
"""Steps of a block that may have begun before it: `vnode.elastic.run` keeps up to five under way."""

MANY = 10**6
"""Steps: more than are made."""

FEWER = 4
"""By how much a batch of the second table is smaller: its network is larger."""


def widths(options: argparse.Namespace) -> list[int]:
    """The widths of the network: alike, or all different, so that each layer is compiled by itself."""
    if options.kind == "alike":
        return [options.width] * (options.layers + 1)
    return [options.least + 8 * (i % 2 * options.different + i) for i in range(options.different + 1)]


def work(options: argparse.Namespace) -> None:
    """The script of a worker, and of the one process."""
    examples = options.examples if options.kind == "alike" else options.examples // FEWER
    problem = script.perceptron(widths(options), examples, NODES)
    script.train(*problem, MANY, script.job_folder() or options.folder)


class Side:
    """One of two that take turns: waits at a step until it may go on.

    Args:
      folder: where it notes its steps.
      workers: how many processes note them.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers, self.limit = folder, workers, WARM
        script.put(folder / "hold", WARM)

    def wait(self) -> None:
        """Waits until it has come to its limit, and has ended the steps that were under way."""

        def arrived() -> bool:
            found = script.stamps(self.folder).values()
            return len(found) == self.workers and all(each and each[-1][1] >= self.limit for each in found)

        script.wait(arrived, 2 * script.WAIT)
        time.sleep(0.2 + UNDER_WAY * statistics.median(self.seconds(1, self.limit)))

    def turn(self, block: int) -> float:
        """Makes a block of steps; returns the median of those that began in it."""
        began, self.limit = self.limit, self.limit + block
        script.put(self.folder / "hold", self.limit)
        self.wait()
        return statistics.median(self.seconds(began + UNDER_WAY, self.limit))

    def seconds(self, first: int, last: int) -> list[float]:
        """How long steps took, by the process that is the first of its side."""
        at = {number: moment for moment, number in min(script.stamps(self.folder).items())[1]}
        return [at[number] - at[number - 1] for number in range(first, last + 1)]


@contextlib.contextmanager
def job(options: argparse.Namespace, workers: int, kind: str) -> Iterator:
    """A job that is killed in the end."""
    job = script.launch(__file__, workers, arguments(options, kind))
    try:
        yield job
    finally:
        script.kill(job)


@contextlib.contextmanager
def one_process(options: argparse.Namespace, devices: int, folder: Path) -> Iterator[None]:
    """One process with several CPU devices, which is killed in the end."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "benchmarks.workers_steps", "--folder", str(folder), *arguments(options, "alike")]
    process = subprocess.Popen(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}, cwd=script.ROOT, start_new_session=True
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def arguments(options: argparse.Namespace, kind: str) -> list[str]:
    """The command line by which another process has the same network."""
    names = ("examples", "width", "layers", "least", "different")
    return ["--kind", kind, *itertools.chain.from_iterable((f"--{n}", str(getattr(options, n))) for n in names)]


def compared(options: argparse.Namespace, sizes: Sequence[int]) -> Sheet:
    """Workers against one process."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            one = Side(Path(folder), 1)
            stack.enter_context(one_process(options, size, one.folder))
            one.wait()
            workers = Side(stack.enter_context(job(options, size, "alike")).folder, size)
            workers.wait()
            turns = [(workers.turn(options.block), one.turn(options.block)) for _ in range(options.rounds)]
        ratios = [a / b for a, b in turns]
        times = [f"{1000 * statistics.median(each):.0f}" for each in zip(*turns, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([str(size), *times, f"{statistics.median(ratios):.2f}", spread])
        print(f"{size} workers: {rows[-1]}", file=sys.stderr)
    note = (
        f"{options.layers} layers of {options.width}, {options.examples} examples a step; medians of {options.rounds} "
        f"blocks of {options.block - UNDER_WAY} steps each, which take turns."
    )
    heads = ["workers or devices", "workers, ms/step", "one process, ms/step", "ratio", "least to most"]
    return Sheet("Workers against one process with as many devices", heads, rows, note)


def compiling(options: argparse.Namespace) -> Sheet:
    """Steps while the next generation is made."""
    rows = []
    for turn in range(options.jobs):
        with job(options, 2, "different") as running:
            script.wait_steps(running, 2, 60)
            asked = time.time()
            running.resize(3)
            script.wait_steps(running, 3, 4)
            events, found = running.events, script.stamps(running.folder)["0"]
        at = {event["event"]: event["time"] for event in events if event["time"] > asked}
        spans = (0, asked), (asked, at["prepare"]), (at["prepare"], at["go"])
        before, starting, making = (intervals(found, since, until) for since, until in spans)
        usual = statistics.median(before[-40:])
        seconds = f"{at['go'] - at['prepare']:.1f}"
        rows.append([str(turn + 1), f"{1000 * usual:.0f}", slower(starting, usual), slower(making, usual), seconds])
        print(f"job {turn + 1}: {rows[-1]}", file=sys.stderr)
    heads = ["job", "before, ms/step", "a process starts", "the generation is made", "`prepare` to `go`, s"]
    note = (
        f"{options.different} layers of different widths, {options.examples // FEWER} examples a step; "
        "two workers become three. Medians, and ratios to the steps before."
    )
    return Sheet("Steps while the next generation is made", heads, rows, note)


def intervals(found: Sequence[tuple[float, int]], since: float, until: float) -> list[float]:
    """The seconds of all steps that began and ended in a span: the end of a step is the beginning of the next one."""
    return [b - a for (a, m), (b, n) in itertools.pairwise(found) if n == m + 1 and since <= a and b <= until]


def slower(steps: Sequence[float], usual: float) -> str:
    """The median of some steps, and its ratio to the usual one."""
    if not steps:
        return "no step"
    median = statistics.median(steps)
    return f"{1000 * median:.0f} ms, {median / usual:.2f}, {len(steps)} steps"


def main() -> None:
    """Measures, and prints two tables; in a worker, trains."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers_steps", description="Steps of workers against those of one process."
    )
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default="1,2,4", help="workers")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each side; 0: no first table")
    parser.add_argument("--block", type=int, default=16, help=f"steps of a block, of which {UNDER_WAY} are not counted")
    parser.add_argument("--jobs", type=int, default=3, help="jobs of the second table; 0: none")
    parser.add_argument("--examples", type=int, default=4096, help="in a batch of the first table")
    parser.add_argument("--width", type=int, default=512, help="of the layers in the first table")
    parser.add_argument("--layers", type=int, default=4, help="of the first table")
    parser.add_argument("--least", type=int, default=128, help="the least width in the second table")
    parser.add_argument("--different", type=int, default=24, help="layers of the second table")
    parser.add_argument("--kind", choices=("alike", "different"), default="alike", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder or script.job_folder():
        work(options)
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # inherited by all processes
    sheets = [compared(options, options.sizes)] if options.rounds else []
    sheets += [compiling(options)] if options.jobs else []
    for sheet in sheets:
        print(sheet.markdown())
    print(script.machine())


if __name__ == "__main__":
    main()
