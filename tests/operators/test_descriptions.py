"""Every operator description against the equation itself, piece by piece."""

import dataclasses
import importlib
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

from tests.operators import brute_force
from tests.operators.brute_force import Array, check, instances, ways
from tests.operators.examples import EXAMPLES, ONE_VERSION, UNREACHABLE, primitive, weighted
from vnode.operators import (
    RARE,
    Algebra,
    LookedUp,
    Monoid,
    OperatorDescription,
    Prefix,
    Reduced,
    Role,
    Shifted,
    Whole,
    Windowed,
    describe,
)
from vnode.operators.elementwise import high_product
from vnode.operators.registry import _rules, register
from vnode.operators.shape import common_refinement
from vnode.operators.splits import FREE, Lead, Split

pytestmark = pytest.mark.quickly


@pytest.fixture(autouse=True)
def quick_compilation():
    """Many tiny programs: the compiler's optimizations would take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.sampled(200)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_description(example):
    checked = {}
    for instance in instances(example.fun, *example.args, of=example.of):
        if instance.signature not in checked:
            checked[instance.signature] = check(instance)
    assert checked


EXERCISED = {
    "windows' results": {
        "conv_general_dilated",
        "reduce_window",
        "reduce_window_max",
        "reduce_window_min",
        "reduce_window_sum",
        "select_and_gather_add",
    },
    "windows' elements": {"conv_general_dilated"},
    "places that windows covered": {"select_and_scatter_add"},
    "places that are read, and added": {"dynamic_slice", "gather"},
    "places that are read, and joined": {"gather"},
    "places that are written": {
        "dynamic_update_slice",
        "scatter",
        "scatter-add",
        "scatter-max",
        "scatter-min",
        "scatter-mul",
        "scatter-sub",
    },
    "moves": {"concatenate", "pad", "rev", "slice", "split"},
    "running reductions": {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"},
}
"""Primitives whose examples are cut along more than free and reduced factors."""


def kind(lead: Lead, split: Split) -> str | None:
    """What is cut, in words; None where the tests of free and reduced factors cut it."""
    match split:
        case Windowed(back=factor) if lead == (factor,):
            return "places that windows covered"
        case Windowed(extent=factor) if lead == (factor,):
            return "windows' elements"
        case Windowed():
            return "windows' results"
        case LookedUp(monoid=None):
            return "places that are written"
        case LookedUp(monoid=monoid):
            return f"places that are read, and {'added' if monoid is Monoid.SUM else 'joined'}"
        case Shifted():
            return "moves"
        case Prefix():
            return "running reductions"
    return None


def test_every_way_to_cut_is_exercised():
    """One that no example has any more, or that a description does not offer any more, would go unchecked."""
    cut: dict[str | None, set[str]] = {}
    for example in EXAMPLES:
        for eqn in equations(example):
            d = describe(eqn) if eqn.primitive.name in example.of else None
            for lead, split, _ in [] if d is None else ways(d):
                cut.setdefault(kind(lead, split), set()).add(eqn.primitive.name)
    cut.pop(None)
    assert cut == EXERCISED


def test_every_description_is_exercised():
    reached = {
        eqn.primitive.name for example in EXAMPLES for eqn in equations(example) if eqn.primitive.name in example.of
    }
    for family in RARE.values():
        importlib.import_module(family)
    ours = {name for name, fun in _rules.items() if fun.__module__ != register.__module__}  # not those of other tests
    missing = ours - reached - set(UNREACHABLE)
    assert missing <= ONE_VERSION and all(primitive(name) is None for name in missing)
    assert not reached & set(UNREACHABLE)


def equations(example):
    """The equations of an example, calls opened, nothing evaluated."""
    pending = [jax.make_jaxpr(example.fun)(*example.args).jaxpr]
    while pending:
        for eqn in pending.pop().eqns:
            yield eqn
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    pending.append(inner)


X = np.random.RandomState(0).randn(4, 3)
IMAGE, KERNEL = np.random.RandomState(1).randn(1, 7, 2), np.random.RandomState(2).randn(3, 2, 2)

Spoil = Callable[[OperatorDescription], OperatorDescription]


def says(**fields: Any) -> Spoil:
    """Other fields of the description."""
    return lambda d: dataclasses.replace(d, **fields)


def splits(kind: type[Split], new: Callable[[Any], Split]) -> Spoil:
    """Other splits in the place of those of a kind."""
    return lambda d: dataclasses.replace(
        d,
        factors=tuple(
            dataclasses.replace(x, split=new(x.split)) if isinstance(x.split, kind) else x for x in d.factors
        ),
    )


def but(**changes: Any) -> Callable[[Any], Split]:
    """The same split in all other respects."""
    return lambda split: dataclasses.replace(split, **changes)


def moves(**changes: Any) -> Spoil:
    """Other ways for all that moves; numbers are added."""

    def new(split: Shifted) -> Shifted:
        moved = [
            dataclasses.replace(move, **{name: getattr(move, name) + by for name, by in changes.items()})
            for move in split.moves
        ]
        return Shifted(tuple(moved), split.unit)

    return splits(Shifted, new)


def convolve(x: Any = IMAGE, w: Any = KERNEL, stride: int = 1, padding: Any = "SAME", **dilations: Any) -> Any:
    return lax.conv_general_dilated(x, w, (stride,), padding, dimension_numbers=("NHC", "HIO", "NHC"), **dilations)


def pool_of_negatives() -> Any:
    x = -1 - np.abs(IMAGE)
    return lax.reduce_window(x, -np.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME")


def gradient_of_pool() -> Any:
    pool = lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 1), (1, 2, 1), "SAME")  # noqa: E731
    return weighted(pool)(IMAGE)


def add_rows(x: Any) -> Any:
    return jnp.asarray(x).at[np.array([0, 1, 1])].add(1.0)


def set_rows(x: Any) -> Any:
    return jnp.asarray(x).at[np.array([3, 0])].set(1.0)


PICKED = np.array([[1], [3], [0]])
ROWS = lax.GatherDimensionNumbers((1,), (0,), (0,))

WRONG: dict[str, tuple[str, Callable[[], Any], Spoil]] = {
    "a sorted dimension is not independent": ("sort", lambda: jnp.sort(X), splits(Whole, lambda _: FREE)),
    "a sum is no maximum": ("reduce_sum", lambda: lax.reduce_sum(X, (0,)), splits(Reduced, but(monoid=Monoid.MAX))),
    "a maximum is no sum": ("reduce_max", lambda: lax.reduce_max(X, (0,)), splits(Reduced, but(monoid=Monoid.SUM))),
    "zeros do not leave a product": ("reduce_prod", lambda: lax.reduce_prod(X, (0,)), splits(Reduced, but(fill=0.0))),
    "an exponential is not linear": ("exp", lambda: lax.exp(X), says(linear=(frozenset({0}),))),
    "a sum is not linear in one term": ("add", lambda: lax.add(X, X), says(linear=(frozenset({0}),))),
    "a sum does not only move": ("add", lambda: lax.add(X, X), says(algebra=Algebra.MOVES)),
    "a product does not add": ("mul", lambda: lax.mul(X, X), says(algebra=Algebra.ADDS)),
    "what is added to enters once": ("scatter-add", lambda: add_rows(X), says(roles={1: Role.INDEX})),
    "an iota depends on its place": ("iota", lambda: lax.iota(np.float64, 3), says(emit=None)),
    "a broadcast names its shape": ("broadcast_in_dim", lambda: lax.broadcast(X, (2,)), says(resize=None)),
    # Windows
    "a window begins in the padding": ("conv_general_dilated", convolve, splits(Windowed, but(low=0))),
    "a window moves by its stride": (
        "conv_general_dilated",
        lambda: convolve(stride=2),
        splits(Windowed, but(stride=1)),
    ),
    "a window's elements lie apart": (
        "conv_general_dilated",
        lambda: convolve(rhs_dilation=(2,)),
        splits(Windowed, but(dilation=1)),
    ),
    "an operand's elements lie apart": (
        "conv_general_dilated",
        lambda: convolve(lhs_dilation=(2,), padding=((1, 1),)),
        splits(Windowed, but(base=1)),
    ),
    "a window has all its elements": ("reduce_window_max", pool_of_negatives, splits(Windowed, but(window=2))),
    "parts of a kernel add up": ("conv_general_dilated", convolve, splits(Windowed, but(monoid=Monoid.MAX))),
    "around a maximum lies no zero": ("reduce_window_max", pool_of_negatives, splits(Windowed, but(around=()))),
    "overlapping windows need neighbours": (
        "reduce_window_max",
        pool_of_negatives,
        splits(Windowed, lambda _: Windowed(1, 2, None, 1, 1, 0, 0)),
    ),
    "a gradient collects from all windows": (
        "select_and_scatter_add",
        gradient_of_pool,
        splits(Windowed, but(window=2)),
    ),
    "a copy keeps of a gradient what is its own": ("select_and_scatter_add", gradient_of_pool, says(emit=None)),
    # Moves
    "a slice begins at its start": ("slice", lambda: lax.slice(X, (1, 0), (3, 3)), moves(start=1)),
    "a slice has strides": ("slice", lambda: lax.slice(X, (0, 0), (4, 3), (2, 1)), moves(stride=-1)),
    "a slice has another size": ("slice", lambda: lax.slice(X, (1, 0), (3, 3)), says(resize=None)),
    "padding comes first": ("pad", lambda: lax.pad(X, 7.0, ((1, 2, 0), (0, 0, 0))), moves(start=1)),
    "padding comes between": ("pad", lambda: lax.pad(X, 7.0, ((0, 0, 1), (0, 0, 0))), moves(spread=1)),
    "padding is not what lay there": ("pad", lambda: lax.pad(X, 7.0, ((1, 2, 0), (0, 0, 0))), says(emit=None)),
    "operands lie one behind the other": ("concatenate", lambda: lax.concatenate([X, X + 1], 0), moves(start=1)),
    "an operand lies at its place": ("concatenate", lambda: lax.concatenate([X, X + 1], 0), says(emit=None)),
    "parts lie one behind the other": ("split", lambda: lax.split(X, (1, 3)), moves(start=1)),
    "a reversal runs backwards": ("rev", lambda: lax.rev(X, (0,)), moves(start=-3, stride=2)),
    "what is reversed already stays": ("rev", lambda: lax.rev(X, (0,)), says(emit=None)),
    # Looking up
    "a place that is elsewhere is not found": (
        "gather",
        lambda: lax.gather(X, PICKED, ROWS, (1, 3), mode="clip"),
        says(emit=None),
    ),
    "what is found is added to zeros": (
        "gather",
        lambda: lax.gather(X, PICKED, ROWS, (1, 3), mode="clip"),
        splits(LookedUp, but(monoid=Monoid.MAX)),
    ),
    "a place that is elsewhere is not written": ("scatter", lambda: set_rows(X), says(emit=None)),
    "a slice that is elsewhere is not found": (
        "dynamic_slice",
        lambda: lax.dynamic_slice(X, (1, 0), (2, 3)),
        says(emit=None),
    ),
    "a slice that is elsewhere is not written": (
        "dynamic_update_slice",
        lambda: lax.dynamic_update_slice(X, X[:2] + 1, (1, 0)),
        says(emit=None),
    ),
    # Running
    "a running sum is not independent": ("cumsum", lambda: lax.cumsum(X, 0), splits(Prefix, lambda _: FREE)),
    "a running sum begins somewhere": ("cumsum", lambda: lax.cumsum(X, 0), splits(Prefix, but(reverse=True))),
    "a running sum adds": ("cumsum", lambda: lax.cumsum(X, 0), splits(Prefix, but(combine=jnp.maximum))),
    "a running maximum begins with nothing": (
        "cummax",
        lambda: lax.cummax(-1 - X**2, 1, reverse=True),
        splits(Prefix, but(around=Monoid.SUM)),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_description_is_found(case, monkeypatch):
    """The checker itself, on descriptions that are spoiled in one respect each."""
    name, fun, spoil = WRONG[case]
    instance = instances(fun, of=frozenset({name}))[0]
    check(instance)
    spoiled = spoil(describe(instance.eqn))
    assert spoiled != describe(instance.eqn)
    monkeypatch.setattr(brute_force, "describe", lambda eqn: spoiled)
    with pytest.raises((AssertionError, TypeError, ValueError)):  # jax refuses copies whose shapes do not fit
        check(instance)


@st.composite
def reshapes(draw):
    """Two shapes with as many elements."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=5))

    def grouped():
        shape = [1] * draw(st.integers(1, 4))
        for prime in draw(st.permutations(primes)):
            shape[draw(st.integers(0, len(shape) - 1))] *= prime
        return shape

    return grouped(), grouped()


