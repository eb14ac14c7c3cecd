"""A step and the arguments of a call -> the step on a known number of nodes, with its arguments as arrays.

Knows what such a step has. Must not know how it is called, explained or compiled.
"""

from __future__ import annotations

from typing import Any


class Resolved:
    """A step on a known number of nodes, and the arguments of a call as pytrees of arrays.

    Attributes:
      step: the step, a `vnode.VirtualStep`; not typed so here, because that class knows this one.
      args: positional arguments.
      kwargs: keyword arguments.
      search_lines: how the number of nodes was found, in lines; empty if it was given.
      chosen: whether the number of nodes is the step's own; otherwise it is the smallest there may be.
    """

    def __init__(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: tuple[str, ...] = (),
        chosen: bool = True,
    ) -> None:
        self.step = step  # not in a dataclass: to type checkers a step in a class is a method
        self.args = args
        self.kwargs = kwargs
        self.search_lines = found
        self.chosen = chosen
