"""Accesses of mutable arrays (`jax.new_ref`) -> functions of values.

Knows the primitives that make, read and write a reference, and how they index. Must not know where a reference is made
or passed on: `vnode.analysis.discharge_references` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

Access = Callable[[JaxprEqn, Any, Sequence[Any]], tuple[Any, list[Any]]]
"""Maps the equation, the reference's content and the other operands to the new content and the results."""


def is_reference(atom: Any) -> bool:
    """Whether a variable is a mutable array."""
    return hasattr(getattr(atom, "aval", None), "inner_aval")


def initial_content(eqn: JaxprEqn, operands: Sequence[Any]) -> Any | None:
    """The initial content of a new reference; None if the equation makes none."""
    if eqn.primitive.name == "new_ref":
        return operands[0]
    if eqn.primitive.name == "empty_ref":
        aval = eqn.outvars[0].aval.inner_aval
        return lax.empty(aval.shape, aval.dtype)
    return None


def access_of(eqn: JaxprEqn) -> Access | None:
    """The function of an access to the reference that is the first operand; None for any other equation."""
    return ACCESSES.get(eqn.primitive.name)


def get(eqn: JaxprEqn, held: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    return held, [read_chain(held, indexers(eqn, operands))]


def swap(eqn: JaxprEqn, held: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    value, *rest = operands
    chain = indexers(eqn, rest)
    return write_chain(held, chain, value), [read_chain(held, chain)]


def addupdate(eqn: JaxprEqn, held: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    value, *rest = operands
    chain = indexers(eqn, rest)
    return write_chain(held, chain, read_chain(held, chain) + value), []


def freeze(eqn: JaxprEqn, held: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    return held, [held]


ACCESSES: dict[str, Access] = {
    "get": get,
    "swap": swap,
    "addupdate": addupdate,
    "freeze": freeze,
    "free_ref": lambda eqn, held, operands: (held, []),
}


def indexers(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The views that an access takes one after another.

    Raises:
      NotImplementedError: a view is not an index (a bitcast, say).
    """
    chain = jax.tree.unflatten(eqn.params["tree"], operands) or ()
    for view in chain:
        if not hasattr(view, "indices"):
            raise NotImplementedError(f"a reference is read through {type(view).__name__}")
    return [view for view in chain if not covers(view)]


def covers(view: Any) -> bool:
    """Whether a view covers everything."""
    return all(
        hasattr(i, "size") and not hasattr(i, "dtype") and (i.start, i.size, i.stride) == (0, n, 1)
        for i, n in zip(view.indices, view.shape, strict=True)
    )


def index_of(view: Any) -> tuple[list[Any], list[int] | None]:
    """A view as a dynamic slice or, if it has strides or arrays of indices, as an index of `jax.numpy`.

    Returns:
      The starts and sizes of the slice, where size 0 is one element without its dimension; or the index, and None.

    Raises:
      NotImplementedError: it has strides or arrays beside a slice that begins at a run-time position.
    """
    slices = [hasattr(i, "stride") for i in view.indices]
    if all((s and i.stride == 1) or (not s and np.ndim(i) == 0) for i, s in zip(view.indices, slices, strict=True)):
        starts = [jnp.asarray(i.start if s else i, jnp.int32) for i, s in zip(view.indices, slices, strict=True)]
        return starts, [i.size if s else 0 for i, s in zip(view.indices, slices, strict=True)]
    index = []
    for i, s in zip(view.indices, slices, strict=True):
        if s and not isinstance(i.start, int):
            raise NotImplementedError("a reference is indexed by a dynamic slice together with strides or arrays")
        index.append(slice(i.start, i.start + (i.size - 1) * i.stride + 1, i.stride) if s else i)
    return index, None


def read_chain(value: Any, chain: Sequence[Any]) -> Any:
    """Reads a value through views, one after another."""
    for view in chain:
        starts, sizes = index_of(view)
        if sizes is None:
            value = value[tuple(starts)]
        else:
            value = lax.dynamic_slice(value, starts, [n or 1 for n in sizes])
            value = lax.squeeze(value, [d for d, n in enumerate(sizes) if n == 0])
    return value


def write_chain(value: Any, chain: Sequence[Any], part: Any) -> Any:
    """A value in which the part that views select, one after another, is replaced."""
    if not chain:
        return part
    part = write_chain(read_chain(value, chain[:1]), chain[1:], part)
    starts, sizes = index_of(chain[0])
    if sizes is None:
        return value.at[tuple(starts)].set(part)
    return lax.dynamic_update_slice(value, jnp.reshape(part, [n or 1 for n in sizes]), starts)
