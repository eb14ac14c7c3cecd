"""A program whose slices begin in bounds: what jax moves into bounds when it slices is moved there before.

Knows jaxprs, at every depth. Must not know which primitives slice, nor who slices what.

Of two slices, one cut out of the other, XLA (before jaxlib 0.12) makes one that begins at the sum of both starts, and
moves only that into bounds: where a start was out of bounds, it reads beyond what the first slice had cut off. vnode
cuts what a program computes into parts, so a program that slices once may be cut twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from vnode.operators.bounds import with_starts_in_bounds


def sliced_in_bounds(jaxpr: Jaxpr) -> Jaxpr:
    """A program that computes the same, in which every slice begins where it is in bounds.

    Args:
      jaxpr: an open jaxpr.

    Returns:
      An open jaxpr with the same variables; `jaxpr` itself if there is nothing to do.
    """
    return Bounds().jaxpr(jaxpr)


class Bounds:
    """Rewrites a jaxpr and those in its equations, each once."""

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Jaxpr, Jaxpr]] = {}  # with the old one, or another could get its number

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in self._jaxprs:
            equations = [new for eqn in jaxpr.eqns for new in self._equations(eqn)]
            same = len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns))
            self._jaxprs[id(jaxpr)] = jaxpr, jaxpr if same else jaxpr.replace(eqns=equations)
        return self._jaxprs[id(jaxpr)][1]

    def _equations(self, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        params = {name: self._param(value) for name, value in eqn.params.items()}
        if any(params[name] is not value for name, value in eqn.params.items()):
            eqn = eqn.replace(params=params)
        yield from with_starts_in_bounds(eqn) or [eqn]

    def _param(self, value: Any) -> Any:
        if isinstance(value, Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, ClosedJaxpr):
            made = self.jaxpr(value.jaxpr)
            return value if made is value.jaxpr else value.replace(jaxpr=made)
        if type(value) in (tuple, list):
            made = [self._param(v) for v in value]
            return value if all(map(operator.is_, made, value)) else type(value)(made)
        return value
