"""A short training that one process runs, or several workers that come and go: the same script.

Knows jax, optax and `vnode.elastic.run`. Must not know who starts it. Its argument is JSON:

    model    "plain": an MLP with dropout and clipping; "donated": it gives its state away; "sharded": slots are divided
    steps    how many
    pause    seconds that the callback sleeps
    slow     a file; while it is there, the callback sleeps 50 ms
    raises   the step at which the callback raises an error, in all workers, or in that of `raiser` alone
    folder   of checkpoints
    every    steps between two of them
    out      a folder: each process leaves the final step, a hash of the state and its losses there
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

import vnode

WIDTH = 48


def problem(model: str) -> tuple[Any, Any, Any]:
    """The step, the state and the data."""
    rng = np.random.RandomState(0)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    shapes = {"first": (16, WIDTH), "second": (WIDTH, WIDTH), "last": (WIDTH, 1)}
    params = {name: jnp.asarray(0.1 * rng.randn(*shape), jnp.float32) for name, shape in shapes.items()}

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["first"])
        hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
        return ((jnp.tanh(hidden @ params["second"]) @ params["last"] - batch["y"]) ** 2).mean()

    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(state["key"], state["count"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, key)
        updates, slots = optimizer.update(grads, state["slots"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "slots": slots, "key": state["key"], "count": state["count"] + 1}, {"loss": loss}

    donated = {"donate_argnums": 0} if model == "donated" else {}
    made = vnode.virtualize(step, virtual_nodes=8, **donated)
    state = {"params": params, "slots": optimizer.init(params), "key": jax.random.key(0), "count": jnp.int32(0)}
    if model == "sharded":
        state = made.put(state)
        divided = made.placement.sharding("vnode")
        state["slots"] = jax.tree.map(
            lambda leaf: jax.device_put(leaf, divided) if leaf.shape[:1] == (WIDTH,) else leaf, state["slots"]
        )
    data = {"x": rng.randn(256, 16).astype(np.float32), "y": rng.randn(256, 1).astype(np.float32)}
    return made, state, vnode.data.Batches(data, batch_size=32, seed=0)


def digest(state: Any) -> str:
    """A hash of all bits of a state that is whole in this process."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)
    ]
    return hashlib.sha256(b"".join(np.asarray(leaf.addressable_data(0)).tobytes() for leaf in leaves)).hexdigest()


def main(asked: dict[str, Any]) -> None:
    step, state, data = problem(asked["model"])
    slow, number = asked.get("slow"), os.environ.get("VNODE_WORKER", "alone")

    def callback(count: int, metrics: Any) -> None:
        time.sleep(0.05 if slow and os.path.exists(slow) else asked.get("pause", 0))
        if count == asked.get("raises") and asked.get("raiser", number) == number:
            raise ValueError(f"step {count} is odd")

    saves = {"checkpoint": asked["folder"], "checkpoint_every": asked.get("every", 20)} if asked.get("folder") else {}
    result = vnode.elastic.run(step, state, data, steps=asked["steps"], callback=callback, keep_every=10, **saves)
    whole = all(leaf.is_fully_replicated for leaf in jax.tree.leaves(result.state))
    said = {
        "step": result.step,
        "hash": digest(result.state) if whole else "",
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
