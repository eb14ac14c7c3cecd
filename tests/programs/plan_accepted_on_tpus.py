"""A Megatron plan of two matrices for a v5e, accepted by its compiler; argument 1 is the reduction.

Smaller matrices would lie in the memory on the chip, which is not counted.
"""

import json
import sys

import jax
import jax.numpy as jnp

from benchmarks import tpu
from vnode.partition import Machine
from vnode.partition.plan.candidates import MEGATRON, MeshSearch
from vnode.partition.plan.search import plan_of
from vnode.partition.plan.search_subject import on_nodes, subject_of


def step(w, x):
    grads = jax.grad(lambda w: jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2))(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads)


w = {"up": jax.ShapeDtypeStruct((4096, 16384), jnp.float32), "down": jax.ShapeDtypeStruct((16384, 4096), jnp.float32)}
x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
machine = Machine.tpu("v5e:2x4")
subject = subject_of(on_nodes(step, 8, {"reduction": sys.argv[1], "donate_argnums": (0,)}), (w, x))
on = MeshSearch(subject, machine, {"vnode": 2, "model": 4}, "tpu", None)
plan = plan_of(on.expert(MEGATRON), 2**34)
found = plan.accept(tpu.topology("v5e:2x4"))
print(json.dumps({"accepted": found.accepted, "found": found.found, "said": str(found), "error": found.memory_error}))
