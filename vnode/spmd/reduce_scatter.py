"""Turns a value that each device has whole into the sum over devices, of which each has a part.

Knows collectives, and whether gloo carries them out. Must not know what is added.

By gloo, by which CPUs of several processes exchange, this is an all-to-all and additions: gloo's reduce-scatter
overwrites what it has not sent yet. From some megabytes on, parts of sums were wrong now and then, without an error
(https://github.com/jax-ml/jax/issues/40830, jaxlib 0.10 to 0.12).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax

BY_GLOO: contextvars.ContextVar[bool] = contextvars.ContextVar("by_gloo", default=False)
"""Whether gloo carries out the collectives of the program that is traced."""


@contextlib.contextmanager
def carried_out(by_gloo: bool) -> Iterator[None]:
    """Says by what the collectives of a program that is traced are carried out."""
    token = BY_GLOO.set(by_gloo)
    try:
        yield
    finally:
        BY_GLOO.reset(token)


def reduce_scatter(value: Any, axes: Any, dim: int, groups: Sequence[Sequence[int]] | None = None) -> Any:
    """The sum of a value over devices, in any order, of which each device has its part along a dimension.

    Args:
      value: ``[..., n, ...]`` on each device.
      axes: the mesh axis, or several, along which devices differ.
      dim: the dimension of `n`, a multiple of the devices that add.
      groups: of devices that add among themselves; None for all of them together.

    Returns:
      ``[..., n / devices, ...]``
    """
    named = None if groups is None else [list(group) for group in groups]
    if not BY_GLOO.get():
        return lax.psum_scatter(value, axes, scatter_dimension=dim, axis_index_groups=named, tiled=True)
    size = lax.axis_size(axes) if named is None else len(named[0])
    # A dimension of their own for the parts, or compilers bring the whole into another layout first.
    parts = value.reshape(*value.shape[:dim], size, value.shape[dim] // size, *value.shape[dim + 1 :])
    parts = lax.all_to_all(parts, axes, dim, dim, axis_index_groups=named, tiled=True)
    return functools.reduce(lax.add, [lax.index_in_dim(parts, part, dim, keepdims=False) for part in range(size)])
