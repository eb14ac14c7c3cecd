"""Operator descriptions: an equation as an index expression.

Knows jax's equations (a primitive, parameters, shapes), and the kinds of splits. Must not know batches, nodes, passes,
devices or any particular primitive.

A description writes an equation as an index expression over *factors*, one factor per loop index. ``ij,jk->ik`` has
three. A dimension of an array is a list of factors from major to minor, so that a reshape from ``(6, 4)`` to ``(24,)``
is two factors, ``(i)(j) -> (i j)``. Everything that vnode does with an equation is read off its description: which
factor carries the examples, what a smaller copy of the equation looks like, what a split would cost.

The notation follows Tofu's operator descriptions (Wang et al., EuroSys 2019, section 4), with composite dimensions
added for reshapes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from vnode.operators.memo import Memo
from vnode.operators.monoid import Monoid
from vnode.operators.splits import FREE, Free, Interval, Lead, Reduced, Shifted, Split, Windowed

Dim = tuple[int, ...]
"""Factors of one dimension, major to minor. The empty tuple is a dimension of size one that no factor indexes."""

Dims = tuple[Dim, ...]
"""One `Dim` per array dimension."""

Sizes = tuple[int, ...]
"""A size for every factor of a description."""

Positions = Mapping[int, Callable[[], jax.Array]]
"""For a split factor: a function giving the global index of each local one, int32 or int64 of shape ``[local]``."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """One loop index of an equation.

    Attributes:
      size: its number of indices.
      split: how a copy of the equation may have some of its indices.
      positional: whether the result depends on the index itself, not only through the operands, as an iota's does. A
        copy on some of the indices is told which, and needs `OperatorDescription.emit` to make use of that.
      counted: whether it multiplies the work. A dimension that is only looked up in does not.
    """

    size: int
    split: Split = FREE
    positional: bool = False
    counted: bool = True


class Factors:
    """Hands out factors while a rule writes a description.

    >>> from vnode.operators import Factors, Monoid, Reduced
    >>> f = Factors()
    >>> i, j = f.new(4), f.new(3, Reduced(Monoid.SUM))
    >>> [(factor.size, factor.split) for factor in f.all]
    [(4, Free()), (3, Reduced(monoid=<Monoid.SUM: 'sum'>, fill=None))]
    """

    def __init__(self) -> None:
        self._all: list[Factor] = []

    def new(self, size: int, split: Split = FREE, *, positional: bool = False, counted: bool = True) -> int:
        """A new factor; arguments as the attributes of `Factor`."""
        self._all.append(Factor(int(size), split, positional, counted))
        return len(self._all) - 1

    def dims(self, shape: Sequence[int], split: Split = FREE) -> Dims:
        """One new factor for every dimension of `shape`."""
        return tuple((self.new(n, split),) for n in shape)

    def change(self, *factors: int, **changes: Any) -> None:
        """Gives factors other attributes."""
        for factor in factors:
            self._all[factor] = dataclasses.replace(self._all[factor], **changes)

    def size(self, factor: int) -> int:
        return self._all[factor].size

    def split(self, factor: int) -> Split:
        return self._all[factor].split

    @property
    def all(self) -> tuple[Factor, ...]:
        return tuple(self._all)


class Algebra(enum.Flag):
    """Algebraic properties of an equation."""

    MOVES = enum.auto()
    """It only moves elements of its linear operands (a reshape, a gather): what holds of sums holds of every monoid."""

    CONTINUOUS = enum.auto()
    """A last bit more or less in the operands changes the results by as little. Linear equations need not say so.
    Comparisons and roundings are not continuous, nor is a logarithm, which may turn a tiny number into NaN."""

    ADDS = enum.auto()
    """The result is the plain sum of the operands, element by element."""

    SPREADS = enum.auto()
    """Operands of size one along a dimension, and scalars, are spread to the others' shape."""

    CONTRACTS = enum.auto()
    """The reduced terms are products of two operands, so that an index costs two operations."""

    CHOOSES = enum.auto()
    """Each element of the result is one of those of the operands (a maximum): rounding may be done before or after."""


