"""Elementwise operators: every result element depends on the operand elements at the same index.

Knows the names of the elementwise primitives and in which operands each is linear. One table, one rule.
Must not know what is split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from vnode.operators.description import (
    NOTHING,
    Algebra,
    Dims,
    Factors,
    OperatorDescription,
    Positions,
    Sizes,
    Work,
)
from vnode.operators.registry import rule

# fmt: off
NONLINEAR = (
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
    "ceil", "clamp", "clz", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le", "le_to",
    "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "ne", "nextafter", "not",
    "one_minus_square", "or", "polygamma", "polynomial", "population_count", "pow",
    "reciprocal", "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stochastic_round", "tan", "tanh", "threefry2x32", "threefry4x32", "xor", "zeta",
)
# fmt: on
"""Primitives that are linear in no operand."""

LINEAR: dict[str, tuple[set[int], ...]] = {
    "add": ({0, 1},),
    "add_any": ({0, 1},),
    "complex": ({0, 1},),
    "conj": ({0},),
    "copy": ({0},),
    "imag": ({0},),
    "mul": ({0}, {1}),
    "name": ({0},),
    "neg": ({0},),
    "real": ({0},),
    "shard_alike": ({0, 1},),
    "stop_gradient": ({0},),
    "sub": ({0, 1},),
    "xla_metadata_value": ({0},),
}
"""For each primitive the groups of operands in which it is linear, whatever the dtype."""

# fmt: off
CONTINUOUS = {
    "abs", "asinh", "atan", "cbrt", "clamp", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "integer_pow",
    "logistic", "max", "min", "one_minus_square", "sin", "sinh", "square", "tanh",
}
# fmt: on
"""Nonlinear primitives that change little when their operands do."""

CHOOSING = {"clamp", "max", "min"}
"""Nonlinear primitives whose result is one of their operands."""

# fmt: off
TRANSCENDENTAL = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "cos", "cosh",
    "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma", "igamma_grad_a", "igammac", "lgamma", "log",
    "log1p", "log2", "logistic", "polygamma", "pow", "regularized_incomplete_beta", "rsqrt", "sin", "sinh", "sqrt",
    "tan", "tanh", "zeta",
}
# fmt: on
"""Primitives that take more than one operation of an arithmetic unit: XLA counts them separately, and so does the
cost."""

MOVEMENT = {"copy", "name", "shard_alike", "stop_gradient", "xla_metadata_value"}


def shapes_of(eqn: JaxprEqn) -> tuple[tuple[Sizes, ...], Sizes]:
    """The shapes of the operands and of the first result."""
    return tuple(atom.aval.shape for atom in eqn.invars), eqn.outvars[0].aval.shape


def broadcast(shapes: Sequence[Sizes], shape: Sizes) -> tuple[Factors, tuple[Dims, ...], Dims]:
    """Factors of an elementwise equation: size-one dimensions and scalars broadcast implicitly."""
    f = Factors()
    result = f.dims(shape)
    operands = tuple(
        tuple(() if n == 1 and want != 1 else dim for n, want, dim in zip(have, shape, result, strict=True))
        if have
        else ()
        for have in shapes
    )
    return f, operands, result


def elementwise(
    eqn: JaxprEqn,
    linear: Sequence[AbstractSet[int]],
    algebra: Algebra = NOTHING,
) -> OperatorDescription:
    """The description of an elementwise equation that is linear in the groups `linear`."""
    f, operands, result = broadcast(*shapes_of(eqn))
    return OperatorDescription(
        factors=f.all,
        operands=operands,
        results=(result,) * len(eqn.outvars),
        linear=tuple(frozenset(group) for group in linear),
        algebra=algebra | (Algebra.SPREADS if len(set(operands)) > 1 else NOTHING),
        work=Work(1, 1) if eqn.primitive.name in TRANSCENDENTAL else None,
    )


@rule(*NONLINEAR)
def nonlinear(eqn: JaxprEqn) -> OperatorDescription:
    continuous = Algebra.CONTINUOUS if eqn.primitive.name in CONTINUOUS else NOTHING
    return elementwise(eqn, (), continuous | (Algebra.CHOOSES if eqn.primitive.name in CHOOSING else NOTHING))


def high_product(x: Any, y: Any) -> Any:
    """The high half of the product of integers, from products of their halves.

    Like `jax.lax.mulhi`, which jaxlib does not compile for several devices (0.10.2: "Unable to convert MHLO").

    >>> high_product(jnp.uint32(1 << 20), jnp.uint32(3 << 20)).item() == (3 << 40) >> 32
    True
    """
    x, y = jnp.broadcast_arrays(x, y)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):  # a negative number also stands for itself plus all powers that fit
        unsigned = jnp.dtype(f"u{x.dtype}")
        high = high_product(x.astype(unsigned), y.astype(unsigned)).astype(x.dtype)
        return high - jnp.where(x < 0, y, 0) - jnp.where(y < 0, x, 0)
    half = jnp.asarray(jnp.iinfo(x.dtype).bits // 2, x.dtype)
    mask = (jnp.ones((), x.dtype) << half) - jnp.ones((), x.dtype)
    low_x, low_y, high_x, high_y = x & mask, y & mask, x >> half, y >> half
    first, second = low_x * high_y, high_x * low_y
    middle = ((low_x * low_y) >> half) + (first & mask) + (second & mask)
    return high_x * high_y + (first >> half) + (second >> half) + (middle >> half)


@rule("mulhi")
def mulhi(eqn: JaxprEqn) -> OperatorDescription:
    def emit(d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, _: Positions) -> list[Any]:
        return [high_product(*operands)]

    return dataclasses.replace(elementwise(eqn, ()), replaced_on=dict.fromkeys(("cpu", "gpu", "tpu"), emit))


@rule(*LINEAR)
def linear(eqn: JaxprEqn) -> OperatorDescription:
    name = eqn.primitive.name
    if name in MOVEMENT:
        return elementwise(eqn, LINEAR[name], Algebra.MOVES)
    return elementwise(eqn, LINEAR[name], Algebra.ADDS if name in ("add", "add_any") else NOTHING)


@rule("div")
def div(eqn: JaxprEqn) -> OperatorDescription:
    exact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)  # an integer division rounds
    return elementwise(eqn, ({0},) if exact else ())


def keeps_sums(old: Any, new: Any) -> bool:
    """Whether a sum may be taken before or after a conversion.

    It may between inexact dtypes, up to rounding, and where integers do not get wider: both are sums modulo a power of
    two.
    """
    if jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact):
        return jnp.issubdtype(new, jnp.complexfloating) or not jnp.issubdtype(old, jnp.complexfloating)
    if jnp.issubdtype(old, jnp.integer) and jnp.issubdtype(new, jnp.integer):
        return jnp.iinfo(new).bits <= jnp.iinfo(old).bits
    return False


@rule("convert_element_type")
def convert_element_type(eqn: JaxprEqn) -> OperatorDescription:
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    same = NOTHING if old != new else Algebra.MOVES  # jax converts a type to itself where it was a weak one
    description = elementwise(eqn, ({0},) if old == new or keeps_sums(old, new) else (), same)
    return dataclasses.replace(description, widen=lambda params, dtype: {**params, "new_dtype": np.dtype(dtype)})


@rule("select_n")
def select_n(eqn: JaxprEqn) -> OperatorDescription:
    return elementwise(eqn, (set(range(1, len(eqn.invars))),), Algebra.MOVES)
