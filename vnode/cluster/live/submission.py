"""A job that a user hands to a scheduler: its command, its workers, its priority.

Knows what may be asked for. Must not know what else is there.

    Submission(command=["python", "train.py"], workers=(1, 8))   ->   {"command": ["python", "train.py"], ...}
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vnode.errors import ClusterError
from vnode.workers import CHECKPOINT, DEVICE, INTERFACE, JOB, NUMBER, RUN, SUPERVISOR, TOKEN_FILE

MOST = 65_536
"""Workers that a job may have."""

HIGHEST = 1_000_000
"""Priorities are from one over this up to this."""

PRIORITY_REMEDY = f"give a number above 0, {HIGHEST:,} at most, such as 5"

LONGEST = 200
"""Letters of a name."""

OF_WORKERS = {CHECKPOINT, DEVICE, INTERFACE, JOB, NUMBER, RUN, SUPERVISOR, TOKEN_FILE}
"""Variables of a worker, which are not those of a job that it submits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that is to run.

    Attributes:
      command: of each worker; of a rigid job that of its one process.
      workers: the fewest and the most workers, or one number: one device each.
      name: for people; by default that of the script or program.
      priority: its weight; twice the weight, twice the share by policies that share by weight.
      rigid: whether the command is no vnode program: it runs once, on `workers` devices, and keeps them to its end.
      restart: whether all workers are replaced at each change (GPUs, TPUs); None: as the scheduler does by default.
      checkpoint: its folder of checkpoints, if the script names none; by default one beside the scheduler's file.
      step_seconds: seconds a step by number of workers, where that is known before; it is measured otherwise.
      steps: of the whole run, where its workers do not tell.
      directory: in which it runs; by default this process's.
      env: variables of its workers; by default this process's.
      arrival: seconds after the beginning, for `vnode.cluster.run`.

    Raises:
      ClusterError: a field is not what it must be; the message names it.

    Example:
      >>> from vnode.cluster import Submission
      >>> Submission(command=["python", "train.py", "--lr", "3"], workers=(1, 8)).title
      'train.py'
    """

    command: Sequence[str]
    workers: tuple[int, int] | int = 1
    name: str = ""
    priority: float = 1.0
    rigid: bool = False
    restart: bool | None = None
    checkpoint: str | None = None
    step_seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    steps: int | None = None
    directory: str = dataclasses.field(default_factory=os.getcwd)
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    arrival: float = 0.0

    def __post_init__(self) -> None:
        def check(good: Any, problem: str, remedy: str) -> None:
            if not good:
                raise ClusterError(f"a job cannot be submitted: {problem}.", remedies=[remedy])

        command = self.command
        check(
            isinstance(command, list | tuple) and len(command) > 0 and all(map(is_argument, command)) and command[0],
            f"its command is {command!r}",
            "give a command and its arguments, as texts without zero bytes: vnode submit -- python train.py",
        )
        check(is_text(self.name), f"name is {self.name!r}", "give a text")
        for field in ("directory", "checkpoint"):
            value = getattr(self, field)
            check(
                is_argument(value) or (value is None and field == "checkpoint"), f"{field} is {value!r}", "give a path"
            )
        check(len(self.name) <= LONGEST, f"its name has {len(self.name)} letters", f"give {LONGEST} at most")
        check(
            isinstance(self.env, Mapping)
            and all(is_argument(each) for variable in self.env.items() for each in variable)
            and all(name and "=" not in name for name in self.env),
            "its variables are not all texts without zero bytes",
            "give env a text for each name, as os.environ has",
        )
        own = {name: value for name, value in self.env.items() if name not in OF_WORKERS}
        object.__setattr__(self, "env", own)
        check(isinstance(self.rigid, bool), f"rigid is {self.rigid!r}", "give True or False")
        check(self.restart in (None, True, False), f"restart is {self.restart!r}", "give True, False or None")
        if is_count(self.workers):
            object.__setattr__(self, "workers", (self.workers, self.workers))
        workers = self.workers
        check(
            isinstance(workers, tuple) and len(workers) == 2 and all(map(is_count, workers)),
            f"workers are {workers!r}",
            "give the fewest and the most: --workers 1:8",
        )
        low, high = workers  # type: ignore[misc]
        check(1 <= low <= high <= MOST, f"workers are {low}:{high}", "give the fewest and the most: --workers 1:8")
        check(
            not self.rigid or low == high,
            f"a rigid job keeps its devices, and it asks for {low}:{high}",
            f"give one number: --workers {high}",
        )
        check(is_priority(self.priority), f"its priority is {self.priority!r}", PRIORITY_REMEDY)
        check(isinstance(self.step_seconds, Mapping), f"step_seconds is {self.step_seconds!r}", "give a dict")
        for count, seconds in self.step_seconds.items():
            check(
                is_count(count) and 1 <= count <= MOST and is_number(seconds) and 1e-9 <= seconds <= 1e9,
                f"its step takes {seconds!r} seconds on {count} workers",
                "give seconds above 0 by number of workers: --step-seconds 1=4.0,8=0.7",
            )
        steps = self.steps
        check(steps is None or (is_count(steps) and 1 <= steps <= 1e15), f"it has {steps!r} steps", "give some number")
        check(is_number(self.arrival) and self.arrival >= 0, f"it arrives at {self.arrival!r}", "give seconds")
        check(os.path.isdir(self.directory), f"there is no folder {self.directory!r}", "give one that is there")

    @property
    def range(self) -> tuple[int, int]:
        """The fewest and the most workers."""
        low, high = self.workers  # type: ignore[misc]
        return low, high

    @property
    def title(self) -> str:
        """Its name for people, in letters that a terminal and a database take.

        >>> from vnode.cluster import Submission
        >>> Submission(command=["runs/caf\\udce9.py"], directory="/").title
        'caf?.py'
        """
        if self.name:
            return printable(self.name)
        scripts = [part for part in self.command[1:] if part.endswith(".py")]
        return printable(os.path.basename(scripts[0] if scripts else self.command[0]))

    def check_types(self) -> None:
        """Looks whether each field has its type; a submission of an earlier version may break newer rules.

        Raises:
          ValueError: one has not.
        """
        good = {
            "command": isinstance(self.command, list) and bool(self.command) and all(map(is_string, self.command)),
            "workers": len(self.range) == 2 and all(map(is_count, self.range)),
            "name": is_string(self.name),
            "priority": is_number(self.priority),
            "rigid": isinstance(self.rigid, bool),
            "restart": isinstance(self.restart, bool | None),
            "checkpoint": isinstance(self.checkpoint, str | None),
            "steps": self.steps is None or is_count(self.steps),
            "directory": is_string(self.directory),
            "env": isinstance(self.env, dict) and all(is_string(each) for pair in self.env.items() for each in pair),
            "arrival": is_number(self.arrival),
        }
        if bad := [name for name, is_good in good.items() if not is_good]:
            raise ValueError(f"{bad[0]} is {getattr(self, bad[0])!r}")

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        found = dataclasses.asdict(self)
        seconds = {str(count): seconds for count, seconds in self.step_seconds.items()}
        return {**found, "command": list(self.command), "step_seconds": seconds}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Submission:
        """From plain data; without a look at folders, which may be gone.

        Raises:
          ClusterError: it is not what `facts` makes.
        """
        try:
            found = dict(facts)
            found["workers"] = tuple(found["workers"])
            found["step_seconds"] = {int(n): float(s) for n, s in found["step_seconds"].items()}
            self = object.__new__(cls)
            for field in dataclasses.fields(cls):
                object.__setattr__(self, field.name, found.pop(field.name))
            if found:
                raise ValueError(f"unknown {', '.join(found)}")
            self.check_types()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ClusterError(f"a job cannot be read: {type(error).__name__}: {error}") from error
        return self


def check_priority(priority: Any) -> None:
    """Refuses to give a job something that is no priority.

    Raises:
      ClusterError: it is none.
    """
    if not is_priority(priority):
        raise ClusterError(f"a job cannot have the priority {priority!r}.", remedies=[PRIORITY_REMEDY])


def is_priority(value: Any) -> bool:
    """Whether it is a priority."""
    return is_number(value) and 1 / HIGHEST <= value <= HIGHEST


def printable(text: str) -> str:
    """A text that moves no cursor and can be encoded: a job's name or output may hold anything.

    >>> printable("a\\x1b[2Jb\\n")
    'a?[2Jb?'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def is_string(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def is_text(value: Any) -> bool:
    """Whether it is a text without zero bytes."""
    return is_string(value) and "\0" not in value


def is_argument(value: Any) -> bool:
    """Whether the system takes it for a path, an argument or a variable: the bytes need not be UTF-8.

    >>> is_argument("caf\\udce9"), is_argument("caf\\ud800")
    (True, False)
    """
    if not is_text(value):
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def is_count(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
