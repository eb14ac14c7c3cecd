"""Handwritten digits on devices that come and go: the same bits as on devices that stay.

    python examples/elastic.py

Trains a small network on the digits that ship with scikit-learn three times: undisturbed on eight devices; on eight,
then three, then five, of which one then fails; and stopped half way as by Ctrl-C, and resumed from its checkpoint on
other devices. Each time the state (parameters, AdamW's slots, the key of dropout) has the same SHA-256 in the end; if
not, the script fails. This machine's CPU plays the devices.
"""

import argparse
import hashlib
import os
import signal
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from sklearn.datasets import load_digits

import vnode

OPTIMIZER = optax.adamw(3e-3)
WIDTH = 128


# The step, for the whole batch. Nothing in it knows of devices, of failures, or of where its batch comes from.


@vnode.virtualize(virtual_nodes=16, donate_argnums=0)
def train_step(state, batch):
    key, dropout = jax.random.split(state["key"])

    def loss_fn(params):
        hidden = jax.nn.relu(batch["image"] @ params["hidden"])
        hidden = jnp.where(jax.random.bernoulli(dropout, 0.9, hidden.shape), hidden / 0.9, 0)
        logits = hidden @ params["logits"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (logits.argmax(-1) == batch["label"]).mean()

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, slots = OPTIMIZER.update(grads, state["slots"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "slots": slots, "key": key}, {"loss": loss, "accuracy": accuracy}


def initial_state():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": jax.random.normal(keys[0], (64, WIDTH)) / 8,
        "logits": jax.random.normal(keys[1], (WIDTH, 10)) / WIDTH**0.5,
    }
    return {"params": params, "slots": OPTIMIZER.init(params), "key": keys[2]}


def sha256(state):
    """A fingerprint of every bit of a state."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state | {"key": jax.random.key_data(state["key"])}):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run, at least 8")
    parser.add_argument("--batch", type=int, default=128, help="examples in a batch")
    options = parser.parse_args()
    steps, devices = options.steps, jax.devices()
    if len(devices) < 8:
        parser.error(f"there are {len(devices)} devices; for eight on a CPU set XLA_FLAGS before the start")
    console = Console()

    images, labels = load_digits(return_X_y=True)
    data = {"image": (images / 16).astype(np.float32), "label": labels.astype(np.int32)}
    batches = vnode.data.Batches(data, options.batch, seed=0)  # batch t depends on t and the seed only
    hashes = {}

    def report(name, result):
        hashes[name] = sha256(result.state)
        number, metrics = result.history[-1]
        console.print(f"[bold]{name}[/]: step {number}, loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}")
        for change in result.resizes:
            console.print(f"  {change}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"  SHA-256 {hashes[name]}", highlight=False)

    report("undisturbed", vnode.elastic.run(train_step, initial_state(), batches, steps=steps, devices=devices))

    # Eight devices, three from a quarter of the steps on, five from half of them on.
    schedule = {0: devices, steps // 4: devices[:3], steps // 2: devices[:5]}
    failing = [devices[2]]

    def fail(step, metrics):
        """Plays a failure: a real one is an error of the runtime, after which the driver asks each device for a sum."""
        if step >= 3 * steps // 4 and failing:
            raise vnode.elastic.DeviceLost([failing.pop()])

    disturbed = vnode.elastic.run(
        train_step,
        initial_state(),
        batches,
        steps=steps,
        devices=schedule.get,
        callback=fail,
        keep_every=max(1, steps // 20),
    )
    report("8, 3, 5 devices, one lost", disturbed)

    with tempfile.TemporaryDirectory() as folder:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without one

        def interrupt(step):
            if step == steps // 2:
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does

        stopped = vnode.elastic.run(
            train_step, initial_state(), batches, steps=steps, devices=interrupt, checkpoint=folder
        )
        console.print(
            f"[bold]stopped[/] by a signal after {stopped.step} steps; the checkpoint is resumed on 5 devices"
        )
        resumed = vnode.elastic.run(
            train_step, initial_state(), batches, steps=steps, devices=devices[:5], checkpoint=folder
        )
    report("stopped and resumed", resumed)

    happened = any(change.lost for change in disturbed.resizes) and stopped.stopped and resumed.resumed
    same = len(set(hashes.values())) == 1 and happened
    console.print("The hashes are equal: no change of devices shows." if same else "[bold red]The runs differ.")
    sys.exit(not same)


if __name__ == "__main__":
    main()
