"""Every operator description against the equation itself, piece by piece."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.operators import brute_force
from tests.operators.brute_force import Array, check, instances
from tests.operators.examples import EXAMPLES, ONE_VERSION, UNREACHABLE, primitive
from vnode.operators import Monoid, describe
from vnode.operators.registry import _rules, register
from vnode.operators.shape import common_refinement

pytestmark = pytest.mark.quickly


@pytest.fixture(autouse=True)
def quick_compilation():
    """Many tiny programs: the compiler's optimizations would take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_description(example):
    checked = {}
    for instance in instances(example.fun, *example.args, of=example.of):
        if instance.signature not in checked:
            checked[instance.signature] = check(instance)
    assert checked


def test_every_description_is_exercised():
    reached = {
        eqn.primitive.name for example in EXAMPLES for eqn in equations(example) if eqn.primitive.name in example.of
    }
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

WRONG = {
    "a sorted dimension is not independent": ("sort", lambda: jnp.sort(X), {"whole": frozenset()}),
    "a running sum is not independent": ("cumsum", lambda: lax.cumsum(X + 0, 1), {"whole": frozenset()}),
    "a sum is no maximum": ("reduce_sum", lambda: lax.reduce_sum(X, (0,)), {"reduced": {0: Monoid.MAX}}),
    "a maximum is no sum": ("reduce_max", lambda: lax.reduce_max(X, (0,)), {"reduced": {0: Monoid.SUM}}),
    "an exponential is not linear": ("exp", lambda: lax.exp(X), {"linear": (frozenset({0}),)}),
    "a sum is not linear in one term": ("add", lambda: lax.add(X, X), {"linear": (frozenset({0}),)}),
    "a sum does not only move": ("add", lambda: lax.add(X, X), {"movement": True}),
    "zeros do not leave a product": ("reduce_prod", lambda: lax.reduce_prod(X, (0,)), {"fill": {0: 0.0}}),
    "what is added to enters once": ("scatter-add", lambda: add_rows(X), {"once": frozenset()}),
    "an iota depends on its place": ("iota", lambda: lax.iota(np.float64, 3), {"emit": None}),
    "a broadcast names its shape": ("broadcast_in_dim", lambda: lax.broadcast(X, (2,)), {"resize": None}),
}


def add_rows(x):
    return jnp.asarray(x).at[np.array([0, 1, 1])].add(1.0)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_description_is_found(case, monkeypatch):
    """The checker itself, on descriptions that are spoiled in one respect each."""
    name, fun, spoiled = WRONG[case]
    (instance,) = instances(fun, of=frozenset({name}))
    check(instance)
    monkeypatch.setattr(brute_force, "describe", lambda eqn: dataclasses.replace(describe(eqn), **spoiled))
    with pytest.raises((AssertionError, TypeError, ValueError)):
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
