"""The train step of image classifiers: dropout, batch statistics in the state, SGD with momentum.

Knows flax modules that are called as `module(images, train)`. Must not know which.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from benchmarks.partition_models.model import Model, Published, Tree


def classifier(
    name: str,
    module: nn.Module,
    batch: int,
    image: int,
    classes: int,
    placements: Mapping[str, PartitionSpec],
    published: Published,
    rate: float = 0.01,
) -> Model:
    """The model that trains a classifier of images.

    Args:
        name: How the tables call it.
        module: `module(images, train) -> logits`, with images of float32[batch, image, image, 3].
        batch: Images at a time.
        image: Pixels on either side.
        classes: How many there are.
        placements: As in `Model`.
        published: As in `Model`.
        rate: Learning rate.
    """
    optimizer = optax.sgd(rate, momentum=0.9)

    def initial(key: jax.Array) -> Tree:
        key, params_key = jax.random.split(key)
        variables = module.init(params_key, jnp.zeros((1, image, image, 3)), train=False)
        params = variables["params"]
        return {
            "params": params,
            "batch_stats": variables.get("batch_stats", {}),
            "opt": optimizer.init(params),
            "key": key,
            "step": jnp.zeros((), jnp.int32),
        }

    def examples(key: jax.Array) -> Tree:
        images, labels = jax.random.split(key)
        return {
            "image": jax.random.normal(images, (batch, image, image, 3)),
            "label": jax.random.randint(labels, (batch,), 0, classes),
        }

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        dropout = jax.random.fold_in(state["key"], state["step"])

        def loss_fn(params: Tree) -> tuple[jax.Array, Any]:
            logits, updated = module.apply(
                {"params": params, "batch_stats": state["batch_stats"]},
                batch["image"],
                train=True,
                rngs={"dropout": dropout},
                mutable=["batch_stats"],
            )
            logits = logits.astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (logits, updated.get("batch_stats", {}))

        (loss, (logits, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "batch_stats": batch_stats,
            "opt": opt,
            "key": state["key"],
            "step": state["step"] + 1,
        }
        return new, {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}

    return Model(name, step, initial, examples, placements, published)
