"""A program whose slices begin in bounds: what jax moves into bounds when it slices is moved there before.

Knows jaxprs, at every depth. Must not know which primitives slice, nor who slices what.

Of two slices, one cut out of the other, XLA (before jaxlib 0.12) makes one that begins at the sum of both starts, and
moves only that into bounds: where a start was out of bounds, it reads beyond what the first slice had cut off. vnode
cuts what a program computes into parts, so a program that slices once may be cut twice.
"""

from __future__ import annotations

import operator

from jax.extend.core import Jaxpr, JaxprEqn

from vnode.analysis.rewriting import Rewriter
from vnode.operators.clamped_slices import with_starts_in_bounds


def clamp_slice_starts(jaxpr: Jaxpr) -> Jaxpr:
    """A program that computes the same, in which every slice begins where it is in bounds.

    Args:
      jaxpr: an open jaxpr.

    Returns:
      An open jaxpr with the same variables; `jaxpr` itself if there is nothing to do.
    """
    return SliceStartClamper().rewrite(jaxpr)


class SliceStartClamper(Rewriter):
    """Puts equations that move starts into bounds before slices."""

    def rewrite_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        equations = [new for eqn in jaxpr.eqns for new in self._equations(eqn)]
        same = len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns))
        return jaxpr if same else jaxpr.replace(eqns=equations)

    def _equations(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        params = self.rewrite_params(eqn.params)
        eqn = eqn if params is eqn.params else eqn.replace(params=params)
        return with_starts_in_bounds(eqn) or [eqn]
