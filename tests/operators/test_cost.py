"""What equations cost, against what XLA counts in the same programs, and that costs add up.

Knows XLA's cost analysis: of the program as it is handed to the compiler, where an equation is an operation, and of
the compiled one. Must not know how a cost is read off a description.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from vnode.operators.control_flow import Body
from vnode.operators.cost import Cost
from vnode.operators.program_cost import body_cost

pytestmark = pytest.mark.quickly

amounts = st.integers(0, 10**15)
types = st.sampled_from(["float32", "bfloat16", "int8"])
costs = st.builds(Cost, st.dictionaries(types, amounts), amounts, amounts, amounts, amounts)
numbers = st.integers(0, 1000)


@given(costs, costs, costs)
def test_costs_are_a_commutative_monoid(a, b, c):
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Cost() == a == Cost() + a


@given(costs, costs, numbers, numbers)
def test_costs_have_multiples(a, b, m, n):
    assert m * (a + b) == m * a + m * b
    assert (m + n) * a == m * a + n * a
    assert m * (n * a) == (m * n) * a
    assert 1 * a == a and 0 * a == Cost() and 2 * a == a * 2 == a + a


@given(costs, costs)
def test_operations_of_all_kinds_add_up(a, b):
    assert (a + b).flops == a.flops + b.flops and a.flops == sum(a.matrix.values()) + a.vector


def shape(*dimensions: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def cost(fun: Callable[..., Any], *args: Any) -> Cost:
    closed = jax.make_jaxpr(fun)(*args)
    return body_cost(Body(closed.jaxpr, tuple(closed.consts)))


def handed_over(fun: Callable[..., Any], *args: Any) -> tuple[int, int, int]:
    """XLA's count of the program as it gets it: operations, transcendental ones, bytes."""
    counted = jax.jit(fun).lower(*args).cost_analysis()
    return tuple(int(counted.get(key, 0)) for key in ("flops", "transcendentals", "bytes accessed"))


def compiled_operations(fun: Callable[..., Any], *args: Any) -> int:
    return int(jax.jit(fun).lower(*args).compile().cost_analysis()["flops"])


# Contractions: XLA, too, leaves out what falls on padding or between dilated elements -------------------------------

ORDER = ("NHWC", "HWIO", "NHWC")
X, W = shape(2, 9, 8, 6), shape(3, 2, 6, 4)

CONVOLUTIONS = {
    "valid": (X, W, {"padding": "VALID"}),
    "same": (X, W, {"padding": "SAME"}),
    "strided": (X, W, {"padding": "SAME", "window_strides": (2, 3)}),
    "padded": (X, W, {"padding": ((4, 3), (0, 5))}),
    "cropped": (X, W, {"padding": ((-2, 1), (0, -1))}),
    "holes between elements": (X, W, {"padding": ((2, 1), (1, 0)), "lhs_dilation": (2, 3)}),
    "holes in the window": (X, W, {"padding": ((2, 1), (1, 0)), "rhs_dilation": (2, 3)}),
    "all of it": (
        X,
        W,
        {"padding": ((2, 1), (-1, 4)), "lhs_dilation": (2, 3), "rhs_dilation": (1, 2), "window_strides": (2, 1)},
    ),
    "groups": (X, shape(3, 2, 2, 9), {"padding": "SAME", "feature_group_count": 3}),
    "one dimension": (shape(2, 9, 6), shape(3, 6, 4), {"padding": "SAME", "dimension_numbers": ("NHC", "HIO", "NHC")}),
    "groups of the batch": (shape(4, 9, 8, 6), W, {"padding": "SAME", "batch_group_count": 2}),
}


def convolution(case: str) -> tuple[Callable[..., Any], Any, Any]:
    x, w, params = CONVOLUTIONS[case]
    rest = {"dimension_numbers": ORDER, "window_strides": (1,) * (len(x.shape) - 2), **params}
    return lambda x, w: lax.conv_general_dilated(x, w, **rest), x, w


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_and_both_gradients(case):
    convolve, x, w = convolution(case)
    y = jax.eval_shape(convolve, x, w)
    programs = {
        "forward": (convolve, x, w),
        "of the image": (lambda w, y: jax.linear_transpose(lambda x: convolve(x, w), x)(y), w, y),
        "of the kernel": (lambda x, y: jax.linear_transpose(lambda w: convolve(x, w), w)(y), x, y),
    }
    for name, program in programs.items():
        ours = cost(*program)
        assert ours.flops == compiled_operations(*program), name
        assert ours.matrix == {"float32": ours.flops} and ours.vector == 0, name
    ours = cost(convolve, x, w)
    assert ours.read + ours.written == handed_over(convolve, x, w)[2]


PRODUCTS = {
    "matrices": (shape(7, 5), shape(5, 3), (((1,), (0,)), ((), ()))),
    "a vector": (shape(7, 5), shape(5), (((1,), (0,)), ((), ()))),
    "an inner product": (shape(7), shape(7), (((0,), (0,)), ((), ()))),
    "an outer product": (shape(7), shape(5), (((), ()), ((), ()))),
    "batches": (shape(4, 7, 5), shape(4, 5, 3), (((2,), (1,)), ((0,), (0,)))),
    "two contracted": (shape(4, 7, 5), shape(5, 7, 3), (((1, 2), (1, 0)), ((), ()))),
}


