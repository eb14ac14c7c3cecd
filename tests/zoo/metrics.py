"""Item 11 of the zoo: what is reported about a batch.

Knows metrics, from sums to sorts. Must not know vnode. Nothing is trained here: the steps are evaluations, with the
model reduced to what the metric needs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import Program, case, kit

WIDTH = 5
CLASSES = 6
EXACT = {"recompute_budget": 10.0}


def _batch(batch: int = 16) -> dict[str, jax.Array]:
    return {"x": kit.normal(batch, WIDTH), "y": kit.integers(CLASSES, batch), "weight": kit.uniform(batch)}


def _evaluate(metrics: Any, batch: int = 16, **options: Any) -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        return metrics(kit.mlp(params, batch["x"]), batch)

    return Program(step, (kit.dense(WIDTH, 8, CLASSES), _batch(batch)), options)


@case(item=11)
def metric_accuracy() -> Program:
    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        hit = jnp.argmax(logits, axis=-1) == batch["y"]
        return {
            "accuracy": hit.mean(),
            "weighted": (hit * batch["weight"]).sum() / batch["weight"].sum(),
            "correct": hit.sum(),
            "per_example": hit,
            "count": jnp.asarray(hit.shape[0]),
        }

    return _evaluate(metrics)


@case(item=11, batch=12)
def metric_top_k_accuracy() -> Program:
    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        _, best = lax.top_k(logits, 3)
        in_top = jnp.any(best == batch["y"][:, None], axis=-1)
        rank = jnp.sum(logits > jnp.take_along_axis(logits, batch["y"][:, None], axis=-1), axis=-1)
        return in_top.mean(), best, jnp.mean(1.0 / (rank + 1)), jnp.argsort(-logits, axis=-1)

    return _evaluate(metrics, 12)


@case(item=11)
def metric_confusion_matrix() -> Program:
    """By scatter-add, by one-hot product, and by a flat histogram."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        guess = jnp.argmax(logits, axis=-1)
        by_scatter = jnp.zeros((CLASSES, CLASSES), jnp.int32).at[batch["y"], guess].add(1)
        start = jnp.ones((CLASSES, CLASSES), kit.real())
        weighted = start.at[batch["y"], guess].add(batch["weight"])
        by_product = jax.nn.one_hot(batch["y"], CLASSES).T @ jax.nn.one_hot(guess, CLASSES)
        by_count = jnp.bincount(batch["y"] * CLASSES + guess, length=CLASSES**2).reshape(CLASSES, CLASSES)
        precision = jnp.diag(by_scatter) / jnp.maximum(by_scatter.sum(axis=0), 1)
        return by_scatter, weighted, by_product, by_count, precision

    return _evaluate(metrics)


@case(item=11, batch=12)
def metric_confusion_matrix_running() -> Program:
    """Counts that are carried from batch to batch: they enter the sum once."""

    def step(state: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return state.at[batch["y"], (batch["x"][:, 0] > 0).astype(jnp.int32)].add(1)

    return Program(step, (kit.integers(50, CLASSES, 2), _batch(12)))


@case(item=11)
def metric_extremes() -> Program:
    """max, min, any, all, argmax and argmin over the batch, with ties."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        y = batch["y"]
        return {
            "max": logits.max(),
            "max_per_class": logits.max(axis=0),
            "min": logits.min(axis=0),
            "any": (logits > 2.0).any(axis=0),
            "all": (logits > -5.0).all(),
            "argmax": jnp.argmax(logits, axis=0),
            "argmin": jnp.argmin(logits[:, 0]),
            "first_of_equals": jnp.argmax(y),
            "last_of_equals": y.shape[0] - 1 - jnp.argmax(y[::-1]),
            "flat_argmax": jnp.argmax(logits),
            "max_int": y.max(),
            "product": jnp.prod(1.0 + 0.1 * logits, axis=0),
            "range": jnp.ptp(logits, axis=0),
        }

    return _evaluate(metrics)


@case(item=11, batch=12)
def metric_hardest_examples() -> Program:
    """The three greatest losses of the batch, and which examples they belong to."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        losses = kit.cross_entropy(logits, batch["y"])
        values, indices = lax.top_k(losses, 3)
        return values, indices, batch["x"][indices], losses

    return _evaluate(metrics, 12)


@case(item=11)
def metric_histogram() -> Program:
    """With fixed edges, with edges from the batch, and of integers."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        fixed, _ = jnp.histogram(logits, bins=5, range=(-3.0, 3.0))
        found, edges = jnp.histogram(logits[:, 0], bins=4)
        place = jnp.clip(jnp.digitize(logits[:, 1], jnp.linspace(-1, 1, 5)), 0, 5)
        by_segment = jax.ops.segment_sum(batch["weight"], place, num_segments=6)
        highest = jax.ops.segment_max(logits[:, 2], batch["y"], num_segments=CLASSES)
        return fixed, found, edges, by_segment, highest, place

    return _evaluate(metrics)


@case(item=11, batch=12)
def metric_median_and_sort() -> Program:
    """Whatever needs all examples at once."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        return {
            "median": jnp.median(logits, axis=0),
            "quantiles": jnp.quantile(logits[:, 0], jnp.asarray([0.1, 0.9], logits.dtype)),
            "sorted": jnp.sort(logits, axis=0),
            "order": jnp.argsort(logits[:, 1]),
            "ranks": jnp.argsort(jnp.argsort(batch["weight"])),
            "cumulative": jnp.cumsum(batch["weight"]),
        }

    return _evaluate(metrics, 12, **EXACT)


