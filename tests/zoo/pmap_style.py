"""Item 13 of the zoo: steps written for pmap, one replica per index of the batch dimension.

Knows collectives over a named axis. Must not know vnode. ``jax.vmap(step, axis_name="batch")`` makes a whole-batch
program out of such a step; the replicas, not the examples within them, are then what nodes hold.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import Program, case, kit

WIDTH = 4
CLASSES = 3
PER_REPLICA = 3
EXACT = {"recompute_budget": 10.0}


def _batch(replicas: int) -> dict[str, jax.Array]:
    return {
        "x": kit.normal(replicas, PER_REPLICA, WIDTH),
        "y": kit.integers(CLASSES, replicas, PER_REPLICA),
        "mask": kit.lengths_mask(replicas, PER_REPLICA),
    }


def _program(step: Any, state: Any, replicas: int, out_axes: Any = None, **options: Any) -> Program:
    whole = jax.vmap(step, axis_name="batch", in_axes=(None, 0), out_axes=out_axes)
    return Program(whole, (state, _batch(replicas)), options)


@case(item=13)
def replicas_with_mean_of_gradients() -> Program:
    tx = optax.adamw(1e-2)

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            return kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads, loss = lax.pmean((grads, loss), "batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = kit.dense(WIDTH, 6, CLASSES)
    return _program(step, (params, kit.warm(tx.init(params))), 16)


@case(item=13, batch=12)
def replicas_with_sums_and_local_metrics() -> Program:
    """Token-weighted means by psum; every replica also returns its own loss."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return (kit.cross_entropy(kit.mlp(params, batch["x"]), batch["y"]) * batch["mask"]).sum()

        total, grads = jax.value_and_grad(loss_fn)(params)
        count = lax.psum(batch["mask"].sum(), "batch")
        grads = jax.tree.map(lambda g: lax.psum(g, "batch") / count, grads)
        worst, best = lax.pmax(total, "batch"), lax.pmin(total, "batch")
        return kit.sgd(params, grads), lax.psum(total, "batch") / count, worst, best, lax.psum(1, "batch"), total

    return _program(step, kit.dense(WIDTH, 6, CLASSES), 12, out_axes=(None, None, None, None, None, 0))


@case(item=13)
def replicas_with_dropout_by_axis_index() -> Program:
    """Every replica folds its index into the key."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, key = state
        key, use = jax.random.split(key)
        use = jax.random.fold_in(use, lax.axis_index("batch"))

        def loss_fn(params: Any) -> jax.Array:
            keep = jax.random.bernoulli(use, 0.7, batch["x"].shape)
            return kit.cross_entropy(kit.mlp(params, batch["x"] * keep), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return (kit.sgd(params, lax.pmean(grads, "batch")), key), loss, lax.axis_index("batch")

    return _program(step, (kit.dense(WIDTH, 6, CLASSES), jax.random.key(2)), 16, out_axes=(None, 0, 0))


class Normalized(nn.Module):
    """Batch normalization, over the replica or over a named axis of replicas."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(6, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=self.axis_name)(x)
        return nn.Dense(CLASSES)(nn.relu(x))


def _normalized(axis_name: str | None, replicas: int, **options: Any) -> Program:
    model = Normalized(axis_name)

    def step(variables: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updated = model.apply({**variables, "params": params}, batch["x"], mutable=["batch_stats"])
            return kit.cross_entropy(logits, batch["y"]).mean(), updated

        (loss, updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
        grads, loss, updated = lax.pmean((grads, loss, updated), "batch")
        return {"params": kit.sgd(variables["params"], grads), **updated}, loss

    variables = kit.init(Normalized(), _batch(replicas)["x"])
    return _program(step, variables, replicas, **options)


@case(item=13, batch=12)
def replicas_with_their_own_batch_norm() -> Program:
    """No coupling: statistics are of the replica's examples; the running ones are averaged."""
    return _normalized(None, 12)


@case(item=13)
def replicas_with_synchronized_batch_norm() -> Program:
    return _normalized("batch", 16, **EXACT)


@case(item=13)
def replicas_that_gather_embeddings() -> Program:
    """A contrastive loss over what all replicas gathered."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            z = kit.mlp(params, batch["x"]).mean(axis=0)
            everyone = lax.all_gather(z, "batch")
            return -jax.nn.log_softmax(everyone @ z)[lax.axis_index("batch")]

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, lax.pmean(grads, "batch")), lax.pmean(loss, "batch")

    return _program(step, kit.dense(WIDTH, 6, CLASSES), 16)


@case(item=13, batch=12)
def replicas_that_exchange_with_neighbours() -> Program:
    """Gossip: every replica hands its mean to the next one."""

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> Any:
        mine = (batch["x"] @ w).mean()
        size = lax.axis_size("batch")
        theirs = lax.ppermute(mine, "batch", [(i, (i + 1) % size) for i in range(size)])
        return w - 0.1 * lax.pmean(mine - theirs, "batch"), theirs

    return _program(step, kit.normal(WIDTH), 12, out_axes=(None, 0), **EXACT)


@case(item=13)
def replicas_with_states_of_their_own() -> Program:
    """As pmap has it: state and key with a leading dimension of replicas, in and out."""

    def step(params: Any, key: jax.Array, batch: dict[str, jax.Array]) -> Any:
        key, use = jax.random.split(key)

        def loss_fn(params: Any) -> jax.Array:
            noise = 0.1 * jax.random.normal(use, batch["x"].shape, batch["x"].dtype)
            return kit.cross_entropy(kit.mlp(params, batch["x"] + noise), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, lax.pmean(grads, "batch")), key, lax.pmean(loss, "batch")

    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (16, *p.shape)), kit.dense(WIDTH, 6, CLASSES))
    args = (params, jax.random.split(jax.random.key(0), 16), _batch(16))
    return Program(jax.vmap(step, axis_name="batch"), args, {"in_axes": (0, 0, 0)})
