"""Service with one node -> barriers of several processes, made of keys.

Knows clients of jax's coordination service. Must not know who meets, nor why.

The service of a generation of workers has one node, as which all of them connect: it waits for nobody and misses
nobody. Its own barrier would wait for that one node only. So process i writes the key ``barrier/name/i``. A process
that finds the keys of all writes ``barrier/name/end``; a process that has waited too long writes there that the barrier
has failed. That key is written once, so all processes see the same end.

    client = Rendezvous(get_distributed_runtime_client(address, 0), index=2, count=3)
    client.wait_at_barrier("compiled", 1000)    # until processes 0 and 1 have called it, too
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from jax.errors import JaxRuntimeError

PASSED = "passed"


class Rendezvous:
    """A client of a service with one node, with the calls that vnode makes, for several processes.

    Args:
      client: a connected client.
      index: this process's number.
      count: the number of processes.
    """

    def __init__(self, client: Any, index: int, count: int) -> None:
        self.client, self.index, self.count = client, index, count
        self.key_value_set = client.key_value_set
        self.key_value_dir_get = client.key_value_dir_get
        self.blocking_key_value_get = client.blocking_key_value_get
        self.key_value_delete = client.key_value_delete

    def wait_at_barrier(self, name: str, timeout_ms: int, processes: Iterable[int] | None = None) -> None:
        """Waits until some processes have come to a barrier, to which each may come once.

        Args:
          name: the barrier's name.
          timeout_ms: the most milliseconds to wait.
          processes: the processes; all by default.

        Raises:
          JaxRuntimeError: as jax's. ``DEADLINE_EXCEEDED``: some did not come in time, or an earlier process had given
            up. ``ALREADY_EXISTS``: this process has been here before.
        """
        place, expected = f"barrier/{name}/", set(range(self.count) if processes is None else processes)
        deadline = time.monotonic() + timeout_ms / 1000
        self.client.key_value_set(f"{place}{self.index}", "")
        missing = expected - self.arrived(place)
        if missing:
            end = self.await_end(place, deadline) or self.settle(place, self.absence(name, expected))
        else:
            end = self.settle(place, PASSED)
        if end != PASSED:
            raise JaxRuntimeError(end)

    def arrived(self, place: str) -> set[int]:
        """The processes that have come to a barrier."""
        names = (key.removeprefix(place) for key, _ in self.client.key_value_dir_get(place))
        return {
            int(name) for name in names if name.isdigit()
        }  # other names are the end, and barriers with longer names

    def await_end(self, place: str, deadline: float) -> str:
        """The outcome of a barrier; empty if it has none by the deadline."""
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            return self.client.blocking_key_value_get(f"{place}end", left)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return ""

    def settle(self, place: str, end: str) -> str:
        """Ends a barrier, unless another process has; returns the outcome."""
        try:
            self.client.key_value_set(f"{place}end", end)
            return end
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self.client.blocking_key_value_get(f"{place}end", 10_000)

    def absence(self, name: str, expected: set[int]) -> str:
        """The error of a barrier to which some processes did not come in time."""
        missing = sorted(expected - self.arrived(f"barrier/{name}/"))
        return f"DEADLINE_EXCEEDED: process {self.index} waited too long at barrier {name!r}; missing: {missing}"
