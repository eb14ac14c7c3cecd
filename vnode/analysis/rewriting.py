"""A jaxpr -> a rewritten jaxpr, with the jaxprs in its equations' parameters rewritten too, each once.

Knows how jaxprs are held in equations. Must not know what is rewritten, nor why.
"""

from __future__ import annotations

import operator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


class Rewriter:
    """A base class: `rewrite_jaxpr` rewrites one jaxpr, and calls `rewrite_params` for the jaxprs in its equations."""

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Jaxpr, Jaxpr]] = {}  # with the old one, so that its id is not reused

    def rewrite(self, jaxpr: Jaxpr) -> Jaxpr:
        """The rewritten jaxpr; cached."""
        if id(jaxpr) not in self._jaxprs:
            self._jaxprs[id(jaxpr)] = jaxpr, self.rewrite_jaxpr(jaxpr)
        return self._jaxprs[id(jaxpr)][1]

    def rewrite_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        """Rewrites one jaxpr; may return it unchanged."""
        raise NotImplementedError

    def rewrite_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """An equation's parameters with rewritten jaxprs; the same dictionary if none changes."""
        made = {name: self._rewrite_param(value) for name, value in params.items()}
        return params if all(map(operator.is_, made.values(), params.values())) else made

    def _rewrite_param(self, value: Any) -> Any:
        if isinstance(value, Jaxpr):
            made, consts = self.rewrite(value), getattr(value, "consts", ())  # since jax 0.12 it may have values, too
            return ClosedJaxpr(made, consts) if consts and made is not value else made
        if isinstance(value, ClosedJaxpr):
            made = self.rewrite(value.jaxpr)
            return value if made is value.jaxpr else value.replace(jaxpr=made)
        if type(value) in (tuple, list):
            several = [self._rewrite_param(v) for v in value]
            return value if all(map(operator.is_, several, value)) else type(value)(several)
        return value
