"""Holds an operator description against the equation itself.

Knows what a description promises and nothing of any primitive: it splits every factor that may be split, evaluates the
pieces, and compares with the equation evaluated whole. Arrays are cut and joined with NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from vnode.operators import (
    Algebra,
    Free,
    Monoid,
    OperatorDescription,
    Prefix,
    Reduced,
    Role,
    Shifted,
    Windowed,
    describe,
    evaluate,
)
from vnode.operators.splits import Lead, Split

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


def instances(fun: Callable[..., Any], *args: Any, of: frozenset[str]) -> list[Instance]:
    """The equations of `fun` at `args` whose primitive is in `of`, calls inlined, with their operands' values."""
    closed = jax.make_jaxpr(fun)(*args)
    found: list[JaxprEqn] = []

    def operands_of_all(*leaves: Any) -> list[list[Any]]:
        equations = list(walk(closed.jaxpr, closed.consts, leaves))
        found.extend(eqn for eqn, _ in equations if eqn.primitive.name in of)
        return [operands for eqn, operands in equations if eqn.primitive.name in of]

    values = jax.jit(operands_of_all)(*jax.tree.leaves(args))
    return [Instance(eqn, operands) for eqn, operands in zip(found, values, strict=True)]


def walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Iterator[tuple[JaxprEqn, list[Any]]]:
    """Evaluates a jaxpr equation by equation."""
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
            yield eqn, operands
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

    def longer(self, factor: int, length: int) -> Array:
        """Anything of another length, where there was nothing."""
        shape = [length if f == factor else n for f, n in zip(self.factors, self.data.shape, strict=False)]
        return self.like(np.zeros(shape, self.data.dtype))

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


def tolerance(d: OperatorDescription, arrays: Sequence[Array]) -> float:
    """Follows the coarsest of the dtypes; zero if the equation only moves elements."""
    eps = [float(jnp.finfo(x.data.dtype).eps) for x in arrays if jnp.issubdtype(x.data.dtype, np.inexact)]
    coarsest = max(eps, default=0.0)
    return 0.0 if d.has(Algebra.MOVES) else 6 * coarsest if coarsest > 1e-4 else max(1e-10, 50 * coarsest)


def assert_same(got: np.ndarray, want: np.ndarray, limit: float, context: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, f"{context}: {got.dtype}{got.shape} {want.dtype}"
    inexact = jnp.issubdtype(want.dtype, np.inexact)
    if inexact and got.dtype.kind not in "fc":  # bfloat16 and smaller: NumPy does not know their NaN
        got, want = got.astype(np.float64), want.astype(np.float64)
    if not limit or not inexact:
        np.testing.assert_array_equal(got, want, err_msg=context)
        return
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit, err_msg=context)


@dataclasses.dataclass
class Copy:
    """A copy of an equation to be evaluated: its operands, factor sizes and positions, and later its results."""

    operands: list[Array]
    sizes: tuple[int, ...]
    positions: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    results: list[Array] = dataclasses.field(default_factory=list)


Batch = tuple[OperatorDescription, Sequence[Copy]]
"""Copies of an equation, and the description by which they were made."""


def run(eqn: JaxprEqn, batches: Sequence[Batch], platform: str) -> None:
    """Evaluates copies in one program, as on `platform`; checks every shape against the description."""
    pairs = [(d, copy) for d, copies in batches for copy in copies]

    def positions(copy: Copy) -> dict[int, Callable[[], Any]]:
        return {f: lambda p=p: jnp.asarray(p) for f, p in copy.positions.items()}

    def program(operands: list[list[Any]]) -> list[list[Any]]:
        return [
            evaluate(d, eqn, given, copy.sizes, positions(copy), platform)
            for given, (d, copy) in zip(operands, pairs, strict=True)
        ]

    operands = [[x.value() for x in copy.operands] for _, copy in pairs]
    for given, (d, copy) in zip(operands, pairs, strict=True):
        assert [x.shape for x in given] == [d.operand_shape(i, copy.sizes) for i in range(len(given))], eqn
    for results, (d, copy) in zip(jax.jit(program)(operands), pairs, strict=True):
        assert [x.shape for x in results] == [d.result_shape(i, copy.sizes) for i in range(len(results))], eqn
        copy.results = [Array.of(x, dims, copy.sizes) for x, dims in zip(results, d.results, strict=True)]


