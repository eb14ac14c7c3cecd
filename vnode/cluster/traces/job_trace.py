"""Jobs of a file, with the devices and costs that belong to them.

Knows jobs and costs. Must not know formats.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vnode.cluster.jobs import Job
from vnode.cluster.resize_costs import FREE, Costs
from vnode.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Trace:
    """Jobs of a file.

    Attributes:
      jobs: of the trace.
      devices: how many the file speaks of, by kind if of several; None if of none.
      costs: what it says of starts and resizes.
      logged: what was measured when the jobs really ran, by policy, for comparisons.
      starts: by policy, the seconds that each job's start took in the log of that policy.
    """

    jobs: Sequence[Job]
    devices: int | Mapping[str, int] | None = None
    costs: Costs = FREE
    logged: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    starts: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    def jobs_for(self, policy: str) -> list[Job]:
        """The jobs, with starts as long as they were logged for a policy; as they are if there is no such log."""
        if policy not in self.starts:
            return list(self.jobs)
        pairs = zip(self.jobs, self.starts[policy], strict=True)
        return [dataclasses.replace(job, start=start) for job, start in pairs]


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
      ClusterError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def located_errors(place: str) -> Iterator[None]:
    """Has errors of a record name the place where it stands.

    Raises:
      ClusterError: a field is missing, or is not what it must be.
    """
    try:
        yield
    except KeyError as error:
        raise ClusterError(f"{place}: the field {error.args[0]!r} is missing") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ClusterError(f"{place}: {error}") from error


def number(record: Mapping[str, Any], field: str, kind: Callable[[Any], Any] = float) -> Any:
    """A number of a record.

    Raises:
      KeyError: it is not there.
      ValueError: it is none.
    """
    return checked_number(record[field], field, kind)


def checked_number(value: Any, field: str, kind: Callable[[Any], Any] = float) -> Any:
    """A value of JSON that must be a number.

    Args:
      value: it.
      field: its name, for errors.
      kind: int, for a whole number, or float.

    Raises:
      ValueError: it is none.

    Example:
      >>> checked_number(4.0, "demand", int)
      4
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"{field} is {shortened(value)}, not a number")
    made = kind(value)
    if made != value:
        raise ValueError(f"{field} is {shortened(value)}, not a whole number")
    return made


def number_in(text: str, field: str, kind: Callable[[Any], Any] = float) -> Any:
    """A number of a file of text, in digits.

    Raises:
      ValueError: it is none.

    Example:
      >>> number_in("4", "num_replicas", int), number_in("0.25", "step_time")
      (4, 0.25)
    """
    if not NUMBER.fullmatch(text.strip()):
        raise ValueError(f"{field} is {shortened(text)}, not a number")
    value = float(text)
    return checked_number(value, field, kind)


def mapping(value: Any, field: str) -> Mapping[str, Any]:
    """A value of JSON that must have fields.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{field} is {shortened(value)}, not an object with fields")
    return value


def array(value: Any, field: str) -> Sequence[Any]:
    """A value of JSON that must be an array.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(value, list):
        raise ValueError(f"{field} is {shortened(value)}, not an array")
    return value


def known_fields(record: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses fields that a format does not have: a name that is mistyped would be read as its default.

    Raises:
      ValueError: there is one.
    """
    if unknown := sorted(set(record) - set(known)):
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")


def shortened(value: Any) -> str:
    """A value in an error."""
    text = repr(value) if not isinstance(value, int) or abs(value) <= LARGEST else "an integer of many digits"
    return text if len(text) <= 60 else text[:56] + " ..."


LARGEST = 1e15
"""A larger number is a mistake in a file."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
