"""Flow -> one device's computation, with explicit collectives.

    s = sum(x), x: [data, -], s: partial over data, read whole   ->   s = psum(sum(this device's shard of x), "data")

Knows flows, descriptions and collectives. Must not know how layouts were found, virtual nodes, nor which devices exist.
The program runs inside a `jax.shard_map` that is manual over all axes, or in a loop or branch inside one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from vnode.analysis.program import Atom, bind, context_of
from vnode.operators import (
    Algebra,
    Free,
    Monoid,
    OperatorDescription,
    Prefix,
    Reduced,
    Role,
    Windowed,
    evaluate,
    evaluate_wide,
)
from vnode.operators.in_program import InProgram, as_array
from vnode.operators.multi_operand_barrier import evaluate_together, group_barrier_parts
from vnode.operators.ordering_barrier import bits_after
from vnode.operators.separate_rounding import Rounding
from vnode.spmd.branch_groups import Branches
from vnode.spmd.factor_blocks import Loop
from vnode.spmd.layout import Axes, Cut, Layout, replicated
from vnode.spmd.op_sharding import (
    FactorSharding,
    OperandSharding,
    OpSharding,
    build_sharding,
    is_narrow,
    itemsize,
    shardings_for_result,
)
from vnode.spmd.resharding import total_elements_sent
from vnode.spmd.resharding_collectives import (
    BRANCHES,
    combine,
    convert,
    convert_after,
    devices_in_step,
    fetch,
    index_along,
    moves,
    with_axis_indices,
)
from vnode.spmd.sharding_flow import Flow, Step

REMAKE_RATIO = 4
"""A copy is made again, not held, if this many times its bytes are computed between two uses of it."""


@dataclasses.dataclass(frozen=True)
class BitwiseMode:
    """How a program gets the same bits whatever the sizes of some mesh axes.

    Attributes:
      axes: these axes.
      in_memory: materializes an array in the common order of its dimensions.
      rounding: rounds single elements; None until `with_rounding` makes it from a program's values.
    """

    axes: Collection[str]
    in_memory: Callable[[Any], Any]
    rounding: Rounding | None = None

    def with_rounding(self, values: Sequence[Any]) -> BitwiseMode:
        """Adds a rounding, made from values of the traced program."""
        return dataclasses.replace(self, rounding=self.rounding or Rounding.from_values(values))


@dataclasses.dataclass(frozen=True)
class LazyInput:
    """An input that is made at its first use.

    Attributes:
      make: returns this device's array, given the latest result with floating-point numbers, or None if there is none.
    """

    make: Callable[[Any], Any]


def run(
    flow: Flow,
    values: Sequence[Any],
    axes: Axes,
    platform: str,
    everywhere: bool = True,
    alike: BitwiseMode | None = None,
    latest: Any = None,
) -> list[Any]:
    """Evaluates a program on one device of a mesh.

    Args:
      flow: layouts through the program.
      values: this device's arrays of the inputs, in the layouts of `flow.inputs`; or `LazyInput`.
      axes: the mesh axes longer than one.
      platform: the platform to compile for.
      everywhere: whether all devices of the mesh run the program.
      alike: the `BitwiseMode`, if bits must not depend on the sizes of some axes.
      latest: the latest result of the surrounding program with floating-point numbers; None if there is none.

    Returns:
      This device's arrays of the outputs, in the layouts of `flow.outputs`.
    """
    evaluation = _Run(flow, axes, platform, alike)
    evaluation.latest = latest
    with with_axis_indices(axes), devices_in_step(everywhere=everywhere or platform != "cpu", in_branches=True):
        return evaluation.run_all(values)


class _Run:
    """One evaluation of a program; holds each value in all layouts in which it was read so far."""

    def __init__(self, flow: Flow, axes: Axes, platform: str, alike: BitwiseMode | None) -> None:
        self.flow, self.axes, self.platform = flow, axes, platform
        self.alike = alike
        self.held: dict[Var, dict[Layout, Any]] = {}
        self.materializable: dict[Var, JaxprEqn] = {}  # the equations that compute materializable values
        self.constrained: set[Var] = set()  # variables with a sharding constraint
        self.renamed: dict[Var, Step] = {}  # partial values that are reshapes of other values
        self.last: dict[tuple[Var, Layout], int] = {}  # for each copy, the value of `computed` at its last use
        self.computed = 0  # bytes of results so far
        self.latest: Any = None  # the latest result with floating-point numbers
        self.hidden: dict[tuple[int, bool], tuple[Any, Any]] = {}  # operands by their ids, and as compilers see them

    def run_all(self, values: Sequence[Any]) -> list[Any]:
        """This device's arrays of the outputs, given those of the inputs."""
        program = self.flow.program
        self.alike = self.alike and self.alike.with_rounding(values)
        for var, value, layout in zip(program.inputs, values, self.flow.inputs, strict=True):
            self.held[var] = {layout: value}
        rounding = self.rounding
        for var, value in program.constants.items():
            known = value if rounding is None else rounding.opaque_constant(value)
            self.held[var] = {replicated(len(var.aval.shape)): known}
        for steps in group_barrier_parts(self.flow.steps, equation_of, lambda *_: True):
            if len(steps) > 1:
                with context_of(steps[0].eqn):
                    for step, value in zip(steps, self.parts(steps), strict=True):
                        self.hold(step, [value])
                continue
            (step,) = steps
            if step.materializable:
                self.materializable.update(dict.fromkeys(step.eqn.outvars, step.eqn))
                continue
            with context_of(step.eqn):
                results = self.step(step)
                if rounding is not None and not step.bodies:
                    results = rounding.round_results(step.eqn, program.describe(step.eqn), results)
            self.hold(step, results)
        return [self.read(atom, layout) for atom, layout in zip(program.outputs, self.flow.outputs, strict=True)]

    @property
    def rounding(self) -> Rounding | None:
        """Rounds single elements, if compilers must not choose the rounding."""
        return None if self.alike is None else self.alike.rounding

    def hold(self, step: Step, results: Sequence[Any]) -> None:
        """Holds the results of a step."""
        for var, value, made, layout in zip(step.eqn.outvars, results, step.made, step.results, strict=True):
            self.held[var] = {made: value}  # in the layout in which it is computed
            if made.partial and is_partial_reshape(step):
                self.renamed[var] = step
            if layout != made:
                self.held[var][layout] = self.convert_held(var, made, layout)
                if step.leaves:
                    del self.held[var][made]
            self.computed += nbytes(value)
            if nbytes(value) and jnp.issubdtype(value.dtype, np.floating):
                self.latest = value
            if step.is_constraint:
                self.constrained.add(var)

    def parts(self, steps: Sequence[Step]) -> list[Any]:
        """Evaluates the parts of a multi-operand identity together."""
        operands = [
            self.read_operand(step.eqn, step.choice, 0)
            if step.choice
            else self.read(step.eqn.invars[0], step.operands[0])
            for step in steps
        ]
        return evaluate_together(steps[0].eqn, self.flow.program.describe, operands, self.platform)

    def read(self, atom: Atom, layout: Layout) -> Any:
        """Reads a value in a layout."""
        shape = getattr(atom.aval, "shape", ())
        if isinstance(atom, Literal):
            value = jnp.asarray(atom.val, atom.aval.dtype) if not layout.is_whole else atom.val
            return convert(value, replicated(len(shape)), layout.without_partial, shape, self.axes)
        if atom in self.materializable and layout.without_partial not in self.held.setdefault(atom, {}):
            self.held[atom][layout.without_partial] = self.make_value(self.materializable[atom], layout.without_partial)
        held = self.held[atom]
        if atom in self.materializable:
            return held[layout.without_partial]
        for start, value in held.items():
            if isinstance(value, LazyInput):
                held[start] = value.make(self.latest)
        if layout not in held:
            if layout.partial and not any(start.partial for start in held):
                return self.read(atom, layout.without_partial)  # only a zero is wanted partial without being so
            start = self.cheapest_start(
                atom, [start for start in held if {*layout.partial} <= {*start.partial}], layout
            )
            held[layout] = self.fix_dim_order(self.convert_held(atom, start, layout), start, layout)
        elif atom in self.constrained and self.is_far(atom, layout):
            start, *_ = held
            value = bits_after(held[start], self.latest)
            held[layout] = lax.bitcast_convert_type(convert(value, start, layout, shape, self.axes), atom.aval.dtype)
        self.last[atom, layout] = self.computed
        return held[layout]

    def read_after(self, atom: Atom, layout: Layout, others: Sequence[Var]) -> Any:
        """Reads a value in a layout, gathered for this user alone, once other values are ready."""
        if isinstance(atom, Literal) or atom in self.materializable or layout.partial:
            return self.read(atom, layout)
        held, latest = self.held[atom], [next(iter(self.held[var].values())) for var in others]
        least = min(map(nbytes, held.values()))
        start = self.cheapest_start(atom, [start for start, value in held.items() if nbytes(value) == least], layout)
        return convert_after(held[start], start, layout, atom.aval.shape, self.axes, latest)

    def cheapest_start(self, atom: Atom, several: Sequence[Layout], layout: Layout) -> Layout:
        """The layout, among those held, from which resharding sends least."""
        shape, dtype = getattr(atom.aval, "shape", ()), atom.aval.dtype
        return min(
            several, key=lambda start: total_elements_sent(moves(start, layout, shape, self.axes, dtype), self.axes)
        )

    def convert_held(self, var: Var, start: Layout, layout: Layout) -> Any:
        """Reshards a held value.

        A partial value that is a reshape of another one is computed from that one's sum, which other users share. (XLA
        for CPUs sums once for each shape.)
        """
        step = self.renamed.get(var)
        if step is not None and step.choice is not None and start == step.made[0] and layout == start.without_partial:
            (whole,) = (each.without_partial for each in step.choice.operands)
            with context_of(step.eqn):
                (value,) = self.evaluate_copy(step.eqn, dataclasses.replace(step.choice, operands=(whole,), passed=()))
            return value
        return convert(self.held[var][start], start, layout, var.aval.shape, self.axes)

    def fix_dim_order(self, value: Any, before: Layout, after: Layout) -> Any:
        """Fixes the order of dimensions of a perhaps gathered value: the compiler's choice depends on the
        collective."""
        if self.alike is None or not jnp.issubdtype(value.dtype, np.inexact):
            return value
        lost = before.cut_axes.keys() - after.cut_axes.keys()
        inside = any(before.cut_axes[name] > 0 for name in lost.intersection(self.alike.axes))
        return self.alike.in_memory(value) if inside else value

    def is_far(self, atom: Var, layout: Layout) -> bool:
        """Whether so much was computed since a copy's last use that it is made again, not held.

        A sharding constraint also decides how a value is kept (Korthikanti et al., "Reducing activation recomputation
        in large transformer models", 2022, section 4.2.2, gather again in the backward pass).
        """
        first, *_ = self.held[atom].values()
        copy = self.held[atom][layout]
        if nbytes(copy) <= nbytes(first) or not jnp.issubdtype(copy.dtype, np.floating) or self.latest is None:
            return False
        return self.computed - self.last[atom, layout] > REMAKE_RATIO * nbytes(copy)

    def make_value(self, eqn: JaxprEqn, layout: Layout) -> Any:
        """Computes a materializable value in a layout: in shards, or whole and then sliced if it cannot be sharded."""
        description = self.flow.program.describe(eqn)
        assert description is not None
        with context_of(eqn):
            ways = shardings_for_result(description, 0, layout, self.axes)
            given = [OperandSharding(replicated(len(getattr(atom.aval, "shape", ())))) for atom in eqn.invars]
            choice = None if ways is None else build_sharding(eqn, description, ways, given, self.axes, ())
            if choice is not None and choice.results[0] == layout:
                return self.hide_origin(eqn, description, self.evaluate_copy(eqn, choice))
            whole = replicated(len(layout.dims))
            operands = [self.read(atom, replicated(len(getattr(atom.aval, "shape", ())))) for atom in eqn.invars]
            results = evaluate(description, eqn, operands, description.sizes, {}, self.platform)
            value = self.hide_origin(eqn, description, results)
            return convert(value, whole, layout, eqn.outvars[0].aval.shape, self.axes)

    def hide_origin(self, eqn: JaxprEqn, description: OperatorDescription, results: Sequence[Any]) -> Any:
        """Hides from compilers how a materializable value is computed, unless it depends on constants only.

        Otherwise the number of arrays of one shape (`Rounding.hide_origin`) would depend on the sizes of shards.
        """
        (value,) = results if self.rounding is None else self.rounding.round_results(eqn, description, results)
        computed = any(isinstance(atom, Var) and atom not in self.materializable for atom in eqn.invars)
        return value if self.rounding is None or not computed else self.rounding.hide_origin(value)

    def step(self, step: Step) -> list[Any]:
        """This device's arrays of a step's results, in the layouts `step.made`."""
        if step.region is not None:
            return self.region(step)
        if step.branches is not None:
            return self.side_by_side(step, step.branches)
        if step.loop is not None:
            return self.in_blocks(step, step.loop)
        if step.choice is None:
            operands = [self.read(atom, layout) for atom, layout in zip(step.eqn.invars, step.operands, strict=True)]
            operands = self.show_operands(step.eqn, operands)
            description = self.flow.program.describe(step.eqn)
            if description is not None and description.layout is not None:
                return operands
            if description is not None and self.platform in description.replaced_on:
                return evaluate(description, step.eqn, operands, description.sizes, {}, self.platform)
            return bind(step.eqn, operands)
        return self.evaluate_copy(step.eqn, step.choice)

    def evaluate_copy(self, eqn: JaxprEqn, choice: OpSharding) -> list[Any]:
        """Evaluates a device's copy of an equation."""
        d, sizes = choice.description, choice.sizes()
        operands = self.show_operands(eqn, [self.read_operand(eqn, choice, i) for i in range(len(eqn.invars))])
        positions = {
            f: functools.partial(block_indices, way, choice.parts[f][0][0].length)
            for way in choice.ways
            for f in way.lead
        }
        partial = any(way.split.partial(way.lead) is not None for way in choice.ways)
        narrow = partial and not choice.passed and any(is_narrow(var.aval.dtype) for var in eqn.outvars)
        if narrow:
            results = evaluate_wide(d, eqn, operands, sizes, positions, self.platform)
        else:
            results = evaluate(d, eqn, operands, sizes, positions, self.platform)
        for way in choice.ways:
            if isinstance(way.split, Prefix):
                results = [self.continue_prefix(value, way, choice, d.results[i]) for i, value in enumerate(results)]
        if narrow:
            results = [
                self.combine_rounded(value, var, layout)
                for value, var, layout in zip(results, eqn.outvars, choice.results, strict=True)
            ]
        for k in d.summed if not choice.passed else ():
            if is_narrow(eqn.outvars[k].aval.dtype):
                results[k] = self.combine_rounded(results[k].astype(jnp.float32), eqn.outvars[k], choice.results[k])
        return results

    def show_operands(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Hides from compilers how divisors are computed, and materializes summands; other operands stay.

        XLA for CPUs vectorizes a sum as suits its kernel: a kernel that also computes the summands may add them in
        another order than one that reads them. Which kernel XLA chooses depends on other readers of the summands, and
        on what is gathered.

        Args:
          eqn: the equation that reads them.
          operands: values of its operands. Materializable ones were hidden when they were computed.
        """
        description, alike = self.flow.program.describe(eqn), self.alike
        if description is None or alike is None or alike.rounding is None:
            return operands
        several = range(len(operands)) if description.order_is_open else description.divisors
        show = alike.in_memory if description.order_is_open else alike.rounding.hide_origin
        for i in several:
            value, atom = operands[i], eqn.invars[i]
            if isinstance(atom, Var) and atom not in self.materializable and jnp.issubdtype(value.dtype, np.inexact):
                key = id(value), description.order_is_open
                if key not in self.hidden:
                    self.hidden[key] = value, show(value)
                operands[i] = self.hidden[key][1]
        return operands

    def combine_rounded(self, value: Any, var: Var, layout: Layout) -> Any:
        """Combines partial sums before the sum is rounded."""
        for monoid in dict.fromkeys(monoid for _, monoid in layout.partial):
            value = combine(value, tuple(name for name, m in layout.partial if m is monoid), monoid)
        return value.astype(var.aval.dtype)

    def read_operand(self, eqn: JaxprEqn, choice: OpSharding, i: int) -> Any:
        """Reads an operand as a device's copy of an equation needs it."""
        atom, want, d = eqn.invars[i], choice.operands[i], choice.description
        value = self.read(atom, want)
        dims = d.operands[i]
        factors = {f for dim in dims for f in dim}
        for k, dim in enumerate(dims):
            for f in dim:
                if f not in choice.parts:
                    continue
                intervals, way = choice.parts[f]
                n, outer = atom.aval.shape[k], math.prod(d.sizes[g] for g in dim[: dim.index(f)])
                cut = Cut(way.axes, outer, d.sizes[f])
                if f not in way.lead:
                    fill, lies_cut = window_fill(way, i, value), want.dims[k] is not None
                    value = fetch(value, k, cut, lies_cut, n, intervals, fill, self.axes)
                elif d.sizes[f] < intervals[0].length * len(intervals[0].starts):
                    value = self.mask_padding(value, k, cut, n, way, choice, i)
        for way in choice.ways:
            monoid = way.split.partial(way.lead)
            if d.roles.get(i) is Role.ONCE and monoid is not None and not factors & set(way.lead):
                value = jnp.where(index_along(way.axes) == 0, value, monoid.identity(jnp.result_type(value)))
        return value

    def mask_padding(
        self, value: Any, k: int, cut: Cut, n: int, way: FactorSharding, choice: OpSharding, i: int
    ) -> Any:
        """Overwrites the padding after the end of a factor, where it would count."""
        d, (f, *_) = choice.description, way.lead
        if d.roles.get(i) is Role.INDEX or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return value
        if isinstance(way.split, Reduced):
            fill = d.fill(f, value.dtype)
        elif isinstance(way.split, Prefix):
            fill = way.split.around.identity(value.dtype)
        elif d.has(Algebra.CONTRACTS) or (isinstance(way.split, Free) and d.adds_along(f)):
            fill = Monoid.SUM.identity(value.dtype)
        else:
            return value
        length, inner = cut.block(self.axes), n // (cut.outer * cut.size)
        real = block_indices(way, length) < cut.size
        shape = value.shape
        value = value.reshape(*shape[:k], cut.outer, length, inner, *shape[k + 1 :])
        real = lax.broadcast_in_dim(real, value.shape, (k + 1,))
        return jnp.where(real, value, jnp.asarray(fill, value.dtype)).reshape(shape)

    def continue_prefix(self, value: Any, way: FactorSharding, choice: OpSharding, dims: Any) -> Any:
        """Combines a part's running values with the last running value of the parts before."""
        split, (factor,) = way.split, way.lead
        assert isinstance(split, Prefix)
        axis = next(k for k, dim in enumerate(dims) if factor in dim)
        ends = (
            lax.slice_in_dim(value, 0, 1, axis=axis)
            if split.reverse
            else lax.slice_in_dim(value, value.shape[axis] - 1, value.shape[axis], axis=axis)
        )
        ends = lax.all_gather(ends, way.axes)
        me, order = index_along(way.axes), list(range(ends.shape[0]))[:: -1 if split.reverse else 1]
        before = ends[order[0]]
        preceding = before
        for last, part in itertools.pairwise(order[1:]):
            before = split.combine(before, ends[last]).astype(value.dtype)
            preceding = jnp.where(me == part, before, preceding)
        return jnp.where(me == order[0], value, split.combine(preceding, value).astype(value.dtype))

    def region(self, step: Step) -> list[Any]:
        """Runs a loop or branch; each device runs its shard of the bodies."""
        eqn, region = step.eqn, step.region
        assert region is not None
        gathered_late = {*range(len(eqn.invars))} - {*region.carried, *region.scanned} if step.gather_after else ()
        operands = [
            self.read_after(atom, layout, step.gather_after) if i in gathered_late else self.read(atom, layout)
            for i, (atom, layout) in enumerate(zip(eqn.invars, step.operands, strict=True))
        ]
        for i in region.carried:
            operands[i] = as_array(operands[i], eqn.invars[i])
        bodies = [functools.partial(self.body, flow) for flow in step.bodies]
        data_dependent = region.chooser is not None or region.tests  # on a value that may differ between nodes
        with devices_in_step(everywhere=not (data_dependent and BRANCHES.get()), in_branches=True):
            return list(region.run(InProgram(eqn), bodies, operands))

    def side_by_side(self, step: Step, branches: Branches) -> list[Any]:
        """Runs this device's branch; fills the results of the others with the identity."""
        atoms, axis = step.eqn.invars, branches.axis
        operands = [as_array(self.read(atom, layout), atom) for atom, layout in zip(atoms, step.operands, strict=True)]
        inner = {name: size for name, size in self.axes.items() if name != axis}

        def identity_element(i: int) -> jax.Array:
            aval, layout = step.eqn.outvars[i].aval, step.made[i]
            identity = dict(layout.partial)[axis].identity(aval.dtype)
            return jnp.full(layout.local_shape(aval.shape, self.axes), identity, aval.dtype)

        def evaluate_branch(number: int, values: Sequence[Any]) -> list[Any]:
            flow, makes = step.bodies[number], branches.results[number]
            made = run(
                flow,
                [values[i] for i in branches.operands[number]],
                inner,
                self.platform,
                everywhere=False,
                alike=self.alike,
            )
            own = {i: as_array(x, a) for i, x, a in zip(makes, made, flow.program.outputs, strict=True)}
            return [own[i] if i in own else identity_element(i) for i in range(len(step.results))]

        count = len(step.bodies)
        several: list[Any] = [functools.partial(evaluate_branch, number) for number in range(count)]
        if count < self.axes[axis]:
            several.append(lambda _: [identity_element(i) for i in range(len(step.results))])
        return lax.switch(index_along((axis,)), several, operands)  # indices after the last are clamped

    def in_blocks(self, step: Step, loop: Loop) -> list[Any]:
        """Runs a loop over this device's blocks. Its body has no collective over the axes of the share."""
        atoms, share, (flow,) = step.eqn.invars, loop.share, step.bodies
        operands = [as_array(self.read(atom, layout), atom) for atom, layout in zip(atoms, step.operands, strict=True)]
        inner = {name: size for name, size in self.axes.items() if name not in share.axes}
        if loop.at is None:
            me = index_along(share.axes)
            count, first = (jnp.asarray(table, jnp.int32)[me] for table in (share.counts, share.starts))
        else:
            count, first = map(np.int32, loop.at)
        overwritten = self.in_place_operands(step, loop)
        buffers = [
            operands[overwritten[j]] if j in overwritten else self.result_buffer(step, loop, j)
            for j in range(len(loop.results))
        ]
        result_over = {i: j for j, i in overwritten.items()}

        def run_block(k: jax.Array, buffers: list[Any]) -> list[Any]:
            inputs, place = [], k if loop.at is None else None
            for i, (value, dim) in enumerate(zip(operands, loop.operands, strict=True)):
                value = buffers[result_over[i]] if i in result_over else value  # its block k is not overwritten yet
                inputs.append(value if dim is None else block_at(value, dim, place, share.max_blocks))
            outputs = run(flow, [first + k, *inputs], inner, self.platform, everywhere=False, alike=self.alike)
            values = [as_array(value, atom) for value, atom in zip(outputs, flow.program.outputs, strict=True)]
            return [
                result.combine(before, value) if isinstance(result, Monoid) else put_at(before, value, result, place)
                for before, value, result in zip(buffers, values, loop.results, strict=True)
            ]

        made = opaque_loop(count, run_block, buffers)
        for i, (var, result) in enumerate(zip(step.eqn.outvars, loop.results, strict=True)):
            if isinstance(result, Monoid) and is_narrow(var.aval.dtype):
                names = (*share.axes, *(name for name, _ in flow.outputs[i].partial))
                made[i] = combine(made[i], names, result).astype(var.aval.dtype)
        return made

    def in_place_operands(self, step: Step, loop: Loop) -> dict[int, int]:
        """For results of a loop, by number, the operand that each overwrites: one without later uses.

        Inputs and outputs are paired in order, so that a donated state is updated in place.
        """
        program, overwritten = self.flow.program, dict[int, int]()
        order = {var: number for number, var in reversed([*enumerate(program.inputs)])}
        ends = {var: number for number, var in reversed([*enumerate(program.outputs)]) if isinstance(var, Var)}
        free = sorted(
            (order.get(atom, len(order)), i)
            for i, atom in enumerate(step.eqn.invars)
            if isinstance(atom, Var) and loop.operands[i] is not None and self.last_reader.get(atom) is step.eqn
        )
        for _, j in sorted((ends.get(var, len(ends)), j) for j, var in enumerate(step.eqn.outvars)):
            aval = step.eqn.outvars[j].aval
            for place in free:
                (_, i), given = place, step.eqn.invars[place[1]].aval
                alike = given.shape == aval.shape and given.dtype == aval.dtype
                if alike and loop.operands[i] == loop.results[j] and step.operands[i] == step.made[j]:
                    overwritten[j] = i
                    free.remove(place)
                    break
        return overwritten

    @functools.cached_property
    def last_reader(self) -> dict[Var, JaxprEqn | None]:
        """The equation that reads a variable last; None if the variable is an output."""
        last: dict[Var, JaxprEqn | None] = {}
        for eqn in self.flow.program.equations:
            last.update((atom, eqn) for atom in eqn.invars if isinstance(atom, Var))
        return last | {atom: None for atom in self.flow.program.outputs if isinstance(atom, Var)}

    @functools.cached_property
    def region_operands(self) -> set[Var]:
        """The operands of loops and branches, which may return them unchanged."""
        regions = (step.eqn for step in self.flow.steps if step.region is not None)
        return {atom for eqn in regions for atom in eqn.invars if isinstance(atom, Var)}

    def result_buffer(self, step: Step, loop: Loop, j: int) -> Any:
        """The buffer that a loop writes a result to, or adds it to."""
        (flow,), result, var = step.bodies, loop.results[j], step.eqn.outvars[j]
        dtype = flow.program.outputs[j].aval.dtype
        if isinstance(result, Monoid):
            return jnp.full(flow.outputs[j].local_shape(var.aval.shape, self.axes), result.identity(dtype), dtype)
        shape = step.made[j].local_shape(var.aval.shape, self.axes)
        returned = self.last_reader.get(var) is None  # an output: the caller may read the elements after the blocks
        return jnp.zeros(shape, dtype) if returned or var in self.region_operands else lax.empty(shape, dtype)

    def body(self, flow: Flow, values: Sequence[Any]) -> list[Any]:
        made = run(flow, values, self.axes, self.platform, alike=self.alike)
        return [as_array(value, atom) for value, atom in zip(made, flow.program.outputs, strict=True)]


def is_partial_reshape(step: Step) -> bool:
    """Whether a step reshapes its only operand, which is partial."""
    if step.choice is None or not step.choice.passed or len(step.eqn.invars) != 1 or len(step.eqn.outvars) != 1:
        return False
    d, (x,), (out,) = step.choice.description, step.eqn.invars, step.eqn.outvars
    same = isinstance(x, Var) and x.aval.size == out.aval.size and x.aval.dtype == out.aval.dtype
    return same and d.has(Algebra.MOVES) and all(isinstance(factor.split, Free) for factor in d.factors)


def opaque_loop(count: Any, body: Callable[[jax.Array, list[Any]], list[Any]], init: list[Any]) -> list[Any]:
    """A loop with a trip count that compilers do not know; `body` maps an iteration's number and state to a state."""
    state = jnp.int32(0), init
    return lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + np.int32(1), body(s[0], s[1])), state)[1]


