"""Numbers -> text for people: bytes, counts, ranges.

Knows numbers. Must not know what they count.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def size(count: float, digits: int = 1) -> str:
    """Bytes with a unit, with `digits` digits after the point.

    >>> size(1536), size(1536, 2)
    ('1.5 KiB', '1.50 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


def number(count: float) -> str:
    """A large number with an SI prefix.

    >>> number(2500000)
    '2.5 M'
    """
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.0f} " if not unit else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} P"


def seconds(time: float) -> str:
    """A time with a unit.

    >>> seconds(2.0), seconds(0.0021), seconds(3.2e-5), seconds(4.2e-11)
    ('2 s', '2.1 ms', '32 µs', '42 ps')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if time >= scale * (1 - 1e-9):
            return f"{time / scale:.4g} {unit}"
    return f"{time * 1e12:.4g} ps"


def spread(counts: Sequence[int]) -> str:
    """The least and the greatest of some counts.

    >>> spread([3, 3]), spread([3, 4])
    ('3', '3 to 4')
    """
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def several(count: int, thing: str, things: str = "") -> str:
    """A number with its noun.

    >>> several(1, "pass", "passes"), several(2, "wave")
    ('1 pass', '2 waves')
    """
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def in_groups(groups: int, each: int, group: str) -> str:
    """The number of groups, to follow the number of their members; empty if there is one member per group.

    >>> in_groups(2, 4, "row"), in_groups(8, 1, "row")
    (' in 2 rows', '')
    """
    return "" if each == 1 else f" in {several(groups, group)}"


def number_range(first: int, last: int) -> str:
    """A range of numbers, both ends included.

    >>> number_range(4, 7), number_range(4, 4)
    ('4-7', '4')
    """
    return str(first) if first == last else f"{first}-{last}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """A noun with a list of numbers.

    >>> numbered("pass", [1]), numbered("pass", [1, 3, 4]), numbered("pass", [1, 2, 3, 4, 7])
    ('pass 1', 'passes 1, 3 and 4', 'passes 1 to 4 and 7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    *most, last = itertools.chain.from_iterable(said)
    some = "es" if len(numbers) > 1 else ""
    return f"{noun}{some} {', '.join(most)} and {last}" if most else f"{noun}{some} {last}"
