"""Schedule -> the values of its program's outputs, stage by stage, wherever these values are held.

Knows schedules, and which values are whole, batched or collected. Must not know meshes' layouts, nor any primitive.

Example: for the stages `(norm = f(w)), (pass 0), (w = g(w, grads))`, an interpreter evaluates `f`, runs the pass, keeps
the pass's totals, and evaluates `g`. Two interpreters say where values are held and how the steps are carried out:
`vnode.runtime.emit.Emission` (the devices of a mesh) and `vnode.partition.plan.replica.ReplicaEmission` (one replica).
They implement the abstract methods below and override nothing else.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from vnode.analysis.forms import WHOLE, Form, Slice
from vnode.analysis.passes import Pass, Schedule, Stage
from vnode.analysis.program import Atom
from vnode.analysis.recipe import Evaluation
from vnode.analysis.states import Flow
from vnode.operators.in_program import InProgram
from vnode.operators.ordering_barrier import can_be_awaited
from vnode.placement.placement import Placement
from vnode.runtime import device_reductions
from vnode.runtime.evaluate_recipe import Env, EvaluationMemo, evaluate_recipe
from vnode.runtime.host_prefetch import has_barrier_element
from vnode.runtime.mesh_function import UnevenValues, meshless_type
from vnode.runtime.mode import Mode
from vnode.runtime.node import Node, WholeEvaluator
from vnode.runtime.replicated_region import is_separate, read_variables
from vnode.spmd.layout import Axes


@dataclasses.dataclass(frozen=True)
class RegionEntry:
    """The operands of a loop or branch whose bodies have passes of their own.

    Attributes:
      operands: the values, as the bodies expect them.
      in_parts: whether batched values are in parts inside the bodies: per slot in an emission, one part in a replica.
      split: the numbers of the operands that are in parts inside the bodies, and not outside.
    """

    operands: Sequence[Any]
    in_parts: bool
    split: Collection[int] = ()


class ScheduleInterpreter(abc.ABC):
    """Interprets a schedule: holds the values so far, and computes the others in the order of the stages.

    Args:
      schedule: the step.
      placement: where the nodes live.
      mode: the guarantee asked of the results.
      platform: the platform that the program is compiled for.
      axes: the mesh axes longer than one that nodes are not spread over.
      uneven: the inputs and outputs that are stored in uneven blocks; None if none are.

    Attributes:
      whole: values at their global shapes.
      batched: values of all nodes, in batch order.
      collected: values of all nodes, one node's part each.
      rooms: whole values stored in uneven blocks; `dims` has their dimensions.
      collected_dims: dimensions of the collected values whose parts are in uneven blocks.
      once: evaluates whole values alike on all devices.
      latest: the whole value computed last.
      latest_totals: the totals of the latest pass.
      unawaited: totals that no pass has waited for.
    """

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        mode: Mode,
        platform: str,
        axes: Axes,
        uneven: UnevenValues | None,
    ) -> None:
        self.schedule = schedule
        self.placement = placement
        self.mode = mode
        self.platform = platform
        self.axes = axes
        self.uneven = uneven
        self.flow = schedule.flow
        self.once = WholeEvaluator(platform)
        self.whole: dict[Var, Any] = dict(self.flow.program.constants)
        self.batched: dict[Var, Any] = {}
        self.collected: dict[Var, Any] = {}
        self.rooms: dict[Var, Any] = {}
        self.collected_dims: dict[Var, int] = {}
        stored_so = zip(self.flow.program.inputs, uneven.inputs if uneven else (), strict=False)
        self.dims = {var: dim for var, dim in stored_so if dim is not None}
        self.latest: Any = None
        self.latest_totals: Sequence[Var] = ()
        self.unawaited: list[Var] = []

    # Operations that interpreters implement

    @property
    @abc.abstractmethod
    def stages(self) -> Sequence[Stage]:
        """The stages, in the order in which they are run."""

    @abc.abstractmethod
    def make_whole(self, var: Var) -> Any:
        """Makes a value whole on every device: a batched one, one in uneven blocks, or one in host memory."""

    @abc.abstractmethod
    def replicate(self, value: Any) -> Any:
        """Replicates a value on all devices that hold the nodes."""

    @abc.abstractmethod
    def shard_by_nodes(self, value: Any, form: Form | None) -> Any:
        """Constrains the layout of an input or output of a body whose nodes are those of the surrounding program."""

    @abc.abstractmethod
    def emit_output(self, atom: Atom, form: Form) -> Any:
        """An output in the form in which the program returns it."""

    @abc.abstractmethod
    def store_in_blocks(self, atom: Atom, dim: int) -> Any:
        """An output that is not in uneven blocks, stored in uneven blocks along a dimension."""

    @abc.abstractmethod
    def evaluate(self, action: Evaluation) -> Sequence[Any]:
        """The results of a once-computed action without passes; None for unused ones."""

    @abc.abstractmethod
    def run_region(self, actions: Sequence[Evaluation]) -> None:
        """Evaluates consecutive once-computed actions that have neither passes nor effects."""

    @abc.abstractmethod
    def run_pass(self, nodes: Pass) -> Any:
        """Runs a pass; stores the values that it collects, and returns its totals."""

    @abc.abstractmethod
    def enter_region(self, action: Evaluation) -> RegionEntry:
        """Prepares the operands of a loop or branch whose bodies have passes of their own."""

    @abc.abstractmethod
    def run_body(
        self, action: Evaluation, entry: RegionEntry, made: Schedule, given: Sequence[int], inputs: Sequence[Any]
    ) -> list[Any]:
        """Interprets a body of a loop or branch.

        Args:
          action: the loop or branch.
          entry: its operands.
          made: the body's schedule.
          given: for each input of the body, the number of the region's operand that it reads.
          inputs: values of the body's inputs.

        Returns:
          The body's outputs.
        """

    @abc.abstractmethod
    def take_batched(self, action: Evaluation, entry: RegionEntry, i: int, value: Any) -> None:
        """Stores result `i` of a loop or branch, which is batched."""

    # Values

    def store_input(self, var: Var, value: Any) -> None:
        """Stores the value of an input: batched at its global shape, in uneven blocks, or whole."""
        if isinstance(self.flow.states[var].form, Slice):
            self.batched[var] = value
        elif var in self.dims:
            self.rooms[var] = value
        else:
            self.whole[var] = value

    def take_up(self, var: Var, dim: int | None, value: Any) -> None:
        """Stores a computed whole value, perhaps in uneven blocks."""
        if dim is None:
            self.whole[var] = value
        else:
            self.dims[var], self.rooms[var] = dim, value
        self.latest = value if has_barrier_element(value) else self.latest

    def read(self, atom: Atom) -> Any:
        """The whole value of an atom."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.whole:
            self.whole[atom] = self.make_whole(atom)
        return self.whole[atom]

    def as_stored(self, var: Var) -> Any:
        """A whole value as it is stored, perhaps in uneven blocks."""
        return self.rooms[var] if var in self.rooms else self.read(var)

    def type_of(self, var: Var, value: Any) -> jax.ShapeDtypeStruct:
        """The type of a stored whole value, in its own shape."""
        kind = meshless_type(value)
        return kind if var not in self.dims else kind.update(shape=var.aval.shape)

    def shape(self, var: Var, dims: Mapping[Var, int] | None = None) -> tuple[int, ...]:
        """The shape in which a value is stored.

        Args:
          var: the value.
          dims: the dimensions in blocks; by default those of whole values.
        """
        shape, dim, rooms = list(var.aval.shape), (self.dims if dims is None else dims).get(var), self.uneven
        if dim is not None and rooms is not None:
            shape[dim] = rooms.share.stored_size(shape[dim])
        return tuple(shape)

    def shape_in_node(self, var: Var, form: Slice) -> tuple[int, ...]:
        """The shape of one node's part of a batched value."""
        n = form.outer * self.flow.node_elements(form)
        return (*var.aval.shape[: form.dim], n, *var.aval.shape[form.dim + 1 :])

    def uneven_of(self, whole: Sequence[Var], sliced: Sequence[Var] = (), before: int = 0) -> UnevenValues | None:
        """Describes the operands in uneven blocks; None if there are none.

        A batched value that a pass collected in blocks is in blocks only where a node reads its part of it. Where it is
        read whole, it is restored.

        Args:
          whole: the values that are read whole; the last operands.
          sliced: the batched values of which a node reads its part.
          before: number of other operands, which come first.
        """
        dims = [*[None] * before, *map(self.collected_dims.get, sliced), *map(self.dims.get, whole)]
        return UnevenValues(self.uneven.share, dims) if self.uneven is not None and any_given(dims) else None

    def note_dims(self, nodes: Pass, dims: Sequence[int | None]) -> None:
        """Notes in which dimension the results of a pass are in uneven blocks."""
        count = len(nodes.accumulators)
        sums = zip((each.var for each in nodes.accumulators), dims[:count], strict=True)
        kept = zip((var for var, _ in nodes.collected), dims[count:], strict=True)
        self.dims.update((var, dim) for var, dim in sums if dim is not None)
        self.collected_dims.update((var, dim) for var, dim in kept if dim is not None)

    def as_computed_once(self, value: Any) -> Any:
        """Replicates a once-computed value if its bits must not change.

        Otherwise the partitioner would shard it as its readers are, and compilers round the parts differently.
        """
        return self.replicate(value) if self.mode is Mode.INVARIANT else value

    def units(self, form: Slice) -> int:
        """Elements of a run of the batch that the placement's nodes hold, without padding."""
        start, stop = (min(n * self.flow.node_elements(form), form.units) for n in self.node_range)
        return stop - start

    @property
    def node_range(self) -> tuple[int, int]:
        """The placement's first node, and the one after its last."""
        return self.placement.first, self.placement.first + self.placement.nodes

    def shard_ordered(self, value: Any, form: Slice) -> tuple[Any, int]:
        """As `shard`, for a value in batch order."""
        n = self.flow.node_elements(form)
        if self.placement.even and self.placement.nodes * form.outer * n == value.shape[form.dim]:
            return (value, form.dim) if form.outer == 1 else (split_runs(value, form), form.dim + 1)
        return self.split_into_slots(value, form), form.dim + 1

    def split_into_slots(self, value: Any, form: Slice) -> Any:
        """Splits a value in batch order into the elements of each slot, one after another.

        Returns:
          The value with dimension `form.dim` split in two: the runs of the batch, and ``slots * elements``. Slots
          without a node repeat their device's last real one.
        """
        placement, n = self.placement, self.flow.node_elements(form)
        first, last = placement.first, placement.first + placement.nodes - 1
        nodes = [min(start + k, last) for start in placement.starts for k in range(placement.waves)]
        rows = (np.array(nodes)[:, None] * n + np.arange(n)).reshape(-1)
        value, axis = split_runs(value, form), form.dim + 1
        rows = np.minimum(rows - first * n, value.shape[axis] - 1)
        return jnp.take(self.replicate(value), rows, axis=axis, mode="clip")

    @functools.cached_property
    def readers(self) -> dict[Var, set[int]]:
        """For each value its readers: actions by their id; passes and the caller as 0."""
        found: dict[Var, set[int]] = {}
        for stage in self.schedule.stages:
            for action in stage.once_actions:
                for var in read_variables(action):
                    found.setdefault(var, set()).add(id(action))
            for var, _ in stage.node_pass.recipe.leaves if stage.node_pass is not None else ():
                found.setdefault(var, set()).add(0)
        for atom in self.flow.program.outputs:
            if isinstance(atom, Var):
                found.setdefault(atom, set()).add(0)
        return found

    @functools.cached_property
    def known(self) -> EvaluationMemo:
        """Values of the program that are known without running it."""
        return EvaluationMemo(self.flow.program)

    # Stages

    def run(self) -> list[Any]:
        """Runs the stages; returns the program's outputs."""
        for stage in self.stages:
            self.run_all(stage.once_actions)
            if stage.node_pass is not None:
                self.finish_totals(stage.node_pass, self.run_pass(stage.node_pass))
                self.latest_totals = [a.var for a in stage.node_pass.accumulators]
        outputs, rooms = self.flow.program.outputs, self.uneven
        dims = rooms.outputs if rooms else [None] * len(outputs)
        several = zip(outputs, self.flow.output_forms, dims, strict=True)
        return [
            self.emit_output(a, form) if dim is None else self.emit_uneven_output(a, dim) for a, form, dim in several
        ]

    def emit_uneven_output(self, atom: Atom, dim: int) -> Any:
        """An output in uneven blocks."""
        if isinstance(atom, Var) and atom in self.rooms and self.dims[atom] == dim:
            return self.rooms[atom]
        return self.store_in_blocks(atom, dim)

    def run_all(self, actions: Sequence[Evaluation]) -> None:
        """Evaluates once-computed actions; those with passes or effects one by one, the others between them as a
        region."""
        for separate, group in itertools.groupby(actions, is_separate):
            if not separate:
                self.run_region(list(group))
                continue
            for action in group:
                self.run_once(action)

    def run_once(self, action: Evaluation) -> None:
        """Evaluates one once-computed action."""
        if action.schedules:
            return self.run_nested(action)
        values = self.evaluate(action)
        for var, form, value in zip(action.step.eqn.outvars, action.results, values, strict=True):
            if value is None:
                continue
            if isinstance(form, Slice):
                self.batched[var] = self.as_computed_once(value)
            elif form is not None:
                self.take_up(var, None, value)

    def finish_totals(self, nodes: Pass, totals: Sequence[Any]) -> None:
        """Stores the totals of a pass."""
        for accumulator, total in zip(nodes.accumulators, totals, strict=True):
            if self.mode is Mode.FAST and self.placement.size > 1:
                total = device_reductions.read_all_bits(total)
            if accumulator.rounded is not None:
                total = total.astype(accumulator.rounded)
            total = total.astype(accumulator.var.aval.dtype)
            self.take_up(accumulator.var, self.dims.get(accumulator.var), total)
        self.unawaited += [a.var for a in nodes.accumulators if can_be_awaited(a.var.aval)]

    def node_function(self, nodes: Pass, given: Sequence[Any], platform: str | None = None) -> list[Any]:
        """The computation of one node in a pass, from its number, its parts of batched values, and whole values.

        If a platform is named, emitted as for that platform, so that another platform's plan still applies.
        """
        number, *values = given
        placement = self.placement
        env: Env = dict(zip([*nodes.sliced_inputs, *((var, WHOLE) for var in nodes.whole_inputs)], values, strict=True))
        flow, platform = self.flow, platform or self.platform
        # with further axes there are always several devices, for which XLA finds equal divisors early
        hides = self.mode is Mode.INVARIANT and not self.axes
        node = Node(number[0], placement.virtual_nodes, flow.node_sizes, flow.batch, platform, hides)
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

    def run_nested(self, action: Evaluation) -> None:
        """Evaluates a loop or branch whose bodies have passes of their own."""
        eqn, region = action.step.eqn, action.step.region
        assert region is not None
        entry = self.enter_region(action)
        bodies = [
            functools.partial(self.run_body, action, entry, made, given)
            for made, given in zip(action.schedules, region.inputs, strict=True)
        ]
        values = region.run(InProgram(eqn), bodies, entry.operands)
        for i, (var, form, value) in enumerate(zip(eqn.outvars, action.results, values, strict=True)):
            if isinstance(form, Slice):
                self.take_batched(action, entry, i, value)
            elif form is not None:
                self.whole[var] = value

    def constrain_batched(self, flow: Flow, forms: Sequence[Form], values: Sequence[Any]) -> list[Any]:
        """Constrains the batched inputs or outputs of a body; a batch of the body's own is whole outside it."""
        pairs = list(zip(values, forms, strict=True))
        if flow.batch == self.flow.batch:
            return list(itertools.starmap(self.shard_by_nodes, pairs))
        return [self.as_computed_once(value) if isinstance(form, Slice) else value for value, form in pairs]

    def has_same_nodes(self, action: Evaluation) -> bool:
        """Whether all bodies of a loop or branch have the nodes of the surrounding program."""
        region = action.step.region
        assert region is not None
        return all(self.same_nodes(made.flow, test=k < region.tests) for k, made in enumerate(action.schedules))

    def same_nodes(self, flow: Flow, test: bool) -> bool:
        """Whether a body has the nodes of the surrounding program; for a loop's condition, none also counts.

        A condition with several answers, one per leading dimension of the carry, does not.
        """
        if test and any(atom.aval.shape for atom in flow.program.outputs):
            return False
        same = flow.batch == self.flow.batch and flow.node_sizes.items() <= self.flow.node_sizes.items()
        return same or (test and not any(isinstance(flow.states[var].form, Slice) for var in flow.program.inputs))


def any_given(dims: Sequence[int | None]) -> bool:
    """Whether any dimension is given."""
    return any(dim is not None for dim in dims)


def split_runs(value: Any, form: Slice) -> Any:
    """Splits a value's batched dimension into runs of the batch and elements of a run."""
    before, n, after = value.shape[: form.dim], value.shape[form.dim], value.shape[form.dim + 1 :]
    return value.reshape(*before, form.outer, n // form.outer, *after)  # no -1: another dimension may have size 0
