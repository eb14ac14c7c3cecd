"""A step's schedule -> the program of one replica: its share of the nodes in a loop, and the replicated region.

Knows schedules and how they are interpreted. Must not know machines, searches, nor how anything is divided.

A mesh has one axis for the nodes. The devices at one index of it are a replica; they divide each node's computation
among themselves. A replica's program has whole values at global shapes, and the replica's part of batched values. Each
pass is a loop over the replica's nodes. Accumulators are then reduced across replicas, and batched values that are
needed whole are gathered; both are equations of their own (`vnode.partition.plan.other_replicas`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.forms import Form, Slice
from vnode.analysis.meshless import remove_mesh_closed
from vnode.analysis.passes import Accumulator, Pass, Schedule, Stage
from vnode.analysis.program import Atom, Program, bind, inline
from vnode.analysis.recipe import Evaluation
from vnode.errors import PartitionError, UnsupportedPrimitiveError
from vnode.operators.in_program import as_array
from vnode.operators.sharding import constraint_equation
from vnode.partition.plan.node_spread import Spread
from vnode.partition.plan.other_replicas import GATHER_FROM_REPLICAS, NODE_NUMBERS, SUM_OVER_REPLICAS
from vnode.placement.placement import Placement
from vnode.runtime import node_loops
from vnode.runtime.evaluate_recipe import evaluate_once
from vnode.runtime.mesh_function import UnevenValues, in_given_blocks, trace_to_jaxpr, trace_with_captures
from vnode.runtime.mode import Mode
from vnode.runtime.node import restore_batch_order
from vnode.runtime.one_pass import sums_of
from vnode.runtime.replicated_region import ReplicatedRegion
from vnode.runtime.schedule_interpreter import RegionEntry, ScheduleInterpreter, split_runs
from vnode.spmd.branch_groups import Group, group_equations
from vnode.spmd.factor_blocks import gather_blocks
from vnode.spmd.layout import Axes
from vnode.spmd.sharding_flow import Flow, Path, Step
from vnode.spmd.uneven_blocks import store


@dataclasses.dataclass(frozen=True, eq=False)
class NodeProgram:
    """A node's computation in a pass.

    Attributes:
      program: its inputs are the node's number, its parts of batched values, and whole values.
      examples: for each part of a batched value that it reads, the dimension of the examples.
      given: the positions in `examples` of arguments of the step; the others are collected by an earlier pass.
      written: the program without branches side by side.
      groups: its equations that are evaluated side by side.
      sums: the accumulators of the pass, which are the first outputs of the program.
      dims: for each accumulator the dimension in uneven blocks; None if it has none.
    """

    program: Program
    examples: tuple[int, ...]
    given: frozenset[int]
    written: Program
    groups: tuple[Group, ...] = ()
    sums: tuple[Accumulator, ...] = ()
    dims: tuple[int | None, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class NodeFlow:
    """Layouts through a node's program, as part of the flow through a loop's body.

    Attributes:
      node: the node's program.
      body: the flow through the loop's body.
      start: the number of the node's first equation in it.
      path: where the body is in the program of the replica.
    """

    node: NodeProgram
    body: Flow
    start: int
    path: Path

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the node."""
        return self.body.steps[self.start : self.start + len(self.node.program.equations)]

    def readers(self) -> Iterator[tuple[Var, int, int]]:
        """For each operand that is an input of the node: the input, the equation's number, the operand's number."""
        inputs = set(self.node.program.inputs)
        for k, eqn in enumerate(self.node.program.equations):
            for i, atom in enumerate(eqn.invars):
                if not isinstance(atom, Literal) and atom in inputs:
                    yield atom, k, i


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaProgram:
    """The program of a replica.

    Attributes:
      program: the program, with calls inlined.
      nodes: a node's program for each pass, in the order in which passes are emitted.
    """

    program: Program
    nodes: tuple[NodeProgram, ...]

    def flows(self, flow: Flow) -> list[NodeFlow]:
        """The part of a flow that belongs to one node, for each pass.

        Args:
          flow: layouts through `program`.

        Raises:
          PartitionError: the flow belongs to another program.
        """
        found: list[NodeFlow] = []
        bodies = [(path, body, [signature(step.eqn) for step in body.steps]) for path, body in loop_bodies(flow)]
        for node in self.nodes:
            wanted = [signature(eqn) for eqn in node.program.equations]
            fitting = [
                NodeFlow(node, body, start, path)
                for path, body, several in bodies
                for start in range(len(several) - len(wanted) + 1)
                if several[start : start + len(wanted)] == wanted
            ]
            if not fitting:
                raise PartitionError("a flow is not through the program of a replica: one of its passes is missing")
            taken = {each.path for each in found}  # equal passes take different bodies
            found.append(next((each for each in fitting if each.path not in taken), fitting[0]))
        return found


