"""Seconds for a search -> whether there is time for the next prediction.

Knows the clock. Must not know what is searched.
"""

from __future__ import annotations

import collections
import statistics
import time

MORE = 0.5
"""The share of the budget that is spent in addition on remedies, where nothing fits."""

LAST = 3
"""Number of predictions whose durations are remembered."""

MARGIN = 1.25
"""The factor on their median that the next prediction may take."""


class Budget:
    """A time budget that starts now; Ctrl-C ends it.

    Attributes:
      seconds: its length.
      untried: a line for each thing that was not tried for lack of time.
      more: share of the budget that is spent in addition on remedies, where nothing fits.
      predictions: seconds of each of the last predictions.

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
        """Seconds left; negative after the end."""
        return self.until - time.monotonic()

    @property
    def is_spent(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0

    def lacks(self, seconds: float = 0.0, predictions: int = 1) -> bool:
        """Whether the remaining time is too short for `seconds` and some predictions after them."""
        return self.is_spent or self.left < seconds + predictions * MARGIN * self.usual

    @property
    def usual(self) -> float:
        """The median duration of the last predictions, of two the shorter; 0 without any.

        The first prediction takes longer than later ones, and any may wait for another program.
        """
        return statistics.median_low(self.predictions) if self.predictions else 0.0

    def leave_out(self, *several: str) -> None:
        """Notes something that is not tried for lack of time."""
        self.untried += [each for each in several if each not in self.untried]

    def interrupt(self) -> None:
        """Ends the budget, and leaves out remedies too."""
        self.until, self.more = time.monotonic(), 0.0

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the budget."""
        return self.more == 0.0

    def extend(self) -> None:
        """Begins the additional share for remedies."""
        self.until = time.monotonic() + self.more * self.seconds
