"""Item 5 of the zoo: every draw of ``jax.random``, with every kind of key.

Knows ``jax.random``. Must not know vnode. The virtualized step must draw the same numbers for the same examples as the
original, so the draws themselves leave these steps, next to sums over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from . import Program, case, kit

WIDTH = 4

Draw = Callable[[jax.Array, jax.Array], jax.Array]


def _noise(draw: Draw, batch: int = 16, key: jax.Array | None = None, **options: Any) -> Program:
    """Draws per example, the draws weighted by the examples, and the gradient of something that contains them."""

    def step(state: Any, x: jax.Array) -> Any:
        w, key = state
        key, use = jax.random.split(key)

        def loss_fn(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            noise = draw(use, x)
            flat = jnp.reshape(noise.astype(x.dtype), (x.shape[0], -1))
            return jnp.mean(jnp.sin(x @ w) * (1.0 + flat.sum(axis=1))), noise

        (loss, noise), grads = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return (w - grads, key), loss, noise

    state = (kit.normal(WIDTH), jax.random.key(11) if key is None else key)
    return Program(step, (state, kit.normal(batch, WIDTH)), options)


@case(item=5)
def draw_uniform() -> Program:
    return _noise(lambda key, x: jax.random.uniform(key, x.shape, x.dtype, -1.0, 2.0))


@case(item=5, batch=12)
def draw_normal() -> Program:
    return _noise(lambda key, x: jax.random.normal(key, x.shape, x.dtype), 12)


@case(item=5)
def draw_normal_one_per_example() -> Program:
    return _noise(lambda key, x: jax.random.normal(key, (x.shape[0], 1), x.dtype))


@case(item=5)
def draw_normal_batch_in_the_middle() -> Program:
    return _noise(lambda key, x: jax.random.normal(key, (3, x.shape[0], 5), x.dtype).transpose(1, 0, 2), 16)


@case(item=5, batch=12)
def draw_normal_flat() -> Program:
    """Batch and features merged: the examples' draws are ranges of one long vector."""
    return _noise(lambda key, x: jax.random.normal(key, (x.size,), x.dtype).reshape(x.shape), 12)


@case(item=5)
def draw_bernoulli() -> Program:
    return _noise(lambda key, x: jax.random.bernoulli(key, 0.3, x.shape))


@case(item=5, batch=12)
def draw_bernoulli_with_probabilities() -> Program:
    return _noise(lambda key, x: jax.random.bernoulli(key, jax.nn.sigmoid(x)), 12)


@case(item=5)
def draw_categorical() -> Program:
    return _noise(lambda key, x: jax.random.categorical(key, x, axis=-1))


@case(item=5, batch=12)
def draw_categorical_several() -> Program:
    return _noise(lambda key, x: jax.random.categorical(key, x[:, None, :], axis=-1, shape=(x.shape[0], 3)), 12)


@case(item=5)
def draw_gumbel() -> Program:
    return _noise(lambda key, x: jax.nn.softmax(x + jax.random.gumbel(key, x.shape, x.dtype)))


@case(item=5)
def draw_randint() -> Program:
    return _noise(lambda key, x: jax.random.randint(key, (x.shape[0], 2), 0, 10))


@case(item=5, batch=12)
def draw_bits() -> Program:
    return _noise(lambda key, x: jax.random.bits(key, (x.shape[0], 3), jnp.uint8), 12)


@case(item=5)
def draw_permutation_of_features() -> Program:
    """The same permutation for every example: an invariant draw."""
    return _noise(lambda key, x: x[:, jax.random.permutation(key, x.shape[1])])


@case(item=5)
def draw_permutation_of_each_example() -> Program:
    return _noise(lambda key, x: jax.random.permutation(key, x, axis=1, independent=True))


@case(item=5, batch=12)
def draw_permutation_of_the_batch() -> Program:
    """A coupling: the examples change places."""
    return _noise(lambda key, x: jax.random.permutation(key, x), 12)