@case(item=11)
def metric_area_under_curve() -> Program:
    """Sorted scores, cumulative counts, a trapezoid sum."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        scores, positive = logits[:, 0], batch["y"] > 2
        hits = positive[jnp.argsort(-scores)]
        true_rate = jnp.cumsum(hits) / hits.sum()
        false_rate = jnp.cumsum(~hits) / (~hits).sum()
        return jnp.trapezoid(true_rate, false_rate), true_rate

    return _evaluate(metrics)


@case(item=11, batch=12)
def metric_per_example_outputs() -> Program:
    """Outputs with the examples in other dimensions, merged with others, and repeated."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        probability = jax.nn.softmax(logits)
        return {
            "losses": kit.cross_entropy(logits, batch["y"]),
            "transposed": probability.T,
            "flat": probability.reshape(-1),
            "flat_transposed": probability.T.reshape(-1),
            "middle": jnp.stack([probability, -probability]),
            "repeated": jnp.repeat(batch["y"], 2),
            "tiled": jnp.tile(batch["y"], 2),
            "expanded": probability[:, None, :, None],
            "input": batch["x"],
        }

    return _evaluate(metrics, 12)


@case(item=11)
def metric_dtypes_of_outputs() -> Program:
    """Integers, booleans, keys, small types, positions, and shapes that depend on the batch."""

    def step(key: jax.Array, batch: dict[str, jax.Array]) -> Any:
        n = batch["y"].shape[0]
        return {
            "position": jnp.arange(n),
            "position_small": jnp.arange(n, dtype=jnp.uint8),
            "reversed": jnp.arange(n)[::-1],
            "linspace": jnp.linspace(0.0, 1.0, n),
            "eye": jnp.eye(n, dtype=jnp.int8),
            "sign": jnp.sign(batch["x"]).astype(jnp.int8),
            "bits": batch["y"] & 1 == 0,
            "key": jax.random.fold_in(key, 3),
            "keys": jax.random.split(key, n),
            "size": n,
            "ones": jnp.ones((n, 2), jnp.int16),
            "constant": jnp.asarray(2.5),
            "nothing": None,
            "empty": jnp.zeros((0, 3)),
        }

    return Program(step, (jax.random.key(1), _batch()))


@case(item=11, batch=12)
def metric_moments() -> Program:
    """Mean, variance, covariance, correlation, norms, explained variance."""

    def metrics(logits: jax.Array, batch: dict[str, jax.Array]) -> Any:
        target = batch["weight"]
        residual = target - logits[:, 0]
        return {
            "mean": logits.mean(axis=0),
            "std": logits.std(axis=0),
            "covariance": jnp.cov(logits.T),
            "correlation": jnp.corrcoef(logits[:, :2].T),
            "norm": jnp.linalg.norm(logits),
            "explained": 1.0 - residual.var() / target.var(),
            "nan_mean": jnp.nanmean(jnp.where(logits > 0, logits, jnp.nan), axis=0),
            "log_sum_exp": jax.nn.logsumexp(logits, axis=0),
        }

    return _evaluate(metrics, 12)
