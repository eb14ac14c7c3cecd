"""Turns step numbers that a job reports a few times a second into seconds a step by number of workers.

Knows clocks. Must not know who reads it.
"""

from __future__ import annotations

WINDOW = 60.0
"""Seconds that are looked back on."""

LEAST = 1.0
"""Seconds, and `STEPS` steps, without which nothing is said."""

STEPS = 3
LONG = 10.0
"""Seconds after which one step is enough."""


class Pace:
    """The steps of a job.

    Attributes:
      seconds: a step, by number of workers.
      step: how many are done.

    Example:
      >>> pace = Pace()
      >>> for time, step in [(0.0, 0), (0.5, 1), (1.0, 2), (1.5, 4), (2.0, 6)]:
      ...     pace.observe(time, 2, step)
      >>> pace.seconds
      {2: 0.3}
    """

    def __init__(self, seconds: dict[int, float] | None = None, step: int = 0) -> None:
        self.seconds, self.step = dict(seconds or {}), step
        self.workers, self.settles = 0, True
        self.window: list[tuple[float, int]] = []

    def observe(self, time: float, workers: int, step: int | None) -> None:
        """Records the step of a job at a time.

        Args:
          time: by a clock that does not jump.
          workers: that make steps.
          step: how many are done.
        """
        if step is None or step < 0:
            return
        if workers != self.workers or step < self.step:
            self.workers, self.window, self.settles = workers, [], True
        self.step = step
        if not workers:
            return
        if not self.window:
            self.window = [(time, step)]
        elif step > self.window[-1][1]:
            if self.settles:  # the first steps on so many workers are slower: programs are loaded
                self.window, self.settles = [], False
            self.window.append((time, step))
            while time - self.window[0][0] > WINDOW and len(self.window) > 2:
                del self.window[0]
            (before, low), (after, high) = self.window[0], self.window[-1]
            if after - before >= LEAST and (high - low >= STEPS or after - before >= LONG):
                self.seconds[workers] = (after - before) / (high - low)
