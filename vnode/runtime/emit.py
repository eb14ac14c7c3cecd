"""Emits a schedule: each pass a loop over a device's nodes under `shard_map`, then one reduction across devices.

Knows schedules and placements. Must not know how a step was analysed, nor any primitive.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jax.sharding import PartitionSpec

from vnode.analysis.forms import WHOLE, Slice, Whole
from vnode.analysis.program import Atom
from vnode.analysis.recipe import Evaluation
from vnode.analysis.schedule import Accumulator, Pass, Schedule
from vnode.operators import Monoid
from vnode.operators.control import Loop, While
from vnode.placement import Placement
from vnode.runtime.evaluate import Env, evaluate_once, evaluate_recipe, run_while, settle
from vnode.runtime.node import Node, arrange

COMBINE = {
    Monoid.SUM: jnp.add,
    Monoid.PROD: jnp.multiply,
    Monoid.MAX: jnp.maximum,
    Monoid.MIN: jnp.minimum,
    Monoid.AND: jnp.bitwise_and,
    Monoid.OR: jnp.bitwise_or,
    Monoid.XOR: jnp.bitwise_xor,
}


def emit(schedule: Schedule, placement: Placement, inputs: Sequence[Any], differentiable: bool = False) -> list[Any]:
    """Runs (under a trace: emits) a scheduled step.

    Args:
      schedule: the step.
      placement: where its nodes live.
      inputs: values of the program's inputs, whole and batched alike at their global shapes.
      differentiable: whether to do without loops of run-time length.

    Returns:
      The program's outputs at their global shapes.
    """
    return Emission(schedule, placement, inputs, differentiable).run()


class Emission:
    """One emission: the whole values so far, and the batched values that are kept for all nodes."""

    def __init__(self, schedule: Schedule, placement: Placement, inputs: Sequence[Any], differentiable: bool) -> None:
        self.differentiable = differentiable
        self.schedule = schedule
        self.placement = placement
        self.flow = schedule.flow
        program = self.flow.program
        self.whole: dict[Var, Any] = dict(program.constants)
        self.batched: dict[Var, Any] = {}
        self.collected: dict[Var, Any] = {}
        for var, value in zip(program.inputs, inputs, strict=True):
            target = self.batched if isinstance(self.flow.states[var].form, Slice) else self.whole
            target[var] = value

    def run(self) -> list[Any]:
        for stage in self.schedule.stages:
            for action in stage.once:
                values = self.run_around(action) if action.schedules else evaluate_once(action, self.read)
                for var, form, value in zip(action.step.eqn.outvars, action.results, values, strict=True):
                    if form is not None:
                        (self.batched if isinstance(form, Slice) else self.whole)[var] = value
            if stage.nodes is not None:
                self.run_pass(stage.nodes)
        outputs = [self.output(atom) for atom in self.flow.program.outputs]
        if not self.schedule.passes:  # or nothing would say where the results are to be
            outputs = lax.with_sharding_constraint(outputs, self.placement.sharding())
        return outputs

    def read(self, atom: Atom) -> Any:
        """The whole value of an atom."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.whole:
            value = self.batched[atom] if atom in self.batched else self.in_order(atom)
            self.whole[atom] = lax.with_sharding_constraint(value, self.placement.sharding())
        return self.whole[atom]

    def output(self, atom: Atom) -> Any:
        if isinstance(atom, Var) and isinstance(self.flow.states[atom].form, Slice):
            return self.batched[atom] if atom in self.batched else self.in_order(atom)
        value = self.read(atom)
        return jnp.asarray(value, dtype=atom.aval.dtype) if isinstance(atom, Literal) else value

    def run_around(self, action: Evaluation) -> list[Any]:
        """Evaluates a loop or branch whose bodies have passes of their own."""
        eqn = action.step.eqn
        operands = [
            self.output(atom) if isinstance(form, Slice) else self.read(atom)
            for atom, form in zip(eqn.invars, action.operands, strict=True)
        ]
        operands = [settle(value, atom) for value, atom in zip(operands, eqn.invars, strict=True)]

        def body(made: Schedule, *inputs: Any) -> list[Any]:
            return emit(made, self.placement, inputs, self.differentiable)

        match action.step.region:
            case Loop() as loop:
                first, split = loop.constants, loop.constants + loop.carries

                def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                    out = body(action.schedules[0], *operands[:first], *carry, *xs)
                    return out[: loop.carries], out[loop.carries :]

                carry, ys = lax.scan(
                    iteration, operands[first:split], operands[split:], loop.length, loop.reverse, loop.unroll
                )
                return [*carry, *ys]
            case While() as loop:
                split = loop.condition_constants
                first = split + loop.body_constants
                return run_while(
                    eqn,
                    lambda constants, carry: body(action.schedules[0], *constants, *carry)[0],
                    lambda constants, carry: body(action.schedules[1], *constants, *carry),
                    operands[:split],
                    operands[split:first],
                    operands[first:],
                )
            case _:
                branches = [functools.partial(body, made) for made in action.schedules]
                return list(lax.switch(operands[0], branches, *operands[1:]))

    def in_order(self, var: Var) -> Any:
        """A collected value in the order of the batch."""
        form = self.flow.states[var].form
        assert isinstance(form, Slice)
        value = self.collected[var]
        if not self.placement.even:
            value = value[self.slots_of_nodes]
        return arrange(value, form, self.placement.virtual_nodes, self.flow.node_size)

    @property
    def slots_of_nodes(self) -> np.ndarray:
        """For every node its slot, when every device has as many slots as the fullest needs."""
        waves = self.placement.waves
        return np.concatenate([d * waves + np.arange(n) for d, n in enumerate(self.placement.counts)])

    def shard(self, var: Var) -> tuple[Any, int]:
        """A batched value laid out so that each device's part holds its nodes; with the dimension that is split."""
        if var in self.collected:
            return self.collected[var], 0
        form = self.flow.states[var].form
        assert isinstance(form, Slice)
        value, size, placement = self.batched[var], self.flow.node_size, self.placement
        axis, n = form.dim, int(size * form.ratio)
        if form.outer > 1:
            axis += 1
            value = value.reshape(*value.shape[: form.dim], form.outer, form.units, *value.shape[form.dim + 1 :])
        if not (placement.even and placement.virtual_nodes * n == form.units):
            last = placement.virtual_nodes - 1
            nodes = [min(start + k, last) for start in placement.starts for k in range(placement.waves)]
            rows = (np.array(nodes)[:, None] * n + np.arange(n)).reshape(-1)
            value = jnp.take(value, np.minimum(rows, form.units - 1), axis=axis, mode="clip")
        return value, axis

    def run_pass(self, nodes: Pass) -> None:
        """Emits one pass: the loop over a device's nodes, then one reduction across devices."""
        placement, size = self.placement, self.flow.node_size
        axis, waves = placement.axis, placement.waves
        batch = self.flow.batch
        wholes = [var for var, form in nodes.recipe.leaves if isinstance(form, Whole)]
        sliced = [(var, form) for var, form in nodes.recipe.leaves if isinstance(form, Slice)]
        shards = [self.shard(var) for var, _ in sliced]
        slots = [var in self.collected for var, _ in sliced]

        def device_program(
            start: jax.Array, count: jax.Array, whole: list[Any], shard: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            def node_program(index: jax.Array) -> tuple[list[Any], list[Any]]:
                env: Env = {(var, WHOLE): value for var, value in zip(wholes, whole, strict=True)}
                for (var, form), value, (_, dim), slot in zip(sliced, shard, shards, slots, strict=True):
                    if slot:
                        env[(var, form)] = lax.dynamic_index_in_dim(value, index, 0, keepdims=False)
                    else:
                        n = int(size * form.ratio)
                        part = lax.dynamic_slice_in_dim(value, index * n, n, dim)
                        shape = (*part.shape[: form.dim], form.outer * n, *part.shape[dim + 1 :])
                        env[(var, form)] = part.reshape(shape)
                node = Node(start[0] + index, placement.virtual_nodes, size, batch, placement.devices[0].platform)
                values = evaluate_recipe(nodes.recipe, env, node)
                return values[: len(nodes.accumulators)], values[len(nodes.accumulators) :]

            def accumulate(carry: list[Any], index: jax.Array) -> tuple[list[Any], list[Any]]:
                partials, kept = node_program(index)
                added = [
                    COMBINE[a.monoid](total, piece.astype(a.dtype))
                    for a, total, piece in zip(nodes.accumulators, carry, partials, strict=True)
                ]
                return added, kept

            init = [jnp.full(a.var.aval.shape, a.monoid.identity(a.dtype), a.dtype) for a in nodes.accumulators]
            if placement.even:
                totals, kept = lax.scan(accumulate, init, jnp.arange(waves, dtype=jnp.int32))
            else:
                loop = skipping if self.differentiable else counted
                totals, kept = loop(accumulate, init, count[0], waves)
            return across_devices(nodes.accumulators, totals, axis), kept

        spec = PartitionSpec
        in_specs = (
            spec(axis),
            spec(axis),
            [spec()] * len(wholes),
            [spec(*[None] * dim, axis) for _, dim in shards],
        )
        out_specs = ([spec()] * len(nodes.accumulators), [spec(axis)] * len(nodes.collected))
        program = jax.shard_map(
            device_program,
            mesh=placement.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={axis},
            check_vma=False,
        )
        totals, kept = program(
            jnp.asarray(placement.starts, jnp.int32),
            jnp.asarray(placement.counts, jnp.int32),
            [self.read(var) for var in wholes],
            [value for value, _ in shards],
        )
        for accumulator, total in zip(nodes.accumulators, totals, strict=True):
            if accumulator.dtype != accumulator.var.aval.dtype:
                # Or the compiler moves the cast before the reduction, to send fewer bits.
                total = lax.optimization_barrier(total).astype(accumulator.var.aval.dtype)
            self.whole[accumulator.var] = total
        for (var, _), value in zip(nodes.collected, kept, strict=True):
            self.collected[var] = value


def counted(accumulate: Any, init: list[Any], count: jax.Array, waves: int) -> tuple[list[Any], list[Any]]:
    """The loop over a device's nodes where devices hold different numbers of them: of run-time length."""
    buffers = empty_slots(accumulate, init, waves)

    def body(index: jax.Array, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        totals, kept = accumulate(state[0], index)
        return totals, [
            lax.dynamic_update_index_in_dim(buffer, value, index, 0)
            for buffer, value in zip(state[1], kept, strict=True)
        ]

    return lax.fori_loop(0, count, body, (init, buffers))


def skipping(accumulate: Any, init: list[Any], count: jax.Array, waves: int) -> tuple[list[Any], list[Any]]:
    """The same with as many turns as the fullest device needs, skipping those of nodes that are not there."""
    buffers = empty_slots(accumulate, init, 1)

    def body(carry: list[Any], index: jax.Array) -> tuple[list[Any], list[Any]]:
        return lax.cond(
            index < count, accumulate, lambda carry, _: (carry, [buffer[0] for buffer in buffers]), carry, index
        )

    return lax.scan(body, init, jnp.arange(waves, dtype=jnp.int32))


def empty_slots(accumulate: Any, init: list[Any], waves: int) -> list[Any]:
    """Room for what `waves` nodes keep."""
    _, shapes = jax.eval_shape(accumulate, init, jnp.int32(0))
    return [jnp.zeros((waves, *s.shape), s.dtype) for s in shapes]


def across_devices(accumulators: Sequence[Accumulator], totals: list[Any], axis: str) -> list[Any]:
    """Combines every device's totals: one collective per monoid."""
    results: dict[int, Any] = {}
    groups: dict[Monoid, list[int]] = {}
    for i, accumulator in enumerate(accumulators):
        groups.setdefault(accumulator.monoid, []).append(i)
    for monoid, members in groups.items():
        values = [totals[i] for i in members]
        match monoid:
            case Monoid.SUM:
                combined = lax.psum(values, axis)
            case Monoid.MAX if all(jnp.issubdtype(v.dtype, jnp.integer) for v in values):
                combined = lax.pmax(values, axis)
            case Monoid.MIN if all(jnp.issubdtype(v.dtype, jnp.integer) for v in values):
                combined = lax.pmin(values, axis)
            case _:  # among floats, some compilers' collectives lose NaN
                combined = [fold(monoid, lax.all_gather(value, axis)) for value in values]
        results.update(zip(members, combined, strict=True))
    return [results[i] for i in range(len(totals))]


def fold(monoid: Monoid, stacked: jax.Array) -> jax.Array:
    """Combines along dimension 0, in order."""
    total = stacked[0]
    for k in range(1, stacked.shape[0]):
        total = COMBINE[monoid](total, stacked[k])
    return total
