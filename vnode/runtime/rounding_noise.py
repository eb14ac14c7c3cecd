"""Function -> the same function with perturbed roundings, to measure how much of its results is rounding.

Knows jaxprs, and from operators' descriptions how many terms an equation adds. Must not know nodes, devices, steps or
any primitive's name.

This is Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic",
1997; Denis, de Oliveira Castro and Petit, "Verificarlo", 2016). Results of floating-point operations are perturbed by
one unit in the last place, up or down at random; a sum of n terms by sqrt(n) units. The function's results then differ
as those of two compilers or of two orders of summation would. So the bound follows from the sizes of the terms, however
these pass through divisions, normalizations and optimizers.

Arguments, sums, and values of 16 bits or fewer are perturbed. Elementwise results in 32 bits and more round by no more
than they are perturbed by already, and would take much longer to compile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from vnode.analysis.program import bind, context_of
from vnode.operators import Algebra, Monoid, OperatorDescription, describe
from vnode.operators.control_flow import Body, Region, body_of, call_of, region_of
from vnode.operators.in_program import InProgram, as_array

ODD = 0x9E3779B97F4A7C15
"""Multiplying by it mixes bits: 2**64 over the golden ratio, odd (Knuth, TAOCP 3, 6.4)."""


def with_rounding_noise(fun: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Perturbs the roundings of a function.

    Args:
      fun: a function of flat arrays.

    Returns:
      A function of a seed, an integer scalar, and the arguments of `fun`; to be compiled. Effects of `fun` without
      results, such as prints, are left out.

    Example:
      >>> total = with_rounding_noise(lambda x: [x.sum()])
      >>> x = jnp.full(10_000, 0.1)
      >>> bool(0 < abs(total(0, x)[0] - x.sum()) < 0.1)
      True
    """

    def run(seed: Any, *args: Any) -> list[Any]:
        traced = jax.make_jaxpr(fun)(*args)
        seed = jnp.asarray(seed, jnp.uint32)
        operands = [perturb(jnp.asarray(arg), (), seed, 0, 1) for arg in args]
        return evaluate(body_of(traced), operands, seed)

    return run


def evaluate(body: Body, operands: Sequence[Any], seed: jax.Array) -> list[Any]:
    """Evaluates a jaxpr with perturbed roundings, also in its calls, loops and branches."""
    env: dict[Any, Any] = dict(zip(body.jaxpr.constvars, body.constants, strict=True))
    env.update(zip(body.jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for index, eqn in enumerate(body.jaxpr.eqns):
        if eqn.effects and not eqn.outvars:
            continue
        values = list(map(read, eqn.invars))
        call, region = call_of(eqn), region_of(eqn)
        with context_of(eqn):
            if call is not None:
                results = evaluate(call.body, [values[i] for i in call.operands], seed)
            elif region is not None:
                results = evaluate_region(region, eqn, values, seed)
            else:
                results = bind(eqn, values)
                terms = terms_of(describe(eqn))
                results = [
                    perturb(result, values, seed, index, terms)
                    if terms > 1 or (terms and is_narrow(result))
                    else result
                    for result in results
                ]
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, body.jaxpr.outvars))


def evaluate_region(region: Region, eqn: JaxprEqn, values: Sequence[Any], seed: jax.Array) -> list[Any]:
    """Evaluates a loop or branch with perturbed roundings."""
    operands = list(values)
    for i in region.carried:
        operands[i] = as_array(operands[i], eqn.invars[i])

    def run(body: Body, inputs: list[Any]) -> list[Any]:
        results = evaluate(body, inputs, seed)
        return [as_array(value, atom) for value, atom in zip(results, body.jaxpr.outvars, strict=True)]

    return region.run(InProgram(eqn), [functools.partial(run, body) for body in region.bodies], operands)


def terms_of(description: OperatorDescription | None) -> int:
    """The number of terms that an equation adds for one element of its result; 0 if it does not round."""
    if description is None:
        return 1
    sums = [f for f, monoid in description.reduced.items() if monoid in (Monoid.SUM, Monoid.PROD)]
    selects = bool(description.reduced) and not sums
    orders = bool(description.whole) and not description.linear and not description.reduced
    if description.has(Algebra.MOVES) or selects or orders:
        return 0
    added = {*sums, *description.whole} if description.linear else sums
    return max(1, math.prod(description.sizes[f] for f in added))


def is_narrow(value: Any) -> bool:
    """Whether a value has 16 bits or fewer; compilers may keep more between two operations."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def perturb(value: Any, operands: Sequence[Any], seed: jax.Array, index: int, terms: int) -> Any:
    """Perturbs a result by units in the last place, unless it is exact: selected from operands, or a small integer.

    The direction is a hash of the value's bits with the seed and the number of its equation.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or not value.size:
        return value
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = [perturb(part, (), seed, index + i, terms) for i, part in enumerate((value.real, value.imag))]
        return lax.complex(*parts).astype(dtype)
    width = dtype.itemsize * 8
    word = jnp.dtype(f"uint{width}")
    odd = word.type(ODD >> (64 - width) | 1)
    salt = word.type((index * ODD >> 8) % 2**width)
    mixed = (lax.bitcast_convert_type(value, word) ^ seed.astype(word) * odd ^ salt) * odd
    mixed = (mixed ^ mixed >> word.type(width // 2)) * odd
    up = (mixed >> word.type(width - 1)).astype(jnp.bool_)
    unit = float(jnp.finfo(dtype).eps)
    wide = value.astype(jnp.promote_types(dtype, jnp.float32))
    step = min(unit * math.sqrt(terms), 0.5)
    changed = (wide * jnp.where(up, wide.dtype.type(1 + step), wide.dtype.type(1 - step))).astype(dtype)
    exact = (wide == jnp.round(wide)) & (jnp.abs(wide) < 1 / (16 * unit))
    for operand in operands:
        if jnp.issubdtype(jnp.result_type(operand), jnp.floating) and jnp.shape(operand) in ((), value.shape):
            kind = jnp.promote_types(jnp.result_type(operand), wide.dtype)
            same, other = value.astype(kind), jnp.asarray(operand, kind)
            exact |= jnp.abs(same) == jnp.abs(other)
    return jnp.where(exact, value, changed)
