"""The errors that vnode raises.

Knows how a message is laid out (what, where in the user's code, shapes, remedies), and that some objects are refused
to be pickled. Must not know how any other is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self


class VnodeError(Exception):
    """Base class of every error that vnode itself raises."""


class VnodeWarning(UserWarning):
    """A call that works, and is probably not as intended: devices without nodes, padding for examples."""


class CouplingError(VnodeError):
    """One example influences another in a way that cannot be, or must not be, honoured as asked."""


class UnsupportedPrimitiveError(VnodeError):
    """The step uses a primitive on a batched value that no operator description covers."""


class PlacementError(VnodeError):
    """Nodes, devices, counts or mesh do not fit together."""


class ProcessError(VnodeError):
    """Another process has failed, did not come in time to what several processes do together, or does something else.

    Args:
      message: what happened.
      process: the process at fault, if it is known.
      told: whether the other processes know of the error too.
    """

    def __init__(self, message: str = "", *, process: int | None = None, told: bool = False) -> None:
        self.process, self.told = process, told
        super().__init__(message)


class WorkerError(VnodeError):
    """Workers cannot be started, resized or reached as asked, or the job that they belong to has failed.

    Args:
      message: what happened.
      code: the exit code of the job, if it has ended.
    """

    def __init__(self, message: str = "", *, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class ClusterError(VnodeError):
    """Jobs, traces or policies of a cluster are not what they must be, or a job cannot be found or changed."""


class BatchError(VnodeError):
    """The batched arguments do not make up one batch."""


class ProfileError(VnodeError):
    """Measured times cannot be read, belong to another step, or do not say what is asked of them."""


class CheckpointError(VnodeError):
    """A checkpoint does not hold what the run needs, or could not be written.

    Args:
      message: what happened.
      state: the state that could not be saved, if it is still there.
      step: how many steps that state has behind it.
    """

    def __init__(self, message: str = "", *, state: Any = None, step: int | None = None) -> None:
        self.state, self.step = state, step
        super().__init__(message)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint cannot be read, or is not what was saved under its name."""


class DeviceLost(VnodeError):
    """Devices have failed, or were taken away without notice.

    Args:
      devices: the devices that are gone.
      message: what happened; by default says that they are gone.
    """

    def __init__(self, devices: Sequence[Any], message: str = "") -> None:
        self.devices = tuple(devices)
        super().__init__(message or f"lost {', '.join(map(str, self.devices)) or 'an unknown device'}")


class MemoryLimitError(VnodeError):
    """Nothing that may be chosen (nodes, splits) fits in a device's memory, or nothing says how much that is."""


class MachineError(VnodeError):
    """A machine cannot be as it is described, or does not hold what is asked of it.

    Args:
      problem: what is wrong, and what would be right.
      place: which part of the description, as a path into it: ``networks[0].bandwidth``.
      remedies: things to try, a line each.
    """

    def __init__(self, problem: str = "", *, place: str = "", remedies: Sequence[str] = ()) -> None:
        self.problem, self.place, self.remedies = problem, place, tuple(remedies)
        super().__init__(layout_message(f"{place}: {problem}" if place else problem, remedies=remedies))


class PartitionError(VnodeError):
    """A program cannot be split as it is asked for."""


class SearchError(VnodeError):
    """A search for strategies is given what does not fit together, or nothing that can be chosen."""


class TaskGraphError(VnodeError):
    """A graph of tasks cannot be simulated: its parts do not fit together, or tasks wait for each other in a circle."""


class Bound:
    """An object with functions or devices of this process: a copy is the object itself, and it cannot be pickled."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise VnodeError(
            layout_message(
                f"a {type(self).__name__} cannot be pickled.",
                facts=["it holds functions, programs or devices of this process, that are not there in another"],
                remedies=[self.pickle_remedy()],
            )
        )

    def pickle_remedy(self) -> str:
        """The remedy that replaces pickling."""
        return "make it where it is needed, as it was made here"


def layout_message(what: str, *, where: str = "", facts: Sequence[str] = (), remedies: Sequence[str] = ()) -> str:
    """Lays out an error: what happened, where, the facts, and what the user can do.

    Args:
      what: one sentence.
      where: the user's source line, ``file:line (function)``.
      facts: shapes and other particulars, a line each.
      remedies: things to try, a line each.

    Returns:
      The message.
    """
    lines = [what]
    if where:
        lines.append(f"  at {where}")
    lines += [f"  {fact}" for fact in facts]
    return with_remedies("\n".join(lines), *remedies)


TO_DO = "What to do:"


def with_remedies(message: str, *remedies: str) -> str:
    """A message of `layout_message` with further things to try.

    >>> print(with_remedies("It is too large.", "take less"))
    It is too large.
    What to do:
      - take less
    """
    head = [] if not remedies or TO_DO in message.splitlines() else [TO_DO]
    return "\n".join([message, *head, *(f"  - {remedy}" for remedy in remedies)])
