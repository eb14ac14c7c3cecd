"""Values of a schedule -> arrays on the devices of a mesh: their layouts, and conversions between layouts.

Knows flows, layouts and placements. Must not know how values are computed, nor any primitive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jax.sharding import PartitionSpec

from vnode.analysis.forms import Form, Slice
from vnode.analysis.passes import Schedule
from vnode.analysis.program import Atom
from vnode.operators.in_program import as_array
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch
from vnode.runtime import node_loops
from vnode.runtime.host_prefetch import fetch_to_device, is_on_host
from vnode.runtime.mesh_function import Division, stacked_spec
from vnode.runtime.mode import Mode
from vnode.runtime.node import restore_batch_order
from vnode.runtime.schedule_interpreter import ScheduleInterpreter
from vnode.spmd.layout import Layout, replicated, restrict_to_axes
from vnode.spmd.resharding_collectives import convert, with_axis_indices
from vnode.spmd.sharded_program import long_axes, spec_of
from vnode.spmd.uneven_blocks import Share, restore, store


class MeshValues(ScheduleInterpreter):
    """The values of an emission so far, held by the devices of a mesh.

    Args:
      schedule: the step.
      placement: where the nodes live.
      inputs: values of the program's inputs, as `vnode.runtime.emit.emit` takes them; None if the caller provides all
        values.
      mode: the guarantee asked of the emission.
      slotted: the batched inputs given per slot.
      division: who partitions the computation over mesh axes that nodes are not spread over; XLA by default.

    Attributes:
      stacked: the collected values that a loop computed; their slots are dimension 1, not 0.
      offloaded: values in host memory, with their specs.
      layouts: layouts of values that do not have the layout of a whole one.
      arguments: the values that are arguments of the step, in memory as they are.
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        inputs: Sequence[Any] | None,
        mode: Mode,
        slotted: Collection[int] | None,
        division: Division | None,
    ) -> None:
        self.division = division or Division(automatic=True)
        platform = placement.devices[0].platform
        axes = inner_axes(placement) if division is not None else {}
        super().__init__(schedule, placement, mode, platform, axes, self.division.uneven)
        program = self.flow.program
        self.stacked: set[Var] = set()
        self.slotted = slotted is not None
        self.arguments: set[Var] = set()
        self.divides = not self.division.automatic
        self.by_xla = division is not None and division.automatic  # once-computed values, from shards
        known = zip(program.inputs, self.division.layouts, strict=False)
        self.layouts = {var: layout for var, layout in known if layout is not None and not layout.is_whole}
        self.offloaded: dict[Var, tuple[Any, PartitionSpec]] = {}
        for i, (var, value) in enumerate(zip(program.inputs, inputs, strict=True)) if inputs is not None else ():
            batched = isinstance(self.flow.states[var].form, Slice)
            if isinstance(value, ShardedBatch):
                self.collected[var], *_ = value.parts
            elif slotted is not None and i in slotted and batched:
                self.collected[var] = value
            elif not batched and var not in self.dims and is_on_host(value):
                spec = self.division.specs[i] if i < len(self.division.specs) else None
                self.offloaded[var] = value, spec or PartitionSpec()
            else:
                self.store_input(var, value)

    def layout(self, var: Var) -> Layout:
        """The layout of a whole value; of one kept for all nodes, its layout after the gather."""
        if var in self.collected_dims:  # restored
            return replicated(len(var.aval.shape))
        layout, form = self.layouts.get(var) or replicated(len(var.aval.shape)), self.flow.states[var].form
        return without_cut(form.dim, layout) if isinstance(form, Slice) else layout

    def layout_in_pass(self, var: Var) -> Layout:
        """The layout in which nodes read a value: whole along their own axis."""
        return restrict_to_axes(self.axes, self.layout(var), self.shape(var))

    def layout_in_node(self, var: Var, form: Slice) -> Layout:
        """The layout of one node's part of a batched value; a value not kept per node is not cut along the batch."""
        kept = self.layouts.get(var) if var in self.collected else None
        if kept is None:
            return self.layout_in_pass(var)
        shape = [*self.shape(var, self.collected_dims)]
        shape[form.dim] = self.shape_in_node(var, form)[form.dim]  # `kept` counts its indices
        return restrict_to_axes(self.axes, kept, shape)

    def spec_of_batched(self, layout: Layout, form: Slice, dim: int) -> PartitionSpec:
        """The `PartitionSpec` of a batched value whose dimension `dim` counts nodes, after the runs if there are
        any."""
        entries = [*spec_of(layout)] if self.divides else [None] * (form.dim + 1)
        return PartitionSpec(
            *entries[: form.dim], *[None] * (dim - form.dim), self.placement.axis, *entries[form.dim + 1 :]
        )

    def make_whole(self, var: Var) -> Any:
        if var in self.offloaded:
            value, spec = self.offloaded.pop(var)
            return fetch_to_device(value, self.latest, spec, self.placement.mesh)
        if var in self.rooms:
            assert self.uneven is not None
            return self.restore_from_blocks(self.rooms[var], self.dims[var], self.uneven.share)
        value = self.gather_batched(var)
        if self.mode is Mode.INVARIANT and var not in self.arguments:
            value = self.materialize_input(value)
        return value

    def gather_batched(self, var: Var) -> Any:
        """Gathers a batched value on each device; its layout over the inner axes stays."""
        if var in self.batched:
            return self.replicate(self.batched[var])
        if not self.divides or var in self.collected_dims:
            return self.replicate(self.read_in_batch_order(var))
        form, placement, mesh_axes = self.flow.states[var].form, self.placement, long_axes(self.placement.mesh)
        assert isinstance(form, Slice)
        kept = self.layout_in_node(var, form)
        start, end = (Layout((None, *each.dims)) for each in (kept, self.layout_in_pass(var)))

        def gather_device(own: Any) -> Any:
            held = lax.all_gather(own, placement.axis, tiled=True)
            held = held if placement.even else held[np.array(placement.slots)]
            shape = (placement.nodes, *self.shape_in_node(var, form))
            return restore_batch_order(
                convert(held, start, end, shape, mesh_axes), form, self.flow.node_elements(form), self.units(form)
            )

        return jax.shard_map(
            with_axis_indices(mesh_axes)(gather_device),
            mesh=placement.mesh,
            in_specs=stacked_spec(kept, 0, placement.axis),
            out_specs=spec_of(self.layout(var)),
            check_vma=False,
        )(jnp.moveaxis(self.collected_by_slot(var), int(var in self.stacked), 0))

    def output(self, atom: Atom) -> Any:
        if isinstance(atom, Var) and isinstance(self.flow.states[atom].form, Slice):
            if self.divides and atom in self.collected and not self.has_equal_shards:  # no shards of an array
                return self.read(atom)
            return self.batched[atom] if atom in self.batched else self.read_in_batch_order(atom)
        value = self.read(atom)
        return jnp.asarray(value, dtype=atom.aval.dtype) if isinstance(atom, Literal) else value

    def as_region_operand(self, form: Form | None, atom: Atom) -> Any:
        """An operand of a loop or branch in the form it expects; a whole value may stand for one that becomes
        batched later."""
        return self.output(atom) if isinstance(form, Slice) else self.read(atom)

    def store_in_blocks(self, atom: Atom, dim: int) -> Any:
        assert self.uneven is not None
        share = self.uneven.share
        spec = PartitionSpec(*[None] * dim, share.axes)
        return lax.with_sharding_constraint(store(self.output(atom), dim, share), self.placement.sharding(*spec))

    def restore_from_blocks(self, value: Any, dim: int, share: Share) -> Any:
        """Gathers a value stored in uneven blocks on every device."""
        return restore(self.replicate(value), dim, share)

    def read_in_slots(self, atom: Atom, form: Slice, dim: int = 0) -> Any:
        """A batched value per slot; dimension `dim` counts the slots."""
        if self.is_in_slots(atom, form):
            value, now = self.collected_by_slot(atom), int(atom in self.stacked)
        else:
            d, n, now = form.dim, self.flow.node_elements(form), 0
            value = self.split_into_slots(as_array(self.output(atom), atom), form)
            value = value.reshape(*value.shape[: d + 1], value.shape[d + 1] // n, n, *value.shape[d + 2 :])
            value = jnp.moveaxis(value, d + 1, 0)
            value = value.reshape(*value.shape[: d + 1], form.outer * n, *value.shape[d + 3 :])
            value = lax.with_sharding_constraint(value, self.placement.sharding(self.placement.axis))
        return jnp.moveaxis(value, now, dim)

    def is_in_slots(self, atom: Atom, form: Slice) -> TypeGuard[Var]:
        """Whether devices already hold a batched value per slot."""
        return isinstance(atom, Var) and atom in self.collected and self.flow.states[atom].form == form

    def read_in_batch_order(self, var: Var) -> Any:
        """A collected value in batch order."""
        form = self.flow.states[var].form
        assert isinstance(form, Slice)
        return restore_batch_order(self.collected_by_node(var), form, self.flow.node_elements(form), self.units(form))

    def collected_by_node(self, var: Var) -> Any:
        """A collected value, ``[nodes, ...]``."""
        value = jnp.moveaxis(self.collected_by_slot(var), int(var in self.stacked), 0)
        return value if self.placement.even else self.replicate(value)[np.array(self.placement.slots)]

    def collected_by_slot(self, var: Var) -> Any:
        """A collected value in one piece, ``[slots, ...]``."""
        value, rooms = self.collected[var], self.uneven
        if rooms is None or var not in self.collected_dims:
            return value
        return self.restore_from_blocks(value, self.collected_dims[var] + 1, rooms.share)

    def materialize_input(self, value: Any) -> Any:
        """Materializes a value for its users; see `vnode.runtime.node_loops.materialize_input`."""
        return node_loops.materialize_input(value, self.platform in node_loops.KEEP_BARRIERS)

    def replicate(self, value: Any) -> Any:
        """Replicates a value: the partitioner picks elements of a sharded one by adding zeros, which changes the
        sign of -0."""
        return lax.with_sharding_constraint(value, self.placement.sharding())

    def shard_by_nodes(self, value: Any, form: Form | None) -> Any:
        """Constrains an operand of a loop or branch; a batched one is sharded by nodes only, if in equal parts.

        Otherwise XLA's partitioner would choose a layout, and each iteration might gather the value.
        """
        if (
            not self.divides
            or not self.axes
            or not isinstance(form, Slice)
            or (self.has_equal_shards and form.outer > 1)
        ):
            return value
        spec = [*[None] * form.dim, self.placement.axis] if self.has_equal_shards else []
        return lax.with_sharding_constraint(value, self.placement.sharding(*spec))

    @property
    def has_equal_shards(self) -> bool:
        """Whether devices hold equal parts of the batch, without padding."""
        return self.placement.even and self.flow.needs_no_padding(self.placement.nodes)

    def shard(self, var: Var) -> tuple[Any, int]:
        """A batched value laid out so that each shard holds its device's nodes, and the sharded dimension."""
        if var in self.collected:
            return self.collected[var], int(var in self.stacked)
        form = self.flow.states[var].form
        assert isinstance(form, Slice)
        return self.shard_ordered(self.batched[var], form)


def inner_axes(placement: Placement) -> dict[str, int]:
    """The mesh axes longer than one that nodes are not spread over."""
    return {name: size for name, size in long_axes(placement.mesh).items() if name != placement.axis}


def without_cut(dim: int, layout: Layout) -> Layout:
    """A layout with one dimension not cut."""
    return Layout((*layout.dims[:dim], None, *layout.dims[dim + 1 :]))
