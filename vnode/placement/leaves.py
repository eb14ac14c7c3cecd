"""What the leaves of a pytree are: arrays, or anything else; and what stands for an array that is not there.

Knows kinds of arrays. Must not know where they are to live, nor what they are used for.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vnode.placement.sharded import ShardedBatch

IS_DELETED = operator.methodcaller("is_deleted")


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python, which `jax.jit` takes as a weakly typed array.

    Example:
      >>> is_number(0.5), is_number(np.float64(0.5)), is_number(np.ones(3)[0])
      (True, False, False)
    """
    # ``numpy.float64`` and ``numpy.complex128`` inherit from Python's types.
    return isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is something that `jax.jit` takes as an array, or a sharded batch; text and objects are not."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSTUMm" and leaf.dtype.names is None
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | ShardedBatch) or is_number(leaf)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys (`jax.random.key`)."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def given_away(tree: Any, name: str) -> list[str]:
    """The leaves whose arrays are deleted: a computation that they were donated to has their memory.

    Args:
      tree: any pytree.
      name: what it is called.

    Example:
      >>> w, b = jnp.ones(3), jnp.zeros(3)
      >>> w.delete()
      >>> given_away({"w": w, "b": b}, "state")
      ["state['w']"]
    """

    if not any(map(IS_DELETED, arrays_among(jax.tree.leaves(tree)))):
        return []  # in a tenth of the time
    paths = jax.tree.leaves_with_path(tree)
    return [name + jax.tree_util.keystr(path) for path, leaf in paths if is_held(type(leaf)) and leaf.is_deleted()]


def arrays_among(leaves: list[Any]) -> list[Any]:
    """Those leaves that are arrays of jax with memory of their own, no tracers; in a fifth of the time of asking each.

    Example:
      >>> arrays_among([jnp.ones(2), np.ones(2), 1.0])
      [Array([1., 1.], dtype=float32)]
    """
    kinds = set(map(type, leaves))
    held = set(filter(is_held, kinds))
    return leaves if held == kinds else [leaf for leaf in leaves if type(leaf) in held]


@functools.lru_cache(maxsize=64)
def is_held(kind: type) -> bool:
    """Whether values of a class are arrays of jax with memory of their own."""
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def shape_of(leaf: Any, *, sharding: Literal["drop", "committed", "keep"] = "drop") -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type that a leaf has in a program.

    Args:
      leaf: an array of any kind, a Python number, or what stands for one.
      sharding: whether to say where the array lives: never, if it is committed to its devices, or always.

    Returns:
      What stands for the leaf.

    Example:
      >>> shape_of(np.zeros((2, 3)))
      ShapeDtypeStruct(shape=(2, 3), dtype=float32)
      >>> shape_of(1.0)
      ShapeDtypeStruct(shape=(), dtype=float32, weak_type=True)
    """
    known = isinstance(leaf, jax.ShapeDtypeStruct | ShardedBatch)
    aval = leaf if known else jax.typeof(leaf)
    there = getattr(leaf, "sharding", None) if sharding != "drop" else None
    if sharding == "committed" and not known and not getattr(leaf, "committed", False):
        there = None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=there)


def shapes_of(tree: Any, *, sharding: Literal["drop", "committed", "keep"] = "drop") -> Any:
    """A pytree with shapes in place of its arrays; Python numbers and what is no array stay as they are."""

    def shape(leaf: Any) -> Any:
        there = isinstance(leaf, jax.Array | np.ndarray | np.generic) and is_array(leaf)
        return shape_of(leaf, sharding=sharding) if there else leaf

    return jax.tree.map(shape, tree)
