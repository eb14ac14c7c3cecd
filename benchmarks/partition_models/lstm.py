"""A language model of LSTM layers in plain JAX, as large as those of Tofu (Wang et al., EuroSys 2019, 4K-8K units).

Knows the layers, their training by Adam, and how units are split. Must not know any library of layers.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.partition_models.model import Model, Published, Size, Tree, cast, sized, token_loss


@dataclass(frozen=True)
class Sizes:
    """Batch, time steps, words, units of a layer and of an embedding, layers."""

    batch: int = 128
    length: int = 20
    vocabulary: int = 10_000
    units: int = 4096
    layers: int = 2


SIZES = {"paper": Sizes(), "small": Sizes(batch=8, length=5, vocabulary=32, units=16)}

PUBLISHED = Published(
    66e6,
    "Zaremba et al., Recurrent neural network regularization (2014), large LSTM; 66 M in Merity et al. (2018), table 1",
    within=0.01,
    sizes={"units": 1500},
)

PLACEMENTS = {
    r"cells/\d+/(input|hidden)": P(None, None, "model"),
    r"cells/\d+/bias": P(None, "model"),
    r"embed": P(None, "model"),
    r"out/kernel": P(None, "model"),
    r"out/bias": P("model"),
}
"""Every device has some units of each gate, and some words of the softmax."""

OPTIMIZER = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-3))


def initial_params(key: jax.Array, s: Sizes) -> Tree:
    """Uniform weights, as published; the four gates (input, forget, cell, output) are a dimension of their own."""
    bound = s.units**-0.5
    keys = iter(jax.random.split(key, 2 + 2 * s.layers))

    def weight(*shape: int) -> jax.Array:
        return jax.random.uniform(next(keys), shape, minval=-bound, maxval=bound)

    gates = (s.units, 4, s.units)
    return {
        "embed": weight(s.vocabulary, s.units),
        "cells": [
            {"input": weight(*gates), "hidden": weight(*gates), "bias": jnp.zeros((4, s.units))}
            for _ in range(s.layers)
        ],
        "out": {"kernel": weight(s.units, s.vocabulary), "bias": jnp.zeros(s.vocabulary)},
    }


def lstm_layer(p: Tree, xs: jax.Array) -> jax.Array:
    """One layer over time: float[time, batch, units] of inputs to as much of outputs."""

    def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = carry
        gates = jnp.einsum("bi,igh->gbh", x, p["input"]) + jnp.einsum("bi,igh->gbh", h, p["hidden"])
        i, f, g, o = gates + p["bias"][:, None]
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros(xs.shape[1:], xs.dtype)
    return jax.lax.scan(cell, (zeros, zeros), xs)[1]


def lstm(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """The language model.

    Args:
        size: "paper" or "small".
        dtype: What is computed in; parameters are float32.
        **changed: Fields of `Sizes`.

    Raises:
        ValueError: There is no such size.
    """
    s = sized(SIZES, size, changed)

    def initial(key: jax.Array) -> Tree:
        params = initial_params(key, s)
        return {"params": params, "opt": OPTIMIZER.init(params)}

    def examples(key: jax.Array) -> Tree:
        return {"tokens": jax.random.randint(key, (s.batch, s.length + 1), 0, s.vocabulary)}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        tokens = batch["tokens"]

        def loss_fn(params: Tree) -> jax.Array:
            params = cast(params, dtype)
            x = params["embed"][tokens[:, :-1]].swapaxes(0, 1)
            for p in params["cells"]:
                x = lstm_layer(p, x)
            return token_loss((x @ params["out"]["kernel"] + params["out"]["bias"]).swapaxes(0, 1), tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Model(f"LSTM {s.units}", step, initial, examples, PLACEMENTS, PUBLISHED)


def lstm_8k(size: Size = "paper", dtype: Any = jnp.float32, **changed: Any) -> Model:
    """The language model with twice as many units; see `lstm`."""
    return lstm(size, dtype, **{"units": 2 * sized(SIZES, size, {}).units, **changed})
