"""The arguments of one call -> a flat list of arrays, the batched dimension of each, and all other leaves as structure.

Knows pytrees and `in_axes`. Must not know jaxprs, nodes or devices.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vnode.analysis.tracing import with_trees
from vnode.errors import BatchError, VnodeError
from vnode.placement.leaves import CONVERT, foreign_array, is_array, is_foreign_array
from vnode.placement.sharded import is_sharded_batch
from vnode.placement.static_scalars import are_arrays
from vnode.show.units import several
from vnode.step.mutation import MutationCheck


@jax.tree_util.register_static
class StaticLeaf:
    """A leaf that is no array, compared by value.

    In a pytree it counts as structure: `jax.jit` compiles anew if it differs, and returns it as it is. An unhashable
    value is compared by a copy, because it may change after its program was compiled.

    Raises:
      VnodeError: it neither hashes nor equals a copy of itself.
    """

    def __init__(self, value: Any, name: Callable[[], str] | None = None) -> None:
        self._value = value
        self._hashes = is_hashable(value)
        self._then = value if self._hashes else copy_of(value, name)

    @property
    def value(self) -> Any:
        """The leaf, or a copy of its original value if it has changed since."""
        return self._value if self._hashes or same_constant(self._value, self._then) else copy_of(self._then)

    def __hash__(self) -> int:
        return hash(self._then if self._hashes else type(self._then))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf):
            return NotImplemented
        return self._then is other._then or (
            type(self._then) is type(other._then)
            and self._hashes == other._hashes
            and same_constant(self._then, other._then)
        )


def is_hashable(value: Any) -> bool:
    """Whether a value can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def same_constant(a: Any, b: Any) -> bool:
    """Whether two values of one type are known to be the same constant; False for arrays of several elements.

    ``1``, ``1.0`` and ``True`` are equal, as are zeros of either sign, but they are different constants.
    """
    try:
        by_text = isinstance(a, float | complex | tuple | list | dict) or dataclasses.is_dataclass(a)
        return bool(a == b) and (not by_text or repr(a) == repr(b))
    except Exception:
        return False


def copy_of(value: Any, name: Callable[[], str] | None = None) -> Any:
    """A copy of an unhashable value; the value itself if its class compares by identity.

    Args:
      value: the value.
      name: returns its name, for messages.

    Raises:
      VnodeError: a copy would not equal the value.
    """
    if type(value).__eq__ is object.__eq__:
        return value
    try:
        copied = copy.deepcopy(value)
    except Exception:
        copied = None
    called = name() if name else "a value"
    if isinstance(value, np.ndarray) and not is_array(value):
        raise VnodeError(
            f"{called} is an array of dtype {value.dtype}, which jax does not have.",
            facts=[f"shape {value.shape}, {shortened(value)}"],
            remedies=[
                "convert it to numbers: integers for text, NaN for gaps, padding for rows of unequal length",
                "or do not pass it to the step",
            ],
        )
    if copied is None or not same_constant(copied, value):
        raise VnodeError(
            f"{called} is a constant of the program, and neither hashes nor equals a copy of itself: "
            "vnode cannot tell whether it changes between two calls.",
            facts=[f"{type(value).__qualname__}: {shortened(value)}"],
            remedies=[
                "make its class hash: @dataclasses.dataclass(frozen=True), with tuples in place of lists",
                "if it holds arrays of numbers, pass these as arguments that are not static",
                "or put it into the step by functools.partial",
            ],
        )
    return copied


