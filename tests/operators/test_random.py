"""Slices of random draws: the very bits that the whole draw has there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

import vnode
from vnode.operators import describe, evaluate
from vnode.operators.counting import counters
from vnode.operators.philox import PHILOX

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


@pytest.mark.sampled(1, thorough=1)
@pytest.mark.parametrize("words", [2, 4])
@pytest.mark.parametrize("x64", [False, True])
def test_philox_is_that_of_jax(words, x64):
    """The generator that compiles for several devices draws the bits that JAX's own draws on one."""
    name, ours = PHILOX[f"key<phx{words}>"]
    data = jax.random.key_data
    draws = [
        lambda key: jax.random.bits(key, (3, 5)),
        lambda key: jax.random.bits(key, (), "uint8"),
        lambda key: jax.random.bits(key, (7,), "uint16"),
        lambda key: data(jax.random.split(key, (2, 3))),
        lambda key: data(jax.random.fold_in(key, 2**32 - 9)),
        *([lambda key: jax.random.bits(key, (5,), "uint64")] if x64 else []),
    ]
    with jax.enable_x64(x64):
        for seed in (0, -1, np.int8(-3), 2**31 - 1, *([2**40 + 3] if x64 else [])):
            theirs, same = (jax.random.key(seed, impl=impl) for impl in (name, ours))
            np.testing.assert_array_equal(data(theirs), data(same))
            for draw in draws:
                np.testing.assert_array_equal(draw(theirs), draw(same))
            gamma = [jax.random.gamma(key, jnp.array([0.3, 1.0, 7.5])) for key in (theirs, same)]
            np.testing.assert_allclose(*gamma, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.sampled(1, thorough=0)
@pytest.mark.parametrize("impl", ["philox2x32", "philox4x32"])
def test_philox_on_several_devices(impl):
    """Draws for every node, with dropout's mask, keys that are split, and a gamma variate, beside the plain step."""

    def step(w, x, key):
        first, second = jax.random.split(jax.random.fold_in(key, 3))
        keep = jax.random.bernoulli(first, 0.5, x.shape)
        scale = jax.random.gamma(second, 2.0)
        own = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(jnp.arange(x.shape[0]))
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.where(keep, x, 0) @ w * scale + own))(w)
        return loss, grad, jax.random.key_data(second)

    args = jnp.ones(4), jnp.arange(32.0).reshape(8, 4), jax.random.key(5, impl=impl)
    placement = vnode.Placement(4, jax.devices()[:4])
    got = vnode.virtualize(step, virtual_nodes=4, placement=placement, in_axes=(None, 0, None))(*args)
    for a, b in zip(got, step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
