"""What the processes of `tests.test_processes` do: train something for a few steps, and tell the bits of the result.

Knows steps, states and batches. Must not know how many processes there are: each case is written as for one.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vnode
from tests.processes import waiting

V = 8


def bits(tree: Any) -> str:
    """The SHA-256 of a tree of arrays that are whole in this process, with their dtypes and weak types."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        array = np.asarray(data.addressable_data(0))
        assert array.shape == data.shape, f"{path} is not whole in this process"
        weak = getattr(leaf, "weak_type", False)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {weak}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def mlp_step(state, batch):
    """Clipped gradient descent with dropout, on mean squared error."""
    key, drop = jax.random.split(state["key"])

    def loss_of(params):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        hidden = jnp.where(jax.random.bernoulli(drop, 0.9, hidden.shape), hidden / 0.9, 0)
        return jnp.mean((hidden @ params["b"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    scale = state["rate"] * jnp.minimum(1.0, 0.5 / norm)
    params = jax.tree.map(lambda p, g: p - scale * g, state["params"], grads)
    return {"params": params, "key": key, "rate": state["rate"] * 0.9}, {"loss": loss}


def mlp_state():
    """Parameters, a typed key, and a learning rate that is a Python number: a weak type."""
    random = np.random.default_rng(0)
    params = {"a": random.normal(size=(6, 5)).astype(np.float32), "b": random.normal(size=(5, 3)).astype(np.float32)}
    return {"params": params, "key": jax.random.key(1), "rate": 0.1}


def examples(count: int) -> dict[str, np.ndarray]:
    """Random examples of the regression."""
    random = np.random.default_rng(2)
    x = random.normal(size=(count, 6)).astype(np.float32)
    return {"x": x, "y": random.normal(size=(count, 3)).astype(np.float32)}


def whole_batches(size: int, steps: int = 2) -> list[str]:
    """Steps on batches that every process has whole."""
    step = vnode.virtualize(mlp_step, virtual_nodes=V)
    state, told = mlp_state(), []
    data = examples(steps * size)
    for t in range(steps):
        with waiting(f"step {t}"):
            state, metrics = step(state, {name: rows[t * size : (t + 1) * size] for name, rows in data.items()})
            told.append(bits((state, metrics)))
    return told


def different_batches() -> str:
    """Each process gives other examples as if they were all: the error."""
    step = vnode.virtualize(mlp_step, virtual_nodes=V)
    batch = examples(16)
    batch["y"] = batch["y"] + jax.process_index()
    with waiting("the step to compare batches"):
        try:
            step(mlp_state(), batch)
        except vnode.PlacementError as error:
            return str(error)
    return "no error"


def fewer_devices(size: int) -> dict[str, Any]:
    """A step on all devices, one on those of process 0 alone, one on all again; and one with a stale state."""
    step, data = vnode.virtualize(mlp_step, virtual_nodes=V), examples(3 * size)
    batches = [{name: rows[t * size : (t + 1) * size] for name, rows in data.items()} for t in range(3)]
    with waiting("the step on all devices"):
        old, _ = step(mlp_state(), batches[0])
    alone = step.on([device for device in jax.devices() if device.process_index == 0])
    with waiting("the step on the devices of process 0"):
        new, _ = alone(alone.put(old), batches[1])
    if not jax.distributed.is_initialized():
        return {"bits": bits(step(new, batches[2])[0])}
    with waiting("the state to come back"):
        back = step.put(new)
    with waiting("the last step"):
        again = bits(step(back, batches[2])[0])
    with waiting("the error of the stale state"):
        try:
            step.put(new if jax.process_index() == 0 else old)
        except vnode.PlacementError as error:
            return {"bits": again, "error": str(error)}
    return {"bits": again, "error": "no error"}


def explained(size: int) -> dict[str, Any]:
    """A report, and a step that was prepared."""
    step, batch = vnode.virtualize(mlp_step, virtual_nodes=V), examples(size)
    state = mlp_state()
    with waiting("explain"):
        text = str(step.explain(state, batch))
    with waiting("prepare"):
        step.prepare(step.placement, step.put(state), batch).wait()
    with waiting("the step"):
        return {"bits": bits(step(state, batch)[0]), "text": text}


def given_rows(size: int, counts: list[int] | None = None, steps: int = 2) -> dict[str, Any]:
    """Steps on batches of which each process reads its own rows: by `local_batch`, and by `Batches`."""
    step = vnode.virtualize(mlp_step, virtual_nodes=V)
    if counts is not None:
        step = step.on(jax.devices()[: len(counts)], counts=counts)
    data = examples(steps * size)
    batches = vnode.data.Batches(data, size, shuffle=False)
    mine = step.placement.local_examples(size)
    by_rows = by_loader = mlp_state()
    for t in range(steps):
        local = {name: rows[t * size + mine] for name, rows in data.items()}
        with waiting(f"step {t}"):
            by_rows, _ = step(by_rows, vnode.data.local_batch(local, size, step.placement))
            by_loader, _ = step(by_loader, batches.load(t, step.placement))
    return {"rows": mine.tolist(), "bits": [bits(by_rows), bits(by_loader)]}
