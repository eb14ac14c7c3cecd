"""Item 4 of the zoo: losses and their denominators.

Knows optax's losses. Must not know vnode. Most of these are what gradient accumulation by averaging gets wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import Program, case, kit

CLASSES = 7
WIDTH = 5
LENGTH = 4

Batch = dict[str, jax.Array]


def _batch(batch: int = 16) -> Batch:
    return {
        "x": kit.normal(batch, LENGTH, WIDTH),
        "y": kit.integers(CLASSES, batch, LENGTH),
        "mask": kit.lengths_mask(batch, LENGTH),
        "weight": kit.uniform(batch, low=0.1, high=2.0),
    }


def _train(loss_fn: Callable[[Any, Batch], Any], batch: int = 16, **options: Any) -> Program:
    """The gradient of a loss, an update, and whatever the loss reports."""

    def step(params: Any, batch: Batch) -> tuple[Any, Any]:
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return kit.sgd(params, grads), (loss, aux)

    return Program(step, (kit.dense(WIDTH, 8, CLASSES), _batch(batch)), options)


@case(item=4)
def loss_mean() -> Program:
    return _train(lambda p, b: (kit.cross_entropy(kit.mlp(p, b["x"]), b["y"]).mean(), ()))


@case(item=4, batch=12)
def loss_sum() -> Program:
    return _train(lambda p, b: (kit.cross_entropy(kit.mlp(p, b["x"]), b["y"]).sum(), ()), 12)


@case(item=4)
def loss_masked_mean() -> Program:
    def loss_fn(params: Any, batch: Batch) -> Any:
        losses, w = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]), batch["mask"]
        return (losses * w).sum() / w.sum(), w.sum()

    return _train(loss_fn)


@case(item=4, batch=12)
def loss_masked_mean_of_integers() -> Program:
    """The mask is derived from the labels, and the denominator is an integer kept away from zero."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        valid = batch["y"] != 0
        losses = jnp.where(valid, kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]), 0.0)
        return losses.sum() / jnp.maximum(valid.sum(), 1), valid.sum()

    return _train(loss_fn, 12)


@case(item=4)
def loss_mean_with_where() -> Program:
    def loss_fn(params: Any, batch: Batch) -> Any:
        losses = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"])
        return jnp.mean(losses, where=batch["mask"] > 0), jnp.average(losses[:, 0], weights=batch["weight"])

    return _train(loss_fn)


@case(item=4)
def loss_mean_of_masked_means() -> Program:
    """Every example has its own denominator; the batch has another."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        losses, w = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]), batch["mask"]
        per_example = (losses * w).sum(axis=1) / jnp.maximum(w.sum(axis=1), 1.0)
        return jnp.sum(per_example * batch["weight"]) / jnp.sum(batch["weight"]), per_example

    return _train(loss_fn)


@case(item=4, batch=12)
def loss_flattened() -> Program:
    """``reshape(-1, vocabulary)`` merges batch and time."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        logits = kit.mlp(params, batch["x"]).reshape(-1, CLASSES)
        losses = kit.cross_entropy(logits, batch["y"].reshape(-1))
        w = batch["mask"].ravel()
        return jnp.dot(losses, w) / w.sum(), losses

    return _train(loss_fn, 12)


