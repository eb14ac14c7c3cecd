"""Transformations put around a program from outside, the same around the virtualized one and the other.

Knows jax's transformations. Must not know vnode, nor what is inside the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Fun = Callable[..., Any]


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def scaled(args: Any, scale: jax.Array) -> Any:
    """The arguments with every float multiplied by `scale`."""
    return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype) if is_float(leaf) else leaf, args)


def same(fun: Fun) -> Fun:
    return fun


def jit(fun: Fun) -> Fun:
    return jax.jit(fun)


def vmap(fun: Fun) -> Fun:
    """Twice at once, for the arguments and for half of them."""
    return lambda *args: jax.vmap(lambda scale: fun(*scaled(args, scale)))(jnp.array([1.0, 0.5]))


def scan(fun: Fun) -> Fun:
    """Twice in a loop."""

    def run(*args: Any) -> Any:
        return jax.lax.scan(lambda carry, scale: (carry, fun(*scaled(args, scale))), None, jnp.array([1.0, 0.5]))[1]

    return run


def grad(fun: Fun) -> Fun:
    """The gradient of a scalar made of all outputs, with respect to all float arguments."""

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        floats = {i: leaf for i, leaf in enumerate(leaves) if is_float(leaf)}

        def total(floats: dict[int, Any]) -> Any:
            out = fun(*jax.tree.unflatten(tree, [floats.get(i, leaf) for i, leaf in enumerate(leaves)]))
            return sum((jnp.sin(leaf).sum() for leaf in jax.tree.leaves(out) if is_float(leaf)), start=jnp.zeros(()))

        return jax.grad(total)(floats)

    return run


OUTER: dict[str, Callable[[Fun], Fun]] = {f.__name__: f for f in (same, jit, vmap, scan, grad)}
