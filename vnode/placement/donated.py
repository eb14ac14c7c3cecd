"""Deleted arrays: donated to an earlier computation, or deleted by the user; one error message for all callers.

Knows deleted arrays. Must not know how valid arrays are used.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax

from vnode.errors import VnodeError, limit_lines

IS_DELETED = operator.methodcaller("is_deleted")


def donated_leaves(tree: Any, name: str) -> list[str]:
    """The leaves whose arrays are deleted, for example by donation to a computation.

    Args:
      tree: any pytree.
      name: the tree's name in messages.

    Example:
      >>> import jax.numpy as jnp
      >>> w, b = jnp.ones(3), jnp.zeros(3)
      >>> w.delete()
      >>> donated_leaves({"w": w, "b": b}, "state")
      ["state['w']"]
    """

    if not any(map(IS_DELETED, arrays_among(jax.tree.leaves(tree)))):
        return []  # takes a tenth of the time
    paths = jax.tree.leaves_with_path(tree)
    return [
        name + jax.tree_util.keystr(path) for path, leaf in paths if is_array_class(type(leaf)) and leaf.is_deleted()
    ]


def arrays_among(leaves: list[Any]) -> list[Any]:
    """The leaves that are jax arrays with memory of their own, no tracers; in a fifth of the time of asking each.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> arrays_among([jnp.ones(2), np.ones(2), 1.0])
      [Array([1., 1.], dtype=float32)]
    """
    kinds = set(map(type, leaves))
    held = set(filter(is_array_class, kinds))
    return leaves if held == kinds else [leaf for leaf in leaves if type(leaf) in held]


@functools.lru_cache(maxsize=64)
def is_array_class(kind: type) -> bool:
    """Whether instances of a class are jax arrays with memory of their own."""
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def check_not_donated(
    trees: Mapping[str, Any],
    donated: Mapping[str, str] | None = None,
    *,
    returned: str = "state, metrics = step(state, batch)",
) -> None:
    """Raises if arrays were donated to an earlier computation; jaxlib 0.10 crashes on several devices.

    Args:
      trees: the arguments, by name.
      donated: by the same names, how the caller donates arguments, if it does.
      returned: code that shows how to use an earlier call's results.

    Raises:
      VnodeError: some arrays are deleted.

    Example:
      >>> import jax.numpy as jnp
      >>> check_not_donated({"state": {"w": jnp.ones(3)}})
    """
    gone = {name: names for name, tree in trees.items() if (names := donated_leaves(tree, name))}
    if not gone:
        return
    names = [name for found in gone.values() for name in found]
    own = [how for name, how in (donated or {}).items() if name in gone]
    raise VnodeError(
        "some of the given arrays are deleted: they were donated to an earlier call, or deleted by hand.",
        facts=[*limit_lines(names), *own],
        remedies=[
            f"use that call's results: {returned}",
            "or virtualize without donate_argnums" if own else "or do not donate arrays that are needed again",
        ],
    )
