"""Data of a loop (`Batches`, function, sequence) -> a loader of batches by step number.

Knows forms of data, and arrays on the host. Must not know steps, nor threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vnode.data.forms import check_array, check_foreign
from vnode.errors import BatchError, VnodeError, limit_lines
from vnode.placement.placement import Placement

SAMPLE = 16
"""The number of examples, and of batches, whose values a fingerprint covers."""


def loader(data: Any, steps: int) -> Callable[[int, Placement], Any]:
    """Makes a function that loads the batch of a step on a placement.

    Batches that are the data's own host arrays are copied, so that data may reuse a buffer.

    Args:
      data: an object with ``load(step, placement)``, a function of the step number, a sequence, or an object with
        ``batch(step)``.
      steps: the number of batches that are needed, from number 0 on.

    Raises:
      VnodeError: the data have no batches by step number, or too few.
    """
    if hasattr(data, "load") and not isinstance(data, np.ndarray):
        return data.load
    if callable(data):
        return lambda step, placement: own_copy(data(step), f"the batch of step {step}")
    if isinstance(data, Mapping | tuple | np.ndarray | jax.Array):
        kind = "jax.Array" if isinstance(data, jax.Array) else type(data).__name__
        raise VnodeError(
            f"the data of a run must give batches by step number; this is one {kind}.",
            facts=[f"it has the arrays {', '.join(sizes(data)[:8])}"],
            remedies=[
                "vnode.data.Batches(data, batch_size=...)",
                "a list, or a function of the step number",
                "if it is the state, the order is run(step, state, data)",
            ],
        )
    if hasattr(data, "__getitem__"):  # before `batch`, which means something else in a `grain.MapDataset`
        if isinstance(data, Sequence) and len(data) < steps:
            raise VnodeError(
                f"the data are too short: they have batches for {len(data)} of {steps} steps.",
                remedies=[f"steps={len(data)}", "lambda step: data[step % len(data)] to use them again"],
            )
        return lambda step, placement: own_copy(data[step], f"the batch of step {step}")
    if hasattr(data, "batch"):
        return lambda step, placement: own_copy(data.batch(step), f"the batch of step {step}")
    raise VnodeError(
        f"{type(data).__name__} has no batches by step number.",
        facts=["after a failure, or in another run, the same steps are needed again"],
        remedies=["vnode.data.Batches(...) for a data set", "or a function of the step number"],
    )


class Cycle:
    """Repeats the batches of a sequence in order.

    Args:
      data: the sequence.

    Example:
      >>> Cycle(["a", "b", "c"]).batch(4)
      'b'
    """

    def __init__(self, data: Sequence[Any]) -> None:
        self.data = data

    def batch(self, step: int) -> Any:
        """The batch of a step."""
        return self.data[step % len(self.data)]

    def fingerprint(self) -> str | None:
        """The sequence's fingerprint of its examples; None if it has none."""
        return fingerprint(self.data)


def sizes(tree: Any) -> list[str]:
    """The arrays of a pytree, each with its shape."""
    return [
        f"{jax.tree_util.keystr(path) or 'itself'}: shape {np.shape(leaf)}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def check_rows(tree: Any, count: int, itself: str, problem: str, remedy: str) -> None:
    """Raises unless every array has `count` rows; `itself` names a tree that is a single array.

    Raises:
      BatchError: an array has another number of rows, or there is no array.
    """
    leaves = jax.tree.leaves_with_path(tree)
    wrong = [
        f"{jax.tree_util.keystr(path) or itself}: shape {np.shape(leaf)}"
        for path, leaf in leaves
        if np.shape(leaf)[:1] != (count,)
    ]
    if wrong or not leaves:
        raise BatchError(problem, facts=limit_lines(wrong) or ["there is no array"], remedies=[remedy])


def own_copy(batch: Any, what: str) -> Any:
    """Copies a batch's host arrays, so that nobody else writes to them.

    Otherwise the arrays of a waiting or running batch would change when the data refill the same buffer. jax on a CPU
    may use an array's memory without a copy.

    Args:
      batch: a pytree.
      what: the batch's name in messages.

    Raises:
      BatchError: a leaf is an array that jax cannot hold: of objects, which ragged lists become, of text, with a mask,
        or of another library.
    """

    def copy_leaf(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            check_foreign(path, leaf, what)
            return leaf
        check_array(path, leaf, what)
        return np.array(leaf)

    return jax.tree_util.tree_map_with_path(copy_leaf, batch)


def description(data: Any) -> dict[str, Any] | None:
    """The data's description of their order, as JSON; None if they have none."""
    return data.describe() if hasattr(data, "describe") else None


def fingerprint(data: Any) -> str | None:
    """The data's fingerprint of their examples; None if they have none.

    For a list it has a checksum of each of its first batches, so that the list may grow: see `same_examples`.
    """
    if isinstance(data, list):
        return " ".join(checksum(batch) for batch in data[:SAMPLE]) if all(map(is_local_batch, data[:SAMPLE])) else None
    return data.fingerprint() if hasattr(data, "fingerprint") else None


def same_examples(before: str | None, now: str | None) -> bool:
    """Whether two fingerprints may be of the same examples; only entries that both have are compared.

    >>> same_examples("5d0b 77aa", "5d0b 77aa 90cc"), same_examples("5d0b", "77aa"), same_examples(None, "77aa")
    (True, False, True)
    """
    return all(a == b for a, b in zip((before or "").split(), (now or "").split(), strict=False))


def checksum(examples: Any, most: int = SAMPLE) -> str:
    """A checksum (CRC-32) of the values of a pytree, with their dtypes and shapes; of at most `most` rows.

    >>> checksum({"x": np.zeros(2)}) == checksum({"x": np.ones(2)})
    False
    """
    found = 0
    for path, leaf in jax.tree.leaves_with_path(examples):
        array = np.asarray(leaf)
        name = f"{jax.tree_util.keystr(path)} {array.dtype}{array.shape}"
        some = array.ndim > 0 and len(array) > most
        rows = array[spaced(len(array), most)] if some else array
        values = repr(leaf).encode() if array.dtype.hasobject else np.ascontiguousarray(rows).tobytes()
        found = zlib.crc32(values, zlib.crc32(name.encode(), found))
    return f"{found:08x}"


def spaced(count: int, most: int) -> np.ndarray:
    """Numbers below `count`, at most `most`, equally spaced from the first to the last; in integers, as counts may be.

    >>> spaced(10, 4).tolist(), spaced(1, 4).tolist(), spaced(2**63 - 1, 2).tolist()
    ([0, 3, 6, 9], [0], [0, 9223372036854775806])
    """
    chosen = min(count, most)
    return np.array([i * (count - 1) // max(chosen - 1, 1) for i in range(chosen)], np.int64)


def is_local_batch(batch: Any) -> bool:
    """Whether this process can read all of a batch."""
    return not any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(batch))
