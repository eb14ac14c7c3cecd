"""The time that a search has.

Knows the clock. Must not know what is searched.
"""

from __future__ import annotations

import collections
import statistics
import time

MORE = 0.5
"""So much of the budget is spent once more, where nothing fits, on what would."""

LAST = 3
"""Of so many predictions it is remembered how long they took."""

MARGIN = 1.25
"""So many times as long as the middle one of these the next may take."""


class Budget:
    """Seconds from now on; Ctrl-C ends them.

    Attributes:
      seconds: how many there were.
      untried: what was not tried because they were over, a line each.
      more: which share of them is spent once more, where nothing fits, on what would.
      predictions: how many each of the last predictions took.

    Example:
      >>> budget = Budget(60.0)
      >>> budget.is_spent, budget.left > 59
      (False, True)
      >>> budget.predictions.extend([25.0, 20.0])
      >>> budget.lacks(), budget.lacks(predictions=3), budget.lacks(70.0)
      (False, True, True)
      >>> budget.interrupt()
      >>> budget.is_spent, budget.more
      (True, 0.0)
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.more = seconds, MORE
        self.untried: list[str] = []
        self.predictions: collections.deque[float] = collections.deque(maxlen=LAST)
        self.until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; fewer than none where they are over."""
        return self.until - time.monotonic()

    @property
    def is_spent(self) -> bool:
        """Whether they are."""
        return self.left <= 0

    def lacks(self, seconds: float = 0.0, predictions: int = 1) -> bool:
        """Whether they are over, or fewer are left than something will take, and predictions after it."""
        return self.is_spent or self.left < seconds + predictions * MARGIN * self.usual

    @property
    def usual(self) -> float:
        """How many a prediction takes: the middle one of the last, of two the shorter; none if nothing was predicted.

        The first takes longer than those after it, and any may wait for another program.
        """
        return statistics.median_low(self.predictions) if self.predictions else 0.0

    @property
    def cut_short(self) -> bool:
        """Whether something was not tried because they were over."""
        return bool(self.untried)

    def leave_out(self, *several: str) -> None:
        """Notes what is not tried, because they are over."""
        self.untried += [each for each in several if each not in self.untried]

    def interrupt(self) -> None:
        """Ends them with what was found so far; what would fit where nothing does is not tried either."""
        self.until, self.more = time.monotonic(), 0.0

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended them."""
        return self.more == 0.0

    def extend(self) -> None:
        """Begins to spend what is spent once more."""
        self.until = time.monotonic() + self.more * self.seconds
