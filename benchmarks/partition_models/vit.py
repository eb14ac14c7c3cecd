"""A vision transformer, ViT-S/16 of 22 M parameters: patches, a class token, a scan over layers with remat.

Dosovitskiy et al. (2021). Parameters are float32, products are in bfloat16.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import cross_entropy, layer_norm, training, weights


def vit(
    batch: int = 256,
    image: int = 224,
    patch: int = 16,
    layers: int = 12,
    width: int = 384,
    heads: int = 6,
    classes: int = 1000,
) -> Model:
    """The model with its train step."""
    positions = (image // patch) ** 2 + 1

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 2)
        shapes = {
            "norm1": (layers, 2, width),
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "norm2": (layers, 2, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
        }
        ends = {"patches": (patch * patch * 3, width), "positions": (positions, width), "class": (1, width)}
        return {"layers": weights(keys[0], shapes), **weights(keys[1], {**ends, "head": (width, classes)})}

    @jax.checkpoint
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        half = {name: p.astype(jnp.bfloat16) for name, p in w.items()}
        y = layer_norm(x, *w["norm1"]) @ half["qkv"]
        q, k, v = jnp.moveaxis(y.reshape(*y.shape[:2], 3, heads, -1), 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ half["out"]
        return x + jax.nn.gelu(layer_norm(x, *w["norm2"]) @ half["up"]) @ half["down"], None

    def loss(params: Tree, batch: Tree) -> jax.Array:
        pictures = batch["images"].astype(jnp.bfloat16)
        n, side = len(pictures), image // patch
        patches = pictures.reshape(n, side, patch, side, patch, 3).swapaxes(2, 3).reshape(n, side * side, -1)
        x = patches @ params["patches"].astype(jnp.bfloat16)
        first = jnp.broadcast_to(params["class"].astype(jnp.bfloat16), (n, 1, width))
        x = jnp.concatenate([first, x], axis=1) + params["positions"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(layer_norm(x[:, 0]) @ params["head"].astype(jnp.bfloat16), batch["labels"])

    def examples(key: jax.Array) -> Tree:
        keys = jax.random.split(key)
        return {
            "images": jax.random.normal(keys[0], (batch, image, image, 3)),
            "labels": jax.random.randint(keys[1], (batch,), 0, classes),
        }

    return training("vit", init, loss, examples)
