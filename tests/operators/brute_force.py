"""Holds an operator description against the equation itself.

Knows what a description promises and nothing of any primitive: it splits every factor that may be split, evaluates the
pieces, and compares with the equation evaluated whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from vnode.operators import Monoid, OperatorDescription, describe, evaluate

COMBINE: dict[Monoid, Callable[[Any, Any], Any]] = {
    Monoid.SUM: lambda a, b: a + b,
    Monoid.PROD: lambda a, b: a * b,
    Monoid.MAX: jnp.maximum,
    Monoid.MIN: jnp.minimum,
    Monoid.AND: jnp.bitwise_and,
    Monoid.OR: jnp.bitwise_or,
    Monoid.XOR: jnp.bitwise_xor,
}

INLINE = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}


@dataclasses.dataclass(frozen=True)
class Instance:
    """An equation with the values of its operands."""

    eqn: JaxprEqn
    operands: list[Any]


def instances(fun: Callable[..., Any], *args: Any) -> Iterator[Instance]:
    """Every equation of `fun` at `args`, calls inlined, with its operands' values."""
    flat = [jnp.asarray(x) for x in jax.tree.leaves(args)]
    closed = jax.make_jaxpr(fun)(*args)
    return _walk(closed.jaxpr, [jnp.asarray(c) for c in closed.consts], flat)


def _walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Iterator[Instance]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))
        if eqn.primitive.name in INLINE and inner is not None:
            body, body_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "jaxpr") else (inner, ())
            yield from _walk(body, body_consts, operands)
            results = jaxpr_as_fun(jax.extend.core.ClosedJaxpr(body, body_consts))(*operands)
        else:
            yield Instance(eqn, operands)
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def expand(x: Any, dims: Any, sizes: Sequence[int]) -> Any:
    """One array dimension per factor."""
    return x.reshape(tuple(sizes[f] for dim in dims for f in dim))


def collapse(x: Any, dims: Any, sizes: Sequence[int]) -> Any:
    return x.reshape(tuple(int(np.prod([sizes[f] for f in dim], dtype=int)) for dim in dims))


def take(x: Any, dims: Any, sizes: Sequence[int], factor: int, index: np.ndarray) -> Any:
    """The part of `x` at the indices `index` of `factor`."""
    axes = [f for dim in dims for f in dim]
    if factor not in axes:
        return x
    part = expand(x, dims, sizes)[(slice(None),) * axes.index(factor) + (index,)]
    return collapse(part, dims, [len(index) if f == factor else n for f, n in enumerate(sizes)])


def spoil(x: Any, dims: Any, sizes: Sequence[int], factor: int, where: np.ndarray, value: Any) -> Any:
    """Overwrites `x` at the indices `where` of `factor`."""
    axes = [f for dim in dims for f in dim]
    if factor not in axes:
        return x
    expanded = expand(x, dims, sizes)
    index = (slice(None),) * axes.index(factor) + (where,)
    if is_key(x):
        value = jnp.broadcast_to(jax.random.clone(expanded.ravel()[0]), expanded[index].shape)
    return collapse(expanded.at[index].set(value), dims, sizes)


