"""Equation and factor sizes -> evaluation of a copy: at full size, at the size of a part, or in a wider type.

Knows descriptions and jax's equations. Must not know which factor is split, nor why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from vnode.operators.description import Algebra, OperatorDescription, Positions, Sizes
from vnode.operators.registry import is_users


def evaluate(
    description: OperatorDescription,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    sizes: Sizes,
    positions: Positions,
    platform: str = "",
) -> list[Any]:
    """Evaluates a copy of `eqn` with factor sizes `sizes`.

    Args:
      description: of `eqn`.
      eqn: the equation.
      operands: values of the shapes that `description` has at `sizes`.
      sizes: a size for every factor.
      positions: the global indices of the factors that are split.
      platform: what the program is compiled for, e.g. ``"cpu"``.

    Returns:
      The results, of the shapes that `description` has at `sizes`.
    """
    full = not positions and sizes == description.sizes and description.layout is None
    emit = None if full else description.emit_on.get(platform, description.emit)
    emit = description.replaced_on.get(platform, emit)
    if emit is not None:
        return list(emit(description, eqn, operands, sizes, positions))
    params = eqn.params if description.resize is None else description.resize(description, eqn, sizes)
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def cast(value: Any, dtype: Any) -> Any:
    """Casts a floating-point value; any other value, and a number without a dtype of its own, stays."""
    own = getattr(value, "dtype", None)
    return value if own is None or own == dtype or not jax.numpy.issubdtype(own, np.floating) else value.astype(dtype)


def evaluate_wide(
    description: OperatorDescription,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    sizes: Sizes | None = None,
    positions: Positions | None = None,
    platform: str = "",
    dtype: Any = np.float32,
) -> list[Any]:
    """As `evaluate`, in a floating-point type with more bits than the results', without rounding to it.

    Products of narrow operands stay narrow: only their sum is wide. CPUs multiply in float32, and XLA's CPU compiler
    refuses some products of bfloat16 with a wider sum: there the operands are cast. A user's primitive, or a kernel,
    may not accept another type: its results are cast.

    Args:
      description: of `eqn`.
      eqn: the equation.
      operands: values, each of its own type in the equation or of the wider one.
      sizes: as above; by default those of the equation.
      positions: as above.
      platform: as above.
      dtype: the wider type.

    Returns:
      The results, of that type.
    """
    sizes, positions = sizes or description.sizes, positions or {}
    if is_users(eqn) or description.opaque or description.own_types:
        own = [cast(value, atom.aval.dtype) for value, atom in zip(operands, eqn.invars, strict=True)]
        return [cast(value, dtype) for value in evaluate(description, eqn, own, sizes, positions, platform)]
    narrow = description.has(Algebra.CONTRACTS) and platform != "cpu"
    if not narrow or any(getattr(value, "dtype", None) == dtype for value in operands):
        operands = [cast(value, dtype) for value in operands]
    if description.widen is not None:
        eqn = eqn.replace(params=description.widen(eqn.params, dtype))
    return evaluate(description, eqn, operands, sizes, positions, platform)
