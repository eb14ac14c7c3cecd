"""A diffusion transformer, DiT-S/2 on latents: layers whose norms are changed by the time and the class (adaLN-Zero).

Peebles and Xie (2023). A scan over layers with remat; parameters are float32, products are in bfloat16; an average of
the parameters is kept.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import layer_norm, training, weights


def dit(
    batch: int = 256,
    latent: int = 32,
    channels: int = 4,
    patch: int = 2,
    layers: int = 12,
    width: int = 384,
    heads: int = 6,
    classes: int = 1000,
) -> Model:
    """The model with its train step."""
    side = latent // patch
    patches = patch * patch * channels

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 2)
        shapes = {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
            "change": (layers, width, 6 * width),
        }
        ends = {
            "patches": (patches, width),
            "positions": (side * side, width),
            "time1": (256, width),
            "time2": (width, width),
            "class": (classes + 1, width),
            "change": (width, 2 * width),
            "last": (width, patches),
        }
        stacked = weights(keys[0], shapes)
        return {"layers": {**stacked, "change": jnp.zeros_like(stacked["change"])}, **weights(keys[1], ends)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        images, noise, t = batch["images"], batch["noise"], batch["time"]
        signal = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
        noisy = signal * images + jnp.sqrt(1 - signal**2) * noise
        x = noisy.reshape(len(t), side, patch, side, patch, channels).swapaxes(2, 3).reshape(len(t), side * side, -1)
        x = x.astype(jnp.bfloat16) @ half["patches"] + half["positions"]
        angles = 1000 * t[:, None] * jnp.exp(-jnp.log(10_000.0) * jnp.arange(128) / 128)
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(jnp.bfloat16)
        condition = jax.nn.silu(jax.nn.silu(waves @ half["time1"]) @ half["time2"] + half["class"][batch["class"]])

        @jax.checkpoint
        def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            changes = jnp.split((condition @ w["change"])[:, None], 6, axis=-1)
            y = layer_norm(x) * (1 + changes[0]) + changes[1]
            qkv = (y @ w["qkv"]).reshape(*y.shape[:2], 3, heads, -1)
            q, k, v = jnp.moveaxis(qkv, 2, 0)
            x = x + changes[2] * (jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["out"])
            y = layer_norm(x) * (1 + changes[3]) + changes[4]
            return x + changes[5] * (jax.nn.gelu(y @ w["up"]) @ w["down"]), None

        x, _ = jax.lax.scan(layer, x, half["layers"])
        scale, shift = jnp.split((condition @ half["change"])[:, None], 2, axis=-1)
        x = (layer_norm(x) * (1 + scale) + shift) @ half["last"]
        x = x.reshape(len(t), side, side, patch, patch, channels).swapaxes(2, 3).reshape(images.shape)
        return jnp.square(x.astype(jnp.float32) - noise).mean()

    def examples(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 4)
        return {
            "images": jax.random.normal(keys[0], (batch, latent, latent, channels)),
            "noise": jax.random.normal(keys[1], (batch, latent, latent, channels)),
            "time": jax.random.uniform(keys[2], (batch,)),
            "class": jax.random.randint(keys[3], (batch,), 0, classes + 1),
        }

    made = training("dit", init, loss, examples)

    def initial(key: jax.Array) -> Tree:
        state = made.initial(key)
        return {**state, "average": state["params"]}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        found, metrics = made.step({"params": state["params"], "opt": state["opt"]}, batch)
        average = jax.tree.map(lambda a, p: 0.9999 * a + 0.0001 * p, state["average"], found["params"])
        return {**found, "average": average}, metrics

    return Model("dit", step, initial, examples)
