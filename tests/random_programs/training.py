"""A train step made of a program: what is not split over the batch learns from what the program returns.

Knows programs and gradients. Must not know vnode, nor in which ways a step is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.random_programs.outer import is_float
from tests.random_programs.program import Program

Step = Callable[..., Any]


def parts(program: Program, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments that are the state, and those that are the batch."""
    count = 1 if program.bundle else len(program.whole)
    return args[:count], args[count:]


def trained(program: Program, step: Step) -> Step:
    """A step of the same arguments that returns the next state, and what the program returns."""

    def run(*args: Any) -> Any:
        state, batch = parts(program, args)
        leaves, structure = jax.tree.flatten(state)
        floats = {i: leaf for i, leaf in enumerate(leaves) if is_float(leaf)}

        def loss(floats: dict[int, Any]) -> tuple[Any, Any]:
            out = step(*jax.tree.unflatten(structure, [floats.get(i, leaf) for i, leaf in enumerate(leaves)]), *batch)
            terms = (jnp.sin(leaf).mean() for leaf in jax.tree.leaves(out) if is_float(leaf))
            return sum(terms, start=jnp.zeros(())), out

        gradients, out = jax.grad(loss, has_aux=True)(floats)
        new = [
            leaf - (0.1 * jnp.tanh(gradients[i])).astype(leaf.dtype) if i in floats else leaf
            for i, leaf in enumerate(leaves)
        ]
        return {"state": jax.tree.unflatten(structure, new), "out": out}

    return run


def twice(program: Program, step: Step) -> Step:
    """What a train step returns, and what it returns of the state that it returned, with the numbers of keys."""

    def run(*args: Any) -> Any:
        first = step(*args)
        second = step(*first["state"], *parts(program, args)[1])
        return jax.tree.map(plain, {"first": first, "second": second})

    return run


def plain(leaf: Any) -> Any:
    """An array of numbers: a key's, if it is one."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