def block_at(value: Any, dim: int, k: jax.Array | None, blocks: int) -> Any:
    """Block `k` of `blocks` along a dimension.

    Without `k`, for cost estimates, the first one. TPUs use separate kernels for slices that start at run-time
    positions, except at a loop's counter.
    """
    length = value.shape[dim] // blocks
    if k is None:
        return lax.slice_in_dim(value, 0, length, axis=dim)
    return lax.dynamic_slice_in_dim(value, k * length, length, axis=dim)


def put_at(value: Any, block: Any, dim: int, k: jax.Array | None) -> Any:
    """A value with one of its blocks replaced; see `block_at`."""
    return lax.dynamic_update_slice_in_dim(value, block, 0 if k is None else k * block.shape[dim], axis=dim)


def equation_of(step: Step) -> JaxprEqn | None:
    """The equation that a step evaluates, if it does."""
    return None if step.materializable else step.eqn


def nbytes(value: Any) -> int:
    """Bytes of one device's array; zero for keys."""
    return int(getattr(value, "size", 0)) * itemsize(getattr(value, "dtype", None))


def block_indices(way: FactorSharding, length: int) -> jax.Array:
    """Indices of this device's block of the sharded factor, int32."""
    return index_along(way.axes) * length + jnp.arange(length, dtype=jnp.int32)


def window_fill(way: FactorSharding, operand: int, value: Any) -> Any:
    """The fill value where a window reaches beyond an operand; None for any."""
    if not isinstance(way.split, Windowed):
        return None
    return way.split.around[operand].identity(value.dtype) if way.split.around else np.zeros((), value.dtype)
