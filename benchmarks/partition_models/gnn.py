"""A graph network: messages along edges, summed at nodes by `segment_sum`; many graphs of equal size in a batch.

Gilmer et al. (2017), with edges' messages from both ends. Parameters are float32, products are in bfloat16.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import layer_norm, training, weights


def gnn(
    batch: int = 256, nodes: int = 128, edges: int = 512, features: int = 32, layers: int = 6, width: int = 256
) -> Model:
    """The model with its train step."""

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 2)
        shapes = {
            "message1": (layers, 2 * width, width),
            "message2": (layers, width, width),
            "update1": (layers, 2 * width, width),
            "update2": (layers, width, width),
        }
        ends = {"into": (features, width), "out": (width, 1)}
        return {"layers": weights(keys[0], shapes), **weights(keys[1], ends)}

    def graph(params: Tree, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            w = jax.tree.map(lambda p: p.astype(jnp.bfloat16), w)
            both = jnp.concatenate([x[senders], x[receivers]], axis=-1)
            messages = jax.nn.silu(both @ w["message1"]) @ w["message2"]
            summed = jax.ops.segment_sum(messages, receivers, num_segments=nodes)
            changed = jax.nn.silu(jnp.concatenate([x, summed], axis=-1) @ w["update1"]) @ w["update2"]
            return layer_norm(x + changed), None

        x, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16) @ params["into"].astype(jnp.bfloat16), params["layers"])
        return (x.mean(0) @ params["out"].astype(jnp.bfloat16))[0]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        found = jax.vmap(lambda *one: graph(params, *one))(batch["features"], batch["senders"], batch["receivers"])
        return jnp.square(found.astype(jnp.float32) - batch["energy"]).mean()

    def examples(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 4)
        return {
            "features": jax.random.normal(keys[0], (batch, nodes, features)),
            "senders": jax.random.randint(keys[1], (batch, edges), 0, nodes),
            "receivers": jax.random.randint(keys[2], (batch, edges), 0, nodes),
            "energy": jax.random.normal(keys[3], (batch,)),
        }

    return training("gnn", init, loss, examples)
