"""A model that does not fit on a device as it is: a plan for splitting it is searched, checked, saved, carried out.

    python examples/plan.py

The network reads the digits that ship with scikit-learn, and is given half of the memory per device that it takes with
its state on every device. `vnode.partition.search` finds how to split it over eight devices, and compiles it to see
whether it fits; the plan is written to a file, read again, and trains. The losses are those of the plain step, which no
device was too small for, up to rounding; if not, the script fails. This machine's CPU plays the devices.

    python examples/plan.py --machine v5e:2x4

prints a plan for that slice of a TPU instead: nothing of it needs to be there.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from sklearn.datasets import load_digits

import vnode

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


# The step, for one big device and the whole batch. Nothing in it knows of devices, or of how it will be split.


def train_step(state, batch):
    def loss_fn(params):
        hidden = jax.nn.gelu(batch["image"] @ params["first"])
        for layer in params["layers"]:
            hidden += jax.nn.gelu(hidden @ layer["up"]) @ layer["down"]
        losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["logits"], batch["label"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["slots"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, loss


def initial_state(width, layers):
    keys = iter(jax.random.split(jax.random.key(0), 2 + 2 * layers))

    def normal(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    params = {
        "first": normal(64, width),
        "layers": [{"up": normal(width, 4 * width), "down": normal(4 * width, width)} for _ in range(layers)],
        "logits": normal(width, 10),
    }
    return {"params": params, "slots": OPTIMIZER.init(params)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="a TPU slice such as v5e:2x4 to print a plan for; by default what is here")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--batch", type=int, default=64, help="examples in a batch")
    parser.add_argument("--width", type=int, default=256, help="of the network")
    parser.add_argument("--layers", type=int, default=3, help="of the network")
    parser.add_argument("--budget", type=float, default=30, help="seconds of a search")
    options = parser.parse_args()
    console = Console()

    images, labels = load_digits(return_X_y=True)
    data = {"image": (images / 16).astype(np.float32), "label": labels.astype(np.int32)}
    batches = vnode.data.Batches(data, options.batch, seed=0)
    state = initial_state(options.width, options.layers)
    search = {"virtual_nodes": 8, "budget": options.budget, "donate_argnums": 0}

    if options.machine:
        machine = vnode.partition.Machine.tpu(options.machine)
        console.print(vnode.partition.search(train_step, (state, batches.batch(0)), machine, **search))
        return

    console.print("measuring this machine ...")
    machine = vnode.partition.Machine.here()
    free = vnode.partition.search(train_step, (state, batches.batch(0)), machine, **search)
    memory = max(each.memory for each in (free.figures, *free.beside.values())) // 2
    plan = vnode.partition.search(train_step, (state, batches.batch(0)), machine, memory=memory, **search)
    console.print(plan)
    console.print(plan.accept())

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan.save(file)
        loaded = vnode.partition.Plan.load(file, train_step, (state, batches.batch(0)), donate_argnums=0)
    step, plain = loaded.step(), jax.jit(train_step)
    there, whole = step.put(state), initial_state(options.width, options.layers)  # the step's own is given away
    largest = 0.0
    for number in range(options.steps):
        there, loss = step(there, batches.batch(number))
        whole, wanted = plain(whole, batches.batch(number))
        largest = max(largest, float(jnp.abs(loss - wanted) / wanted))
        if number % 5 == 0:
            console.print(f"step {number}: loss {loss:.5f}, of the plain step {wanted:.5f}", highlight=False)
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(there) for shard in leaf.addressable_shards[:1])
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(there))
    console.print(f"a device holds {held / total:.1%} of the state; losses differ by {largest:.1e} at most")
    sys.exit(not largest < 1e-3)


if __name__ == "__main__":
    main()
