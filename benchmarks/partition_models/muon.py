"""A small GPT that Muon trains: updates of matrices are made orthogonal by five Newton-Schulz steps.

Jordan et al. (2024), which AdamW complements for embeddings and norms. A scan over layers with remat; parameters are
float32, products are in bfloat16.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.llama import attention, rotary
from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import ADAMW, cross_entropy, rms_norm, tokens, weights

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonal(g: jax.Array) -> jax.Array:
    """Matrices, stacked, whose singular values come near one."""
    a, b, c = NEWTON_SCHULZ
    x = g.astype(jnp.bfloat16)
    wide = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-1, -2) if wide else x
    x = x / (jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True) + 1e-7).astype(x.dtype)

    def once(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        square = x @ x.swapaxes(-1, -2)
        return a * x + (b * square + c * square @ square) @ x, None

    x, _ = jax.lax.scan(once, x, length=5)
    return x.swapaxes(-1, -2) if wide else x


def muon(
    batch: int = 32, length: int = 512, vocabulary: int = 16_384, layers: int = 8, width: int = 512, heads: int = 8
) -> Model:
    """The model with its train step."""

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 3)
        shapes = {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
        }
        norms = weights(keys[1], {"norm1": (layers, width), "norm2": (layers, width), "norm": (width,)})
        embed = 0.02 * jax.random.normal(keys[2], (vocabulary, width))
        return {"matrices": weights(keys[0], shapes), "others": {"embed": embed, **norms}}

    @jax.checkpoint
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        half = {name: p.astype(jnp.bfloat16) for name, p in w.items()}
        y = rms_norm(x, w["norm1"]) @ half["qkv"]
        q, k, v = jnp.moveaxis(y.reshape(*y.shape[:2], heads, 3, -1), 3, 0)
        x = x + attention(rotary(q), rotary(k), v) @ half["out"]
        return x + jnp.square(jax.nn.relu(rms_norm(x, w["norm2"]) @ half["up"])) @ half["down"], None

    def loss(params: Tree, batch: Tree) -> jax.Array:
        words, others = batch["tokens"], params["others"]
        embed = others["embed"].astype(jnp.bfloat16)
        stacked = {**params["matrices"], "norm1": others["norm1"], "norm2": others["norm2"]}
        x, _ = jax.lax.scan(layer, embed[words[:, :-1]], stacked)
        return cross_entropy(rms_norm(x, others["norm"]) @ embed.T, words[:, 1:])

    def initial(key: jax.Array) -> Tree:
        params = init(key)
        momentum = jax.tree.map(jnp.zeros_like, params["matrices"])
        return {"params": params, "momentum": momentum, "adamw": ADAMW.init(params["others"])}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        params = state["params"]
        value, grads = jax.value_and_grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + g, state["momentum"], grads["matrices"])

        def update(p: jax.Array, m: jax.Array, g: jax.Array) -> jax.Array:
            scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
            return p * (1 - 0.02 * 0.01) - 0.02 * scale * orthogonal(g + 0.95 * m).astype(p.dtype)

        matrices = jax.tree.map(update, params["matrices"], momentum, grads["matrices"])
        updates, adamw = ADAMW.update(grads["others"], state["adamw"], params["others"])
        others = jax.tree.map(lambda p, u: p + u, params["others"], updates)
        made = {"params": {"matrices": matrices, "others": others}, "momentum": momentum, "adamw": adamw}
        return made, {"loss": value}

    return Model("muon", step, initial, tokens(batch, length, vocabulary))
