"""A flow through a replica's program -> the same flow with the passes' accumulators reduced across replicas.

Knows flows through the program of a replica, and how devices combine accumulators. Must not know machines, costs, nor
how layouts were found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from vnode.partition.cost.op_kinds import LOOP_BUFFERS
from vnode.partition.plan.meshes import NODES
from vnode.partition.plan.other_replicas import GATHER_FROM_REPLICAS, NODE_NUMBERS, SUM_OVER_REPLICAS
from vnode.runtime import device_reductions, node_loops
from vnode.runtime.device_reductions import Parts, ReductionPlan
from vnode.runtime.offloaded_accumulators import can_offload
from vnode.spmd.resharding_collectives import extend_dim
from vnode.spmd.sharding_flow import Flow, Step


@dataclasses.dataclass(frozen=True)
class ReplicaReduction:
    """The reduction of accumulators across replicas.

    Attributes:
      counts: nodes of each replica.
      lane: number of consecutive nodes that are added in sequence, before the tree.
      invariant: whether sums are formed in the order of a fixed tree, on any devices.
      sums_on_host: number of waiting partial sums on the host, the lowest of the stack; 0 for passes in loops.
    """

    counts: tuple[int, ...]
    lane: int
    invariant: bool
    sums_on_host: int = 0

    @functools.cached_property
    def plan(self) -> ReductionPlan:
        """The order of the tree."""
        return ReductionPlan.from_counts(self.counts, self.lane, True)

    @property
    def waiting(self) -> int:
        """Partial sums per accumulator that wait on a device, besides the running sum."""
        return self.plan.max_depth if self.invariant else 0

    @property
    def farthest(self) -> int:
        """How many of them may be on the host: blocks left at the end would have to come back for the collective."""
        return self.waiting if self.plan.max_remaining == 1 else 0

    @property
    def crossings(self) -> int:
        """Transfers of partial sums to and from the host in a pass, on the busiest device."""
        return (
            max(sum(fold.count_crossings(self.sums_on_host)) for fold in self.plan.device_folds)
            if self.sums_on_host
            else 0
        )

    def waiting_on_device(self, s: node_loops.Sum) -> int:
        """The number of an accumulator's waiting partial sums that are on the device."""
        return self.waiting - (min(self.sums_on_host, self.waiting) if can_offload(s.shape, s.dtype) else 0)

    def totals(self, values: Sequence[Any], monoids: Sequence[Any], parts: Parts) -> list[Any]:
        """Reduces accumulators across replicas, by collectives; with one replica, they are the totals.

        Args:
          values: a device's accumulators.
          monoids: the monoid of each.
          parts: for each, the dimension along which its total is scattered; None if every device gets all.
        """
        sums = [node_loops.Sum(m, v.shape, v.dtype) for m, v in zip(monoids, values, strict=True)]
        if not self.invariant:
            return self.in_any_order(sums, values, parts) if len(self.counts) > 1 else list(values)
        several = list(zip(sums, values, parts, strict=True))
        exact = [each for each in several if each[0].exact]
        inexact = [s for s in sums if not s.exact]
        left = self.loop_results(inexact, [v for s, v, _ in several if not s.exact])
        if len(self.counts) == 1:
            return device_reductions.merge_sums(sums, left.first, [v for _, v, _ in exact])
        cut = [dim for s, _, dim in several if not s.exact]
        blocks = device_reductions.reduce_in_tree_order(inexact, left, self.plan, NODES, cut)
        found = self.in_any_order([s for s, _, _ in exact], [v for _, v, _ in exact], [dim for _, _, dim in exact])
        return device_reductions.merge_sums(sums, [block for (block,) in blocks], found)

    def loop_results(self, sums: Sequence[node_loops.Sum], last: Sequence[Any]) -> node_loops.PartialBlocks:
        """The partial blocks after the loop over a replica's nodes, given its last sums."""
        height = jnp.int32(len(self.plan.device_folds[0].rest))
        if not self.waiting or not sums:
            return node_loops.PartialBlocks(list(last), [], list(last), height)
        first, others = list(last), []
        for i, (s, v) in enumerate(zip(sums, last, strict=True)):
            if on_device := self.waiting_on_device(s):
                first[i], *more = LOOP_BUFFERS.bind(v, count=on_device - 1)
                others += [] if self.sums_on_host else more
        return node_loops.PartialBlocks(first, others, list(last), height)

    def in_any_order(self, sums: Sequence[node_loops.Sum], values: Sequence[Any], parts: Parts) -> list[Any]:
        """Totals by one collective for each accumulator; compilers combine them where they can."""
        several = zip(sums, values, parts, strict=True)
        return [device_reductions.combine_in_any_order([s], [value], NODES, [dim])[0] for s, value, dim in several]


