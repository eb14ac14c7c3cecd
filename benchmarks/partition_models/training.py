"""A loss and an optimizer -> a `Model`: the train step, its first state, random examples.

    training("llama", init, loss, examples)      # AdamW with clipping by default

Knows steps and optimizers. Must not know any architecture.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.partition_models.model import Model, Tree

ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))


def training(
    name: str,
    init: Callable[[jax.Array], Tree],
    loss: Callable[[Tree, Tree], jax.Array],
    examples: Callable[[jax.Array], Tree],
    optimizer: optax.GradientTransformation = ADAMW,
) -> Model:
    """The model that an optimizer trains by the gradient of a loss.

    Args:
        name: How the tables call it.
        init: `init(key) -> params`.
        loss: `loss(params, batch) -> float32[]`.
        examples: `examples(key) -> batch`.
        optimizer: Of the gradients.
    """

    def initial(key: jax.Array) -> Tree:
        params = init(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return Model(name, step, initial, examples)


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Random weights whose products, sums over the last dimension but one, keep the size of their operand."""
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def weights(key: jax.Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Random weights by name; those of one dimension, or whose name begins with "norm", are ones."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: jnp.ones(shape) if len(shape) == 1 or name.startswith("norm") else normal(k, *shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square norm over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: Any = 1.0, bias: Any = 0.0) -> jax.Array:
    """Layer norm over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return (y * scale + bias).astype(x.dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy in float32; labels are integers, of the logits' dimensions but the last."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[jax.Array], Tree]:
    """Random texts with one word more than is read."""
    return lambda key: {"tokens": jax.random.randint(key, (batch, length + 1), 0, vocabulary)}