class ReplicaEmission(ScheduleInterpreter):
    """The emission of one replica: its part of batched values, and whole values.

    Args:
      schedule: the step.
      placement: a placement of all nodes on one device.
      inputs: values of the program's inputs.
      spread: the spread of nodes over replicas.
      platform: the platform to emit for.
      axes: sizes of the mesh axes other than the nodes'.
      groups: see `replica_program`.
      invariant: see `replica_program`.
      in_loop: for the body of a loop or branch, whether its batched inputs and outputs are in parts; None for the step.
      rooms: see `replica_program`.
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        inputs: Sequence[Any],
        spread: Spread,
        platform: str,
        axes: Axes,
        groups: Sequence[Sequence[Group]],
        invariant: bool,
        in_loop: bool | None = None,
        rooms: UnevenValues | None = None,
    ) -> None:
        super().__init__(schedule, placement, Mode.FAST, platform, axes, rooms)
        for var, value in zip(schedule.flow.program.inputs, inputs, strict=True):
            self.store_input(var, value)
        self.spread = spread
        self.groups = groups
        self.nodes: list[NodeProgram] = []
        self.invariant = invariant
        self.in_parts = self.spread.fits(self.flow) if in_loop is None else in_loop  # batched inputs and outputs
        given = (var for var in self.batched if in_loop is not None or spread.is_sharded_argument(self.flow, var))
        self.own = {*given} if self.in_parts else set[Var]()  # batched values of which it has its own part

    @property
    def stages(self) -> Sequence[Stage]:
        return self.schedule.stages

    def replicate(self, value: Any) -> Any:
        return value

    def make_whole(self, var: Var) -> Any:
        if var not in self.rooms:
            return self.gather_batched(var)
        assert self.uneven is not None
        return gather_blocks(self.rooms[var], self.dims[var], self.uneven.share)

    def store_in_blocks(self, atom: Atom, dim: int) -> Any:
        assert self.uneven is not None
        share = self.uneven.share
        value = store(self.read(atom), dim, share)
        return bind(constraint_equation((*[None] * dim, share.axes, *[None] * (value.ndim - dim - 1))), [value])[0]

    def evaluate(self, action: Evaluation) -> Sequence[Any]:
        return evaluate_once(action, self.read, self.known, self.once)

    def run_region(self, actions: Sequence[Evaluation]) -> None:
        if self.uneven is not None:
            return self.run_together(actions)
        for action in actions:
            self.run_once(action)

    def run_together(self, actions: Sequence[Evaluation]) -> None:
        """Evaluates the replicated region, in blocks where its inputs are in blocks.

        See `vnode.runtime.replicated_region.divide_region`.
        """
        together = ReplicatedRegion.from_actions(actions, self.readers, self.flow.program, self.once, {})
        given = [self.as_stored(var) for var in together.reads]
        shapes = [self.type_of(var, value) for var, value in zip(together.reads, given, strict=True)]
        batched = [i for i, (_, form) in enumerate(together.wanted) if isinstance(form, Slice)]
        program, captured = trace_with_captures(together, shapes, self.axes)
        try:
            program, dims = in_given_blocks(program, self.uneven_of(together.reads), batched)
        except (PartitionError, UnsupportedPrimitiveError):  # every device computes it whole
            given, dims = [self.read(var) for var in together.reads], [None] * len(together.wanted)
        values = program.evaluate([*given, *captured])
        for (var, form), dim, value in zip(together.wanted, dims, values, strict=True):
            self.take_up(var, dim, value) if not isinstance(form, Slice) else self.batched.update({var: value})

    def gather_batched(self, var: Var) -> Any:
        """A batched value, whole on each device: gathered from all replicas, unless it was computed whole."""
        form = self.flow.states[var].form
        assert isinstance(form, Slice)
        if var in self.own and form.outer == 1 and self.spread.fits(self.flow):
            return self.gather_from_replicas(self.batched[var], form.dim, var.aval.shape[form.dim])
        if var in self.batched and var not in self.own:
            return self.batched[var]
        value = self.by_node(form, *self.shard(var), var in self.collected)
        if var in self.collected_dims and self.uneven is not None:
            value = gather_blocks(value, self.collected_dims[var] + 1, self.uneven.share)
        value = self.gather_from_replicas(value, 0, self.spread.nodes)
        return self.in_batch_order(value, form, self.units(form))

    def gather_from_replicas(self, value: Any, dim: int, size: int) -> Any:
        """Gathers the replicas' parts of a value along `dim`, to `size` elements."""
        alone = self.spread.iterations == self.spread.nodes
        return (
            jax.lax.slice_in_dim(value, 0, size, axis=dim)
            if alone
            else GATHER_FROM_REPLICAS.bind(value, dim=dim, size=size)
        )

    def own_part(self, atom: Atom) -> Any:
        """The replica's part of a batched value."""
        if atom in self.own:
            return self.batched[atom]
        form = self.flow.state(atom).form
        assert isinstance(atom, Var) and isinstance(form, Slice)
        return self.in_part(form, *self.shard(atom), atom in self.collected)

    def in_part(self, form: Slice, value: Any, dim: int, there: bool) -> Any:
        """The replica's part of a batched value; see `by_node`."""
        units = self.spread.iterations * self.flow.node_elements(form)
        return self.in_batch_order(self.by_node(form, value, dim, there), form, units)

    def in_batch_order(self, value: Any, form: Slice, units: int) -> Any:
        """The parts of consecutive nodes, in the order of the batch; see `restore_batch_order`.

        Raises:
          PartitionError: a factor in blocks and the examples share one dimension.
        """
        if value.shape[form.dim + 1] != form.outer * self.flow.node_elements(form):
            raise PartitionError(
                "a dimension of examples has another factor in it, which cannot be shared out in blocks"
            )
        return restore_batch_order(value, form, self.flow.node_elements(form), units)

    def as_batched(self, form: Form | None, atom: Atom) -> Any:
        """A value in the form that a loop or branch expects where batched values are in parts. A whole value is sliced
        for that, such as the zeros of an initial carry, or of a branch that skips the computation of the others."""
        if not isinstance(form, Slice):
            return self.read(atom)
        if self.flow.state(atom).form == form:
            return self.own_part(atom)
        return self.in_part(form, *self.shard_ordered(as_array(self.read(atom), atom), form), False)

    def shard(self, var: Var) -> tuple[Any, int]:
        """A batched value with the replica's nodes, or all nodes, in order; and the dimension that counts them."""
        if var in self.collected:
            return self.collected[var], 0
        form, value = self.flow.states[var].form, self.batched[var]
        assert isinstance(form, Slice)
        if var not in self.own:
            return self.shard_ordered(value, form)
        return (value, form.dim) if form.outer == 1 else (split_runs(value, form), form.dim + 1)

    def by_node(self, form: Slice, value: Any, dim: int, there: bool) -> Any:
        """A batched value, or the replica's part of it, split by the replica's nodes: ``[iterations, ...]``."""
        if there:
            return jnp.moveaxis(value, dim, 0)
        turns, n = self.spread.iterations, self.flow.node_elements(form)
        if value.shape[dim] != turns * n:
            value = jax.lax.slice_in_dim(value, 0, turns * n, axis=dim)
        value = jnp.moveaxis(value.reshape(*value.shape[:dim], turns, n, *value.shape[dim + 1 :]), dim, 0)
        return value.reshape(turns, *value.shape[1 : form.dim + 1], form.outer * n, *value.shape[dim + 2 :])

    def emit_output(self, atom: Atom, form: Form) -> Any:
        return self.as_batched(form, atom) if self.in_parts else self.read(atom)

    def shard_by_nodes(self, value: Any, form: Form | None) -> Any:
        if not self.axes or not isinstance(form, Slice):
            return value
        return bind(constraint_equation(((),) * value.ndim), [value])[0]

    def enter_region(self, action: Evaluation) -> RegionEntry:
        """Batched values go in and out in parts: shards, or slots if replicas are uneven. Bodies with other numbers of
        nodes get whole values."""
        in_parts = (self.spread.fits(self.flow) or not self.spread.even) and self.has_same_nodes(action)
        operands: list[Any] = []
        for atom, form in zip(action.step.eqn.invars, action.operands, strict=True):
            value = self.as_batched(form, atom) if in_parts else self.read(atom)
            operands.append(self.shard_by_nodes(as_array(value, atom), form))
        return RegionEntry(operands, in_parts)

    def run_body(
        self, action: Evaluation, entry: RegionEntry, made: Schedule, given: Sequence[int], inputs: Sequence[Any]
    ) -> list[Any]:
        flow = made.flow
        inner = ReplicaEmission(
            made,
            self.placement,
            self.constrain_batched(flow, [flow.state(var).form for var in flow.program.inputs], inputs),
            self.spread,
            self.platform,
            self.axes,
            self.groups[len(self.nodes) :],
            self.invariant,
            entry.in_parts and flow.batch == self.flow.batch,
        )
        outputs = inner.run()
        self.nodes += inner.nodes
        return self.constrain_batched(flow, flow.output_forms, outputs)

    def take_batched(self, action: Evaluation, entry: RegionEntry, i: int, value: Any) -> None:
        var = action.step.eqn.outvars[i]
        self.batched[var] = value
        if entry.in_parts:
            self.own.add(var)

    def run_pass(self, nodes: Pass) -> Any:
        kept = [var in self.collected for var, _ in nodes.sliced_inputs]
        shards = [self.shard(var) for var, _ in nodes.sliced_inputs]
        whole = [self.as_stored(var) for var in nodes.whole_inputs]
        node = functools.partial(self.node_function, nodes)
        written, captured = trace_with_captures(node, self.node_input_shapes(nodes), self.axes)
        groups = tuple(self.groups[len(self.nodes)]) if len(self.nodes) < len(self.groups) else ()
        program = group_equations(written, groups) if groups else written
        rooms = self.uneven_of(nodes.whole_inputs, [var for var, _ in nodes.sliced_inputs], before=1)
        program, dims = in_given_blocks(program, rooms)
        self.note_dims(nodes, dims)
        sums = [
            dataclasses.replace(s, shape=self.shape(a.var))
            for s, a in zip(sums_of(nodes), nodes.accumulators, strict=True)
        ]
        given = frozenset(i for i, there in enumerate(kept) if not there)
        examples = tuple(form.dim for _, form in nodes.sliced_inputs)
        own = tuple(dims[: len(sums)])
        self.nodes.append(NodeProgram(program, examples, given, written, groups, tuple(nodes.accumulators), own))

        def iteration(totals: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
            values = program.evaluate([given[0][None], *given[1:], *whole, *captured])
            pieces = values[: len(sums)]
            if self.spread.iterations == 1:  # a single node needs no addition
                totals = [piece.astype(s.dtype) for s, piece in zip(sums, pieces, strict=True)]
                if self.invariant:
                    totals = [s.from_zero(total) for s, total in zip(sums, totals, strict=True)]
                return totals, values[len(sums) :]
            return node_loops.add_all(sums, totals, pieces), values[len(sums) :]

        held = zip(nodes.sliced_inputs, shards, kept, strict=True)
        several = [self.by_node(form, *shard, there) for (_, form), shard, there in held]
        numbers = NODE_NUMBERS.bind(turns=self.spread.iterations)
        totals, results = jax.lax.scan(iteration, [s.identity() for s in sums], [numbers, *several])
        self.collected.update(zip((var for var, _ in nodes.collected), results, strict=True))
        return [SUM_OVER_REPLICAS.bind(total, monoid=s.monoid) for s, total in zip(sums, totals, strict=True)]


def replica_program(
    schedule: Schedule,
    spread: Spread,
    axes: Axes,
    platform: str,
    invariant: bool,
    groups: Sequence[Sequence[Group]] = (),
    rooms: UnevenValues | None = None,
) -> ReplicaProgram:
    """Traces the program of a replica.

    Args:
      schedule: the step's schedule.
      spread: the spread of nodes over replicas.
      axes: sizes of the mesh axes other than the nodes', those longer than one.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      invariant: whether sums over nodes have a fixed order: loops then stay, even with one iteration.
      groups: for each pass, in the order in which passes are emitted, the equations of a node that are evaluated side
        by side; passes without an entry have none.
      rooms: the inputs and outputs that are stored in uneven blocks.

    Returns:
      The program. Its inputs and outputs are the step's: whole, or as stored in blocks; or the replica's part, where
      all replicas have equal parts.
    """
    nodes: list[NodeProgram] = []  # the replica itself has values of the trace
    stands_for_all = Placement(spread.nodes, jax.devices()[:1])

    def run_replica(*values: Any) -> list[Any]:
        replica = ReplicaEmission(
            schedule, stands_for_all, values, spread, platform, axes, groups, invariant, rooms=rooms
        )
        outputs = zip(replica.run(), schedule.flow.program.outputs, strict=True)
        nodes.extend(replica.nodes)
        return [jnp.asarray(value, atom.aval.dtype) for value, atom in outputs]

    flow = schedule.flow
    dims = rooms.inputs if rooms is not None else [None] * len(flow.program.inputs)

    def type_of(var: Var, dim: int | None) -> jax.ShapeDtypeStruct:
        shape = list(spread.part(flow, var) if spread.is_sharded_argument(flow, var) else var.aval.shape)
        if dim is not None and rooms is not None:
            shape[dim] = rooms.share.stored_size(shape[dim])
        return jax.ShapeDtypeStruct(shape, var.aval.dtype, weak_type=getattr(var.aval, "weak_type", False))

    shapes = list(map(type_of, flow.program.inputs, dims))
    closed = remove_mesh_closed(trace_to_jaxpr(lambda values: run_replica(*values), shapes, axes))
    return ReplicaProgram(inline(closed.jaxpr, closed.consts), tuple(nodes))


def loop_bodies(flow: Flow, at: Path = ()) -> list[tuple[Path, Flow]]:
    """The flows through all bodies of a program's loops and branches, outer bodies first, with their paths."""
    found: list[tuple[Path, Flow]] = []
    for number, step in enumerate(flow.steps):
        for k, body in enumerate(step.bodies):
            path = (*at, number, k)
            found += [(path, body), *loop_bodies(body, path)]
    return found


def signature(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The primitive, shapes and dtypes of an equation, by which a program is found in another."""
    return (
        eqn.primitive.name,
        *((getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)) for v in (*eqn.invars, *eqn.outvars)),
    )
