"""The models that are measured: an MLP, a CNN and a transformer, in plain JAX.

A model here is a shape of parameters, a shape of batch, and one function `terms(params, batch)` that returns *sums*
over the examples: summed loss, summed weight, summed correct predictions. Sums are what an expert needs to accumulate
by hand, and the plain step divides them once. Plain JAX, because a library's own tracing time would flatter the
rewrite.

This file must not know how a step is split, on what it runs, or how it is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclass(frozen=True)
class Model:
    """One model with its data.

    Attributes:
        name: How the tables call it.
        init: `init(key) -> params`.
        batch: `batch(n) -> tree of NumPy arrays with n examples`, the same each time.
        terms: `terms(params, batch) -> (loss, weight, correct)`, each summed over the examples.
        size: Examples in the global batch of the time tables.
        node: Examples per node in the memory-growth table.
    """

    name: str
    init: Callable[[jax.Array], Tree]
    batch: Callable[[int], Tree]
    terms: Callable[[Tree, Tree], tuple[jax.Array, jax.Array, jax.Array]]
    size: int
    node: int


def optimizer() -> optax.GradientTransformation:
    """The optimizer that every contender uses: clipping by global norm, then AdamW."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def initial_state(model: Model) -> Tree:
    """Parameters and optimizer state."""
    params = model.init(jax.random.key(0))
    return {"params": params, "opt": optimizer().init(params)}


def plain_step(model: Model) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
    """The step as a user writes it: whole batch, one device, no thought of splitting."""
    opt = optimizer()

    def step(state, batch):
        def loss_fn(params):
            loss, weight, correct = model.terms(params, batch)
            return loss / weight, correct / weight

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = opt.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt_state}, {"loss": loss, "accuracy": accuracy}

    return step


def _dense(key: jax.Array, fan_in: int, fan_out: int) -> Tree:
    return {"w": jax.random.normal(key, (fan_in, fan_out)) * fan_in**-0.5, "b": jnp.zeros(fan_out)}


def _apply_dense(p: Tree, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _classified(logits: jax.Array, labels: jax.Array, weights: jax.Array):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    return (losses * weights).sum(), weights.sum(), (correct * weights).sum()


def mlp(width: int = 512, depth: int = 3, size: int = 1024, node: int = 64) -> Model:
    """A multi-layer perceptron on flat images of 256 pixels."""
    widths = [256] + [width] * depth + [10]

    def init(key):
        keys = jax.random.split(key, len(widths) - 1)
        return [_dense(k, i, o) for k, i, o in zip(keys, widths[:-1], widths[1:], strict=True)]

    def batch(n):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((n, widths[0]), dtype=np.float32)
        return {"x": x, "y": rng.integers(0, 10, n).astype(np.int32)}

    def terms(params, batch):
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(_apply_dense(layer, x))
        return _classified(_apply_dense(params[-1], x), batch["y"], jnp.ones(x.shape[0]))

    return Model("MLP", init, batch, terms, size, node)


def cnn(width: int = 16, size: int = 128, node: int = 32) -> Model:
    """Three strided convolutions with group normalization on 24 x 24 images, then a dense layer."""
    widths = [1, width, 2 * width, 4 * width]

    def init(key):
        keys = jax.random.split(key, 4)
        convs = [
            {
                "w": jax.random.normal(k, (3, 3, i, o)) * (9 * i) ** -0.5,
                "scale": jnp.ones(o),
                "bias": jnp.zeros(o),
            }
            for k, i, o in zip(keys, widths[:-1], widths[1:], strict=False)
        ]
        return {"convs": convs, "head": _dense(keys[-1], widths[-1], 10)}

    def batch(n):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((n, 24, 24, 1), dtype=np.float32)
        return {"x": x, "y": rng.integers(0, 10, n).astype(np.int32)}

    def group_norm(x, scale, bias):
        groups = x.reshape(*x.shape[:-1], 4, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        var = groups.var((1, 2, 4), keepdims=True)
        return ((groups - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape) * scale + bias

    def terms(params, batch):
        x = batch["x"]
        for i, p in enumerate(params["convs"]):
            stride = 1 if i == 0 else 2
            x = jax.lax.conv_general_dilated(
                x, p["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(group_norm(x, p["scale"], p["bias"]))
        return _classified(_apply_dense(params["head"], x.mean((1, 2))), batch["y"], jnp.ones(x.shape[0]))

    return Model("CNN", init, batch, terms, size, node)


def transformer(
    layers: int = 12,
    width: int = 64,
    heads: int = 4,
    length: int = 32,
    vocabulary: int = 256,
    size: int = 64,
    node: int = 8,
    dtype: Any = jnp.float32,
) -> Model:
    """A causal language model with unrolled layers, tied embeddings, and a loss averaged over real (unpadded) tokens.

    The number of real tokens differs between examples, so the mean of the nodes' means is *not* the loss.
    """

    def init(key):
        keys = jax.random.split(key, layers + 2)

        def block(key):
            k = jax.random.split(key, 4)
            return {
                "norm1": jnp.ones(width),
                "qkv": _dense(k[0], width, 3 * width),
                "out": _dense(k[1], width, width),
                "norm2": jnp.ones(width),
                "up": _dense(k[2], width, 4 * width),
                "down": _dense(k[3], 4 * width, width),
            }

        return {
            "embed": jax.random.normal(keys[0], (vocabulary, width)) * 0.02,
            "position": jax.random.normal(keys[1], (length, width)) * 0.02,
            "blocks": [block(k) for k in keys[2:]],
            "norm": jnp.ones(width),
        }

    def batch(n):
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, vocabulary, (n, length + 1)).astype(np.int32)
        real = rng.integers(length // 2, length + 1, (n, 1))
        return {"tokens": tokens, "weights": (np.arange(length) < real).astype(np.float32)}

    def norm(x, scale):
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    def attention(p, x):
        n, t, _ = x.shape
        q, k, v = jnp.split(_apply_dense(p["qkv"], x).reshape(n, t, 3 * heads, -1), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        causal = jnp.tril(jnp.ones((t, t), bool))
        probabilities = jax.nn.softmax(jnp.where(causal, scores, -1e9).astype(jnp.float32)).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(n, t, width)
        return _apply_dense(p["out"], mixed)

    def terms(params, batch):
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        x = params["embed"][batch["tokens"][:, :-1]] + params["position"]
        for p in params["blocks"]:
            x = x + attention(p, norm(x, p["norm1"]))
            x = x + _apply_dense(p["down"], jax.nn.gelu(_apply_dense(p["up"], norm(x, p["norm2"]))))
        logits = (norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
        return _classified(logits, batch["tokens"][:, 1:], batch["weights"])

    return Model(f"transformer-{layers}", init, batch, terms, size, node)


def bench_models(quick: bool = False) -> list[Model]:
    """The three models of the tables; with `quick`, the same at a size for a smoke test."""
    if quick:
        return [mlp(width=64, size=128), cnn(width=4, size=64), transformer(layers=2, width=16, length=16)]
    return [mlp(), cnn(), transformer()]
