"""Contractions: sums over products of two operands.

Knows the dimension numbers of matrix products and convolutions. A contracted factor gives a partial sum (Tofu's
partition-n-reduce). Must not know which factor is split, nor how partial sums are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from vnode.operators.description import Algebra, Dim, Factors, OperatorDescription, Positions, Sizes
from vnode.operators.elementwise import keeps_sums
from vnode.operators.monoid import Monoid
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE, Reduced
from vnode.operators.windows import resize_windows, window_dim


def bilinear(eqn: JaxprEqn) -> tuple[frozenset[int], ...]:
    """The linear groups of a product: an operand widened from integers is not linear, since these wrap around
    earlier."""
    result = eqn.outvars[0].aval.dtype
    return tuple(frozenset({i}) for i in (0, 1) if keeps_sums(eqn.invars[i].aval.dtype, result))


def product_sum(eqn: JaxprEqn) -> Monoid:
    """A product of booleans is a conjunction, and the contraction a disjunction of them."""
    return Monoid.OR if eqn.outvars[0].aval.dtype == np.bool_ else Monoid.SUM


def with_sum_dtype(params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The parameters of a contraction whose sum is formed and returned in `dtype`."""
    return {**params, "preferred_element_type": np.dtype(dtype)}


@rule("dot_general")
def dot_general(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs = list(f.dims(eqn.invars[0].aval.shape))
    rhs: list[tuple[int, ...]] = [()] * len(eqn.invars[1].aval.shape)
    for d, e in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        rhs[e] = lhs[d]
    for e, n in enumerate(eqn.invars[1].aval.shape):
        if e not in rhs_batch and e not in rhs_contract:
            rhs[e] = (f.new(n),)
    result = (
        *(lhs[d] for d in lhs_batch),
        *(dim for d, dim in enumerate(lhs) if d not in lhs_batch and d not in lhs_contract),
        *(dim for e, dim in enumerate(rhs) if e not in rhs_batch and e not in rhs_contract),
    )
    f.change(*(lhs[d][0] for d in lhs_contract), split=Reduced(product_sum(eqn)))
    return OperatorDescription(
        factors=f.all,
        operands=(tuple(lhs), tuple(rhs)),
        results=(result,),
        linear=bilinear(eqn),
        algebra=Algebra.CONTRACTS,
        widen=with_sum_dtype,
    )


@rule("conv_general_dilated")
def conv_general_dilated(eqn: JaxprEqn) -> OperatorDescription:
    """``result[n, (g, o), t] = sum over i, k of lhs[n, (g, i), t.k] rhs[(g, o), i, k]``.

    With ``batch_group_count`` the groups stand beside the batch instead: ``lhs[(g, n), i, ...]``. The gradients of a
    convolution are convolutions again, whose feature dimension ``i`` (for the kernel's) is the forward pass's batch.
    """
    f = Factors()
    p = eqn.params
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs_shape, rhs_shape, out_shape = (atom.aval.shape for atom in (*eqn.invars, *eqn.outvars))
    feature_groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    group: Dim = (f.new(feature_groups * batch_groups),) if feature_groups * batch_groups != 1 else ()
    batch = f.new(lhs_shape[lhs_spec[0]] // batch_groups)
    inner = f.new(rhs_shape[rhs_spec[1]], Reduced(product_sum(eqn)))
    outer = f.new(rhs_shape[rhs_spec[0]] // (feature_groups * batch_groups))
    windows = [
        window_dim(
            f,
            lhs_shape[lhs_spec[2 + d]],
            out_shape[out_spec[2 + d]],
            rhs_shape[rhs_spec[2 + d]],
            p["window_strides"][d],
            p["padding"][d],
            p["lhs_dilation"][d],
            p["rhs_dilation"][d],
            kernel=True,
            monoid=product_sum(eqn),
        )
        for d in range(len(lhs_spec) - 2)
    ]

    def order_dims(spec: tuple[int, ...], first: Dim, second: Dim, spatial: list[Dim]) -> tuple[Dim, ...]:
        placed = dict(zip(spec, (first, second, *spatial), strict=True))
        return tuple(placed[d] for d in range(len(spec)))

    lhs = order_dims(
        lhs_spec,
        (*(group if batch_groups != 1 else ()), batch),
        (*(group if feature_groups != 1 else ()), inner),
        [w.operand for w in windows],
    )
    rhs = order_dims(rhs_spec, (*group, outer), (inner,), [w.window for w in windows])
    out = order_dims(out_spec, (batch,), (*group, outer), [w.result for w in windows])

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        count = math.prod(sizes[factor] for factor in group)
        groups = {name: count for name in ("feature_group_count", "batch_group_count") if e.params[name] != 1}
        return {**resize_windows(windows, d, e, sizes), **groups}

    return OperatorDescription(
        factors=f.all,
        operands=(lhs, rhs),
        results=(out,),
        linear=bilinear(eqn),
        algebra=Algebra.CONTRACTS,
        widen=with_sum_dtype,
        resize=resize,
        emit_on={"cpu": with_canonical_dimensions},
    )


def with_canonical_dimensions(
    d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Evaluates a convolution with features last, transposing to and from it.

    XLA for CPUs has a fast convolution for this order only. It transposes convolutions to it, except inside a loop,
    where gradients would run as plain nested loops.
    """
    params = e.params if d.resize is None else d.resize(d, e, sizes)
    numbers = params["dimension_numbers"]
    n = len(numbers.lhs_spec)
    last = (0, n - 1, *range(1, n - 1))
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    result = e.primitive.bind(
        lax.transpose(operands[0], (lhs[0], *lhs[2:], lhs[1])),
        lax.transpose(operands[1], (*rhs[2:], rhs[1], rhs[0])),
        **{**params, "dimension_numbers": lax.ConvDimensionNumbers(last, (n - 1, n - 2, *range(n - 2)), last)},
    )
    order = (out[0], *out[2:], out[1])
    return [lax.transpose(result, tuple(order.index(d) for d in range(n)))]


@rule("ragged_dot_general")
def ragged_dot_general(eqn: JaxprEqn) -> OperatorDescription:
    """A product whose left ragged dimension is cut into groups of run-time size; it and the groups stay whole."""
    f = Factors()
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    lhs = list(f.dims(eqn.invars[0].aval.shape))
    rhs: list[Dim] = [()] * len(eqn.invars[1].aval.shape)
    for d, e in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        rhs[e] = lhs[d]
    kept = [e for e in range(len(rhs)) if e not in rhs_batch and e not in rhs_contract]
    for e in kept:
        if e not in numbers.rhs_group_dimensions:
            rhs[e] = (f.new(eqn.invars[1].aval.shape[e]),)
    count = (f.new(eqn.invars[2].aval.shape[-1]),)
    whole = {*lhs[ragged], *count}
    if ragged not in lhs_batch and eqn.invars[2].aval.ndim - 1 == len(lhs_batch):
        prefix = tuple(lhs[d] for d in lhs_batch)
    else:
        prefix = f.dims(eqn.invars[2].aval.shape[:-1])
        if prefix:  # further dimensions with group sizes of their own
            whole.update(factor for dim in (*prefix, *lhs) for factor in dim)
    for e in numbers.rhs_group_dimensions:
        rhs[e] = count
    f.change(*(lhs[d][0] for d in lhs_contract), split=Reduced(Monoid.SUM))
    f.change(*whole, split=WHOLE)
    f.change(*count, counted=False)
    result = (
        *((count,) if ragged in lhs_contract else ()),
        *(lhs[d] for d in lhs_batch),
        *(dim for d, dim in enumerate(lhs) if d not in lhs_batch and d not in lhs_contract),
        *(rhs[e] for e in kept if e not in numbers.rhs_group_dimensions),
    )
    return OperatorDescription(
        factors=f.all,
        operands=(tuple(lhs), tuple(rhs), (*prefix, count)),
        results=(result,),
        linear=bilinear(eqn),
        algebra=Algebra.CONTRACTS,
        widen=with_sum_dtype,
    )


@rule("scaled_dot")
def scaled_dot(eqn: JaxprEqn) -> OperatorDescription:
    """A product of operands that carry a scale for every block along the contracted dimension, which stays whole."""
    f = Factors()
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs = list(f.dims(eqn.invars[0].aval.shape))
    rhs: list[Dim] = [()] * len(eqn.invars[1].aval.shape)
    for d, e in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        rhs[e] = lhs[d]
    for e, n in enumerate(eqn.invars[1].aval.shape):
        if e not in rhs_batch and e not in rhs_contract:
            rhs[e] = (f.new(n),)
    f.change(*(lhs[d][0] for d in lhs_contract), split=WHOLE)
    scales = []
    for dims, contract, atom in ((lhs, lhs_contract, eqn.invars[2]), (rhs, rhs_contract, eqn.invars[3])):
        blocks = {d: (f.new(atom.aval.shape[d], WHOLE, counted=False),) for d in contract}
        scales.append(tuple(blocks.get(d, dims[d]) for d in range(len(atom.aval.shape))))
    result = (
        *(lhs[d] for d in lhs_batch),
        *(dim for d, dim in enumerate(lhs) if d not in lhs_batch and d not in lhs_contract),
        *(dim for e, dim in enumerate(rhs) if e not in rhs_batch and e not in rhs_contract),
    )
    return OperatorDescription(
        factors=f.all,
        operands=(tuple(lhs), tuple(rhs), *scales),
        results=(result,),
        linear=bilinear(eqn),
        algebra=Algebra.CONTRACTS,
        widen=with_sum_dtype,
    )
