"""The train step of causal language models on packed text: AdamW with clipping, mean loss over all words.

Knows sizes of a transformer, and functions from parameters and words to logits. Must not know which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import optax
from jax.sharding import PartitionSpec

from benchmarks.partition_models.model import Model, Published, Tree, token_loss


@dataclass(frozen=True)
class Sizes:
    """Batch, words of a text, words there are, layers, width, heads."""

    batch: int = 512
    length: int = 1024
    vocabulary: int = 50_304
    layers: int = 24
    width: int = 1024
    heads: int = 16


SIZES = {"paper": Sizes(), "small": Sizes(batch=8, length=6, vocabulary=32, layers=2, width=16, heads=4)}

PUBLISHED = Published(
    354_823_168, "Hugging Face's gpt2-medium (355 M); its vocabulary is 50,257", sizes={"vocabulary": 50_257}
)

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.1))


def language_model(
    name: str,
    sizes: Sizes,
    init: Callable[[jax.Array], Tree],
    logits: Callable[[Tree, jax.Array], jax.Array],
    placements: Mapping[str, PartitionSpec],
    published: Published,
) -> Model:
    """The model that learns to say the next word.

    Args:
        name: How the tables call it.
        sizes: Those of batches are read.
        init: `init(key) -> params`.
        logits: `logits(params, words) -> float[batch, length, vocabulary]`, for words of int32[batch, length].
        placements: As in `Model`.
        published: As in `Model`.
    """

    def initial(key: jax.Array) -> Tree:
        params = init(key)
        return {"params": params, "opt": OPTIMIZER.init(params)}

    def examples(key: jax.Array) -> Tree:
        return {"tokens": jax.random.randint(key, (sizes.batch, sizes.length + 1), 0, sizes.vocabulary)}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        tokens = batch["tokens"]

        def loss_fn(params: Tree) -> jax.Array:
            return token_loss(logits(params, tokens[:, :-1]), tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Model(name, step, initial, examples, placements, published)
