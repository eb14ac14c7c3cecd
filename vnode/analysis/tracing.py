"""From a function to its program.

Knows the order of things: trace, make values of references, inline. Must not know batches or devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from vnode.analysis.program import Program, inline
from vnode.analysis.references import without_references


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function as jax traced it.

    Attributes:
      program: over the flattened arguments, and after them the values that the function closed over and jax is tracing.
      captured: those values: an outer `jax.grad`, `jax.vmap` or `jax.jit` must see them as arguments.
      function: the same as a function of all these, with the derivative rules that the user's function has.
    """

    program: Program
    captured: list[Any]
    function: Callable[..., list[Any]]


def trace(fun: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fun` abstractly, makes values of what it mutates in place, and inlines its calls.

    Args:
      fun: any function of pytrees of arrays.
      *args: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      What jax traced.
    """
    closed = jax.make_jaxpr(fun)(*args)
    traced = [isinstance(value, jax.core.Tracer) for value in closed.consts]
    captured = [value for value, is_traced in zip(closed.consts, traced, strict=True) if is_traced]
    count = len(closed.jaxpr.invars)

    def function(*values: Any) -> list[Any]:
        outer = iter(values[count:])
        consts = [next(outer) if is_traced else value for value, is_traced in zip(closed.consts, traced, strict=True)]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*values[:count])

    plain = without_references(closed)
    return Traced(inline(plain.jaxpr, plain.consts), captured, function)