@case(item=5)
def draw_choice() -> Program:
    values = jnp.arange(10.0, 15.0)
    p = jnp.asarray([0.1, 0.2, 0.3, 0.2, 0.2])
    return _noise(lambda key, x: jax.random.choice(key, values.astype(x.dtype), (x.shape[0], 2), p=p))


@case(item=5, batch=12)
def draw_truncated_normal_and_others() -> Program:
    """The draws that are a function of one uniform draw."""

    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 7)
        shape = (x.shape[0],)
        draws = [
            jax.random.truncated_normal(keys[0], -1.0, 1.0, shape, x.dtype),
            jax.random.exponential(keys[1], shape, x.dtype),
            jax.random.laplace(keys[2], shape, x.dtype),
            jax.random.logistic(keys[3], shape, x.dtype),
            jax.random.cauchy(keys[4], shape, x.dtype),
            jax.random.rademacher(keys[5], shape, x.dtype),
            jax.random.maxwell(keys[6], shape, x.dtype),
        ]
        return jnp.stack(draws, axis=1)

    return _noise(draw, 12)


@case(item=5)
def draw_gamma() -> Program:
    """Rejection sampling: a key and a while loop per element."""
    return _noise(lambda key, x: jax.random.gamma(key, jnp.abs(x[:, :1]) + 0.5))


@case(item=5)
def draw_poisson() -> Program:
    return _noise(lambda key, x: jax.random.poisson(key, 3.0, (x.shape[0],)))


@case(item=5)
def draw_multivariate_normal() -> Program:
    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        covariance = jnp.eye(2, dtype=x.dtype) + 0.5
        return jax.random.multivariate_normal(key, x[:, :2], covariance, dtype=x.dtype)

    return _noise(draw)


@case(item=5)
def draw_key_per_example() -> Program:
    """``split(key, B)`` and ``vmap``."""

    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        keys = jax.random.split(key, x.shape[0])
        return jax.vmap(lambda k, row: row + jax.random.normal(k, row.shape, row.dtype))(keys, x)

    return _noise(draw)


@case(item=5, batch=12)
def draw_key_per_example_split_again() -> Program:
    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        def one(k: jax.Array, row: jax.Array) -> jax.Array:
            a, b = jax.random.split(k)
            keep = jax.random.bernoulli(a, 0.5, row.shape)
            return jnp.where(keep, row * jax.random.uniform(b, dtype=row.dtype), 0.0)

        return jax.vmap(one)(jax.random.split(key, x.shape[0]), x)

    return _noise(draw, 12)


@case(item=5)
def draw_key_folded_with_position() -> Program:
    """``fold_in`` with each example's index."""

    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(x.shape[0]))
        return jax.vmap(lambda k: jax.random.normal(k, (3,), x.dtype))(keys)

    return _noise(draw)


@case(item=5)
def draw_key_folded_with_data() -> Program:
    """``fold_in`` with an identifier that comes with the example."""

    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        identifiers = (x[:, 0] * 1000).astype(jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, identifiers)
        return jax.vmap(lambda k: jax.random.uniform(k, (2,), x.dtype))(keys)

    return _noise(draw)


@case(item=5, batch=12)
def draw_with_keys_as_examples() -> Program:
    """The batch brings a key for every example; the new keys leave the step."""

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> Any:
        pairs = jax.vmap(jax.random.split)(batch["key"])
        noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,), w.dtype))(pairs[:, 1])
        return jnp.mean((batch["x"] + noise) @ w), pairs[:, 0], noise

    batch = {"x": kit.normal(12, WIDTH), "key": jax.random.split(jax.random.key(0), 12)}
    return Program(step, (kit.normal(WIDTH), batch))


@case(item=5)
def draw_with_raw_key() -> Program:
    return _noise(lambda key, x: jax.random.normal(key, x.shape, x.dtype), key=jax.random.PRNGKey(3))


@case(item=5, batch=12)
def draw_with_raw_key_per_example() -> Program:
    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        keys = jax.random.split(key, x.shape[0])
        return jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDTH,)))(keys)

    return _noise(draw, 12, key=jax.random.PRNGKey(3))