def shortened(value: Any) -> str:
    """A value's `repr`, in a line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def wrap(tree: Any, *place: Any, names: Sequence[str] = ()) -> Any:
    """Wraps the leaves of a pytree that are no arrays as structure; returns the pytree itself if there are none.

    Args:
      tree: the pytree.
      *place: its path in ``(args, kwargs, results)``; for messages.
      names: of the positional arguments; for messages.

    Raises:
      VnodeError: a leaf is an array of a library that is neither jax nor NumPy.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_sharded_batch)
    arrays = are_arrays(leaves, treedef)
    if all(arrays):
        return tree

    def name(i: int) -> str:
        paths = jax.tree.leaves_with_path(tree, is_leaf=is_sharded_batch)
        return argument_name((*map(jax.tree_util.SequenceKey, place), *paths[i][0]), names)

    for i, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        if not array and is_foreign_array(leaf):
            raise VnodeError(foreign_array(name(i), leaf), facts=[f"shape {tuple(leaf.shape)}"], remedies=CONVERT)
    kept = [
        leaf if array else StaticLeaf(leaf, functools.partial(name, i))
        for i, (leaf, array) in enumerate(zip(leaves, arrays, strict=True))
    ]
    return jax.tree.unflatten(treedef, kept)


def argument_name(path: Sequence[Any], names: Sequence[str] = ()) -> str:
    """The name of a leaf of ``(args, kwargs, results)``, by its path, as jax names it.

    Args:
      path: its path.
      names: of the positional arguments, as far as they are known.

    Example:
      >>> (first, _), (second, _) = jax.tree.leaves_with_path((({"w": 1},), {"rate": 2}))
      >>> argument_name(first), argument_name(first, ["state"]), argument_name(second)
      ("argument 0['w']", "state['w']", 'rate')
    """
    if path[0].idx == 2:
        return f"result{jax.tree_util.keystr(tuple(path[1:]))}"
    which = positional_name(path[1].idx, names) if path[0].idx == 0 else path[1].key
    return f"{which}{jax.tree_util.keystr(tuple(path[2:]))}"


def positional_name(i: int, names: Sequence[str]) -> str:
    """The name of an argument, by its position."""
    return names[i] if i < len(names) else f"argument {i}"


