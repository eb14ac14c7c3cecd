"""A schedule and a placement -> how sums over nodes are formed: in words, in bytes of buffers, and in bytes sent.

Knows accumulators, placements, and how devices add. Must not know what is summed, nor where it is said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from vnode.analysis.passes import Accumulator, Pass, Schedule
from vnode.operators import Monoid
from vnode.placement.node_layout import Layout
from vnode.placement.placement import Placement, even_counts
from vnode.runtime.device_reductions import ReductionPlan
from vnode.show.units import in_groups, several


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The way in which sums over nodes are formed.

    Attributes:
      mode: ``"invariant"`` or ``"fast"``.
      lane: of an invariant one: consecutive nodes that are added one after another.
      sharded: arguments that XLA divides over the axis of the nodes.
      local: shapes of one device's parts of sums that are divided over other axes of a mesh, by what they are sums of.
    """

    mode: str
    lane: int = 1
    sharded: tuple[str, ...] = ()
    local: Mapping[Var, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def device_part(self, accumulator: Accumulator) -> Any:
        """The type of one device's part of a sum."""
        aval = accumulator.var.aval
        return aval.update(shape=self.local.get(accumulator.var, aval.shape), dtype=np.dtype(accumulator.dtype))

    def bytes(self, accumulator: Accumulator) -> int:
        """The bytes of one device's part of a sum."""
        held = self.device_part(accumulator)
        return math.prod(held.shape) * held.dtype.itemsize

    def pending_sums(self, counts: tuple[int, ...]) -> int:
        """The number of pending sums that a device holds for each accumulator, besides the accumulator itself."""
        if self.mode == "fast":
            return 0
        return ReductionPlan.from_counts(counts, self.lane, True).max_depth

    def pending_bytes(self, made: Schedule, placement: Placement | Layout) -> int:
        """The bytes of pending sums on a device, in the pass that has most."""
        total = max((sum(self.bytes(a) for a in p.accumulators if is_inexact(a)) for p in made.passes), default=0)
        return self.pending_sums(placement.counts) * total

    def cheaper(self, placement: Placement | Layout) -> str:
        """Ways to have fewer pending sums; empty if there are none."""
        held, rows, nodes = self.pending_sums(placement.counts), len(placement.counts), placement.virtual_nodes
        if not held:
            return ""
        ways = ['none with reduction="fast"']

        def devices(rows: int) -> str:
            return several(rows * placement.together, "device") + in_groups(rows, placement.together, "row")

        if self.lane < -(-nodes // rows):
            one = "device" if placement.together == 1 else "row"
            most = f"up to {devices(rows)}" if rows > 1 else f"one {one} only"
            ways.append(f"none with lanes={rows}, which keeps the bits of {most}")
        doubled = [rows << k for k in range(1, nodes.bit_length()) if rows << k <= nodes]
        more = ((d, self.pending_sums(tuple(even_counts(nodes, d, self.lane)))) for d in doubled)
        fewer, fewest = next(((d, left) for d, left in more if left < held), (rows, held))
        if fewest < held:
            ways.append(f"{fewest or 'none'} on {devices(fewer)}")
        return "; ".join(ways)

    def bytes_sent(self, nodes: Pass, placement: Placement | Layout) -> int:
        """Bytes that a device sends after a pass."""
        devices = len(placement.counts)
        blocks = 1
        if self.mode == "invariant":
            blocks = ReductionPlan.from_counts(placement.counts, self.lane, True).max_remaining
        total = sum(self.bytes(a) * (1 + (blocks if is_inexact(a) else 1)) for a in nodes.accumulators)
        return int((devices - 1) / devices * total)

    def text(self, placement: Placement | Layout) -> str:
        """The order of reduction, in one line of the report."""
        if self.mode == "fast":
            return "fast: each device in node order, then across devices in any order"
        leaves = "the nodes" if self.lane == 1 else f"{-(-placement.virtual_nodes // self.lane)} lanes of {self.lane}"
        return f"invariant: in the order of a tree over {leaves}"

    def exceptions(self, made: Schedule, placement: Placement | Layout) -> tuple[str, ...]:
        """The values for which an invariant reduction does not promise equal bits."""
        if self.mode == "fast":
            return ()
        found = []
        if any(a.monoid is Monoid.PROD and jnp.issubdtype(a.dtype, jnp.complexfloating) for a in accumulators(made)):
            found.append("not of products of complex numbers: compilers round those as they like")
        if self.sharded:
            named = ", ".join(self.sharded[:4]) + (", ..." if len(self.sharded) > 4 else "")
            found.append(f"not of what the step makes of arguments that are themselves sharded over devices: {named}")
        if isinstance(placement, Placement) and len(placement.groups) > 1:
            found.append(
                "not of what is computed once: on groups of devices it is compiled apart and may round otherwise"
            )
        return tuple(found)


def accumulators(made: Schedule) -> list[Accumulator]:
    """The accumulators of a schedule and of its nested schedules."""
    inner = [inner for stage in made.stages for action in stage.once_actions for inner in action.schedules]
    return [a for p in made.passes for a in p.accumulators] + [a for one in inner for a in accumulators(one)]


def is_inexact(accumulator: Accumulator) -> bool:
    return jnp.issubdtype(accumulator.dtype, jnp.inexact)
