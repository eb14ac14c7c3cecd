"""What the cases of the zoo share: data, parameters, small layers.

Knows numpy and jax. Must not know vnode. Data and parameters are made by numpy, because initialising a model with jax
would compile more than the step under test. Every value is a function of its seed and shape.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def real() -> Any:
    """The precision of this run: float64 if it is enabled, otherwise float32."""
    return jnp.zeros(()).dtype


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Normal numbers in the precision of the run."""
    draws = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return jnp.asarray(np.asarray(draws * scale).astype(real()))


def uniform(*shape: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> jax.Array:
    """Uniform numbers in the precision of the run."""
    return jnp.asarray(np.asarray(np.random.default_rng((seed, 1, *shape)).uniform(low, high, shape)).astype(real()))


def integers(high: int, *shape: int, seed: int = 0, dtype: Any = np.int32) -> jax.Array:
    """Integers in ``[0, high)``."""
    return jnp.asarray(np.random.default_rng((seed, 2, *shape)).integers(0, high, shape).astype(dtype))


def lengths_mask(batch: int, length: int, seed: int = 0) -> jax.Array:
    """1 for the tokens of each example and 0 for its padding; lengths differ widely, one example has no token."""
    lengths = np.random.default_rng((seed, 3, batch)).integers(1, length + 1, batch)
    lengths[batch // 2] = 0
    return jnp.asarray((np.arange(length) < lengths[:, None]).astype(real()))


def fill(shapes: Any, seed: int = 0) -> Any:
    """Values for a tree of shapes (or of arrays, whose integers and keys stay), plausible for a leaf of its name.

    Weights get a spread that keeps activations near one, biases small numbers other than zero, scales and variances
    positive numbers: nothing is left at an initial value that would hide a mistake.
    """

    def leaf(path: Any, aval: Any) -> Any:
        name = jax.tree_util.keystr(path).lower()
        rng = np.random.default_rng((seed, *name.encode()))
        shape, dtype = aval.shape, aval.dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return aval if isinstance(aval, jax.Array) else jnp.zeros(shape, dtype)
        dtype = real() if dtype in (jnp.float32, jnp.float64) else dtype
        if "var" in name or "scale" in name:
            values = rng.uniform(0.5, 1.5, shape)
        elif len(shape) < 2:
            values = 0.1 * rng.standard_normal(shape)
        else:
            values = rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[:-1])))
        return jnp.asarray(np.asarray(values).astype(dtype))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def init(module: Any, *inputs: Any, seed: int = 0, **kwargs: Any) -> Any:
    """The variables of a flax linen module, filled without running it."""
    rngs = {name: jax.random.key(0) for name in ("params", "dropout", "sample")}
    return fill(jax.eval_shape(lambda: module.init(rngs, *inputs, **kwargs)), seed)


def warm(state: Any, seed: int = 0) -> Any:
    """An optimizer state as after some training: moments that are not zero.

    A cold Adam divides rounding noise by rounding noise wherever a gradient is zero in exact arithmetic.
    """

    def leaf(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "mu" not in name and "nu" not in name:
            return x
        rng = np.random.default_rng((seed, 4, *name.encode()))
        values = rng.uniform(0.01, 0.02, np.shape(x)) if "nu" in name else 0.01 * rng.standard_normal(np.shape(x))
        return jnp.asarray(np.asarray(values).astype(x.dtype))

    return jax.tree_util.tree_map_with_path(leaf, state)


def dense(*widths: int, seed: int = 0) -> list[dict[str, jax.Array]]:
    """Weights of a plain multilayer perceptron."""
    shapes = [
        {"w": jax.ShapeDtypeStruct((m, n), jnp.float32), "b": jax.ShapeDtypeStruct((n,), jnp.float32)}
        for m, n in itertools.pairwise(widths)
    ]
    return fill(shapes, seed)


def mlp(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """A plain multilayer perceptron with tanh between the layers."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of every prediction."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def sgd(params: Any, grads: Any, rate: float = 0.1) -> Any:
    """Plain gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)
