"""Item 8 of the zoo: losses in which every example meets every other one, and mixtures of experts.

Knows contrastive and self-supervised losses, and routing. Must not know vnode. All of them couple the batch, so the
extra work that exactness costs is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import Program, case, kit

WIDTH = 5
EMBEDDING = 4
EXACT = {"recompute_budget": 10.0}


def _views(batch: int) -> dict[str, jax.Array]:
    return {
        "a": kit.normal(batch, WIDTH),
        "b": kit.normal(batch, WIDTH, seed=1),
        "y": kit.integers(3, batch),
    }


def _towers() -> Any:
    return {"a": kit.dense(WIDTH, 8, EMBEDDING), "b": kit.dense(WIDTH, 8, EMBEDDING, seed=1)}


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _train(loss_fn: Callable[[Any, dict[str, jax.Array]], Any], params: Any, batch: int, **options: Any) -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return kit.sgd(params, grads), (loss, aux)

    return Program(step, (params, _views(batch)), options)


@case(item=8)
def contrastive_clip() -> Program:
    """Two towers, a learned temperature, cross entropy in both directions."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        a, b = _unit(kit.mlp(params["a"], batch["a"])), _unit(kit.mlp(params["b"], batch["b"]))
        logits = jnp.exp(params["temperature"]) * a @ b.T
        labels = jnp.arange(logits.shape[0])
        loss = (kit.cross_entropy(logits, labels).mean() + kit.cross_entropy(logits.T, labels).mean()) / 2
        return loss, jnp.mean(jnp.argmax(logits, axis=1) == labels)

    return _train(loss_fn, {**_towers(), "temperature": jnp.asarray(1.0, kit.real())}, 16)


@case(item=8, batch=12)
def contrastive_siglip() -> Program:
    """A sigmoid for every pair, positive on the diagonal."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        a, b = _unit(kit.mlp(params["a"], batch["a"])), _unit(kit.mlp(params["b"], batch["b"]))
        logits = 5.0 * a @ b.T - 2.0
        signs = 2.0 * jnp.eye(logits.shape[0], dtype=logits.dtype) - 1.0
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=-1)), jnp.diagonal(logits)

    return _train(loss_fn, _towers(), 12)


@case(item=8)
def contrastive_simclr() -> Program:
    """Two views concatenated along the batch; every other view is a negative."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        z = _unit(kit.mlp(params, jnp.concatenate([batch["a"], batch["b"]])))
        n = batch["a"].shape[0]
        logits = jnp.where(jnp.eye(2 * n, dtype=bool), -1e9, z @ z.T / 0.5)
        labels = (jnp.arange(2 * n) + n) % (2 * n)
        return kit.cross_entropy(logits, labels).mean(), z[:n]

    return _train(loss_fn, kit.dense(WIDTH, 8, EMBEDDING), 16)


@case(item=8, batch=12)
def contrastive_vicreg() -> Program:
    """Invariance, variance and covariance terms."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        a, b = kit.mlp(params, batch["a"]), kit.mlp(params, batch["b"])

        def spread(z: jax.Array) -> tuple[jax.Array, jax.Array]:
            centered = z - z.mean(axis=0)
            deviation = jnp.sqrt(z.var(axis=0) + 1e-4)
            covariance = centered.T @ centered / (z.shape[0] - 1)
            off_diagonal = covariance - jnp.diag(jnp.diag(covariance))
            return jnp.mean(jax.nn.relu(1.0 - deviation)), jnp.sum(off_diagonal**2) / z.shape[1]

        (var_a, cov_a), (var_b, cov_b) = spread(a), spread(b)
        parts = {"invariance": jnp.mean((a - b) ** 2), "variance": var_a + var_b, "covariance": cov_a + cov_b}
        return 25.0 * parts["invariance"] + 25.0 * parts["variance"] + parts["covariance"], parts

    return _train(loss_fn, kit.dense(WIDTH, 8, EMBEDDING), 12, **EXACT)


@case(item=8)
def contrastive_barlow_twins() -> Program:
    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        a, b = kit.mlp(params, batch["a"]), kit.mlp(params, batch["b"])
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        correlation = a.T @ b / a.shape[0]
        target = jnp.eye(EMBEDDING, dtype=a.dtype)
        weights = jnp.where(target > 0, 1.0, 0.05).astype(a.dtype)
        return jnp.sum(weights * (correlation - target) ** 2), correlation

    return _train(loss_fn, kit.dense(WIDTH, 8, EMBEDDING), 16, **EXACT)


@case(item=8, batch=12)
def contrastive_supervised() -> Program:
    """All examples of the same class attract each other."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        z = _unit(kit.mlp(params, batch["a"]))
        n = z.shape[0]
        others = ~jnp.eye(n, dtype=bool)
        same = (batch["y"][:, None] == batch["y"][None, :]) & others
        logits = z @ z.T / 0.3
        log_prob = logits - jax.nn.logsumexp(logits, axis=1, where=others, keepdims=True)
        counts = same.sum(axis=1)
        per_example = -jnp.sum(jnp.where(same, log_prob, 0.0), axis=1) / jnp.maximum(counts, 1)
        valid = counts > 0
        return jnp.sum(per_example * valid) / valid.sum(), per_example

    return _train(loss_fn, kit.dense(WIDTH, 8, EMBEDDING), 12)


