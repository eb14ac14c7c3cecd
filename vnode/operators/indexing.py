"""Indexing operators: gathers, scatters and dynamic slices.

Knows jax's dimension numbers. Must not know what the indices are, except that they are not examples' values.

Dimensions that are indexed are whole. Dimensions of the index array are independent of each other: in a gather each
gives elements of the result, in a scatter each contributes a term, so there they are reduced by the scatter's monoid.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from vnode.operators.description import Dim, Factors, Monoid, OperatorDescription, Sizes, rule

FIRST = (frozenset({0}),)


@rule("gather")
def gather(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    result_shape = eqn.outvars[0].aval.shape
    indices = f.dims(indices_shape)
    whole = {indices[-1][0]}
    result: list[Dim] = [()] * len(result_shape)
    batch = [d for d in range(len(result_shape)) if d not in numbers.offset_dims]
    for d, dim in zip(batch, indices[:-1], strict=True):
        result[d] = dim
    operand: list[Dim] = [()] * len(operand_shape)
    for d, e in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand[d] = indices[e]
    offsets = iter(numbers.offset_dims)
    for d, n in enumerate(operand_shape):
        if d in numbers.operand_batching_dims:
            continue
        operand[d] = (f.new(n),)
        if d in numbers.collapsed_slice_dims:
            whole |= set(operand[d])
            continue
        e = next(offsets)
        if eqn.params["slice_sizes"][d] == n and d not in numbers.start_index_map:
            result[e] = operand[d]
        else:
            result[e] = (f.new(result_shape[e]),)
            whole |= {*operand[d], *result[e]}
    shared = {d: e for d in range(len(operand_shape)) for e in range(len(result_shape)) if operand[d] == result[e]}

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        new = d.operand_shape(0, sizes)
        slices = [
            new[k] if k in shared and k not in numbers.operand_batching_dims else n
            for k, n in enumerate(e.params["slice_sizes"])
        ]
        return {**e.params, "slice_sizes": tuple(slices)}

    return OperatorDescription(
        sizes=f.sizes,
        operands=(tuple(operand), indices),
        results=(tuple(result),),
        whole=frozenset(whole),
        linear=FIRST if fills_with_zero_or_nan(eqn) else (),
        movement=True,
        indices=frozenset({1}),
        resize=resize,
    )


def fills_with_zero_or_nan(eqn: JaxprEqn) -> bool:
    """Whether reading out of bounds gives a value that sums like one: nothing else may be added once per part."""
    if eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    if fill is None:
        return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))
    return bool(np.isnan(fill) or fill == 0)


SCATTERS = {
    "scatter": None,
    "scatter-add": Monoid.SUM,
    "scatter-sub": Monoid.SUM,
    "scatter-mul": Monoid.PROD,
    "scatter-min": Monoid.MIN,
    "scatter-max": Monoid.MAX,
}
"""How terms at the same place combine; None where the last one stays."""


@rule(*SCATTERS)
def scatter(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    monoid = SCATTERS[eqn.primitive.name]
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape, updates_shape = (atom.aval.shape for atom in eqn.invars)
    indices = f.dims(indices_shape)
    whole = {indices[-1][0]}
    updates: list[Dim] = [()] * len(updates_shape)
    terms = [d for d in range(len(updates_shape)) if d not in numbers.update_window_dims]
    for d, dim in zip(terms, indices[:-1], strict=True):
        updates[d] = dim
    operand: list[Dim] = [()] * len(operand_shape)
    for d, e in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        operand[d] = indices[e]
    windows = iter(numbers.update_window_dims)
    for d, n in enumerate(operand_shape):
        if d in numbers.operand_batching_dims:
            continue
        operand[d] = (f.new(n),)
        if d in numbers.inserted_window_dims:
            whole |= set(operand[d])
            continue
        e = next(windows)
        if updates_shape[e] == n and d not in numbers.scatter_dims_to_operand_dims:
            updates[e] = operand[d]
        else:
            updates[e] = (f.new(updates_shape[e]),)
            whole |= {*operand[d], *updates[e]}
    kept = {factor for dim in operand for factor in dim}
    summed = {factor for d in terms for factor in updates[d] if factor not in kept}
    if monoid is None:
        whole |= summed
    return OperatorDescription(
        sizes=f.sizes,
        operands=(tuple(operand), indices, tuple(updates)),
        results=(tuple(operand),),
        reduced={} if monoid is None else dict.fromkeys(summed, monoid),
        whole=frozenset(whole),
        linear=(frozenset({0, 2}),) if monoid in (None, Monoid.SUM) else (),
        once=frozenset({0}),
        indices=frozenset({1}),
    )


@rule("dynamic_slice")
def dynamic_slice(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    result = tuple(
        dim if n == m else (f.new(m),)
        for dim, n, m in zip(operand, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)
    )
    whole = {factor for a, b in zip(operand, result, strict=True) if a != b for factor in (*a, *b)}

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return {**e.params, "slice_sizes": d.result_shape(0, sizes)}

    return OperatorDescription(
        sizes=f.sizes,
        operands=(operand, *((),) * (len(eqn.invars) - 1)),
        results=(result,),
        whole=frozenset(whole),
        linear=FIRST,
        movement=True,
        indices=frozenset(range(1, len(eqn.invars))),
        resize=resize,
    )


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    operand = f.dims(eqn.invars[0].aval.shape)
    update = tuple(
        dim if n == m else (f.new(m),)
        for dim, n, m in zip(operand, eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
    )
    whole = {factor for a, b in zip(operand, update, strict=True) if a != b for factor in (*a, *b)}
    return OperatorDescription(
        sizes=f.sizes,
        operands=(operand, update, *((),) * (len(eqn.invars) - 2)),
        results=(operand,),
        whole=frozenset(whole),
        linear=(frozenset({0, 1}),),
        movement=True,
        indices=frozenset(range(2, len(eqn.invars))),
    )
