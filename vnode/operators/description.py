"""What an operator description is, and the registry that holds one rule per primitive.

Knows jax's equations (a primitive, parameters, shapes). Must not know about batches, nodes, passes, devices or any
particular primitive: the families beside this file do, each for its own primitives.

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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Primitive

Dim = tuple[int, ...]
"""Factors of one dimension, major to minor. The empty tuple is a dimension of size one that no factor indexes."""

Dims = tuple[Dim, ...]
"""One `Dim` per array dimension."""

Sizes = tuple[int, ...]
"""A size for every factor of a description."""

Positions = Mapping[int, Callable[[], jax.Array]]
"""For a split factor: a function giving the global index of each local one, int32 or int64 of shape ``[local]``."""


class Monoid(enum.Enum):
    """How the pieces of a reduced value combine."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AND = "and"
    OR = "or"
    XOR = "xor"

    def identity(self, dtype: Any) -> Any:
        """The neutral element, a NumPy scalar of `dtype`.

        >>> Monoid.MAX.identity(np.float32)
        np.float32(-inf)
        >>> Monoid.MIN.identity(np.int8)
        np.int8(127)
        """
        dtype = np.dtype(dtype)
        boolean = dtype == np.bool_
        match self:
            case Monoid.SUM | Monoid.XOR:
                return dtype.type(0)
            case Monoid.OR:
                return dtype.type(0)
            case Monoid.PROD:
                return dtype.type(1)
            case Monoid.AND:
                return dtype.type(True) if boolean else np.array(-1).astype(dtype)[()]
            case Monoid.MAX | Monoid.MIN:
                low = self is Monoid.MAX
                if boolean:
                    return dtype.type(not low)
                if jax.numpy.issubdtype(dtype, np.integer):
                    info = jax.numpy.iinfo(dtype)
                    return dtype.type(info.min if low else info.max)
                if dtype.kind == "c":  # ordered by the real part first
                    return dtype.type(complex(-np.inf, -np.inf) if low else complex(np.inf, np.inf))
                if not np.isinf(np.array(np.inf).astype(dtype).astype(np.float64)):  # float8 kinds without infinity
                    info = jax.numpy.finfo(dtype)
                    return dtype.type(info.min if low else info.max)
                return np.array(-np.inf if low else np.inf).astype(dtype)[()]


