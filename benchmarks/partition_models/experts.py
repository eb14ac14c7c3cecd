"""A transformer with experts in every second block: GLaM (Du et al., ICML 2022), 1.7B/64E by default.

Knows the layers, and the split of experts. Must not know how it is trained, but for the loss that balances experts.

Routing is GShard's (Lepikhin et al., ICLR 2021, algorithm 1): each word goes to the two experts of greatest weight, an
expert takes so many words of a text and drops what comes later, and words are moved by products with one-hot arrays.
Each text is a group, so that texts do not influence each other.
"""

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.partition_models.model import Model, Published, Size, Tree, sized, token_loss


@dataclass(frozen=True)
class Sizes:
    """Batch, words of a text, words there are, layers, width, hidden units, heads, their width, experts.

    `capacity` is how many times its even share an expert takes of a text's words.
    """

    batch: int = 1024
    length: int = 1024
    vocabulary: int = 256_000
    layers: int = 24
    width: int = 2048
    hidden: int = 8192
    heads: int = 16
    head: int = 128
    experts: int = 64
    capacity: float = 1.25


SIZES = {
    "paper": Sizes(),
    "small": Sizes(
        batch=8, length=6, vocabulary=32, layers=2, width=16, hidden=32, heads=4, head=4, experts=4, capacity=1.0
    ),
}

LARGEST = {"layers": 64, "width": 8192, "hidden": 32_768, "heads": 128}
"""Sizes of GLaM 64B/64E, which uses 96.6e9 parameters for a word."""

PUBLISHED = Published(27e9, "Du et al., GLaM (ICML 2022), table 4: 1.7B/64E", within=0.02)

PLACEMENTS = {
    r"experts_\d+/(up|down)": P("model", None, None),
    r"attention_\d+/(query|key|value)/kernel": P(None, "model", None),
    r"attention_\d+/out/kernel": P("model", None, None),
    r"mlp_\d+/(gate|up)/kernel": P(None, "model"),
    r"mlp_\d+/down/kernel": P("model", None),
    r"embed/embedding": P("model", None),
}
"""Whole experts on devices; the layers between them as Megatron's."""

BALANCE = 0.01
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class Experts(nn.Module):
    """Two of several dense layers for each word; also returns the loss that balances them."""

    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        s = self.sizes
        capacity = math.ceil(2 * s.capacity * x.shape[1] / s.experts)
        logits = nn.Dense(s.experts, use_bias=False, name="router")(x.astype(jnp.float32))
        combine, balance = route(jax.nn.softmax(logits), capacity)
        lecun = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", lecun, (s.experts, s.width, s.hidden)).astype(self.dtype)
        down = self.param("down", lecun, (s.experts, s.hidden, s.width)).astype(self.dtype)
        y = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(self.dtype), x)
        y = jnp.einsum("egch,ehm->egcm", nn.gelu(jnp.einsum("egcm,emh->egch", y, up)), down)
        return jnp.einsum("gsec,egcm->gsm", combine.astype(self.dtype), y), balance


def route(probabilities: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Which word goes to which place of which expert, and with which weight.

    Args:
        probabilities: float32[group, word, expert].
        capacity: Places of an expert for a group.

    Returns:
        The weights, float32[group, word, expert, place], and the mean over groups and experts of (share of words whose
        first choice it is) x (mean probability) x experts^2, which is least, 1, if all are chosen alike.
    """
    experts = probabilities.shape[-1]
    first = jax.nn.one_hot(probabilities.argmax(-1), experts)
    second = jax.nn.one_hot((probabilities * (1 - first)).argmax(-1), experts)
    balance = (first.mean(1) * probabilities.mean(1)).mean() * experts**2
    taken = first.sum(1, keepdims=True)
    before = [first.cumsum(1) - first, second.cumsum(1) - second + taken]
    places = [(b * choice).sum(-1).astype(jnp.int32) for b, choice in zip(before, (first, second), strict=True)]
    weights = [(probabilities * choice).sum(-1, keepdims=True) for choice in (first, second)]
    total = weights[0] + weights[1]
    combine = sum(
        (weight / total * choice)[..., None] * jax.nn.one_hot(place, capacity)[:, :, None]
        for weight, choice, place in zip(weights, (first, second), places, strict=True)
    )
    return combine, balance


class GatedMlp(nn.Module):
    """The dense layers of the blocks between: a gated linear unit."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.gelu(nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="gate")(x))
        up = nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="up")(x)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")(gate * up)


class Transformer(nn.Module):
    """Logits of each next word, and the mean loss of balance."""

    sizes: Sizes
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        s = self.sizes
        embed = nn.Embed(s.vocabulary, s.width, dtype=self.dtype, name="embed")
        positions = self.param("positions", nn.initializers.normal(0.02), (s.length, s.width))
        x = embed(words) + positions.astype(self.dtype)
        causal = nn.make_causal_mask(words)
        balances = []
        for i in range(s.layers):
            y = nn.RMSNorm(dtype=self.dtype, name=f"norm_{i}_1")(x)
            attention = nn.MultiHeadDotProductAttention(
                s.heads, qkv_features=s.heads * s.head, use_bias=False, dtype=self.dtype, name=f"attention_{i}"
            )
            x = x + attention(y, mask=causal)
            y = nn.RMSNorm(dtype=self.dtype, name=f"norm_{i}_2")(x)
            if i % 2:
                y, balance = Experts(s, self.dtype, name=f"experts_{i}")(y)
                balances.append(balance)
            else:
                y = GatedMlp(s.hidden, self.dtype, name=f"mlp_{i}")(y)
            x = x + y
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return embed.attend(x), jnp.stack(balances).mean()


def experts(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """The transformer with experts.

    Args:
        size: "paper" or "small".
        dtype: What is computed in; parameters and routing are float32.
        **changed: Fields of `Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES, size, changed)
    module = Transformer(s, dtype)

    def initial(key: jax.Array) -> Tree:
        params = module.init(key, jnp.zeros((1, s.length), jnp.int32))["params"]
        return {"params": params, "opt": OPTIMIZER.init(params)}

    def examples(key: jax.Array) -> Tree:
        return {"tokens": jax.random.randint(key, (s.batch, s.length + 1), 0, s.vocabulary)}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        tokens = batch["tokens"]

        def loss_fn(params: Tree) -> tuple[jax.Array, Tree]:
            logits, balance = module.apply({"params": params}, tokens[:, :-1])
            loss = token_loss(logits, tokens[:, 1:])
            return loss + BALANCE * balance, {"loss": loss, "balance": balance}

        grads, metrics = jax.grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, metrics

    return Model(f"experts-{s.layers}", step, initial, examples, PLACEMENTS, PUBLISHED)
