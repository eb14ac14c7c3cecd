"""Handwritten digits: the same unmodified train step on 1, 2, 3, 4 and 8 devices, with the same bits.

    python examples/digits.py

Trains a small convolutional network on the digits that ship with scikit-learn, with V = 32 virtual nodes: once for
each number of devices, once on devices that come and go during training (8, then 3, then 5), and once with nodes
unevenly spread. The step below is what anyone would write for one device; the decorator is all that vnode asks for. If
the parameters of any two runs differ in a single bit, the example says so and fails. This machine's CPU plays eight
devices, so the times compare nothing but the overhead: there is one CPU behind them all.
"""

import argparse
import hashlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import vnode

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NODES = 32
"""As in the decorators below; what the step computes depends on it only by rounding."""


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.GroupNorm(num_groups=4)(x)
            x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        return nn.Dense(10)(x)


# The step, for the whole batch. Nothing in it knows of nodes or devices.


@vnode.virtualize(virtual_nodes=32)
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@vnode.virtualize(virtual_nodes=32)
def accuracy(state, batch):
    logits = state.apply_fn(state.params, batch["image"])
    return (logits.argmax(-1) == batch["label"]).mean()


def load():
    """Images and labels, the last fifth kept for testing."""
    data = load_digits()
    images = np.asarray(data.images[..., None], np.float32) / 16
    labels = np.asarray(data.target, np.int32)
    split = len(images) * 4 // 5
    return {"image": images[:split], "label": labels[:split]}, {"image": images[split:], "label": labels[split:]}


def batches(data, steps, size):
    """The batches; which examples are in one depends on the step number only."""
    for step in range(steps):
        index = np.random.default_rng(step).choice(len(data["label"]), size, replace=False)
        yield {name: array[index] for name, array in data.items()}


def initial_state(learning_rate):
    model = CNN()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(learning_rate))


