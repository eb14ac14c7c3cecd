"""What XLA makes of sliding windows on CPUs: convolutions in one order of dimensions, pooling backwards by its indices.

Knows equations of one device. Must not know what anything costs.

XLA's CPU backend convolves arrays whose dimensions are examples, places, channels, and kernels whose are places, input,
output (``conv_canonicalization.cc``): anything else is transposed before, or after. What goes back through a maximum
over windows is sent to where the maximum was found (``select_and_scatter_expander.cc``): a reduction of windows carries
the indices of each element along each dimension beside its value, and a scatter follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from vnode.analysis.program import Program, inline


def lowered(program: Program) -> Program:
    """The program with such equations as XLA carries them out.

    Example:
      >>> x, k = jnp.ones((4, 3, 8, 8)), jnp.ones((5, 3, 3, 3))  # channels before places
      >>> traced = jax.make_jaxpr(lambda x, k: lax.conv(x, k, (1, 1), "SAME"))(x, k)
      >>> [eqn.primitive.name for eqn in lowered(inline(traced.jaxpr, traced.consts)).equations]
      ['transpose', 'transpose', 'conv_general_dilated', 'transpose']
    """
    equations: list[JaxprEqn] = []
    for eqn in program.equations:
        if isinstance(eqn.params.get("dimension_numbers"), lax.ConvDimensionNumbers):
            equations += in_order(eqn)
        elif "select_prim" in eqn.params and len(eqn.outvars) == 1:
            equations += by_indices(eqn)
        else:
            equations.append(eqn)
    return Program(program.inputs, program.constants, equations, program.outputs)


def in_order(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A convolution of arrays in the order that is computed in."""
    numbers = eqn.params["dimension_numbers"]
    n = len(numbers.lhs_spec)
    arrays = (0, n - 1, *range(1, n - 1))
    kernels = (n - 1, n - 2, *range(n - 2))
    if (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == (arrays, kernels, arrays):
        return [eqn]

    def turned(x: Any, have: Sequence[int], want: Sequence[int]) -> Any:
        order = [have[want.index(d)] for d in range(n)]
        return x if order == list(range(n)) else lax.transpose(x, order)

    def function(x: Any, k: Any) -> Any:
        ordered = lax.ConvDimensionNumbers(arrays, kernels, arrays)
        operands = turned(x, numbers.lhs_spec, arrays), turned(k, numbers.rhs_spec, kernels)
        (found,) = [eqn.primitive.bind(*operands, **{**eqn.params, "dimension_numbers": ordered})]
        return turned(found, arrays, numbers.out_spec)

    return traced_as(eqn, function)


def by_indices(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The gradient of a maximum over windows, by the indices of the maxima."""
    params = eqn.params
    window = params["window_dimensions"], params["window_strides"], params["padding"]

    def function(source: Any, operand: Any) -> Any:
        # XLA makes one reduction of values and indices; its shapes are those of this one, of each
        places = [lax.broadcasted_iota(jnp.int32, operand.shape, d) for d in range(operand.ndim)]
        start = np.array(-np.inf if jnp.issubdtype(operand.dtype, jnp.floating) else 0, operand.dtype)
        _, *found = lax.reduce_window(
            (operand, *places),
            (start, *[np.int32(0)] * operand.ndim),
            lambda a, b: tuple(lax.select(a[0] >= b[0], x, y) for x, y in zip(a, b, strict=True)),
            *window,
        )
        indices = jnp.stack(found, axis=-1)
        empty = jnp.zeros(operand.shape, source.dtype)
        return empty.at[tuple(indices[..., d] for d in range(operand.ndim))].add(source, mode="promise_in_bounds")

    return traced_as(eqn, function)


def traced_as(eqn: JaxprEqn, function: Callable[..., Any]) -> list[JaxprEqn]:
    """Equations of a function of an equation's operands, in its place."""
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    traced = jax.make_jaxpr(function)(*shapes)
    program = inline(traced.jaxpr, traced.consts, eqn)
    if program.constants:
        return [eqn]
    names: dict[Any, Any] = dict(zip(program.inputs, eqn.invars, strict=True))
    names.update(zip(program.outputs, eqn.outvars, strict=True))

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    return [
        each.replace(invars=[named(a) for a in each.invars], outvars=[names.get(v, v) for v in each.outvars])
        for each in program.equations
    ]
