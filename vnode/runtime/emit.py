"""Schedule -> traced program: its passes, and the once-computed values before, between and after them.

    Stage((), pass 0), Stage((w = w - 0.1 * g), None)   ->   g = shard_map(loop over nodes)(w, x);  w = w - 0.1 * g

Knows schedules and placements. Must not know how a step was analysed, nor any primitive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from vnode.analysis.forms import Form, Slice
from vnode.analysis.passes import Schedule, Stage
from vnode.analysis.program import Atom, Program
from vnode.analysis.recipe import Evaluation
from vnode.operators.control_flow import Region
from vnode.operators.in_program import as_array
from vnode.operators.separate_rounding import Rounding
from vnode.placement.placement import Placement
from vnode.placement.world import uses_gloo
from vnode.runtime.evaluate_recipe import evaluate_once
from vnode.runtime.host_prefetch import (
    Task,
    copy_in_pieces,
    deferrable,
    first_element,
    order_by_output,
)
from vnode.runtime.mesh_function import Division, MeshFunction
from vnode.runtime.mode import Mode
from vnode.runtime.node import WholeEvaluator
from vnode.runtime.one_pass import PassEmission
from vnode.runtime.replicated_region import (
    ReplicatedRegion,
    defer_constants,
    divide_region,
    read_variables,
)
from vnode.runtime.schedule_interpreter import RegionEntry
from vnode.spmd.device_program import BitwiseMode, LazyInput
from vnode.spmd.layout import Layout
from vnode.spmd.resharding_collectives import use_gloo_rules
from vnode.spmd.sharded_program import program_over_mesh, spec_of


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
    """Runs a scheduled step; under a trace, emits it.

    Args:
      schedule: the step.
      placement: where the nodes live.
      inputs: values of the program's inputs at their global shapes; batched ones may be `ShardedBatch` of this
        placement.
      mode: the guarantee asked of the emission.
      lane: for invariant emissions, number of consecutive nodes that are added one after another; 1: the tree's own.
      arguments: the inputs that are arguments of the step; all by default. They are read where they lie in memory: a
        copy of a data set, from which the iterations of an epoch pick, would be as large as the data set.
      slotted: the batched inputs that are given per slot, ``[slots, ...]``; batched outputs are then returned so, too.
        None if neither are.
      division: who partitions the computation over mesh axes that nodes are not spread over; XLA by default.
      far: for invariant emissions, number of waiting sums that are offloaded, those that wait longest; not in loops
        with passes of their own.

    Returns:
      The program's outputs at their global shapes.
    """
    emission = Emission(schedule, placement, inputs, mode, lane, slotted, division, far)
    given = schedule.flow.program.inputs
    emission.arguments = set(given if arguments is None else [given[i] for i in arguments])
    with use_gloo_rules(by_gloo=uses_gloo(placement.devices)):
        return emission.run()


class Emission(PassEmission):
    """One emission: passes, and the once-computed values before, between and after them."""

    @property
    def stages(self) -> Sequence[Stage]:
        # Tasks that read offloaded values come last, in the order in which these are fetched.
        stages = self.schedule.stages
        if self.mode is Mode.INVARIANT:
            stages = defer_constants(stages)
        actions = [action for stage in stages for action in stage.once_actions]
        if not self.offloaded or any(action.step.eqn.effects for action in actions):
            return stages
        tasks = [Task(read_variables(action), action.step.eqn.outvars) for action in actions]
        wanted = {var for made in self.schedule.passes for var, _ in made.recipe.leaves}
        deferred = deferrable(tasks, wanted, self.offloaded)
        order = [k for k in order_by_output(tasks, self.flow.program.outputs, self.offloaded) if k in deferred]
        numbers = iter(range(len(actions)))
        early = [
            Stage(tuple(action for action in stage.once_actions if next(numbers) not in deferred), stage.node_pass)
            for stage in stages
        ]
        last = tuple(actions[k] for k in order)
        if early and early[-1].node_pass is None:  # one program, as if no value was offloaded
            last = (*early.pop().once_actions, *last)
        return [*early, Stage(last, None)]

    def emit_output(self, atom: Atom, form: Form) -> Any:
        """An output with its layout constrained; otherwise branches might return it in different layouts."""
        if self.slotted and isinstance(form, Slice):
            value = self.read_in_slots(atom, form)
            return lax.with_sharding_constraint(value, self.placement.sharding(self.placement.axis))
        value = self.output(atom)
        return value if self.schedule.passes else self.replicate(value)

    def run_region(self, actions: Sequence[Evaluation]) -> None:
        """Evaluates actions, partitioned like their inputs."""
        if (self.once_axes or self.division.over_nodes) and self.divides:
            return self.run_divided(actions)
        for action in actions:
            self.run_once(action)

    def run_divided(self, actions: Sequence[Evaluation]) -> None:
        """Evaluates actions in per-device programs, each on its shards of their inputs."""
        once_region = ReplicatedRegion.from_actions(actions, self.readers, self.flow.program, self.once, self.ends)
        on_host = [var in self.offloaded for var in once_region.reads]
        given = [self.offloaded[var][0] if var in self.offloaded else self.as_stored(var) for var in once_region.reads]
        shapes = [self.type_of(var, value) for var, value in zip(once_region.reads, given, strict=True)]
        layouts = [self.layout(var) for var in once_region.reads]
        alike = BitwiseMode({self.placement.axis}, self.materialize_input) if self.mode is Mode.INVARIANT else None
        batched = [i for i, (_, form) in enumerate(once_region.wanted) if isinstance(form, Slice)]
        rooms = self.uneven_of(once_region.reads)
        divided = divide_region(once_region, shapes, layouts, self.once_axes, self.exact, alike, rooms, batched)
        if isinstance(divided, MeshFunction):
            for var in once_region.reads:
                self.offloaded.pop(var, None)
        else:
            given, on_host = [self.read(var) for var in once_region.reads], [False] * len(given)

        constant = [var in self.flow.program.constants for var in once_region.reads]
        made = [v for v, late, known in zip(given, on_host, constant, strict=True) if not late and not known]
        other = None if alike is None or any(map(Rounding.can_use, made)) else self.rounding_seed
        order = sorted(
            range(len(once_region.reads)), key=lambda i: -self.ready_level(once_region.reads[i])
        )  # as in `joint_evaluator`

        def device_program(latest: Any, other: Any, values: Sequence[Any]) -> list[Any]:
            several = list(zip(values, on_host, constant, strict=True))
            own = [LazyInput(functools.partial(copy_in_pieces, v)) if late else v for v, late, _ in several]
            rounding = None
            if alike is not None:
                made = [several[i][0] for i in order if not several[i][1] and not several[i][2]]
                rounding = Rounding.from_values([*made, other])
            if rounding is not None:
                own = [rounding.opaque_constant(v) if known else v for v, known in zip(own, constant, strict=True)]
            return divided(own, latest, rounding)

        values = program_over_mesh(
            device_program,
            self.placement.mesh,
            in_specs=(
                PartitionSpec(),
                None if other is None else self.spec_of_whole(other),
                list(map(spec_of, divided.inputs)),
            ),
            out_specs=list(map(spec_of, divided.results)),
        )(
            first_element(self.latest) if any(on_host) and self.latest is not None else None,
            None if other is None else self.whole[other],
            given,
        )
        several = zip(once_region.wanted, divided.dims, divided.results, values, strict=True)
        for (var, form), dim, layout, value in several:
            self.take_up(var, dim, value) if not isinstance(form, Slice) else self.batched.update({var: value})
            if not layout.is_whole:
                self.layouts[var] = layout

    @property
    def rounding_seed(self) -> Var | None:
        """A whole value from which a rounding can be made for actions whose inputs allow none; used as it lies, not
        resharded.

        An example are actions of constants alone, which compilers would fold if they saw all of them.
        """
        several = ((var, value) for var, value in self.whole.items() if var not in self.flow.program.constants)
        return next((var for var, value in several if Rounding.can_use(value)), None)

    def spec_of_whole(self, var: Var) -> PartitionSpec:
        """The spec of a value in `whole`; one that is stored in uneven blocks was restored on every device."""
        return PartitionSpec() if var in self.dims else spec_of(self.layout(var))

    def evaluate(self, action: Evaluation) -> Sequence[Any]:
        if self.placement.mesh.size > 1 and has_opaque(self.flow.program, action.step.eqn):
            return self.run_replicated(action)
        with self.automatic_axes():
            return evaluate_once(action, self.read, self.known, self.joint_evaluator)

    def run_replicated(self, action: Evaluation) -> list[Any]:
        """Evaluates an action in per-device programs, identically on every device; None for unused results."""
        once_region = ReplicatedRegion.from_actions([action], self.readers, self.flow.program, self.once, {})
        rounds = self.joint_evaluator.rounding is not None

        def device_program(values: Sequence[Any]) -> list[Any]:
            rounding = Rounding.from_values(values) if rounds else None
            place = WholeEvaluator(self.platform, rounding, self.materialize_input if rounds else None)
            return dataclasses.replace(once_region, place=place)(values)

        everywhere = jax.shard_map(
            device_program,
            mesh=self.placement.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        made = everywhere([self.read(var) for var in once_region.reads])
        held = {var: value for (var, _), value in zip(once_region.wanted, made, strict=True)}
        return [held.get(var) for var in action.step.eqn.outvars]

    @property
    def joint_evaluator(self) -> WholeEvaluator:
        """Evaluates whole values in one program for all devices; after each pass, with another rounding.

        A rounding is made from one of the latest totals. Made from an argument, it would be computed before the pass,
        and the values it is part of would be live during the pass.
        """
        latest = tuple(self.latest_totals)
        if latest not in self.joint_evaluators:
            constants = self.flow.program.constants
            several = {var: self.whole[var] for var in latest if var in self.whole} | self.whole
            made = [value for var, value in several.items() if var not in constants and self.layout(var).is_whole]
            rounding = Rounding.from_values(made) if self.mode is Mode.INVARIANT and not self.by_xla else None
            stored = None if rounding is None else self.materialize_input
            self.joint_evaluators[latest] = WholeEvaluator(self.platform, rounding, stored)
        return self.joint_evaluators[latest]

    @functools.cached_property
    def joint_evaluators(self) -> dict[tuple[Var, ...], WholeEvaluator]:
        """By the latest totals."""
        return {}

    def automatic_axes(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which XLA may shard whole values over mesh axes that nodes are not spread over."""
        mesh = self.placement.mesh
        return (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            if mesh.size > self.placement.size
            else contextlib.nullcontext()
        )

    def enter_region(self, action: Evaluation) -> RegionEntry:
        """Prepares the operands; batched ones are per slot if devices hold different numbers of nodes.

        In batch order, every device would then hold all of each, because XLA's partitioner divides evenly or not at
        all. Values that the bodies read whole stay in batch order.
        """
        eqn, region = action.step.eqn, action.step.region
        assert region is not None
        slotted = not self.placement.even and self.has_same_nodes(action)
        sliced = set(range(region.operands)) - action.read_whole if slotted else set()
        operands: list[Any] = []
        cut = set[int]()  # per slot inside, not outside
        for i, (atom, form) in enumerate(zip(eqn.invars, action.operands, strict=True)):
            if i in sliced and isinstance(form, Slice):
                operands.append(self.read_in_slots(atom, form, 1 if i in region.scanned else 0))
                if not self.is_in_slots(atom, form):
                    cut.add(i)
            else:
                value = as_array(self.as_region_operand(form, atom), atom)
                operands.append(value if slotted else self.shard_by_nodes(value, form))
        return RegionEntry(operands, slotted, cut)

    def run_body(
        self, action: Evaluation, entry: RegionEntry, made: Schedule, given: Sequence[int], inputs: Sequence[Any]
    ) -> list[Any]:
        eqn, region, flow = action.step.eqn, action.step.region, made.flow
        assert region is not None

        def bounded(forms: Sequence[Form], values: Sequence[Any]) -> list[Any]:
            per_slot = entry.in_parts and flow.batch == self.flow.batch
            return [*values] if per_slot else self.constrain_batched(flow, forms, values)

        values = bounded([flow.state(var).form for var in flow.program.inputs], inputs)
        lying = {i for i in region.fixed if isinstance(atom := eqn.invars[i], Var) and atom in self.arguments}
        arguments = [k for k, i in enumerate(given) if i in lying]
        whole = action.read_whole if entry.in_parts else set()
        in_slots = [k for k, i in enumerate(given) if i not in whole] if entry.in_parts else None
        layouts = [None if i in entry.split else self.layout_in_body(eqn.invars[i], region, i) for i in given]
        division = dataclasses.replace(self.division, layouts=layouts, uneven=None, ends=())
        outputs = emit(made, self.placement, values, self.mode, self.lane, arguments, in_slots, division)
        return bounded(flow.output_forms, outputs)  # not per slot: another body may have them in parts

    def take_batched(self, action: Evaluation, entry: RegionEntry, i: int, value: Any) -> None:
        region, var = action.step.region, action.step.eqn.outvars[i]
        assert region is not None
        (self.collected if entry.in_parts else self.batched)[var] = value
        if entry.in_parts and region.stacks and i >= len(region.carried):
            self.stacked.add(var)

    def layout_in_body(self, atom: Atom, region: Region, i: int) -> Layout | None:
        """The layout of operand `i` of a loop or branch inside its bodies, if it is whole."""
        in_blocks = self.dims.keys() | self.collected_dims.keys()
        layout = self.layouts.get(atom) if isinstance(atom, Var) and atom not in in_blocks else None
        if layout is None or i not in region.scanned:
            return layout
        return Layout(layout.dims[1:])


def has_opaque(program: Program, eqn: JaxprEqn) -> bool:
    """Whether an equation, or one in its bodies at any depth, is opaque to compilers."""
    bodies = program.bodies(eqn)
    if bodies:
        return any(has_opaque(body, each) for body in bodies for each in body.equations)
    description = program.describe(eqn)
    return description is not None and description.opaque
