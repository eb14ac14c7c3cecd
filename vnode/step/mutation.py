"""The arguments of a step, before and after a trace -> an error, if the step changes objects in place.

Knows pytrees. Must not know what a step computes, nor any framework beyond what to advise.

jax traces copies of the arguments, so that such a change would be lost. Dictionaries and lists are not checked: steps
use copies of them as scratch, which `jax.jit` allows as well. Changes of objects with attributes (modules, optimizers,
metrics) are meant to last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from vnode.errors import VnodeError, limit_lines

BUILTIN = (dict, list, tuple)
NODES = jax.tree_util.default_registry


class MutationCheck:
    """A record of a step's arguments before it runs.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      names: of the positional arguments, as far as they are known.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()) -> None:
        called = [*names[: len(args)], *(f"argument {i}" for i in range(len(names), len(args)))]
        found = (entry for name, arg in zip(called, args, strict=True) for entry in custom_nodes(arg, name))
        named = (entry for name, arg in kwargs.items() for entry in custom_nodes(arg, name))
        self._before = [(path, node, children_of(node)) for path, node in (*found, *named)]

    def check(self, outputs: Any) -> None:
        """Checks that the step returns every object that it has changed.

        Args:
          outputs: the result of the step, a pytree.

        Raises:
          VnodeError: the step changes an object and does not return it.
        """
        lost = [(path, node) for path, node, before in self._before if is_changed(before, children_of(node), outputs)]
        if not lost:
            return
        facts = [f"{path}: {type(node).__module__}.{type(node).__qualname__}" for path, node in lost]
        of_nnx = any(base.__module__.startswith("flax.nnx") for _, node in lost for base in type(node).__mro__)
        raise VnodeError(
            "the step changes objects among its arguments in place and does not return them: "
            "it receives copies, so the changes would be lost.",
            facts=limit_lines(facts),
            remedies=[
                *(["vnode.nnx.virtualize(step, ...): it updates flax.nnx objects in place"] if of_nnx else []),
                "return the changed objects from the step, and use the returned ones",
            ],
        )


def is_changed(before: list[Any], after: list[Any], outputs: Any) -> bool:
    """Whether an object has new children with an array that is not returned."""
    if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
        return False
    old = {id(child) for child in before}
    returned = {id(leaf) for leaf in jax.tree.leaves(outputs)}
    new = [leaf for child in after if id(child) not in old for leaf in jax.tree.leaves(child)]
    return any(isinstance(leaf, jax.Array) and id(leaf) not in returned for leaf in new)


def custom_nodes(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The nodes of a pytree that are neither builtin containers nor leaves, with their paths."""
    if tree is None or not (level := NODES.flatten_one_level_with_keys(tree)):
        return
    if not isinstance(tree, BUILTIN):
        yield path, tree
    for key, child in level[0]:
        yield from custom_nodes(child, path + str(key))


def children_of(node: Any) -> list[Any]:
    """The children of an object in a pytree."""
    level = NODES.flatten_one_level(node)
    children: Iterable[Any] = level[0] if level else ()
    return list(children)
