"""A transformer language model of 24 layers in flax, one block after another: GPT-2 medium (Radford et al., 2019).

Knows the layers, and Megatron's splits (Shoeybi et al., 2019): heads, hidden units, words. Must not know how it is
trained.

The vocabulary is filled up to a multiple of 128, as Megatron does, so that it can be split.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.partition_models.language import PUBLISHED, SIZES, Sizes, language_model
from benchmarks.partition_models.model import Model, Size, sized

PLACEMENTS = {
    r"attention/(query|key|value)/kernel": P(None, "model", None),
    r"attention/(query|key|value)/bias": P("model", None),
    r"attention/out/kernel": P("model", None, None),
    r"up/kernel": P(None, "model"),
    r"up/bias": P("model"),
    r"down/kernel": P("model", None),
    r"embed/embedding": P("model", None),
}


class Block(nn.Module):
    """Attention and two dense layers, each with a norm before it and a shortcut around it."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm1")(x)
        causal = nn.make_causal_mask(jnp.ones((1, x.shape[1])))
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, name="attention")(y, mask=causal)
        y = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm2")(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="up")(y))
        return x + nn.Dense(width, dtype=self.dtype, name="down")(y)


class Transformer(nn.Module):
    """Logits of each next word; the embedding is also the last layer."""

    sizes: Sizes
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        s = self.sizes
        embed = nn.Embed(s.vocabulary, s.width, dtype=self.dtype, name="embed")
        positions = self.param("positions", nn.initializers.normal(0.02), (s.length, s.width))
        x = embed(words) + positions.astype(self.dtype)
        for i in range(s.layers):
            x = Block(s.heads, self.dtype, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x))


def transformer(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """The transformer as a loop of Python's over its blocks.

    Args:
        size: "paper" or "small".
        dtype: What is computed in; parameters are float32.
        **changed: Fields of `language.Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES, size, changed)
    module = Transformer(s, dtype)

    def init(key: jax.Array) -> Any:
        return module.init(key, jnp.zeros((1, s.length), jnp.int32))["params"]

    def logits(params: Any, words: jax.Array) -> jax.Array:
        return module.apply({"params": params}, words)

    return language_model(f"transformer-{s.layers}", s, init, logits, PLACEMENTS, PUBLISHED)
