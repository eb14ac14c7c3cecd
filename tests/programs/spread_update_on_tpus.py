"""An update of shards for a v5e: its memory by the compiler."""

import json
import os

from benchmarks import tpu

os.environ.update(tpu.ENVIRONMENT)
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import vnode
from vnode.partition.hlo import parse

tx = optax.adam(1e-2)


def step(state, x):
    w, slots = state
    updates, slots = tx.update(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), slots, w)
    return optax.apply_updates(w, updates), slots


w = jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
mesh = Mesh(np.array(tpu.topology("v5e:2x4")).reshape(8), ("vnode",))
virtual = vnode.virtualize(
    step,
    virtual_nodes=8,
    placement=vnode.Placement(8, mesh=mesh),
    donate_argnums=0,
    partition={"^0$|mu|nu": PartitionSpec("vnode")},
)
args = (w, jax.eval_shape(tx.init, w)), jax.ShapeDtypeStruct((512, 2048), jnp.float32)
module = parse(virtual.lower(*args).compile().as_text())
alone = [visit.instruction for visit in module.walk() if not visit.fused]
print(json.dumps([each.opcode for each in alone if sum(each.sizes) == w.size * 4 // 8]))
