"""Slices at run-time positions -> explicit clamps of their starts, and slices that start in bounds.

Knows dynamic slices, and gathers of windows, which XLA turns into slices where there is one. Must not know why starts
should be in bounds.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.lax import GatherScatterMode

from vnode.operators.constant_folding import Atom
from vnode.operators.indexing import Column, join_columns


def with_starts_in_bounds(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    """Makes jax's implicit clamp of out-of-bounds starts explicit.

    Args:
      eqn: any equation.

    Returns:
      Equations that replace `eqn`, the last one defining the same variable; None if it has no starts to clamp.
    """
    if eqn.primitive.name == "dynamic_slice":
        return slice_in_bounds(eqn)
    if eqn.primitive.name == "gather" and eqn.params["mode"] == GatherScatterMode.CLIP:
        return windows_in_bounds(eqn)
    return None


def slice_in_bounds(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    """As `with_starts_in_bounds`, for a dynamic slice. Literal starts are clamped here, without an equation."""
    value, *given = eqn.invars
    made: list[JaxprEqn] = []
    starts: list[Atom] = []
    for start, n, m in zip(given, value.aval.shape, eqn.outvars[0].aval.shape, strict=True):
        known = 0 if n == m else start.val if isinstance(start, Literal) else None
        if known is None:
            starts.append(clamp_starts(eqn, start, n - m, made))
        else:
            inside = min(max(int(known), 0), n - m)
            as_given = isinstance(start, Literal) and start.val == inside
            starts.append(start if as_given else Literal(np.asarray(inside, start.aval.dtype), start.aval))
    same = all(a is b for a, b in zip(starts, given, strict=True))
    return None if same else [*made, eqn.replace(invars=[value, *starts])]


def windows_in_bounds(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    """As `with_starts_in_bounds`, for a gather of windows in mode ``CLIP``."""
    value, indices = eqn.invars
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if set(numbers.start_index_map) <= set(numbers.collapsed_slice_dims):
        return None  # nothing is sliced out of one element
    last = [value.aval.shape[d] - sizes[d] for d in numbers.start_index_map]
    made: list[JaxprEqn] = []
    columns = []
    for k, most in enumerate(last):
        cut, column = join_columns(eqn, [Column(indices, k, len(last))])
        made += cut
        columns.append(Column(clamp_starts(eqn, column, most, made), 0, 1))
    joined, together = join_columns(eqn, columns)
    return [*made, *joined, eqn.replace(invars=[value, together])]


def clamp_starts(eqn: JaxprEqn, starts: Atom, last: int, made: list[JaxprEqn]) -> Var:
    """Clamps integers to ``0 ... last``, by an equation like `eqn` that is appended to `made`."""
    dtype = starts.aval.dtype
    scalar = starts.aval.update(shape=())
    least, most = (Literal(np.asarray(k, dtype), scalar) for k in (0, min(last, np.iinfo(dtype).max)))
    result = Var(starts.aval)
    made.append(
        clamp_equation().replace(
            invars=[least, starts, most], outvars=[result], source_info=eqn.source_info, ctx=eqn.ctx
        )
    )
    return result


@functools.lru_cache(maxsize=1)
def clamp_equation() -> JaxprEqn:
    """A template of a clamp equation."""
    return jax.make_jaxpr(lax.clamp)(0, 0, 0).jaxpr.eqns[0]
