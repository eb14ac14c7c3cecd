"""Layouts of operands -> the sharding of one equation over the axes of a mesh.

Knows descriptions and layouts, and the bytes that resharding moves. Must not know programs, nor how a copy is
evaluated.

    x: [data, -], w: [-, model], "ij,jk->ik"   ->   i over data, k over model; the result is [data, model]
    x: [-, model], w: [model, -], j is long    ->   j over model; the result is partial over model

An axis is assigned to one of the factors that the equation can be cut along (`OperatorDescription.leads`), or to none:
then all devices along it compute the same. The choice follows the operands. Only factors that some operand is already
divided along are considered; the one that moves the fewest bytes is chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from vnode.operators import Algebra, Monoid, OperatorDescription
from vnode.operators.description import Dims, Sizes
from vnode.operators.splits import Free, Interval, Lead, Shifted, Split
from vnode.spmd.layout import Axes, Cut, Layout, count, cut_along
from vnode.spmd.resharding import plan_resharding, total_elements_sent

OPERATIONS_PER_BYTE = 50
"""Scalar operations that take as long as sending one byte; weighs repeated computation against communication."""


@dataclasses.dataclass(frozen=True)
class FactorSharding:
    """Factors of an equation, and the axes that divide them.

    Attributes:
      lead: the factors that are cut together.
      split: their split.
      axes: the axes that divide them, major to minor.
    """

    lead: Lead
    split: Split
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OpSharding:
    """The sharding of one equation.

    Attributes:
      description: the equation's description; a cut dimension whose blocks are shifted counts elements.
      ways: the sharded factors and their axes.
      operands: required layouts of operands.
      results: the resulting layouts of results.
      parts: for each factor concerned, the indices of each part, and the axes that number the parts.
      passed: axes over which operands are partial, and results stay so.
    """

    description: OperatorDescription
    ways: tuple[FactorSharding, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    parts: Mapping[int, tuple[tuple[Interval, ...], FactorSharding]]
    passed: tuple[tuple[str, Monoid], ...] = ()

    def sizes(self) -> Sizes:
        """The factor sizes of a copy."""
        lengths = {f: sum(each.length for each in several) for f, (several, _) in self.parts.items()}
        return tuple(lengths.get(f, n) for f, n in enumerate(self.description.sizes))


@dataclasses.dataclass(frozen=True)
class OperandSharding:
    """The sharding of an operand.

    Attributes:
      layout: its layout.
      materializable: it can be made in any layout where it is needed, so that nothing is moved.
      zero: all of its elements are zero, so that adding it several times is harmless.
      settled: another equation combines its partial values anyway, so that nothing is gained by passing them through
        this one.
    """

    layout: Layout
    materializable: bool = False
    zero: bool = False
    settled: bool = False


F = TypeVar("F", bound=Callable[..., Any])


def memoized(fun: F) -> F:
    """Memoizes a function of an equation and its description that depends on the equation's types only.

    Repeated layers are many equations of few kinds, and a search asks for each of them in plan after plan.
    """

    @functools.wraps(fun)
    def answer(eqn: JaxprEqn, description: OperatorDescription, *args: Any) -> Any:
        key = (fun, *(tuple(x.items() if isinstance(x, Mapping) else x) for x in args))
        return description.answer_cache.get_or_make(key, lambda: fun(eqn, description, *args))

    return cast(F, answer)


@memoized
def choose(
    eqn: JaxprEqn,
    description: OperatorDescription,
    given: Sequence[OperandSharding],
    axes: Axes,
    wishes: Sequence[Layout | None],
) -> OpSharding:
    """Chooses the sharding of an equation.

    Args:
      eqn: the equation.
      description: its description.
      given: the shardings of its operands.
      axes: the mesh axes.
      wishes: for each result its wanted layout, if there is one.

    Returns:
      The sharding.
    """
    passed = stays_partial(eqn, description, given)
    all_but_one = [tuple(each for each in passed if each != combined) for combined in passed]
    choices = [
        choose_in_order(eqn, description, given, axes, wishes, some, order)
        for some in dict.fromkeys((passed, *all_but_one, ()))
        for order in axis_orders(
            axes, [*(each.layout for each in given), *(wish for wish in wishes if wish is not None)]
        )
    ]
    return min(choices, key=lambda choice: choice[0])[1]


def axis_orders(axes: Axes, layouts: Sequence[Layout]) -> list[tuple[str, ...]]:
    """Orders in which axes may divide an equation: the mesh's, and those of cuts with another order."""
    found = dict.fromkeys([tuple(axes)])
    for layout in layouts:
        for cut in layout.dims:
            if cut is not None and len(cut.axes) > 1:
                own = iter(cut.axes)
                found.setdefault(tuple(next(own) if name in cut.axes else name for name in axes))
    return [*found]