@case(item=4)
def loss_flattened_inputs() -> Program:
    """Everything is flattened before the model and folded back after it."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        logits = kit.mlp(params, batch["x"].reshape(-1, WIDTH))
        losses = kit.cross_entropy(logits, batch["y"].reshape(-1)).reshape(batch["y"].shape)
        return losses.mean(), losses.sum(axis=1)

    return _train(loss_fn)


@case(item=4)
def loss_time_major() -> Program:
    """Examples in the second dimension, and flattened so that they are the minor part."""

    def step(params: Any, batch: Batch) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = kit.mlp(params, batch["x"]).reshape(-1, CLASSES)
            losses = kit.cross_entropy(logits, batch["y"].reshape(-1))
            return losses.mean(), losses.reshape(LENGTH, -1)

        (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), (loss, losses)

    b = _batch()
    batch = {"x": jnp.swapaxes(b["x"], 0, 1), "y": b["y"].T}
    return Program(step, (kit.dense(WIDTH, 8, CLASSES), batch), {"in_axes": (None, 1)})


@case(item=4, batch=12)
def loss_transposed_inside() -> Program:
    """Batch-major data made time-major inside the step."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        logits = kit.mlp(params, jnp.swapaxes(batch["x"], 0, 1))
        losses = kit.cross_entropy(logits, batch["y"].T)
        weights = jnp.linspace(0.5, 1.0, LENGTH, dtype=kit.real())
        return jnp.einsum("tb,t->", losses, weights) / losses.shape[1], losses

    return _train(loss_fn, 12)


@case(item=4)
def loss_label_smoothing() -> Program:
    def loss_fn(params: Any, batch: Batch) -> Any:
        labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], CLASSES, dtype=kit.real()), 0.1)
        return optax.softmax_cross_entropy(kit.mlp(params, batch["x"]), labels).mean(), ()

    return _train(loss_fn)


@case(item=4, batch=12)
def loss_with_z_loss() -> Program:
    def loss_fn(params: Any, batch: Batch) -> Any:
        logits, w = kit.mlp(params, batch["x"]), batch["mask"]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, batch["y"][..., None], axis=-1)[..., 0]
        total = w.sum()
        z_loss = 1e-2 * (jnp.square(log_z) * w).sum() / total
        return ((log_z - picked) * w).sum() / total + z_loss, z_loss

    return _train(loss_fn, 12)


@case(item=4)
def loss_several_denominators() -> Program:
    """Tokens, examples, positive examples and parameters, each averaged by its own count."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        logits = kit.mlp(params, batch["x"])
        losses, w = kit.cross_entropy(logits, batch["y"]), batch["mask"]
        positive = (batch["y"][:, 0] > 3).astype(losses.dtype)
        token = (losses * w).sum() / w.sum()
        example = (losses[:, 0] * batch["weight"]).mean()
        rare = (logits[:, 0, 0] * positive).sum() / (positive.sum() + 1e-6)
        decay = sum(jnp.mean(p["w"] ** 2) for p in params)
        parts = {"token": token, "example": example, "rare": rare, "decay": decay}
        return token + 0.5 * example - 0.1 * rare + 0.01 * decay, parts

    return _train(loss_fn)


@case(item=4)
def loss_class_balanced() -> Program:
    """Weights per class from how often the class occurs in this batch."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        counts = jnp.bincount(batch["y"].ravel(), length=CLASSES)
        weights = (batch["y"].size / (CLASSES * jnp.maximum(counts, 1))).astype(kit.real())
        losses = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"])
        return (losses * weights[batch["y"]]).mean(), counts

    return _train(loss_fn)


@case(item=4, batch=12)
def loss_normalized_weights() -> Program:
    """Weights scaled by their greatest, then by their mean: two reductions before the loss."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        weight = batch["weight"] / batch["weight"].max()
        weight = weight / weight.mean()
        losses = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]).mean(axis=1)
        return (losses * weight).mean(), weight

    return _train(loss_fn, 12)


@case(item=4)
def loss_binary_and_focal() -> Program:
    def loss_fn(params: Any, batch: Batch) -> Any:
        logits = kit.mlp(params, batch["x"])
        targets = jax.nn.one_hot(batch["y"], CLASSES, dtype=logits.dtype)
        binary = optax.sigmoid_binary_cross_entropy(logits, targets)
        focal = optax.sigmoid_focal_loss(logits, targets, alpha=0.25, gamma=2.0)
        return binary.mean() + focal.sum() / jnp.maximum(targets[..., 1:].sum(), 1.0), binary.mean((0, 1))

    return _train(loss_fn)


@case(item=4, batch=12)
def loss_regression_family() -> Program:
    """Squared, absolute, Huber, log-cosh, Poisson likelihood, cosine distance."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        out = kit.mlp(params, batch["x"])
        target = jnp.pad(batch["x"], ((0, 0), (0, 0), (0, CLASSES - WIDTH)))
        parts = {
            "squared": optax.squared_error(out, target).mean(),
            "absolute": jnp.abs(out - target).mean(),
            "huber": optax.huber_loss(out, target, delta=0.5).mean(),
            "log_cosh": optax.log_cosh(out, target).mean(),
            "poisson": (jnp.exp(out) - jnp.abs(target) * out).mean(),
            "cosine": optax.cosine_distance(out, target, epsilon=1e-6).mean(),
            "root": jnp.sqrt(jnp.mean((out - target) ** 2)),
        }
        return sum(parts.values()), parts

    return _train(loss_fn, 12)


