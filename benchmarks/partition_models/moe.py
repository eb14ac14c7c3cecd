"""A mixture of experts as Mixtral's: each word goes to two of eight gated layers, by products with one-hot arrays.

Every text is a group; an expert takes a fixed number of its words and drops what comes later. A scan over layers with
remat; parameters are float32, products are in bfloat16.
"""

import jax
import jax.numpy as jnp

from benchmarks.partition_models.llama import attention, rotary
from benchmarks.partition_models.model import Model, Tree
from benchmarks.partition_models.training import cross_entropy, rms_norm, tokens, training, weights


def moe(
    batch: int = 32,
    length: int = 512,
    vocabulary: int = 16_384,
    layers: int = 4,
    width: int = 512,
    hidden: int = 1024,
    heads: int = 8,
    experts: int = 8,
    capacity: int = 160,
) -> Model:
    """The model with its train step."""

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 2)
        shapes = {
            "norm1": (layers, width),
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "norm2": (layers, width),
            "router": (layers, width, experts),
            "gate": (layers, experts, width, hidden),
            "up": (layers, experts, width, hidden),
            "down": (layers, experts, hidden, width),
        }
        embed = 0.02 * jax.random.normal(keys[1], (vocabulary, width))
        return {"embed": embed, "layers": weights(keys[0], shapes), "norm": jnp.ones(width)}

    def dispatched(y: jax.Array, w: Tree, half: Tree) -> tuple[jax.Array, jax.Array]:
        """Two experts' results for each word, and the loss that balances experts."""
        shares = jax.nn.softmax(y.astype(jnp.float32) @ w["router"])
        values, chosen = jax.lax.top_k(shares, 2)
        hot = jax.nn.one_hot(chosen, experts)  # text, word, choice, expert
        order = hot.swapaxes(1, 2).reshape(len(y), -1, experts)  # first choices of all words before second ones
        place = ((order.cumsum(1) - 1) * order).sum(-1).reshape(len(y), 2, -1).swapaxes(1, 2)
        kept = values / values.sum(-1, keepdims=True) * (place < capacity)
        at = (place[..., None] == jnp.arange(capacity, dtype=place.dtype)).astype(jnp.float32)
        combine = jnp.einsum("bsk,bske,bskc->bsec", kept, hot, at).astype(y.dtype)
        given = jnp.einsum("bsec,bsm->becm", (combine > 0).astype(y.dtype), y)
        inner = jax.nn.silu(jnp.einsum("becm,emh->bech", given, half["gate"]))
        inner = inner * jnp.einsum("becm,emh->bech", given, half["up"])
        found = jnp.einsum("bech,ehm->becm", inner, half["down"])
        balance = experts * (hot[:, :, 0].mean(1) * shares.mean(1)).sum(-1).mean()
        return jnp.einsum("bsec,becm->bsm", combine, found), balance

    @jax.checkpoint
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, jax.Array]:
        half = {name: p.astype(jnp.bfloat16) for name, p in w.items()}
        y = rms_norm(x, w["norm1"]) @ half["qkv"]
        q, k, v = jnp.moveaxis(y.reshape(*y.shape[:2], heads, 3, -1), 3, 0)
        x = x + attention(rotary(q), rotary(k), v) @ half["out"]
        y, balance = dispatched(rms_norm(x, w["norm2"]), w, half)
        return x + y, balance

    def loss(params: Tree, batch: Tree) -> jax.Array:
        words, embed = batch["tokens"], params["embed"].astype(jnp.bfloat16)
        x, balances = jax.lax.scan(layer, embed[words[:, :-1]], params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ embed.T, words[:, 1:]) + 0.01 * balances.mean()

    return training("moe", init, loss, tokens(batch, length, vocabulary))