def choose_in_order(
    eqn: JaxprEqn,
    description: OperatorDescription,
    given: Sequence[OperandSharding],
    axes: Axes,
    wishes: Sequence[Layout | None],
    passed: tuple[tuple[str, Monoid], ...],
    order: Sequence[str],
) -> tuple[float, OpSharding]:
    """Chooses a sharding, given the axes over which partial values pass through, and the order of the other axes.

    Returns:
      Its `total_cost`, and the sharding.
    """
    layouts = [Layout(each.layout.dims, tuple(p for p in each.layout.partial if p in passed)) for each in given]
    ways: tuple[FactorSharding, ...] = ()
    for axis in order:
        if any(axis == name for name, _ in passed):
            continue
        best = total_cost(eqn, description, ways, given, axes, passed, wishes)
        for more in candidates(description, layouts, given, wishes, ways, axis, axes):
            cost = total_cost(eqn, description, more, given, axes, passed, wishes)
            if cost is not None and (best is None or cost < best):
                best, ways = cost, more
    for i, wish in enumerate(wishes):  # all axes of a wish at once: no single one of them may be cheaper
        full = None if wish is None or passed else shardings_for_result(description, i, wish, axes)
        if full:
            cost = total_cost(eqn, description, full, given, axes, passed, wishes)
            now = total_cost(eqn, description, ways, given, axes, passed, wishes)
            if cost is not None and (now is None or cost < now):
                ways = full
    choice = build_sharding(eqn, description, ways, given, axes, passed)
    cost = total_cost(eqn, description, ways, given, axes, passed, wishes)
    assert choice is not None and cost is not None
    return cost, choice


def apply_shardings(
    eqn: JaxprEqn,
    description: OperatorDescription,
    given: Sequence[OperandSharding],
    axes: Axes,
    ways: tuple[FactorSharding, ...],
) -> OpSharding | None:
    """Shards an equation in given ways; partial sums pass through over the other axes only. None if that cannot be
    done.

    Args:
      eqn: the equation.
      description: its description.
      given: the shardings of its operands.
      axes: the mesh axes.
      ways: the sharded factors, of the description's `leads`, and their axes.
    """
    taken = {name for way in ways for name in way.axes}
    passed = tuple(p for p in stays_partial(eqn, description, given) if p[0] not in taken)
    return build_sharding(eqn, description, ways, given, axes, passed)


def reached_layouts(eqn: JaxprEqn, choice: OpSharding) -> tuple[Layout, ...]:
    """The layouts of an evaluated equation's results: partial sums of narrow types have been combined."""
    return tuple(
        layout.without_partial if is_narrow(var.aval.dtype) and not choice.passed else layout
        for var, layout in zip(eqn.outvars, choice.results, strict=True)
    )


def candidates(
    description: OperatorDescription,
    layouts: Sequence[Layout],
    given: Sequence[OperandSharding],
    wishes: Sequence[Layout | None],
    ways: tuple[FactorSharding, ...],
    axis: str,
    axes: Axes,
) -> Iterator[tuple[FactorSharding, ...]]:
    """Shardings with one more axis, as it divides some operand or wish."""
    places = [(description.operands[i], layout) for i, layout in enumerate(layouts) if not given[i].materializable] + [
        (description.results[i], wish) for i, wish in enumerate(wishes) if wish is not None
    ]
    wanted: set[int] = set()
    for dims, layout in places:
        d = layout.cut_axes.get(axis)
        if d is not None:
            wanted.update(dims[d])
    for lead, split in description.leads:
        if wanted & split.concerned(lead):
            yield with_axis(ways, lead, split, axis)


