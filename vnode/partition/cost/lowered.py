"""What XLA makes of products and windows on CPUs: one order of dimensions, pooling backwards by its indices.

Knows equations of one device. Must not know what anything costs.

XLA's CPU backend convolves arrays whose dimensions are examples, places, channels, and kernels whose are places, input,
output (``conv_canonicalization.cc``): anything else is transposed before, or after. It multiplies matrices
(``dot_decomposer.cc``): what an operand alone has comes before what is summed in the first one, and after it in the
second; batch dimensions lead. If each of the two is one dimension, they may also be the other way round
(``transpose_folding.cc``); anything else is transposed before. Operands that are repeated along dimensions of one are
arrays of their own. What goes back through a maximum over windows is sent to where the maximum was found
(``select_and_scatter_expander.cc``): a reduction of windows carries the indices of each element along each dimension
beside its value, and a scatter follows. A product of groups of rows with a matrix each is one product (that is jax's
lowering of ``ragged_dot``), of as many copies of the rows as there are groups, each zero but for its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from vnode.analysis.program import Program, inline
from vnode.operators import Algebra, describe
from vnode.operators.control import Loop, region_of
from vnode.operators.splits import Free
from vnode.partition.cost.loops import rebuilt


def lowered(program: Program) -> Program:
    """The program with such equations as XLA carries them out.

    Example:
      >>> x, k = jnp.ones((4, 3, 8, 8)), jnp.ones((5, 3, 3, 3))  # channels before places
      >>> traced = jax.make_jaxpr(lambda x, k: lax.conv(x, k, (1, 1), "SAME"))(x, k)
      >>> [eqn.primitive.name for eqn in lowered(inline(traced.jaxpr, traced.consts)).equations]
      ['transpose', 'transpose', 'conv_general_dilated', 'transpose']
    """
    equations: list[JaxprEqn] = []
    for eqn in itertools.chain.from_iterable(map(of_all_groups, program.equations)):
        if isinstance(eqn.params.get("dimension_numbers"), lax.ConvDimensionNumbers):
            equations += in_order(eqn)
        elif "select_prim" in eqn.params and len(eqn.outvars) == 1:
            equations += by_indices(eqn)
        elif (numbers := matrices(eqn)) is not None:
            equations += as_matrices(eqn, *numbers)
        elif repeats(eqn):
            equations += repeated(eqn)
        elif isinstance(region := region_of(eqn), Loop):
            (body,) = region.bodies
            inner = lowered(inline(body.jaxpr, body.constants, eqn))
            equations.append(rebuilt(eqn, region, inner, inner.equations, [], [], inner.outputs))
        else:
            equations.append(eqn)
    return program.with_equations(equations)


def of_all_groups(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A product of groups of rows as one of copies of them all; anything else, and products of a batch, as they are.

    Example:
      >>> rows, matrices, sizes = jnp.ones((8, 2)), jnp.ones((3, 2, 4)), jnp.array([2, 5, 1])
      >>> traced = jax.make_jaxpr(lax.ragged_dot)(rows, matrices, sizes)
      >>> (product,) = [e for e in lowered(inline(traced.jaxpr, traced.consts)).equations if "dot" in e.primitive.name]
      >>> [atom.aval.shape for atom in product.invars]
      [(8, 2, 3), (2, 3, 4)]
    """
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged is None or len(eqn.invars) != 3 or eqn.invars[2].aval.ndim != 1:
        return [eqn]
    (summed, several), (batch, _) = ragged.dot_dimension_numbers
    (rows,) = ragged.lhs_ragged_dimensions
    if batch:
        return [eqn]
    params = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}

    def apart(x: Any, dim: int, sizes: Any) -> Any:
        ends = jnp.cumsum(sizes)
        row = lax.broadcasted_iota(sizes.dtype, (sizes.size, *x.shape), dim + 1)
        start, end = (lax.broadcast_in_dim(each, row.shape, (0,)) for each in (ends - sizes, ends))
        copies = lax.broadcast_in_dim(x, row.shape, range(1, x.ndim + 1))
        return lax.select((start <= row) & (row < end), copies, lax.full_like(copies, 0))

    def function(x: Any, y: Any, sizes: Any) -> Any:
        groups = apart(x, rows, sizes)
        if rows in summed:  # of the gradient of the matrices: each group has its sum
            others = apart(y, several[summed.index(rows)], sizes)
            numbers = ([d + 1 for d in summed], [d + 1 for d in several]), ([0], [0])
            return lax.dot_general(groups, others, numbers, **params)
        numbers = ([d + 1 for d in summed] + [0], [*several, *ragged.rhs_group_dimensions]), ([], [])
        return lax.dot_general(groups, y, numbers, **params)

    return traced_as(eqn, function)


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


