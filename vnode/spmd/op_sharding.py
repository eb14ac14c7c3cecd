"""How one equation is cut over the axes of a mesh, given how its operands lie.

Knows descriptions and layouts, and what moves between layouts cost in bytes. Must not know programs, nor how a copy is
evaluated.

An axis is given to one of the ways in which the equation can be cut (`OperatorDescription.leads`), or to none: then
every device along it computes the same. The choice follows the operands: only ways that divide what some operand is
already divided by are looked at, and of them the one is taken that moves the fewest bytes.
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
"""How many scalar operations take as long as to send a byte: weighs work that is repeated against exchange."""


@dataclasses.dataclass(frozen=True)
class FactorSharding:
    """An equation's split over axes.

    Attributes:
      lead: the factors that are cut together.
      split: how they split.
      axes: the axes that divide them, major to minor.
    """

    lead: Lead
    split: Split
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OpSharding:
    """How one equation is carried out.

    Attributes:
      description: of the equation, with moving dimensions by elements where they are cut so.
      ways: the axes that divide it.
      operands: how each operand has to lie.
      results: how each result lies then.
      parts: for each factor that is concerned, the indices of each part, and the axes that number the parts.
      passed: axes over which operands are partial and results stay so.
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
    """What is known of an operand.

    Attributes:
      layout: how it lies.
      anyhow: it can be made in any layout where it is needed, so that nothing is moved.
      zero: all of its elements are zero, so that it may be added once or any number of times.
      settled: its pieces are combined for some equation anyhow, so that nothing is gained by passing them through
        another.
    """

    layout: Layout
    materializable: bool = False
    zero: bool = False
    settled: bool = False


F = TypeVar("F", bound=Callable[..., Any])


def memoized(fun: F) -> F:
    """A function of an equation, its description and more, that reads nothing of the equation but types.

    What it found for an equation of the same kind, with the same arguments, it does not look for again: repeated layers
    are many equations of few kinds, and a search asks for each of them in plan after plan.
    """

    @functools.wraps(fun)
    def found(eqn: JaxprEqn, description: OperatorDescription, *args: Any) -> Any:
        key = (fun, *(tuple(x.items() if isinstance(x, Mapping) else x) for x in args))
        return description.answer_cache.get_or_make(key, lambda: fun(eqn, description, *args))

    return cast(F, found)


@memoized
def choose(
    eqn: JaxprEqn,
    description: OperatorDescription,
    given: Sequence[OperandSharding],
    axes: Axes,
    wishes: Sequence[Layout | None],
) -> OpSharding:
    """How an equation is cut.

    Args:
      eqn: the equation.
      description: of it.
      given: what is known of each operand.
      axes: of the mesh.
      wishes: for each result the layout that it should have, if somebody says so.

    Returns:
      The choice.
    """
    passed = stays_partial(eqn, description, given)
    less = [tuple(each for each in passed if each != combined) for combined in passed]
    several = [
        choose_in_order(eqn, description, given, axes, wishes, some, order)
        for some in dict.fromkeys((passed, *less, ()))
        for order in axis_orders(
            axes, [*(each.layout for each in given), *(wish for wish in wishes if wish is not None)]
        )
    ]
    return min(several, key=lambda found: found[0])[1]


def axis_orders(axes: Axes, layouts: Sequence[Layout]) -> list[tuple[str, ...]]:
    """Orders in which axes may come to divide an equation: the mesh's, and those of cuts that have another."""
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
    """How an equation is cut if pieces over some axes are passed through it, and others come one after another."""
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
    for i, wish in enumerate(wishes):  # as a whole, which no single axis may lead to
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
    """An equation cut in given ways: pieces of sums pass through it over other axes only. None if it cannot be cut so.

    Args:
      eqn: the equation.
      description: of it.
      given: what is known of each operand.
      axes: of the mesh.
      ways: the axes that divide it, of the description's `leads`.
    """
    taken = {name for way in ways for name in way.axes}
    passed = tuple(p for p in stays_partial(eqn, description, given) if p[0] not in taken)
    return build_sharding(eqn, description, ways, given, axes, passed)


def reached_layouts(eqn: JaxprEqn, choice: OpSharding) -> tuple[Layout, ...]:
    """How the results of an evaluated equation lie: pieces of narrow sums have been combined."""
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
    """Ways in which an axis can divide the equation as well, as some operand (or a wish) has it."""
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
    """The ways with one more axis for one of them."""
    for k, way in enumerate(ways):
        if way.lead == lead and way.split == split:
            return (*ways[:k], FactorSharding(lead, split, (*way.axes, axis)), *ways[k + 1 :])
    return (*ways, FactorSharding(lead, split, (axis,)))


def stays_partial(
    eqn: JaxprEqn, description: OperatorDescription, given: Sequence[OperandSharding]
) -> tuple[tuple[str, Monoid], ...]:
    """The axes over which results are partial because operands are: pieces of a sum pass through what is linear."""
    passed = []
    size = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    for axis, monoid in dict.fromkeys(p for each in given for p in each.layout.partial):
        having = {i for i, each in enumerate(given) if (axis, monoid) in each.layout.partial}
        if any(given[i].settled for i in having):
            continue
        if any(dict(each.layout.partial).get(axis, monoid) is not monoid for each in given):
            continue
        if size > sum(math.prod(eqn.invars[i].aval.shape) for i in having):
            continue  # rather combine what is smaller
        if any(
            is_narrow(var.aval.dtype) and not is_narrow(eqn.invars[i].aval.dtype) for var in eqn.outvars for i in having
        ):
            continue  # rather combine before it is rounded
        groups = [group for group in passing_groups(description, monoid) if having <= group]
        if any(all(i in having or (given[i].zero and monoid is Monoid.SUM) for i in group) for group in groups):
            passed.append((axis, monoid))
    return tuple(passed)


def passing_groups(description: OperatorDescription, monoid: Monoid) -> Sequence[frozenset[int]]:
    """Groups of operands that may be in pieces, all of a group at once: the results are so, then."""
    if len(description.operands) == 1 and set(description.reduced.values()) == {monoid}:
        return [frozenset({0})]
    return description.linear if monoid is Monoid.SUM or description.has(Algebra.MOVES) else ()


def is_narrow(dtype: object) -> bool:
    """Whether a sum in pieces of this type would be rounded more than the sum itself."""
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
    """What it takes to divide an equation so; None if it cannot be."""
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
    """How a value has to lie so that each part has its indices, or can fetch them; None if it cannot.

    What follows a factor that is cut is fetched: from blocks, or from a value that every device has.
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
    """What it costs to divide an equation so, in bytes that each device sends; None if it cannot be."""
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
        for piece in layout.partial:  # what combines them later, along each axis for itself
            moves = plan_resharding(Layout(layout.dims, (piece,)), Layout(layout.dims), shape, axes, dtype)
            total += total_elements_sent(moves, axes) * size
    parts = count([name for way in choice.ways for name in way.axes], axes)
    return total + description.flops / parts / OPERATIONS_PER_BYTE


def itemsize(dtype: object) -> int:
    return getattr(dtype, "itemsize", 4)


def shardings_for_result(
    description: OperatorDescription, result: int, layout: Layout, axes: Axes
) -> tuple[FactorSharding, ...] | None:
    """Ways in which an equation gives a result in a layout; None if there are none."""
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
