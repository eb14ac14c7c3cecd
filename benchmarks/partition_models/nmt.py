"""Translation with LSTM layers and attention, as large as FlexFlow's (Jia et al., SysML 2019; nmt/nmt.cc's defaults).

Knows the layers, their training by Adam, and how units are split. Must not know how an LSTM cell is computed.

Attention is that of Luong et al. (EMNLP 2015), "general", without feeding its result back into the decoder: so it is
computed for all words at once.
"""

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
    """Batch, words of a sentence at most, words there are of either language, units, layers on either side."""

    batch: int = 64
    length: int = 20
    source: int = 20 * 1024
    target: int = 20 * 1024
    units: int = 2048
    layers: int = 2


SIZES = {"paper": Sizes(), "small": Sizes(batch=8, length=5, source=32, target=48, units=16)}

PUBLISHED = Published(
    384e6,
    "Sutskever et al., Sequence to sequence learning (2014), section 3.4; attention, which it lacks, adds 3 M",
    within=0.01,
    sizes={"units": 1000, "layers": 4, "source": 160_000, "target": 80_000},
)

PLACEMENTS = {
    r"(encoder|decoder)_\d+/cell/[ih][ifgo]/kernel": P(None, "model"),
    r"(encoder|decoder)_\d+/cell/h[ifgo]/bias": P("model"),
    r"(source|target)/embedding": P(None, "model"),
    r"score/kernel": P(None, "model"),
    r"mixed/kernel": P(None, "model"),
    r"words/kernel": P(None, "model"),
    r"words/bias": P("model"),
}
"""Every device has some units of each layer, and some words of the softmax."""

OPTIMIZER = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-3))


class Translator(nn.Module):
    """Logits of each target word from the source's words and the target's before it."""

    sizes: Sizes
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, source: jax.Array, lengths: jax.Array, before: jax.Array) -> jax.Array:
        s = self.sizes

        def layer(name: str) -> nn.RNN:
            cell = nn.OptimizedLSTMCell(s.units, dtype=self.dtype, parent=None)
            return nn.RNN(cell, return_carry=True, name=name)

        carries = []
        x = nn.Embed(s.source, s.units, dtype=self.dtype, name="source")(source)
        for i in range(s.layers):
            carry, x = layer(f"encoder_{i}")(x, seq_lengths=lengths)
            x = x.astype(self.dtype)  # the carry is float32, and so are outputs
            carries.append(carry)
        y = nn.Embed(s.target, s.units, dtype=self.dtype, name="target")(before)
        for i, carry in enumerate(carries):
            y = layer(f"decoder_{i}")(y, initial_carry=carry)[1].astype(self.dtype)
        keys = nn.Dense(s.units, use_bias=False, dtype=self.dtype, name="score")(x)
        scores = jnp.einsum("bth,bsh->bts", y, keys).astype(jnp.float32)
        real = jnp.arange(source.shape[1]) < lengths[:, None]
        weights = jax.nn.softmax(jnp.where(real[:, None], scores, -1e9)).astype(x.dtype)
        context = jnp.einsum("bts,bsh->bth", weights, x)
        y = jnp.concatenate([context, y], axis=-1)
        y = jnp.tanh(nn.Dense(s.units, use_bias=False, dtype=self.dtype, name="mixed")(y))
        return nn.Dense(s.target, dtype=self.dtype, name="words")(y)


def nmt(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """The translation model; sentences are of different lengths.

    Args:
        size: "paper" or "small".
        dtype: What is computed in; parameters are float32.
        **changed: Fields of `Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES, size, changed)
    module = Translator(s, dtype)

    def initial(key: jax.Array) -> Tree:
        words = jnp.zeros((1, s.length), jnp.int32)
        params = module.init(key, words, jnp.ones(1, jnp.int32), words)["params"]
        return {"params": params, "opt": OPTIMIZER.init(params)}

    def examples(key: jax.Array) -> Tree:
        source, target, lengths = jax.random.split(key, 3)
        lengths = jax.random.randint(lengths, (2, s.batch), s.length // 2, s.length + 1)
        return {
            "source": jax.random.randint(source, (s.batch, s.length), 0, s.source),
            "source_length": lengths[0],
            "target": jax.random.randint(target, (s.batch, s.length + 1), 0, s.target),
            "target_length": lengths[1],
        }

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        target = batch["target"]
        real = (jnp.arange(s.length) < batch["target_length"][:, None]).astype(jnp.float32)

        def loss_fn(params: Tree) -> jax.Array:
            logits = module.apply({"params": params}, batch["source"], batch["source_length"], target[:, :-1])
            return token_loss(logits, target[:, 1:], real)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Model("NMT", step, initial, examples, PLACEMENTS, PUBLISHED)