def with_axis(ways: tuple[FactorSharding, ...], lead: Lead, split: Split, axis: str) -> tuple[FactorSharding, ...]:
    """The shardings with one more axis for one of them."""
    for k, way in enumerate(ways):
        if way.lead == lead and way.split == split:
            return (*ways[:k], FactorSharding(lead, split, (*way.axes, axis)), *ways[k + 1 :])
    return (*ways, FactorSharding(lead, split, (axis,)))


def stays_partial(
    eqn: JaxprEqn, description: OperatorDescription, given: Sequence[OperandSharding]
) -> tuple[tuple[str, Monoid], ...]:
    """The axes over which results are partial because operands are: partial sums pass through linear equations."""
    passed = []
    size = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    for axis, monoid in dict.fromkeys(p for each in given for p in each.layout.partial):
        having = {i for i, each in enumerate(given) if (axis, monoid) in each.layout.partial}
        if any(given[i].settled for i in having):
            continue
        if any(dict(each.layout.partial).get(axis, monoid) is not monoid for each in given):
            continue
        if size > sum(math.prod(eqn.invars[i].aval.shape) for i in having):
            continue  # combine the smaller value instead
        if any(
            is_narrow(var.aval.dtype) and not is_narrow(eqn.invars[i].aval.dtype) for var in eqn.outvars for i in having
        ):
            continue  # combine before rounding
        groups = [group for group in passing_groups(description, monoid) if having <= group]
        if any(all(i in having or (given[i].zero and monoid is Monoid.SUM) for i in group) for group in groups):
            passed.append((axis, monoid))
    return tuple(passed)


def passing_groups(description: OperatorDescription, monoid: Monoid) -> Sequence[frozenset[int]]:
    """Groups of operands that may be partial together, so that the results are partial."""
    if len(description.operands) == 1 and set(description.reduced.values()) == {monoid}:
        return [frozenset({0})]
    return description.linear if monoid is Monoid.SUM or description.has(Algebra.MOVES) else ()


def is_narrow(dtype: object) -> bool:
    """Whether a dtype is a floating-point type of fewer than 32 bits, whose partial sums would be rounded too much."""
    return bool(jnp.issubdtype(dtype, np.floating)) and jnp.finfo(dtype).bits < 32  # type: ignore[arg-type]


@memoized
def build_sharding(
    eqn: JaxprEqn,
    description: OperatorDescription,
    ways: tuple[FactorSharding, ...],
    given: Sequence[OperandSharding],
    axes: Axes,
    passed: tuple[tuple[str, Monoid], ...],
) -> OpSharding | None:
    """The `OpSharding` for given sharded factors; None if the equation cannot be sharded so."""
    finer = description
    for way in ways:
        if isinstance(way.split, Shifted):
            finer = finer.by_elements(way.split)
    resolved = [dataclasses.replace(way, split=finer.factors[way.lead[0]].split) for way in ways]
    parts: dict[int, tuple[tuple[Interval, ...], FactorSharding]] = {}
    for way in resolved:
        concerned = finer.parts(way.lead, way.split, count(way.axes, axes))
        if concerned is None or concerned.keys() & parts.keys() or any(finer.sizes[f] == 0 for f in concerned):
            return None
        parts.update({f: (several, way) for f, several in concerned.items()})
    operands, results = [], []
    for dims, each in zip(finer.operands, given, strict=True):
        layout = wanted_layout(dims, finer.sizes, parts, each.layout, axes)
        if layout is None:
            return None
        operands.append(Layout(layout.dims, tuple(p for p in each.layout.partial if p in passed)))
    for k, dims in enumerate(finer.results):
        layout = wanted_layout(dims, finer.sizes, parts, None, axes)
        if layout is None:
            return None
        factors = {f for dim in dims for f in dim}
        partial = list(passed)
        for way in resolved:
            monoid = way.split.partial(way.lead)
            if isinstance(way.split, Free) and k in finer.summed:
                monoid = Monoid.SUM
            if monoid is not None and not factors & set(way.lead):
                partial += [(name, monoid) for name in way.axes]
        results.append(Layout(layout.dims, tuple(sorted(partial, key=lambda p: list(axes).index(p[0])))))
    return OpSharding(finer, tuple(resolved), tuple(operands), tuple(results), parts, passed)


