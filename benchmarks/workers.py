"""Measures what training waits for when workers come, go, and are killed.

    python -m benchmarks.workers --mb 100 --repeat 5

A job of two workers trains a step with a state of so many MB. It grows to three, shrinks to two, and one of the workers
is killed, in turn. A survivor's callback notes when each step was done. The stall of a planned change is the time
between the last step before it and the first behind it, less the median step; the recovery of a loss is the time from
the kill to the next step that is done. The final SHA-256 is compared with that of a run alone.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import signal
import statistics
import sys
import time

WAIT = 120
"""Seconds to wait for a change."""


def train(megabytes: int, steps: int) -> str:
    """The script of a worker, or of a run alone; returns the SHA-256 of the state."""
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
    stamps: list[tuple[float, int]] = []
    job = os.environ.get("VNODE_JOB")
    end = pathlib.Path(job) / "end" if job else None

    def callback(number: int, metrics: object) -> bool:
        stamps.append((time.time(), number))
        return end is not None and end.exists() and number >= int(end.read_text() or steps)

    result = vnode.elastic.run(
        step,
        jax.tree.map(jnp.asarray, state),
        vnode.data.Batches(data, 12, seed=0),
        steps=steps,
        callback=callback,
        progress=False,
    )
    digest = hashlib.sha256(
        b"".join(np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(result.state))
    )
    if job:
        path = pathlib.Path(job) / f"stamps-{os.environ['VNODE_WORKER']}.json"
        path.write_text(json.dumps([stamps, digest.hexdigest(), result.step]))
    return digest.hexdigest()


def wait(done) -> None:
    """Waits until something has happened."""
    end = time.monotonic() + WAIT
    while not done():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100, help="of the state")
    parser.add_argument("--repeat", type=int, default=5, help="changes of each kind")
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    if "VNODE_JOB" in os.environ:
        train(options.mb, options.steps)
        return
    import vnode

    kills: list[float] = []
    job = vnode.elastic.launch(
        __file__,
        workers=2,
        arguments=["--mb", str(options.mb)],
        max_restarts=options.repeat + 1,
        env={"JAX_PLATFORMS": "cpu"},
    )
    wait(lambda: (job.step or 0) > 10)

    def settled(count: int) -> None:
        wait(lambda: len(job.workers) == count)
        there = job.step
        wait(lambda: (job.step or 0) > (there or 0) + 12)

    for _ in range(options.repeat):
        job.resize(3)
        settled(3)
        job.resize(2)
        settled(2)
        victim = job.workers[1]
        kills.append(time.time())
        os.kill(victim["pid"], signal.SIGKILL)
        wait(lambda: len(job.workers) == 1)
        settled(2)
    last = (job.step or 0) + 20
    (job.folder / "end").write_text(str(last))
    job.wait(WAIT)
    stamps, digest, steps = json.loads((job.folder / "stamps-0.json").read_text())
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(stamps)]
    usual = statistics.median(gaps)
    starts = [event for event in job.events if event["event"] in ("trains", "lost")]
    sizes, before, kinds = {"grow": [], "shrink": []}, 2, []
    for event in starts:
        if event["event"] == "lost":
            before = None
            continue
        size = len(event["why"].split("workers ")[1].split())
        kinds.append((event["step"], None if before is None else "grow" if size > before else "shrink"))
        before = size
    at = {number: stamp for stamp, number in stamps}
    for step, kind in kinds[1:]:
        if kind and step in at and step - 1 in at:
            sizes[kind].append(at[step] - at[step - 1] - usual)
    recoveries = [recovery(stamps, job.events, kill) for kill in kills]
    print(f"{options.mb} MB, {steps} steps, median step {usual:.3f} s; load {os.getloadavg()[0]:.1f}")
    for name, values in {**sizes, "kill to next step": recoveries}.items():
        if values:
            print(f"{name:18} median {statistics.median(values):.2f} s, most {max(values):.2f} s, {len(values)} times")
    alone = train(options.mb, steps)
    print(f"SHA-256 {digest[:16]}, alone {alone[:16]}: {'equal' if digest == alone else 'DIFFERENT'}")
    sys.exit(digest != alone)


def recovery(stamps: list, events: list, kill: float) -> float:
    """Seconds from a kill to the first step that the next generation has done."""
    begun = next(event["time"] for event in events if event["event"] == "trains" and event["time"] > kill)
    return next(stamp for stamp, _ in stamps if stamp > begun) - kill


if __name__ == "__main__":
    main()
