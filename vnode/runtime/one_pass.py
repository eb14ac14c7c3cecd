"""Pass -> a loop over a device's nodes under `shard_map`, then one reduction across devices.

    pass: for each of V nodes:  g += x.T @ h       ->      on each device:  for each of its own nodes:  g += x.T @ h
                                                           then:            g = g of all devices, added in tree order

Knows passes, placements and the values so far. Must not know once-computed values, nor any primitive.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from vnode.analysis.forms import Slice, Whole
from vnode.analysis.passes import Pass, Schedule
from vnode.errors import UnsupportedPrimitiveError
from vnode.placement.placement import Placement
from vnode.runtime import device_reductions, node_loops, small_sums
from vnode.runtime.input_packing import Packing
from vnode.runtime.mesh_function import Division, MeshFunction, refuse_windows, stacked_spec
from vnode.runtime.mesh_values import MeshValues, inner_axes
from vnode.runtime.mode import Mode
from vnode.runtime.offloaded_accumulators import fold_pieces_offloaded
from vnode.runtime.output_sharding import SummingDevices, choose_output_layouts
from vnode.runtime.pass_layout import BatchedInput, DeviceInputs, PassLayout
from vnode.runtime.replicated_region import ReplicatedRegion, is_separate
from vnode.runtime.tree import Tree
from vnode.spmd.layout import Layout, replicated
from vnode.spmd.resharding_collectives import convert, convert_after, devices_in_step, grows, with_axis_indices
from vnode.spmd.sharded_program import long_axes, spec_of

PLATFORMS = ("cpu", "gpu", "tpu")
"""Platforms for which a plan may have been made, whatever platform runs it."""


class PassEmission(MeshValues):
    """The passes of an emission.

    Args:
      schedule: the step.
      placement: where the nodes live.
      inputs: values of the program's inputs; None if other programs hold other nodes, and the caller provides all
        values. Passes then return blocks of sums, not totals.
      mode: the guarantee asked of the emission.
      lane: see `vnode.runtime.emit.emit`, as for the following.
      slotted: the batched inputs given per slot.
      division: who partitions the computation.
      far: the number of waiting sums that are offloaded to the host.
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
        self.holds_all_nodes = inputs is not None
        self.lane = lane
        self.far = far
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
        layout, placement = self.lay_out_pass(nodes), self.placement
        run = jax.shard_map(
            functools.partial(self.run_on_device, layout),
            mesh=placement.mesh,
            in_specs=self.input_specs(layout),
            out_specs=self.output_specs(layout),
            axis_names=set(placement.mesh.axis_names) if self.divides else {placement.axis},
            check_vma=False,
        )
        totals, kept = run(
            jnp.asarray(placement.starts, jnp.int32),
            jnp.asarray(placement.counts, jnp.int32),
            [jnp.asarray(table) for table in layout.order.tables],
            [self.as_stored(var) for var in nodes.whole_inputs],
            [each.value for each in layout.batched],
            [self.as_stored(var) for var in layout.awaited],
        )
        self.collected.update((var, value) for (var, _), value in zip(nodes.collected, kept, strict=True))
        self.layouts.update((a.var, end) for a, end in zip(nodes.accumulators, layout.ends, strict=True))
        if layout.kept is not None:
            self.layouts.update((var, end) for (var, _), end in zip(nodes.collected, layout.kept, strict=True))
        if self.holds_all_nodes and self.has_barriers:
            totals = list(map(node_loops.as_row_major, totals))
        return totals

    def lay_out_pass(self, nodes: Pass) -> PassLayout:
        """Decides how the values of a pass lie; emits what brings its batched inputs there."""
        placement = self.placement
        batched = [self.batched_input(var, form) for var, form in nodes.sliced_inputs]
        divided = self.divided_pass(nodes)
        inputs = divided.inputs if divided else self.node_input_layouts(nodes)
        # values with a known layout are resharded explicitly, before the loop
        wanted = inputs[1 + len(batched) :]
        given = [
            self.layout(var) if var in self.layouts else end
            for var, end in zip(nodes.whole_inputs, wanted, strict=True)
        ]
        if divided:
            self.note_dims(nodes, divided.dims)
        sums = sums_of(nodes, divided)
        order = device_reductions.ReductionPlan.from_counts(
            placement.counts, self.lane, self.is_local_to_device, placement.first, placement.virtual_nodes
        )
        made = divided.results[: len(sums)] if divided else [replicated(len(s.shape)) for s in sums]
        combined = [each.without_partial for each in made]
        ends = self.total_layouts(nodes, combined) if self.holds_all_nodes else combined
        parts = [self.summing_devices.divided_dim(*each) for each in zip(sums, made, ends, strict=True)]
        barriers = self.mode is Mode.INVARIANT and self.platform in node_loops.KEEP_BARRIERS
        awaited = self.barrier_values(nodes, given, wanted)
        if nodes.waits_for_previous:
            awaited += self.unawaited[-1:]
        return PassLayout(
            node_pass=nodes,
            batched=batched,
            divided=divided,
            inputs=inputs,
            given=given,
            sums=sums,
            made=made,
            ends=ends,
            parts=parts,
            kept=divided.results[len(sums) :] if divided else None,
            order=order,
            awaited=awaited,
            packing=self.packing(batched, barriers and divided is None),
            barriers=barriers,
        )

    def batched_input(self, var: Var, form: Slice) -> BatchedInput:
        """A batched value as a pass reads it."""
        value, dim = self.shard(var)
        elements, shape = self.flow.node_elements(form), self.shape_in_node(var, form)
        return BatchedInput(form, value, dim, var in self.collected, elements, shape)

    def input_specs(self, layout: PassLayout) -> tuple[Any, ...]:
        """The specs of the arguments of `run_on_device`, besides the layout."""
        axis = self.placement.axis
        batched = zip(layout.batched, layout.inputs[1:], strict=False)
        return (
            PartitionSpec(axis),
            PartitionSpec(axis),
            PartitionSpec(axis),
            [spec_of(each) if self.divides else PartitionSpec() for each in layout.given],
            [
                stacked_spec(own, each.dim, axis) if each.in_slots else self.spec_of_batched(own, each.form, each.dim)
                for each, own in batched
            ],
            [spec_of(self.layout(var)) for var in layout.awaited],
        )

    def output_specs(self, layout: PassLayout) -> tuple[Any, Any]:
        """The specs of the results of `run_on_device`."""
        axis = self.placement.axis
        totals = [spec_of(each) for each in layout.ends] if self.divides and self.holds_all_nodes else PartitionSpec()
        if layout.kept is None:
            return totals, PartitionSpec(axis)
        return totals, [stacked_spec(each, 0, axis) for each in layout.kept]

    def run_on_device(
        self,
        layout: PassLayout,
        first: jax.Array,
        count: jax.Array,
        runs: list[jax.Array],
        whole: list[Any],
        shards: list[Any],
        latest: list[Any],
    ) -> tuple[Any, list[Any]]:
        """One device's part of a pass, under `shard_map`.

        Args:
          layout: of the pass.
          first: the number of the device's first node, ``int32[1]``.
          count: the device's number of nodes, ``int32[1]``.
          runs: this device's rows of `ReductionPlan.tables`, int32 ``[1]``, ``[1, most + 1]`` and ``[1, most]``.
          whole: the device's shards of whole values.
          shards: the device's shards of batched values.
          latest: the values that the pass waits for.

        Returns:
          The totals, and the values that are kept of each node.
        """
        with with_axis_indices(long_axes(self.placement.mesh) if self.divides else {}):
            nodes, mesh_axes = layout.node_pass, long_axes(self.placement.mesh)
            # otherwise the compiler for one device would replace a node's number by the loop counter
            origin = node_loops.opaque_count(first[0])
            packed = layout.pack(shards, self.placement.waves)
            resharded = zip(nodes.whole_inputs, whole, layout.given, layout.wanted, strict=True)
            whole = [
                convert_after(value, start, end, self.shape(var), mesh_axes, latest)
                for var, value, start, end in resharded
            ]
            inputs = DeviceInputs(layout, origin, shards, packed, whole, functools.partial(self.evaluate_node, layout))
            program = node_loops.NodeProgram(inputs.take, inputs.compute, self.placement.waves == 1, layout.barriers)
            late = self.wholes_by_level(nodes, whole)
            buffers = [] if self.is_fixed_length else self.buffers(layout, [value for _, value in late])
            after = [value for level, value in late if level] if self.platform in node_loops.ROOM_EARLY else []
            after = [*after, *(latest if nodes.waits_for_previous else [])]
            totals, kept = self.sum_over_devices(layout, program, count, runs, buffers, after)
            if not self.divides or not self.holds_all_nodes:
                return totals, kept
            # partial values over the other axes are combined once, not for every node
            contributions = zip(nodes.accumulators, totals, layout.made, layout.parts, layout.ends, strict=True)
            divide = self.summing_devices.divide_dim
            return [
                convert(total, divide(start, dim, self.shape(a.var)), end, self.shape(a.var), mesh_axes)
                for a, total, start, dim, end in contributions
            ], kept

    def evaluate_node(self, layout: PassLayout, inputs: Sequence[Any]) -> list[Any]:
        """The computation of one node on a device, from its number, its parts of batched values, and whole values."""
        even, alone = self.placement.even, self.placement.size == 1
        with devices_in_step(everywhere=even, in_branches=alone):
            return layout.divided(inputs) if layout.divided else self.node_function(layout.node_pass, inputs)

    @property
    def summing_devices(self) -> SummingDevices:
        """The devices that a sum over nodes is divided among."""
        return SummingDevices(self.placement.axis, self.once_axes, bool(self.exact))

    @property
    def is_local_to_device(self) -> bool:
        """Whether XLA divides no pass among devices: vnode does, or the mesh has no axis besides the nodes'."""
        return self.divides or self.placement.size == len(self.placement.devices)

    @property
    def has_barriers(self) -> bool:
        """Whether barriers keep compilers from allocating a pass's buffers long before it begins."""
        return self.mode is not Mode.DIFFERENTIABLE and self.platform in node_loops.ROOM_EARLY

    @property
    def is_fixed_length(self) -> bool:
        """Whether a pass is a loop with a static trip count, the same on all devices."""
        return self.mode is not Mode.INVARIANT and self.placement.even

    def packing(self, batched: Sequence[BatchedInput], asked: bool) -> Packing:
        """The packing of the batched values that a pass reads; nothing is packed if `asked` is false."""
        own = [jax.ShapeDtypeStruct(each.shape, each.value.dtype) for each in batched]
        several = asked and self.is_local_to_device and self.placement.virtual_nodes > 1
        return Packing.from_parts(own, self.placement.virtual_nodes) if several else Packing((), len(own))

    def sum_over_devices(
        self,
        layout: PassLayout,
        program: node_loops.NodeProgram,
        count: jax.Array,
        runs: Sequence[jax.Array],
        buffers: list[Any],
        after: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Runs a device's nodes and reduces their contributions over devices.

        Args:
          layout: of the pass.
          program: the computation of one node.
          count: the device's number of nodes, ``int32[1]``.
          runs: this device's rows of `ReductionPlan.tables`.
          buffers: buffers for the values kept of the device's nodes.
          after: values before which no memory for sums is allocated.

        Returns:
          The result of `run_pass`, and the values kept of each node.
        """
        axis, waves = self.placement.axis, self.placement.waves
        sums, parts, order = layout.sums, layout.parts, layout.order
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
                fold = functools.partial(fold_pieces_offloaded, far=self.far, left=order.max_remaining)
            rest, exact, kept = node_loops.add_in_tree_order(
                program, sums, held, order.max_depth, order.max_merges, buffers, fold, after
            )
            combine = (
                functools.partial(device_reductions.reduce_all_nodes, parts=parts)
                if self.holds_all_nodes
                else device_reductions.reduce_to_blocks
            )
            return combine(sums, rest, exact, order, axis), kept
        if self.is_fixed_length:
            totals, kept = node_loops.scan_nodes(program, sums, waves)
        elif self.mode is Mode.DIFFERENTIABLE:
            totals, kept = node_loops.scan_skipping_padding(program, sums, count[0], waves, buffers)
        else:
            totals, kept = node_loops.loop_over_nodes(program, sums, count[0], buffers)
        return device_reductions.combine_in_any_order(sums, totals, axis, parts), kept

    def stores_pieces(self, sums: Sequence[node_loops.Sum], parts: Sequence[int | None]) -> bool:
        """Whether nodes store their contributions side by side: small sums that all devices receive whole."""
        complete = self.holds_all_nodes and self.is_local_to_device
        plain = not self.far and not self.division.planned and self.platform not in node_loops.KEEP_BARRIERS
        undivided = all(part is None for part in parts)
        return complete and plain and undivided and small_sums.are_small(sums, self.placement.virtual_nodes)

    def wholes_by_level(self, nodes: Pass, whole: Sequence[Any]) -> list[tuple[int, Any]]:
        """The whole values that a pass reads, latest first, each with the level at which it can be ready.

        Empty where nothing waits for them: in differentiable programs, and where XLA shards whole values, since reading
        an element of a sharded value is slow.
        """
        if self.mode is Mode.DIFFERENTIABLE or not self.is_local_to_device:
            return []
        late = [(self.ready_level(var), value) for var, value in zip(nodes.whole_inputs, whole, strict=True)]
        return sorted(late, key=lambda pair: pair[0], reverse=True)

    def buffers(self, layout: PassLayout, after: Sequence[Any]) -> list[Any]:
        """Buffers for the values kept of a device's nodes, ``[waves, *part]`` each.

        Args:
          layout: of the pass.
          after: whole values that the pass reads, latest first. The buffers depend on the first suitable one, so that
            compilers do not allocate them before the pass.
        """
        nodes, divided = layout.node_pass, layout.divided
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

    def total_layouts(self, nodes: Pass, combined: Sequence[Layout]) -> list[Layout]:
        """Chooses the layouts of a pass's totals, by the layouts in which they are read.

        Example: the gradient of a sharded parameter is read in shards, so each device receives its shard only.

        Args:
          nodes: the pass.
          combined: for each total its coarsest layout: that of a device's sum, combined over the inner axes.
        """
        if not self.once_axes or not self.divides or self.uneven is not None:
            return list(combined)
        stages = itertools.dropwhile(lambda stage: stage.node_pass is not nodes, self.schedule.stages)
        after = [
            action
            for stage in itertools.islice(stages, 1, None)
            for action in stage.once_actions
            if not is_separate(action)
        ]
        region = ReplicatedRegion.from_actions(after, self.readers, self.flow.program, self.once, self.ends)
        ends = {a.var: layout for a, layout in zip(nodes.accumulators, combined, strict=True)}
        return list(
            choose_output_layouts(
                ends, self.layout, region.read_layouts, self.axes, self.once_axes, self.exact
            ).values()
        )

    def node_input_layouts(self, nodes: Pass) -> list[Layout]:
        """Layouts of a node's inputs in a pass."""
        parts = (self.layout_in_node(var, form) for var, form in nodes.sliced_inputs)
        return [replicated(1), *parts, *map(self.layout_in_pass, nodes.whole_inputs)]

    def divided_pass(self, nodes: Pass) -> MeshFunction | None:
        """One node's computation in a pass, partitioned over the inner axes; None if XLA partitions it.

        Raises:
          UnsupportedPrimitiveError: it has an effect, which every device would repeat.
          PartitionError: XLA would compute the gradient of its windows wrongly (`refuse_windows`).
        """
        if not self.axes:
            return None
        shapes, layouts = self.node_input_shapes(nodes), self.node_input_layouts(nodes)
        on = [self.platform, *(platform for platform in PLATFORMS if platform != self.platform)]
        run, *others = (functools.partial(self.node_function, nodes, platform=platform) for platform in on)
        pieces = [a.monoid for a in nodes.accumulators]
        records = self.division.records
        rooms = self.uneven_of(nodes.whole_inputs, [var for var, _ in nodes.sliced_inputs], before=1)  # its number
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
