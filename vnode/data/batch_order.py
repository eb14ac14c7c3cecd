"""Step number and seed -> the examples of the step's batch.

Knows numbers of examples. Must not know the examples, nor placements.

The order within an epoch sorts the examples by random numbers of NumPy's Philox generator (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), keyed by seed and epoch. NumPy promises the raw numbers of a bit
generator for all time (NEP 19), which it does not for `Generator.permutation`; and a key needs no history, so any
step's examples are found without those before it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from vnode.errors import BatchError

LASTS = ("wrap", "drop", "keep")

LARGEST_SHUFFLE = 1 << 33
"""The most examples that are shuffled in memory (8 bytes each)."""


@functools.lru_cache(maxsize=4)
def permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the examples in an epoch, int64; the same in every version of NumPy."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(examples)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order


@dataclasses.dataclass(frozen=True)
class Order:
    """The examples in the batch of each step.

    Args:
      examples: the number of examples.
      batch_size: examples of a batch.
      seed: seed of the order, at least 0.
      shuffle: a new random order in each epoch; else the examples' own.
      last: treatment of the ``examples % batch_size`` examples at the end of an epoch. ``"wrap"``: the batch is filled
        with the first examples of the next epoch, so that each example is used once per epoch. ``"drop"``: they are
        left out, other ones in every epoch if the examples are shuffled; `dropped` is their number. ``"keep"``: the
        last batch of an epoch is smaller, for evaluation: it is another program.

    Raises:
      ValueError: an option is not one of those named above.
      BatchError: there are no examples, or fewer than a batch takes.

    Example:
      >>> import numpy as np
      >>> from vnode.data import Order
      >>> order = Order(examples=10, batch_size=4, shuffle=False)
      >>> [order.rows(step).tolist() for step in range(3)]
      [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
      >>> Order(examples=10, batch_size=4, shuffle=False, last="drop").rows(2).tolist()
      [0, 1, 2, 3]
    """

    examples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    last: str = "wrap"

    def __post_init__(self) -> None:
        if self.last not in LASTS:
            raise ValueError(f"last must be one of {', '.join(LASTS)}, not {self.last!r}")
        if not is_whole(self.batch_size) or self.batch_size < 1:
            raise ValueError(f"batch_size must be a whole number, at least 1, not {self.batch_size!r}")
        if not is_whole(self.seed) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, not {self.seed!r}")
        if not isinstance(self.shuffle, bool | np.bool_):
            raise ValueError(f"shuffle must be True or False, not {self.shuffle!r}")
        for name in ("batch_size", "seed", "shuffle"):  # Python's types, which checkpoints can store
            value = getattr(self, name)
            object.__setattr__(self, name, bool(value) if name == "shuffle" else int(value))
        if self.examples < self.batch_size:
            raise BatchError(
                f"{self.examples} examples are too few for a batch of {self.batch_size}.",
                remedies=[f"batch_size={self.examples}, or less"] if self.examples else ["check the path"],
            )
        if self.shuffle and self.examples > LARGEST_SHUFFLE:
            raise BatchError(
                f"an order of {self.examples} examples does not fit into memory.",
                remedies=["shuffle=False, and a data set that shuffles itself"],
            )

    @property
    def dropped(self) -> int:
        """The number of examples that each epoch leaves out."""
        return self.examples % self.batch_size if self.last == "drop" else 0

    @property
    def steps_per_epoch(self) -> float:
        """The number of batches per epoch; an integer unless the last batch is filled from the next epoch."""
        batches = (self.examples - self.dropped) / self.batch_size
        return float(-(-self.examples // self.batch_size)) if self.last == "keep" else batches

    def positions(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """For each example of a step's batch the epoch, and the position in its order; int64[batch_size]."""
        used = self.examples - self.dropped
        if self.last == "keep":
            epoch, batch = divmod(step, int(self.steps_per_epoch))
            offsets = np.arange(batch * self.batch_size, min((batch + 1) * self.batch_size, used))
            epochs = np.full_like(offsets, epoch)
        else:
            epochs, offsets = np.divmod(step * self.batch_size + np.arange(self.batch_size), used)
        if self.shuffle:
            rows = np.empty_like(offsets)
            for epoch in np.unique(epochs):
                here = epochs == epoch
                rows[here] = permutation(self.examples, self.seed, int(epoch))[offsets[here]]
            offsets = rows
        return epochs, offsets

    def rows(self, step: int) -> np.ndarray:
        """The numbers of the examples in a step's batch, int64[batch_size]."""
        return self.positions(step)[1]


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, and not a boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
