"""Memory of a v5e whose optimizer slots come from the host."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import tpu
from vnode.placement.temporary import temporary_of
from vnode.runtime import host_prefetch

count, shape = 8, (2048, 2048)
mesh = Mesh(tpu.topology("v5e:2x4")[:1], ("x",))
near = NamedSharding(mesh, PartitionSpec())
far = near.with_memory_kind("pinned_host")


def step(weights, slots, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    grads = jax.grad(loss)(weights)
    made, kept, last = [], [], grads[0]
    for w, slot, g in zip(weights, slots, grads, strict=False):
        slot = 0.9 * host_prefetch.fetch_to_device(slot, last, PartitionSpec(), mesh) + 0.1 * g
        last = w - 0.1 * slot / (1 + jnp.sqrt(slot * slot))
        made.append(last)
        kept.append(jax.device_put(slot, far))
    return made, kept


args = [[jax.ShapeDtypeStruct(shape, "float32", sharding=s)] * count for s in (near, far)]
x = jax.ShapeDtypeStruct(shape, "float32", sharding=near)
print(json.dumps(temporary_of(jax.jit(step, donate_argnums=(0, 1)).lower(*args, x).compile()).held))
