"""The transformer of 24 layers once more, in equinox: a scan over layers, which are computed again going backward.

Knows the layers, and Megatron's splits of them where they are stacked. Must not know how it is trained.

A module here is written for one text, and mapped over the batch.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.partition_models.language import PUBLISHED, SIZES, Sizes, language_model
from benchmarks.partition_models.model import Model, Size, cast, sized

PLACEMENTS = {
    r"blocks/qkv/weight": P(None, "model", None),
    r"blocks/qkv/bias": P(None, "model"),
    r"blocks/out/weight": P(None, None, "model"),
    r"blocks/up/weight": P(None, "model", None),
    r"blocks/up/bias": P(None, "model"),
    r"blocks/down/weight": P(None, None, "model"),
    r"embed/weight": P("model", None),
}
"""Weights are (layer, to, from). Query, key and value of a head are beside each other, so that heads can be split."""


class Block(eqx.Module):
    """Attention and two dense layers, each with a norm before it and a shortcut around it."""

    norm1: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])
        self.heads = heads

    def attention(self, x: jax.Array) -> jax.Array:
        length, width = x.shape
        q, k, v = jnp.moveaxis(jax.vmap(self.qkv)(x).reshape(length, self.heads, 3, -1), 2, 0)
        scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) * (width // self.heads) ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
        return jax.vmap(self.out)(jnp.einsum("hqk,khd->qhd", weights, v).reshape(length, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.norm1)(x))
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(y)


class Transformer(eqx.Module):
    """Logits of each next word of one text; blocks are stacked."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    blocks: Block
    norm: eqx.nn.LayerNorm

    def __init__(self, s: Sizes, key: jax.Array) -> None:
        keys = jax.random.split(key, s.layers + 2)
        self.embed = eqx.nn.Embedding(weight=0.02 * jax.random.normal(keys[0], (s.vocabulary, s.width)))
        self.positions = 0.02 * jax.random.normal(keys[1], (s.length, s.width))
        self.blocks = eqx.filter_vmap(lambda key: Block(s.width, s.heads, key))(keys[2:])
        self.norm = eqx.nn.LayerNorm(s.width)

    def __call__(self, words: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return block(x), None

        x, _ = jax.lax.scan(layer, jax.vmap(self.embed)(words) + self.positions, self.blocks)
        return jax.vmap(self.norm)(x) @ self.embed.weight.T


def transformer_scan(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """The transformer as a scan over its blocks with rematerialization.

    Args:
        size: "paper" or "small".
        dtype: What is computed in; parameters are float32.
        **changed: Fields of `language.Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES, size, changed)

    def logits(params: Transformer, words: jax.Array) -> jax.Array:
        return jax.vmap(cast(params, dtype))(words)

    return language_model(
        f"transformer-{s.layers} (scan)", s, lambda key: Transformer(s, key), logits, PLACEMENTS, PUBLISHED
    )