def sha256(params):
    """A fingerprint of every bit of the parameters."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def compile_all(runs, state, batch, advance):
    """Compiles the step for every placement, several at a time; only to save time, a call would do so by itself."""

    def compile_on(step):
        step.lower(step.put(state), batch).compile()
        advance()

    steps = {place: train_step.on(place) for places in runs.values() for place in places}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_on, steps.values()))


def train(places, state, options, data, test, advance):
    """Trains on one placement after another; the only thing that differs between the runs is `places`."""
    steps = [train_step.on(place) for place in places]
    state, losses = steps[0].put(state), []
    for step in steps:
        step(state, next(batches(data, 1, options.batch)))  # the first call loads a program, which takes a moment
    began = time.perf_counter()
    for number, batch in enumerate(batches(data, options.steps, options.batch)):
        step = steps[number * len(steps) // options.steps]
        state, loss = step(state, batch)  # the state moves to the step's devices by itself
        losses.append(float(loss))
        advance()
    seconds = time.perf_counter() - began
    return {
        "places": places,
        "losses": losses,
        "accuracy": float(accuracy(state, test)),
        "seconds": seconds,
        "sha256": sha256(state.params),
    }


def choose(options):
    """The placements of every run, by its name."""
    devices = jax.devices()
    runs = {str(count): [vnode.Placement(NODES, devices[:count])] for count in options.devices}
    runs[" → ".join(map(str, options.resize))] = [vnode.Placement(NODES, devices[:count]) for count in options.resize]
    uneven = vnode.Placement(NODES, devices[: len(options.uneven)], counts=options.uneven)
    runs[f"{uneven.size}, uneven"] = [uneven]
    return runs


def nodes(places):
    """Nodes per device in a few words."""
    few = [" or ".join(map(str, sorted(set(place.counts), reverse=True))) for place in places]
    return (
        " → ".join(few) if len(places) > 1 or len(set(places[0].counts)) < 3 else " ".join(map(str, places[0].counts))
    )


def draw(runs, path):
    """Loss curves on the left; on the right, which device computes which node."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), width_ratios=(3, 2), layout="constrained")
    for i, (name, run) in enumerate(runs.items()):
        places, losses = run["places"], run["losses"]
        left.plot(losses, label=name, linewidth=2 * (len(runs) - i), solid_capstyle="butt")
        for k in range(1, len(places)):
            at = -(-k * len(losses) // len(places)) - 0.5
            left.axvline(at, color="gray", linestyle=":", linewidth=1)
            change = f"{places[k - 1].size} → {places[k].size}"
            left.annotate(
                change, (at, 0.97), xycoords=("data", "axes fraction"), va="top", ha="center", color="dimgray"
            )
    left.set(xlabel="step", ylabel="loss", title="Training loss: all curves coincide")
    left.legend(title="devices")

    rows = {}
    for name, run in runs.items():
        for place in run["places"]:
            rows.setdefault(place, name if len(run["places"]) == 1 else str(place.size))
    cells = np.array([np.repeat(np.arange(place.size), place.counts) for place in rows])
    right.imshow(cells, cmap="tab10", vmin=0, vmax=9, aspect="auto", interpolation="nearest")
    right.set(xlabel="virtual node", ylabel="devices", title="Placement: one colour per device")
    right.set_yticks(range(len(rows)), rows.values())
    right.set_xticks(np.arange(-0.5, cells.shape[1]), minor=True)
    right.set_yticks(np.arange(-0.5, len(rows)), minor=True)
    right.grid(which="minor", color="white", linewidth=1)
    right.tick_params(which="minor", length=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run")
    parser.add_argument("--batch", type=int, default=256, help="examples in a batch")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 3, 4, 8], help="train on so many devices")
    parser.add_argument("--resize", type=int, nargs="+", default=[8, 3, 5], help="change devices while training")
    parser.add_argument(
        "--uneven", type=int, nargs="+", default=[17, 9, 6], help="nodes of each device in one more run"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="where to write the picture")
    options = parser.parse_args()
    console = Console()
    if max(*options.devices, *options.resize, len(options.uneven)) > len(jax.devices()):
        parser.error(f"there are {len(jax.devices())} devices; for more on a CPU set XLA_FLAGS before the start")

    data, test = load()
    state, chosen, runs = initial_state(options.learning_rate), choose(options), {}
    with Progress(console=console) as progress:
        task = progress.add_task("compiling", total=len({place for places in chosen.values() for place in places}))
        compile_all(chosen, state, next(batches(data, 1, options.batch)), lambda: progress.advance(task))
        for name, places in chosen.items():
            task = progress.add_task(f"devices: {name}", total=options.steps)
            runs[name] = train(places, state, options, data, test, lambda task=task: progress.advance(task))

    table = Table(title=f"{NODES} virtual nodes, batch {options.batch}, {options.steps} steps")
    for column in ("devices", "nodes on\neach", "loss", "test\naccuracy", "seconds"):
        table.add_column(column, justify="right", no_wrap=column != "nodes on\neach")
    table.add_column("SHA-256 of\nparameters", no_wrap=True)
    first = next(iter(runs.values()))["sha256"]
    different = [name for name, run in runs.items() if run["sha256"] != first]
    for name, run in runs.items():
        loss, accurate, seconds = f"{run['losses'][-1]:.6f}", f"{run['accuracy']:.4f}", f"{run['seconds']:.2f}"
        style = "bold red" if name in different else None
        table.add_row(name, nodes(run["places"]), loss, accurate, seconds, run["sha256"][:12], style=style)
    console.print(table)
    draw(runs, options.out)
    console.print(f"Loss curves and placement: {options.out}")

    if different:
        console.print(f"[bold red]The hashes differ: the devices show in the result of {'; '.join(different)}.")
        sys.exit(1)
    console.print("The hashes are equal: every bit of the parameters is the same, whatever the devices.")


if __name__ == "__main__":
    main()
