"""A value of a machine's description -> the value, or an error that says where it is wrong.

Knows plain values and the limits beyond which they are mistakes. Must not know machines, or files.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vnode.errors import MachineError

FASTEST = 1e18
"""The most operations, or bytes, a second; more is a mistake in a description."""
LARGEST = 1 << 50
"""The most bytes of memory."""
SLOWEST = 1.0
"""The most seconds of latency."""
MOST_DEVICES = 1 << 16
LONGEST = 300
"""The most characters of a name or a source."""


@contextlib.contextmanager
def error_context(place: str) -> Iterator[None]:
    """Prefixes the place of every error raised inside with `place`.

    >>> with error_context("kinds"):
    ...     raise MachineError("expected a name", place="[0].name")
    Traceback (most recent call last):
    ...
    vnode.errors.MachineError: kinds[0].name: expected a name
    """
    try:
        yield
    except MachineError as error:
        joint = "" if not error.place or error.place.startswith("[") else "."
        raise MachineError(error.problem, place=place + joint + error.place, remedies=error.remedies) from None


def wrong_value(place: str, expected: str, value: Any) -> MachineError:
    """The error for a value that is not as expected."""
    said = repr(value)
    return MachineError(f"expected {expected}, not {said if len(said) <= 60 else said[:57] + '...'}", place=place)


def positive_number(value: Any, place: str, unit: str, most: float = FASTEST, *, zero: bool = False) -> float:
    """Checks that a value is a finite number above zero (or zero), up to the largest plausible one.

    Raises:
      MachineError: it is not such a number; the message says the unit.
    """
    number = float("nan")
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError, ValueError, TypeError):
            number = float(value)
    if not (math.isfinite(number) and (number > 0 or (zero and number == 0)) and number <= most):
        raise wrong_value(place, f"a number of {unit} {'from' if zero else 'above'} 0 up to {most:g}", value)
    return number


def whole_number(value: Any, place: str, what: str, least: int, most: int) -> int:
    """Checks that a value is a whole number between bounds; raises `MachineError`."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not least <= int(value) <= most:
        raise wrong_value(place, f"{what}, a whole number from {least} to {most}", value)
    return int(value)


def one_line(value: Any, place: str, *, empty: bool = False) -> str:
    """Checks that a value is a text of one line; raises `MachineError`."""
    if not (isinstance(value, str) and (empty or value.strip()) and len(value) <= LONGEST and value.isprintable()):
        raise wrong_value(place, f"a text of one line, at most {LONGEST} characters", value)
    return value


def nonempty_list(value: Any, place: str, what: str) -> Sequence[Any]:
    """Checks that a value is a list that is not empty; raises `MachineError`."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence) or not value:
        raise wrong_value(place, f"a list of {what}", value)
    return value


def device_numbers(value: Any, place: str) -> tuple[int, ...]:
    """Checks that a value lists numbers of different devices; raises `MachineError`."""
    found = tuple(
        whole_number(n, f"{place}[{i}]", "the number of a device", 0, MOST_DEVICES - 1)
        for i, n in enumerate(nonempty_list(value, place, "numbers of devices"))
    )
    if len(set(found)) != len(found):
        raise MachineError("a device is named twice", place=place)
    return found