def wanted_layout(
    dims: Dims,
    sizes: Sizes,
    parts: Mapping[int, tuple[tuple[Interval, ...], FactorSharding]],
    have: Layout | None,
    axes: Axes,
) -> Layout | None:
    """The layout of a value in which each part has its indices, or can fetch them; None if there is none.

    Indices that follow a sharded factor are fetched from other blocks, or from a replicated value.
    """
    found: list[Cut | None] = []
    for dim in dims:
        concerned = [f for f in dim if f in parts]
        if len(concerned) > 1:
            return None
        cut = None
        for factor in concerned:
            _, way = parts[factor]
            at_hand = have is not None and not set(way.axes) & have.cut_axes.keys()
            if factor in way.lead or not at_hand:
                cut = cut_along(way.axes, factor, dim, sizes, axes)
        found.append(cut)
    return Layout(tuple(found))


@memoized
def total_cost(
    eqn: JaxprEqn,
    description: OperatorDescription,
    ways: tuple[FactorSharding, ...],
    given: Sequence[OperandSharding],
    axes: Axes,
    passed: tuple[tuple[str, Monoid], ...],
    wishes: Sequence[Layout | None] = (),
) -> float | None:
    """The cost of a sharding, in bytes; None if the equation cannot be sharded so.

    It is the sum of three terms. First, the bytes that each device sends to reshard operands. Second, those that it
    sends to reshard results as wished, or to all-reduce partial results later. Third, its operations, of which
    `OPERATIONS_PER_BYTE` count as a byte.
    """
    choice = build_sharding(eqn, description, ways, given, axes, passed)
    if choice is None:
        return None
    total = 0.0
    for atom, each, want in zip(eqn.invars, given, choice.operands, strict=True):
        if not each.materializable:
            moves = plan_resharding(each.layout, want, atom.aval.shape, axes, atom.aval.dtype)
            total += total_elements_sent(moves, axes) * itemsize(atom.aval.dtype)
    for var, layout, wish in itertools.zip_longest(eqn.outvars, choice.results, wishes):
        size, shape, dtype = itemsize(var.aval.dtype), var.aval.shape, var.aval.dtype
        if wish is not None:
            total += total_elements_sent(plan_resharding(layout, wish, shape, axes, dtype), axes) * size
            continue
        for piece in layout.partial:  # later all-reduces, one along each axis
            moves = plan_resharding(Layout(layout.dims, (piece,)), Layout(layout.dims), shape, axes, dtype)
            total += total_elements_sent(moves, axes) * size
    parts = count([name for way in choice.ways for name in way.axes], axes)
    return total + description.flops / parts / OPERATIONS_PER_BYTE


def itemsize(dtype: object) -> int:
    """Bytes of an element; 4 if the type does not tell."""
    return getattr(dtype, "itemsize", 4)


def shardings_for_result(
    description: OperatorDescription, result: int, layout: Layout, axes: Axes
) -> tuple[FactorSharding, ...] | None:
    """Shardings in which an equation gives a result in a layout; None if there are none."""
    ways = []
    for dim, cut in zip(description.results[result], layout.dims, strict=True):
        if cut is None:
            continue
        for lead, split in description.leads:
            if len(lead) != 1 or lead[0] not in dim or split.partial(lead) is not None:
                continue
            if cut_along(cut.axes, lead[0], dim, description.sizes, axes) == cut:
                ways.append(FactorSharding(lead, split, cut.axes))
                break
        else:
            return None
    return tuple(ways)
