"""Numbers of nodes per replica -> the part of batched values that a replica has.

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
    """The spread of nodes over replicas.

    Attributes:
      nodes: nodes of all replicas, V.
      iterations: nodes of the replica that stands for all.
      even: whether all replicas have equally many.
    """

    nodes: int
    iterations: int
    even: bool

    @staticmethod
    def from_counts(counts: Sequence[int], replica: int | None = None) -> Spread:
        """The spread with these numbers of nodes.

        Args:
          counts: nodes of each replica.
          replica: the one that stands for all; by default the fullest.
        """
        return Spread(sum(counts), max(counts) if replica is None else counts[replica], len({*counts}) == 1)

    def fits(self, flow: Flow) -> bool:
        """Whether replicas have equal parts of a batch, without padding, so that they are shards of an array."""
        return self.even and flow.needs_no_padding(self.nodes)

    def part(self, flow: Flow, var: Var) -> tuple[int, ...]:
        """The shape of a replica's part of a batched value."""
        form, shape = flow.states[var].form, list(var.aval.shape)
        assert isinstance(form, Slice)
        shape[form.dim] = form.outer * self.iterations * flow.node_elements(form)
        return tuple(shape)

    def is_sharded_argument(self, flow: Flow, var: Var) -> bool:
        """Whether an argument of the step is sharded over replicas."""
        form = flow.states[var].form
        return isinstance(form, Slice) and form.outer == 1 and self.fits(flow)
