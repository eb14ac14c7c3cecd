"""Holds an operator description against the equation itself.

Knows what a description promises and nothing of any primitive: it splits every factor that may be split, evaluates the
pieces, and compares with the equation evaluated whole. Arrays are cut and joined with NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from vnode.operators import Monoid, OperatorDescription, describe, evaluate

COMBINE: dict[Monoid, Callable[[Any, Any], Any]] = {
    Monoid.SUM: np.add,
    Monoid.PROD: np.multiply,
    Monoid.MAX: np.maximum,
    Monoid.MIN: np.minimum,
    Monoid.AND: np.bitwise_and,
    Monoid.OR: np.bitwise_or,
    Monoid.XOR: np.bitwise_xor,
}

CALLS = {
    "jit": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


@dataclasses.dataclass(frozen=True)
class Instance:
    """An equation with the values of its operands."""

    eqn: JaxprEqn
    operands: list[Any]

    @property
    def signature(self) -> str:
        """Equal for equations that differ in their values only."""
        avals = [str(atom.aval) for atom in (*self.eqn.invars, *self.eqn.outvars)]
        return f"{self.eqn.primitive.name} {avals} {self.eqn.params}"


def instances(fun: Callable[..., Any], *args: Any) -> Iterator[Instance]:
    """Every equation of `fun` at `args`, calls inlined, with its operands' values."""
    closed = jax.make_jaxpr(fun)(*args)
    yield from walk(closed.jaxpr, closed.consts, jax.tree.leaves(args))


def walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Iterator[Instance]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(jnp.asarray, [*consts, *args]), strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            inner = eqn.params[CALLS[eqn.primitive.name]]
            body = getattr(inner, "jaxpr", inner)
            body_consts = getattr(inner, "consts", ())
            yield from walk(body, body_consts, operands)
            results = jaxpr_as_fun(ClosedJaxpr(body, body_consts))(*operands)
        else:
            yield Instance(eqn, operands)
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))


class Array:
    """A value as NumPy data with one dimension per factor of its description (and the words of a key at the end)."""

    def __init__(self, data: np.ndarray, dims: Any, impl: Any) -> None:
        self.data, self.impl = data, impl
        self.dims = dims
        self.factors = [f for dim in dims for f in dim]

    @classmethod
    def of(cls, x: Any, dims: Any, sizes: Sequence[int]) -> Array:
        impl = jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None
        data = np.asarray(x if impl is None else jax.random.key_data(x))
        shape = tuple(sizes[f] for dim in dims for f in dim)
        return cls(data.reshape(shape + data.shape[x.ndim :]), dims, impl)

    def value(self) -> Any:
        """Back to an array of the equation's shape."""
        size = dict(zip(self.factors, self.data.shape, strict=False))
        shape = tuple(int(np.prod([size[f] for f in dim], dtype=int)) for dim in self.dims)
        data = jnp.asarray(self.data.reshape(shape + self.data.shape[len(self.factors) :]))
        return data if self.impl is None else jax.random.wrap_key_data(data, impl=self.impl)

    def like(self, data: np.ndarray) -> Array:
        return Array(data, self.dims, self.impl)

    def index(self, factor: int, where: Any) -> tuple[Any, ...]:
        return (slice(None),) * self.factors.index(factor) + (where,)

    def take(self, factor: int, where: np.ndarray) -> Array:
        """The part at the indices `where` of `factor`."""
        return self.like(self.data[self.index(factor, where)]) if factor in self.factors else self

    def overwrite(self, factor: int, where: np.ndarray, value: Any) -> Array:
        """Another value at the indices `where` of `factor`."""
        if factor not in self.factors:
            return self
        data = self.data.copy()
        data[self.index(factor, where)] = value
        return self.like(data)


def garbage(dtype: Any) -> Any:
    """What padding may hold."""
    if jnp.issubdtype(dtype, np.inexact):
        return np.array(np.nan).astype(dtype)
    return np.array(True) if dtype == np.bool_ else np.array(-1).astype(dtype)


def assert_same(got: np.ndarray, want: np.ndarray, *, exact: bool, context: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, f"{context}: {got.dtype}{got.shape} {want.dtype}"
    if exact or not jnp.issubdtype(want.dtype, np.inexact):
        np.testing.assert_array_equal(got, want, err_msg=context)
        return
    tolerance = max(1e-10, 50 * float(jnp.finfo(want.dtype).eps))
    if got.dtype.kind not in "fc":  # bfloat16 and smaller
        got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=context)


