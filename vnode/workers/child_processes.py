"""Turns numbers of workers into child processes of this host, whose output goes to files.

Knows processes and signals. Must not know which workers train.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from vnode.stopped import Resident
from vnode.workers import DEVICE


class Handle(Protocol):
    """One worker's process, wherever it is. Its `pid` is 0 if it is not one of this host, or not known yet."""

    pid: int

    def poll(self) -> int | None:
        """The exit code (a signal's number, negative, if one ended it), or None while the process is there."""
        ...

    def kill(self) -> None:
        """Ends the process, whatever it does; again does nothing."""
        ...

    def terminate(self) -> None:
        """Asks the process to end."""
        ...

    def is_stopped(self) -> bool:
        """Whether it is known to be stopped, as by SIGSTOP."""
        ...


class Backend(Protocol):
    """Starts workers."""

    def spawn(self, number: int, environment: Mapping[str, str]) -> Handle:
        """Starts the process of a worker.

        Args:
          number: of the worker.
          environment: variables that it must have besides those of the supervisor.
        """
        ...


class Child:
    """A child process with a session of its own, so that a Ctrl-C in the terminal reaches the supervisor only."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.pid = process, process.pid
        self.place = Resident.this_process()._replace(pid=process.pid)

    def poll(self) -> int | None:
        """Its exit code, or None. Processes that it has started are ended with it, if it did not end well."""
        if self.process.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return None
                if ended.si_code != os.CLD_EXITED or ended.si_status != 0:
                    self.kill()  # it is not waited for yet, so the number is still its own
        return self.process.poll()

    def kill(self) -> None:
        """Ends it, and the processes of its session."""
        self.send(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM to it, and to the processes of its session."""
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to it, and to the processes of its session."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def is_stopped(self) -> bool:
        """Whether the kernel says that it is stopped."""
        return self.process.returncode is None and self.place.is_stopped()


class Processes:
    """Starts workers as processes of this host.

    Args:
      command: the command line of each.
      folder: where ``worker-0.out`` and ``worker-0.err`` are written. Files, and no pipes: a worker goes on to print
        while it saves, when the supervisor is gone.
      environment: variables for all workers, besides those of this process; ``{worker}`` in a value is the number of
        the worker, ``{device}`` its device.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command, self.folder = list(command), folder
        self.environment = dict(environment or {})

    def spawn(self, number: int, environment: Mapping[str, str]) -> Child:
        """Starts one.

        Raises:
          OSError: the system starts no process.
        """
        own = of_worker(self.environment, number, environment.get(DEVICE))
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **own, **environment}
        with (
            open(self.folder / f"worker-{number}.out", "ab") as out,
            open(self.folder / f"worker-{number}.err", "ab") as err,
        ):
            process = subprocess.Popen(
                self.command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        return Child(process)


def of_worker(environment: Mapping[str, str], number: int, device: str | None = None) -> dict[str, str]:
    """The variables of one worker.

    Args:
      environment: of all workers.
      number: of the worker.
      device: its device, if it was given one.

    >>> of_worker({"CUDA_VISIBLE_DEVICES": "{worker}"}, 3)
    {'CUDA_VISIBLE_DEVICES': '3'}
    >>> of_worker({"CUDA_VISIBLE_DEVICES": "{device}"}, 3, "7")
    {'CUDA_VISIBLE_DEVICES': '7'}
    """
    found = {name: value.replace("{worker}", str(number)) for name, value in environment.items()}
    return found if device is None else {name: value.replace("{device}", device) for name, value in found.items()}
