"""Batches of several sizes in one step: labelled and unlabelled examples, one after another or apart.

Knows concatenation of batches, what is taken apart again, and losses between them. Must not know vnode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import Program, case, kit

WIDTH = 4
CLASSES = 3
EXACT: dict[str, Any] = {"recompute_budget": 10.0}


def _batch(labelled: int, unlabelled: int) -> dict[str, jax.Array]:
    return {
        "x": kit.normal(labelled, WIDTH),
        "y": kit.integers(CLASSES, labelled),
        "weak": kit.normal(unlabelled, WIDTH, seed=1),
        "strong": kit.normal(unlabelled, WIDTH, seed=2),
    }


def _model(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params[0]["w"] + params[0]["b"]) @ params[1]["w"] + params[1]["b"]


def _losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _train(
    loss_fn: Callable[[Any, dict[str, jax.Array]], Any], labelled: int = 12, unlabelled: int = 36, **options: Any
) -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return kit.sgd(params, grads), loss, aux

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), _batch(labelled, unlabelled)), options)


def _fixmatch(params: Any, batch: dict[str, jax.Array]) -> Any:
    """Sohn et al. 2020: one forward pass of everything, and pseudo-labels where the model is confident."""
    labelled = batch["x"].shape[0]
    logits = _model(params, jnp.concatenate([batch["x"], batch["weak"], batch["strong"]]))
    weak, strong = jnp.split(logits[labelled:], 2)
    guess = jax.nn.softmax(jax.lax.stop_gradient(weak))
    sure = guess.max(-1) >= 0.4
    unsupervised = jnp.mean(_losses(strong, guess.argmax(-1)) * sure)
    return jnp.mean(_losses(logits[:labelled], batch["y"])) + unsupervised, (sure.mean(), logits)


@case(item=15, batch=12)
def fixmatch() -> Program:
    return _train(_fixmatch)


@case(item=15, batch=10, rare=True)
def fixmatch_without_common_parts() -> Program:
    """Sizes of which one is divided among the nodes, and the other is computed whole."""
    return _train(_fixmatch, 10, 33)


@case(item=15, batch=12)
def consistency_apart() -> Program:
    """The batches never meet: a mean teacher (Tarvainen and Valpola 2017), with a loss of each."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> Any:
        teacher = jax.lax.stop_gradient(jax.tree.map(lambda p: 0.9 * p, params))
        distance = jnp.mean((_model(params, batch["strong"]) - _model(teacher, batch["weak"])) ** 2)
        return jnp.mean(_losses(_model(params, batch["x"]), batch["y"])) + distance, distance

    return _train(loss, 8, 24)


@case(item=15, batch=12)
def batchnorm_over_both_batches() -> Program:
    """Statistics of the concatenation, and those of each batch alone (Berthelot et al. 2021 align them)."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> Any:
        labelled = batch["x"].shape[0]
        hidden = jnp.concatenate([batch["weak"], batch["x"]]) @ params[0]["w"]
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3) + params[0]["b"]
        logits = jnp.tanh(hidden) @ params[1]["w"]
        means = [jax.nn.softmax(part).mean(0) for part in (logits[:-labelled], logits[-labelled:])]
        return jnp.mean(_losses(logits[-labelled:], batch["y"])) + jnp.sum((means[0] - means[1]) ** 2), means

    return _train(loss, **EXACT)


@case(item=15, batch=12)
def mixmatch() -> Program:
    """Berthelot et al. 2019: every example is mixed with one of a permutation of both batches."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> Any:
        labelled = batch["x"].shape[0]
        x = jnp.concatenate([batch["x"], batch["weak"], batch["strong"]])
        guess = jax.nn.softmax(jax.lax.stop_gradient(_model(params, batch["weak"])))
        y = jnp.concatenate([jax.nn.one_hot(batch["y"], CLASSES, dtype=guess.dtype), guess, guess])
        order = jax.random.permutation(jax.random.key(0), x.shape[0])
        x, y = 0.7 * x + 0.3 * x[order], 0.7 * y + 0.3 * y[order]
        logits = _model(params, x)
        entropies = optax.softmax_cross_entropy(logits[:labelled], y[:labelled])
        return jnp.mean(entropies) + jnp.mean((jax.nn.softmax(logits) - y)[labelled:] ** 2), logits.sum()

    return _train(loss, **EXACT)


@case(item=15, batch=6)
def dropout_and_mask_over_both_batches() -> Program:
    """The draws of 15 rows, and a mask by their numbers."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> Any:
        labelled = batch["x"].shape[0]
        hidden = jnp.tanh(jnp.concatenate([batch["x"], batch["weak"]]) @ params[0]["w"])
        hidden = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.7, hidden.shape), hidden / 0.7, 0)
        logits = hidden @ params[1]["w"]
        mask = jnp.arange(logits.shape[0]) < labelled
        labels = jnp.pad(batch["y"], (0, logits.shape[0] - labelled))
        supervised = jnp.sum(_losses(logits, labels) * mask) / mask.sum()
        return supervised + jnp.mean(jnp.abs(logits) * ~mask[:, None]), hidden

    return _train(loss, 6, 9)


@case(item=15, batch=12, rare=True)
def contrast_between_batches() -> Program:
    """All pairs of an example of one batch and one of the other."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> Any:
        scores = _model(params, batch["x"]) @ _model(params, batch["weak"]).T
        pulls = jax.nn.logsumexp(scores, 0).mean() + jax.nn.logsumexp(scores, 1).mean()
        return pulls - scores.mean(), scores

    return _train(loss, **EXACT)


@case(item=15, batch=12, rare=True)
def layers_over_both_batches() -> Program:
    """A concatenation goes through a scan over layers; each labelled example has three unlabelled ones."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> Any:
        labelled = batch["x"].shape[0]
        hidden = jnp.concatenate([batch["x"], batch["weak"]]) @ params[0]["w"]

        @jax.checkpoint
        def layer(hidden: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(hidden + bias), None

        hidden, _ = jax.lax.scan(layer, hidden, jnp.stack([params[0]["b"]] * 3))
        logits = hidden @ params[1]["w"]
        near = jnp.repeat(logits[:labelled], 3, 0) - logits[labelled:]
        return jnp.mean(_losses(logits[:labelled], batch["y"])) + jnp.mean(near**2), logits

    return _train(loss, **EXACT)
