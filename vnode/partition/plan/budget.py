"""The time that a search has.

Knows the clock. Must not know what is searched.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

MORE = 0.5
"""So much of the budget is spent once more, where nothing fits, on what would."""


class Budget:
    """Seconds from now on; Ctrl-C ends them.

    Attributes:
      seconds: how many there were.
      cut_short: whether something was not tried because they were over.
      more: which share of them is spent once more, where nothing fits, on what would.
      longest: how many the longest prediction took.

    Example:
      >>> budget = Budget(60.0)
      >>> budget.over, budget.left > 59
      (False, True)
      >>> with budget.predicting():
      ...     pass
      >>> budget.lacks(predictions=2), budget.lacks(70.0)
      (False, True)
      >>> budget.interrupt()
      >>> budget.over, budget.more
      (True, 0.0)
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.more = seconds, MORE
        self.cut_short = False
        self.longest = 0.0
        self.until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; fewer than none where they are over."""
        return self.until - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether they are."""
        return self.left <= 0

    def lacks(self, seconds: float = 0.0, predictions: int = 1) -> bool:
        """Whether they are over, or fewer are left than something will take, and predictions like the longest."""
        return self.over or self.left < seconds + predictions * self.longest

    @contextlib.contextmanager
    def predicting(self) -> Iterator[None]:
        """Notes how long a prediction takes."""
        began = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - began)

    def interrupt(self) -> None:
        """Ends them with what was found so far; what would fit where nothing does is not tried either."""
        self.until, self.more = time.monotonic(), 0.0

    def extend(self) -> None:
        """Begins to spend what is spent once more."""
        self.until = time.monotonic() + self.more * self.seconds
