"""Turns texts of a command line into numbers and names.

Knows their forms. Must not know commands.
"""

from __future__ import annotations

from vnode.workers.command_run import resources as resources
from vnode.workers.command_run import variable as variable


def counts(text: str) -> list[int]:
    """Whole numbers.

    >>> counts("1,2,4")
    [1, 2, 4]
    """
    return sorted(int(part) for part in text.split(","))


def times(text: str) -> dict[int, float]:
    """Seconds by number of workers.

    >>> times("1=4.0,8=0.7")
    {1: 4.0, 8: 0.7}
    """
    parts = (part.partition("=") for part in text.split(","))
    return {int(count): float(seconds) for count, _, seconds in parts}


def add_state(parser: object) -> None:
    """Adds the option that names a scheduler's file."""
    parser.add_argument(  # type: ignore[attr-defined]
        "--state", metavar="FILE", help="the scheduler's file, if several run; or the variable VNODE_CLUSTER"
    )
