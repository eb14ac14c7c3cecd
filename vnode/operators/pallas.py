"""Pallas kernels (`jax.experimental.pallas.pallas_call`): the axes of their grids as factors.

Knows the parameters of a ``pallas_call``: its grid, each operand's block per grid step, and the kernel. Must not know
nodes or devices, nor import Pallas: the equation's parameters have all that is needed.

A grid axis is a factor where it numbers blocks of every result, and of each operand that depends on it, and where the
steps along it are independent. A copy of the call on some of its indices is the same kernel on a shorter grid and
smaller arrays::

    grid (batch, heads, rows)    x[batch, heads, 128 * rows, 64] in blocks of (1, 1, 128, 64)
                                 by (b, h, i) -> (b, h, i, 0)
    factors                      x[(b), (h), (i, 128 whole), (64 whole)]

Where the rows within a block are independent too, the dimension is one factor, of rows: a copy then has as many blocks
as its rows need, the last one padded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from vnode.operators.control_flow import body_of
from vnode.operators.description import Dim, Dims, Factors, OperatorDescription, Positions, Sizes, Work
from vnode.operators.memo import Memo
from vnode.operators.monoid import Monoid
from vnode.operators.pallas_axes import Axis, Call, Plan, split_axes
from vnode.operators.pallas_sums import with_size
from vnode.operators.program_cost import body_cost
from vnode.operators.registry import kind, rule
from vnode.operators.splits import FREE, WHOLE, Reduced

ADVICE = (
    "where it says interpret=InterpretParams(...), write interpret=True: the simulation of a TPU is what has effects",
    "or describe a primitive of your own around it with vnode.operators.register (docs/registering-a-primitive.md)",
)


@rule("pallas_call", advice=ADVICE)
def pallas_call(eqn: JaxprEqn) -> OperatorDescription | None:
    call = Call(eqn.params)
    references = any(hasattr(atom.aval, "inner_aval") for atom in eqn.invars)
    if eqn.effects or references or body_of(eqn.params["jaxpr"]).constants:
        return None
    own = kind(eqn)
    if own is None:
        return described(eqn, call)
    return DESCRIPTIONS.get_or_make(own, lambda: described(eqn, call))


DESCRIPTIONS = Memo[OperatorDescription](256)
"""Kernels have no constants that a cache would keep alive."""


def described(eqn: JaxprEqn, call: Call) -> OperatorDescription:
    """The description of a call, with the axes of `split_axes` as factors."""
    plan = split_axes(call)
    f = Factors()
    factor = {
        axis.axis: f.new(axis.size, Reduced(Monoid.SUM) if axis.adds and axis.linear is None else FREE)
        for axis in plan.axes
    }

    def dims(shape: Sequence[int], leading: Sequence[Axis | None]) -> Dims:
        made: list[Dim] = []
        for n, axis in zip(shape, leading, strict=True):
            if axis is None:
                made.append((f.new(n, WHOLE, counted=False),))
            elif axis.block or axis.size == n:
                made.append((factor[axis.axis],))
            else:
                made.append((factor[axis.axis], f.new(n // axis.size, WHOLE, counted=False)))
        return tuple(made)

    shapes = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    leading: list[Sequence[Axis | None]] = [()] * call.sizes_given
    leading += plan.scalars
    leading += plan.arrays
    made = [dims(*each) for each in zip(shapes, leading, strict=True)]
    count = math.prod(axis.size for axis in plan.axes)
    operations, transcendental = work_of(call)

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        return evaluate_copy(e, plan, {axis: sizes[own] for axis, own in factor.items()}, operands)

    results, first = made[len(eqn.invars) :], call.sizes_given + call.scalars
    mixed = {factor[axis.axis]: first + axis.linear for axis in plan.axes if axis.linear is not None}
    summed = {
        k: frozenset({operand})
        for own, operand in mixed.items()
        for k, dims in enumerate(results)
        if not any(own in dim for dim in dims)
    }
    return OperatorDescription(
        factors=f.all,
        operands=tuple(made[: len(eqn.invars)]),
        results=tuple(results),
        summed=summed,
        work=Work(-(-operations // max(count, 1)), -(-transcendental // max(count, 1))),
        opaque=True,
        whole_because="; ".join(f"along axis {axis} of its grid, {why}" for axis, why in plan.whole.items()),
        emit=emit,
    )


def work_of(call: Call) -> tuple[int, int]:
    """Operations of the whole call, and how many are transcendental: by the author's estimate, else those of the
    kernel."""
    said = call.params["cost_estimate"]
    if said is not None:
        return int(said.flops), int(said.transcendentals)
    step = body_cost(body_of(call.params["jaxpr"]))
    steps = math.prod(size or 1 for size in call.grid)
    return step.flops * steps, step.transcendental * steps


# Copies ---------------------------------------------------------------------------------------------------------------


def evaluate_copy(eqn: JaxprEqn, plan: Plan, sizes: Mapping[int, int], operands: Sequence[Any]) -> list[Any]:
    """Evaluates a copy of a call with other sizes of its axes.

    Args:
      eqn: the call.
      plan: the axes along which it is split.
      sizes: the size of each of these axes, as `Axis` counts.
      operands: operands with the copy's shapes.

    Returns:
      The results. Scalars, and arrays of rows that do not fill their last block, are padded with their last elements.
    """
    call = Call(eqn.params)
    mapping, first = call.mapping, call.sizes_given + call.scalars
    grid = list(mapping.grid)
    lengths: dict[int, int] = {}
    for axis in plan.axes:
        grid[axis.axis] = axis.steps(sizes[axis.axis])
        lengths[axis.axis] = grid[axis.axis] * axis.block

    def resized(aval: Any, leading: Sequence[Axis | None]) -> Any:
        shape = tuple(
            n if axis is None else lengths[axis.axis] if axis.block else n // axis.size * sizes[axis.axis]
            for n, axis in zip(aval.shape, leading, strict=True)
        )
        return aval.update(shape=shape)

    blocks = tuple(
        own.replace(array_aval=resized(own.array_aval, leading))
        for own, leading in zip(call.blocks, plan.arrays, strict=True)
    )
    results = plan.arrays[call.arrays :]
    params = dict(call.params)
    for axis in plan.axes:
        if axis.adds:
            number, size = call.users.index(axis.axis), sizes[axis.axis]
            params["jaxpr"] = with_size(call.kernel, number, axis.size, size)
    params["grid_mapping"] = mapping.replace(grid=tuple(grid), block_mappings=blocks)
    params["out_avals"] = tuple(resized(*each) for each in zip(call.params["out_avals"], results, strict=True))
    whole, part = (math.prod(n or 1 for n in Call(each).grid) for each in (call.params, params))
    if params["cost_estimate"] is not None:
        counts = {name: value * part // whole for name, value in dataclasses.asdict(params["cost_estimate"]).items()}
        params["cost_estimate"] = dataclasses.replace(params["cost_estimate"], **counts)
    given = list(operands)
    for k, aval in enumerate(mapping.index_map_avals[len(grid) :]):
        given[call.sizes_given + k] = repeat_last(given[call.sizes_given + k], aval.shape)
    for k, own in enumerate(blocks[: call.arrays]):
        given[first + k] = repeat_last(given[first + k], own.array_aval.shape)
    made = eqn.primitive.bind(*given, **params)
    shapes = [
        tuple(
            sizes[axis.axis] if axis is not None and axis.block else n
            for n, axis in zip(value.shape, leading, strict=True)
        )
        for value, leading in zip(made, results, strict=True)
    ]
    return [
        value if value.shape == shape else lax.slice(value, (0,) * len(shape), shape)
        for value, shape in zip(made, shapes, strict=True)
    ]


def repeat_last(value: Any, shape: tuple[int, ...]) -> Any:
    """Extends an array to a shape by repeating its last elements."""
    missing = [(0, n - own) for n, own in zip(shape, jnp.shape(value), strict=True)]
    return jnp.pad(value, missing, mode="edge") if any(after for _, after in missing) else value