def unwrap(tree: Any) -> Any:
    """Undoes `wrap`: static leaves are leaves again."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_static)
    return jax.tree.unflatten(treedef, [leaf.value if is_static(leaf) else leaf for leaf in leaves])


def is_static(leaf: Any) -> bool:
    """Whether a leaf counts as structure; for ``is_leaf``."""
    return isinstance(leaf, StaticLeaf)


def with_static(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    positions: Collection[int],
    names: Collection[str],
    called: Sequence[str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wraps whole arguments as structure, by position and by name.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      positions: of the static arguments.
      names: of the static keyword arguments.
      called: names of the positional arguments; for messages.
    """

    def static(name: str, value: Any) -> Any:
        return value if is_static(value) else StaticLeaf(value, lambda: name)

    return (
        tuple(static(positional_name(i, called), arg) if i in positions else arg for i, arg in enumerate(args)),
        {name: static(name, arg) if name in names else arg for name, arg in kwargs.items()},
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call.

    Attributes:
      leaves: the arrays, those of all positional arguments and then of the keyword arguments; a sharded batch is one.
      treedef: structure of ``(args, kwargs)``, static leaves included.
      axes: the dimension of each array that carries examples, or None.
      size: the number of examples; for batches of several sizes, the number of parts of the largest.
      batches: the sizes of the batches, ascending.
      parts: the number of parts into which each array's examples are divided (`common_parts`); None if it has none.
      names: of the positional arguments, as far as they are known.
    """

    leaves: list[Any]
    treedef: Any
    axes: list[int | None]
    size: int
    batches: tuple[int, ...]
    parts: list[int | None]
    names: Sequence[str] = ()

    @classmethod
    def from_arguments(
        cls, args: Sequence[Any], kwargs: dict[str, Any], in_axes: Any, names: Sequence[str], nodes: int
    ) -> Call:
        """Flattens the arguments of a call.

        Args:
          args: positional arguments; static ones may be wrapped already.
          kwargs: keyword arguments.
          in_axes: as for `vnode.virtualize`.
          names: of the step's positional parameters.
          nodes: the number of virtual nodes.

        Raises:
          BatchError: `in_axes` is no prefix of the arguments, or these do not make up a batch.
        """
        tree = wrap((tuple(args), kwargs), names=names)
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sharded_batch)
        leaves = [leaf for _, leaf in paths]
        axes = batch_axes(in_axes, tree[0], tree[1], names)
        sizes = batch_sizes(leaves, axes, paths, in_axes, names)
        batches = tuple(sorted({size for size in sizes if size is not None}))
        found = common_parts(batches, nodes)
        parts = [None if size is None else found[size] for size in sizes]
        return cls(leaves, treedef, axes, found[batches[-1]], batches, parts, names)

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other arrays in place of its own; static leaves are leaves again."""
        return unwrap(jax.tree.unflatten(self.treedef, leaves))

    def sizes_by_name(self) -> dict[str, int]:
        """The number of examples of each array that is divided, by the array's name."""
        paths = jax.tree.leaves_with_path(jax.tree.unflatten(self.treedef, range(len(self.leaves))))
        several = zip(paths, self.leaves, self.axes, strict=True)
        return {
            argument_name(path, self.names): leaf.size if is_sharded_batch(leaf) else np.shape(leaf)[axis]
            for (path, _), leaf, axis in several
            if axis is not None
        }

    def flat_function(self, fun: Callable[..., Any], output: OutputTree) -> Callable[..., list[Any]]:
        """The step as a function of flat arrays that returns arrays; `output` records the structure of its result."""

        def on_trees(*args: Any, **kwargs: Any) -> list[Any]:
            args, kwargs = unwrap((args, kwargs))
            watch = MutationCheck(args, kwargs, self.names)
            out = fun(*args, **kwargs)
            watch.check(out)
            return output.flatten(out)

        def run(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(self.treedef, leaves)
            return on_trees(*args, **kwargs)

        return with_trees(run, functools.update_wrapper(on_trees, fun), self.treedef)


class OutputTree:
    """The structure of a step's result, recorded by one trace of it."""

    def __init__(self) -> None:
        self.treedef: Any = None

    def flatten(self, out: Any) -> list[Any]:
        """The arrays of the step's result; records the structure."""
        leaves, self.treedef = jax.tree.flatten(wrap(out, 2))
        return leaves

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The step's result from its arrays; other leaves count as structure."""
        return jax.tree.unflatten(self.treedef, arrays)


def has_static(tree: Any) -> bool:
    """Whether any leaf of a pytree counts as structure."""
    return any(map(is_static, jax.tree.leaves(tree, is_leaf=is_static)))


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of arguments; a sharded batch is one."""
    return jax.tree.leaves(tree, is_leaf=is_sharded_batch)


def axes_by_argument(
    in_axes: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    """The entry of `in_axes` for each positional argument, and for keyword arguments by name.

    Args:
      in_axes: as for `vnode.virtualize`.
      args: positional arguments.
      kwargs: keyword arguments.
      names: of the step's positional parameters.

    Raises:
      BatchError: it names arguments that the call does not have.

    Example:
      >>> axes_by_argument((None, 0), ["state"], {"batch": "examples"}, ["state", "batch"])
      ([None], {'batch': 0})
      >>> axes_by_argument({"batch": 0}, ["state", "examples"], {}, ["state", "batch"])
      ([None, 0], {})
    """
    if isinstance(in_axes, int):
        return [in_axes] * len(args), {}
    if isinstance(in_axes, Mapping):
        positional = dict(zip(names, range(len(args)), strict=False))
        missing = [name for name in in_axes if name not in kwargs and name not in positional]
        if missing:
            raise BatchError(
                f"in_axes names {', '.join(map(repr, missing))}, which the call does not have.",
                facts=[f"in_axes = {in_axes!r}", *argument_facts(args, kwargs)],
                remedies=["pass it, by position or by name", "name the arguments of the step that carry examples"],
            )
        found = [in_axes.get(name) for name in names[: len(args)]]
        found += [None] * (len(args) - len(found))
        return found, {name: in_axes[name] for name in kwargs if name in in_axes and name not in positional}
    if not isinstance(in_axes, tuple | list):
        raise BatchError(
            f"in_axes must be an integer, a tuple with one entry per argument, or map names to these, not {in_axes!r}"
        )
    later = range(len(args), len(in_axes))
    named = {names[i]: in_axes[i] for i in later if i < len(names) and names[i] in kwargs}
    if len(in_axes) > len(args) and any(i >= len(names) or names[i] not in kwargs for i in later):
        given = f"{len(args)} positional argument{'' if len(args) == 1 else 's'}"
        raise BatchError(
            f"in_axes has {len(in_axes)} entries, the call {given}.",
            facts=[f"in_axes = {in_axes!r}", *argument_facts((), kwargs)],
            remedies=[
                "name the arguments that carry examples, in_axes={'batch': 0}: others may then be left out",
                "shorten in_axes",
            ],
        )
    return [*in_axes[: len(args)], *[None] * (len(args) - len(in_axes))], named


def argument_facts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments of a call, as facts of a message."""
    by_position = [f"by position: {len(args)}"] if args else []
    return [*by_position, *([f"by keyword: {', '.join(kwargs)}"] if kwargs else [])]


def batch_axes(in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> list[int | None]:
    """One axis, or None, for every leaf of the arguments.

    Raises:
      BatchError: `in_axes` is no prefix of the arguments.
    """
    positional, named = axes_by_argument(in_axes, args, kwargs, names)
    axes: list[int | None] = []
    every = [(positional_name(i, names), f"in_axes[{i}]", arg, positional[i]) for i, arg in enumerate(args)]
    in_order = sorted(kwargs)  # as pytrees have them
    every += [(k, f"in_axes[{k!r}]", kwargs[k], named.get(k)) for k in in_order]
    for name, called, arg, entry in every:

        def spread(axis: Any, subtree: Any) -> list[int | None]:
            return [axis] * len(leaves_of(subtree))

        try:
            parts = jax.tree.map(spread, entry, arg, is_leaf=lambda leaf: leaf is None)
        except ValueError:
            raise BatchError(
                f"{called} does not fit {name}: it is not a pytree prefix of it.",
                facts=[
                    f"{called} = {entry!r}",
                    f"{name} has the leaves {', '.join(map(leaf_name, jax.tree.leaves_with_path(arg)))}",
                ],
                remedies=["give an integer, None, or a pytree prefix of the argument, as in jax.vmap"],
            ) from None
        axes += jax.tree.leaves(parts, is_leaf=lambda leaf: leaf is None)
    return axes


def in_axes_hints(in_axes: Any, paths: Sequence[Any], names: Sequence[str]) -> list[str]:
    """A hint at the `in_axes` that the user most likely needs, if the default was used.

    Args:
      in_axes: the default, or another value, for which there is no hint.
      paths: of all leaves of ``(args, kwargs)``.
      names: of the positional arguments.
    """
    count = max((path[1].idx + 1 for path, _ in paths if path[0].idx == 0), default=0)
    if in_axes not in ((None, 0), [None, 0]) or count < 2:
        return []
    if count == 2:
        return [f"in_axes=(0, None) if {positional_name(0, names)} holds the examples: by default the second one does"]
    called = ", ".join(positional_name(i, names) for i in range(count))
    axes = (*[None] * (count - 1), 0)
    return [f"in_axes={axes} for {called}: by default the second argument holds the examples, and no other"]


def possible_axes(
    in_axes: Any, path: Any, leaves: Sequence[Any], axes: Sequence[int | None], paths: Sequence[Any]
) -> list[str]:
    """The `in_axes` that the leaves of an argument allow, if it is a dict of arrays.

    Args:
      in_axes: the value that does not fit.
      path: of a leaf of the argument.
      leaves: all leaves of ``(args, kwargs)``.
      axes: their axes by `in_axes`.
      paths: of all leaves.
    """
    if not isinstance(in_axes, tuple) or path[0].idx != 0 or path[1].idx >= len(in_axes):
        return []
    found: dict[Any, int | None] = {}
    for (other, _), leaf, axis in zip(paths, leaves, axes, strict=True):
        if other[:2] == path[:2]:
            if len(other) != 3 or not isinstance(other[2], jax.tree_util.DictKey):
                return []
            fits = axis is None or (isinstance(axis, int) and -np.ndim(leaf) <= axis < np.ndim(leaf))
            found[other[2].key] = axis if fits else 0 if np.ndim(leaf) else None
    given = (*in_axes[: path[1].idx], found, *in_axes[path[1].idx + 1 :])
    return [f"in_axes={given}"]


def leaf_name(entry: tuple[Any, Any]) -> str:
    return jax.tree_util.keystr(entry[0]) or "itself"


def batch_sizes(
    leaves: Sequence[Any], axes: Sequence[int | None], paths: Sequence[Any], in_axes: Any, names: Sequence[str]
) -> list[int | None]:
    """The number of examples that each array carries; None for an unbatched array.

    Raises:
      BatchError: no array is batched, or a batch is empty.
    """
    sizes: dict[str, int] = {}
    found: list[int | None] = []
    for (path, _), leaf, axis in zip(paths, leaves, axes, strict=True):
        if axis is None:
            found.append(None)
            continue
        name, shape = argument_name(path, names), np.shape(leaf)
        listed = isinstance(path[-1], jax.tree_util.SequenceKey) and len(path) > 2
        if not isinstance(axis, int) or isinstance(axis, bool) or not -len(shape) <= axis < len(shape):
            raise BatchError(
                f"in_axes names dimension {axis!r}, counted from 0, of an argument that has "
                f"{several(len(shape), 'dimension')}.",
                facts=[f"{name}: shape {tuple(shape)}", f"in_axes = {in_axes!r}"],
                remedies=[
                    *(["make an array of it, np.asarray(...): a list is a pytree of its elements"] if listed else []),
                    *possible_axes(in_axes, path, leaves, axes, paths),
                    *in_axes_hints(in_axes, paths, names),
                    "use None for arguments that are not split, such as in_axes=(None, None, 0)",
                ],
            )
        sizes[f"{name}: shape {tuple(shape)}, dimension {axis}"] = shape[axis]
        found.append(shape[axis])
    if not sizes:
        raise BatchError(
            "no argument is batched: there is nothing to split.",
            facts=[f"arrays in the call: {len(leaves)}"],
            remedies=[
                "say with in_axes which arguments carry examples, e.g. in_axes=(None, 0)",
                "check that the batched arguments hold arrays: an empty dictionary has none",
                "an argument that is passed by keyword is split if in_axes names it: in_axes={'batch': 0}",
            ],
        )
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        raise BatchError(
            "the batch is empty.",
            facts=empty,
            remedies=["skip empty batches before calling the step", "check which dimension in_axes names"],
        )
    return found


def common_parts(sizes: Sequence[int], nodes: int) -> dict[int, int]:
    """The number of parts of each batch, by its size.

    Two batches get a common number of parts if at least half of the nodes then have examples, and the padded size is at
    most twice that of separate batches. The largest batch comes first. A third batch joins them only if all nodes, or
    as many as it has examples, then have some.

    Args:
      sizes: of the batches, distinct, ascending.
      nodes: the number of virtual nodes.

    Example:
      >>> common_parts([12, 36], 4), common_parts([10, 33], 4), common_parts([10, 12, 36], 4)
      ({36: 12, 12: 12}, {33: 33, 10: 10}, {36: 12, 12: 12, 10: 10})
    """
    left, found = list(sizes), dict[int, int]()
    while left:
        group = [left.pop()]
        for size in reversed(list(left)):
            several = [*group, size]
            parts = math.gcd(*several)
            together = sum(-(-parts // nodes) * nodes * (each // parts) for each in several)
            alone = sum(-(-each // nodes) * nodes for each in several)
            enough = parts >= min(nodes, size) or (len(group) == 1 and 2 * parts >= max(nodes, 4))
            if enough and together <= 2 * alone:
                group = several
                left.remove(size)
        found.update((size, math.gcd(*group)) for size in group)
    return found
