"""What was found before, so that it need not be found again; forgotten when it is too much.

Knows keys, and who makes what belongs to them. Must not know what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """Values by keys, up to a number of them. Several threads may ask at once.

    Args:
      most: values; when there are as many, and another is found, all are forgotten.

    Example:
      >>> lengths = Remembered[int](100)
      >>> lengths.get_or_make("node", lambda: len("node")), lengths.get_or_make("node", lambda: 0)
      (4, 4)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, T] = {}

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """What belongs to a key, made if that is not known."""
        try:
            return self._values[key]
        except KeyError:
            value = make()
        if len(self._values) >= self._most:
            self._values.clear()
        self._values[key] = value
        return value