NOTHING = Algebra(0)


class Role(enum.Enum):
    """The role of an operand that is not simply read."""

    ONCE = "once"
    """It enters a reduction as one more term (what a scatter-add adds to). When the reduction is split, it may enter
    in one part only, and the others get the monoid's identity."""

    INDEX = "index"
    """It holds indices into another operand; padding in it is never overwritten."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The cost of an equation per index of its counted factors.

    Attributes:
      operations: scalar operations.
      transcendental: how many of them are exponentials, logarithms, roots and the like.
    """

    operations: int = 1
    transcendental: int = 0


Resize = Callable[["OperatorDescription", JaxprEqn, Sizes], dict[str, Any]]
Emit = Callable[["OperatorDescription", JaxprEqn, Sequence[Any], Sizes, Positions], Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorDescription:
    """One equation as an index expression.

    A free factor stands in a result, each of its indices computed independently: a copy of the equation on a range of
    indices gives that range of the result. A reduced factor stands in operands only: a copy on a range of indices
    gives a partial result. `vnode.operators.splits` has the other kinds.

    Attributes:
      factors: the attributes of every factor.
      operands: the factors of every operand, ``operands[operand][dimension]``. A dimension of size one that the
        equation broadcasts implicitly has no factor.
      results: the same of every result.
      roles: of operands that are not simply read.
      linear: groups of operands in which the equation is linear: with the other operands held fixed it maps a
        sum of values of the group to the sum of the results. ``a * b`` has two groups of one operand, ``a + b`` one
        group of two. An operand in no group is used nonlinearly (or is an index).
      summed: for results that sum over a free factor which other results have, the operands in which they are linear.
        All these operands have the factor. A kernel is an example that returns the gradients of each example's input
        and, summed over examples, that of a bias.
      algebra: further properties.
      work: cost per index, if it is neither one operation nor the two of a contraction, nor none for moves.
      part: for an equation that is several independent ones, operand i to result i: the parameters of the i-th.
      widen: gives the parameters of a copy in a wider floating-point type, for an equation that names its type in them.
      layout: for an equation that asks how its result is laid out over a mesh, the axes that it asks for along each
        dimension; None where it leaves the choice. `emit` evaluates every copy of it, also one of full size.
      opaque: compilers do not know what it does, and may refuse to divide it over the devices of a mesh: where it is
        computed once, each device computes all of it.
      own_types: a kernel that takes operands of the equation's types only.
      whole_because: why factors are whole that might not have been, as text.
      resize: gives the parameters of a copy with other factor sizes; None where they need no change.
      emit: evaluates a copy; by default binds the primitive with resized parameters. Needed with positional factors,
        and where a copy uses its positions (`LookedUp`, `Shifted`).
      emit_on: the same for single platforms, where the default is slow inside a loop.
      replaced_on: for single platforms on which the primitive must not be bound as it stands, how the equation is
        evaluated instead, a copy or the whole of it.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    roles: Mapping[int, Role] = dataclasses.field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    summed: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    algebra: Algebra = NOTHING
    work: Work | None = None
    part: Callable[[Mapping[str, Any], int], dict[str, Any]] | None = None
    widen: Callable[[Mapping[str, Any], Any], dict[str, Any]] | None = None
    layout: tuple[tuple[str, ...] | None, ...] | None = None
    opaque: bool = False
    own_types: bool = False
    whole_because: str = ""
    resize: Resize | None = None
    emit: Emit | None = None
    emit_on: Mapping[str, Emit] = dataclasses.field(default_factory=dict)
    replaced_on: Mapping[str, Emit] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def answer_cache(self) -> Memo[Any]:
        """A cache of answers to questions about equations of this kind."""
        return Memo(2_000)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The size of every factor."""
        return tuple(factor.size for factor in self.factors)

    @functools.cached_property
    def reduced(self) -> Mapping[int, Monoid]:
        """Factors that are reduced, each with its monoid."""
        return {f: x.split.monoid for f, x in enumerate(self.factors) if isinstance(x.split, Reduced)}

    @functools.cached_property
    def whole(self) -> frozenset[int]:
        """Factors of which a copy without communication needs all indices: neither free nor reduced ones."""
        return frozenset(f for f, x in enumerate(self.factors) if x.split is not FREE and f not in self.reduced)

    def has(self, algebra: Algebra) -> bool:
        """Whether any of some properties holds."""
        # asked often: `&` of the flags themselves takes ten times as long
        return self.algebra._value_ & algebra._value_ != 0

    @property
    def by_element(self) -> bool:
        """Whether each element of a result depends on at most one element of each operand."""
        return all(isinstance(x.split, Free | Shifted) for x in self.factors) and not self.has(Algebra.CONTRACTS)

    @property
    def keeps_elements(self) -> bool:
        """Whether the result is the only operand, each element in its place (a copy, a barrier)."""
        free = all(x.split is FREE and not x.positional for x in self.factors)
        return free and self.has(Algebra.MOVES) and len(self.operands) == 1 and self.operands == self.results

    @property
    def nonlinear(self) -> frozenset[int]:
        """The operands in which the equation is not linear, alone or together with others."""
        return frozenset(range(len(self.operands))).difference(*self.linear)

    @property
    def divisors(self) -> frozenset[int]:
        """The operands in which it is not linear though it is in another one, as a quotient is not in its divisor."""
        return self.nonlinear if self.linear else frozenset()

    @property
    def order_is_open(self) -> bool:
        """Whether it sums elements in an order that compilers choose for each kernel.

        Products have kernels of their own. A sum over dimensions of length 1 has nothing to order: gradients of
        broadcast biases are such sums.
        """
        sums = any(monoid is Monoid.SUM and self.sizes[f] > 1 for f, monoid in self.reduced.items())
        return sums and not self.has(Algebra.CONTRACTS)

    def adds_along(self, factor: int) -> frozenset[int]:
        """The operands that must be zero where a free factor has no index, since a result would sum over it."""
        lacking = [r for r in self.summed if not any(factor in dim for dim in self.results[r])]
        return frozenset(i for r in lacking for i in self.summed[r])

    def role(self, role: Role) -> frozenset[int]:
        """The operands that have a role."""
        return frozenset(i for i, has in self.roles.items() if has is role)

    def fill(self, factor: int, dtype: Any) -> Any:
        """The value that takes an index of a reduced factor out of the reduction."""
        split = self.factors[factor].split
        assert isinstance(split, Reduced)
        return split.monoid.identity(dtype) if split.fill is None else split.fill

    @functools.cached_property
    def leads(self) -> tuple[tuple[Lead, Split], ...]:
        """Every way to cut the equation: factors that are cut together, and their split."""
        found: dict[Lead, Split] = {}
        for f, factor in enumerate(self.factors):
            found.update(dict.fromkeys(factor.split.leads(f), factor.split))
        return tuple(found.items())

    def by_elements(self, shifted: Shifted) -> OperatorDescription:
        """The same equation; dimensions with moving elements count elements, not blocks."""
        if shifted.unit is None:
            return self
        unit, finer = self.factors[shifted.unit].size, shifted.scaled(self.factors[shifted.unit].size)
        factors = [
            dataclasses.replace(x, size=x.size * unit, split=finer) if x.split == shifted else x
            for f, x in enumerate(self.factors)
        ]
        factors[shifted.unit] = dataclasses.replace(factors[shifted.unit], size=1)
        return dataclasses.replace(self, factors=tuple(factors))

    def parts(self, lead: Lead, split: Split, count: int) -> Mapping[int, tuple[Interval, ...]] | None:
        """The indices of every factor concerned, if the equation is cut into `count` parts along `lead`."""
        return split.parts(lead, count, self.sizes)

    @property
    def flops(self) -> int:
        """Scalar operations of the whole equation; none for one that only moves elements."""
        return self.operations.operations

    @functools.cached_property
    def operations(self) -> Work:
        """Scalar operations of the whole equation, except on padding or between dilated elements."""
        tied = {x.split for x in self.factors if isinstance(x.split, Windowed)}
        count = math.prod(x.size for x in self.factors if x.counted and x.split not in tied)
        count *= math.prod(tie.pairs(self.sizes[tie.operand], self.sizes[tie.result]) for tie in tied)
        work = self.work
        if work is None:
            work = Work(0 if self.has(Algebra.MOVES) else 2 if self.has(Algebra.CONTRACTS) else 1)
        return Work(count * work.operations, count * work.transcendental)

    def operand_shape(self, operand: int, sizes: Sizes | None = None) -> tuple[int, ...]:
        """The shape of an operand, of a copy with factor sizes `sizes` if given."""
        return shape_of(self.operands[operand], self.sizes if sizes is None else sizes)

    def result_shape(self, result: int, sizes: Sizes | None = None) -> tuple[int, ...]:
        """The shape of a result, of a copy with factor sizes `sizes` if given."""
        return shape_of(self.results[result], self.sizes if sizes is None else sizes)

    def check(self, eqn: JaxprEqn) -> None:
        """Asserts that the description has the equation's shapes and that every factor is accounted for.

        Raises:
          ValueError: it does not.
        """
        for problem in self._problems(eqn):
            raise ValueError(f"{eqn.primitive.name}: {problem}")

    def _problems(self, eqn: JaxprEqn) -> Iterator[str]:
        """Yields what is wrong with the description, for `check`."""
        for kind, dims, atoms in (
            ("operand", self.operands, eqn.invars),
            ("result", self.results, eqn.outvars),
        ):
            if len(dims) != len(atoms):
                yield f"{len(dims)} {kind}s described, the equation has {len(atoms)}"
            for i, (described, atom) in enumerate(zip(dims, atoms, strict=False)):
                strangers = {f for dim in described for f in dim} - set(range(len(self.factors)))
                if strangers:
                    yield f"{kind} {i} has factor {min(strangers)}, which is not among `factors`"
                if shape_of(described, self.sizes) != tuple(getattr(atom.aval, "shape", ())):
                    yield (
                        f"{kind} {i} described with shape {shape_of(described, self.sizes)}, "
                        f"the equation has {atom.aval}"
                    )
        in_operands = {f for dims in self.operands for dim in dims for f in dim}
        in_results = {f for dims in self.results for dim in dims for f in dim}
        for f, factor in enumerate(self.factors):
            if f not in in_operands | in_results:
                yield f"factor {f} stands in no operand and no result"
            if f in self.reduced and f in in_results:
                yield f"factor {f} is reduced but stands in a result"
            if f not in in_results and factor.split is FREE:
                yield f"factor {f} vanishes without being reduced or whole"
        for i in set(self.roles) - set(range(len(self.operands))):
            yield f"operand {i} has a role, but there are {len(self.operands)} operands"


def shape_of(dims: Dims, sizes: Sequence[int]) -> tuple[int, ...]:
    """The array shape that `dims` describe.

    >>> shape_of(((0, 1), (), (2,)), (2, 3, 5))
    (6, 1, 5)
    """
    return tuple(math.prod(sizes[f] for f in dim) for dim in dims)


def shape_resize(parameter: str) -> Resize:
    """A `Resize` for equations that name their result's shape in `parameter`."""

    def resize(description: OperatorDescription, eqn: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return {**eqn.params, parameter: description.result_shape(0, sizes)}

    return resize