class ReplicaTotals(Primitive):
    """The totals of a pass over all replicas, as one primitive."""

    multiple_results = True

    def bind(self, *args: Any, **params: Any) -> Any:
        return params["across"].totals(args, params["monoids"], params["parts"])


TOTALS = ReplicaTotals("totals")


class GatherBatched(Primitive):
    """Gathers the replicas' parts of a batched value."""

    def bind(self, value: Any, /, *, across: ReplicaReduction, dim: int, size: int) -> Any:
        most = max(across.counts) * -(-size // sum(across.counts))  # of any replica: an all-gather needs equal parts
        value = extend_dim(value, dim, 0, most - value.shape[dim])
        found = jax.lax.all_gather(value, NODES, axis=dim, tiled=True)
        return found if found.shape[dim] == size else jax.lax.slice_in_dim(found, 0, size, axis=dim)


PUT_TOGETHER = GatherBatched("put_together")


def reduce_over_replicas(flow: Flow, across: ReplicaReduction) -> Flow:
    """Lowers the equations of a flow that need other replicas: totals, gathers and numbers of nodes.

    Consecutive totals, those of one pass, become one equation.

    Args:
      flow: layouts through the program of a replica.
      across: the reduction across replicas.
    """
    steps: list[Step] = []
    for over, several in itertools.groupby(flow.steps, lambda step: step.eqn.primitive is SUM_OVER_REPLICAS):
        if over:
            steps.append(combined_totals(list(several), across))
        else:
            inner = dataclasses.replace(across, sums_on_host=0)
            steps += [lower_step(step, inner) for step in several]
    program = flow.program
    equations = [step.eqn for step in steps]
    made = program.derive(program.inputs, equations, program.outputs)
    return dataclasses.replace(flow, program=made, steps=tuple(steps))


def lower_step(step: Step, across: ReplicaReduction) -> Step:
    """Lowers a step that is no total, and the steps in its bodies."""
    eqn = step.eqn
    if eqn.primitive is GATHER_FROM_REPLICAS:
        eqn = eqn.replace(primitive=PUT_TOGETHER, params={**eqn.params, "across": across})
    elif eqn.primitive is NODE_NUMBERS:
        (made,) = jax.make_jaxpr(lambda: jax.lax.iota(jnp.int32, eqn.params["turns"]))().eqns
        eqn = eqn.replace(primitive=made.primitive, params=made.params)
    else:
        return dataclasses.replace(step, bodies=tuple(reduce_over_replicas(body, across) for body in step.bodies))
    return dataclasses.replace(step, eqn=eqn, choice=None, materializable=False)


def combined_totals(steps: Sequence[Step], across: ReplicaReduction) -> Step:
    """Lowers the totals of one pass to one equation, which every device evaluates on its parts."""
    first = steps[0].eqn
    lying = [(step.operands[0].cut_axes, step.made[0].cut_axes) for step in steps]
    parts = tuple(made.get(NODES) if NODES not in given else None for given, made in lying)
    eqn = first.replace(
        primitive=TOTALS,
        invars=[step.eqn.invars[0] for step in steps],
        outvars=[step.eqn.outvars[0] for step in steps],
        params={"across": across, "monoids": tuple(step.eqn.params["monoid"] for step in steps), "parts": parts},
    )
    operands, results = (tuple(step.operands[0] for step in steps), tuple(step.results[0] for step in steps))
    made = tuple(step.made[0] for step in steps)
    return Step(eqn, operands, made, results, leaves=any(step.leaves for step in steps))
