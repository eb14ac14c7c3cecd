"""Turns a user's request (a script or a function, workers, a folder) into a supervisor that is ready to run.

Knows command lines of workers, and which backends there are. Must not know terminals.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from vnode.errors import WorkerError
from vnode.files import is_no_room
from vnode.workers.child_processes import Backend, Processes
from vnode.workers.fixed_command import Rigid
from vnode.workers.generations import Generations
from vnode.workers.job_registry import Entry
from vnode.workers.on_ray import Ray
from vnode.workers.restarts import Restarts
from vnode.workers.supervision import Decisions
from vnode.workers.supervisor import Supervisor
from vnode.workers.worker_process import Limits

BACKENDS = ("processes", "ray")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A job, as plain data.

    Attributes:
      command: the command line of each worker.
      name: of the script or function, for people.
      workers: the number of workers that train.
      backend: what starts them.
      checkpoint: the folder of checkpoints, or None.
      spares: how many workers stand by.
      max_workers: how many may be asked for, or None.
      min_workers: how many it may begin with where the step has fewer virtual nodes; None: as many as `workers`.
      stop_ends_script: whether a stop ends the script right after the checkpoint, as others go on with it later.
      start_timeout: seconds from the start of a worker to its call of `run`.
      max_restarts: how often a worker is started again within ten minutes.
      silence: seconds without a sign of life after which a worker is killed.
      rejoin: whether workers leave a generation before they make the next one, in place of making it beside.
      restart: whether all workers are replaced at each change, and go on from a checkpoint.
      interface: the address at which the supervisor and the services listen.
      port: of the supervisor; 0 for any that is free.
      env: further variables of the workers.
      resources: of Ray that each worker needs, or None.
      rigid: whether the command is no vnode program: it runs once, with all devices, of which there are `workers`.
      devices: names of the devices for the workers, or None where nobody counts them.
    """

    command: tuple[str, ...]
    name: str
    workers: int
    backend: str = "processes"
    checkpoint: str | None = None
    spares: int = 0
    max_workers: int | None = None
    min_workers: int | None = None
    stop_ends_script: bool = False
    start_timeout: float = 300
    max_restarts: int = 3
    silence: float = 10
    rejoin: bool = False
    restart: bool = False
    interface: str = "127.0.0.1"
    port: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    resources: Mapping[str, float] | None = None
    rigid: bool = False
    devices: tuple[str, ...] | None = None

    def check(self) -> None:
        """Checks the request before anything is started.

        Raises:
          WorkerError: the job cannot be started so.
        """
        for name, number in (("workers", self.workers), ("spares", self.spares)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise WorkerError(f"{name} must be an integer, not {number!r}")
        if self.backend not in BACKENDS:
            known = " or ".join(map(repr, BACKENDS))
            raise WorkerError(f"backend {self.backend!r} is not known.", remedies=[f"use {known}"])
        if self.backend == "ray" and importlib.util.find_spec("ray") is None:
            raise WorkerError(
                "backend 'ray' needs Ray.", remedies=["pip install 'vnode[ray]'", "or use backend 'processes'"]
            )
        if self.resources is not None and self.backend != "ray":
            raise WorkerError(
                f"backend {self.backend!r} does not know resources.",
                facts=[f"asked for: {dict(self.resources)}"],
                remedies=["leave resources= out", "or use backend 'ray'"],
            )
        if self.restart and (self.rejoin or self.spares):
            other = "rejoin" if self.rejoin else "spares"
            raise WorkerError(
                f"restart and {other} exclude each other: restart replaces all workers at each change.",
                remedies=[f"leave one of them out: --restart or --{other}"],
            )
        if self.restart:
            joining_command(self.command)
        if self.rigid and (self.restart or self.rejoin or self.spares or self.backend == "ray"):
            raise WorkerError(
                "a command that is not a vnode program has no workers to replace, or to place by Ray.",
                remedies=["leave restart, rejoin, spares and backend out", "or submit a vnode program"],
            )
        if self.backend == "ray":
            check_begins_with_python(self.command, "workers on Ray", "leave backend='ray' out")
        if self.workers < 1 or self.spares < 0:
            raise WorkerError(
                f"a job cannot have {self.workers} workers and {self.spares} spares.",
                remedies=["ask for one worker or more"],
            )
        if self.max_workers is not None and self.workers > self.max_workers:
            raise WorkerError(
                f"{self.workers} workers are more than max_workers={self.max_workers}.",
                remedies=["ask for fewer workers, or a larger max_workers"],
            )

    def started_by(self, folder: Path) -> Backend:
        """The backend by which workers are started.

        Raises:
          WorkerError: Ray cannot.
        """
        if self.backend == "ray":
            return Ray(self.command_line(), folder, self.env, self.resources, self.interface)
        return Processes(self.command_line(), folder, self.env)

    def command_line(self) -> tuple[str, ...]:
        """The command line of a worker: with `restart`, it joins its world of JAX first.

        Raises:
          WorkerError: with `restart`, the command does not begin with Python.
        """
        return joining_command(self.command) if self.restart else self.command

    def decisions(self) -> Decisions:
        """The decisions about the job's workers, as the options ask for them."""
        if self.rigid:
            return Rigid(self.workers)
        limits = Limits(start=self.start_timeout, restarts=self.max_restarts, silence=self.silence)
        most = self.max_workers
        if self.restart:
            found: Decisions = Restarts(self.workers, most=most, limits=limits)
        else:
            found = Generations(self.workers, spares=self.spares, most=most, limits=limits, rejoin=self.rejoin)
        found.least, found.ends_scripts = self.min_workers, self.stop_ends_script
        return found

    def supervisor(
        self,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
        observe: Callable[[dict[str, Any], dict[str, Any] | None], None] | None = None,
        folder: Path | None = None,
    ) -> Supervisor:
        """Makes the job's folder and its supervisor; `run` of that starts the workers.

        Args:
          out: where the output of the lowest rank goes.
          err: where errors of all workers go.
          observe: is told of the job's status, and of events.
          folder: the job's own; by default a new one among those of this user.

        Raises:
          WorkerError: another supervisor has the folder of checkpoints, the port is in use, or Ray does not answer.
        """
        self.check()
        entry = Entry(self.name, self.checkpoint, folder)
        try:
            return Supervisor(
                self.started_by(entry.folder),
                self.decisions(),
                entry,
                interface=self.interface,
                port=self.port,
                checkpoint=entry.checkpoint,
                devices=self.devices,
                out=out,
                err=err,
                observe=observe,
            )
        except WorkerError as error:
            if not is_no_room(error):  # else it did not begin, and may later
                entry.close(1, str(error), None)
            raise


PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")
"""Names of Python's interpreter."""

WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python that the next word belongs to."""


def check_begins_with_python(command: Sequence[str], workers: str, otherwise: str) -> None:
    """Checks that a command line begins with Python, where that word is replaced or options are added behind it.

    Args:
      command: the command line.
      workers: the workers that need this, for the message.
      otherwise: the other remedy.

    Raises:
      WorkerError: it begins with another program.
    """
    if not PYTHON.fullmatch(os.path.basename(command[0])) and command[0] != sys.executable:
        raise WorkerError(
            f"{workers} are started by Python, not by {command[0]!r}.",
            remedies=["give the script to Python: python train.py", f"or {otherwise}"],
        )


def joining_command(command: Sequence[str]) -> tuple[str, ...]:
    """A command line of Python, whose script, module or program joins a world of JAX first.

    Raises:
      WorkerError: it does not begin with Python.

    >>> joining_command(["python3", "-u", "-X", "dev", "train.py", "--lr", "1"])[:6]
    ('python3', '-u', '-X', 'dev', '-P', '-m')
    >>> joining_command(["python", "-m", "project.train"])[1:]
    ('-P', '-m', 'vnode.elastic.join_world', '-m', 'project.train')
    """
    check_begins_with_python(command, "workers that are replaced at each change", "leave restart out")
    python, *rest = command
    first = 0
    while first < len(rest) and rest[first].startswith("-") and rest[first] not in ("-m", "-c", "-"):
        first += 2 if rest[first] in WITH_VALUE else 1
    if first >= len(rest) or rest[first] == "-":
        raise WorkerError(
            f"there is no script in the command {' '.join(command)!r}.", remedies=["give one: python train.py"]
        )
    # -P: the current folder is not where modules are looked for; the worker adds the script's own
    return (python, *rest[:first], "-P", "-m", "vnode.elastic.join_world", *rest[first:])


def script_command(script: str | os.PathLike[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line of a script.

    Raises:
      WorkerError: there is no such file.
    """
    path = Path(script)
    if not path.is_file():
        facts = ["it is a folder"] if path.is_dir() else [f"looked in {Path.cwd()}"] if not path.is_absolute() else []
        raise WorkerError(f"the script {os.fspath(script)!r} is not there.", facts=facts, remedies=["give its path"])
    return (sys.executable, os.fspath(script), *map(str, arguments))


def function_command(function: Callable[..., Any] | str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line that calls a function, and runs what it returns: step, state, data, options.

    Args:
      function: one at the top of a module or script, or ``module:name``.
      arguments: what `sys.argv` shall hold besides.

    Raises:
      WorkerError: another process cannot import it.
    """
    if isinstance(function, str):
        home, _, name = function.partition(":")
    else:
        name = getattr(function, "__qualname__", "")
        home = getattr(function, "__module__", None) or ""
        if not name or "<" in name or getattr(function, "__closure__", None):
            raise WorkerError(
                f"workers cannot import {name or function!r}: it is a lambda, or defined inside another function.",
                remedies=["define it with def at the top of a file", "or give the path of a script"],
            )
        if home == "__main__":
            home = getattr(sys.modules["__main__"], "__file__", None) or ""
            if not home or not Path(home).is_file():
                raise WorkerError(
                    f"workers cannot import {name}: it was typed in, and is not in a file.",
                    remedies=["write it to a file, and import it from there", "or give the path of a script"],
                )
            home = os.path.abspath(home)
    return (sys.executable, "-m", "vnode.elastic.call_function", home, name, *map(str, arguments))


def target_command(target: Any, arguments: Sequence[str]) -> tuple[tuple[str, ...], str, dict[str, str]]:
    """The command line of a script or function, its name, and the variables that it needs.

    Raises:
      WorkerError: it cannot be run by other processes.
    """
    if callable(target) or (isinstance(target, str) and ":" in target and not os.path.exists(target)):
        command = function_command(target, arguments)
        here = [os.path.abspath(path) for path in sys.path]  # modules are found as they are here
        return command, f"{command[3]}:{command[4]}", {"PYTHONPATH": os.pathsep.join(here)}
    command = script_command(target, arguments)
    return command, command[1], {}
