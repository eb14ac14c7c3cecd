"""Pytree -> which of its Python scalars are constants of a program: those in modules of some libraries.

Knows by which library's rule a number in a pytree is a constant. Must not know how constants are used.

`jax.jit` takes every Python number in an argument as an array. In an Equinox module that would be wrong: ``depth: int``
is read by Python code, and ``inference: bool`` by an ``if``. `equinox.filter_jit` and `equinox.filter_grad` take arrays
only, so models, and optimizer states made for them, are written with that in mind. So here too: a Python scalar whose
nearest enclosing module is Equinox's is a constant of the program. (A `flax` ``TrainState`` counts its steps with one.)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from vnode.placement.leaves import is_array, is_number
from vnode.placement.sharded import is_sharded_batch

MODULES = {"equinox": "Module"}
"""Imported names of libraries, and their classes whose fields hold constants."""


def module_types() -> tuple[type, ...]:
    """The classes of `MODULES` whose libraries are imported."""
    found = (getattr(sys.modules.get(library), name, None) for library, name in MODULES.items())
    return tuple(kind for kind in found if isinstance(kind, type))


@functools.lru_cache(maxsize=256)
def in_modules(structure: Any, types: tuple[type, ...]) -> tuple[bool, ...]:
    """For every leaf of a tree structure whether its innermost enclosing module is of one of `types`."""
    found: list[bool] = []

    def walk(structure: Any, inside: bool) -> None:
        if jax.tree_util.treedef_is_leaf(structure):
            found.extend([inside] * structure.num_leaves)
            return
        kind = structure.node_data()
        if kind is not None and not issubclass(kind[0], dict | list | tuple):
            inside = issubclass(kind[0], types)
        for child in structure.children():
            walk(child, inside)

    walk(structure, False)
    return tuple(found)


def static_scalars(tree: Any) -> list[bool]:
    """For every leaf of a tree (a batch in shares is one) whether it is a Python scalar that is a constant.

    Args:
      tree: any pytree.

    Returns:
      In the order of the leaves.

    Example:
      >>> static_scalars({"rate": 0.1, "step": 3})
      [False, False]
    """
    return static_flags(*jax.tree.flatten(tree, is_leaf=is_sharded_batch))


def static_flags(leaves: Sequence[Any], structure: Any) -> list[bool]:
    """As `static_scalars`, given the tree's leaves and structure."""
    types = module_types()
    if not types:
        return [False] * len(leaves)
    return [flag and is_number(leaf) for leaf, flag in zip(leaves, in_modules(structure, types), strict=True)]


def array_leaves(tree: Any) -> list[bool]:
    """For every leaf of a tree (a batch in shares is one) whether it is an array of the program."""
    return are_arrays(*jax.tree.flatten(tree, is_leaf=is_sharded_batch))


def are_arrays(leaves: Sequence[Any], structure: Any) -> list[bool]:
    """As `array_leaves`, given the tree's leaves and structure."""
    return [is_array(leaf) and not flag for leaf, flag in zip(leaves, static_flags(leaves, structure), strict=True)]


def map_arrays(fun: Any, tree: Any) -> Any:
    """A tree with `fun` of each of its arrays; other leaves stay as they are."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_sharded_batch)
    new = [fun(leaf) if array else leaf for leaf, array in zip(leaves, are_arrays(leaves, structure), strict=True)]
    return jax.tree.unflatten(structure, new)