@given(reshapes())
def test_common_refinement(shapes):
    """Each factor that may be split, split in two: a slice of the operand reshapes to that slice of the result."""
    a, b = shapes
    sizes, operand, result, whole = common_refinement(a, b)
    assert [math.prod(sizes[f] for f in dim) for dim in operand] == a
    assert [math.prod(sizes[f] for f in dim) for dim in result] == b
    x = np.arange(math.prod(a)).reshape(a)
    y = x.reshape(b)
    for factor, size in enumerate(sizes):
        if factor not in whole:
            for part in np.split(np.arange(size), [1]):
                of_x = Array.of(x, operand, sizes).take(factor, part)
                of_y = Array.of(y, result, sizes).take(factor, part)
                new = [math.prod(len(part) if f == factor else sizes[f] for f in dim) for dim in result]
                np.testing.assert_array_equal(of_x.data.reshape(new), of_y.data.reshape(new))


@given(reshapes())
def test_common_refinement_is_fine(shapes):
    """What the major or the minor ends of two shapes have in common is never whole."""
    a, b = shapes
    sizes, operand, result, whole = common_refinement(a, b)
    major = [next((dim[0] for dim in dims if dim), None) for dims in (operand, result)]
    minor = [next((dim[-1] for dim in reversed(dims) if dim), None) for dims in (operand, result)]
    for ends, (m, n) in (
        (major, [next((n for n in shape if n > 1), 1) for shape in (a, b)]),
        (minor, [next((n for n in reversed(shape) if n > 1), 1) for shape in (a, b)]),
    ):
        if math.gcd(m, n) > 1:
            assert ends[0] == ends[1] and ends[0] not in whole
            assert ends is minor or sizes[ends[0]] == math.gcd(m, n)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int32", "uint64", "int64"])
def test_high_halves_of_products_against_long_arithmetic(dtype):
    draw, ends = np.random.default_rng(0).integers, np.iinfo(dtype)
    x, y = (draw(ends.min, ends.max, 200, dtype, endpoint=True) for _ in range(2))
    x[:4], y[:4] = [ends.min, ends.max, ends.max, 0], [ends.min, ends.min, ends.max, ends.max]
    want = [int(a) * int(b) >> ends.bits for a, b in zip(x, y, strict=True)]
    assert [int(high) for high in high_product(x, y)] == want


def test_only_sums_of_several_elements_have_an_open_order():
    def is_open(fun, *args):
        eqns = jax.make_jaxpr(fun)(*args).jaxpr.eqns
        return [describe(eqn).order_is_open for eqn in eqns]

    bias, several = jnp.zeros((1, 1, 4)), jnp.zeros((2, 1, 4))
    assert is_open(lambda x: lax.reduce_sum(x, (0, 1)), several) == [True]
    assert is_open(lambda x: lax.reduce_sum(x, (0, 1)), bias) == [False]
    assert is_open(lambda x: lax.reduce_max(x, (0, 1)), several) == [False]
    assert is_open(jnp.dot, several[:, 0], several[:, 0].T) == [False]
