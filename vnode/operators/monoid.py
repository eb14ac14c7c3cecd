"""Monoids: how the partial values of a reduction combine.

Knows their identities in every dtype and their operations. Must not know equations, nor which values are partial.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Monoid(enum.Enum):
    """The operation that combines partial values of a reduction."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AND = "and"
    OR = "or"
    XOR = "xor"

    def identity(self, dtype: Any) -> Any:
        """The neutral element, a NumPy scalar of `dtype`.

        >>> import numpy as np
        >>> from vnode.operators import Monoid
        >>> Monoid.MAX.identity(np.float32)
        np.float32(-inf)
        >>> Monoid.MIN.identity(np.int8)
        np.int8(127)
        """
        dtype = np.dtype(dtype)
        boolean = dtype == np.bool_
        match self:
            case Monoid.SUM | Monoid.XOR:
                return dtype.type(0)
            case Monoid.OR:
                return dtype.type(0)
            case Monoid.PROD:
                return dtype.type(1)
            case Monoid.AND:
                return dtype.type(True) if boolean else np.array(-1).astype(dtype)[()]
            case Monoid.MAX | Monoid.MIN:
                low = self is Monoid.MAX
                if boolean:
                    return dtype.type(not low)
                if jax.numpy.issubdtype(dtype, np.integer):
                    info = jax.numpy.iinfo(dtype)
                    return dtype.type(info.min if low else info.max)
                if dtype.kind == "c":  # ordered by the real part first
                    return dtype.type(complex(-np.inf, -np.inf) if low else complex(np.inf, np.inf))
                if not np.isinf(np.array(np.inf).astype(dtype).astype(np.float64)):  # float8 kinds without infinity
                    info = jax.numpy.finfo(dtype)
                    return dtype.type(info.min if low else info.max)
                return np.array(-np.inf if low else np.inf).astype(dtype)[()]

    def combine(self, a: Any, b: Any) -> Any:
        """The operation, element by element.

        >>> import numpy as np
        >>> from vnode.operators import Monoid
        >>> Monoid.MAX.combine(np.array([1, 5]), np.array([3, 2])).tolist()
        [3, 5]
        """
        return _OPERATIONS[self](a, b)


_OPERATIONS = {
    Monoid.SUM: jnp.add,
    Monoid.PROD: jnp.multiply,
    Monoid.MAX: jnp.maximum,
    Monoid.MIN: jnp.minimum,
    Monoid.AND: jnp.bitwise_and,
    Monoid.OR: jnp.bitwise_or,
    Monoid.XOR: jnp.bitwise_xor,
}
