"""A step with one node a device for a v5e: its memory by the compiler, beside the plain step's."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import vnode
from benchmarks import tpu
from vnode.placement.temporary import temporary_of


def normal(x):
    mean = jnp.mean(x, 0)
    return (x - mean) * jax.lax.rsqrt(jnp.mean((x - mean) ** 2, 0) + 1e-3)


def step(w, x):
    def loss(w):
        return jnp.mean((jnp.tanh(normal(jnp.tanh(x @ w[0])) @ w[1]) @ w[2] - x) ** 2)

    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))


sizes = ((1024, 8192), (8192, 8192), (8192, 1024))
w, x = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes], jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
devices = list(tpu.topology("v5e:2x2"))
found = []
for nodes, count in ((1, 1), (4, 4), (8, 4)):
    placement = vnode.Placement(nodes, devices[:count])
    virtual = vnode.virtualize(step, virtual_nodes=nodes, placement=placement, donate_argnums=0)
    found.append(temporary_of(virtual.lower(w, x).compile()).held / 2**20)
alone = SingleDeviceSharding(devices[0])
given = [[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=alone) for leaf in w]]
given.append(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone))
plain = jax.jit(step, donate_argnums=0).lower(*given).compile()
print(json.dumps({"found": found, "plain": temporary_of(plain).held / 2**20}))
