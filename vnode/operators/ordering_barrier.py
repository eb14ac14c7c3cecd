"""Values -> the same values, available only after later ones, so that recomputation from them waits.

    h' = f(x)   ->   x', d' = postponed(x, d);  h' = f(x')          computed only once d is known

Knows the barriers of compilers, and their effects. Must not know programs, nor which values are delayed, and why.

Compilers compute as early as they can, and merge repeated computations. A barrier of several operands prevents both.
But on CPUs XLA removes barriers before it merges equal operations, and before it orders them. There a value is combined
with one element of the later value, in a way that keeps its bits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from vnode.operators.description import OperatorDescription, Positions, Sizes
from vnode.operators.multi_operand_barrier import BarrierPart
from vnode.operators.registry import rule
from vnode.operators.structure import identities


def postponed_barrier() -> BarrierPart:
    """The primitive of the parts of one more ordering barrier; the last operand is the one that the others wait for."""
    return BarrierPart("postponed")


@rule("postponed")
def ordering_barrier(eqn: JaxprEqn) -> OperatorDescription:
    emits = dict.fromkeys(("gpu", "tpu"), emit_barrier) | {"cpu": emit_bit_dependency}
    return identities(eqn, replaced_on=emits)


def emit_barrier(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Emits a barrier."""
    return list(lax.optimization_barrier(tuple(operands)))


def emit_bit_dependency(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Emits a data dependence that XLA keeps on CPUs."""
    *values, latest = operands
    if not can_be_awaited(latest):
        return emit_barrier(d, e, operands, sizes, positions)
    return [*(ready_value(value, latest) for value in values), latest]


def can_be_awaited(type_: Any) -> bool:
    """Whether others can wait for an array of a type: it has floating-point numbers."""
    return bool(jnp.issubdtype(type_.dtype, np.floating) and type_.size)


def ready_value(value: Any, *latest: Any) -> Any:
    """A value available only after others, if it is numeric."""
    real = jnp.issubdtype(value.dtype, np.floating), jnp.issubdtype(value.dtype, np.integer)
    about = jnp.finfo if real[0] else jnp.iinfo
    whole_bytes = any(real) and about(value.dtype).bits == 8 * value.dtype.itemsize
    return lax.bitcast_convert_type(bits_after(value, *latest), value.dtype) if whole_bytes else value


def bits_after(value: Any, *latest: Any) -> Any:
    """A value's bits as integers that are available only after others.

    Args:
      value: an array of real numbers, any shape.
      latest: arrays of floating-point numbers, none of them empty.
    """
    value, *others = lax.optimization_barrier((value, *latest))
    kind = jnp.dtype(f"uint{8 * value.dtype.itemsize}")
    ones = (lax.squeeze(lax.slice(x, [0] * x.ndim, [1] * x.ndim), range(x.ndim)) for x in others)
    nothing = functools.reduce(operator.or_, ((one != one).astype(kind) >> 1 for one in ones))
    return lax.bitcast_convert_type(value, kind) ^ nothing
