"""A short training that one process runs, or several workers that come and go: the same script.

Knows jax, optax and `vnode.elastic.run`. Must not know who starts it. Its argument is JSON:

    model    "plain": an MLP with dropout; "donated": the same, which gives its state away; "sharded": the same, with
             divided slots; "axis": the same, divided over a model axis of this process's devices; "convolution": a CNN;
             "attention": a transformer, of which grain reads the examples; all clip gradients
    steps    how many
    pause    seconds that the callback sleeps
    slow     a file; while it is there, the callback sleeps 50 ms
    raises   the step at which the callback raises an error, in all workers, or in that of `raiser` alone
    folder   of checkpoints
    every    steps between two of them
    out      a folder, for what each process leaves: the final step, a hash of the state, the losses, and how many
             clients of JAX it has besides the first, and how many of them will never go
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import vnode
from vnode.placement.clients import KEPT, MADE

WIDTH = 48
EXAMPLES = 256
AXES = {"first": PartitionSpec(None, "model"), "second": PartitionSpec("model", None)}
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def layers() -> tuple[Any, Any]:
    """The shapes of the parameters of an MLP, and what it predicts."""

    def predict(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["first"])
        hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
        return jnp.tanh(hidden @ params["second"]) @ params["last"]

    return {"first": (16, WIDTH), "second": (WIDTH, WIDTH), "last": (WIDTH, 1)}, predict


def convolution() -> tuple[Any, Any]:
    """The same of a CNN on images of 4 by 4."""

    def predict(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        x = x.reshape(-1, 4, 4, 1)
        for name in ("first", "second"):
            x = jnp.tanh(jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=DIMENSIONS))
        return x.mean((1, 2)) @ params["last"]

    return {"first": (3, 3, 1, 8), "second": (3, 3, 8, 8), "last": (8, 1)}, predict


def attention() -> tuple[Any, Any]:
    """The same of a transformer's layer on sequences of 4 tokens of 4 numbers."""

    def predict(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        x = x.reshape(-1, 4, 4) @ params["embed"]
        q, k, v = jnp.split(x @ params["heads"], 3, -1)
        x = x + jax.nn.softmax(q @ k.swapaxes(1, 2) / 4) @ v
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
        x = x / jnp.sqrt(1e-6 + (x * x).mean(-1, keepdims=True))
        return (x + jax.nn.gelu(x @ params["up"]) @ params["down"]).mean(1) @ params["last"]

    shapes = {"embed": (4, 16), "heads": (16, 48), "up": (16, 32), "down": (32, 16), "last": (16, 1)}
    return shapes, predict


def problem(model: str) -> tuple[Any, Any, Any]:
    """The step, the state and the data."""
    rng = np.random.RandomState(0)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    shapes, predict = {"convolution": convolution, "attention": attention}.get(model, layers)()
    params = {name: jnp.asarray(0.1 * rng.randn(*shape), jnp.float32) for name, shape in shapes.items()}

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return ((predict(params, batch["x"], key) - batch["y"]) ** 2).mean()

    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(state["key"], state["count"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, key)
        updates, slots = optimizer.update(grads, state["slots"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        used = state["used"] + jax.nn.one_hot(batch["number"], EXAMPLES, dtype=jnp.int32).sum(0)
        state = {"params": params, "slots": slots, "key": state["key"], "count": state["count"] + 1, "used": used}
        return state, {"loss": loss}

    donated = {"donate_argnums": 0} if model == "donated" else {}
    axis: dict[str, Any] = {}
    if model == "axis":
        mesh = Mesh(np.array(jax.local_devices()).reshape(1, -1), ("vnode", "model"))
        axis = {"placement": vnode.Placement(8, mesh=mesh), "partition": AXES}
    made = vnode.virtualize(step, virtual_nodes=8, **donated, **axis)
    state = {"params": params, "slots": optimizer.init(params), "key": jax.random.key(0), "count": jnp.int32(0)}
    state["used"] = jnp.zeros(EXAMPLES, jnp.int32)  # how often each example was, whoever had it
    if model == "sharded":
        state = made.put(state)
        divided = made.placement.sharding("vnode")
        state["slots"] = jax.tree.map(
            lambda leaf: jax.device_put(leaf, divided) if leaf.shape[:1] == (WIDTH,) else leaf, state["slots"]
        )
    if model == "axis":
        state = made.put(state)
    data = {"x": rng.randn(EXAMPLES, 16), "y": rng.randn(EXAMPLES, 1)}
    data = {**{name: value.astype(np.float32) for name, value in data.items()}, "number": np.arange(EXAMPLES)}
    source: Any = data
    if model == "attention":
        source = vnode.grain.dataset([{name: value[i] for name, value in data.items()} for i in range(EXAMPLES)])
    return made, state, vnode.data.Batches(source, batch_size=32, seed=0)


def digest(state: Any) -> str:
    """A hash of all bits of a state; empty if this process has not all of it."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        whole, there = np.zeros(data.shape, data.dtype), np.zeros(data.shape, bool)
        for shard in data.addressable_shards:
            whole[shard.index], there[shard.index] = np.asarray(shard.data), True
        if not there.all():
            return ""
        found.update(whole.tobytes())
    return found.hexdigest()


def main(asked: dict[str, Any]) -> None:
    step, state, data = problem(asked["model"])
    slow, number = asked.get("slow"), os.environ.get("VNODE_WORKER", "alone")

    def callback(count: int, metrics: Any) -> None:
        time.sleep(0.05 if slow and os.path.exists(slow) else asked.get("pause", 0))
        if count == asked.get("raises") and asked.get("raiser", number) == number:
            raise ValueError(f"step {count} is odd")

    saves = {"checkpoint": asked["folder"], "checkpoint_every": asked.get("every", 20)} if asked.get("folder") else {}
    result = vnode.elastic.run(step, state, data, steps=asked["steps"], callback=callback, keep_every=10, **saves)
    said = {
        "step": result.step,
        "hash": digest(result.state),
        "used": np.asarray(result.state["used"].addressable_data(0)).tolist(),
        "clients": [len(MADE), len(KEPT)],
        "losses": [[count, float(metrics["loss"]).hex()] for count, metrics in result.history],
    }
    if "out" in asked:
        Path(asked["out"], f"{number}.json").write_text(json.dumps(said))
    print(f"done: {said['step']} steps", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "hash":  # of the newest checkpoint, whole
        print(digest(vnode.elastic.restore(sys.argv[3], problem(sys.argv[2])[1])))
    else:
        main(json.loads(sys.argv[1]))
