"""Kinds of leaves of a pytree: arrays or others; and abstract values of arrays.

Knows kinds of arrays. Must not know where they live, nor how they are used.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vnode.placement.sharded import ShardedBatch


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number, which `jax.jit` takes as a weakly typed array.

    Example:
      >>> is_number(0.5), is_number(np.float64(0.5)), is_number(np.ones(3)[0])
      (True, False, False)
    """
    # ``numpy.float64`` and ``numpy.complex128`` inherit from Python's types.
    return isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of an array; those of a contiguous one are not copied.

    Example:
      >>> bytes_of(np.float32(1)).tolist(), len(bytes_of(np.zeros((0, 3))))
      ([0, 0, 128, 63], 0)
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def is_array(leaf: Any) -> bool:
    """Whether `jax.jit` takes a leaf as an array, or it is a sharded batch; text and objects are not."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSTUMm" and leaf.dtype.names is None
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | ShardedBatch) or is_number(leaf)


def is_foreign_array(leaf: Any) -> bool:
    """Whether a leaf is an array of a library that is neither jax nor NumPy, and jax does not take it."""
    if isinstance(leaf, np.ndarray | np.generic | type) or is_array(leaf) or hasattr(leaf, "__jax_array__"):
        return False
    typed = hasattr(leaf, "dtype") or hasattr(leaf, "dtypes")  # else a static value may have a shape
    return typed and hasattr(leaf, "shape") and hasattr(leaf, "__array__")


CONVERT = ("give an array of NumPy: x.numpy() or x.float().numpy() of a tensor, x.to_numpy() of a table",)
"""Remedies for an array of another library."""


def foreign_array(name: str, leaf: Any) -> str:
    """The sentence that refuses an array of another library, called `name`."""
    return f"{name} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which jax does not take."


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys (`jax.random.key`)."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shape_of(leaf: Any, *, sharding: Literal["drop", "committed", "keep"] = "drop") -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type that a leaf has in a program.

    Args:
      leaf: an array of any kind, a Python number, or an abstract value.
      sharding: whether to include the array's sharding: never, if it is committed to its devices, or always.

    Returns:
      The abstract value.

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
    """Replaces arrays in a pytree by their shapes; Python numbers and other leaves stay."""

    def shape(leaf: Any) -> Any:
        there = isinstance(leaf, jax.Array | np.ndarray | np.generic) and is_array(leaf)
        return shape_of(leaf, sharding=sharding) if there else leaf

    return jax.tree.map(shape, tree)