Resize = Callable[["OperatorDescription", JaxprEqn, Sizes], dict[str, Any]]
Emit = Callable[["OperatorDescription", JaxprEqn, Sequence[Any], Sizes, Positions], Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorDescription:
    """One equation as an index expression.

    A factor that stands in a result is computed independently for each of its indices (unless it is in `whole`): a
    copy of the equation on a range of indices gives that range of the result. A factor that stands in operands only is
    reduced: `reduced` names the monoid, and a copy of the equation on a range of indices gives a partial result.

    Attributes:
      sizes: the size of every factor.
      operands: the factors of every operand, ``operands[operand][dimension]``. A dimension of size one that the
        equation broadcasts implicitly has no factor.
      results: the same of every result.
      reduced: factors that are reduced, each with its monoid.
      whole: factors that a copy of the equation must have at full size (the sorted dimension, a window's).
      positional: factors on whose index the result depends other than through the operands (an iota's).
      linear: groups of operands in which the equation is linear: with the other operands held fixed it maps a
        sum of values of the group to the sum of the results. ``a * b`` has two groups of one operand, ``a + b`` one
        group of two. An operand in no group is used nonlinearly (or is an index).
      movement: the equation only moves elements of its linear operands (a reshape, a gather): what holds of sums then
        holds of every monoid.
      continuous: a last bit more or less in the operands changes the results by as little (so does everything that is
        linear). Not so a comparison, a rounding, or a logarithm, which may turn a tiny number into NaN.
      adds: the result is the plain sum of the operands, element by element.
      spreads: operands of size one along a dimension, and scalars, are spread to the others' shape.
      once: operands that enter a reduction as one more term (what a scatter-add adds to). When the reduction is
        split, they may enter in one part only and the others get the monoid's identity.
      indices: operands that hold indices into another operand; padding in them is never overwritten.
      fill: for a reduced factor, the value that takes an index out of the reduction when every operand that has
        the factor is overwritten with it there; by default the identity of the factor's monoid.
      contraction: the reduced sum is over products of two operands, so it costs two operations per index.
      uncounted: factors that do not multiply the work (an operand's dimension that is only looked up in).
      work: operations per index, where neither one nor the two of a contraction is right.
      part: for an equation that is several independent ones, operand i to result i: the parameters of the i-th.
      widen: gives the parameters of a copy in a wider floating-point type, for an equation that names its type in them.
      layout: for an equation that asks how its result is laid out over a mesh, the axes that it asks for along each
        dimension; None where it leaves the choice. `emit` evaluates every copy of it, also one of full size.
      resize: gives the parameters of a copy with other factor sizes; None where they need no change.
      emit: evaluates a copy; by default binds the primitive with resized parameters. Needed with `positional`.
      emit_on: the same for single platforms, where the default is slow inside a loop.
      replaced_on: for single platforms on which the primitive must not be bound as it stands, how the equation is
        evaluated instead, a copy or the whole of it.
    """

    sizes: Sizes
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduced: Mapping[int, Monoid] = dataclasses.field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    positional: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    movement: bool = False
    continuous: bool = False
    adds: bool = False
    spreads: bool = False
    once: frozenset[int] = frozenset()
    indices: frozenset[int] = frozenset()
    fill: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    contraction: bool = False
    uncounted: frozenset[int] = frozenset()
    work: int | None = None
    part: Callable[[Mapping[str, Any], int], dict[str, Any]] | None = None
    widen: Callable[[Mapping[str, Any], Any], dict[str, Any]] | None = None
    layout: tuple[tuple[str, ...] | None, ...] | None = None
    resize: Resize | None = None
    emit: Emit | None = None
    emit_on: Mapping[str, Emit] = dataclasses.field(default_factory=dict)
    replaced_on: Mapping[str, Emit] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def flops(self) -> int:
        """Scalar operations of the whole equation; none for one that only moves elements."""
        if self.movement:
            return 0
        work = self.work if self.work is not None else 2 if self.contraction else 1
        return work * math.prod(n for f, n in enumerate(self.sizes) if f not in self.uncounted)

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
        for kind, dims, atoms in (
            ("operand", self.operands, eqn.invars),
            ("result", self.results, eqn.outvars),
        ):
            if len(dims) != len(atoms):
                raise ValueError(f"{eqn.primitive.name}: {len(dims)} {kind}s described, the equation has {len(atoms)}")
            for i, (described, atom) in enumerate(zip(dims, atoms, strict=True)):
                if shape_of(described, self.sizes) != tuple(getattr(atom.aval, "shape", ())):
                    raise ValueError(
                        f"{eqn.primitive.name}: {kind} {i} described with shape {shape_of(described, self.sizes)}, "
                        f"the equation has {atom.aval}"
                    )
        in_operands = {f for dims in self.operands for dim in dims for f in dim}
        in_results = {f for dims in self.results for dim in dims for f in dim}
        for f in range(len(self.sizes)):
            if f not in in_operands | in_results:
                raise ValueError(f"{eqn.primitive.name}: factor {f} stands in no operand and no result")
            if f in self.reduced and f in in_results:
                raise ValueError(f"{eqn.primitive.name}: factor {f} is reduced but stands in a result")
            if f not in in_results and f not in self.reduced and f not in self.whole:
                raise ValueError(f"{eqn.primitive.name}: factor {f} vanishes without being reduced or whole")


def shape_of(dims: Dims, sizes: Sizes) -> tuple[int, ...]:
    """The array shape that `dims` describe.

    >>> shape_of(((0, 1), (), (2,)), (2, 3, 5))
    (6, 1, 5)
    """
    return tuple(math.prod(sizes[f] for f in dim) for dim in dims)


class Factors:
    """Hands out factors while a rule writes a description.

    >>> f = Factors()
    >>> i, j = f.new(4), f.new(3)
    >>> f.sizes
    (4, 3)
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def new(self, size: int) -> int:
        """A new factor of `size`."""
        self._sizes.append(int(size))
        return len(self._sizes) - 1

    def dims(self, shape: Sequence[int]) -> Dims:
        """One new factor for every dimension of `shape`."""
        return tuple((self.new(n),) for n in shape)

    @property
    def sizes(self) -> Sizes:
        return tuple(self._sizes)


Rule = Callable[[JaxprEqn], "OperatorDescription | None"]
_rules: dict[str, Rule] = {}
_unshared: set[str] = set()
"""Primitives of which two equations with equal parameters and types may have different descriptions."""
_users: set[str] = set()
"""Primitives that users describe, of which no more is known than they say."""
_advice: dict[str, tuple[str, ...]] = {}


def rule(*names: str, alike: bool = True, advice: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """Registers a rule for the primitives called `names`; for the families of this package.

    Names, not objects: some primitives have no public home in jax, and some exist in one supported version only.

    Args:
      *names: of the primitives.
      alike: whether the description depends on nothing but parameters and types.
      advice: what a user may do where the rule gives no description.

    Returns:
      A decorator for the rule.
    """

    def add(fun: Rule) -> Rule:
        for name in names:
            if name in _rules:
                raise ValueError(f"two descriptions of primitive {name!r}")
            _rules[name] = fun
            _advice[name] = advice
            if not alike:
                _unshared.add(name)
        return fun

    return add


def register(primitive: Primitive | str) -> Callable[[Rule], Rule]:
    """Describes a primitive of the user's own (a Pallas kernel, an FFI call); replaces an earlier description.

    Args:
      primitive: the primitive, or its name.

    Returns:
      A decorator for the rule: a function from a `JaxprEqn` to its `OperatorDescription`. What it returns is checked
      against the equation's shapes each time.

    Example:
      >>> from jax.extend.core import Primitive
      >>> twice_p = Primitive("twice")
      >>> @register(twice_p)
      ... def twice(eqn):
      ...     f = Factors()
      ...     dims = f.dims(eqn.invars[0].aval.shape)
      ...     return OperatorDescription(
      ...         sizes=f.sizes, operands=(dims,), results=(dims,), linear=(frozenset({0}),))
    """
    name = primitive if isinstance(primitive, str) else primitive.name

    def add(fun: Rule) -> Rule:
        def checked(eqn: JaxprEqn) -> OperatorDescription | None:
            description = fun(eqn)
            if description is not None:
                description.check(eqn)
            return description

        _rules[name] = checked
        _unshared.add(name)
        _users.add(name)
        return fun

    return add


def describe(eqn: JaxprEqn) -> OperatorDescription | None:
    """The description of an equation, or None if its primitive has none.

    Args:
      eqn: an equation of any jaxpr.

    Returns:
      The description.
    """
    fun = _rules.get(eqn.primitive.name)
    return None if fun is None else fun(eqn)


def described(eqn: JaxprEqn) -> bool:
    """Whether there is a rule for an equation's primitive."""
    return eqn.primitive.name in _rules


def advice(eqn: JaxprEqn) -> tuple[str, ...]:
    """What a user may do about an equation that has no description."""
    return _advice.get(eqn.primitive.name) or (
        "describe it with vnode.operators.register (docs/registering-a-primitive.md)",
        "or write the operation with primitives that jax.lax documents",
    )


def kind(eqn: JaxprEqn) -> Hashable | None:
    """What the description of an equation depends on: equations of a kind share theirs.

    Args:
      eqn: an equation of any jaxpr.

    Returns:
      The kind; None if there is no telling, because the rule is a user's or reads more of the equation, or a parameter
      cannot be hashed.
    """
    name = eqn.primitive.name
    if name in _unshared:
        return None
    types = [(getattr(a.aval, "shape", None), getattr(a.aval, "dtype", None)) for a in (*eqn.invars, *eqn.outvars)]
    made = (name, eqn.ctx.threefry_partitionable, tuple(eqn.params.items()), tuple(types))
    try:
        hash(made)
    except TypeError:
        return None
    return made


def shape_resize(parameter: str) -> Resize:
    """A `Resize` for equations that name their result's shape in `parameter`."""

    def resize(description: OperatorDescription, eqn: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        return {**eqn.params, parameter: description.result_shape(0, sizes)}

    return resize


def evaluate(
    description: OperatorDescription,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    sizes: Sizes,
    positions: Positions,
    platform: str = "",
) -> list[Any]:
    """Evaluates a copy of `eqn` with factor sizes `sizes`.

    Args:
      description: of `eqn`.
      eqn: the equation.
      operands: values of the shapes that `description` has at `sizes`.
      sizes: a size for every factor.
      positions: the global indices of the factors that are split.
      platform: what the program is compiled for, e.g. ``"cpu"``.

    Returns:
      The results, of the shapes that `description` has at `sizes`.
    """
    full = not positions and sizes == description.sizes and description.layout is None
    emit = None if full else description.emit_on.get(platform, description.emit)
    emit = description.replaced_on.get(platform, emit)
    if emit is not None:
        return list(emit(description, eqn, operands, sizes, positions))
    params = eqn.params if description.resize is None else description.resize(description, eqn, sizes)
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def cast(value: Any, dtype: Any) -> Any:
    """A floating-point value in another type; any other, and a number without a type of its own, as it is."""
    own = getattr(value, "dtype", None)
    return value if own is None or own == dtype or not jax.numpy.issubdtype(own, np.floating) else value.astype(dtype)


def evaluate_wide(
    description: OperatorDescription,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    sizes: Sizes | None = None,
    positions: Positions | None = None,
    platform: str = "",
    dtype: Any = np.float32,
) -> list[Any]:
    """The same in a floating-point type with more bits than that of the equation's results, which is not rounded to.

    Products are still of narrow operands, if both are: only their sum is wide. A primitive of the user's may not take
    another type: its results are cast.

    Args:
      description: of `eqn`.
      eqn: the equation.
      operands: values, each of its own type in the equation or of the wider one.
      sizes: as above; by default those of the equation.
      positions: as above.
      platform: as above.
      dtype: the wider type.

    Returns:
      The results, of that type.
    """
    sizes, positions = sizes or description.sizes, positions or {}
    if eqn.primitive.name in _users:
        narrow = [cast(value, atom.aval.dtype) for value, atom in zip(operands, eqn.invars, strict=True)]
        return [cast(value, dtype) for value in evaluate(description, eqn, narrow, sizes, positions, platform)]
    if not description.contraction or any(getattr(value, "dtype", None) == dtype for value in operands):
        operands = [cast(value, dtype) for value in operands]
    if description.widen is not None:
        eqn = eqn.replace(params=description.widen(eqn.params, dtype))
    return evaluate(description, eqn, operands, sizes, positions, platform)