@case(item=4)
def loss_ctc() -> Program:
    def loss_fn(params: Any, batch: Batch) -> Any:
        logits = kit.mlp(params, jnp.repeat(batch["x"], 2, axis=1))
        labels = batch["y"][:, :3]
        padding = 1.0 - batch["mask"][:, :3]
        losses = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2], logits.dtype), labels, padding)
        return losses.mean(), losses

    return _train(loss_fn)


@case(item=4)
def loss_log_mean_exp_over_batch() -> Program:
    """A soft maximum of the examples' losses: its gradient weights the examples by a softmax over the batch."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        losses = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]).mean(axis=1)
        return jax.nn.logsumexp(losses) - jnp.log(losses.shape[0]), jax.nn.softmax(losses)

    return _train(loss_fn)


@case(item=4, batch=12)
def loss_worst_example() -> Program:
    """The greatest loss of the batch: the gradient comes from that example alone."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        losses = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]).mean(axis=1)
        return losses.max(), jnp.argmax(losses)

    return _train(loss_fn, 12)


@case(item=4)
def loss_variance_of_losses() -> Program:
    """Mean plus variance of the examples' losses: the variance reads the mean."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        losses = kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]).mean(axis=1)
        return losses.mean() + 0.5 * losses.var(), losses.std()

    return _train(loss_fn)


@case(item=4, batch=12)
def loss_standardized_targets() -> Program:
    """Targets standardized over the batch: couples the examples, but not the model."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        target = batch["weight"]
        target = (target - target.mean()) / (target.std() + 1e-6)
        return jnp.mean((kit.mlp(params, batch["x"])[:, 0, 0] - target) ** 2), target

    return _train(loss_fn, 12)


@case(item=4)
def loss_pairwise_ranking_by_matrix() -> Program:
    """Every example against every other one: a matrix of batch by batch."""

    def loss_fn(params: Any, batch: Batch) -> Any:
        scores = kit.mlp(params, batch["x"]).mean(axis=(1, 2))
        margin = scores[:, None] - scores[None, :]
        better = batch["weight"][:, None] > batch["weight"][None, :]
        return jnp.sum(jax.nn.softplus(-margin) * better) / better.sum(), ()

    return _train(loss_fn)


@case(item=4)
def loss_value_only_gradient_by_transpose() -> Program:
    """``jax.vjp`` and ``jax.linearize`` written out instead of ``jax.grad``."""

    def step(params: Any, batch: Batch) -> tuple[Any, jax.Array]:
        logits, pull = jax.vjp(lambda p: kit.mlp(p, batch["x"]), params)
        count = batch["mask"].sum()
        error = (jax.nn.softmax(logits) - jax.nn.one_hot(batch["y"], CLASSES, dtype=logits.dtype)) / count
        (grads,) = pull(error * batch["mask"][..., None])
        value, push = jax.linearize(lambda p: kit.mlp(p, batch["x"]).mean(), params)
        return kit.sgd(params, grads), value + push(grads)

    return Program(step, (kit.dense(WIDTH, 8, CLASSES), _batch()))