@case(item=8)
def contrastive_triplet_hardest() -> Program:
    """The farthest positive and the nearest negative of every example."""

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> Any:
        z = kit.mlp(params, batch["a"])
        squared = jnp.sum((z[:, None] - z[None, :]) ** 2, axis=-1)
        same = batch["y"][:, None] == batch["y"][None, :]
        farthest = jnp.max(jnp.where(same, squared, -jnp.inf), axis=1)
        nearest = jnp.min(jnp.where(same, jnp.inf, squared), axis=1)
        return jax.nn.relu(farthest - nearest + 0.5).mean(), jnp.argmin(jnp.where(same, jnp.inf, squared), axis=1)

    return _train(loss_fn, kit.dense(WIDTH, 8, EMBEDDING), 16)


@case(item=8, batch=12)
def contrastive_momentum_queue() -> Program:
    """A queue of earlier embeddings that this batch's embeddings enter; the key tower is an average."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, average, queue = state
        keys = _unit(kit.mlp(average, batch["b"]))

        def loss_fn(params: Any) -> jax.Array:
            queries = _unit(kit.mlp(params, batch["a"]))
            positive = jnp.sum(queries * keys, axis=-1, keepdims=True)
            logits = jnp.concatenate([positive, queries @ queue.T], axis=1) / 0.2
            return kit.cross_entropy(logits, jnp.zeros(logits.shape[0], jnp.int32)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        params = kit.sgd(params, grads)
        queue = jnp.concatenate([keys, queue])[: queue.shape[0]]
        return (params, optax.incremental_update(params, average, 0.1), queue), loss

    state = (kit.dense(WIDTH, 8, EMBEDDING), kit.dense(WIDTH, 8, EMBEDDING, seed=1), kit.normal(20, EMBEDDING))
    return Program(step, (state, _views(12)))


@case(item=8)
def self_distillation_with_centering() -> Program:
    """DINO: the teacher's outputs are centered by a running mean over batches."""

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        student, teacher, center = state
        targets = kit.mlp(teacher, batch["b"])

        def loss_fn(student: Any) -> jax.Array:
            log_p = jax.nn.log_softmax(kit.mlp(student, batch["a"]) / 0.5)
            return -jnp.mean(jnp.sum(jax.nn.softmax((targets - center) / 0.2) * log_p, axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(student)
        student = kit.sgd(student, grads)
        center = 0.9 * center + 0.1 * targets.mean(axis=0)
        return (student, optax.incremental_update(student, teacher, 0.05), center), loss

    state = (kit.dense(WIDTH, 8, EMBEDDING), kit.dense(WIDTH, 8, EMBEDDING, seed=1), kit.normal(EMBEDDING))
    return Program(step, (state, _views(16)))


@case(item=8)
def self_distillation_with_sinkhorn() -> Program:
    """SwAV: assignments are balanced over the batch by normalizing rows and columns in turn."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def assign(scores: jax.Array) -> jax.Array:
            q = jnp.exp(scores / 0.5)
            for _ in range(2):
                q = q / q.sum(axis=0, keepdims=True) / q.shape[1]
                q = q / q.sum(axis=1, keepdims=True) / q.shape[0]
            return lax.stop_gradient(q * q.shape[0])

        def loss_fn(params: Any) -> Any:
            a, b = kit.mlp(params, batch["a"]), kit.mlp(params, batch["b"])
            codes = assign(b)
            return -jnp.mean(jnp.sum(codes * jax.nn.log_softmax(a / 0.2), axis=-1)), codes

        (loss, codes), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, codes

    return Program(step, (kit.dense(WIDTH, 8, EMBEDDING), _views(16)), EXACT)


EXPERTS = 3
LENGTH = 4


def _experts() -> Any:
    return {
        "router": kit.normal(WIDTH, EXPERTS, scale=0.7),
        "in": kit.normal(EXPERTS, WIDTH, 8, scale=0.4),
        "out": kit.normal(EXPERTS, 8, WIDTH, scale=0.4),
    }


def _run_experts(params: Any, dispatched: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jnp.einsum("ecd,edh->ech", dispatched, params["in"]))
    return jnp.einsum("ech,ehd->ecd", hidden, params["out"])


def _balance(gates: jax.Array, chosen: jax.Array) -> jax.Array:
    """The load-balancing loss of switch transformers."""
    density = jax.nn.one_hot(chosen, EXPERTS, dtype=gates.dtype).mean(axis=0)
    return EXPERTS * jnp.sum(density * gates.mean(axis=0))


def _moe(layer: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]], batch: int) -> Program:
    def step(params: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            tokens = x.reshape(-1, WIDTH)
            y, extra = layer(params, tokens)
            y = (tokens + y).reshape(x.shape)
            return jnp.mean((y - 1.0) ** 2) + 0.1 * extra, (y, extra)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, aux

    return Program(step, (_experts(), kit.normal(batch, LENGTH, WIDTH)))


@case(item=8)
def experts_with_capacity() -> Program:
    """A token's place in its expert's buffer is a cumulative sum over all tokens of the batch."""

    def layer(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        capacity = 2 * tokens.shape[0] // (EXPERTS * 2)
        gates = jax.nn.softmax(tokens @ params["router"])
        chosen = jnp.argmax(gates, axis=-1)
        mask = jax.nn.one_hot(chosen, EXPERTS, dtype=tokens.dtype)
        place = (jnp.cumsum(mask, axis=0) - 1.0) * mask
        mask = mask * (place < capacity)
        slots = jax.nn.one_hot(place.sum(axis=-1).astype(jnp.int32), capacity, dtype=tokens.dtype)
        combine = (gates * mask)[:, :, None] * slots[:, None, :]
        dispatched = jnp.einsum("tec,td->ecd", (combine > 0).astype(tokens.dtype), tokens)
        return jnp.einsum("tec,ecd->td", combine, _run_experts(params, dispatched)), _balance(gates, chosen)

    return _moe(layer, 16)


@case(item=8, batch=12)
def experts_with_capacity_by_scatter() -> Program:
    """The same by indices: tokens are scattered into the buffers and gathered back."""

    def layer(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        capacity = tokens.shape[0] // EXPERTS
        gates = jax.nn.softmax(tokens @ params["router"])
        gate, chosen = gates.max(axis=-1), jnp.argmax(gates, axis=-1)
        mask = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
        place = jnp.sum(jnp.cumsum(mask, axis=0) * mask, axis=-1) - 1
        place = jnp.where(place < capacity, place, capacity)
        buffers = jnp.zeros((EXPERTS, capacity, WIDTH), tokens.dtype).at[chosen, place].add(tokens, mode="drop")
        outputs = _run_experts(params, buffers).at[chosen, place].get(mode="fill", fill_value=0.0)
        return gate[:, None] * outputs, _balance(gates, chosen)

    return _moe(layer, 12)


@case(item=8)
def experts_top_two_without_capacity() -> Program:
    """Every token goes to two experts; all experts see all tokens. Only the balancing loss couples the batch."""

    def layer(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax(tokens @ params["router"])
        values, indices = lax.top_k(gates, 2)
        weights = jnp.sum(jax.nn.one_hot(indices, EXPERTS, dtype=tokens.dtype) * values[..., None], axis=1)
        hidden = jax.nn.relu(jnp.einsum("td,edh->teh", tokens, params["in"]))
        outputs = jnp.einsum("teh,ehd->ted", hidden, params["out"])
        return jnp.einsum("te,ted->td", weights, outputs), _balance(gates, indices[:, 0])

    return _moe(layer, 16)


@case(item=8, batch=12)
def experts_choose_tokens() -> Program:
    """Every expert takes the tokens it likes best out of the whole batch: a top-k over the batch."""

    def layer(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax(tokens @ params["router"])
        values, indices = lax.top_k(gates.T, tokens.shape[0] // EXPERTS)
        outputs = _run_experts(params, tokens[indices]) * values[..., None]
        return jnp.zeros_like(tokens).at[indices].add(outputs), gates.sum() / tokens.shape[0]

    return _moe(layer, 12)
