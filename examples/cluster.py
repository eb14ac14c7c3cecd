"""Three jobs that share four workers: handwritten digits, trained by whoever is there, with the same bits.

    python examples/cluster.py

Each job trains a small network on the digits that ship with scikit-learn. The first has all four workers until the
second arrives; the third matters twice as much as the others. A scheduler decides at each arrival and end who has how
many workers. In the end the state of each job has the same SHA-256 as the state of that job alone in this process; if
not, the script fails. A page with the picture of who had how many workers is written, too.
"""

import argparse
import hashlib
import os
import pathlib
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import vnode

OPTIMIZER = optax.adam(3e-3)
JOBS = {"wide": (192, 400, 1, 0), "small": (48, 250, 1, 4), "urgent": (96, 200, 2, 8)}
"""By name: width, steps, priority, and the second at which it arrives."""


@vnode.virtualize(virtual_nodes=12)
def train_step(state, batch):
    def loss_fn(params):
        hidden = jax.nn.relu(batch["image"] @ params["hidden"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["logits"], batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["slots"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, {"loss": loss}


def train(name):
    """An ordinary script: the same alone, and in each of several workers. Returns a fingerprint of the final state."""
    width, steps, _, _ = JOBS[name]
    images, labels = load_digits(return_X_y=True)
    data = {"image": (images / 16).astype(np.float32), "label": labels.astype(np.int32)}
    keys = jax.random.split(jax.random.key(width))
    params = {
        "hidden": jax.random.normal(keys[0], (64, width)) / 8,
        "logits": jax.random.normal(keys[1], (width, 10)) / width**0.5,
    }
    pause = 0.03 if "VNODE_JOB" in os.environ else 0  # a larger model would need that long
    result = vnode.elastic.run(
        train_step,
        {"params": params, "slots": OPTIMIZER.init(params)},
        vnode.data.Batches(data, 120, seed=width),
        steps=steps,
        callback=lambda step, metrics: time.sleep(pause),
        progress=False,
    )
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.state))).hexdigest()


def draw(result, columns=72):
    """Who had how many workers when, as lines of digits."""
    width = result.makespan / columns
    for job, shares in zip(result.jobs, result.shares(), strict=True):
        line = [" "] * columns
        for start, end, count in shares:
            for column in range(int(start / width), min(round(end / width + 0.5), columns)):
                line[column] = str(count)
        print(f"  {job.facts['name']:>8} {''.join(line)}")
    print(f"  {'':>8} 0 s{f'{result.makespan:.0f} s':>{columns - 3}}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, help="be this job")
    parser.add_argument("--policy", default="max_min", help="who has how many workers")
    parser.add_argument("--out", default="runs/cluster", help="folder for the page")
    options = parser.parse_args()
    if options.job:
        print("SHA-256", train(options.job))
        return

    script = os.path.abspath(__file__)
    jobs = [
        vnode.cluster.Submission(
            command=[sys.executable, script, "--job", name],
            name=name,
            workers=(1, 4),
            priority=priority,
            arrival=arrival,
        )
        for name, (_, _, priority, arrival) in JOBS.items()
    ]
    print(f"three jobs on four workers, policy {options.policy}")
    run = vnode.cluster.run(jobs, 4, options.policy, say=lambda line: print(f"  {line}", flush=True))
    draw(run.result)
    from vnode.cluster import result_page

    page = result_page.write(pathlib.Path(options.out), {options.policy: run.result}, "", {})
    print(f"  picture: {page}")
    same = True
    for name, (job, shown) in zip(JOBS, run.jobs.items(), strict=True):
        alone = train(name)
        said = run.output(job).split("SHA-256 ")[-1].strip()
        same = same and shown["state"] == "succeeded" and said == alone
        print(f"  {name:>8} {said[:16]} in {shown['ended'] - shown['submitted']:.0f} s; alone {alone[:16]}")
    print("The hashes are equal: who shares with whom does not show." if same else "The runs differ.")
    sys.exit(not same)


if __name__ == "__main__":
    main()
