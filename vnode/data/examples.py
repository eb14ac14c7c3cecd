"""Data sets -> examples by number: from arrays, or from records one by one.

Knows arrays and sequences on the host. Must not know the order of examples, batches, nor placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from vnode.data.source import check_dtype
from vnode.errors import BatchError


class Examples(Protocol):
    """A source of examples: it has a length, and returns examples by number."""

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
      BatchError: the arrays disagree about how many examples there are.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        sizes = {
            f"{jax.tree_util.keystr(path)}: shape {np.shape(leaf)}": np.shape(leaf)[:1]
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        if len(set(sizes.values())) != 1 or () in sizes.values():
            raise BatchError(
                "the arrays of a data set must be equally long: their first dimension counts the examples.",
                facts=list(sizes) or ["there is no array"],
                remedies=["leave out arrays that do not count examples", "check the order of dimensions"],
            )
        for path, leaf in jax.tree.leaves_with_path(tree):
            check_dtype(path, leaf, "the data set")
        self.count = next(iter(sizes.values()))[0]

    def __len__(self) -> int:
        return self.count

    def take(self, rows: np.ndarray) -> Any:
        return jax.tree.map(lambda leaf: leaf[rows], self.tree)


class Records:
    """Examples of a sequence: ``len(sequence)``, and ``sequence[i]``, a pytree, for one of them."""

    def __init__(self, sequence: Any) -> None:
        self.sequence = sequence

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, rows: np.ndarray) -> Any:
        return stack_examples([self.sequence[int(row)] for row in rows])


def stack_examples(examples: Sequence[Any]) -> Any:
    """Stacks examples, pytrees of equal shapes, to one pytree of arrays with a row for each.

    Raises:
      BatchError: their shapes or structures differ.
    """

    def stack(path: Any, *leaves: Any) -> np.ndarray:
        shapes = sorted({np.shape(leaf) for leaf in leaves})
        if len(shapes) > 1:
            raise BatchError(
                f"examples of different shapes do not make up a batch: {jax.tree_util.keystr(path) or 'the example'}.",
                facts=[f"shapes {', '.join(map(str, shapes[:4]))}"],
                remedies=["pad to one length, with a mask of the real entries"],
            )
        array = np.stack(leaves)
        check_dtype(path, array, "an example")
        return array

    structures = {jax.tree.structure(example) for example in examples}
    if len(structures) > 1:
        raise BatchError(
            "examples of different structures do not make up a batch.", facts=sorted(map(str, structures))[:4]
        )
    return jax.tree_util.tree_map_with_path(stack, *examples)


def examples_of(data: Any) -> Examples:
    """Converts a data set to `Examples`.

    Args:
      data: something with ``take`` and a length; a dictionary, a tuple or an array: a pytree of arrays; any other
        sequence: its elements are the examples.

    Raises:
      BatchError: it is none of these.
    """
    if isinstance(data, np.ndarray | jax.Array | Mapping | tuple):
        return Arrays(jax.tree.map(np.asarray, data) if not isinstance(data, np.ndarray) else data)
    if hasattr(data, "take") and hasattr(data, "__len__"):
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