@case(item=5)
def draw_with_rbg_key() -> Program:
    return _noise(lambda key, x: jax.random.normal(key, x.shape, x.dtype), key=jax.random.key(3, impl="rbg"))


@case(item=5, batch=12)
def draw_with_rbg_key_batch_in_the_middle() -> Program:
    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (3, x.shape[0], 2), x.dtype).transpose(1, 0, 2)

    return _noise(draw, 12, key=jax.random.key(3, impl="rbg"))


@case(item=5)
def draw_with_unsafe_rbg_key() -> Program:
    return _noise(lambda key, x: jax.random.randint(key, x.shape, 0, 9), key=jax.random.key(3, impl="unsafe_rbg"))


@case(item=5)
def draw_with_rbg_key_per_example() -> Program:
    """A generator under vmap: what it draws for an example depends on the whole batch of keys."""

    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        keys = jax.random.split(key, x.shape[0])
        return jax.vmap(lambda k: jax.random.normal(k, (3,), x.dtype))(keys)

    return _noise(draw, key=jax.random.key(3, impl="rbg"))


@case(item=5)
def dropout_of_linen_with_shared_mask() -> Program:
    """Dropout of elements, of whole features, and of whole examples (stochastic depth)."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dropout(0.4, deterministic=False)(nn.Dense(8)(x))
            x = nn.Dropout(0.4, broadcast_dims=(0,), deterministic=False)(x)
            return x + nn.Dropout(0.4, broadcast_dims=(1,), deterministic=False)(nn.Dense(8)(x))

    model = Model()

    def step(params: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            out = model.apply({"params": params}, x, rngs={"dropout": key})
            return jnp.mean(out**2), out

        (loss, out), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return kit.sgd(params, grads), loss, out

    x = kit.normal(16, WIDTH)
    return Program(step, (kit.init(model, x)["params"], x, jax.random.key(8)))


@case(item=5, batch=12)
def dropout_in_a_loop() -> Program:
    """New noise in every iteration of a scan, the key in the carry."""

    def step(w: jax.Array, x: jax.Array, key: jax.Array) -> Any:
        def body(carry: Any, _: None) -> Any:
            x, key = carry
            key, use = jax.random.split(key)
            x = jnp.tanh(x @ w) * jax.random.bernoulli(use, 0.8, x.shape)
            return (x, key), x.mean()

        (x, key), means = jax.lax.scan(body, (x, key), None, length=3)
        return x, key, means

    return Program(step, (kit.normal(WIDTH, WIDTH), kit.normal(12, WIDTH), jax.random.key(8)))


@case(item=5)
def draw_in_branch_of_cond() -> Program:
    """Noise in training only, chosen at run time by a flag."""

    def step(state: Any, x: jax.Array) -> jax.Array:
        w, key, training = state

        def noisy(x: jax.Array) -> jax.Array:
            return x + jax.random.normal(key, x.shape, x.dtype)

        return jax.lax.cond(training, noisy, lambda x: x, x) @ w

    return Program(step, ((kit.normal(WIDTH), jax.random.key(1), jnp.asarray(True)), kit.normal(16, WIDTH)))


@case(item=5, batch=13)
def draw_for_a_batch_that_is_no_multiple() -> Program:
    return _noise(lambda key, x: jax.random.normal(key, x.shape, x.dtype), 13)


@case(item=5, coarsest="float32")
def draw_half_precision() -> Program:
    def draw(key: jax.Array, x: jax.Array) -> jax.Array:
        a, b = jax.random.split(key)
        return jax.random.uniform(a, x.shape, jnp.bfloat16) + jax.random.normal(b, x.shape, jnp.bfloat16)

    return _noise(draw)


@case(item=5, batch=12)
def draw_with_unpartitionable_threefry() -> Program:
    """The old layout of threefry's counters, in which a slice's bits depend on the whole shape."""

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with jax.threefry_partitionable(False):
                return step(*args)

        return run

    program = _noise(lambda key, x: jax.random.normal(key, x.shape, x.dtype), 12)
    return Program(program.step, program.args, outer=outer)
