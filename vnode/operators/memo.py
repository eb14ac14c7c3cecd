"""A cache of computed values that is emptied when it is full.

Knows keys, and functions that compute values. Must not know the values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """Values by keys, up to a number of them; thread-safe, but two threads may both compute a value.

    Args:
      most: the most values; when another is added, all are dropped.

    Example:
      >>> lengths = Memo[int](100)
      >>> lengths.get_or_make("node", lambda: len("node")), lengths.get_or_make("node", lambda: 0)
      (4, 4)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, T] = {}

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, computed if it is unknown."""
        try:
            return self._values[key]
        except KeyError:
            value = make()
        if len(self._values) >= self._most:
            self._values.clear()
        self._values[key] = value
        return value
