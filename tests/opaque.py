"""A primitive that nothing is known of: it mixes everything along one dimension, and vnode has no description of it.

Knows how a primitive gets a lowering, a batching rule and a derivative. Must not know vnode.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def mixed(x: Any, *, axis: int) -> list[Any]:
    """What the primitive computes: exact where its operands are multiples of a power of two.

    Args:
      x: any array.
      axis: the dimension along which its elements meet.

    Returns:
      The array minus itself reversed, and its sum along the dimension.
    """
    return [x - jnp.flip(x, axis), x.sum(axis)]


opaque_p = Primitive("opaque")
opaque_p.multiple_results = True


@opaque_p.def_abstract_eval
def _(x: Any, *, axis: int) -> list[Any]:
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return [jax.core.ShapedArray(x.shape, x.dtype), jax.core.ShapedArray(shape, x.dtype)]


def batched(operands: Any, dims: Any, *, axis: int) -> Any:
    x = jnp.moveaxis(operands[0], dims[0], 0)
    return opaque_p.bind(x, axis=axis + 1), [0, 0]


def differentiated(primals: Any, tangents: Any, *, axis: int) -> Any:
    """Its derivative is itself, so that it is there in forward and in reverse mode."""
    tangent = ad.instantiate_zeros(tangents[0])
    return opaque_p.bind(*primals, axis=axis), opaque_p.bind(tangent, axis=axis)


def transposed(cotangents: Any, x: Any, *, axis: int) -> list[Any]:
    whole, total = map(ad.instantiate_zeros, cotangents)
    difference, _ = opaque_p.bind(whole, axis=axis)
    return [difference + jnp.broadcast_to(jnp.expand_dims(total, axis), difference.shape)]


mlir.register_lowering(opaque_p, mlir.lower_fun(mixed, multiple_results=True))
batching.primitive_batchers[opaque_p] = batched
ad.primitive_jvps[opaque_p] = differentiated
ad.primitive_transposes[opaque_p] = transposed


@functools.partial(jax.jit, static_argnames="axis")
def opaque(x: Any, axis: int = 0) -> tuple[Any, Any]:
    """`mixed` by the primitive, whose results no one can tell from their operands."""
    difference, total = opaque_p.bind(x, axis=axis)
    return difference, total
