"""Random draws and keys.

Knows which generators treat each key of an array alone. Knows how the bits of a slice follow from the key and the
slice's position, if the generator counts along the flat result (threefry with ``jax_threefry_partitionable``). The
draws of other generators are made whole. Must not know the draws' purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from vnode.operators.counting import counters
from vnode.operators.description import Algebra, Dims, Emit, Factors, OperatorDescription, Positions, Sizes, Work
from vnode.operators.elementwise import broadcast, shapes_of
from vnode.operators.philox import OURS, PHILOX, philox, with_other_keys
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE

COUNTER = {"key<fry>", "key<fry4>", *PHILOX, *OURS}
"""Key types whose every operation, mapped over an array of keys, treats each key alone."""

KEYWISE = {
    "random_bits": COUNTER,
    "random_clone": COUNTER | {"key<rbg>", "key<urbg>"},
    "random_fold_in": COUNTER | {"key<rbg>"},
    "random_gamma": COUNTER | {"key<rbg>"},
    "random_seed": COUNTER | {"key<rbg>", "key<urbg>"},
    "random_split": COUNTER | {"key<rbg>"},
}
"""For each primitive the key types that it handles key by key. XLA's own generator draws for a whole array of keys at
once, from the first key; what of ``rbg`` and ``unsafe_rbg`` is not listed goes through it."""


def keywise(eqn: JaxprEqn, keys: Any) -> bool:
    """Whether each key of the array `keys` is handled alone."""
    return keys.aval.dtype.name in KEYWISE[eqn.primitive.name]


def emit_portable_draw(
    d: OperatorDescription, eqn: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
) -> list[Any]:
    """Evaluates an equation of Philox keys by an implementation that compiles for several devices."""
    (dtype,) = {atom.aval.dtype.name for atom in (*eqn.invars, *eqn.outvars)} & PHILOX.keys()
    params = {key: PHILOX[dtype][1] if key == "impl" else value for key, value in eqn.params.items()}
    return [with_other_keys(functools.partial(eqn.primitive.bind, **params), operands, dtype)]


def replacement_platforms(keys: Any) -> dict[str, Emit]:
    """Implementations by platform for an equation with keys such as `keys`."""
    return dict.fromkeys(("cpu", "gpu", "tpu"), emit_portable_draw) if keys.aval.dtype.name in PHILOX else {}


def make_whole(f: Factors) -> None:
    f.change(*range(len(f.all)), split=WHOLE)


@rule("random_clone", "random_fold_in")
def each_key(eqn: JaxprEqn) -> OperatorDescription:
    f, operands, result = broadcast(*shapes_of(eqn))
    if not keywise(eqn, eqn.invars[0]):
        make_whole(f)
    replaced_on = replacement_platforms(eqn.invars[0])
    return OperatorDescription(factors=f.all, operands=operands, results=(result,), replaced_on=replaced_on)


@rule("random_seed")
def random_seed(eqn: JaxprEqn) -> OperatorDescription:
    f, operands, result = broadcast(*shapes_of(eqn))
    if not keywise(eqn, eqn.outvars[0]):
        make_whole(f)
    replaced_on = replacement_platforms(eqn.outvars[0])
    return OperatorDescription(factors=f.all, operands=operands, results=(result,), replaced_on=replaced_on)


@rule("random_wrap", "random_unwrap")
def key_data(eqn: JaxprEqn) -> OperatorDescription:
    """Raw words have the words of one key as trailing dimensions."""
    f = Factors()
    operand, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dims = f.dims(max(operand, result, key=len))
    f.change(*(factor for dim in dims[min(len(operand), len(result)) :] for factor in dim), split=WHOLE)
    return OperatorDescription(
        factors=f.all,
        operands=(dims[: len(operand)],),
        results=(dims[: len(result)],),
        algebra=Algebra.MOVES,
    )


def slice_counters(dims: Dims, shape: Sequence[int], sizes: Sizes, positions: Positions) -> tuple[jax.Array, jax.Array]:
    """`counters` for dimensions `dims` of one factor each, split where `positions` says."""
    factors = [dim[0] for dim in dims]
    indices = [positions[f]() if f in positions else jnp.arange(sizes[f]) for f in factors]
    return counters(shape, indices)


def draw(keys: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two words for every key and counter, of shape ``keys.shape + high.shape``."""
    data = jax.random.key_data(keys).reshape(*keys.shape, *(1,) * high.ndim, 2)
    shape = (*keys.shape, *high.shape)
    one, two, high, low = (jnp.broadcast_to(word, shape) for word in (data[..., 0], data[..., 1], high, low))
    none = (one ^ high ^ low) & jnp.uint32(0)  # under vmap, jax wants both counters batched if either is
    first, second = threefry2x32_p.bind(one, two, high | none, low | none)
    return first, second


