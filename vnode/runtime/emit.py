"""Emits a schedule: each pass a loop over a device's nodes under `shard_map`, then one reduction across devices.

Knows schedules and placements. Must not know how a step was analysed, nor any primitive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jax.sharding import PartitionSpec

from vnode.analysis.forms import WHOLE, Form, Slice, Whole
from vnode.analysis.passes import Pass, Schedule, Stage
from vnode.analysis.program import Atom
from vnode.analysis.recipe import Evaluation
from vnode.analysis.states import Flow
from vnode.errors import UnsupportedPrimitiveError
from vnode.operators.control import Region
from vnode.operators.in_program import InProgram, as_array
from vnode.operators.rounding import Rounding
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch
from vnode.runtime import collectives, loops
from vnode.runtime.away import Work, brought, by_output, can_be_waited_for, can_wait, element, fetched, is_away
from vnode.runtime.divided import Divided, Division, Rooms, refuse_windows, shape_of, sharded
from vnode.runtime.evaluate import Env, Known, evaluate_once, evaluate_recipe
from vnode.runtime.handed import Among, handed_on
from vnode.runtime.node import Node, Once, arrange
from vnode.runtime.once import Together, divided_once, read_by, stands_apart
from vnode.runtime.packed import Packing
from vnode.runtime.waiting import stacked_far
from vnode.spmd.exchange import convert, in_step, placed
from vnode.spmd.layout import Layout, over, replicated
from vnode.spmd.program import long_axes, spec_of
from vnode.spmd.run import Alike, Later
from vnode.spmd.shares import Share, restored, stored

PLATFORMS = ("cpu", "gpu", "tpu")
"""What a plan may have been made for, whatever it is carried out on."""


class Mode(enum.Enum):
    """What is asked of an emission besides the right result."""

    INVARIANT = "the same bits on any devices"
    FAST = "sums in any order"
    DIFFERENTIABLE = "no loops of run-time length"


def emit(
    schedule: Schedule,
    placement: Placement,
    inputs: Sequence[Any],
    mode: Mode,
    lane: int = 1,
    arguments: Collection[int] | None = None,
    slotted: Collection[int] | None = None,
    division: Division | None = None,
    far: int = 0,
) -> list[Any]:
    """Runs (under a trace: emits) a scheduled step.

    Args:
      schedule: the step.
      placement: where its nodes live.
      inputs: values of the program's inputs, whole and batched alike at their global shapes; batched ones may be
        `ShardedBatch` of this placement.
      mode: what is asked of the emission.
      lane: if it is invariant: consecutive nodes that are added one after another; 1 for those that the tree says.
      arguments: which inputs are arguments of the step, not computed by it; by default all. They lie in memory, and
        are read there: a copy of a data set, from which the iterations of an epoch pick, would be as large as that.
      slotted: which batched inputs are as devices hold them, ``[slots, ...]``; batched outputs are to be so, too. None
        if neither are.
      division: who divides what is computed over axes of the mesh that nodes are not spread over; by default XLA.
      far: if it is invariant: how many of the sums that wait for others are on the host, those that wait longest; not
        of loops that have passes of their own.

    Returns:
      The program's outputs, whole ones at their global shapes.
    """
    emission = Emission(schedule, placement, inputs, mode, lane, slotted, division, far)
    given = schedule.flow.program.inputs
    emission.arguments = set(given if arguments is None else [given[i] for i in arguments])
    return emission.run()


class Emission:
    """One emission: the whole values so far, and the batched values that are kept for all nodes."""

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        inputs: Sequence[Any] | None,
        mode: Mode,
        lane: int,
        slotted: Collection[int] | None = None,
        division: Division | None = None,
        far: int = 0,
    ) -> None:
        self.alone = inputs is not None  # else what it reads is put in place, and others hold other nodes
        self.mode = mode
        self.lane = lane
        self.far = far
        self.schedule = schedule
        self.placement = placement
        self.flow = schedule.flow
        program = self.flow.program
        self.whole: dict[Var, Any] = dict(program.constants)
        self.batched: dict[Var, Any] = {}
        self.collected: dict[Var, Any] = {}  # as devices hold them: of each slot a node's part
        self.stacked: set[Var] = set()  # of these, by a loop: slots are dimension 1, not 0
        self.slotted = slotted is not None
        self.known = Known(program)
        self.arguments: set[Var] = set()  # of the step, in memory as they are
        self.platform: str = placement.devices[0].platform
        self.once = Once(self.platform)
        self.division = division or Division(automatic=True)
        self.divides = not self.division.automatic
        self.by_xla = division is not None and division.automatic  # what is computed once, of shards
        self.axes = inner_axes(placement) if division is not None else {}
        self.once_axes = once_axes(placement, self.division.over_nodes) if division is not None else {}
        # Axes whose size must not show in bits.
        self.exact = {placement.axis} & self.once_axes.keys() if mode is Mode.INVARIANT else set()
        lying = zip(program.inputs, self.division.layouts, strict=False)
        self.layouts = {var: layout for var, layout in lying if layout is not None and not layout.whole}
        wanted = zip(program.outputs, self.division.ends, strict=False)
        self.ends = {a: layout for a, layout in wanted if isinstance(a, Var) and layout is not None}
        rooms = self.division.rooms
        stored_so = zip(program.inputs, rooms.inputs if rooms else (), strict=False)
        self.dims = {var: dim for var, dim in stored_so if dim is not None}  # in blocks, along which dimension
        self.rooms: dict[Var, Any] = {}  # their values as they are stored
        self.away: dict[Var, tuple[Any, PartitionSpec]] = {}  # in the host's memory
        self.latest: Any = None  # of what was computed
        for i, (var, value) in enumerate(zip(program.inputs, inputs, strict=True)) if inputs is not None else ():
            if isinstance(value, ShardedBatch):
                self.collected[var], *_ = value.parts
            elif slotted is not None and i in slotted and isinstance(self.flow.states[var].form, Slice):
                self.collected[var] = value
            elif isinstance(self.flow.states[var].form, Slice):
                self.batched[var] = value
            elif var in self.dims:
                self.rooms[var] = value
            elif is_away(value):
                spec = self.division.specs[i] if i < len(self.division.specs) else None
                self.away[var] = value, spec or PartitionSpec()
            else:
                self.whole[var] = value

    def run(self) -> list[Any]:
        for stage in self.stages:
            self.run_all(stage.once)
            if stage.nodes is not None:
                self.complete(stage.nodes, self.run_pass(stage.nodes))
        outputs, rooms = self.flow.program.outputs, self.division.rooms
        dims = rooms.outputs if rooms else [None] * len(outputs)
        several = zip(outputs, self.flow.output_forms, dims, strict=True)
        return [self.returned(a, form) if dim is None else self.returned_in_rooms(a, dim) for a, form, dim in several]

    @property
    def stages(self) -> Sequence[Stage]:
        """The schedule's, but what needs values that are away is last, in the order in which they are to come."""
        stages = self.schedule.stages
        actions = [action for stage in stages for action in stage.once]
        if not self.away or any(action.step.eqn.effects for action in actions):
            return stages
        works = [Work(read_by(action), action.step.eqn.outvars) for action in actions]
        wanted = {var for made in self.schedule.passes for var, _ in made.recipe.leaves}
        waiting = can_wait(works, wanted, self.away)
        order = [k for k in by_output(works, self.flow.program.outputs, self.away) if k in waiting]
        numbers = iter(range(len(actions)))
        early = [
            Stage(tuple(action for action in stage.once if next(numbers) not in waiting), stage.nodes)
            for stage in stages
        ]
        last = tuple(actions[k] for k in order)
        if early and early[-1].nodes is None:  # one program, as if no value was away
            last = (*early.pop().once, *last)
        return [*early, Stage(last, None)]

    def returned(self, atom: Atom, form: Form) -> Any:
        """An output, of which it is said where it is to be: or branches may return it in different places."""
        if self.slotted and isinstance(form, Slice):
            value = self.in_slots(atom, form)
            return lax.with_sharding_constraint(value, self.placement.sharding(self.placement.axis))
        value = self.output(atom)
        return value if self.schedule.passes else self.everywhere(value)

    def returned_in_rooms(self, atom: Atom, dim: int) -> Any:
        """An output that is wanted in blocks."""
        assert self.division.rooms is not None
        share = self.division.rooms.share
        if isinstance(atom, Var) and atom in self.rooms and self.dims[atom] == dim:
            return self.rooms[atom]
        return self.cut_along(stored(self.output(atom), dim, share), dim, share)

    def cut_along(self, value: Any, dim: int, share: Share) -> Any:
        """A value in blocks, each device's on it."""
        spec = PartitionSpec(*[None] * dim, share.axes)
        return lax.with_sharding_constraint(value, self.placement.sharding(*spec))

    def in_one_piece(self, value: Any, dim: int, share: Share) -> Any:
        """A value in blocks, put together on every device."""
        return restored(self.everywhere(value), dim, share)

    def run_all(self, actions: Sequence[Evaluation]) -> None:
        """Evaluates what is computed once, divided as what it reads; what has effects is left to XLA's partitioner."""
        groups = itertools.groupby(actions, stands_apart)
        for apart, several in groups:
            together = list(several)
            if (self.once_axes or self.division.over_nodes) and self.divides and not apart:
                self.run_divided(together)
                continue
            for action in together:
                self.run_once(action)

    def run_divided(self, actions: Sequence[Evaluation]) -> None:
        """Evaluates actions in a program of each device, on its part of what they read."""
        together = Together.of(actions, self.readers, self.flow.program, self.once, self.ends)
        far = [var in self.away for var in together.reads]
        given = [self.away[var][0] if var in self.away else self.as_stored(var) for var in together.reads]
        shapes = [self.type_of(var, value) for var, value in zip(together.reads, given, strict=True)]
        layouts = [self.layout(var) for var in together.reads]
        alike = Alike({self.placement.axis}, self.in_memory) if self.mode is Mode.INVARIANT else None
        batched = [i for i, (_, form) in enumerate(together.wanted) if isinstance(form, Slice)]
        rooms = self.rooms_of(together.reads)
        divided = divided_once(together, shapes, layouts, self.once_axes, self.exact, alike, rooms, batched)
        if isinstance(divided, Divided):
            for var in together.reads:
                self.away.pop(var, None)
        else:
            given, far = [self.read(var) for var in together.reads], [False] * len(given)

        constant = [var in self.flow.program.constants for var in together.reads]
        made = [v for v, late, known in zip(given, far, constant, strict=True) if not late and not known]
        other = None if alike is None or any(map(Rounding.can_be_of, made)) else self.other_for_rounding

        def device_program(latest: Any, other: Any, values: Sequence[Any]) -> list[Any]:
            several = list(zip(values, far, constant, strict=True))
            own = [Later(functools.partial(brought, v)) if late else v for v, late, _ in several]
            rounding = None
            if alike is not None:
                rounding = Rounding.of([*(v for v, late, known in several if not late and not known), other])
            if rounding is not None:
                own = [rounding.unknown(v) if known else v for v, known in zip(own, constant, strict=True)]
            return divided(own, latest, rounding)

        values = jax.shard_map(
            device_program,
            mesh=self.placement.mesh,
            in_specs=(
                PartitionSpec(),
                None if other is None else spec_of(self.layout(other)),
                list(map(spec_of, divided.inputs)),
            ),
            out_specs=list(map(spec_of, divided.results)),
            check_vma=False,
        )(
            element(self.latest) if any(far) and self.latest is not None else None,
            None if other is None else self.whole[other],
            given,
        )
        several = zip(together.wanted, divided.dims, divided.results, values, strict=True)
        for (var, form), dim, layout, value in several:
            self.take_up(var, dim, value) if not isinstance(form, Slice) else self.batched.update({var: value})
            if not layout.whole:
                self.layouts[var] = layout
            if not isinstance(form, Slice) and can_be_waited_for(value):
                self.latest = value

    @property
    def other_for_rounding(self) -> Var | None:
        """A whole value for what is given none of which a rounding can be made; as it lies, so that nothing is sent.

        What is computed of constants alone, say, which compilers compute themselves where they see all of it.
        """
        several = ((var, value) for var, value in self.whole.items() if var not in self.flow.program.constants)
        return next((var for var, value in several if Rounding.can_be_of(value)), None)

    def take_up(self, var: Var, dim: int | None, value: Any) -> None:
        """Holds a whole value that was made, perhaps in blocks."""
        if dim is None:
            self.whole[var] = value
        else:
            self.dims[var], self.rooms[var] = dim, value

    def as_stored(self, var: Var) -> Any:
        """A whole value as it is held: in blocks if it is."""
        return self.rooms[var] if var in self.rooms else self.read(var)

    def type_of(self, var: Var, value: Any) -> jax.ShapeDtypeStruct:
        """The type of a whole value, that is held so, in its own shape."""
        kind = shape_of(value)
        return kind if var not in self.dims else kind.update(shape=var.aval.shape)

    def shape(self, var: Var) -> tuple[int, ...]:
        """The shape in which a value is held."""
        shape, dim, rooms = list(var.aval.shape), self.dims.get(var), self.division.rooms
        if dim is not None and rooms is not None:
            shape[dim] = rooms.share.room(shape[dim])
        return tuple(shape)

    def rooms_of(self, several: Sequence[Var | None]) -> Rooms | None:
        """Which of some values are held in blocks; None for what is no variable."""
        dims = [None if var is None else self.dims.get(var) for var in several]
        return Rooms(self.division.rooms.share, dims) if self.division.rooms is not None and any_of(dims) else None

    @functools.cached_property
    def readers(self) -> dict[Var, set[int]]:
        """For each value who reads it: actions by their number as objects, and passes and the caller as 0."""
        found: dict[Var, set[int]] = {}
        for stage in self.schedule.stages:
            for action in stage.once:
                for var in read_by(action):
                    found.setdefault(var, set()).add(id(action))
            for var, _ in stage.nodes.recipe.leaves if stage.nodes is not None else ():
                found.setdefault(var, set()).add(0)
        for atom in self.flow.program.outputs:
            if isinstance(atom, Var):
                found.setdefault(atom, set()).add(0)
        return found

    def layout(self, var: Var) -> Layout:
        """How a whole value lies; one that is kept for all nodes, once it is put together."""
        layout, form = self.layouts.get(var) or replicated(len(var.aval.shape)), self.flow.states[var].form
        return whole_along(form.dim, layout) if isinstance(form, Slice) else layout

    def layout_in_pass(self, var: Var) -> Layout:
        """How it lies where nodes read it, which have all of it along their own axis."""
        return over(self.axes, self.layout(var), self.shape(var))

    def layout_in_node(self, var: Var, form: Slice) -> Layout:
        """How one node's part of a batched value lies: what is not kept node by node is not cut along the batch."""
        kept = self.layouts.get(var) if var in self.collected else None
        if kept is None:
            return self.layout_in_pass(var)
        shape = [*self.shape(var)]
        shape[form.dim] = self.shape_in_node(var, form)[form.dim]  # whose indices `kept` counts
        return over(self.axes, kept, shape)

    def spec_of_batched(self, layout: Layout, form: Slice, dim: int) -> PartitionSpec:
        """The `PartitionSpec` of a batched value whose nodes are its dimension `dim`, behind the runs if there are."""
        entries = [*spec_of(layout)] if self.divides else [None] * (form.dim + 1)
        return PartitionSpec(
            *entries[: form.dim], *[None] * (dim - form.dim), self.placement.axis, *entries[form.dim + 1 :]
        )

    def run_once(self, action: Evaluation) -> None:
        if action.schedules:
            return self.run_nested(action)
        else:
            with self.automatic_axes():
                values = evaluate_once(action, self.read, self.known, self.together)
        for var, form, value in zip(action.step.eqn.outvars, action.results, values, strict=True):
            if isinstance(form, Slice):
                self.batched[var] = self.as_computed_once(value)
            elif form is not None:
                self.whole[var] = value
                self.latest = value if can_be_waited_for(value) else self.latest

    @functools.cached_property
    def together(self) -> Once:
        """Where whole values are evaluated on all devices together, and not in a program of each."""
        constants = self.flow.program.constants
        made = [value for var, value in self.whole.items() if var not in constants and var not in self.layouts]
        return Once(self.platform, Rounding.of(made) if self.mode is Mode.INVARIANT and not self.by_xla else None)

    def automatic_axes(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which whole values may be laid out over axes of the mesh that nodes are not spread over."""
        mesh = self.placement.mesh
        return (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            if mesh.size > self.placement.size
            else contextlib.nullcontext()
        )

    def read(self, atom: Atom) -> Any:
        """The whole value of an atom."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.away:
            value, spec = self.away.pop(atom)
            self.whole[atom] = fetched(value, self.latest, spec, self.placement.mesh)
        if atom not in self.whole and atom in self.rooms:
            assert self.division.rooms is not None
            self.whole[atom] = self.in_one_piece(self.rooms[atom], self.dims[atom], self.division.rooms.share)
        if atom not in self.whole:
            value = self.put_together(atom)
            if self.mode is Mode.INVARIANT and atom not in self.arguments:
                value = self.in_memory(value)
            self.whole[atom] = value
        return self.whole[atom]

    def put_together(self, var: Var) -> Any:
        """A batched value, whole on each device; along axes that divide what nodes compute it stays as it lies."""
        if var in self.batched:
            return self.everywhere(self.batched[var])
        if not self.divides or var in self.dims:
            return self.everywhere(self.in_order(var))
        form, placement, mesh_axes = self.flow.states[var].form, self.placement, long_axes(self.placement.mesh)
        assert isinstance(form, Slice)
        kept = self.layout_in_node(var, form)
        start, end = (Layout((None, *each.dims)) for each in (kept, self.layout_in_pass(var)))

        def on_one(own: Any) -> Any:
            held = lax.all_gather(own, placement.axis, tiled=True)
            held = held if placement.even else held[np.array(placement.slots)]
            shape = (placement.nodes, *self.shape_in_node(var, form))
            return arrange(convert(held, start, end, shape, mesh_axes), form, self.flow.node_size, self.units(form))

        return jax.shard_map(
            placed(mesh_axes)(on_one),
            mesh=placement.mesh,
            in_specs=sharded(kept, 0, placement.axis),
            out_specs=spec_of(self.layout(var)),
            check_vma=False,
        )(jnp.moveaxis(self.of_slots(var), int(var in self.stacked), 0))

    def output(self, atom: Atom) -> Any:
        if isinstance(atom, Var) and isinstance(self.flow.states[atom].form, Slice):
            if self.divides and atom in self.collected and not self.fits:  # no shards of an array
                return self.read(atom)
            return self.batched[atom] if atom in self.batched else self.in_order(atom)
        value = self.read(atom)
        return jnp.asarray(value, dtype=atom.aval.dtype) if isinstance(atom, Literal) else value

    def taken_as(self, form: Form | None, atom: Atom) -> Any:
        """A value for a loop or branch that takes it in a form: a whole one may be where a batched one comes later."""
        return self.output(atom) if isinstance(form, Slice) else self.read(atom)

    def run_nested(self, action: Evaluation) -> None:
        """Evaluates a loop or branch whose bodies have passes of their own.

        Where devices hold different numbers of nodes, batched values go in and out as devices hold them: in the order
        of the batch each device would hold the whole of each, because the partitioner divides evenly or not at all.
        What every turn would gather again is gathered once, or read where it lies.
        """
        eqn, region = action.step.eqn, action.step.region
        assert region is not None
        slotted = not self.placement.even and all(
            self.same_nodes(made.flow, test=k < region.tests) for k, made in enumerate(action.schedules)
        )
        apart = set(range(region.operands)) - action.read_whole if slotted else set()
        operands: list[Any] = []
        for i, (atom, form) in enumerate(zip(eqn.invars, action.operands, strict=True)):
            if i in apart and isinstance(form, Slice):
                operands.append(self.in_slots(atom, form, 1 if i in region.scanned else 0))
            else:
                value = as_array(self.taken_as(form, atom), atom)
                operands.append(value if slotted else self.in_shards(value, form))

        def body(made: Schedule, given: Sequence[int], inputs: Sequence[Any]) -> list[Any]:
            flow = made.flow
            arguments = [k for k, i in enumerate(given) if i in lying]

            def bounded(forms: Sequence[Form], values: Sequence[Any]) -> list[Any]:
                pairs = list(zip(values, forms, strict=True))
                if flow.batch == self.flow.batch:
                    return [*values] if slotted else list(itertools.starmap(self.in_shards, pairs))
                # a batch of the body's own exists whole around it
                return [self.as_computed_once(value) if isinstance(form, Slice) else value for value, form in pairs]

            values = bounded([flow.state(var).form for var in flow.program.inputs], inputs)
            in_slots = [k for k, i in enumerate(given) if i in apart] if slotted else None
            layouts = [self.layout_in_body(eqn.invars[i], region, i) for i in given]
            division = dataclasses.replace(self.division, layouts=layouts, rooms=None, ends=())
            outputs = self.emit_body(made, values, arguments, in_slots, division)
            return bounded(flow.output_forms, outputs)  # and not as this body has them: another may have them in parts

        lying = {i for i in region.fixed if isinstance(atom := eqn.invars[i], Var) and atom in self.arguments}
        bodies = [
            functools.partial(body, made, given) for made, given in zip(action.schedules, region.inputs, strict=True)
        ]
        values = region.run(InProgram(eqn), bodies, operands)
        for i, (var, form, value) in enumerate(zip(eqn.outvars, action.results, values, strict=True)):
            if isinstance(form, Slice):
                (self.collected if slotted else self.batched)[var] = value
                if slotted and region.stacks and i >= len(region.carried):
                    self.stacked.add(var)
            elif form is not None:
                self.whole[var] = value

    def emit_body(
        self,
        made: Schedule,
        values: Sequence[Any],
        arguments: Collection[int],
        slotted: Collection[int] | None,
        division: Division,
    ) -> list[Any]:
        """A body that has passes of its own."""
        return emit(made, self.placement, values, self.mode, self.lane, arguments, slotted, division)

    def in_shards(self, value: Any, form: Form | None) -> Any:
        """A value that goes through a loop or branch; a batched one is divided by nodes only, if in equal parts.

        Or XLA's partitioner would look for a layout, and who reads the value would gather it, each time.
        """
        if not self.divides or not self.axes or not isinstance(form, Slice) or (self.fits and form.outer > 1):
            return value
        spec = [*[None] * form.dim, self.placement.axis] if self.fits else []
        return lax.with_sharding_constraint(value, self.placement.sharding(*spec))

    def layout_in_body(self, atom: Atom, region: Region, i: int) -> Layout | None:
        """How operand `i` of a loop or branch lies in its bodies, if it is whole."""
        layout = self.layouts.get(atom) if isinstance(atom, Var) and atom not in self.dims else None
        if layout is None or i not in region.scanned:
            return layout
        return Layout(layout.dims[1:])

    def same_nodes(self, flow: Flow, test: bool) -> bool:
        """Whether a body has the nodes of the program around it: or, of a body that only tests, none at all.

        A test that gives several answers, one for each of the leading dimensions of what the loop carries, has not.
        """
        if test and any(atom.aval.shape for atom in flow.program.outputs):
            return False
        same = flow.batch == self.flow.batch and flow.node_size == self.flow.node_size
        return same or (test and not any(isinstance(flow.states[var].form, Slice) for var in flow.program.inputs))

    def in_slots(self, atom: Atom, form: Slice, dim: int = 0) -> Any:
        """A batched value as devices hold it, with the slots as dimension `dim`."""
        if isinstance(atom, Var) and atom in self.collected and self.flow.states[atom].form == form:
            value, now = self.of_slots(atom), int(atom in self.stacked)
        else:
            d, n, now = form.dim, int(self.flow.node_size * form.ratio), 0
            value = self.divided(as_array(self.output(atom), atom), form)
            value = value.reshape(*value.shape[: d + 1], value.shape[d + 1] // n, n, *value.shape[d + 2 :])
            value = jnp.moveaxis(value, d + 1, 0)
            value = value.reshape(*value.shape[: d + 1], form.outer * n, *value.shape[d + 3 :])
            value = lax.with_sharding_constraint(value, self.placement.sharding(self.placement.axis))
        return jnp.moveaxis(value, now, dim)

    def in_order(self, var: Var) -> Any:
        """A collected value in the order of the batch."""
        form = self.flow.states[var].form
        assert isinstance(form, Slice)
        return arrange(self.of_nodes(var), form, self.flow.node_size, self.units(form))

    def of_nodes(self, var: Var) -> Any:
        """A collected value, ``[nodes, ...]``."""
        value = jnp.moveaxis(self.of_slots(var), int(var in self.stacked), 0)
        return value if self.placement.even else self.everywhere(value)[np.array(self.placement.slots)]

    def of_slots(self, var: Var) -> Any:
        """A collected value in one piece, ``[slots, ...]``."""
        value, rooms = self.collected[var], self.division.rooms
        if rooms is None or var not in self.dims:
            return value
        return self.in_one_piece(value, self.dims[var] + 1, rooms.share)

    def in_memory(self, value: Any) -> Any:
        """A value that what reads it finds in memory; see `vnode.runtime.loops.in_memory`."""
        return loops.in_memory(value, self.platform in loops.KEEP_BARRIERS)

    def everywhere(self, value: Any) -> Any:
        """A value whole on each device: the partitioner picks elements of a sharded one by adding zeros to them, which
        changes the sign of a negative zero."""
        return lax.with_sharding_constraint(value, self.placement.sharding())

    def as_computed_once(self, value: Any) -> Any:
        """A value that is computed once: the partitioner, led by who reads it, would compute it in parts, and compilers
        round those differently."""
        return self.everywhere(value) if self.mode is Mode.INVARIANT else value

    def units(self, form: Slice) -> int:
        """How many elements of a run of the batch the placement's nodes hold, padding not included."""
        start, stop = (min(n * int(self.flow.node_size * form.ratio), form.units) for n in self.range)
        return stop - start

    @property
    def fits(self) -> bool:
        """Whether devices hold equal parts of the batch, without padding."""
        return self.placement.even and self.flow.filled_by(self.placement.nodes)

    @property
    def range(self) -> tuple[int, int]:
        """The first node of the placement, and the one after the last."""
        return self.placement.first, self.placement.first + self.placement.nodes

    def shard(self, var: Var) -> tuple[Any, int]:
        """A batched value laid out so that each device's part holds its nodes; with the dimension that is split."""
        if var in self.collected:
            return self.collected[var], int(var in self.stacked)
        form = self.flow.states[var].form
        assert isinstance(form, Slice)
        return self.laid_out(self.batched[var], form)

    def laid_out(self, value: Any, form: Slice) -> tuple[Any, int]:
        """The same of a value in the order of the batch."""
        n = int(self.flow.node_size * form.ratio)
        if self.placement.even and self.placement.nodes * form.outer * n == value.shape[form.dim]:
            return (value, form.dim) if form.outer == 1 else (runs_apart(value, form), form.dim + 1)
        return self.divided(value, form), form.dim + 1

    def divided(self, value: Any, form: Slice) -> Any:
        """A value in the order of the batch as the elements of each slot, one after another.

        Returns:
          The value with its dimension `form.dim` as two: the runs of the batch, and ``slots * elements``. Slots without
          a node hold what their device's last real one does.
        """
        placement, n = self.placement, int(self.flow.node_size * form.ratio)
        first, last = placement.first, placement.first + placement.nodes - 1
        nodes = [min(start + k, last) for start in placement.starts for k in range(placement.waves)]
        rows = (np.array(nodes)[:, None] * n + np.arange(n)).reshape(-1)
        value, axis = runs_apart(value, form), form.dim + 1
        rows = np.minimum(rows - first * n, value.shape[axis] - 1)
        return jnp.take(self.everywhere(value), rows, axis=axis, mode="clip")

    def there_at(self, var: Var) -> int:
        """The level at which a whole value can be there: one later than its pieces if it is completed or gathered."""
        state = self.flow.states[var]
        return state.level if isinstance(state.form, Whole) else state.level + (not state.given)

    def shape_in_node(self, var: Var, form: Slice) -> tuple[int, ...]:
        """The shape of one node's part of a batched value."""
        n = form.outer * int(self.flow.node_size * form.ratio)
        return (*var.aval.shape[: form.dim], n, *var.aval.shape[form.dim + 1 :])

    def by_node(self, value: Any, of: tuple[Var, Slice], lies: tuple[Any, int], in_slots: bool) -> Any:
        """A device's part of a batched value with the parts of its nodes one after another, ``[nodes, *part]``."""
        (var, form), (_, dim), waves = of, lies, self.placement.waves
        if not in_slots:
            n = int(self.flow.node_size * form.ratio)
            value = value.reshape(*value.shape[:dim], waves, n, *value.shape[dim + 1 :])
        return jnp.moveaxis(value, dim, 0).reshape(waves, *self.shape_in_node(var, form))

    def buffers(self, var: Var, shape: tuple[int, ...], read: Sequence[Any]) -> Any:
        """Where a device puts a value of each of its nodes, in a pass that reads the whole values `read`, latest first.

        They are what keeps compilers from making the buffer before the pass.
        """
        one_axis = self.divides or self.placement.size == len(self.placement.devices)
        plain = self.mode is not Mode.DIFFERENTIABLE and one_axis  # an element of a sharded one is dear
        return loops.unwritten((self.placement.waves, *shape), var.aval.dtype, read if plain else ())

    def run_pass(self, nodes: Pass) -> Any:
        """Emits one pass: the loop over a device's nodes, then one reduction across devices.

        Returns:
          The totals; or, if other programs hold other nodes, what `collectives.partial_blocks` gives.
        """
        placement, size = self.placement, self.flow.node_size
        axis, waves = placement.axis, placement.waves
        wholes = [var for var, form in nodes.recipe.leaves if isinstance(form, Whole)]
        sliced = [(var, form) for var, form in nodes.recipe.leaves if isinstance(form, Slice)]
        shards = [self.shard(var) for var, _ in sliced]
        slots = [var in self.collected for var, _ in sliced]
        divided = self.divided_pass(nodes, wholes, sliced)
        lying = divided.inputs if divided else self.lying(wholes, sliced)
        # What is known to lie in some way is moved explicitly, before the loop.
        mesh_axes = long_axes(placement.mesh)
        given = [
            self.layout(var) if var in self.layouts else end
            for var, end in zip(wholes, lying[1 + len(sliced) :], strict=True)
        ]
        if divided:
            made_so = [*(a.var for a in nodes.accumulators), *(var for var, _ in nodes.collected)]
            found = zip(made_so, divided.dims, strict=True)
            self.dims.update((var, dim) for var, dim in found if dim is not None)
        sums = sums_of(nodes, divided)
        one_axis = self.divides or placement.size == len(placement.devices)
        plan = collectives.ReductionPlan.of(
            placement.counts, self.lane, one_axis, placement.first, placement.virtual_nodes
        )
        lies = (
            [each.complete for each in divided.results[: len(sums)]]
            if divided
            else [replicated(len(s.shape)) for s in sums]
        )
        ends = self.handed_on(nodes, lies) if self.alone else lies
        made = divided.results[: len(sums)] if divided else lies
        among = Among(axis, self.once_axes, bool(self.exact))
        parts = [among.part(*each) for each in zip(sums, made, ends, strict=True)]
        combine = functools.partial(collectives.totals, parts=parts) if self.alone else collectives.partial_blocks

        evaluate = functools.partial(self.as_node, nodes, wholes, sliced)
        barriers = self.mode is Mode.INVARIANT and self.platform in loops.KEEP_BARRIERS
        own = [jax.ShapeDtypeStruct(self.shape_in_node(*each), each[0].aval.dtype) for each in sliced]
        packs = barriers and one_axis and divided is None and placement.virtual_nodes > 1
        packing = Packing.of(own, placement.virtual_nodes) if packs else Packing((), len(own))

        def device_program(
            first: jax.Array, count: jax.Array, runs: list[jax.Array], whole: list[Any], shard: list[Any]
        ) -> tuple[Any, list[Any]]:
            origin = loops.opaque(first[0])  # or one device, that knows it, would take a node's number for a count
            packed = packing.packed(lambda i: self.by_node(shard[i], sliced[i], shards[i], slots[i]))
            whole = [
                convert(value, start, end, self.shape(var), mesh_axes)
                for var, value, start, end in zip(wholes, whole, given, lying[1 + len(sliced) :], strict=True)
            ]

            def take(index: jax.Array) -> list[Any]:
                parts = [origin + index]
                for i in packing.alone:
                    (_, form), value, (_, dim) = sliced[i], shard[i], shards[i]
                    if slots[i]:
                        parts.append(lax.dynamic_index_in_dim(value, index, dim, keepdims=False))
                        continue
                    n = int(size * form.ratio)
                    part = lax.dynamic_slice_in_dim(value, index * n, n, dim)
                    parts.append(part.reshape(*part.shape[: form.dim], form.outer * n, *part.shape[dim + 1 :]))
                return [*parts, *packing.taken(packed, index)]

            def compute(taken: list[Any]) -> tuple[list[Any], list[Any]]:
                alone = 1 + len(packing.alone)
                taken = [taken[0].reshape(1), *packing.apart(taken[1:alone], taken[alone:])]
                with in_step(everywhere=placement.even, in_branches=placement.size == 1):
                    values = divided([*taken, *whole]) if divided else evaluate([*taken, *whole])
                return values[: len(sums)], values[len(sums) :]

            program = loops.NodeProgram(take, compute, waves == 1, barriers)
            if self.mode is not Mode.INVARIANT and placement.even:
                totals, kept = loops.scanned(program, sums, waves)
                return completed(collectives.combined(sums, totals, axis, parts)), kept
            late = sorted(zip(wholes, whole, strict=True), key=lambda pair: self.there_at(pair[0]), reverse=True)
            read = [value for _, value in late]
            shapes = [
                divided.local(len(sums) + i) if divided else self.shape_in_node(*each)
                for i, each in enumerate(nodes.collected)
            ]
            buffers = [self.buffers(var, shape, read) for (var, _), shape in zip(nodes.collected, shapes, strict=True)]
            match self.mode:
                case Mode.DIFFERENTIABLE:
                    totals, kept = loops.skipping(program, sums, count[0], waves, buffers)
                case Mode.FAST:
                    totals, kept = loops.counted(program, sums, count[0], buffers)
                case Mode.INVARIANT:
                    number, starts, merges = (table[0] for table in runs)
                    held = loops.Runs(loops.opaque(number), starts, merges)
                    fold = functools.partial(stacked_far, far=self.far, left=plan.left) if self.far else loops.stacked
                    rest, exact, kept = loops.in_tree_order(program, sums, held, plan.depth, plan.most, buffers, fold)
                    return completed(combine(sums, rest, exact, plan, axis)), kept
            return completed(collectives.combined(sums, totals, axis, parts)), kept

        def completed(totals: Any) -> Any:
            """What devices along the other axes have pieces of, combined: once, not for every node."""
            if not self.divides or not self.alone:
                return totals
            several = zip(nodes.accumulators, totals, made, parts, ends, strict=True)
            return [
                convert(total, among.divided(start, dim, self.shape(a.var)), end, self.shape(a.var), mesh_axes)
                for a, total, start, dim, end in several
            ]

        spec = PartitionSpec
        in_specs = (
            spec(axis),
            spec(axis),
            spec(axis),
            [spec_of(layout) if self.divides else spec() for layout in given],
            [
                sharded(layout, dim, axis) if slot else self.spec_of_batched(layout, form, dim)
                for layout, (_, form), (_, dim), slot in zip(lying[1:], sliced, shards, slots, strict=False)
            ],
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
            [self.as_stored(var) for var in wholes],
            [value for value, _ in shards],
        )
        for (var, _), value in zip(nodes.collected, kept, strict=True):
            self.collected[var] = value
        self.layouts.update((a.var, layout) for a, layout in zip(nodes.accumulators, ends, strict=True))
        if divided:
            kept_in = divided.results[len(sums) :]
            self.layouts.update((var, layout) for (var, _), layout in zip(nodes.collected, kept_in, strict=True))
        return totals

    def handed_on(self, nodes: Pass, lies: Sequence[Layout]) -> list[Layout]:
        """How a pass hands on its totals, of which it could hand on all that `lies` says: as who reads them wants them.

        Where the next that is computed once reads a part only, a part is handed on: a gradient of what is sharded.
        """
        if not self.once_axes or not self.divides or self.division.rooms is not None:
            return list(lies)
        stages = itertools.dropwhile(lambda stage: stage.nodes is not nodes, self.schedule.stages)
        after = [
            action for stage in itertools.islice(stages, 1, None) for action in stage.once if not stands_apart(action)
        ]
        together = Together.of(after, self.readers, self.flow.program, self.once, self.ends)
        ends = {a.var: layout for a, layout in zip(nodes.accumulators, lies, strict=True)}
        return list(handed_on(ends, self.layout, together.reading, self.axes, self.once_axes, self.exact).values())

    def as_node(
        self,
        nodes: Pass,
        wholes: Sequence[Var],
        sliced: Sequence[tuple[Var, Slice]],
        given: Sequence[Any],
        platform: str | None = None,
    ) -> list[Any]:
        """What one node computes in a pass, of its number, its parts of batched values, and whole values.

        As it is written for another platform, if one is named: what a plan for that says of it holds on this one.
        """
        number, *values = given
        placement = self.placement
        env: Env = {(var, form): value for (var, form), value in zip(sliced, values[: len(sliced)], strict=True)}
        env.update(((var, WHOLE), value) for var, value in zip(wholes, values[len(sliced) :], strict=True))
        node = Node(number[0], placement.virtual_nodes, self.flow.node_size, self.flow.batch, platform or self.platform)
        return evaluate_recipe(nodes.recipe, env, node, self.one_by_one)

    @property
    def one_by_one(self) -> bool:
        """Whether the parts of a node that share nothing are to wait for one another.

        XLA's CPU backend computes first what can be computed first, and so would hold what the backward passes of all
        need at once; the compilers for other devices look for an order that takes little memory.
        """
        return self.platform == "cpu" and self.mode is not Mode.DIFFERENTIABLE and not self.axes

    def given_shapes(self, wholes: Sequence[Var], sliced: Sequence[tuple[Var, Slice]]) -> list[jax.ShapeDtypeStruct]:
        """What a node is given in a pass: its number, its parts of batched values, and whole values."""
        return [
            jax.ShapeDtypeStruct((1,), jnp.int32),
            *(jax.ShapeDtypeStruct(self.shape_in_node(var, form), var.aval.dtype) for var, form in sliced),
            *(self.type_of(var, self.as_stored(var)) for var in wholes),
        ]

    def lying(self, wholes: Sequence[Var], sliced: Sequence[tuple[Var, Slice]]) -> list[Layout]:
        """How it lies."""
        parts = (self.layout_in_node(var, form) for var, form in sliced)
        return [replicated(1), *parts, *map(self.layout_in_pass, wholes)]

    def divided_pass(self, nodes: Pass, wholes: Sequence[Var], sliced: Sequence[tuple[Var, Slice]]) -> Divided | None:
        """What a node computes in a pass, divided over the axes that nodes are not spread over; None if XLA does so."""
        if not self.axes:
            return None
        shapes = self.given_shapes(wholes, sliced)
        layouts = self.lying(wholes, sliced)
        on = [self.platform, *(platform for platform in PLATFORMS if platform != self.platform)]
        run, *others = (functools.partial(self.as_node, nodes, wholes, sliced, platform=platform) for platform in on)
        pieces = [a.monoid for a in nodes.accumulators]
        records = self.division.records
        rooms = self.rooms_of([None, *(var for var, _ in sliced), *wholes])  # the first is the node's number
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
                total = collectives.all_bits(total)
            if accumulator.rounded is not None:
                total = total.astype(accumulator.rounded)
            total = total.astype(accumulator.var.aval.dtype)
            self.take_up(accumulator.var, self.dims.get(accumulator.var), total)
            self.latest = total if can_be_waited_for(total) else self.latest


def any_of(dims: Sequence[int | None]) -> bool:
    """Whether one is given."""
    return any(dim is not None for dim in dims)


def inner_axes(placement: Placement) -> dict[str, int]:
    """The axes of a placement's mesh that nodes are not spread over, as far as they are longer than one."""
    return {name: size for name, size in long_axes(placement.mesh).items() if name != placement.axis}


def once_axes(placement: Placement, over_nodes: bool) -> dict[str, int]:
    """The axes of a placement's mesh over which what is computed once is divided: the nodes' only if that is asked."""
    return long_axes(placement.mesh) if over_nodes else inner_axes(placement)


def whole_along(dim: int, layout: Layout) -> Layout:
    """A layout of which one dimension is not cut."""
    return Layout((*layout.dims[:dim], None, *layout.dims[dim + 1 :]))


def runs_apart(value: Any, form: Slice) -> Any:
    """A value whose batched dimension is two: the runs of the batch, and the elements of a run."""
    before, n, after = value.shape[: form.dim], value.shape[form.dim], value.shape[form.dim + 1 :]
    return value.reshape(*before, form.outer, n // form.outer, *after)  # no -1: another dimension may be of length 0


def sums_of(nodes: Pass, divided: Divided | None = None) -> list[loops.Sum]:
    """What the nodes of a pass contribute to, each device its own part of it if it is divided."""
    shapes = [divided.local(i) if divided else a.var.aval.shape for i, a in enumerate(nodes.accumulators)]
    return [loops.Sum(a.monoid, shape, a.dtype) for a, shape in zip(nodes.accumulators, shapes, strict=True)]
