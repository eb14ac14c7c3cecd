"""A Mamba of 36 M parameters: selective state spaces, an associative scan over words.

Gu and Dao (2023), algorithm 2, in a scan over layers with remat. Parameters and states are float32, the rest bfloat16.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import cross_entropy, rms_norm, tokens, training, weights

Pair = tuple[jax.Array, jax.Array]


def selective_scan(x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """h[t] = exp(dt a) h[t-1] + dt b x[t], of which c h[t] is the result.

    Args:
        x: (batch, time, inner), as are dt and the result.
        dt: Steps of time.
        a: (inner, state).
        b: (batch, time, state), as is c.
        c: What is read of the state.
    """
    decay = jnp.exp(dt[..., None] * a)
    given = (dt * x)[..., None] * b[:, :, None, :]

    def join(left: Pair, right: Pair) -> Pair:
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, states = jax.lax.associative_scan(join, (decay, given), axis=1)
    return jnp.einsum("btis,bts->bti", states, c)


def mamba(
    batch: int = 32,
    length: int = 512,
    vocabulary: int = 32_000,
    layers: int = 12,
    width: int = 512,
    inner: int = 1024,
    state: int = 16,
    rank: int = 32,
    window: int = 4,
) -> Model:
    """The model with its train step."""

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 2)
        shapes = {
            "norm": (layers, width),
            "into": (layers, width, 2 * inner),
            "conv": (layers, window, inner),
            "select": (layers, inner, rank + 2 * state),
            "dt": (layers, rank, inner),
            "out": (layers, inner, width),
        }
        stacked = weights(keys[0], shapes)
        stacked["a"] = jnp.broadcast_to(jnp.log(jnp.arange(1.0, state + 1)), (layers, inner, state))
        stacked["skip"] = jnp.ones((layers, inner))
        return {
            "embed": 0.02 * jax.random.normal(keys[1], (vocabulary, width)),
            "layers": stacked,
            "norm": jnp.ones(width),
        }

    @jax.checkpoint
    def layer(h: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        half = {name: p.astype(jnp.bfloat16) for name, p in w.items()}
        x, gate = jnp.split(rms_norm(h, w["norm"]) @ half["into"], 2, axis=-1)
        padded = jnp.pad(x, ((0, 0), (window - 1, 0), (0, 0)))
        x = jax.nn.silu(sum(padded[:, i : i + x.shape[1]] * half["conv"][i] for i in range(window)))
        dt, b, c = jnp.split(x @ half["select"], [rank, rank + state], axis=-1)
        dt, b, c, wide = (each.astype(jnp.float32) for each in (dt @ half["dt"], b, c, x))
        y = selective_scan(wide, jax.nn.softplus(dt), -jnp.exp(w["a"]), b, c) + w["skip"] * wide
        return h + (y.astype(jnp.bfloat16) * jax.nn.silu(gate)) @ half["out"], None

    def loss(params: Tree, batch: Tree) -> jax.Array:
        words, embed = batch["tokens"], params["embed"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(layer, embed[words[:, :-1]], params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ embed.T, words[:, 1:])

    return training("mamba", init, loss, tokens(batch, length, vocabulary))
