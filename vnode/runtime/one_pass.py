"""Emits one pass: a loop over a device's nodes under `shard_map`, then one reduction across devices.

Knows passes, placements and the values so far. Must not know what is computed once, nor any primitive.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from vnode.analysis.forms import WHOLE, Slice, Whole
from vnode.analysis.passes import Pass, Schedule
from vnode.errors import UnsupportedPrimitiveError
from vnode.operators.ordering_barrier import can_be_awaited
from vnode.placement.placement import Placement
from vnode.runtime import device_reductions, node_loops, small_sums
from vnode.runtime.evaluate_recipe import Env, evaluate_recipe
from vnode.runtime.host_prefetch import can_be_waited_for
from vnode.runtime.input_packing import Packing
from vnode.runtime.mesh_function import Divided, Division, refuse_windows, sharded
from vnode.runtime.mode import Mode
from vnode.runtime.node import Node, Once
from vnode.runtime.offloaded_accumulators import stacked_far
from vnode.runtime.output_sharding import Among, handed_on
from vnode.runtime.replicated_region import Together, stands_apart
from vnode.runtime.tree import Tree
from vnode.runtime.values import Values, inner_axes
from vnode.spmd.layout import Layout, replicated
from vnode.spmd.resharding_collectives import convert, convert_after, grows, in_step, placed
from vnode.spmd.sharded_program import long_axes, spec_of

PLATFORMS = ("cpu", "gpu", "tpu")
"""What a plan may have been made for, whatever it is carried out on."""


class PassEmission(Values):
    """An emission as far as its passes go.

    Args:
      schedule: the step.
      placement: where its nodes live.
      inputs: values of the program's inputs; None if others hold other nodes, and put in place what is read.
      mode: what is asked of the emission.
      lane: see `vnode.runtime.emit.emit`, as for what follows.
      slotted: which batched inputs are as devices hold them.
      division: who divides what is computed.
      far: how many of the sums that wait are on the host.
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        inputs: Sequence[Any] | None,
        mode: Mode,
        lane: int = 1,
        slotted: Collection[int] | None = None,
        division: Division | None = None,
        far: int = 0,
    ) -> None:
        super().__init__(schedule, placement, inputs, mode, slotted, division)
        self.alone = inputs is not None  # else others hold other nodes
        self.lane = lane
        self.far = far
        self.once = Once(self.platform)
        self.unawaited: list[Var] = []  # totals that no pass has waited for
        self.once_axes = once_axes(placement, self.division.over_nodes) if division is not None else {}
        # Axes whose size must not show in bits.
        self.exact = {placement.axis} & self.once_axes.keys() if mode is Mode.INVARIANT else set()
        wanted = zip(schedule.flow.program.outputs, self.division.ends, strict=False)
        self.ends = {a: layout for a, layout in wanted if isinstance(a, Var) and layout is not None}

    def run_pass(self, nodes: Pass) -> Any:
        """Emits one pass.

        Returns:
          The totals; or, if other programs hold other nodes, what `collectives.partial_blocks` gives.
        """
        placement, axis = self.placement, self.placement.axis
        shards = [self.shard(var) for var, _ in nodes.sliced_inputs]
        slots = [var in self.collected for var, _ in nodes.sliced_inputs]
        divided = self.divided_pass(nodes)
        lying = divided.inputs if divided else self.lying(nodes)
        # What is known to lie in some way is moved explicitly, before the loop.
        mesh_axes, wanted = long_axes(placement.mesh), lying[1 + len(nodes.sliced_inputs) :]
        given = [
            self.layout(var) if var in self.layouts else end
            for var, end in zip(nodes.whole_inputs, wanted, strict=True)
        ]
        if divided:
            made_so = [*(a.var for a in nodes.accumulators), *(var for var, _ in nodes.collected)]
            found = zip(made_so, divided.dims, strict=True)
            self.dims.update((var, dim) for var, dim in found if dim is not None)
        sums = sums_of(nodes, divided)
        plan = device_reductions.ReductionPlan.of(
            placement.counts, self.lane, self.one_axis, placement.first, placement.virtual_nodes
        )
        made = divided.results[: len(sums)] if divided else [replicated(len(s.shape)) for s in sums]
        lies = [each.complete for each in made]
        ends = self.handed_on(nodes, lies) if self.alone else lies
        among = Among(axis, self.once_axes, bool(self.exact))
        parts = [among.part(*each) for each in zip(sums, made, ends, strict=True)]
        barriers = self.mode is Mode.INVARIANT and self.platform in node_loops.KEEP_BARRIERS
        awaited = self.awaited(nodes, given, wanted)
        if nodes.waits_for_previous:
            awaited += self.unawaited[-1:]
        packing = self.packing(nodes, barriers and divided is None)

        def device_program(
            first: jax.Array,
            count: jax.Array,
            runs: list[jax.Array],
            whole: list[Any],
            shard: list[Any],
            latest: list[Any],
        ) -> tuple[Any, list[Any]]:
            origin = node_loops.opaque(first[0])  # or one device, that knows it, would take a node's number for a count
            packed = packing.packed(lambda i: self.by_node(shard[i], nodes.sliced_inputs[i], shards[i], slots[i]))
            whole = [
                convert_after(value, start, end, self.shape(var), mesh_axes, latest)
                for var, value, start, end in zip(nodes.whole_inputs, whole, given, wanted, strict=True)
            ]

            def take(index: jax.Array) -> list[Any]:
                number = origin + index
                alone = [
                    self.of_node(shard[i], nodes.sliced_inputs[i], shards[i], slots[i], index) for i in packing.alone
                ]
                return [number, *alone, *packing.taken(packed, index)]

            def compute(taken: list[Any]) -> tuple[list[Any], list[Any]]:
                alone = 1 + len(packing.alone)
                taken = [taken[0].reshape(1), *packing.apart(taken[1:alone], taken[alone:])]
                with in_step(everywhere=placement.even, in_branches=placement.size == 1):
                    values = divided([*taken, *whole]) if divided else self.as_node(nodes, [*taken, *whole])
                return values[: len(sums)], values[len(sums) :]

            program = node_loops.NodeProgram(take, compute, placement.waves == 1, barriers)
            late = self.late(nodes, whole)
            buffers = [] if self.scans else self.buffers(nodes, divided, [value for _, value in late])
            after = [value for level, value in late if level] if self.platform in node_loops.ROOM_EARLY else []
            after = [*after, *(latest if nodes.waits_for_previous else [])]
            totals, kept = self.summed(program, sums, parts, plan, count, runs, buffers, after)
            if not self.divides or not self.alone:
                return totals, kept
            # What devices along the other axes have pieces of is combined once, not for every node.
            several = zip(nodes.accumulators, totals, made, parts, ends, strict=True)
            return [
                convert(total, among.divided(start, dim, self.shape(a.var)), end, self.shape(a.var), mesh_axes)
                for a, total, start, dim, end in several
            ], kept

        spec = PartitionSpec
        in_specs = (
            spec(axis),
            spec(axis),
            spec(axis),
            [spec_of(layout) if self.divides else spec() for layout in given],
            [
                sharded(layout, dim, axis) if slot else self.spec_of_batched(layout, form, dim)
                for layout, (_, form), (_, dim), slot in zip(
                    lying[1:], nodes.sliced_inputs, shards, slots, strict=False
                )
            ],
            [spec_of(self.layout(var)) for var in awaited],
        )
        kept_in = divided.results[len(sums) :] if divided else None
        out_specs = (
            [spec_of(layout) for layout in ends] if self.divides and self.alone else spec(),
            [sharded(layout, 0, axis) for layout in kept_in] if kept_in is not None else spec(axis),
        )
        run = jax.shard_map(
            placed(mesh_axes if self.divides else {})(device_program),
            mesh=placement.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(placement.mesh.axis_names) if self.divides else {axis},
            check_vma=False,
        )
        totals, kept = run(
            jnp.asarray(placement.starts, jnp.int32),
            jnp.asarray(placement.counts, jnp.int32),
            [jnp.asarray(table) for table in plan.tables],
            [self.as_stored(var) for var in nodes.whole_inputs],
            [value for value, _ in shards],
            [self.as_stored(var) for var in awaited],
        )
        self.collected.update((var, value) for (var, _), value in zip(nodes.collected, kept, strict=True))
        self.layouts.update((a.var, layout) for a, layout in zip(nodes.accumulators, ends, strict=True))
        if kept_in is not None:
            self.layouts.update((var, layout) for (var, _), layout in zip(nodes.collected, kept_in, strict=True))
        if self.alone and self.waits:
            totals = list(map(node_loops.by_rows, totals))
        return totals

    @property
    def one_axis(self) -> bool:
        """Whether what a device runs in a pass is its own along every axis of the mesh."""
        return self.divides or self.placement.size == len(self.placement.devices)

    @property
    def waits(self) -> bool:
        """Whether compilers are kept from taking memory for a pass long before it begins."""
        return self.mode is not Mode.DIFFERENTIABLE and self.platform in node_loops.ROOM_EARLY

    @property
    def scans(self) -> bool:
        """Whether a pass is a loop of fixed length, alike on all devices."""
        return self.mode is not Mode.INVARIANT and self.placement.even

    def packing(self, nodes: Pass, asked: bool) -> Packing:
        """Which of the batched values that a pass reads are packed: none, if it is not asked for."""
        own = [jax.ShapeDtypeStruct(self.shape_in_node(*each), each[0].aval.dtype) for each in nodes.sliced_inputs]
        several = asked and self.one_axis and self.placement.virtual_nodes > 1
        return Packing.of(own, self.placement.virtual_nodes) if several else Packing((), len(own))

    def summed(
        self,
        program: node_loops.NodeProgram,
        sums: Sequence[node_loops.Sum],
        parts: Sequence[int | None],
        plan: device_reductions.ReductionPlan,
        count: jax.Array,
        runs: Sequence[jax.Array],
        buffers: list[Any],
        after: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Runs a device's nodes and adds up over devices what they contribute.

        Args:
          program: of a node.
          sums: what nodes contribute to.
          parts: for each the dimension along which it is handed on in parts.
          plan: of the order of additions.
          count: of the device's nodes, ``int32[1]``.
          runs: the plan's tables, of this device.
          buffers: where a device puts what is kept of each of its nodes.
          after: values before which there shall be no memory for sums.

        Returns:
          What `run_pass` does, and what is kept of each node.
        """
        axis, waves = self.placement.axis, self.placement.waves
        if self.mode is Mode.INVARIANT:
            number, starts, merges = (table[0] for table in runs)
            held = node_loops.Runs(node_loops.opaque(number), starts, merges)
            if self.stores_pieces(sums, parts):
                tree, nodes = Tree.over(self.placement.virtual_nodes, self.lane), held.starts[held.count]
                return small_sums.summed(program, sums, nodes, self.placement.counts, tree, buffers, axis)
            fold = node_loops.stacked
            if self.platform in node_loops.KEEP_BARRIERS:
                from vnode.runtime.stack_on_chip import stacked_on_chip  # only TPUs need it

                fold = stacked_on_chip
            if self.far:
                fold = functools.partial(stacked_far, far=self.far, left=plan.left)
            rest, exact, kept = node_loops.in_tree_order(
                program, sums, held, plan.depth, plan.most, buffers, fold, after
            )
            combine = (
                functools.partial(device_reductions.totals, parts=parts)
                if self.alone
                else device_reductions.partial_blocks
            )
            return combine(sums, rest, exact, plan, axis), kept
        if self.scans:
            totals, kept = node_loops.scanned(program, sums, waves)
        elif self.mode is Mode.DIFFERENTIABLE:
            totals, kept = node_loops.skipping(program, sums, count[0], waves, buffers)
        else:
            totals, kept = node_loops.counted(program, sums, count[0], buffers)
        return device_reductions.combined(sums, totals, axis, parts), kept

    def stores_pieces(self, sums: Sequence[node_loops.Sum], parts: Sequence[int | None]) -> bool:
        """Whether nodes store their pieces of sums side by side: small ones that all devices are given whole."""
        alone = self.alone and self.one_axis and not self.far and self.platform not in node_loops.KEEP_BARRIERS
        alone = alone and not self.division.planned
        whole = all(part is None for part in parts)
        return alone and whole and small_sums.are_small(sums, self.placement.virtual_nodes)

    def of_node(
        self, value: Any, of: tuple[Var, Slice], lies: tuple[Any, int], in_slots: bool, index: jax.Array
    ) -> Any:
        """The part of one node, by its number on the device, of a device's part of a batched value."""
        (_, form), (_, dim) = of, lies
        if in_slots:
            return lax.dynamic_index_in_dim(value, index, dim, keepdims=False)
        n = self.flow.node_elements(form)
        part = lax.dynamic_slice_in_dim(value, index * n, n, dim)
        return part.reshape(*part.shape[: form.dim], form.outer * n, *part.shape[dim + 1 :])

    def by_node(self, value: Any, of: tuple[Var, Slice], lies: tuple[Any, int], in_slots: bool) -> Any:
        """A device's part of a batched value with the parts of its nodes one after another, ``[nodes, *part]``."""
        (var, form), (_, dim), waves = of, lies, self.placement.waves
        if not in_slots:
            n = self.flow.node_elements(form)
            value = value.reshape(*value.shape[:dim], waves, n, *value.shape[dim + 1 :])
        return jnp.moveaxis(value, dim, 0).reshape(waves, *self.shape_in_node(var, form))

    def late(self, nodes: Pass, whole: Sequence[Any]) -> list[tuple[int, Any]]:
        """The whole values that a pass reads, latest first, with the level at which each can be there."""
        if self.mode is Mode.DIFFERENTIABLE or not self.one_axis:  # an element of a sharded one is dear
            return []
        late = [(self.there_at(var), value) for var, value in zip(nodes.whole_inputs, whole, strict=True)]
        return sorted(late, key=lambda pair: pair[0], reverse=True)

    def buffers(self, nodes: Pass, divided: Divided | None, after: Sequence[Any]) -> list[Any]:
        """Where a device puts what is kept of each of its nodes, in a pass that reads such whole values.

        These, latest first, are what keeps compilers from making the buffers before the pass.
        """
        shapes = list[tuple[tuple[int, ...], Any]]()
        for i, (var, form) in enumerate(nodes.collected):
            shape = divided.local(len(nodes.accumulators) + i) if divided else self.shape_in_node(var, form)
            shapes.append(((self.placement.waves, *shape), var.aval.dtype))
        if self.placement.even and self.platform in node_loops.ROOM_EARLY:  # otherwise there are places without a node
            return node_loops.room(shapes, after)
        return [node_loops.unwritten(*each, after) for each in shapes]

    def there_at(self, var: Var) -> int:
        """The level at which a whole value can be there: one later than its pieces if it is completed or gathered."""
        state = self.flow.states[var]
        return state.level if isinstance(state.form, Whole) else state.level + (not state.materialized)

    def handed_on(self, nodes: Pass, lies: Sequence[Layout]) -> list[Layout]:
        """How a pass hands on its totals, of which it could hand on all that `lies` says: as who reads them wants them.

        Where the next that is computed once reads a part only, a part is handed on: a gradient of what is sharded.
        """
        if not self.once_axes or not self.divides or self.division.rooms is not None:
            return list(lies)
        stages = itertools.dropwhile(lambda stage: stage.node_pass is not nodes, self.schedule.stages)
        after = [
            action
            for stage in itertools.islice(stages, 1, None)
            for action in stage.once_actions
            if not stands_apart(action)
        ]
        together = Together.of(after, self.readers, self.flow.program, self.once, self.ends)
        ends = {a.var: layout for a, layout in zip(nodes.accumulators, lies, strict=True)}
        return list(handed_on(ends, self.layout, together.reading, self.axes, self.once_axes, self.exact).values())

    def as_node(self, nodes: Pass, given: Sequence[Any], platform: str | None = None) -> list[Any]:
        """What one node computes in a pass, of its number, its parts of batched values, and whole values.

        As it is written for another platform, if one is named: what a plan for that says of it holds on this one.
        """
        number, *values = given
        placement = self.placement
        env: Env = dict(zip([*nodes.sliced_inputs, *((var, WHOLE) for var in nodes.whole_inputs)], values, strict=True))
        flow, platform = self.flow, platform or self.platform
        node = Node(number[0], placement.virtual_nodes, flow.node_sizes, flow.batch, platform)
        return evaluate_recipe(nodes.recipe, env, node, self.one_by_one)

    @property
    def one_by_one(self) -> bool:
        """Whether the parts of a node that share nothing are to wait for one another.

        XLA's CPU backend computes first what can be computed first, and so would hold what the backward passes of all
        need at once; the compilers for other devices look for an order that takes little memory.
        """
        return self.platform == "cpu" and self.mode is not Mode.DIFFERENTIABLE and not self.axes

    def given_shapes(self, nodes: Pass) -> list[jax.ShapeDtypeStruct]:
        """What a node is given in a pass: its number, its parts of batched values, and whole values."""
        return [
            jax.ShapeDtypeStruct((1,), jnp.int32),
            *(jax.ShapeDtypeStruct(self.shape_in_node(var, form), var.aval.dtype) for var, form in nodes.sliced_inputs),
            *(self.type_of(var, self.as_stored(var)) for var in nodes.whole_inputs),
        ]

    def lying(self, nodes: Pass) -> list[Layout]:
        """How it lies."""
        parts = (self.layout_in_node(var, form) for var, form in nodes.sliced_inputs)
        return [replicated(1), *parts, *map(self.layout_in_pass, nodes.whole_inputs)]

    def divided_pass(self, nodes: Pass) -> Divided | None:
        """What a node computes in a pass, divided over the axes that nodes are not spread over; None if XLA does so."""
        if not self.axes:
            return None
        shapes, layouts = self.given_shapes(nodes), self.lying(nodes)
        on = [self.platform, *(platform for platform in PLATFORMS if platform != self.platform)]
        run, *others = (functools.partial(self.as_node, nodes, platform=platform) for platform in on)
        pieces = [a.monoid for a in nodes.accumulators]
        records = self.division.records
        rooms = self.rooms_of(
            [None, *(var for var, _ in nodes.sliced_inputs), *nodes.whole_inputs]
        )  # None for the node's number
        try:
            divided = Divided(
                run, shapes, layouts, self.axes, self.platform, pieces, records, others=others, rooms=rooms
            )
        except UnsupportedPrimitiveError:
            if self.divides:
                raise
            return None
        if self.divides:
            return divided
        refuse_windows(divided.flow)
        return None

    def complete(self, nodes: Pass, totals: Sequence[Any]) -> None:
        """Takes up the totals of a pass."""
        for accumulator, total in zip(nodes.accumulators, totals, strict=True):
            if self.mode is Mode.FAST and self.placement.size > 1:
                total = device_reductions.all_bits(total)
            if accumulator.rounded is not None:
                total = total.astype(accumulator.rounded)
            total = total.astype(accumulator.var.aval.dtype)
            self.take_up(accumulator.var, self.dims.get(accumulator.var), total)
            self.latest = total if can_be_waited_for(total) else self.latest
        self.unawaited += [a.var for a in nodes.accumulators if can_be_awaited(a.var.aval)]

    def awaited(self, nodes: Pass, given: Sequence[Layout], wanted: Sequence[Layout]) -> list[Var]:
        """What a pass waits for if it gathers what it reads: what all before it sum.

        If it waited for less, sums over devices of that could be under way to the end, and take room twice.

        Args:
          nodes: the pass.
          given: how the whole values lie that it reads.
          wanted: how nodes read them.
        """
        axes = long_axes(self.placement.mesh)
        several = zip(nodes.whole_inputs, given, wanted, strict=True)
        gathers = any(grows(start, end, self.shape(var), axes, var.aval.dtype) for var, start, end in several)
        if not gathers or not self.divides or not self.waits:
            return []
        found, self.unawaited = self.unawaited, []
        return found


def once_axes(placement: Placement, over_nodes: bool) -> dict[str, int]:
    """The axes of a placement's mesh over which what is computed once is divided: the nodes' only if that is asked."""
    return long_axes(placement.mesh) if over_nodes else inner_axes(placement)


def sums_of(nodes: Pass, divided: Divided | None = None) -> list[node_loops.Sum]:
    """What the nodes of a pass contribute to, each device its own part of it if it is divided."""
    shapes = [divided.local(i) if divided else a.var.aval.shape for i, a in enumerate(nodes.accumulators)]
    return [node_loops.Sum(a.monoid, shape, a.dtype) for a, shape in zip(nodes.accumulators, shapes, strict=True)]
