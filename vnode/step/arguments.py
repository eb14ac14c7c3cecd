"""The arguments of a step: which leaves are arrays, which of those carry examples, and along which dimension.

Knows pytrees and `in_axes`. Must not know jaxprs, nodes or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vnode.errors import BatchError, layout_message
from vnode.placement.leaves import is_array
from vnode.placement.sharded import is_sharded_batch


@jax.tree_util.register_static
class StaticLeaf:
    """A static leaf, compared by value, by identity where it does not hash. In a pytree it counts as structure."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf):
            return NotImplemented
        if self.value is other.value:
            return True
        try:
            hash(self.value)
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        except TypeError:
            return False


class Statics:
    """What a call holds besides arrays: tree structures and static leaves; hashable."""

    def __init__(self, rest: tuple[tuple[Any, tuple[Any, ...]], ...], count: int) -> None:
        self.rest = rest
        self.count = count

    def __hash__(self) -> int:
        return hash(self.rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statics) and self.rest == other.rest

    def dynamic(self, per_leaf: Sequence[Any]) -> list[Any]:
        """Of something per leaf of ``(args, kwargs)`` (a static argument counts as it flattens), that of the arrays."""
        entries = iter(per_leaf)
        kept: list[Any] = []
        for treedef, held in self.rest:
            count = len(leaves_of(held[0].value)) if treedef is None else len(held)
            mine = [next(entries) for _ in range(count)]
            kept += [] if treedef is None else [e for e, h in zip(mine, held, strict=True) if h is None]
        return kept

    def merge_inputs(self, parts: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, given their arrays."""
        merged = []
        for (treedef, held), part in zip(self.rest, parts, strict=True):
            arrays = iter(part)
            leaves = [next(arrays) if h is None else h.value for h in held]
            merged.append(leaves[0] if treedef is None else jax.tree.unflatten(treedef, leaves))
        return tuple(merged[: self.count]), merged[self.count]


class OutputTree:
    """What a step returned, as one trace of it found out."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.treedef: Any = None

    def split(self, out: Any) -> list[Any]:
        """The arrays of what the step returned; remembers the rest."""
        leaves, self.treedef = jax.tree.flatten(out)
        self.leaves = [None if is_array(leaf) else StaticLeaf(leaf) for leaf in leaves]
        return [leaf for leaf in leaves if is_array(leaf)]

    @property
    def has_statics(self) -> bool:
        """Whether it holds anything besides arrays."""
        return any(held is not None for held in self.leaves)

    def merge(self, arrays: Sequence[Any]) -> Any:
        """What the step returned, given its arrays; other leaves are `StaticLeaf`."""
        rest = iter(arrays)
        return jax.tree.unflatten(self.treedef, [next(rest) if held is None else held for held in self.leaves])


def unwrap(tree: Any) -> Any:
    """A pytree with its `StaticLeaf` leaves as they were."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: isinstance(leaf, StaticLeaf))
    return jax.tree.unflatten(treedef, [leaf.value if isinstance(leaf, StaticLeaf) else leaf for leaf in leaves])


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of arguments; a batch in shares is one."""
    return jax.tree.leaves(tree, is_leaf=is_sharded_batch)


def batch_axes(in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
    """One axis, or None, for every leaf of the arguments.

    Raises:
      BatchError: `in_axes` is no prefix of the arguments.
    """
    if isinstance(in_axes, int):
        in_axes = (in_axes,) * len(args)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if not isinstance(in_axes, tuple):
        raise BatchError(f"in_axes must be an integer, or a tuple with one entry per argument, not {in_axes!r}")
    if len(in_axes) > len(args):
        raise BatchError(
            layout_message(
                f"in_axes has {len(in_axes)} entries, the call {len(args)} positional arguments.",
                facts=[f"in_axes = {in_axes!r}"],
                remedies=["pass the batch by position: keyword arguments are never split", "shorten in_axes"],
            )
        )
    axes: list[int | None] = []
    for i, arg in enumerate(args):
        entry = in_axes[i] if i < len(in_axes) else None

        def spread(axis: Any, subtree: Any) -> list[int | None]:
            return [axis] * len(leaves_of(subtree))

        try:
            parts = jax.tree.map(spread, entry, arg, is_leaf=lambda leaf: leaf is None)
        except ValueError:
            raise BatchError(
                layout_message(
                    f"in_axes[{i}] does not fit argument {i}: it is no prefix of it.",
                    facts=[
                        f"in_axes[{i}] = {entry!r}",
                        f"argument {i} has the leaves {', '.join(map(leaf_name, jax.tree.leaves_with_path(arg)))}",
                    ],
                    remedies=["give an integer, None, or a pytree prefix of the argument, as in jax.vmap"],
                )
            ) from None
        axes += jax.tree.leaves(parts, is_leaf=lambda leaf: leaf is None)
    return axes + [None] * len(leaves_of(kwargs))


def leaf_name(entry: tuple[Any, Any]) -> str:
    return jax.tree_util.keystr(entry[0]) or "itself"


def batch_size(leaves: Sequence[Any], axes: Sequence[int | None], paths: Sequence[Any]) -> int:
    """How many examples the arguments carry.

    Raises:
      BatchError: they carry none, an empty one, or disagree.
    """
    sizes: dict[str, int] = {}
    for (path, _), leaf, axis in zip(paths, leaves, axes, strict=True):
        if axis is None:
            continue
        name = jax.tree_util.keystr(path[1:])
        shape = np.shape(leaf)
        if not isinstance(axis, int) or isinstance(axis, bool) or not -len(shape) <= axis < len(shape):
            raise BatchError(
                layout_message(
                    f"in_axes names dimension {axis!r} of an argument that has {len(shape)} dimensions.",
                    facts=[f"argument {name}: shape {tuple(shape)}"],
                    remedies=["check in_axes", "use None for arguments that are not split"],
                )
            )
        sizes[f"argument {name}: shape {tuple(shape)}, dimension {axis}"] = shape[axis]
    if not sizes:
        raise BatchError(
            layout_message(
                "no argument is batched: there is nothing to split.",
                facts=[f"the call has {len(leaves)} arrays in all"],
                remedies=[
                    "say with in_axes which arguments carry examples, e.g. in_axes=(None, 0)",
                    "check that the batched arguments hold arrays: an empty dictionary has none",
                    "pass the batch by position: keyword arguments are never split",
                ],
            )
        )
    if len(set(sizes.values())) > 1:
        raise BatchError(
            layout_message(
                "the batched arguments disagree about the size of the batch.",
                facts=[f"{name} has {size}" for name, size in sizes.items()],
                remedies=["pass None in in_axes for arguments that are not split"],
            )
        )
    (size,) = set(sizes.values())
    if size == 0:
        raise BatchError(
            layout_message(
                "the batch is empty.",
                facts=list(sizes),
                remedies=["skip empty batches before calling the step", "check which dimension in_axes names"],
            )
        )
    return size
