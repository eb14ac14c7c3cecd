"""Handwritten digits on workers that come and go: three, of which one is killed, and another one joins.

    python examples/workers.py

Trains a small network on the digits that ship with scikit-learn twice: in this process, undisturbed; and by three
workers, each a process with one device. After some steps the first of them is killed as by a lack of memory. The others
go on from the last step that was complete, and a new worker joins them. The state (parameters, Adam's slots, the key of
dropout) has the same SHA-256 in the end; if not, the script fails. This machine's CPU plays the devices.
"""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import vnode

OPTIMIZER = optax.adam(3e-3)
WIDTH = 128


@vnode.virtualize(virtual_nodes=12)
def train_step(state, batch):
    key, dropout = jax.random.split(state["key"])

    def loss_fn(params):
        hidden = jax.nn.relu(batch["image"] @ params["hidden"])
        hidden = jnp.where(jax.random.bernoulli(dropout, 0.9, hidden.shape), hidden / 0.9, 0)
        logits = hidden @ params["logits"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["slots"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "slots": slots, "key": key}, {"loss": loss}


def train(steps):
    """An ordinary script: the same alone, and in each of several workers."""
    images, labels = load_digits(return_X_y=True)
    data = {"image": (images / 16).astype(np.float32), "label": labels.astype(np.int32)}
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": jax.random.normal(keys[0], (64, WIDTH)) / 8,
        "logits": jax.random.normal(keys[1], (WIDTH, 10)) / WIDTH**0.5,
    }
    state = {"params": params, "slots": OPTIMIZER.init(params), "key": keys[2]}
    batches = vnode.data.Batches(data, 120, seed=0)  # batch t depends on t and the seed only
    return vnode.elastic.run(train_step, state, batches, steps=steps, callback=pause, progress=False)


def pause(step, metrics):
    """Makes a worker's step as long as that of a larger model, so that a new worker joins before the last step."""
    if "VNODE_JOB" in os.environ:
        time.sleep(0.5 if slow_file(os.environ["VNODE_JOB"]).exists() else 0.01)


def slow_file(job):
    """While this file is in the folder of a job, its steps are long."""
    return pathlib.Path(job) / "slowly"


def sha256(state):
    """A fingerprint of every bit of a state."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state | {"key": jax.random.key_data(state["key"])}):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="training steps of each run")
    options = parser.parse_args()
    if "VNODE_JOB" in os.environ:  # a worker: what it leaves there is the job's result
        result = train(options.steps)
        left = {"step": result.step, "loss": float(result.history[-1][1]["loss"]), "sha256": sha256(result.state)}
        (pathlib.Path(os.environ["VNODE_JOB"]) / "result.json").write_text(json.dumps(left))
        return

    print("alone")
    alone = sha256(train(options.steps).state)
    print(f"  SHA-256 {alone}")

    print("three workers")
    began = time.monotonic()
    with vnode.elastic.launch(__file__, workers=3, arguments=["--steps", str(options.steps)]) as job:
        wait(lambda: (job.step or 0) >= options.steps // 10)
        victim = job.workers[0]
        print(f"  {time.monotonic() - began:5.1f} s  step {job.step}: worker {victim['worker']} is killed")
        os.kill(victim["pid"], signal.SIGKILL)
        there = job.step
        slow_file(job.folder).touch()
        wait(lambda: len(job.workers) == 2 and job.step > there)
        print(f"  {time.monotonic() - began:5.1f} s  step {job.step}: two workers go on")
        wait(lambda: len(job.workers) == 3)
        slow_file(job.folder).unlink()
        print(f"  {time.monotonic() - began:5.1f} s  step {job.step}: a new one has joined")
    result = job.result
    print(f"  {time.monotonic() - began:5.1f} s  step {result['step']}: the end, loss {result['loss']:.4f}")
    print(f"  SHA-256 {result['sha256']}")
    same = result["sha256"] == alone
    print("The hashes are equal: no loss of a worker shows." if same else "The runs differ.")
    sys.exit(not same)


def wait(done, seconds=180):
    """Waits until something has happened."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"the workers have not come so far in {seconds} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
