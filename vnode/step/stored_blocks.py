"""Arrays stored in blocks -> whether they are stored with the counts that a step divides them by.

Knows arrays, and how blocks are stored. Must not know steps, names, nor where arrays are used.

    put with counts (5, 3)     ->  remembered: (5, 3); a step with (3, 5) refuses it
    read from a file           ->  unknown: the padding must be zeros, as `vnode.spmd.uneven_blocks.store` writes it

Shapes and shardings do not tell counts: (5, 3) and (3, 5) have the same ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from vnode.spmd.uneven_blocks import Share

Blocks = tuple[tuple[str, ...], tuple[int, ...]]
"""Mesh axes, and the number of blocks of each device along them."""

_KNOWN: dict[int, tuple[weakref.ref[Any], Share]] = {}
"""By the id of an array: the array, and its blocks."""


def remember(arrays: Iterable[Any], share: Share) -> None:
    """Remembers how arrays are stored, as long as they live.

    Args:
      arrays: arrays; others are left out.
      share: the number of blocks of each device.
    """
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            number = id(array)
            _KNOWN[number] = weakref.ref(array, lambda _, number=number: _KNOWN.pop(number, None)), share


def known_share(array: Any) -> Share | None:
    """The blocks in which an array is stored, as far as this process has stored it or a step has made it.

    Example:
      >>> x, share = jnp.arange(4), Share(("model",), (2, 1))
      >>> remember([x], share)
      >>> known_share(x) == share, known_share(jnp.arange(4))
      (True, None)
    """
    found = _KNOWN.get(id(array))
    return found[1] if found is not None and found[0]() is array else None


def known_blocks(array: Any) -> Blocks | None:
    """As `known_share`, fit for a file."""
    share = known_share(array)
    return None if share is None else (share.axes, share.counts)


def remember_blocks(array: Any, blocks: Blocks) -> None:
    """Remembers how an array is stored that was read from a file; see `known_blocks`."""
    remember([array], Share(*blocks))


def stored_otherwise(arrays: Sequence[Any], dims: Sequence[int], share: Share) -> list[int]:
    """The arrays that are not stored in some blocks.

    All processes that hold the arrays must call it.

    Args:
      arrays: arrays that are sharded along the axes of `share`, or their types, which are taken to be right.
      dims: for each the stored dimension.
      share: the number of blocks of each device.

    Returns:
      The positions of those that were stored with other counts, or whose padding is not zeros.
    """
    held = [i for i, array in enumerate(arrays) if isinstance(array, jax.Array)]
    held = [i for i in held if not isinstance(arrays[i], jax.core.Tracer)]
    known = {i: known_share(arrays[i]) for i in held}
    others = {i: other for i, other in known.items() if other is not None and other != share}
    # what a step has remembered may be an evenly sharded array, which has no padding
    wrong = {i for i, other in others.items() if not has_other_padding([arrays[i]], [dims[i]], other)}
    rest = [i for i in held if known[i] != share and i not in wrong]
    wrong.update(rest[k] for k in has_other_padding([arrays[i] for i in rest], [dims[i] for i in rest], share))
    return sorted(wrong)


def has_other_padding(arrays: Sequence[jax.Array], dims: Sequence[int], share: Share) -> list[int]:
    """The positions of the arrays whose padding, were they stored in some blocks, is not zeros.

    Args:
      arrays: the arrays.
      dims: for each the stored dimension.
      share: the number of blocks of each device.
    """
    by_mesh: dict[NamedSharding, list[int]] = {}
    for i, array in enumerate(arrays):
        if not jnp.issubdtype(array.dtype, jax.dtypes.extended):
            by_mesh.setdefault(NamedSharding(array.sharding.mesh, PartitionSpec()), []).append(i)
    found: list[int] = []
    for sharding, several in by_mesh.items():
        check = padding_check(tuple(dims[i] for i in several), share, sharding)
        with jax.ensure_compile_time_eval():  # within another program, too: these arrays are known there
            verdicts = np.asarray(check([arrays[i] for i in several]))
        found += [i for i, right in zip(several, verdicts, strict=True) if not right]
    return sorted(found)


@functools.lru_cache(maxsize=64)
def padding_check(dims: tuple[int, ...], share: Share, sharding: NamedSharding) -> Any:
    """A program that tells for several arrays, ``bool[arrays]``, whether their padding is zeros.

    Args:
      dims: the stored dimension of each.
      share: the number of blocks of each device.
      sharding: of the result: replicated over the arrays' mesh.
    """

    def is_stored_so(value: jax.Array, dim: int) -> jax.Array:
        part = value.shape[dim] // len(share.counts)
        used = np.repeat([count * (part // share.max_blocks) for count in share.counts], part)
        padding = np.arange(value.shape[dim]) % part >= used
        shown = lax.broadcast_in_dim(jnp.asarray(padding), value.shape, (dim,))
        return ~jnp.any(shown & (value != jnp.zeros((), value.dtype)))

    def run(values: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([is_stored_so(value, dim) for value, dim in zip(values, dims, strict=True)])

    return jax.jit(run, out_shardings=sharding)
