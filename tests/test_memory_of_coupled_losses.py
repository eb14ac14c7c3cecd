"""Memory of steps that couple the whole batch, as the compiler reports it.

Knows what a step needs as a whole, and what a node of it should need. Must not know how passes are made. A contrastive
loss reads every embedding of the batch; the activations behind the embeddings must still be those of one node at a
time, which is what gradient caching does by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import vnode
from tests.rounding import assert_same
from tests.zoo import kit

BATCH = 64
LENGTH = 32
WIDTH = 8
HIDDEN = 64
EMBEDDING = 4
NODES = 16


def towers() -> Any:
    return {name: kit.dense(WIDTH, HIDDEN, EMBEDDING, seed=i) for i, name in enumerate("ab")}


def embed(params: Any, x: jax.Array) -> jax.Array:
    """The mean embedding of a sequence: its activations are much larger than the result."""
    return kit.mlp(params, x).mean(axis=1)


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def clip_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    a, b = unit(embed(params["a"], batch["a"])), unit(embed(params["b"], batch["b"]))
    logits, labels = 5.0 * a @ b.T, jnp.arange(a.shape[0])
    return (kit.cross_entropy(logits, labels).mean() + kit.cross_entropy(logits.T, labels).mean()) / 2


def vicreg_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    a, b = embed(params["a"], batch["a"]), embed(params["b"], batch["b"])
    deviations = [jnp.sqrt(z.var(axis=0) + 1e-4) for z in (a, b)]
    return jnp.mean((a - b) ** 2) + sum(jnp.mean(jax.nn.relu(1.0 - d)) for d in deviations)


def temporaries(step: Any, *args: Any) -> int:
    """Bytes of temporary memory."""
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [clip_loss, vicreg_loss], ids=["clip", "vicreg"])
def test_activations_of_a_coupled_loss_are_those_of_one_node(loss: Callable[..., jax.Array]) -> None:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        return jax.grad(loss)(params, batch)

    args = towers(), {name: kit.normal(BATCH, LENGTH, WIDTH, seed=i) for i, name in enumerate("ab")}
    activations = BATCH * LENGTH * HIDDEN * 4  # of one tower, in float32
    assert temporaries(jax.jit(step), *args) > 2 * activations
    virtual = vnode.virtualize(step, virtual_nodes=NODES, recompute_budget=10.0).on(jax.devices()[:1])
    assert temporaries(virtual, *args) < activations / 2


@pytest.mark.sampled(0, thorough=1)
@pytest.mark.parametrize("reduction", ["invariant", "fast"])
def test_towers_are_differentiated_one_after_another(reduction: Any) -> None:
    layers, hidden, length = 8, 32, 256

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        return jax.value_and_grad(clip_loss)(params, batch)

    params = {name: kit.dense(WIDTH, *[hidden] * layers, EMBEDDING, seed=i) for i, name in enumerate("ab")}
    batch = {name: kit.normal(BATCH, length, WIDTH, seed=i) for i, name in enumerate("ab")}
    activations = layers * (BATCH // NODES) * length * hidden * 4  # of one tower and node: what each tanh returns
    virtual = vnode.virtualize(step, virtual_nodes=NODES, recompute_budget=10.0, reduction=reduction)
    virtual = virtual.on(jax.devices()[:1])
    gradients = sum(x.nbytes for x in jax.tree.leaves(params))
    assert temporaries(virtual, params, batch) - 2 * gradients < 1.5 * activations
    assert_same(virtual(params, batch), step, params, batch)
