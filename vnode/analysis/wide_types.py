"""A traced program -> the context in which more can be traced without narrowing its 64-bit values.

Knows jaxprs and `jax.enable_x64`. Must not know batches or devices.

A step may have 64-bit values although x64 is off: arrays or operations from within ``jax.enable_x64(True)``. JAX then
narrows the types that are asked for outside of that context, so sums over nodes would be added up in 32 bits.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params

WIDE = frozenset({"int64", "uint64", "float64", "complex128"})
"""Names of the types that JAX narrows where x64 is off."""


def wide_context(wide: bool) -> contextlib.AbstractContextManager[Any]:
    """The context in which to trace a rewritten program.

    Args:
      wide: whether the program has 64-bit values (`has_wide_values`).

    Example:
      >>> import jax.numpy as jnp
      >>> with wide_context(True):
      ...     jnp.zeros(2, "float64").dtype
      dtype('float64')
    """
    return jax.enable_x64(True) if wide and not jax.config.jax_enable_x64 else contextlib.nullcontext()


def own_type(shape: Any) -> Any:
    """A `jax.ShapeDtypeStruct` as a type that JAX takes as it is also where x64 is off; anything else stays.

    Example:
      >>> import jax.numpy as jnp
      >>> jax.make_jaxpr(jnp.sin)(own_type(jax.ShapeDtypeStruct((2,), "float64"))).in_avals
      [ShapedArray(float64[2])]
    """
    if not isinstance(shape, jax.ShapeDtypeStruct) or str(shape.dtype) not in WIDE:
        return shape
    return jax.core.ShapedArray(shape.shape, shape.dtype, weak_type=shape.weak_type)


def has_wide_values(jaxpr: Jaxpr, seen: set[int] | None = None) -> bool:
    """Whether a program has 64-bit values, those in bodies of calls, loops and branches included.

    Args:
      jaxpr: the program.
      seen: ids of jaxprs that have none.

    Example:
      >>> import jax.numpy as jnp
      >>> def norm(x):
      ...     with jax.enable_x64(True):
      ...         return jnp.sqrt((x.astype("float64") ** 2).sum()).astype("float32")
      >>> has_wide_values(jax.make_jaxpr(norm)(jnp.ones(3)).jaxpr)
      True
    """
    seen = set() if seen is None else seen
    if id(jaxpr) in seen:
        return False
    seen.add(id(jaxpr))
    variables = (*jaxpr.invars, *jaxpr.constvars, *(var for eqn in jaxpr.eqns for var in eqn.outvars))
    if any(str(getattr(var.aval, "dtype", "")) in WIDE for var in variables):
        return True
    return any(has_wide_values(body, seen) for eqn in jaxpr.eqns for body in jaxprs_in_params(eqn.params))
