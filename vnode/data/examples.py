"""Data sets -> examples by number: from arrays, or from records one by one.

Knows arrays and sequences on the host. Must not know the order of examples, batches, nor placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from vnode.data.forms import check_dtypes, check_foreign, check_shapes, check_structures, host_array
from vnode.data.source import sizes
from vnode.errors import BatchError, limit_lines
from vnode.placement.leaves import is_foreign_array, is_number


class Examples(Protocol):
    """A source of examples: it has a length, and returns examples by number.

    A class whose ``by_row`` is true reads every example by itself. If it is not, `vnode.data.Batches` compares
    the form of the result with that of a single example.
    """

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def take(self, rows: np.ndarray) -> Any:
        """The examples with these numbers (int64), as a pytree of arrays with one row for each.

        The arrays are copied, so the next call may fill them again.
        """
        ...


class Arrays:
    """Examples in memory (or memory-mapped): a pytree of arrays whose first dimension counts them.

    Raises:
      BatchError: the arrays disagree about how many examples there are, or cannot be on devices.
    """

    by_row = True

    def __init__(self, tree: Any) -> None:
        leaves = jax.tree.leaves_with_path(tree)
        lengths = {np.shape(leaf)[:1] for _, leaf in leaves}
        if len(lengths) != 1 or () in lengths:
            lists = any(is_number(leaf) for _, leaf in leaves)
            raise BatchError(
                "the arrays of a data set must be equally long: their first dimension counts the examples.",
                facts=limit_lines(sizes(tree)) or ["there is no array"],
                remedies=[
                    *(["make arrays of lists, np.asarray(...): a list is a pytree of its elements"] if lists else []),
                    "leave out arrays that do not count examples",
                    "check the order of dimensions",
                ],
            )
        self.tree = jax.tree_util.tree_map_with_path(lambda path, leaf: host_array(path, leaf, "the data set"), tree)
        self.count = next(iter(lengths))[0]

    def __len__(self) -> int:
        return self.count

    def take(self, rows: np.ndarray) -> Any:
        return jax.tree.map(lambda leaf: leaf[rows], self.tree)


class Records:
    """Examples of a sequence: ``len(sequence)``, and ``sequence[i]``, a pytree, for one of them."""

    by_row = True

    def __init__(self, sequence: Any) -> None:
        self.sequence = sequence

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, rows: np.ndarray) -> Any:
        return stack_examples([self.sequence[int(row)] for row in rows])


def stack_examples(examples: Sequence[Any]) -> Any:
    """Stacks examples, pytrees of equal shapes and dtypes, to one pytree of arrays with a row for each.

    Raises:
      BatchError: their structures, shapes or dtypes differ, or a leaf cannot be on devices.
    """

    def stack(path: Any, *leaves: Any) -> np.ndarray:
        first = leaves[0]
        if type(first) is np.ndarray and first.dtype.isnative:
            dtype, shape = first.dtype, first.shape
            if all(type(leaf) is np.ndarray and leaf.dtype == dtype and leaf.shape == shape for leaf in leaves):
                return np.stack([host_array(path, first, "an example"), *leaves[1:]])
        arrays = [host_array(path, in_native_order(leaf), "an example") for leaf in leaves]
        check_shapes(path, (array.shape for array in arrays))
        check_dtypes(path, (array.dtype for array in arrays))
        return np.stack(arrays)

    check_structures(map(jax.tree.structure, examples))
    return jax.tree_util.tree_map_with_path(stack, *examples)


def in_native_order(leaf: Any) -> Any:
    """An array with this machine's order of bytes; other leaves stay."""
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.isnative:
        return leaf.astype(leaf.dtype.newbyteorder("="))
    return leaf


def examples_of(data: Any) -> Examples:
    """Converts a data set to `Examples`.

    Args:
      data: something with ``take`` and a length; a dictionary, a tuple or an array: a pytree of arrays; any other
        sequence: its elements are the examples.

    Raises:
      BatchError: it is none of these.
    """
    if isinstance(data, np.ndarray | jax.Array | Mapping | tuple):
        return Arrays(data)
    if hasattr(data, "take") and hasattr(data, "__len__"):
        if is_foreign_array(data):  # the method of that name may take other arguments
            try:
                data.take(np.zeros(1, np.int64))
            except Exception:
                check_foreign((), data, "the data set")
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Records(data)
    raise BatchError(
        f"{type(data).__name__} is not a data set: it must give examples by number.",
        remedies=[
            "give a pytree of arrays, a sequence of examples, or an object with __len__ and take(rows)",
            "read a stream into memory, or wrap it in a sequence, first",
        ],
    )
