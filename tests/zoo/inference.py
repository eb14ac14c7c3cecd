"""Item 12 of the zoo: evaluation, inference, and batches that nodes do not divide.

Knows inference steps, and values that go wrong on padding: logarithms, divisions and roots whose gradient at zero is
not finite. Must not know vnode.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from . import Program, case, kit

WIDTH = 4
CLASSES = 3


class FrozenNet(nn.Module):
    """Batch normalization with running statistics, dropout switched off."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        x = nn.Dropout(0.5, deterministic=True)(x.mean(axis=(1, 2)))
        return nn.Dense(CLASSES)(x)


@case(item=12)
def inference_logits() -> Program:
    model = FrozenNet()

    def step(variables: Any, image: jax.Array) -> jax.Array:
        return model.apply(variables, image)

    image = kit.normal(16, 4, 4, 2)
    return Program(step, (kit.init(model, image), image))


@case(item=12, batch=13)
def inference_of_a_batch_that_is_no_multiple() -> Program:
    model = FrozenNet()

    def step(variables: Any, batch: dict[str, jax.Array]) -> Any:
        logits = model.apply(variables, batch["image"])
        losses = kit.cross_entropy(logits, batch["label"])
        return {"logits": logits, "classes": logits.argmax(-1), "loss": losses.mean(), "total": losses.sum()}

    batch = {"image": kit.normal(13, 4, 4, 2), "label": kit.integers(CLASSES, 13)}
    return Program(step, (kit.init(model, batch["image"]), batch))


@case(item=12, batch=5)
def inference_of_fewer_examples_than_nodes() -> Program:
    def step(params: Any, x: jax.Array) -> Any:
        out = kit.mlp(params, x)
        return out, out.mean(), out.max(axis=0), jnp.argmin(out[:, 0])

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), kit.normal(5, WIDTH)))


@case(item=12, batch=1)
def inference_of_one_example() -> Program:
    def step(params: Any, x: jax.Array) -> Any:
        out = kit.mlp(params, x)
        return out, out.mean()

    return Program(step, (kit.dense(WIDTH, 6, CLASSES), kit.normal(1, WIDTH)))


def _train(loss_fn: Any, batch: int, x: jax.Array | None = None, **options: Any) -> Program:
    def step(params: Any, x: jax.Array) -> Any:
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x)
        return kit.sgd(params, grads), loss, aux

    x = kit.uniform(batch, WIDTH, low=0.5, high=1.5) if x is None else x
    return Program(step, (kit.dense(WIDTH, 6, CLASSES), x), options)


@case(item=12, batch=13)
def training_on_a_batch_that_is_no_multiple() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        out = kit.mlp(params, x)
        return jnp.mean(out**2), (out, out.min(), out.prod(axis=0), (out > 0).all(), (out > 2).any())

    return _train(loss_fn, 13)


@case(item=12, batch=5)
def training_on_fewer_examples_than_nodes() -> Program:
    def loss_fn(params: Any, x: jax.Array) -> Any:
        out = kit.mlp(params, x)
        return jnp.mean(jnp.sum(out**2, axis=-1)), out

    return _train(loss_fn, 5)


@case(item=12, batch=13)
def padding_with_logarithms() -> Program:
    """The logarithm of an example of zeros is infinite, and so is its gradient."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        return jnp.mean(kit.mlp(params, jnp.log(x))), jnp.log(x).sum()

    return _train(loss_fn, 13)


@case(item=12, batch=13)
def padding_with_divisions() -> Program:
    """Examples normalized by their own sum and their own norm: zero by zero."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        shares = x / x.sum(axis=-1, keepdims=True)
        unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        out = kit.mlp(params, shares) + kit.mlp(params, unit)
        return jnp.mean(1.0 / jnp.sum(out**2, axis=-1)), (shares, jnp.max(unit), jnp.sum(1.0 / x))

    return _train(loss_fn, 13)


@case(item=12, batch=11)
def padding_with_roots_in_the_model() -> Program:
    """Square roots of what the model makes of an example: the gradient at zero is infinite."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        features = jnp.sqrt(x @ jnp.abs(params[0]["w"]))
        distance = jnp.linalg.norm(features, axis=-1) ** 0.5
        return distance.mean() + jnp.mean(kit.mlp(params, x) ** 2), distance

    return _train(loss_fn, 11)


@case(item=12, batch=13)
def padding_with_statistics() -> Program:
    """Standardized features: the padding may enter neither the mean nor the variance."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        z = (jnp.log(x) - jnp.log(x).mean(axis=0)) / jnp.log(x).std(axis=0)
        return jnp.mean(kit.mlp(params, z) ** 2), (z, jnp.median(x, axis=0), jnp.sort(x[:, 0]))

    return _train(loss_fn, 13)


