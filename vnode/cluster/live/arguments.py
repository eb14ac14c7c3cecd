"""Turns texts of a command line into numbers and names.

Knows their forms. Must not know commands.
"""

from __future__ import annotations

import argparse

from vnode.workers.command_run import resources as resources
from vnode.workers.command_run import variable as variable


def counts(text: str) -> list[int]:
    """Whole numbers.

    >>> counts("1,2,4")
    [1, 2, 4]
    """
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of devices, such as 1,2,4")
    return found


def times(text: str) -> dict[int, float]:
    """Seconds by number of workers.

    >>> times("1=4.0,8=0.7")
    {1: 4.0, 8: 0.7}
    """
    parts = (part.partition("=") for part in text.split(","))
    try:
        return {int(count): float(seconds) for count, _, seconds in parts}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form 1=4.0,8=0.7") from None


def plans(text: str) -> dict[int, str]:
    """Files of plans by number of workers.

    >>> plans("1=one.json,4=four.json")
    {1: 'one.json', 4: 'four.json'}
    """
    parts = [part.partition("=") for part in text.split(",")]
    try:
        return {int(count): path for count, _, path in parts}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form 1=one.json,4=four.json") from None


def workers(text: str) -> tuple[int, int]:
    """The fewest and the most workers.

    >>> workers("1:8"), workers("4")
    ((1, 8), (4, 4))
    """
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form 1:8, or 4") from None


def add_state(parser: object) -> None:
    """Adds the option that names a scheduler's file."""
    parser.add_argument(  # type: ignore[attr-defined]
        "--state", metavar="FILE", help="the scheduler's file, if several run; or the variable VNODE_CLUSTER"
    )
