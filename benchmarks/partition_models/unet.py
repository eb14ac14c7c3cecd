"""A U-Net that takes noise out of pictures: residual blocks with GroupNorm, halved and doubled pictures, shortcuts.

Ho et al. (2020). Parameters are float32, convolutions are in bfloat16; blocks are unrolled.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import training


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of pictures (batch, height, width, channel) that keeps their size but for the stride."""
    kernel = kernel.astype(x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(x: jax.Array, scale: jax.Array, groups: int = 8) -> jax.Array:
    """A norm over the pixels and channels of each group of channels, in float32."""
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    return (((y - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape) * scale).astype(x.dtype)


def unet(batch: int = 256, image: int = 64, channels: tuple[int, ...] = (64, 128, 256), width: int = 256) -> Model:
    """The model with its train step."""
    down = list(zip((channels[0], *channels), channels, strict=False))
    up = [(n + below, n) for n, below in reversed(list(zip(channels, (*channels[1:], channels[-1]), strict=True)))]
    shapes: dict[str, tuple[int, ...]] = {"time": (width, width), "first": (3, 3, 3, channels[0])}
    for side, several in {"down": down, "up": up}.items():
        for k, (n, m) in enumerate(several):
            shapes |= {f"{side}{k}_a": (3, 3, n, m), f"{side}{k}_b": (3, 3, m, m), f"{side}{k}_short": (1, 1, n, m)}
            shapes |= {f"{side}{k}_time": (width, m), f"{side}{k}_norm_a": (n,), f"{side}{k}_norm_b": (m,)}
            shapes |= {f"{side}{k}_half": (3, 3, m, m)} if side == "down" else {}
    shapes |= {"last_norm": (channels[0],), "last": (3, 3, channels[0], 3)}

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, len(shapes))

        def made(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            fan = shape[0] * shape[1] * shape[-2] if len(shape) == 4 else shape[0]
            return jnp.ones(shape) if len(shape) == 1 else jax.random.normal(key, shape) * fan**-0.5

        return {name: made(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def block(w: Tree, name: str, x: jax.Array, time: jax.Array) -> jax.Array:
        y = convolved(jax.nn.silu(group_norm(x, w[f"{name}_norm_a"])), w[f"{name}_a"])
        y = y + (time @ w[f"{name}_time"].astype(time.dtype))[:, None, None]
        y = convolved(jax.nn.silu(group_norm(y, w[f"{name}_norm_b"])), w[f"{name}_b"])
        return y + convolved(x, w[f"{name}_short"])

    def loss(params: Tree, batch: Tree) -> jax.Array:
        t = batch["time"]
        signal = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
        x = signal * batch["images"] + jnp.sqrt(1 - signal**2) * batch["noise"]
        angles = 1000 * t[:, None] * jnp.exp(-jnp.log(10_000.0) * jnp.arange(width // 2) / (width // 2))
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(jnp.bfloat16)
        time = jax.nn.silu(waves @ params["time"].astype(jnp.bfloat16))
        x, kept = convolved(x.astype(jnp.bfloat16), params["first"]), []
        for k in range(len(down)):
            x = block(params, f"down{k}", x, time)
            kept.append(x)
            x = convolved(x, params[f"down{k}_half"], stride=2)
        for k in range(len(up)):
            n, h, w, c = x.shape
            x = jnp.broadcast_to(x[:, :, None, :, None], (n, h, 2, w, 2, c)).reshape(n, 2 * h, 2 * w, c)
            x = block(params, f"up{k}", jnp.concatenate([kept.pop(), x], axis=-1), time)
        x = convolved(jax.nn.silu(group_norm(x, params["last_norm"])), params["last"])
        return jnp.square(x.astype(jnp.float32) - batch["noise"]).mean()

    def examples(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 3)
        return {
            "images": jax.random.normal(keys[0], (batch, image, image, 3)),
            "noise": jax.random.normal(keys[1], (batch, image, image, 3)),
            "time": jax.random.uniform(keys[2], (batch,)),
        }

    return training("unet", init, loss, examples)
