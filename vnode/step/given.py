"""Arguments that no step can be called with: too few of them, or arrays that are gone.

Knows signatures and deleted arrays. Must not know what becomes of the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vnode.errors import VnodeError, layout_message
from vnode.placement.leaves import given_away


def check_signature(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], name: str) -> None:
    """Refuses arguments that Python would not call a function with, in about its own words.

    Raises:
      TypeError: they are such.
    """
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except ValueError:  # a callable that does not tell
        return
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def check_there(args: Mapping[int, Any], kwargs: dict[str, Any], donated: Sequence[int]) -> None:
    """Refuses arguments whose memory was given to an earlier computation; jaxlib 0.10 crashes on several devices.

    Args:
      args: arguments by position.
      kwargs: keyword arguments.
      donated: positions of those that the step donates.

    Raises:
      VnodeError: there are some.
    """
    gone = {i: names for i, arg in args.items() if (names := given_away(arg, f"argument {i}"))}
    names = [name for found in gone.values() for name in found] + given_away(kwargs, "argument ")
    if not names:
        return
    own = [i for i in gone if i in donated]
    raise VnodeError(
        layout_message(
            "some of the given arrays are gone: they were donated to an earlier call, or deleted.",
            facts=[
                *names[:8],
                *([f"and {len(names) - 8} more"] if len(names) > 8 else []),
                *(f"the step donates argument {i}: donate_argnums={tuple(donated)}" for i in own),
            ],
            remedies=[
                "go on with what that call returned: state, metrics = step(state, batch)",
                "or virtualize without donate_argnums" if own else "or do not donate them where they are needed again",
            ],
        )
    )