@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products(case, dtype):
    """Of the program before it is compiled: for CPUs XLA widens bfloat16 first, and counts that."""
    *operands, numbers = PRODUCTS[case]
    args = [shape(*x.shape, dtype=dtype) for x in operands]

    def product(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, numbers)

    ours = cost(product, *args)
    assert (ours.flops, 0, ours.read + ours.written) == handed_over(product, *args)
    assert ours.matrix == {dtype: ours.flops}


# Windows without a kernel: XLA counts a window of n elements as n - 1 operations, of padding, too -------------------

WINDOWS = {
    "side by side": ((2, 2), (2, 2), ((0, 0), (0, 0))),
    "overlapping": ((3, 3), (2, 1), ((0, 0), (0, 0))),
    "with gaps": ((2, 1), (3, 2), ((0, 0), (0, 0))),
    "padded": ((3, 3), (2, 2), ((1, 1), (0, 2))),
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("way", ["max", "sum"])
def test_pools(case, way):
    """An operation for every element under a window, which a pool of ones counts."""
    window, stride, padding = WINDOWS[case]
    computation, initial = {"max": (lax.max, -np.inf), "sum": (lax.add, 0.0)}[way]

    def pool(x: Any, computation: Any = computation, initial: float = initial) -> Any:
        return lax.reduce_window(x, np.float32(initial), computation, window, stride, padding)

    x = shape(9, 8)
    elements = int(pool(np.ones((9, 8), np.float32), lax.add, 0.0).sum())
    results = math.prod(jax.eval_shape(pool, x).shape)
    ours = cost(pool, x)
    assert (ours.flops, ours.transcendental) == (elements, 0)
    if case != "padded":
        assert ours.flops - results == compiled_operations(pool, x)
    initial_value = 4
    assert ours.read + ours.written + initial_value == handed_over(pool, x)[2]


@pytest.mark.parametrize("case", WINDOWS)
def test_gradients_of_extreme_pools(case):
    """A comparison for every element under a window, as a pool of ones counts them; XLA adds those of padding."""
    window, stride, padding = WINDOWS[case]

    def pool(x: Any, computation: Any = lax.max, initial: float = -np.inf) -> Any:
        return lax.reduce_window(x, np.float32(initial), computation, window, stride, padding)

    x = shape(9, 8)
    y = jax.eval_shape(pool, x)
    gradient = jax.make_jaxpr(lambda x, y: jax.vjp(pool, x)[1](y))(x, y)
    (scatter,) = (eqn for eqn in gradient.jaxpr.eqns if eqn.primitive.name == "select_and_scatter_add")

    def alone(y: Any, x: Any) -> Any:
        return scatter.primitive.bind(y, x, **scatter.params)

    ours = cost(alone, y, x)
    elements = int(pool(np.ones((9, 8), np.float32), lax.add, 0.0).sum())
    assert ours.flops == elements
    assert ours.read + ours.written == 4 * (2 * 9 * 8 + math.prod(y.shape))
    if case != "padded":
        assert ours.flops == handed_over(alone, y, x)[0]


# Element by element: what is transcendental is no `flop` of XLA's; a function that XLA writes out counts there as more

TRANSCENDENTAL = ("exp", "log", "log1p", "expm1", "tanh", "sqrt", "rsqrt", "cbrt", "sin", "cos", "tan", "erf")
PLAIN = ("neg", "abs", "floor", "ceil", "round", "sign")
OF_TWO = ("add", "sub", "mul", "div", "max", "min", "rem")
TRANSCENDENTAL_OF_TWO = ("pow", "atan2")


@pytest.mark.parametrize("name", TRANSCENDENTAL + PLAIN)
def test_functions_of_one(name):
    compare_elementwise(getattr(lax, name), shape(6, 5))


@pytest.mark.parametrize("name", OF_TWO + TRANSCENDENTAL_OF_TWO + ("lt", "eq"))
def test_functions_of_two(name):
    compare_elementwise(getattr(lax, name), shape(6, 5), shape(6, 5))


def compare_elementwise(fun: Callable[..., Any], *args: Any) -> None:
    ours = cost(fun, *args)
    assert (ours.flops - ours.transcendental, ours.transcendental, ours.read + ours.written) == handed_over(fun, *args)
    assert ours.matrix == {}


@pytest.mark.parametrize("name", ["logistic", "exp2"])
def test_functions_that_xla_writes_out(name):
    """A logistic is an exponential and three more operations there: as many transcendental ones."""
    ours = cost(getattr(lax, name), shape(30))
    assert ours.transcendental == ours.flops == handed_over(getattr(lax, name), shape(30))[1]


def test_what_is_read_twice_counts_once():
    """XLA counts a square's operand for each time that it is named."""
    square = cost(lambda x: lax.mul(x, x), shape(30))
    assert (square.read, square.written) == (120, 120)
    assert handed_over(lambda x: lax.mul(x, x), shape(30))[2] == 360


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_reductions(axes):
    """XLA counts n - 1 additions for a sum of n, and reads an initial value."""
    for reduction in (lax.reduce_sum, lax.reduce_max, lax.reduce_prod):
        program, x = lambda x, reduction=reduction: reduction(x, axes), shape(6, 5)
        ours, results = cost(program, x), math.prod(jax.eval_shape(program, x).shape)
        assert (ours.flops - results, 0, ours.read + ours.written + 4) == handed_over(program, x)


# What moves costs its bytes only ------------------------------------------------------------------------------------

I = shape(4, 1, dtype=jnp.int32)  # noqa: E741
ROWS = lax.GatherDimensionNumbers((1,), (0,), (0,))
PLACES = lax.ScatterDimensionNumbers((1,), (0,), (0,))

MOVES = {
    "slice": (lambda x: lax.slice(x, (1, 1), (3, 4)), shape(6, 5)),
    "slice with strides": (lambda x: lax.slice(x, (1, 0), (6, 4), (2, 1)), shape(6, 5)),
    "pad": (lambda x, y: lax.pad(x, y, ((1, 1, 0), (0, 2, 1))), shape(6, 5), shape()),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), shape(6, 5), shape(2, 5)),
    "reverse": (lambda x: lax.rev(x, (0,)), shape(6, 5)),
    "broadcast": (lambda x: lax.broadcast(x, (3,)), shape(6, 5)),
    "reshape": (lambda x: lax.reshape(x, (30,)), shape(6, 5)),
    "iota": (lambda: lax.iota(jnp.float32, 7),),
    "gather": (lambda x, i: lax.gather(x, i, ROWS, (1, 5), mode="promise_in_bounds"), shape(60, 5), I),
}


