"""Plans with gathers of weights for a v5e: memory by its compiler, and as predicted."""

import json

import jax
import jax.numpy as jnp

from benchmarks import tpu
from vnode.partition import Machine
from vnode.partition.plan.candidates import MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of


def normal(x):
    mean = jnp.mean(x, 0)
    return (x - mean) * jax.lax.rsqrt(jnp.mean((x - mean) ** 2, 0) + 1e-3)


def step(w, x):
    def loss(w):
        y = x
        for each in w:
            y = jax.nn.relu(normal(jnp.tanh(y) @ each))
        return jnp.mean(y**2)

    grads = jax.grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads)


w = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 5
x = jax.ShapeDtypeStruct((2048, 8192), jnp.float32)
machine = Machine.tpu("v5e:2x2")
subject = subject_of(on_nodes(step, 8, {"donate_argnums": (0,)}), (w, x))
on = MeshSearch(subject, machine, {"vnode": 4}, "tpu", None)
plan = plan_of(on.candidate("FSDP", on.undivided, shard_state=True), 2**34)
found = plan.accept(tpu.topology("v5e:2x2"))
print(
    json.dumps(
        {
            "gathered": found.found["all-gather"],
            "said": str(found),
            "memory": found.memory,
        }
    )
)
