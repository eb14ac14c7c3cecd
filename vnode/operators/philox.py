"""JAX's Philox keys -> the same bits, by operations that compile for several devices.

Knows the generator, and how JAX counts and makes keys with it. Must not know equations.

JAX's own implementation multiplies 32-bit words with `jax.lax.mulhi`, which jaxlib does not compile for several devices
(0.10.2: "Unable to convert MHLO to StableHLO").

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3; the constants
are those of table 2's ten rounds in the authors' library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl

from vnode.operators.counting import counters
from vnode.operators.elementwise import high_product

MULTIPLIERS = {2: (0xD256D193,), 4: (0xD2511F53, 0xCD9E8D57)}
"""The multipliers of a round, for two and for four words."""

WEYL = (0x9E3779B9, 0xBB67AE85)
"""The increments of a key's words from round to round."""

ROUNDS = 10

Words = tuple[jax.Array, ...]


def philox(key: Sequence[Any], counter: Sequence[Any]) -> Words:
    """The block of random words of a counter.

    Args:
      key: half as many words as the counter has, uint32 arrays that broadcast against it.
      counter: two words or four.

    Returns:
      As many words as the counter has.
    """
    words = tuple(jnp.asarray(word, jnp.uint32) for word in counter)
    multipliers = [jnp.uint32(m) for m in MULTIPLIERS[len(words)]]
    for number in range(ROUNDS):
        bumped = [word + jnp.uint32(number * weyl & 0xFFFFFFFF) for word, weyl in zip(key, WEYL, strict=False)]
        low = [m * word for m, word in zip(multipliers, words[::2], strict=True)]
        high = [high_product(m, word) for m, word in zip(multipliers, words[::2], strict=True)]
        mixed = [h ^ x ^ k for h, x, k in zip(high[::-1], words[1::2], bumped, strict=True)]
        words = tuple(word for pair in zip(mixed, low[::-1], strict=True) for word in pair)
    return words


def implementation(words: int) -> Hashable:
    """JAX's Philox of blocks of two or four words, as an implementation of keys."""
    size = words // 2

    def block(key: Any, high: Any, low: Any, first: bool) -> Words:
        """The block of a 64-bit number in the first or last two words of a counter."""
        none = (jnp.zeros_like(high),) * (words - 2)
        return philox([key[i] for i in range(size)], (high, low, *none) if first else (*none, high, low))

    def key_of(made: Words) -> jax.Array:
        return jnp.stack(made[:size], axis=-1)

    def numbers(shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        return counters(shape, [jnp.arange(n) for n in shape])

    def seed(value: jax.Array) -> jax.Array:
        wide = value.dtype.itemsize == 8
        high = jax.lax.shift_right_logical(value, jnp.asarray(32, value.dtype)) if wide else jnp.zeros_like(value)
        return key_of(block(jnp.zeros(size, jnp.uint32), high.astype(jnp.uint32), value.astype(jnp.uint32), True))

    def split(key: jax.Array, shape: Sequence[int]) -> jax.Array:
        return key_of(block(key, *numbers(shape), first=False))

    def fold_in(key: jax.Array, data: Any) -> jax.Array:
        return key_of(block(key, jnp.uint32(0), jnp.asarray(data).astype(jnp.uint32), first=False))

    def random_bits(key: jax.Array, bit_width: int, shape: Sequence[int]) -> jax.Array:
        made = block(key, *numbers(shape), first=True)
        dtype = jnp.dtype(f"uint{bit_width}")
        if bit_width == 64:
            return made[0].astype(dtype) << jnp.array(32, dtype) | made[1].astype(dtype)
        together = made[0]
        for word in made[1:]:
            together = together ^ word
        return together.astype(dtype)

    return define_prng_impl(
        key_shape=(size,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"vnode_philox{words}x32",
        tag=f"vphx{words}",
    )


PHILOX = {f"key<phx{words}>": (f"philox{words}x32", implementation(words)) for words in MULTIPLIERS}
"""For the types of JAX's Philox keys, JAX's name and vnode's equal implementation."""

OURS = frozenset(f"key<vphx{words}>" for words in MULTIPLIERS)
"""Types of vnode's keys."""


def with_other_keys(draw: Callable[..., Any], operands: Sequence[Any], dtype: str) -> Any:
    """Calls a function of Philox keys of type `dtype` with vnode's keys in their place.

    Args:
      draw: maps operands to an array, or to keys.
      operands: its operands; keys among them are of that type.
      dtype: the name of the type.
    """
    name, ours = PHILOX[dtype]

    def with_words(value: Any, impl: Hashable) -> Any:
        if not jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
            return value
        return jax.random.wrap_key_data(jax.random.key_data(value), impl=impl)

    return with_words(draw(*[with_words(value, ours) for value in operands]), name)
