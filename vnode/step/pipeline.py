"""A function of flat arrays -> its schedule, and its evaluation on nodes, with a derivative.

    FlatStep(fun, [w, x], axes=[None, 0], ...)   ->   analyse: Schedule of fun;   evaluate: [w', loss], by V nodes

Knows the order: trace, follow the batch, schedule, check the cost, emit. Must not know pytrees.

Derivatives. Inlining loses custom derivative rules (`jax.custom_jvp`). So an emitted step has a rule of its own: its
derivative is the virtualized derivative of the user's function, in which jax has applied the user's rules. The emission
itself cannot be differentiated: it has loops of run-time length, pairwise maxima, and sums computed on bits.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from vnode.analysis.batch_flow import Follower
from vnode.analysis.forms import WHOLE, Batch, Slice
from vnode.analysis.passes import Schedule
from vnode.analysis.program import Program, ResultIndex, message_about
from vnode.analysis.schedule import schedule
from vnode.analysis.separate_sums import separate_sums
from vnode.analysis.states import Coupling, State
from vnode.analysis.tracing import Traced, trace
from vnode.analysis.wide_types import wide_context
from vnode.errors import CouplingError, PlacementError, VnodeError, layout_message
from vnode.placement.leaf_sharding import partition
from vnode.placement.leaves import shape_of
from vnode.placement.patterns import Pattern, Patterns
from vnode.placement.placement import Placement
from vnode.placement.sharded import ShardedBatch, whole_batches
from vnode.placement.trace_context import NO_MESH, context_mesh, typed_mesh, with_automatic_axes, with_jit
from vnode.runtime.device_groups import GroupProgram
from vnode.runtime.emit import emit
from vnode.runtime.evaluate_recipe import restore_weak_types
from vnode.runtime.mesh_function import Division, Records, UnevenValues
from vnode.runtime.mesh_values import inner_axes
from vnode.runtime.mode import Mode
from vnode.runtime.one_pass import once_axes
from vnode.runtime.tree import Tree
from vnode.spmd.layout import Axes, Layout, from_spec
from vnode.step.collector import collector_paused
from vnode.step.coupling_policy import Option, check_couplings, couplings_in_schedule, mode_of
from vnode.step.result_layouts import Specs
from vnode.step.uneven_state import UnevenState


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `virtualize`."""

    virtual_nodes: int
    coupling: Option
    recompute_budget: float
    reduction: str
    lanes: int | None
    accumulate_dtype: Any
    automatic: bool = False
    patterns: Patterns = ()

    @property
    def lane(self) -> int:
        """The number of consecutive nodes that are summed one after another."""
        return -(-self.virtual_nodes // (self.lanes or self.virtual_nodes))

    @property
    def order(self) -> tuple[int, ...]:
        """The branches per level of the reduction tree, the lowest level first; empty if any order is allowed."""
        return Tree.from_lanes(self.virtual_nodes, self.lane).branches if self.reduction == "invariant" else ()


@dataclasses.dataclass(frozen=True)
class PlanChoices:
    """The choices of a plan about a step that no option of `virtualize` makes; by default there is no plan.

    Attributes:
      host: patterns of the names of leaves that are in host memory.
      recomputed: the values that are recomputed where they are read late.
      offloaded: the residuals that are offloaded to the host.
      host_accumulators: the number of pending sums that are on the host, those that are pending longest; 0 for none.
      records: recorded shardings of programs, by the programs' digests.
      planned: the plan predicts the passes of the step, which stay as they are.
    """

    host: tuple[Pattern, ...] = ()
    recomputed: tuple[ResultIndex, ...] = ()
    offloaded: tuple[ResultIndex, ...] = ()
    host_accumulators: int = 0
    records: Records | None = None
    planned: bool = False

    @property
    def fixes_passes(self) -> bool:
        """Whether the plan was made for the passes as they are scheduled."""
        return bool(self.planned or self.recomputed or self.offloaded or self.host_accumulators)


NO_PLAN = PlanChoices()


@dataclasses.dataclass(frozen=True)
class FlatStep:
    """A function of flat arrays for one call, with its options.

    Attributes:
      fun: the function, which returns a list of arrays.
      leaves: its arguments, arrays or `jax.ShapeDtypeStruct`s; where it is run, batched ones may be `ShardedBatch` of
        the placement.
      axes: the dimension of each that carries the examples, or None.
      size: examples of the global batch; for batches of several sizes, the number of parts of the largest.
      options: of `virtualize`.
      specs: the known shardings of leaves over the placement's mesh; maybe of the first leaves only.
      uneven_state: which leaves are stored in blocks, of which devices have different numbers; None if none are.
      result_specs: maps the types of the function's results to their specs; None if these are unknown.
      parts: for each argument the number of parts into which its examples are divided; `size` where it is None, and for
        arguments after the last entry.
      plan: the choices of a plan.
    """

    fun: Callable[..., list[Any]]
    leaves: Sequence[Any]
    axes: Sequence[int | None]
    size: int
    options: Options
    specs: Specs = ()
    uneven_state: UnevenState | None = None
    result_specs: Callable[[Sequence[Any]], Sequence[PartitionSpec | None]] | None = None
    parts: Sequence[int | None] = ()
    plan: PlanChoices = NO_PLAN

    @property
    def shapes(self) -> list[Any]:
        """The shapes and dtypes of its arguments, as the function takes them."""
        return [
            shape_of(leaf)
            for leaf in (self.leaves if self.uneven_state is None else self.uneven_state.own_shapes(self.leaves))
        ]


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The analysis of a function of flat arrays, before it is emitted."""

    traced: Traced
    schedule: Schedule
    couplings: list[Coupling]

    @property
    def program(self) -> Program:
        """The function's program."""
        return self.traced.program


OUTER_DEVICES: contextvars.ContextVar[frozenset[Any] | None] = contextvars.ContextVar("devices", default=None)


TRACED_PROGRAMS: contextvars.ContextVar[list[Program] | None] = contextvars.ContextVar("programs", default=None)
"""A list to which traced programs are appended; None if they are not recorded."""


def outer_devices() -> frozenset[Any] | None:
    """The devices of the step that is being traced (an empty set if unknown); None outside of any step."""
    return OUTER_DEVICES.get()


@with_jit
@collector_paused()
def analyse(flat: FlatStep, devices: Iterable[Any] = ()) -> Analysis:
    """Traces a step and schedules it.

    Args:
      flat: the step.
      devices: on which it will run, if that is known.

    Returns:
      The analysis.

    Raises:
      CouplingError: a coupling is forbidden, or recomputation exceeds the budget.
      UnsupportedPrimitiveError: a batched value meets a primitive that has an effect and no description.
    """
    within = OUTER_DEVICES.set(frozenset(devices))
    try:
        traced = trace(flat.fun, *flat.shapes)
    finally:
        OUTER_DEVICES.reset(within)
    with wide_context(traced.wide):
        return analyse_traced(flat, traced)


def analyse_traced(flat: FlatStep, traced: Traced) -> Analysis:
    """Schedules a step whose function is traced; raises as `analyse`."""
    shapes, options = flat.shapes, flat.options
    wide = None if options.accumulate_dtype is None else np.dtype(options.accumulate_dtype)
    if wide is not None and wide.itemsize > 4 and not jax.config.jax_enable_x64:  # it was virtualized within x64
        raise ValueError(f"accumulate_dtype={wide.name!r} needs jax_enable_x64 in each call")
    batch = Batch(flat.size)
    states = []
    for axis, leaf, parts in itertools.zip_longest(flat.axes, shapes, flat.parts):
        parts = parts or flat.size
        if axis is None or parts == 1:
            states.append(State(WHOLE, model=axis is None))
        else:  # a batch of n times the parts is n runs of them, so that batches can be concatenated
            runs = leaf.shape[axis] // parts
            states.append(State(Slice(Batch(parts), axis % len(leaf.shape), runs, Fraction(1)), materialized=True))
    states += [State(WHOLE, model=True)] * len(traced.captured)

    batched = [i for i, axis in enumerate(flat.axes) if axis is not None and flat.size > 1]
    program = traced.program
    check_estimates(flat)
    if (seen := TRACED_PROGRAMS.get()) is not None:
        seen.append(program)
    plan = flat.plan
    if plan.recomputed or plan.offloaded:  # imported for plans only
        from vnode.remat.apply_memory_plan import apply_memory_plan

        program = apply_memory_plan(program, plan.recomputed, batched, plan.offloaded)

    def follow(option: Option, divides_chunks: bool = True) -> tuple[Schedule, list[Coupling]]:
        mode = functools.partial(mode_of, option)
        follower = Follower(batch, options.virtual_nodes, mode, divides_chunks=divides_chunks)
        flow = follower.follow(program, states)
        made = schedule(flow, options.accumulate_dtype, options.recompute_budget)
        return made, couplings_in_schedule(made, follower.couplings)

    def follow_and_check(divides_chunks: bool) -> tuple[Schedule, list[Coupling]]:
        within = functools.partial(follow, divides_chunks=divides_chunks)
        made, couplings = within(options.coupling)
        check_couplings(made, couplings, options.coupling, options.recompute_budget, within)
        return made, couplings

    try:
        made, couplings = follow_and_check(True)
    except CouplingError as error:  # a pass that needs a loop's count repeats the loop, if nodes have turns of it
        try:
            made, couplings = follow_and_check(False)
        except CouplingError:
            raise error from None
    if plan.offloaded:
        from vnode.remat.offload import check_offloaded

        check_offloaded(step.eqn for step in made.flow.steps if step.nested)
    return Analysis(traced, made, couplings)


def check_estimates(flat: FlatStep) -> None:
    """Checks that ``coupling="local"`` is not used with batches of different numbers of parts.

    Raises:
      CouplingError: it is: an estimate would not know which batch a sum is over.
    """
    counts = sorted({parts for parts in flat.parts if parts is not None})
    coupling = flat.options.coupling
    if len(counts) > 1 and "local" in (coupling if isinstance(coupling, Mapping) else {0: coupling}).values():
        raise CouplingError(
            "coupling='local' needs batches that divide into a common number of parts.",
            facts=[f"they are divided into {' and '.join(map(str, counts))} parts"],
            remedies=["choose sizes with a common divisor of at least virtual_nodes", "or coupling='exact'"],
        )


def emitted_schedule(made: Schedule, options: Options, plan: PlanChoices, together: int) -> Schedule:
    """The schedule that is emitted: large sums in tree order may get passes of their own.

    It depends on the number of nodes, and on whether several devices compute a node, but not on the placement. A plan's
    schedule stays as planned.

    Args:
      made: the schedule.
      options: of the step.
      plan: the choices of a plan.
      together: the number of devices that compute a node together. If there are several, single sums are not divided.
    """
    if options.reduction != "invariant" or plan.fixes_passes:
        return made
    tree = Tree.from_lanes(options.virtual_nodes, options.lane)
    return separate_sums(made, tree.fold(tree.runs(0, tree.leaves)).depth, in_parts=together == 1)


@collector_paused()
def evaluate(flat: FlatStep, placement: Placement, differentiable: bool = False) -> list[Any]:
    """Evaluates (under a trace: emits) a step on nodes.

    Args:
      flat: the step.
      placement: where the nodes live.
      differentiable: the emission itself will be differentiated: no loops of run-time length.

    Returns:
      The function's results.
    """
    made = analyse(flat, placement.devices)
    with wide_context(made.traced.wide):
        return evaluate_analysed(made, flat, placement, differentiable)


def evaluate_analysed(made: Analysis, flat: FlatStep, placement: Placement, differentiable: bool) -> list[Any]:
    """As `evaluate`, for a step that is analysed."""
    options, plan = flat.options, flat.plan
    emitted = made.schedule if differentiable else emitted_schedule(made.schedule, options, plan, placement.together)
    check_effects(made.program, placement)
    check_references(made.program, placement)
    check_narrow_integers(made.program, placement)
    mode = Mode.DIFFERENTIABLE if differentiable else Mode.INVARIANT if options.reduction == "invariant" else Mode.FAST
    values = [*flat.leaves, *made.traced.captured]

    over_nodes = any(placement.axis in spec_axes(spec) for spec in flat.specs)
    axes = once_axes(placement, over_nodes and not options.automatic)
    division = Division(
        input_layouts(flat, made.traced.captured, axes),
        over_nodes,
        options.automatic,
        plan.records,
        flat.specs,
        planned=plan.planned,
    )
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in made.program.outputs]
    if flat.result_specs is not None and axes:
        division = dataclasses.replace(division, ends=sharded_result_layouts(flat.result_specs(types), types, axes))
    if flat.uneven_state is not None:
        flat.uneven_state.share.check(inner_axes(placement))
        rooms = UnevenValues(flat.uneven_state.share, flat.uneven_state.inputs, flat.uneven_state.outputs(types))
        division = dataclasses.replace(division, uneven=rooms)

    def step(*values: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(NO_MESH):  # the placement's mesh, not the caller's, divides the step
            return emit(emitted, placement, values, mode, options.lane, division=division, far=plan.host_accumulators)

    # arguments that are not on the context's mesh have no mesh in their types
    mesh = typed_mesh(values) or context_mesh(placement)
    if mesh is not None:
        step = with_automatic_axes(step, mesh)
    if not (differentiable or uses_references(made.program)):
        step = with_derivative(step, made, flat, placement)
    return restore_weak_types(step(*values), made.program.outputs)


def input_layouts(flat: FlatStep, captured: Sequence[Any], axes: Axes) -> list[Layout | None]:
    """The layouts of a step's inputs over axes of the placement's mesh; None where they are unknown."""
    specs: list[Any] = [*flat.specs, *[None] * (len(flat.leaves) - len(flat.specs))]
    specs += [None if isinstance(value, jax.core.Tracer) else partition(value) for value in captured]
    shapes = [np.shape(value) for value in (*flat.leaves, *captured)]
    return [None if spec is None else from_spec(spec, shape, axes) for spec, shape in zip(specs, shapes, strict=True)]


def sharded_result_layouts(
    specs: Sequence[PartitionSpec | None], types: Sequence[Any], axes: Axes
) -> list[Layout | None]:
    """The layouts required of sharded results; None for replicated and unknown ones."""
    several = zip(specs, types, strict=True)
    found = [None if spec is None else from_spec(spec, each.shape, axes) for spec, each in several]
    return [None if layout is None or layout.is_whole else layout for layout in found]


def spec_axes(spec: PartitionSpec | None) -> set[str]:
    """The mesh axes that a spec names."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec or () if entry is not None]
    return {name for entry in entries for name in entry}


def with_derivative(
    step: Callable[..., list[Any]], made: Analysis, flat: FlatStep, placement: Placement
) -> Callable[..., list[Any]]:
    """An emitted step with a derivative rule: the virtualized derivative of the user's function."""
    axes, size, specs, parts = (
        [*flat.axes, *[None] * len(made.traced.captured)],
        flat.size,
        flat.specs,
        [*flat.parts, *[None] * (len(flat.leaves) + len(made.traced.captured) - len(flat.parts))],
    )  # not `flat`: jax keeps this closure alive
    in_rooms = flat.uneven_state is not None
    unlimited = dataclasses.replace(flat.options, recompute_budget=math.inf)  # the step itself was accepted
    step = jax.custom_jvp(step)

    @step.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        if in_rooms:
            raise VnodeError(
                "a virtualized step whose state is sharded unevenly cannot be differentiated from outside.",
                remedies=["take the gradient inside the step and virtualize the whole"],
            )
        if made.program.reverse_only:
            raise VnodeError(
                "a virtualized step that uses jax.custom_vjp cannot be differentiated from outside: "
                "its rule would be lost.",
                remedies=[
                    "take the gradient inside the step and virtualize the whole",
                    "or give the function a jax.custom_jvp rule",
                ],
            )
        primals, tangents = whole_batches(primals), whole_batches(tangents)
        moving = [i for i, leaf in enumerate(primals) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]

        def both(*values: Any) -> list[Any]:
            points, directions = values[: len(primals)], list(tangents)
            for i, value in zip(moving, values[len(primals) :], strict=True):
                directions[i] = value
            outputs, changes = jax.jvp(made.traced.function, points, tuple(directions))
            nonlocal still
            still = [getattr(c, "dtype", None) == jax.dtypes.float0 for c in changes]
            return [*outputs, *(c for c, s in zip(changes, still, strict=True) if not s)]

        still: list[bool] = []
        values = [*primals, *(tangents[i] for i in moving)]
        moved_axes = [*axes, *(axes[i] for i in moving)]
        moved_parts = [*parts, *(parts[i] for i in moving)]
        moved = FlatStep(both, values, moved_axes, size, unlimited, specs, parts=moved_parts)  # no plan covers it
        results = evaluate(moved, placement, differentiable=True)
        outputs, changes = results[: len(still)], iter(results[len(still) :])
        return outputs, [
            jnp.zeros(out.shape, jax.dtypes.float0) if s else next(changes)
            for out, s in zip(outputs, still, strict=True)
        ]

    return step


@collector_paused()
def program_of_groups(flat: FlatStep, placement: Placement, name: str) -> GroupProgram:
    """The program of a step on a placement with several groups of devices.

    Args:
      flat: the step.
      placement: where the nodes live.
      name: of the step.

    Returns:
      A callable that takes the arguments and gives the results.

    Raises:
      PlacementError: the step has effects, which every group would run, or 64-bit values where x64 is off.
    """
    if flat.uneven_state is not None:
        raise PlacementError("an unevenly sharded state needs devices of one program, not groups")
    made = analyse(flat, placement.devices)
    check_types(made, "a step on groups of devices", PlacementError)
    for eqn in made.program.equations:
        if eqn.effects:
            raise PlacementError(
                message_about(
                    eqn,
                    f"the effect of {eqn.primitive.name!r} cannot be kept on groups of devices: "
                    "each group is a program of its own, and would repeat it.",
                    remedies=["return the value instead", "or use devices of one kind: step.on(jax.devices()[:1])"],
                )
            )
    mode = Mode.INVARIANT if flat.options.reduction == "invariant" else Mode.FAST
    shared = [isinstance(leaf, ShardedBatch) for leaf in flat.leaves]
    emitted = emitted_schedule(made.schedule, flat.options, flat.plan, placement.together)
    return GroupProgram(emitted, placement, mode, flat.options.lane, name, shared)


def check_types(made: Analysis, who: str, error: type[VnodeError]) -> None:
    """Checks that a step has no 64-bit values while x64 is off: parts of it that are traced later would lose them.

    Args:
      made: the analysis of the step.
      who: the subject of the error's first sentence.
      error: the type of the error.

    Raises:
      VnodeError: it has some; of type `error`.
    """
    if made.traced.wide and not jax.config.jax_enable_x64:
        raise error(
            layout_message(
                f"{who} cannot have 64-bit values where x64 is off.",
                facts=["the step has some: arrays or operations from within jax.enable_x64(True)"],
                remedies=['jax.config.update("jax_enable_x64", True) before the state is made', "or 32-bit values"],
            )
        )


def check_effects(program: Program, placement: Placement) -> None:
    """Checks that a step on several devices does not print in order; jax can order `io_callback`s only.

    Raises:
      PlacementError: it does.
    """
    for eqn in program.equations if len(placement.devices) > 1 else ():
        if any(type(effect).__name__ == "OrderedDebugEffect" for effect in eqn.effects):
            raise PlacementError(
                message_about(
                    eqn,
                    f"the ordered effect of {eqn.primitive.name!r} cannot be kept on {len(placement.devices)} devices: "
                    "jax orders prints on a single one.",
                    remedies=["use ordered=False", "or put all nodes on one device: step.on(jax.devices()[:1])"],
                )
            )


NARROWEST = 4
"""Bits of the narrowest integers that XLA's collectives on CPUs move rightly (jax 0.10 to 0.12)."""


def check_narrow_integers(program: Program, placement: Placement) -> None:
    """Checks that a step on several CPU devices has no integers of fewer than 4 bits.

    Raises:
      PlacementError: it has some.
    """
    if len(placement.devices) == 1 or placement.devices[0].platform != "cpu":
        return
    atoms = (*program.inputs, *program.outputs, *(var for eqn in program.equations for var in eqn.outvars))
    for dtype in dict.fromkeys(atom.aval.dtype for atom in atoms if hasattr(atom.aval, "dtype")):
        if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < NARROWEST:
            raise PlacementError(
                f"integers of {jnp.iinfo(dtype).bits} bits cannot be on {len(placement.devices)} CPU devices: "
                "XLA's collectives move them wrongly.",
                remedies=["int8 instead", "or put all nodes on one device: step.on(jax.devices()[:1])"],
            )


def check_references(program: Program, placement: Placement) -> None:
    """Checks that mutable arrays from outside the step are on its devices; they cannot be moved.

    Raises:
      PlacementError: one is elsewhere.
    """
    for var, value in program.constants.items():
        if not hasattr(var.aval, "inner_aval") or isinstance(value, jax.core.Tracer):
            continue
        if value.sharding.device_set != set(placement.devices):
            raise PlacementError(
                "the step uses a mutable array (jax.new_ref) from outside that lives on other devices.",
                facts=[f"{var.aval} on {value.sharding}", f"the step runs on {len(placement.devices)} devices"],
                remedies=[
                    "make it where the step runs: jax.new_ref(step.put(x))",
                    "or take x as an argument and return its new value",
                ],
            )


def uses_references(program: Program) -> bool:
    """Whether the step mutates arrays in place (`jax.new_ref`), which a derivative rule around it cannot hold."""
    atoms = (atom for eqn in program.equations if eqn.effects for atom in (*eqn.invars, *eqn.outvars))
    return any(hasattr(atom.aval, "inner_aval") for atom in atoms)