def matrices(eqn: JaxprEqn) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] | None:
    """Of a product, which dimensions of each operand are summed, and which are of the batch."""
    match eqn.params.get("dimension_numbers"):
        case ((_, _) as summed, (_, _) as batch):
            return summed, batch
    return None


def as_matrices(eqn: JaxprEqn, summed: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> Sequence[JaxprEqn]:
    """A product of matrices, and what turns the operands to that.

    Example:
      >>> heads, kernel = jnp.ones((8, 6, 2, 4)), jnp.ones((3, 2, 4))  # two dimensions are summed, the last of both
      >>> traced = jax.make_jaxpr(lambda a, b: jnp.einsum("bthk,ihk->bti", a, b))(heads, kernel)
      >>> [eqn.primitive.name for eqn in lowered(inline(traced.jaxpr, traced.consts)).equations]
      ['transpose', 'dot_general']
    """
    orders = [order_of(*each, first=not k) for k, each in enumerate(zip(eqn.invars, summed, batch, strict=True))]
    if orders == [None, None]:
        return [eqn]

    def function(*operands: Any) -> Any:
        turned = [x if order is None else lax.transpose(x, order) for x, order in zip(operands, orders, strict=True)]
        several = [
            [tuple(dims if order is None else map(order.index, dims)) for dims, order in zip(each, orders, strict=True)]
            for each in (summed, batch)
        ]
        return eqn.primitive.bind(*turned, **{**eqn.params, "dimension_numbers": tuple(map(tuple, several))})

    return traced_as(eqn, function)


def order_of(atom: Any, summed: Sequence[int], batch: Sequence[int], first: bool) -> list[int] | None:
    """The order in which an operand is multiplied; None as it is, or with rows for columns."""
    alone = [d for d in range(atom.aval.ndim) if d not in (*summed, *batch)]
    order = [*batch, *alone, *summed] if first else [*batch, *summed, *alone]
    longer = [d for d in order if atom.aval.shape[d] > 1]  # where the others are makes no difference
    leading = sum(d in batch for d in longer)
    turned = [*longer[:leading], *longer[:leading:-1], *longer[leading : leading + 1]]
    return None if sorted(longer) in (longer, turned if len(longer) == leading + 2 else longer) else order


def repeats(eqn: JaxprEqn) -> bool:
    """Whether an equation goes element by element, and repeats an operand along dimensions of which that has one."""
    if len(eqn.outvars) != 1 or len(eqn.invars) < 2:
        return False
    shapes, out = [atom.aval.shape for atom in eqn.invars], eqn.outvars[0].aval.shape
    if all(shape == out for shape in shapes) or any(len(shape) != len(out) for shape in shapes):
        return False
    of = describe(eqn)
    return of is not None and not of.has(Algebra.MOVES) and all(isinstance(f.split, Free) for f in of.factors)


def repeated(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation that goes element by element, and before it what repeats operands, which XLA has apart.

    Example:
      >>> traced = jax.make_jaxpr(lambda a, b: a * b)(jnp.ones((4, 1)), jnp.ones((1, 3)))
      >>> [eqn.primitive.name for eqn in lowered(inline(traced.jaxpr, traced.consts)).equations]
      ['broadcast_in_dim', 'broadcast_in_dim', 'mul']
    """
    shape = eqn.outvars[0].aval.shape

    def function(*operands: Any) -> Any:
        whole = [x if x.shape == shape else lax.broadcast_in_dim(x, shape, range(x.ndim)) for x in operands]
        return eqn.primitive.bind(*whole, **eqn.params)

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
