"""How nodes are spread over the replicas of a mesh, and so what a replica has of batched values.

Knows the flow of the batch. Must not know machines, nor how a replica's program is emitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.core import Var

from vnode.analysis.forms import Slice
from vnode.analysis.states import Flow


@dataclasses.dataclass(frozen=True)
class Spread:
    """Nodes of one replica, of all replicas.

    Attributes:
      nodes: of all replicas, V.
      turns: of the replica that stands for all.
      even: whether every replica has as many.
    """

    nodes: int
    iterations: int
    even: bool

    @staticmethod
    def from_counts(counts: Sequence[int], replica: int | None = None) -> Spread:
        """The spread of so many nodes on each replica.

        Args:
          counts: of the replicas.
          replica: which one stands for all; by default the fullest.
        """
        return Spread(sum(counts), max(counts) if replica is None else counts[replica], len({*counts}) == 1)

    def fits(self, flow: Flow) -> bool:
        """Whether replicas have equal parts of a batch, without padding: they are shards of an array then."""
        return self.even and flow.needs_no_padding(self.nodes)

    def part(self, flow: Flow, var: Var) -> tuple[int, ...]:
        """The shape of a replica's part of a batched value."""
        form, shape = flow.states[var].form, list(var.aval.shape)
        assert isinstance(form, Slice)
        shape[form.dim] = form.outer * self.iterations * flow.node_elements(form)
        return tuple(shape)

    def is_sharded_argument(self, flow: Flow, var: Var) -> bool:
        """Whether replicas are given parts of an argument of the step, which is then sharded over them."""
        form = flow.states[var].form
        return isinstance(form, Slice) and form.outer == 1 and self.fits(flow)
