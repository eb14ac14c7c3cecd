"""Slices of random draws: the very bits that the whole draw has there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from vnode.operators import describe, evaluate
from vnode.operators.random import counters

pytestmark = pytest.mark.quickly


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1 << 17, 1 << 18), (1 << 20, 3, 1 << 19), (5, (1 << 31) - 1)])
def test_counters(shape):
    """Against 64-bit arithmetic, near both ends of every dimension; the larger shapes have over 2**32 elements."""
    ends = [sorted({0, min(1, n - 1), n // 2, n - 1}) for n in shape]
    want = np.zeros([len(index) for index in ends], np.uint64)
    for d, index in enumerate(ends):
        stride = np.prod(shape[d + 1 :], dtype=np.uint64)
        want += (np.array(index, np.uint64) * stride).reshape([-1 if e == d else 1 for e in range(len(shape))])
    high, low = counters(shape, [jnp.array(index, jnp.int32) for index in ends])
    assert high.dtype == low.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(high, np.uint64) << np.uint64(32) | np.asarray(low), want)


def drawn(fun, size, *args):
    """The random equation of `fun`, evaluated on two index ranges of its last factor, joined."""
    (eqn,) = jax.make_jaxpr(fun)(*args).jaxpr.eqns
    d = describe(eqn)
    factor = len(d.sizes) - 1
    assert d.sizes[factor] == size and d.factors[factor].positional

    @jax.jit
    def part(operands, position):
        sizes = (*d.sizes[:-1], position.shape[0])
        return evaluate(d, eqn, operands, sizes, {factor: lambda: position})[0]

    axis = len(d.results[0]) - 1
    return jnp.concatenate([part(args, jnp.arange(0, 2)), part(args, jnp.arange(2, size))], axis)


@pytest.mark.parametrize(
    ("x64", "dtype"), [(False, "uint8"), (False, "uint16"), (False, "uint32"), (True, "uint32"), (True, "uint64")]
)
def test_bits(x64, dtype):
    with jax.enable_x64(x64):
        key = jax.random.key(3)
        draw = lambda key: jax.random.bits(key, (4, 5), dtype)  # noqa: E731
        np.testing.assert_array_equal(drawn(draw, 5, key), draw(key))


def test_bits_beyond_32_bit_counters():
    """The draw is far too large to be made: the reference hashes the counters itself."""
    shape = (3, 1 << 31)
    (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, shape))(jax.random.key(9)).jaxpr.eqns
    index = np.array([5, (1 << 31) - 1])
    (got,) = evaluate(describe(eqn), eqn, [jax.random.key(9)], (3, 2), {1: lambda: jnp.asarray(index, jnp.int32)})
    flat = np.arange(3, dtype=np.uint64)[:, None] * np.uint64(1 << 31) + index.astype(np.uint64)
    high, low = (flat >> np.uint64(32)).astype(np.uint32), flat.astype(np.uint32)
    words = threefry_2x32(jax.random.key_data(jax.random.key(9)), jnp.concatenate([high.ravel(), low.ravel()])).reshape(
        2, *flat.shape
    )
    np.testing.assert_array_equal(got, words[0] ^ words[1])


def test_split():
    key = jax.random.key(4)
    split = lambda key: jax.random.split(key, (3, 5))  # noqa: E731
    got = drawn(split, 5, key)
    assert got.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(split(key)))


def test_counters_restart_for_every_key():
    keys = jax.random.split(jax.random.key(5), 3)
    draw = jax.vmap(lambda key: jax.random.bits(key, (5,)))
    np.testing.assert_array_equal(drawn(draw, 5, keys), draw(keys))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32"])
def test_other_generators_are_drawn_whole(impl):
    (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, (5,)))(jax.random.key(0, impl=impl)).jaxpr.eqns
    assert describe(eqn).whole == {0}


def test_counters_of_the_older_layout_are_drawn_whole():
    with jax.threefry_partitionable(False):
        (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, (5,)))(jax.random.key(0)).jaxpr.eqns
    assert describe(eqn).whole == {0}


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_one_generator_for_many_keys_is_drawn_whole(impl):
    """XLA's generator draws for an array of keys from the first of them: the keys are not independent."""
    keys = jax.random.wrap_key_data(jnp.arange(12, dtype=jnp.uint32).reshape(3, 4), impl=impl)
    draw = jax.vmap(lambda key: jax.random.bits(key, (5,)))
    assert not np.array_equal(draw(keys)[1], draw(keys[1:])[0])
    (eqn,) = jax.make_jaxpr(draw)(keys).jaxpr.eqns
    assert describe(eqn).whole == {0, 1}
