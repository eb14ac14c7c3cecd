"""A sentence, a source line, facts and remedies -> the message of an error; and the classes of vnode's errors.

Knows the layout of messages, and objects that cannot be pickled. Must not know how any other error is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self


class VnodeError(Exception):
    """Base class of every error that vnode itself raises.

    Args:
      message: one sentence that says what happened.
      where: the user's source line, ``file:line (function)``.
      facts: shapes and other particulars, a line each.
      remedies: things that the user can try, a line each.
    """

    def __init__(
        self, message: str = "", *, where: str = "", facts: Sequence[str] = (), remedies: Sequence[str] = ()
    ) -> None:
        super().__init__(layout_message(message, where=where, facts=facts, remedies=remedies))


class VnodeWarning(UserWarning):
    """A call works, but probably not as intended: devices without nodes, batches with padding."""


class CouplingError(VnodeError):
    """One example influences another, and the options forbid that, or vnode cannot compute it exactly."""


class UnsupportedPrimitiveError(VnodeError):
    """The step applies a primitive to a batched value, and vnode has no description of that primitive."""


class PlacementError(VnodeError):
    """Nodes, devices, counts or mesh do not fit together."""


class ProcessError(VnodeError):
    """Another process failed, was late at a point where processes meet, or runs another program or other options.

    Args:
      message: the message.
      process: the process at fault, if known.
      told: whether the other processes know of the error too.
    """

    def __init__(self, message: str = "", *, process: int | None = None, told: bool = False) -> None:
        self.process, self.told = process, told
        super().__init__(message)


class WorkerError(VnodeError):
    """Workers could not be started, resized or reached, or their job failed.

    Args:
      message: one sentence that says what happened.
      code: the exit code of the job, if it has ended.
      facts: particulars, a line each.
      remedies: things that the user can try, a line each.
    """

    def __init__(
        self,
        message: str = "",
        *,
        code: int | None = None,
        facts: Sequence[str] = (),
        remedies: Sequence[str] = (),
    ) -> None:
        self.code = code
        super().__init__(message, facts=facts, remedies=remedies)


class ClusterError(VnodeError):
    """A job, trace or policy of a cluster is not valid, or a job cannot be found or changed."""


class BatchError(VnodeError):
    """The batched arguments do not form one batch: their shapes do not fit together."""


class ProfileError(VnodeError):
    """Measured times or compiled figures cannot be read, belong to another step, or lack the requested figure."""


class CheckpointError(VnodeError):
    """A checkpoint lacks a value that the run needs, or could not be written.

    Args:
      message: the message.
      state: the state that could not be saved, if it still exists.
      step: the number of steps after which the state was to be saved.
      facts: particulars, a line each.
      remedies: things that the user can try, a line each.
    """

    def __init__(
        self,
        message: str = "",
        *,
        state: Any = None,
        step: int | None = None,
        facts: Sequence[str] = (),
        remedies: Sequence[str] = (),
    ) -> None:
        self.state, self.step = state, step
        super().__init__(message, facts=facts, remedies=remedies)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint cannot be read, or its bytes are not the bytes that were saved."""


class DeviceLost(VnodeError):
    """Devices failed, or were taken away without notice.

    Args:
      devices: the lost devices.
      message: the message; by default it names the lost devices.
    """

    def __init__(self, devices: Sequence[Any], message: str = "") -> None:
        self.devices = tuple(devices)
        super().__init__(message or f"lost {', '.join(map(str, self.devices)) or 'an unknown device'}")


class MemoryLimitError(VnodeError):
    """No number of nodes, or no division of a step, fits in a device's memory; or the memory's size is not known."""


class MachineError(VnodeError):
    """A description of a machine is wrong, or a machine is asked for a device, link or collective that it lacks.

    Args:
      problem: the wrong value, and the expected one.
      place: the part of the description, as a path into it: ``networks[0].bandwidth``.
      remedies: things to try, a line each.
    """

    def __init__(self, problem: str = "", *, place: str = "", remedies: Sequence[str] = ()) -> None:
        self.problem, self.place, self.remedies = problem, place, tuple(remedies)
        super().__init__(f"{place}: {problem}" if place else problem, remedies=remedies)


class PartitionError(VnodeError):
    """A program cannot be divided as requested, or a plan does not fit the step."""


class SearchError(VnodeError):
    """The inputs of a search for strategies do not fit together, or leave nothing to choose from."""


class TaskGraphError(VnodeError):
    """A task of a task graph names an unknown task or resource, or takes no time, or too long."""


class Bound:
    """An object with functions or devices of this process: a copy is the object itself, and it cannot be pickled."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise VnodeError(
            f"a {type(self).__name__} cannot be pickled.",
            facts=["it holds functions, programs or devices that exist only in this process"],
            remedies=[self.pickle_remedy()],
        )

    def pickle_remedy(self) -> str:
        """The remedy that replaces pickling."""
        return "make it again in the process that needs it"


def layout_message(what: str, *, where: str = "", facts: Sequence[str] = (), remedies: Sequence[str] = ()) -> str:
    """Lays out the message of an error.

    Args:
      what: one sentence that says what happened.
      where: the user's source line, ``file:line (function)``.
      facts: shapes and other particulars, a line each.
      remedies: things that the user can try, a line each.

    Returns:
      The message.
    """
    lines = [what]
    if where:
        lines.append(f"  at {where}")
    lines += [f"  {fact}" for fact in facts]
    return with_remedies("\n".join(lines), *remedies)


def limit_lines(lines: Sequence[str], most: int = 8) -> list[str]:
    """The first lines of several, and how many more there are.

    >>> limit_lines(["a", "b", "c"], 2)
    ['a', 'b', 'and 1 more']
    """
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


TO_DO = "What to do:"


def with_remedies(message: str, *remedies: str) -> str:
    """Adds remedies to a message of `layout_message`.

    >>> print(with_remedies("It is too large.", "take less"))
    It is too large.
    What to do:
      - take less
    """
    head = [] if not remedies or TO_DO in message.splitlines() else [TO_DO]
    return "\n".join([message, *head, *(f"  - {remedy}" for remedy in remedies)])
