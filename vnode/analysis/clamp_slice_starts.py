"""A jaxpr -> the same jaxpr with the starts of its dynamic slices clamped by equations of their own.

Knows jaxprs, at every depth. Must not know which primitives slice, nor who slices what.

    y = dynamic_slice(x, i)   ->   j = clamp(0, i, n - size);  y = dynamic_slice(x, j)

XLA (before jaxlib 0.12) merges a slice of a slice into one slice. It adds the two starts and clamps only their sum.
If the first start was out of bounds, the merged slice reads beyond the first slice. vnode slices the operands of a
program's equations, so a program with one slice may become a slice of a slice.
"""

from __future__ import annotations

import operator

from jax.extend.core import Jaxpr, JaxprEqn

from vnode.analysis.rewriting import Rewriter
from vnode.operators.clamped_slices import with_starts_in_bounds


def clamp_slice_starts(jaxpr: Jaxpr) -> Jaxpr:
    """Clamps the start of every dynamic slice.

    Args:
      jaxpr: an open jaxpr.

    Returns:
      An open jaxpr with the same variables; `jaxpr` itself if it has no such slice.
    """
    return SliceStartClamper().rewrite(jaxpr)


class SliceStartClamper(Rewriter):
    """Inserts clamps before dynamic slices."""

    def rewrite_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        equations = [new for eqn in jaxpr.eqns for new in self._equations(eqn)]
        same = len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns))
        return jaxpr if same else jaxpr.replace(eqns=equations)

    def _equations(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        params = self.rewrite_params(eqn.params)
        eqn = eqn if params is eqn.params else eqn.replace(params=params)
        return with_starts_in_bounds(eqn) or [eqn]