@case(item=12, batch=13)
def padding_with_loops() -> Program:
    """Every example iterates until it converges: an example of zeros never would."""

    def step(scale: jax.Array, x: jax.Array) -> Any:
        def solve(a: jax.Array) -> Any:
            def going(state: Any) -> jax.Array:
                y, i = state
                return ~(jnp.abs(y * y - a) <= 1e-3 * a) & (i < 40)

            def body(state: Any) -> Any:
                y, i = state
                return 0.5 * (y + a / y), i + 1

            return jax.lax.while_loop(going, body, (a, 0))

        roots, counts = jax.vmap(solve)(scale * x[:, 0])
        return roots, counts, counts.max(), roots.mean()

    return Program(step, (jnp.asarray(2.0, kit.real()), kit.uniform(13, WIDTH, low=0.5)))


@case(item=12, batch=13)
def padding_with_indices() -> Program:
    """Tables, counts and positions: the padding must not count as class zero."""

    def step(table: jax.Array, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(table: jax.Array) -> jax.Array:
            rows = table[batch["y"]]
            return jnp.mean(jnp.sum(rows * batch["x"], axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(table)
        counts = jnp.zeros(CLASSES, jnp.int32).at[batch["y"]].add(1)
        first = jnp.full(CLASSES, 99).at[batch["y"]].min(jnp.arange(batch["y"].shape[0]))
        return table - grads, loss, counts, first, jnp.bincount(batch["y"], length=CLASSES)

    batch = {"y": kit.integers(CLASSES, 13), "x": kit.normal(13, WIDTH)}
    return Program(step, (kit.normal(CLASSES, WIDTH), batch))


@case(item=12, batch=13)
def padding_with_sequences() -> Program:
    """Flattened tokens, a masked mean, attention masks with no valid key in an example of zeros."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> Any:
            mask = batch["mask"] > 0
            scores = jnp.einsum("btd,bsd->bts", batch["x"], batch["x"])
            weights = jax.nn.softmax(jnp.where(mask[:, None, :], scores, -jnp.inf))
            attended = jnp.einsum("bts,bsd->btd", weights, batch["x"])
            out = kit.mlp(params, attended.reshape(-1, WIDTH))
            losses = kit.cross_entropy(out, batch["y"].reshape(-1))
            w = batch["mask"].reshape(-1)
            return (losses * w).sum() / w.sum(), losses

        (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, losses

    mask = kit.lengths_mask(13, 4).at[:, 0].set(1)
    batch = {"x": kit.normal(13, 4, WIDTH), "y": kit.integers(CLASSES, 13, 4), "mask": mask}
    return Program(step, (kit.dense(WIDTH, 6, CLASSES), batch))


@case(item=12, batch=12)
def nan_of_the_users_own_stays() -> Program:
    """An example that is NaN by itself must show in the sums, and in nobody else's outputs."""

    def loss_fn(params: Any, x: jax.Array) -> Any:
        out = kit.mlp(params, x)
        return jnp.mean(out), (out, out.max(), jnp.nansum(out), jnp.isnan(out).sum())

    return _train(loss_fn, 12, kit.normal(12, WIDTH).at[5, 1].set(jnp.nan))


@case(item=12, batch=14)
def statistics_collection_for_evaluation() -> Program:
    """Batch statistics re-estimated without training: sums that leave the step and normalize nothing."""

    def step(state: Any, x: jax.Array) -> Any:
        params, count, total, squares = state
        hidden = jnp.tanh(x @ params[0]["w"])
        return params, count + x.shape[0], total + hidden.sum(axis=0), squares + (hidden**2).sum(axis=0)

    state = (kit.dense(WIDTH, 6, CLASSES), jnp.asarray(10), kit.normal(6), kit.uniform(6))
    return Program(step, (state, kit.normal(14, WIDTH)))


@case(item=12, batch=7)
def leaves_without_elements() -> Program:
    """Optional features that this data set does not have: nothing of each example, in a batch that is no multiple."""

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            return jnp.mean((jnp.concatenate([batch["x"], batch["more"]], 1) @ w) ** 2)

        loss, grad = jax.value_and_grad(loss_fn)(w)
        per_example = {"doubled": batch["more"] * 2, "names": batch["names"] + 1, "sorted": jnp.sort(batch["more"], 0)}
        return kit.sgd(w, grad), (loss, batch["more"].sum(), per_example)

    batch = {"x": kit.normal(7, 3), "more": jnp.zeros((7, 0), kit.real()), "names": jnp.zeros((7, 0, 2), jnp.int32)}
    return Program(step, (kit.normal(3, 2, scale=0.3), batch))
