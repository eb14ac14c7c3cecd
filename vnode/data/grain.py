"""grain's data sets as examples for `vnode.data.Batches`.

Knows grain's random-access interfaces. Must not know placements or steps.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vnode.data.examples import stack_examples
from vnode.errors import BatchError

try:
    import grain
except ImportError as error:
    raise ImportError("vnode.grain needs grain: pip install 'vnode[grain]'") from error

__all__ = ["Dataset", "dataset"]


def __dir__() -> list[str]:
    return __all__


class Dataset:
    """Examples of a grain data set; made by `dataset`."""

    by_row = True

    def __init__(self, source: Any, threads: int) -> None:
        self.source = source
        self.threads = threads
        self.endless = isinstance(source, grain.MapDataset)
        """A `MapDataset` has numbers for the examples of all epochs, and its random transforms depend on them."""

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: np.ndarray) -> Any:
        """The examples with these numbers.

        Raises:
          BatchError: the data set leaves some of them out.
        """
        numbers = rows.tolist()
        examples = list(self.pool.map(self.read, numbers) if self.threads > 1 else map(self.read, numbers))
        missing = [str(number) for number, example in zip(numbers, examples, strict=True) if example is None]
        if missing:
            raise BatchError(
                "a data set that leaves out examples cannot give batches by step number.",
                facts=[f"there is no example {', '.join(missing[:10])}"],
                remedies=["filter before training: keep a list of the numbers of the remaining examples"],
            )
        return stack_examples(examples)

    def read(self, number: int) -> Any:
        """One example."""
        return self.source[number]

    @functools.cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that read."""
        return ThreadPoolExecutor(self.threads, thread_name_prefix="vnode-grain")


def dataset(source: Any, *, threads: int = 16) -> Dataset:
    """A grain data set as examples for `vnode.data.Batches`.

    Args:
      source: a `grain.MapDataset`, or a random-access data source (``grain.sources``): anything with a length whose
        elements are found by number. Its elements are examples, not batches. A `MapDataset` may be shuffled by grain
        (then give `Batches` ``shuffle=False``) and have random transforms, which are drawn anew in each epoch.
      threads: the number of examples that are read concurrently.

    Returns:
      The examples.

    Raises:
      BatchError: elements cannot be read by number.

    Example:
      >>> import grain, vnode
      >>> source = grain.MapDataset.range(10).map(lambda x: {"x": x, "square": x * x})
      >>> batches = vnode.data.Batches(vnode.grain.dataset(source), batch_size=4, shuffle=False)
      >>> batches.batch(1)["square"].tolist()
      [16, 25, 36, 49]
    """
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise BatchError(
            f"{type(source).__name__} cannot find examples by number.",
            remedies=["give the MapDataset or data source before to_iter_dataset() and before any DataLoader"],
        )
    return Dataset(source, threads)