def garbage(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return np.ones((), dtype)[()] if dtype == np.bool_ else np.array(-1).astype(dtype)[()]


def cuts(size: int) -> list[np.ndarray]:
    """An uneven partition of ``range(size)`` in two or three ranges."""
    points = [0, *sorted({(size + 1) // 3, size - 1 - size // 4} - {0, size}), size]
    return [np.arange(a, b) for a, b in itertools.pairwise(points)]


def assert_same(got: Any, want: Any, *, exact: bool, context: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{context}: got {got.dtype}{got.shape}, want {want.dtype}{want.shape}"
    )
    if is_key(want):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    got, want = np.asarray(got), np.asarray(want)
    if exact or not jnp.issubdtype(want.dtype, jnp.inexact):
        np.testing.assert_array_equal(got, want, err_msg=context)
        return
    tolerance = max(1e-10, 50 * float(jnp.finfo(want.dtype).eps))
    if got.dtype.kind not in "fc":
        got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=context)


def run(d: OperatorDescription, eqn: JaxprEqn, operands: Sequence[Any], sizes: Any, positions: Any) -> list[Any]:
    for i, x in enumerate(operands):
        assert x.shape == d.operand_shape(i, sizes), (eqn.primitive.name, i, x.shape, d.operand_shape(i, sizes))
    results = evaluate(d, eqn, operands, tuple(sizes), positions)
    for i, x in enumerate(results):
        assert x.shape == d.result_shape(i, sizes), (eqn.primitive.name, i, x.shape, d.result_shape(i, sizes))
    return results


def check_split(d: OperatorDescription, instance: Instance, factor: int, whole: list[Any]) -> None:
    """Evaluates the equation piece by piece along `factor`; once more with padding that holds garbage."""
    eqn, operands = instance.eqn, instance.operands
    size = d.sizes[factor]
    monoid = d.reduced.get(factor)
    for padding in (0, 2):
        parts = []
        for number, index in enumerate(cuts(size)):
            local = np.concatenate([index, np.zeros(padding, int)])
            sizes = tuple(len(local) if f == factor else n for f, n in enumerate(d.sizes))
            pad = np.arange(len(index), len(local))
            values = []
            for i, (x, dims) in enumerate(zip(operands, d.operands, strict=True)):
                part = take(x, dims, d.sizes, factor, local)
                if padding and not (monoid is not None and i in d.indices):
                    fill = 0 if factor in d.leaks else garbage(x.dtype)
                    if monoid is not None:
                        fill = d.fill[factor] if factor in d.fill else monoid.identity(x.dtype)
                    part = spoil(part, dims, sizes, factor, pad, fill)
                if monoid is not None and i in d.once and number > 0:
                    part = jnp.full_like(part, monoid.identity(x.dtype))
                values.append(part)
            where = jnp.asarray(local)
            results = run(d, eqn, values, sizes, {factor: lambda where=where: where})
            kept = np.arange(len(index))
            parts.append([take(r, dims, sizes, factor, kept) for r, dims in zip(results, d.results, strict=True)])
        for i, (dims, want) in enumerate(zip(d.results, whole, strict=True)):
            context = f"{eqn.primitive.name}: result {i}, factor {factor} of {d}"
            axes = [f for dim in dims for f in dim]
            if factor in axes:
                axis = axes.index(factor)
                pieces = [
                    expand(part[i], dims, [len(index) if f == factor else n for f, n in enumerate(d.sizes)])
                    for part, index in zip(parts, cuts(size), strict=True)
                ]
                got = collapse(jnp.concatenate(pieces, axis), dims, d.sizes)
                assert_same(got, want, exact=d.movement, context=context)
            elif monoid is not None and any(factor in dim for dims in d.operands for dim in dims):
                got = parts[0][i]
                for part in parts[1:]:
                    got = COMBINE[monoid](got, part[i])
                assert_same(got, want, exact=False, context=context)
            else:
                for part in parts:
                    assert_same(part[i], want, exact=False, context=context)


def other_value(x: Any) -> Any:
    """Another value of the same shape, far enough from `x` to tell sums from anything else."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        wave = jnp.cos(jnp.arange(x.size, dtype=jnp.float32) * 1.7 + 0.3).reshape(x.shape)
        return (wave * 2).astype(x.dtype)
    return ((jnp.arange(x.size) * 7 + 3) % 11).reshape(x.shape).astype(x.dtype)


def check_linear(d: OperatorDescription, instance: Instance, whole: list[Any]) -> None:
    """A sum in a linear group comes out as the sum of results; any monoid does if the equation only moves elements."""
    eqn, operands = instance.eqn, instance.operands
    for group in d.linear:
        if any(is_key(operands[i]) or operands[i].dtype == np.bool_ for i in group):
            continue
        monoids = [Monoid.SUM, Monoid.MAX, Monoid.PROD] if d.movement else [Monoid.SUM]
        second = [other_value(x) if i in group else x for i, x in enumerate(operands)]
        moved = run(d, eqn, second, d.sizes, {})
        for monoid in monoids:
            if monoid is Monoid.MAX and any(jnp.iscomplexobj(x) for x in operands):
                continue
            both = [
                COMBINE[monoid](x, y).astype(x.dtype) if i in group else x
                for i, (x, y) in enumerate(zip(operands, second, strict=True))
            ]
            for i, got in enumerate(run(d, eqn, both, d.sizes, {})):
                if is_key(got):
                    continue
                want = COMBINE[monoid](whole[i], moved[i]).astype(got.dtype)
                assert_same(got, want, exact=False, context=f"{eqn.primitive.name}: linear in {set(group)}, {monoid}")


def check(instance: Instance) -> OperatorDescription:
    """Holds the description of an equation against the equation."""
    d = describe(instance.eqn)
    assert d is not None, f"{instance.eqn.primitive.name} has no description"
    whole = run(d, instance.eqn, instance.operands, d.sizes, {})
    for factor, size in enumerate(d.sizes):
        if factor not in d.whole and size > 1:
            check_split(d, instance, factor, whole)
    check_linear(d, instance, whole)
    return d
