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
      counts: nodes of each replica.
      replica: the number of the replica that stands for all.
    """

    counts: tuple[int, ...]
    replica: int

    @staticmethod
    def from_counts(counts: Sequence[int]) -> Spread:
        """The spread with these numbers of nodes; the fullest replica stands for all."""
        return Spread(tuple(counts), counts.index(max(counts)))

    @property
    def nodes(self) -> int:
        """Nodes of all replicas, V."""
        return sum(self.counts)

    @property
    def iterations(self) -> int:
        """Nodes of the replica that stands for all."""
        return self.counts[self.replica]

    @property
    def even(self) -> bool:
        """Whether all replicas have equally many nodes."""
        return len({*self.counts}) == 1

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