@pytest.mark.parametrize("case", MOVES)
def test_moves(case):
    fun, *args = MOVES[case]
    ours = cost(fun, *args)
    assert (ours.flops, 0, ours.read + ours.written) == handed_over(fun, *args)
    assert ours.flops == 0


def bind(name: str, params: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args: getattr(lax, f"{name}_p").bind(*args, **params)


def test_looking_up():
    """Only what is found is read, and only what is put in place is written, besides the indices."""
    start = shape(dtype=jnp.int32)
    sliced = bind("dynamic_slice", {"slice_sizes": (2, 5)})
    ours = cost(sliced, shape(60, 5), start, start)
    assert (ours.flops, ours.read, ours.written) == (0, 4 * 10 + 8, 4 * 10)
    assert handed_over(sliced, shape(60, 5), start, start)[2] == ours.read + ours.written - 4  # one start of the two
    updated = bind("dynamic_update_slice", {})
    ours = cost(updated, shape(60, 5), shape(2, 5), start, start)
    assert ours.flops == 0 and ours.written == 4 * 10
    added = lambda x, i, y: lax.scatter_add(x, i, y, PLACES, mode="promise_in_bounds")  # noqa: E731
    ours = cost(added, shape(60, 5), I, shape(4, 5))
    assert (ours.flops, 0, ours.read + ours.written) == handed_over(added, shape(60, 5), I, shape(4, 5))


# Regions: XLA counts a loop's body once ------------------------------------------------------------------------------


def turn(x: Any) -> Any:
    return jnp.tanh(x @ x) + 1


def unrolled(count: int) -> Callable[..., Any]:
    def program(x: Any) -> Any:
        for _ in range(count):
            x = turn(x)
        return x

    return program


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_scan_costs_its_turns(count):
    x = shape(5, 5)
    assert cost(lambda x: lax.scan(lambda c, _: (turn(c), None), x, None, length=count)[0], x) == cost(
        unrolled(count), x
    )


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_while_loop_costs_its_turns_and_their_tests(count):
    def program(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, turn(c[1])), (0, x))[1]

    test, step = cost(lambda i: i < 7, shape(dtype=jnp.int32)), cost(lambda i: i + 1, shape(dtype=jnp.int32))
    counted = cost(program, shape(5, 5))
    assert counted == cost(unrolled(count), shape(5, 5)) + (count + 1) * test + count * step


def test_loops_in_loops():
    x = shape(5, 5)
    inner = lambda x: lax.scan(lambda c, _: (turn(c), None), x, None, length=3)[0]  # noqa: E731
    outer = lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=4)[0]  # noqa: E731
    assert cost(outer, x) == cost(unrolled(12), x)


def test_branches_cost_the_dearest_and_calls_what_is_called():
    x, p = shape(5, 5), shape(dtype=bool)
    call = jax.jit(turn)
    assert cost(lambda x: call(call(x)), x) == cost(unrolled(2), x)
    assert cost(jax.checkpoint(turn), x) == cost(turn, x)
    branch = cost(lambda p, x: lax.cond(p, turn, lambda x: x + 1, x), p, x)
    choice = cost(lambda p: p.astype(jnp.int32), p)
    assert branch == cost(turn, x) + choice
