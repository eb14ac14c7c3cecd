"""Measures what training waits for when workers come, go, and are killed.

    python -m benchmarks.workers --mb 100 --repeat 20

A job of two workers trains a step with a state of so many MB. In turn it grows to three, shrinks to two, loses its last
rank by SIGKILL, its first rank by SIGKILL, and its last rank by SIGSTOP; after each loss a new worker joins. Each
worker's callback notes when each step was done. The stall of a planned change is the longest time between two steps,
from the last one before it to the twelfth after it, less the median step. The recovery of a loss is the time from the
signal to the next step that a worker has done in the next generation. The final SHA-256 is compared with that of a run
alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import workers_script as script
from benchmarks.workers_script import wait, wait_steps

WITHIN = 12
"""Steps from a planned change within which its stall is looked for: there may be more than one."""


def train(megabytes: int, steps: int, folder: Path | None) -> str:
    """The script of a worker, or of a run alone, without a folder; returns the SHA-256 of the state."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import vnode

    width = int((megabytes * 1e6 / 4 / 2) ** 0.5)  # parameters and momentum

    @vnode.virtualize(virtual_nodes=6)
    def step(state, batch):
        def loss_fn(w):
            return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        momentum = 0.9 * state["m"] + grad
        return {"w": state["w"] - 0.01 * momentum, "m": momentum}, {"loss": loss}

    rng = np.random.default_rng(0)
    data = {name: rng.standard_normal((120, width), np.float32) for name in "xy"}
    state = {
        "w": rng.standard_normal((width, width), np.float32) / width**0.5,
        "m": np.zeros((width, width), np.float32),
    }
    return script.train(step, state, vnode.data.Batches(data, 12, seed=0), steps, folder)


def main() -> None:
    """Trains as a worker; or launches a job, and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100, help="of the state")
    parser.add_argument("--repeat", type=int, default=5, help="turns")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rejoin", action="store_true", help="leave a generation before the next is made")
    parser.add_argument("--restart", action="store_true", help="replace all workers at each change")
    options = parser.parse_args()
    if folder := script.job_folder():
        train(options.mb, options.steps, folder)
        return
    with tempfile.TemporaryDirectory() as saved:
        way = {"rejoin": options.rejoin, "restart": options.restart, "checkpoint": saved if options.restart else None}
        measure(script.launch(__file__, 2, ["--mb", str(options.mb)], max_restarts=4 * options.repeat, **way), options)


def measure(job: Any, options: argparse.Namespace) -> None:
    """Has workers of a job come, go and be killed; prints a table, and ends the process."""
    signals: dict[str, list[float]] = {"SIGKILL, last rank": [], "SIGKILL, rank 0": [], "SIGSTOP, last rank": []}
    wait(lambda: (job.step or 0) > 10)

    def lose(name: str, rank: int, number: int) -> None:
        victim = job.workers[rank]
        signals[name].append(time.time())
        os.kill(victim["pid"], number)
        wait(lambda: victim["pid"] not in [worker["pid"] for worker in job.workers])
        wait_steps(job, 2, 13)

    for turn in range(options.repeat):
        job.resize(3)
        wait_steps(job, 3, 13)
        job.resize(2)
        wait_steps(job, 2, 13)
        lose("SIGKILL, last rank", -1, signal.SIGKILL)
        lose("SIGKILL, rank 0", 0, signal.SIGKILL)
        lose("SIGSTOP, last rank", -1, signal.SIGSTOP)
        print(f"turn {turn + 1} of {options.repeat}, step {job.step}", file=sys.stderr)
    steps = script.end(job)
    digest = (job.folder / "digest").read_text().split()[0]
    of_all = list(script.stamps(job.folder).values())
    usual = statistics.median(b[0] - a[0] for stamps in of_all for a, b in itertools.pairwise(stamps))
    stamps = sorted(itertools.chain.from_iterable(of_all))
    starts = [event for event in job.events if event["event"] in ("trains", "lost")]
    sizes, before, kinds = {"grow": [], "shrink": []}, 2, []
    for event in starts:
        if event["event"] == "lost":
            before = None
            continue
        size = len(event["why"].split("workers ")[1].split())
        kinds.append((event["step"], None if before is None else "grow" if size > before else "shrink"))
        before = size
    at: dict[int, float] = {}
    for stamp, number in stamps:
        at.setdefault(number, stamp)
    for step, kind in kinds[1:]:
        if kind is None:
            continue
        gaps = [at[n] - at[n - 1] for n in range(step, step + WITHIN) if n in at and n - 1 in at]
        if gaps:
            sizes[kind].append(max(gaps) - usual)
    recoveries = {name: [recovery(stamps, job.events, sent) for sent in times] for name, times in signals.items()}
    print(f"{options.mb} MB, {steps} steps, median step {usual:.3f} s; load {os.getloadavg()[0]:.1f}")
    for name, values in {**sizes, **recoveries}.items():
        if values:
            print(
                f"{name:20} median {statistics.median(values):.2f} s, p99 {script.percentile(values):.2f} s, "
                f"most {max(values):.2f} s, {len(values)} times"
            )
    alone = train(options.mb, steps, None)
    print(f"SHA-256 {digest[:16]}, alone {alone[:16]}: {'equal' if digest == alone else 'DIFFERENT'}")
    sys.exit(digest != alone)


def recovery(stamps: list, events: list, sent: float) -> float:
    """Seconds from a signal to the first step that the next generation has done."""
    begun = next(event["time"] for event in events if event["event"] == "trains" and event["time"] > sent)
    return next(stamp for stamp, _ in stamps if stamp > begun) - sent


if __name__ == "__main__":
    main()
