"""A job of a cluster: trains a small model, and takes a least time for each step, by number of workers.

    python tests/programs/paced_job.py STEPS SEED FIXED REST [RUNS [NODES]]

A step takes at least FIXED + REST / n seconds on n workers, so that it scales as with devices of its own. It prints
the hash of its final state; of RUNS such runs, with other data, one after the other.

Knows jax and `vnode.elastic.run`. Must not know who starts it.
"""

import hashlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import vnode
from vnode.placement.world import world

STEPS, SEED = int(sys.argv[1]), int(sys.argv[2])
FIXED, REST = float(sys.argv[3]), float(sys.argv[4])
RUNS, NODES = map(int, [*sys.argv[5:], "1", "8"][:2] if len(sys.argv) != 6 else [sys.argv[5], "8"])
LAST = [time.monotonic()]


@vnode.virtualize(virtual_nodes=NODES)
def train_step(state, batch):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch["x"] @ weights["a"]) @ weights["b"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.05 * g, state, grads), {"loss": loss}


def pace(step, metrics):
    wait = LAST[0] + FIXED + REST / world().count - time.monotonic()
    if wait > 0:
        time.sleep(wait)
    LAST[0] = time.monotonic()


for run in range(RUNS):
    rng = np.random.default_rng(SEED + run)
    state = {name: rng.normal(size=size).astype(np.float32) for name, size in [("a", (16, 32)), ("b", (32, 1))]}
    data = {name: rng.normal(size=(512, width)).astype(np.float32) for name, width in [("x", 16), ("y", 1)]}
    batches = vnode.data.Batches(data, 64, seed=SEED + run)
    result = vnode.elastic.run(train_step, state, batches, steps=STEPS, callback=pace, progress=False)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.state)))
    print("hash", digest.hexdigest(), result.step, flush=True)