def split(d: OperatorDescription, operands: Sequence[Array], factor: int) -> list[Copy]:
    """The equation in two parts of unequal size along `factor`, of which the second has padding.

    Padding holds garbage. Along a reduced factor it is overwritten first, as the description says, and so are terms of
    a result that lacks a free factor. Garbage is finite for products of two operands: XLA computes a grouped
    convolution as a dense one with zeros between the groups, and zero times NaN is NaN. (What vnode pads with are real
    examples, so a NaN there is one of the user's.)
    """
    size = d.sizes[factor]
    monoid = d.reduced.get(factor)
    parts = []
    for number, index in enumerate(np.split(np.arange(size), [(size + 1) // 3])):
        local = np.concatenate([index, np.zeros(PADDING * number, int)])
        pad = np.arange(len(index), len(local))
        given = []
        for i, x in enumerate(operands):
            part = x.take(factor, local)
            dtype = part.data.dtype
            if monoid is None:
                finite = d.has(Algebra.CONTRACTS) or d.summed
                part = part.overwrite(factor, pad, 0 if i in d.adds_along(factor) else 7 if finite else garbage(dtype))
            elif i not in d.role(Role.INDEX):
                part = part.overwrite(factor, pad, d.fill(factor, dtype))
            if monoid is not None and i in d.role(Role.ONCE) and number > 0:
                part = part.like(np.full_like(part.data, monoid.identity(dtype)))
            given.append(part)
        sizes = tuple(len(local) if f == factor else n for f, n in enumerate(d.sizes))
        parts.append(Copy(given, sizes, {factor: local}))
    return parts


PADDING = 2


Way = tuple[Lead, Split, int]
"""Factors that are cut together, how, and into how many parts."""


def cut(d: OperatorDescription, operands: Sequence[Array], ways: Sequence[Way]) -> list[Copy] | None:
    """The equation in equal parts along factors that are tied to others, or need more done than to be cut.

    Each part is given what the description says: the indices of every factor concerned, around a windowed operand its
    neutral value, and garbage wherever nothing is promised. Of several ways, each part along one is cut along the next.
    None if a factor is concerned by two of them, or a way gives no equal parts.
    """
    made = [d.parts(lead, split, count) for lead, split, count in ways]
    factors = [factor for intervals in made for factor in intervals or ()]
    if None in made or len(set(factors)) != len(factors):
        return None
    copies = []
    for numbers in itertools.product(*(range(count) for _, _, count in ways)):
        given = list(operands)
        lengths: dict[int, int] = {}
        positions = {}
        for number, (lead, split, _), intervals in zip(numbers, ways, made, strict=True):
            for factor, several in (intervals or {}).items():
                index = np.concatenate([each.indices(number, d.sizes[factor]) for each in several])
                given = [part_of(x, factor, index, around(split, i, x.data.dtype)) for i, x in enumerate(given)]
                lengths[factor] = len(index)
                if factor in lead:
                    positions[factor] = several[0].starts[number] + np.arange(several[0].length)
        copies.append(Copy(given, tuple(lengths.get(f, n) for f, n in enumerate(d.sizes)), positions))
    return copies


def part_of(x: Array, factor: int, index: np.ndarray, fill: Any) -> Array:
    """The elements at some indices of a factor, and `fill` where an index is -1."""
    if factor not in x.factors:
        return x
    size = x.data.shape[x.factors.index(factor)]
    part = x.take(factor, np.maximum(index, 0)) if size else x.longer(factor, len(index))
    return part.overwrite(factor, index < 0, fill)


def around(split: Split, operand: int, dtype: Any) -> Any:
    """What a part is given where an operand has no element."""
    if isinstance(split, Prefix):
        return split.around.identity(dtype)
    if not isinstance(split, Windowed):
        return garbage(dtype)
    if not split.around:
        return np.zeros((), dtype)
    return split.around[operand].identity(dtype)


def compare_cut(d: OperatorDescription, eqn: JaxprEqn, ways: Sequence[Way], parts: Sequence[Copy], whole: Copy) -> None:
    """The results of the parts make up the whole results, as the ways of splitting say."""
    limit = tolerance(d, [*whole.operands, *whole.results])
    for i, result in enumerate(whole.results):
        want = Array.of(result.value(), d.results[i], d.sizes)
        made = [part.results[i].data for part in parts]
        for way in reversed(ways):
            made = [joined(d, way, want.factors, several) for several in chunks(made, way[2])]
        assert_same(made[0], want.data, limit, f"{eqn.primitive.name}: result {i}, {ways} of {d}")


def chunks(made: list[Any], size: int) -> list[list[Any]]:
    return [made[i : i + size] for i in range(0, len(made), size)]


def joined(d: OperatorDescription, way: Way, factors: Sequence[int], made: Sequence[np.ndarray]) -> np.ndarray:
    """What a result with some factors is, of which the parts along one way were made."""
    lead, split, _ = way
    cut_here = [factor for factor in lead if factor in factors]
    if not cut_here:
        monoid = split.partial(lead)
        assert monoid is not None, f"{lead} of {d}"
        return functools.reduce(COMBINE[monoid], made)
    (factor,) = cut_here
    axis = factors.index(factor)
    if isinstance(split, Prefix):
        made = running(split, made, axis, d.sizes[factor])
    got = np.concatenate(made, axis)
    return np.delete(got, np.arange(d.sizes[factor], got.shape[axis]), axis)


def running(split: Prefix, made: Sequence[np.ndarray], axis: int, size: int) -> list[np.ndarray]:
    """The running values of all parts, those of the parts before taken up; `size` of them are real."""
    order = list(range(len(made)))[:: -1 if split.reverse else 1]
    done: dict[int, np.ndarray] = {}
    before = None
    for number in order:
        length = made[number].shape[axis]
        if number * length >= size:  # nothing but padding
            done[number] = made[number]
            continue
        part = made[number]
        done[number] = part if before is None else np.asarray(split.combine(before, part)).astype(part.dtype)
        last = 0 if split.reverse else min(length, size - number * length) - 1
        before = np.take(done[number], [last], axis)
    return [done[number] for number in range(len(made))]


def compare_split(d: OperatorDescription, eqn: JaxprEqn, factor: int, parts: Sequence[Copy], whole: Copy) -> None:
    """The results of the parts make up the whole results."""
    limit = tolerance(d, [*whole.operands, *whole.results])
    monoid = d.reduced.get(factor)
    stands_in_operands = any(factor in x.factors for x in whole.operands)
    for i, want in enumerate(whole.results):
        context = f"{eqn.primitive.name}: result {i}, factor {factor} of {d}"
        first, second = (part.results[i] for part in parts)
        second = second.take(factor, np.arange(parts[1].sizes[factor] - PADDING))
        if factor in want.factors:
            got = np.concatenate([first.data, second.data], want.factors.index(factor))
            assert_same(got, want.data, limit, context)
        elif (monoid is not None and stands_in_operands) or i in d.summed:
            assert_same(COMBINE[monoid or Monoid.SUM](first.data, second.data), want.data, limit, context)
        else:  # another result's factor
            assert_same(first.data, want.data, limit, context)
            assert_same(second.data, want.data, limit, context)


def other_value(data: np.ndarray) -> np.ndarray:
    """Another value of the same shape, far enough away to tell sums from anything else."""
    if jnp.issubdtype(data.dtype, np.inexact):
        return (2 * np.cos(np.arange(data.size) * 1.7 + 0.3)).reshape(data.shape).astype(data.dtype)
    return ((np.arange(data.size) * 7 + 3) % 11).reshape(data.shape).astype(data.dtype)


def combine(d: OperatorDescription, group: frozenset[int], operands: Sequence[Array]) -> dict[Monoid | None, Copy]:
    """The equation of other values in a linear group, under None, and of them combined with the given ones."""
    if any(operands[i].impl is not None or operands[i].data.dtype == np.bool_ for i in group):
        return {}  # there is no sum of them
    real = not any(np.iscomplexobj(x.data) for x in operands)
    monoids = [Monoid.SUM] + [Monoid.PROD] * d.has(Algebra.MOVES) + [Monoid.MAX] * (d.has(Algebra.MOVES) and real)
    second = [x.like(other_value(x.data)) if i in group else x for i, x in enumerate(operands)]
    copies: dict[Monoid | None, Copy] = {None: Copy(second, d.sizes)}
    for monoid in monoids:
        both = [
            x.like(COMBINE[monoid](x.data, y.data).astype(x.data.dtype)) if i in group else x
            for i, (x, y) in enumerate(zip(operands, second, strict=True))
        ]
        copies[monoid] = Copy(both, d.sizes)
    return copies


def compare_combined(
    d: OperatorDescription, eqn: JaxprEqn, group: frozenset[int], copies: dict[Monoid | None, Copy], whole: Copy
) -> None:
    """A sum in a linear group comes out as the sum of results; any monoid does if the equation only moves elements."""
    limit = tolerance(d, [*whole.operands, *whole.results])
    for monoid, copy in copies.items():
        if monoid is not None:
            for got, a, b in zip(copy.results, whole.results, copies[None].results, strict=True):
                want = COMBINE[monoid](a.data, b.data).astype(got.data.dtype)
                assert_same(got.data, want, limit, f"{eqn.primitive.name} in {set(group)}: {monoid}")


def check_parts(d: OperatorDescription, eqn: JaxprEqn, operands: Sequence[Any], whole: Copy) -> None:
    """Several equations in one give each by itself what they give together."""
    for i, (x, want) in enumerate(zip(operands, whole.results, strict=True)):
        alone = eqn.primitive.bind(x, **d.part(eqn.params, i))
        alone = alone[0] if eqn.primitive.multiple_results else alone
        assert_same(Array.of(alone, d.results[i], d.sizes).data, want.data, 0.0, f"{eqn.primitive.name}: part {i}")


COUNTS = 2, 3
"""Into how many parts an equation is cut."""


def ways(d: OperatorDescription) -> list[tuple[Lead, Split, OperatorDescription]]:
    """Every way to cut an equation into as many parts, and the description that says how, by elements of blocks."""
    found = []
    for lead, split in d.leads:
        finer = d.by_elements(split) if isinstance(split, Shifted) else d
        finer_split = finer.factors[lead[0]].split
        if any(finer.sizes[factor] > 1 for factor in lead) and any(
            finer.parts(lead, finer_split, count) is not None for count in COUNTS
        ):
            found.append((lead, finer_split, finer))
    return found


Cut = tuple[OperatorDescription, list[Way], list[Copy]]


def cuts_of(d: OperatorDescription, values: Sequence[Any]) -> Iterator[Cut]:
    """The equation in two and in three parts in every way that is more than to take a range of a factor.

    And in two by two along every two of these.
    """

    def made(finer: OperatorDescription, *ways: Way) -> Iterator[Cut]:
        operands = [Array.of(x, dims, finer.sizes) for x, dims in zip(values, finer.operands, strict=True)]
        parts = cut(finer, operands, ways)
        if parts is not None:
            yield finer, list(ways), parts

    found = [each for each in ways(d) if not isinstance(each[1], Free | Reduced)]
    for lead, split, finer in found:
        for count in COUNTS:
            yield from made(finer, (lead, split, count))
    for (first, split, finer), (second, _, _) in itertools.combinations(found, 2):
        other = d.factors[second[0]].split
        finest = finer.by_elements(other) if isinstance(other, Shifted) else finer
        yield from made(finest, (first, split, 2), (second, finest.factors[second[0]].split, 2))


def check(instance: Instance) -> OperatorDescription:
    """Holds the description of an equation against the equation."""
    eqn = instance.eqn
    d = describe(eqn)
    assert d is not None, f"{eqn.primitive.name} has no description"
    d.check(eqn)
    operands = [Array.of(x, dims, d.sizes) for x, dims in zip(instance.operands, d.operands, strict=True)]
    whole = Copy(operands, d.sizes)
    splits = {f: split(d, operands, f) for f, size in enumerate(d.sizes) if f not in d.whole and size > 1}
    cuts = list(cuts_of(d, instance.operands))
    combined = {group: combine(d, group, operands) for group in d.linear}
    copies = [part for parts in splits.values() for part in parts]
    copies += [copy for group in combined.values() for copy in group.values()]
    for platform in ("", *d.emit_on):
        cut_copies = [(finer, parts) for finer, _, parts in cuts]
        run(eqn, [(d, [whole, *copies] if not platform else copies), *cut_copies], platform)
        for factor, parts in splits.items():
            compare_split(d, eqn, factor, parts, whole)
        for group, several in combined.items():
            compare_combined(d, eqn, group, several, whole)
        for finer, way, parts in cuts:
            compare_cut(finer, eqn, way, parts, whole)
    if d.has(Algebra.ADDS):
        total = sum(np.broadcast_to(x, whole.results[0].value().shape) for x in instance.operands)
        np.testing.assert_allclose(np.asarray(total), np.asarray(whole.results[0].value()), rtol=1e-10)
    if d.part is not None:
        check_parts(d, eqn, instance.operands, whole)
    return d
