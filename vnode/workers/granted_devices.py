"""Turns the devices that a job was granted into a device for each of its workers, and returns those it does not need.

Knows names of devices and numbers of workers. Must not know what a device is, nor who grants it.

    devices = Devices(["0", "1"])
    devices.allocate(0)   ->  "0"
    devices.trim(1)           "1" goes back: one worker needs one device
    devices.granted       ->  ["0"]

A device is used until the process of its worker has ended; only then is it given to another worker, or given back.
"""

from __future__ import annotations

from collections.abc import Iterable


class Devices:
    """The devices of a job.

    Args:
      granted: their names.

    Attributes:
      granted: those that the job has: each is used, or about to be.
      used: by number of worker.
    """

    def __init__(self, granted: Iterable[str]) -> None:
        self.granted = list(granted)
        self.used: dict[int, str] = {}

    def grant(self, names: Iterable[str]) -> None:
        """The job has these devices, too."""
        self.granted += [name for name in names if name not in self.granted]

    def allocate(self, number: int) -> str | None:
        """A device for a worker; None if all are in use."""
        free = [name for name in self.granted if name not in self.used.values()]
        if not free:
            return None
        self.used[number] = free[0]
        return free[0]

    def free(self, number: int) -> None:
        """The process of a worker has ended."""
        self.used.pop(number, None)

    def trim(self, workers: int) -> None:
        """Gives back the devices that so many workers do not need. Those in use stay."""
        used = set(self.used.values())
        free = [name for name in self.granted if name not in used][: max(workers - len(used), 0)]
        self.granted = [name for name in self.granted if name in used or name in free]
