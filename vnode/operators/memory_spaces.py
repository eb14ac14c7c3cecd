"""The memory space of a value, by its type: device memory or host memory.

Knows types. Must not know equations, programs, nor who moves values, and why.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(aval: Any) -> bool:
    """Whether values of a type are in host memory.

    >>> is_on_host(jax.typeof(jnp.ones(3)))
    False
    """
    return getattr(aval, "memory_space", DEVICE) == HOST


def crosses_memories(eqn: Any) -> bool:
    """Whether an equation (no loop or branch) moves a value to host memory, or back.

    >>> there = jax.make_jaxpr(lambda x: jax.device_put(jnp.sin(x), HOST))(1.0)
    >>> [crosses_memories(eqn) for eqn in there.jaxpr.eqns]
    [False, True]
    """
    before, after = ({is_on_host(atom.aval) for atom in several} for several in (eqn.invars, eqn.outvars))
    return bool(before) and before != after


def can_offload(aval: Any) -> bool:
    """Whether values of a type can be offloaded: non-empty arrays of numbers or booleans of whole bytes.

    >>> can_offload(jax.typeof(jnp.ones(3))), can_offload(jax.typeof(jax.random.key(0)))
    (True, False)
    """
    dtype = getattr(aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or not aval.size:
        return False
    real = jnp.issubdtype(dtype, np.floating), jnp.issubdtype(dtype, np.integer)
    about = jnp.finfo if real[0] else jnp.iinfo
    return dtype == np.bool_ or (any(real) and about(dtype).bits == 8 * dtype.itemsize)
