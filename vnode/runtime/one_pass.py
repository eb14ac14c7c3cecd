"""Pass -> a loop over a device's nodes under `shard_map`, then one reduction across devices.

Knows passes, placements and the values so far. Must not know once-computed values, nor any primitive.
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
from vnode.runtime.host_prefetch import has_barrier_element
from vnode.runtime.input_packing import Packing
from vnode.runtime.mesh_function import Division, MeshFunction, refuse_windows, stacked_spec
from vnode.runtime.mode import Mode
from vnode.runtime.node import Node, WholeEvaluator
from vnode.runtime.offloaded_accumulators import fold_pieces_offloaded
from vnode.runtime.output_sharding import SummingDevices, choose_output_layouts
from vnode.runtime.replicated_region import ReplicatedRegion, is_separate
from vnode.runtime.tree import Tree
from vnode.runtime.values import Values, inner_axes
from vnode.spmd.layout import Layout, replicated
from vnode.spmd.resharding_collectives import convert, convert_after, devices_in_step, grows, with_axis_indices
from vnode.spmd.sharded_program import long_axes, spec_of

PLATFORMS = ("cpu", "gpu", "tpu")
"""Platforms for which a plan may have been made, whatever platform runs it."""


class PassEmission(Values):
    """The passes of an emission.

    Args:
      schedule: the step.
      placement: where the nodes live.
      inputs: values of the program's inputs; None if other programs hold other nodes, and the caller provides all
        values.
      mode: the guarantee asked of the emission.
      lane: see `vnode.runtime.emit.emit`, as for the following.
      slotted: the batched inputs given per slot.
      division: who partitions the computation.
      far: number of offloaded sums.
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
        self.alone = inputs is not None  # otherwise other programs hold other nodes
        self.lane = lane
        self.far = far
        self.once = WholeEvaluator(self.platform)
        self.unawaited: list[Var] = []  # totals that no pass has waited for
        self.once_axes = once_axes(placement, self.division.over_nodes) if division is not None else {}
        # axes whose size must not change bits
        self.exact = {placement.axis} & self.once_axes.keys() if mode is Mode.INVARIANT else set()
        wanted = zip(schedule.flow.program.outputs, self.division.ends, strict=False)
        self.ends = {a: layout for a, layout in wanted if isinstance(a, Var) and layout is not None}

    def run_pass(self, nodes: Pass) -> Any:
        """Emits one pass.

        Returns:
          The totals; or, if other programs hold other nodes, the result of `device_reductions.reduce_to_blocks`.
        """
        placement, axis = self.placement, self.placement.axis
        shards = [self.shard(var) for var, _ in nodes.sliced_inputs]
        slots = [var in self.collected for var, _ in nodes.sliced_inputs]
        divided = self.divided_pass(nodes)
        lying = divided.inputs if divided else self.node_input_layouts(nodes)
        # values with a known layout are resharded explicitly, before the loop
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
        plan = device_reductions.ReductionPlan.from_counts(
            placement.counts, self.lane, self.is_local_to_device, placement.first, placement.virtual_nodes
        )
        made = divided.results[: len(sums)] if divided else [replicated(len(s.shape)) for s in sums]
        lies = [each.without_partial for each in made]
        ends = self.total_layouts(nodes, lies) if self.alone else lies
        among = SummingDevices(axis, self.once_axes, bool(self.exact))
        parts = [among.divided_dim(*each) for each in zip(sums, made, ends, strict=True)]
        barriers = self.mode is Mode.INVARIANT and self.platform in node_loops.KEEP_BARRIERS
        awaited = self.barrier_values(nodes, given, wanted)
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
            origin = node_loops.opaque_count(
                first[0]
            )  # otherwise the compiler for one device would replace a node's number by the loop counter
            packed = packing.pack(lambda i: self.node_parts(shard[i], nodes.sliced_inputs[i], shards[i], slots[i]))
            whole = [
                convert_after(value, start, end, self.shape(var), mesh_axes, latest)
                for var, value, start, end in zip(nodes.whole_inputs, whole, given, wanted, strict=True)
            ]

            def take(index: jax.Array) -> list[Any]:
                number = origin + index
                alone = [
                    self.node_part(shard[i], nodes.sliced_inputs[i], shards[i], slots[i], index)
                    for i in packing.unpacked
                ]
                return [number, *alone, *packing.select_node(packed, index)]

            def compute(taken: list[Any]) -> tuple[list[Any], list[Any]]:
                alone = 1 + len(packing.unpacked)
                taken = [taken[0].reshape(1), *packing.unpack(taken[1:alone], taken[alone:])]
                with devices_in_step(everywhere=placement.even, in_branches=placement.size == 1):
                    values = divided([*taken, *whole]) if divided else self.node_function(nodes, [*taken, *whole])
                return values[: len(sums)], values[len(sums) :]

            program = node_loops.NodeProgram(take, compute, placement.waves == 1, barriers)
            late = self.wholes_by_level(nodes, whole)
            buffers = [] if self.is_fixed_length else self.buffers(nodes, divided, [value for _, value in late])
            after = [value for level, value in late if level] if self.platform in node_loops.ROOM_EARLY else []
            after = [*after, *(latest if nodes.waits_for_previous else [])]
            totals, kept = self.sum_over_devices(program, sums, parts, plan, count, runs, buffers, after)
            if not self.divides or not self.alone:
                return totals, kept
            # partial values over the other axes are combined once, not for every node
            several = zip(nodes.accumulators, totals, made, parts, ends, strict=True)
            return [
                convert(total, among.divide_dim(start, dim, self.shape(a.var)), end, self.shape(a.var), mesh_axes)
                for a, total, start, dim, end in several
            ], kept

        spec = PartitionSpec
        in_specs = (
            spec(axis),
            spec(axis),
            spec(axis),
            [spec_of(layout) if self.divides else spec() for layout in given],
            [
                stacked_spec(layout, dim, axis) if slot else self.spec_of_batched(layout, form, dim)
                for layout, (_, form), (_, dim), slot in zip(
                    lying[1:], nodes.sliced_inputs, shards, slots, strict=False
                )
            ],
            [spec_of(self.layout(var)) for var in awaited],
        )
        kept_in = divided.results[len(sums) :] if divided else None
        out_specs = (
            [spec_of(layout) for layout in ends] if self.divides and self.alone else spec(),
            [stacked_spec(layout, 0, axis) for layout in kept_in] if kept_in is not None else spec(axis),
        )
        run = jax.shard_map(
            with_axis_indices(mesh_axes if self.divides else {})(device_program),
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
        if self.alone and self.has_barriers:
            totals = list(map(node_loops.as_row_major, totals))
        return totals

    @property
    def is_local_to_device(self) -> bool:
        """Whether every mesh axis divides only other devices' work, so that a pass is local to each device."""
        return self.divides or self.placement.size == len(self.placement.devices)

    @property
    def has_barriers(self) -> bool:
        """Whether barriers keep compilers from allocating a pass's buffers long before it begins."""
        return self.mode is not Mode.DIFFERENTIABLE and self.platform in node_loops.ROOM_EARLY

    @property
    def is_fixed_length(self) -> bool:
        """Whether a pass is a loop with a static trip count, alike on all devices."""
        return self.mode is not Mode.INVARIANT and self.placement.even

    def packing(self, nodes: Pass, asked: bool) -> Packing:
        """The packing of the batched values that a pass reads; nothing is packed if `asked` is false."""
        own = [jax.ShapeDtypeStruct(self.shape_in_node(*each), each[0].aval.dtype) for each in nodes.sliced_inputs]
        several = asked and self.is_local_to_device and self.placement.virtual_nodes > 1
        return Packing.from_parts(own, self.placement.virtual_nodes) if several else Packing((), len(own))

    def sum_over_devices(
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
        """Runs a device's nodes and reduces their contributions over devices.

        Args:
          program: the computation of one node.
          sums: the sums.
          parts: for each sum the dimension along which its total is divided among devices, or None.
          plan: the order of additions.
          count: the device's number of nodes, ``int32[1]``.
          runs: the plan's tables for this device.
          buffers: buffers for the values kept of the device's nodes.
          after: values before which no memory for sums is allocated.

        Returns:
          The result of `run_pass`, and the values kept of each node.
        """
        axis, waves = self.placement.axis, self.placement.waves
        if self.mode is Mode.INVARIANT:
            number, starts, merges = (table[0] for table in runs)
            held = node_loops.Runs(node_loops.opaque_count(number), starts, merges)
            if self.stores_pieces(sums, parts):
                tree, nodes = Tree.from_lanes(self.placement.virtual_nodes, self.lane), held.starts[held.count]
                return small_sums.sum_small(program, sums, nodes, self.placement.counts, tree, buffers, axis)
            fold = node_loops.fold_pieces
            if self.platform in node_loops.KEEP_BARRIERS:
                from vnode.runtime.stack_on_chip import fold_pieces_on_chip  # only for TPUs

                fold = fold_pieces_on_chip
            if self.far:
                fold = functools.partial(fold_pieces_offloaded, far=self.far, left=plan.max_remaining)
            rest, exact, kept = node_loops.add_in_tree_order(
                program, sums, held, plan.max_depth, plan.max_merges, buffers, fold, after
            )
            combine = (
                functools.partial(device_reductions.reduce_all_nodes, parts=parts)
                if self.alone
                else device_reductions.reduce_to_blocks
            )
            return combine(sums, rest, exact, plan, axis), kept
        if self.is_fixed_length:
            totals, kept = node_loops.scan_nodes(program, sums, waves)
        elif self.mode is Mode.DIFFERENTIABLE:
            totals, kept = node_loops.scan_skipping_padding(program, sums, count[0], waves, buffers)
        else:
            totals, kept = node_loops.loop_over_nodes(program, sums, count[0], buffers)
        return device_reductions.combine_in_any_order(sums, totals, axis, parts), kept

    def stores_pieces(self, sums: Sequence[node_loops.Sum], parts: Sequence[int | None]) -> bool:
        """Whether nodes store their contributions side by side: small sums that all devices receive whole."""
        alone = (
            self.alone and self.is_local_to_device and not self.far and self.platform not in node_loops.KEEP_BARRIERS
        )
        alone = alone and not self.division.planned
        whole = all(part is None for part in parts)
        return alone and whole and small_sums.are_small(sums, self.placement.virtual_nodes)

    def node_part(
        self, value: Any, of: tuple[Var, Slice], lies: tuple[Any, int], in_slots: bool, index: jax.Array
    ) -> Any:
        """One node's part of a device's shard of a batched value, by the node's position on the device."""
        (_, form), (_, dim) = of, lies
        if in_slots:
            return lax.dynamic_index_in_dim(value, index, dim, keepdims=False)
        n = self.flow.node_elements(form)
        part = lax.dynamic_slice_in_dim(value, index * n, n, dim)
        return part.reshape(*part.shape[: form.dim], form.outer * n, *part.shape[dim + 1 :])

    def node_parts(self, value: Any, of: tuple[Var, Slice], lies: tuple[Any, int], in_slots: bool) -> Any:
        """A device's shard of a batched value as its nodes' parts, ``[nodes, *part]``."""
        (var, form), (_, dim), waves = of, lies, self.placement.waves
        if not in_slots:
            n = self.flow.node_elements(form)
            value = value.reshape(*value.shape[:dim], waves, n, *value.shape[dim + 1 :])
        return jnp.moveaxis(value, dim, 0).reshape(waves, *self.shape_in_node(var, form))

    def wholes_by_level(self, nodes: Pass, whole: Sequence[Any]) -> list[tuple[int, Any]]:
        """The whole values that a pass reads, latest first, each with the level at which it can be ready."""
        if (
            self.mode is Mode.DIFFERENTIABLE or not self.is_local_to_device
        ):  # reading an element of a sharded value is slow
            return []
        late = [(self.ready_level(var), value) for var, value in zip(nodes.whole_inputs, whole, strict=True)]
        return sorted(late, key=lambda pair: pair[0], reverse=True)

    def buffers(self, nodes: Pass, divided: MeshFunction | None, after: Sequence[Any]) -> list[Any]:
        """Buffers for the values kept of a device's nodes, in a pass that reads whole values.

        Dependence on these, latest first, keeps compilers from allocating the buffers before the pass.
        """
        shapes = list[tuple[tuple[int, ...], Any]]()
        for i, (var, form) in enumerate(nodes.collected):
            shape = divided.local_shape(len(nodes.accumulators) + i) if divided else self.shape_in_node(var, form)
            shapes.append(((self.placement.waves, *shape), var.aval.dtype))
        if self.placement.even and self.platform in node_loops.ROOM_EARLY:  # otherwise some slots have no node
            return node_loops.unwritten_buffers(shapes, after)
        return [node_loops.unwritten_buffer(*each, after) for each in shapes]

    def ready_level(self, var: Var) -> int:
        """The level at which a whole value can be ready: one after its partial values, if it is combined or
        gathered."""
        state = self.flow.states[var]
        return state.level if isinstance(state.form, Whole) else state.level + (not state.materialized)

    def total_layouts(self, nodes: Pass, lies: Sequence[Layout]) -> list[Layout]:
        """Chooses the layouts of a pass's totals, no coarser than `lies`, by the layouts in which they are read.

        If the next once-computed task reads a shard only, each device receives its shard: the gradient of a sharded
        parameter.
        """
        if not self.once_axes or not self.divides or self.division.uneven is not None:
            return list(lies)
        stages = itertools.dropwhile(lambda stage: stage.node_pass is not nodes, self.schedule.stages)
        after = [
            action
            for stage in itertools.islice(stages, 1, None)
            for action in stage.once_actions
            if not is_separate(action)
        ]
        together = ReplicatedRegion.from_actions(after, self.readers, self.flow.program, self.once, self.ends)
        ends = {a.var: layout for a, layout in zip(nodes.accumulators, lies, strict=True)}
        return list(
            choose_output_layouts(
                ends, self.layout, together.read_layouts, self.axes, self.once_axes, self.exact
            ).values()
        )

    def node_function(self, nodes: Pass, given: Sequence[Any], platform: str | None = None) -> list[Any]:
        """The computation of one node in a pass, from its number, its parts of batched values, and whole values.

        If a platform is named, emitted as for that platform, so that another platform's plan still applies.
        """
        number, *values = given
        placement = self.placement
        env: Env = dict(zip([*nodes.sliced_inputs, *((var, WHOLE) for var in nodes.whole_inputs)], values, strict=True))
        flow, platform = self.flow, platform or self.platform
        node = Node(number[0], placement.virtual_nodes, flow.node_sizes, flow.batch, platform)
        return evaluate_recipe(nodes.recipe, env, node, self.serializes_independent)

    @property
    def serializes_independent(self) -> bool:
        """Whether independent parts of a node's computation wait for one another.

        XLA's CPU backend computes early whatever it can, and would keep the residuals of all backward passes live at
        once. The compilers for other devices look for an order with low memory.
        """
        return self.platform == "cpu" and self.mode is not Mode.DIFFERENTIABLE and not self.axes

    def node_input_shapes(self, nodes: Pass) -> list[jax.ShapeDtypeStruct]:
        """Shapes of a node's inputs in a pass: its number, its parts of batched values, and whole values."""
        return [
            jax.ShapeDtypeStruct((1,), jnp.int32),
            *(jax.ShapeDtypeStruct(self.shape_in_node(var, form), var.aval.dtype) for var, form in nodes.sliced_inputs),
            *(self.type_of(var, self.as_stored(var)) for var in nodes.whole_inputs),
        ]

    def node_input_layouts(self, nodes: Pass) -> list[Layout]:
        """Layouts of a node's inputs in a pass."""
        parts = (self.layout_in_node(var, form) for var, form in nodes.sliced_inputs)
        return [replicated(1), *parts, *map(self.layout_in_pass, nodes.whole_inputs)]

    def divided_pass(self, nodes: Pass) -> MeshFunction | None:
        """One node's computation in a pass, partitioned over the axes that nodes are not spread over; None if XLA
        does so."""
        if not self.axes:
            return None
        shapes, layouts = self.node_input_shapes(nodes), self.node_input_layouts(nodes)
        on = [self.platform, *(platform for platform in PLATFORMS if platform != self.platform)]
        run, *others = (functools.partial(self.node_function, nodes, platform=platform) for platform in on)
        pieces = [a.monoid for a in nodes.accumulators]
        records = self.division.records
        rooms = self.uneven_of(
            [None, *(var for var, _ in nodes.sliced_inputs), *nodes.whole_inputs]
        )  # None for the node's number
        try:
            divided = MeshFunction(
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

    def finish_totals(self, nodes: Pass, totals: Sequence[Any]) -> None:
        """Stores the totals of a pass."""
        for accumulator, total in zip(nodes.accumulators, totals, strict=True):
            if self.mode is Mode.FAST and self.placement.size > 1:
                total = device_reductions.read_all_bits(total)
            if accumulator.rounded is not None:
                total = total.astype(accumulator.rounded)
            total = total.astype(accumulator.var.aval.dtype)
            self.take_up(accumulator.var, self.dims.get(accumulator.var), total)
            self.latest = total if has_barrier_element(total) else self.latest
        self.unawaited += [a.var for a in nodes.accumulators if can_be_awaited(a.var.aval)]

    def barrier_values(self, nodes: Pass, given: Sequence[Layout], wanted: Sequence[Layout]) -> list[Var]:
        """The values that a pass waits for if it gathers its inputs: all totals of earlier passes.

        If it waited for fewer, reductions of the others could still be in flight, and need their memory twice.

        Args:
          nodes: the pass.
          given: layouts of the whole values that it reads.
          wanted: the layouts in which nodes read them.
        """
        axes = long_axes(self.placement.mesh)
        several = zip(nodes.whole_inputs, given, wanted, strict=True)
        gathers = any(grows(start, end, self.shape(var), axes, var.aval.dtype) for var, start, end in several)
        if not gathers or not self.divides or not self.has_barriers:
            return []
        found, self.unawaited = self.unawaited, []
        return found


def once_axes(placement: Placement, over_nodes: bool) -> dict[str, int]:
    """The mesh axes that partition once-computed tasks; the nodes' axis only if `over_nodes`."""
    return long_axes(placement.mesh) if over_nodes else inner_axes(placement)


def sums_of(nodes: Pass, divided: MeshFunction | None = None) -> list[node_loops.Sum]:
    """The sums of a pass; per-device parts of them if the node's computation is partitioned."""
    shapes = [divided.local_shape(i) if divided else a.var.aval.shape for i, a in enumerate(nodes.accumulators)]
    return [node_loops.Sum(a.monoid, shape, a.dtype) for a, shape in zip(nodes.accumulators, shapes, strict=True)]
