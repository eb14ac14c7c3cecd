"""How nodes are spread over the rows of a mesh, and so what a row has of batched values.

Knows the flow of the batch. Must not know machines, nor how a row's program is emitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.core import Var

from vnode.analysis.forms import Slice
from vnode.analysis.states import Flow


@dataclasses.dataclass(frozen=True)
class Spread:
    """Nodes of one row, of all rows.

    Attributes:
      nodes: of all rows, V.
      turns: of the row that stands for all.
      even: whether every row has as many.
    """

    nodes: int
    turns: int
    even: bool

    @staticmethod
    def of(counts: Sequence[int], row: int | None = None) -> Spread:
        """The spread of so many nodes on each row.

        Args:
          counts: of the rows.
          row: which one stands for all; by default the fullest.
        """
        return Spread(sum(counts), max(counts) if row is None else counts[row], len({*counts}) == 1)

    def fits(self, flow: Flow) -> bool:
        """Whether rows have equal parts of a batch, without padding: they are shards of an array then."""
        return self.even and flow.needs_no_padding(self.nodes)

    def part(self, flow: Flow, var: Var) -> tuple[int, ...]:
        """The shape of a row's part of a batched value."""
        form, shape = flow.states[var].form, list(var.aval.shape)
        assert isinstance(form, Slice)
        shape[form.dim] = form.outer * self.turns * flow.node_elements(form)
        return tuple(shape)

    def given(self, flow: Flow, var: Var) -> bool:
        """Whether rows are given parts of an argument of the step, which is then sharded over them."""
        form = flow.states[var].form
        return isinstance(form, Slice) and form.outer == 1 and self.fits(flow)