def run(
    d: OperatorDescription, eqn: JaxprEqn, operands: Sequence[Array], sizes: Sequence[int], positions: Any
) -> list[Array]:
    """Evaluates a copy; checks every shape against the description."""
    values = [x.value() for x in operands]
    sizes = tuple(sizes)
    assert [x.shape for x in values] == [d.operand_shape(i, sizes) for i in range(len(values))], eqn
    results = evaluate(d, eqn, values, sizes, positions)
    assert [x.shape for x in results] == [d.result_shape(i, sizes) for i in range(len(results))], eqn
    return [Array.of(x, dims, sizes) for x, dims in zip(results, d.results, strict=True)]


def check_split(
    d: OperatorDescription, eqn: JaxprEqn, operands: Sequence[Array], factor: int, whole: Sequence[Array]
) -> None:
    """Evaluates the equation in two parts of unequal size along `factor`, of which the second has padding.

    Padding holds garbage. Along a reduced factor it is overwritten first, as the description says.
    """
    size = d.sizes[factor]
    monoid = d.reduced.get(factor)
    parts = []
    for number, index in enumerate(np.split(np.arange(size), [(size + 1) // 3])):
        padding = 2 * number
        local = np.concatenate([index, np.zeros(padding, int)])
        pad = np.arange(len(index), len(local))
        sizes = [len(local) if f == factor else n for f, n in enumerate(d.sizes)]
        given = []
        for i, x in enumerate(operands):
            part = x.take(factor, local)
            dtype = part.data.dtype
            if monoid is None:
                part = part.overwrite(factor, pad, 0 if factor in d.leaks else garbage(dtype))
            elif i not in d.indices:
                part = part.overwrite(factor, pad, d.fill.get(factor, monoid.identity(dtype)))
            if monoid is not None and i in d.once and number > 0:
                part = part.like(np.full_like(part.data, monoid.identity(dtype)))
            given.append(part)
        results = run(d, eqn, given, sizes, {factor: lambda local=local: jnp.asarray(local)})
        parts.append([result.take(factor, np.arange(len(index))) for result in results])
    for i, want in enumerate(whole):
        context = f"{eqn.primitive.name}: result {i}, factor {factor} of {d}"
        first, second = (part[i].data for part in parts)
        if factor in want.factors:
            got = np.concatenate([first, second], want.factors.index(factor))
            assert_same(got, want.data, exact=d.movement, context=context)
        elif monoid is not None and any(factor in x.factors for x in operands):
            assert_same(COMBINE[monoid](first, second), want.data, exact=False, context=context)
        else:  # another result's factor
            assert_same(first, want.data, exact=False, context=context)
            assert_same(second, want.data, exact=False, context=context)


def other_value(data: np.ndarray) -> np.ndarray:
    """Another value of the same shape, far enough away to tell sums from anything else."""
    if jnp.issubdtype(data.dtype, np.inexact):
        return (2 * np.cos(np.arange(data.size) * 1.7 + 0.3)).reshape(data.shape).astype(data.dtype)
    return ((np.arange(data.size) * 7 + 3) % 11).reshape(data.shape).astype(data.dtype)


def check_linear(d: OperatorDescription, eqn: JaxprEqn, operands: Sequence[Array], whole: Sequence[Array]) -> None:
    """A sum in a linear group comes out as the sum of results; any monoid does if the equation only moves elements."""
    for group in d.linear:
        if any(operands[i].impl is not None or operands[i].data.dtype == np.bool_ for i in group):
            continue  # there is no sum of them
        real = not any(np.iscomplexobj(x.data) for x in operands)
        monoids = [Monoid.SUM] + [Monoid.PROD] * d.movement + [Monoid.MAX] * (d.movement and real)
        second = [x.like(other_value(x.data)) if i in group else x for i, x in enumerate(operands)]
        moved = run(d, eqn, second, d.sizes, {})
        for monoid in monoids:
            both = [
                x.like(COMBINE[monoid](x.data, y.data).astype(x.data.dtype)) if i in group else x
                for i, (x, y) in enumerate(zip(operands, second, strict=True))
            ]
            for got, a, b in zip(run(d, eqn, both, d.sizes, {}), whole, moved, strict=True):
                want = COMBINE[monoid](a.data, b.data).astype(got.data.dtype)
                assert_same(got.data, want, exact=False, context=f"{eqn.primitive.name} in {set(group)}: {monoid}")


def check(instance: Instance) -> OperatorDescription:
    """Holds the description of an equation against the equation."""
    eqn = instance.eqn
    d = describe(eqn)
    assert d is not None, f"{eqn.primitive.name} has no description"
    operands = [Array.of(x, dims, d.sizes) for x, dims in zip(instance.operands, d.operands, strict=True)]
    whole = run(d, eqn, operands, d.sizes, {})
    for factor, size in enumerate(d.sizes):
        if factor not in d.whole and size > 1:
            check_split(d, eqn, operands, factor, whole)
    check_linear(d, eqn, operands, whole)
    return d