def is_counted(eqn: JaxprEqn) -> bool:
    """Whether element i of a key's draw is a function of the key and i."""
    return eqn.invars[0].aval.dtype.name == "key<fry>" and eqn.ctx.threefry_partitionable


def per_key(eqn: JaxprEqn, emit: Any) -> OperatorDescription:
    """The description of a draw of shape ``keys.shape + shape``; `emit` draws a slice where that is possible."""
    f = Factors()
    keys = f.dims(eqn.invars[0].aval.shape)
    drawn = f.dims(eqn.params["shape"])
    counted = is_counted(eqn)
    trailing = [factor for dim in drawn for factor in dim]
    if counted:
        f.change(*trailing, positional=True)
    else:
        f.change(*trailing, split=WHOLE)
    if not keywise(eqn, eqn.invars[0]):
        make_whole(f)
    return OperatorDescription(
        factors=f.all,
        operands=(keys,),
        results=((*keys, *drawn),),
        emit=emit if counted else None,
        work=Work(20),  # rounds of mixing for every word
        replaced_on=replacement_platforms(eqn.invars[0]),
    )


def drawn_dims(d: OperatorDescription) -> Dims:
    return d.results[0][len(d.operands[0]) :]


@rule("random_bits")
def random_bits(eqn: JaxprEqn) -> OperatorDescription:
    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[jax.Array]:
        first, second = draw(operands[0], *slice_counters(drawn_dims(d), e.params["shape"], sizes, positions))
        width = e.params["bit_width"]
        dtype = e.outvars[0].aval.dtype
        if width == 64:
            return [first.astype(dtype) << jnp.array(32, dtype) | second.astype(dtype)]
        return [(first ^ second).astype(dtype)]

    return per_key(eqn, emit)


@rule("random_split")
def random_split(eqn: JaxprEqn) -> OperatorDescription:
    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[jax.Array]:
        words = draw(operands[0], *slice_counters(drawn_dims(d), e.params["shape"], sizes, positions))
        return [jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl=jax.random.key_impl(operands[0]))]

    return per_key(eqn, emit)


@rule("iota_2x32_shape")
def iota_2x32_shape(eqn: JaxprEqn) -> OperatorDescription:
    """The counters themselves; only seen where a draw has been expanded."""
    f = Factors()
    dims = f.dims(eqn.params["shape"])

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[jax.Array]:
        return list(slice_counters(dims, e.params["shape"], sizes, positions))

    f.change(*range(len(f.all)), positional=True)
    return OperatorDescription(factors=f.all, operands=(), results=(dims, dims), algebra=Algebra.MOVES, emit=emit)


@rule("random_gamma")
def random_gamma(eqn: JaxprEqn) -> OperatorDescription:
    """A key serves all the trailing dimensions that it lacks: they share one sequence of rejections."""
    f = Factors()
    keys, alphas = (atom.aval.shape for atom in eqn.invars)
    dims = f.dims(alphas)
    f.change(*(factor for dim in dims[len(keys) :] for factor in dim), split=WHOLE)
    if not keywise(eqn, eqn.invars[0]):
        make_whole(f)
    return OperatorDescription(
        factors=f.all,
        operands=(dims[: len(keys)], dims),
        results=(dims,),
        work=Work(200),
        replaced_on=replacement_platforms(eqn.invars[0]),
    )


@rule("philox2x32", "philox4x32")
def block_of_words(eqn: JaxprEqn) -> OperatorDescription:
    """The generator itself; only seen where a draw has been expanded."""
    f, operands, result = broadcast(*shapes_of(eqn))
    key = len(operands) // 3

    def emit(
        d: OperatorDescription, e: JaxprEqn, values: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[jax.Array]:
        words = jnp.broadcast_arrays(*values)
        return list(philox(words[:key], words[key:]))

    replaced_on: dict[str, Emit] = dict.fromkeys(("cpu", "gpu", "tpu"), emit)
    results = (result,) * len(eqn.outvars)
    return OperatorDescription(factors=f.all, operands=operands, results=results, replaced_on=replaced_on)


@rule("rng_bit_generator", "rng_uniform")
def opaque_generator(eqn: JaxprEqn) -> OperatorDescription:
    """XLA's own generators: their bits depend on the requested shape."""
    f = Factors()
    operands = tuple(f.dims(atom.aval.shape) for atom in eqn.invars)
    results = tuple(f.dims(atom.aval.shape) for atom in eqn.outvars)
    make_whole(f)
    return OperatorDescription(factors=f.all, operands=operands, results=results)
