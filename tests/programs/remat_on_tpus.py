"""Memory of a rematerialized step for a v5e: plain, virtualized, and with everything kept."""

import json

import jax
import jax.numpy as jnp

import vnode
from benchmarks import tpu

device, d = tpu.topology("v5e:2x4")[0], 1024


def made(keep):
    def layer(h, w):
        return h + jax.nn.gelu(jax.nn.gelu(h @ w["up"]) * 2.0 + 1.0) @ w["down"]

    def step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = (layer if keep else jax.checkpoint(layer))(h, w)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
args = [{"up": shape(d, 4 * d), "down": shape(4 * d, d)} for _ in range(4)], shape(16_384, d)
there = jax.sharding.SingleDeviceSharding(device)
plain = jax.jit(made(False), in_shardings=there, out_shardings=there, donate_argnums=0)
options = {"virtual_nodes": 1, "reduction": "fast", "donate_argnums": 0}
several = [plain, *(vnode.virtualize(made(keep), **options).on([device]) for keep in (False, True))]
print(json.dumps([each.lower(*args).compile().memory_analysis().temp_size_in_bytes for each in several]))
