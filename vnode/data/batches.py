"""The batches of a data set, by step number.

Knows examples, their order, and how a batch is loaded. Must not know steps, nor threads (`vnode.data.prefetch` does).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import numpy as np

from vnode.data.batch_order import Order
from vnode.data.examples import Arrays, Records, examples_of
from vnode.data.forms import Parts
from vnode.data.loading import load_batch
from vnode.data.source import SAMPLE, check_rows, checksum, own_copy, spaced
from vnode.placement.placement import Placement

logger = logging.getLogger("vnode")

MOST_SAMPLES, MOST_BYTES = 4096, 16 << 20
"""The most examples in memory, and the most bytes of them, whose checksum processes compare."""


class Batches:
    """The batches of a data set, by step number; dimension 0 counts the examples.

    Args:
      data: the examples: a pytree of arrays, a sequence of examples, something with ``__len__`` and ``take(rows)``, or
        a data set made by `vnode.grain.dataset`.
      batch_size: examples of a batch.
      seed: of the order; at least 0.
      shuffle: a new random order in each epoch; else the data's own.
      last: ``"wrap"``, ``"drop"`` or ``"keep"``: what becomes of examples that do not fill a batch at the end of an
        epoch, see `Order`.

    Raises:
      BatchError: the data are no data set, or hold too few examples.
      ValueError: an option is not one of those named above.

    Example:
      >>> import jax, numpy as np, vnode
      >>> batches = vnode.data.Batches({"x": np.arange(10)}, batch_size=4, seed=1)
      >>> batches.batch(7)["x"].tolist() == batches.batch(7)["x"].tolist()
      True
      >>> placed = batches.load(7, vnode.Placement(4, jax.devices()[:1]))
      >>> placed["x"].shape
      (4,)
    """

    def __init__(self, data: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True, last: str = "wrap") -> None:
        self.examples = examples_of(data)
        self.order = Order(len(self.examples), batch_size, seed, shuffle, last)
        self.reads_others = True
        """Whether this process can read the examples of others, as far as it knows."""
        self.takes_any_rows = getattr(self.examples, "by_row", False)
        """Whether the form of examples is known not to depend on the rows that are read at once."""

    def __repr__(self) -> str:
        options = dataclasses.asdict(self.order)
        return f"Batches({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def describe(self) -> dict[str, Any]:
        """The options that determine the batches besides step number and examples, as JSON values."""
        return dataclasses.asdict(self.order)

    def fingerprint(self) -> str:
        """A checksum (CRC-32) of the values of a fixed sample of the examples, with their dtypes and shapes."""
        return self.checksum(SAMPLE)

    def digest(self) -> str:
        """As `fingerprint`, over more examples if they are in memory."""
        if not isinstance(self.examples, Arrays):
            return self.checksum(SAMPLE)
        row = sum(leaf[:1].nbytes for leaf in jax.tree.leaves(self.examples.tree))
        return self.checksum(max(SAMPLE, min(MOST_SAMPLES, MOST_BYTES // max(row, 1))))

    def checksum(self, most: int) -> str:
        """A checksum (CRC-32) of the values of `most` examples, with their dtypes and shapes."""
        return checksum(self.take(spaced(self.order.examples, most)), most)

    def batch(self, step: int) -> Any:
        """The batch of a step on the host, a pytree of NumPy arrays."""
        return self.take(self.rows(step))

    def load(self, step: int, placement: Placement) -> Any:
        """The batch of a step on a placement's devices.

        Args:
          step: the step number.
          placement: the placement of the step's nodes.

        Returns:
          A pytree. Every device is given the examples of its nodes. Only those are read for it in this process, and at
          times one more (`read_first`). If the shares are equal, the leaves are global arrays; otherwise
          `vnode.data.ShardedBatch`, which a step on this placement takes as they are.

        Raises:
          BatchError: the examples have different structures, dtypes or shapes; or those that ``take`` returns depend on
            the rows that it is given at once.
        """
        rows, parts = self.rows(step), Parts()
        self.read_first(rows, placement.local_examples(len(rows)), parts)

        def take(positions: np.ndarray) -> Any:
            if len(positions):
                part = self.take(rows[positions])
                parts.check(part)
                return part
            return jax.tree.map(lambda leaf: np.asarray(leaf)[:0], self.take(rows[:1]))

        return load_batch(len(rows), placement, take)

    def read_first(self, rows: np.ndarray, own: np.ndarray, parts: Parts) -> None:
        """Reads an example by itself, with which those that this process reads must be compared.

        ``take`` may depend on the rows that it is given at once, and so on the number of devices: the first batch
        tells. Records may differ, and another process may read others. Then it is the first one of the batch, so that
        all processes have the error of one that reads all of them. Examples that cannot be read so are not compared.

        Args:
          rows: the batch's example numbers.
          own: the positions in `rows` of those that this process reads.
          parts: where to put it.
        """
        if not len(own) or isinstance(self.examples, Arrays):
            return
        other = own[0] > 0 and self.reads_others
        if not (other if self.takes_any_rows else other or len(own) > 1):
            return
        try:
            first = self.take(rows[:1] if other else rows[own[:1]])
        except Exception as error:
            self.reads_others = False
            logger.info(
                "examples of a batch are compared among themselves only, as one cannot be read alone: %s", error
            )
        else:
            parts.check(first)
        if not getattr(self.examples, "by_row", False):
            self.takes_any_rows, self.reads_others = True, False

    def rows(self, step: int) -> np.ndarray:
        """The example numbers that are requested from the data, int64[batch_size]."""
        epochs, rows = self.order.positions(step)
        if getattr(self.examples, "endless", False):  # example i of epoch e has the number e * length + i
            rows = epochs * self.order.examples + rows
        return rows

    def take(self, rows: np.ndarray) -> Any:
        """Reads examples; checks that there is a row for each.

        Raises:
          BatchError: there is not.
        """
        taken = self.examples.take(rows)
        check_rows(
            taken,
            len(rows),
            "the result",
            f"asked for {len(rows)} examples, the data gave something else.",
            "take(rows) must return a pytree of arrays with one row for each of rows",
        )
        return taken if isinstance(self.examples, Arrays | Records) else own_copy(taken, "what the data gave")
