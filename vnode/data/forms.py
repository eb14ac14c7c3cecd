"""Structures, dtypes and shapes of examples -> nothing, or the error of those that do not make up a batch.

Knows pytrees of host arrays. Must not know data sets, placements, nor the order of examples.

The parts of a batch are read one by one: example by example, or device by device. The same checks for both give the
same error whatever the number of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from vnode.errors import BatchError
from vnode.placement.leaves import CONVERT, foreign_array, is_foreign_array

SHOWN = 4
"""The most structures, dtypes or shapes that an error lists."""


class Parts:
    """Compares parts of one batch with the first of them.

    Example:
      >>> parts = Parts()
      >>> parts.check({"x": np.zeros((2, 3))}), parts.check({"x": np.zeros((5, 3))})
      (None, None)
      >>> parts.check({"x": np.zeros((5, 4))})
      Traceback (most recent call last):
      vnode.errors.BatchError: examples of different shapes do not make up a batch: ['x'].
        shapes (3,), (4,)
      What to do:
        - pad to one length, with a mask of the real entries
    """

    def __init__(self) -> None:
        self.first: Any = None

    def check(self, part: Any) -> None:
        """Raises unless a part, a pytree of arrays with a row for each example, has the first one's form.

        Raises:
          BatchError: its structure, a dtype, or the shape of a leaf's rows differs.
        """
        leaves, structure = jax.tree.flatten_with_path(part)
        forms = [(leaf.dtype, np.shape(leaf)[1:]) for _, leaf in leaves]
        if self.first is None:
            self.first = structure, forms
            return
        check_structures([self.first[0], structure])
        for (path, _), (dtype, shape), (other, another) in zip(leaves, self.first[1], forms, strict=True):
            check_shapes(path, [shape, another])
            check_dtypes(path, [dtype, other])


def check_structures(structures: Iterable[Any]) -> None:
    """Raises unless all examples, or parts of a batch, have one structure.

    Raises:
      BatchError: there are several.
    """
    found = {*structures}
    if len(found) > 1:
        raise BatchError(
            "examples of different structures do not make up a batch.",
            facts=[text if len(text) <= 300 else f"{text[:300]} ..." for text in sorted(map(str, found))[:SHOWN]],
            remedies=["give all examples the same fields: a value, and a mask, where one has none"],
        )


def check_shapes(path: Any, shapes: Iterable[tuple[int, ...]]) -> None:
    """Raises unless a leaf has one shape in all examples.

    Raises:
      BatchError: it has several.
    """
    found = sorted({*shapes})
    if len(found) > 1:
        raise BatchError(
            f"examples of different shapes do not make up a batch: {jax.tree_util.keystr(path) or 'the example'}.",
            facts=[f"shapes {', '.join(map(str, found[:SHOWN]))}"],
            remedies=["pad to one length, with a mask of the real entries"],
        )


def check_dtypes(path: Any, dtypes: Iterable[np.dtype]) -> None:
    """Raises unless a leaf has one dtype on devices in all examples.

    NumPy would promote them to a common one. Which dtypes meet depends on the rows that a device reads, and so would
    the dtype.

    Raises:
      BatchError: it has several.
    """
    found = {*dtypes}
    if len(found) > 1 and len({*map(jax.dtypes.canonicalize_dtype, found)}) > 1:
        raise BatchError(
            f"examples of different dtypes do not make up a batch: {jax.tree_util.keystr(path) or 'the example'}.",
            facts=[f"dtypes {', '.join(sorted(map(str, found))[:SHOWN])}"],
            remedies=["convert all of them to one dtype: np.float32(1) and np.float32(0.5) for 1 and 0.5"],
        )


def check_array(path: Any, leaf: Any, what: str) -> None:
    """Raises for an array that jax cannot hold.

    Args:
      path: the leaf's path in jax's form.
      leaf: the array.
      what: the name of the leaf's tree in messages.

    Raises:
      BatchError: it has a mask; or its dtype is that of objects, text, or other values that jax has not.
    """
    name = f"{jax.tree_util.keystr(path) or 'an array'} of {what}"
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise BatchError(
            f"{name} is a masked array, and jax has none: its mask would be lost.",
            facts=[f"shape {leaf.shape}"],
            remedies=["fill the gaps, x.filled(0), and give the step the mask, ~np.ma.getmaskarray(x), as an array"],
        )
    if is_jax_dtype(leaf.dtype):
        return
    facts, remedies = [f"shape {leaf.shape}"], ["leave it out of the batch, or turn it into numbers first"]
    if leaf.dtype.kind == "O":
        facts.append("arrays of unequal lengths become an array of objects")
        remedies = ["pad to one length, with a mask of the real entries"]
    elif leaf.dtype.names is not None:
        remedies = ["give a dictionary of its fields: {name: x[name] for name in x.dtype.names}"]
    elif leaf.dtype.kind in "iufc":
        native = leaf.dtype.newbyteorder("=")
        near = native if is_jax_dtype(native) else np.dtype(np.complex128 if leaf.dtype.kind == "c" else np.float64)
        remedies = [f"convert it: x.astype(np.{near})"]
    raise BatchError(
        f"{name} has dtype {leaf.dtype}, which is not for devices.",
        facts=facts,
        remedies=remedies,
    )


@functools.lru_cache(maxsize=64)
def is_jax_dtype(dtype: np.dtype) -> bool:
    """Whether jax has a dtype of NumPy.

    >>> is_jax_dtype(np.dtype("<f4")), is_jax_dtype(np.dtype(">f4"))
    (True, False)
    """
    try:
        jax.typeof(np.zeros((), dtype))
    except TypeError:
        return False
    return True


def check_foreign(path: Any, leaf: Any, what: str) -> None:
    """Raises for an array of another library.

    Args:
      path: the leaf's path in jax's form.
      leaf: any leaf.
      what: the name of the leaf's tree in messages.

    Raises:
      BatchError: it is one.
    """
    if is_foreign_array(leaf):
        name = jax.tree_util.keystr(path) or "an array"
        raise BatchError(
            foreign_array(f"{name} of {what}", leaf), facts=[f"shape {tuple(leaf.shape)}"], remedies=CONVERT
        )


def host_array(path: Any, leaf: Any, what: str) -> np.ndarray:
    """A leaf as an array of NumPy, without a copy if possible.

    Args:
      path: the leaf's path in jax's form.
      leaf: an array of any library, or a number.
      what: the name of the leaf's tree in messages.

    Raises:
      BatchError: it cannot be one that jax can hold.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        check_array(path, leaf, what)
    try:
        array = np.asarray(leaf)
    except Exception:
        check_foreign(path, leaf, what)
        raise
    check_array(path, array, what)
    return array
