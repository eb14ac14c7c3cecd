"""Patterns of leaf names -> shardings of a state's leaves.

Knows pytrees, shardings and placements. Must not know steps.

A leaf's name is its path: ``params/mlp/wi/kernel``. Names of an optimizer's slots end like those of their parameters,
so one pattern matches both.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vnode.errors import PlacementError
from vnode.placement.leaf_sharding import Role, has_device_order, leaf_sharding
from vnode.placement.placement import Placement
from vnode.placement.transfer import rename_axes, resharding, to_placement
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.show.units import several


@dataclasses.dataclass(frozen=True)
class Exactly:
    """In place of a pattern: matches leaves of one name only, and of one shape if that is given.

    Attributes:
      leaf: the name, or the result of `full_name` for it and the shape.
    """

    leaf: str

    def __repr__(self) -> str:
        return repr(self.leaf)


Pattern = str | Exactly

Patterns = tuple[tuple[Pattern, PartitionSpec | UnevenSpec], ...]


def patterns_of(given: Mapping[str, PartitionSpec | UnevenSpec]) -> Patterns:
    """Checks a user's patterns.

    Raises:
      ValueError: a pattern is not a regular expression, its value is neither a `PartitionSpec` nor an `UnevenSpec`, or
        is one that no array can have.
    """
    for pattern, spec in given.items():
        if not isinstance(pattern, str) or not isinstance(spec, PartitionSpec | UnevenSpec):
            raise ValueError(
                f"partition maps names to jax.sharding.PartitionSpec or vnode.UnevenSpec, not {pattern!r} to {spec!r}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"partition: {pattern!r} is not a regular expression: {error}") from None
        check_spec(pattern, spec)
    return tuple(given.items())


def full_name(name: str, shape: Sequence[int]) -> str:
    """A leaf's name with its shape, where arguments have leaves of one name and several shapes, as two networks have.

    >>> full_name("mlp/0", (4, 3))
    'mlp/0 (4, 3)'
    """
    return f"{name} {tuple(shape)}"


def matches(pattern: Pattern, name: str, shape: Sequence[int]) -> bool:
    """Whether a pattern matches a leaf.

    >>> [matches(pattern, "mlp/0", (4, 3)) for pattern in ("0$", Exactly("0"), Exactly("mlp/0 (4, 3)"))]
    [True, False, True]
    """
    if isinstance(pattern, Exactly):
        return pattern.leaf in (name, full_name(name, shape))
    return re.search(pattern, name) is not None


def first_match(patterns: Patterns, name: str, shape: Sequence[int]) -> PartitionSpec | UnevenSpec | None:
    """The value of the first pattern that matches a leaf; None if none does."""
    return next((spec for pattern, spec in patterns if matches(pattern, name, shape)), None)


def axes_of(spec: PartitionSpec | UnevenSpec) -> list[Any]:
    """The axes that a spec names, one after another.

    >>> axes_of(PartitionSpec(("data", "model"), None, "extra")), axes_of(UnevenSpec(0, "model", (2, 1)))
    (['data', 'model', 'extra'], ['model'])
    """
    if isinstance(spec, UnevenSpec):
        return [spec.axis]
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec.partitions]
    return [name for entry in entries for name in entry if name not in (None, PartitionSpec.UNCONSTRAINED)]


def check_spec(pattern: str, spec: PartitionSpec | UnevenSpec) -> None:
    """Raises if no leaf of a state can have a spec.

    Raises:
      ValueError: an axis is named twice, or the spec is unreduced.
    """
    if isinstance(spec, PartitionSpec) and (spec.unreduced or spec.reduced):
        raise ValueError(
            f"partition: {pattern!r} is {spec}: a state is passed whole, not as partial sums "
            "(unreduced, reduced); leave these out"
        )
    names = axes_of(spec)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"partition: {pattern!r} is {spec}: the axis {twice!r} can divide one dimension, not two")


def check_axes(patterns: Patterns, known: Sequence[Any]) -> None:
    """Raises if a spec names axes that the mesh lacks: they would divide nothing.

    Args:
      patterns: the result of `patterns_of`.
      known: the axes of the mesh.

    Raises:
      PlacementError: an axis is missing.
    """
    for pattern, spec in patterns:
        missing = [name for name in axes_of(spec) if name not in known]
        if missing:
            raise PlacementError(
                f"partition: {pattern!r} divides a dimension over {missing[0]!r}, which the mesh does not have.",
                facts=[f"its axes are {', '.join(map(repr, known))}"],
                remedies=[
                    "name one of these axes",
                    "or put the step on a mesh with the axis: placement=vnode.Placement(..., mesh=mesh, axis=...)",
                    "or leave the pattern out: the leaf is whole on every device",
                ],
            )


def name_of(path: tuple[Any, ...]) -> str:
    """A leaf's name: the keys of its path.

    >>> name_of(jax.tree_util.tree_leaves_with_path({"mlp": [1.0]})[0][0])
    'mlp/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def quoted(name: str) -> str:
    """A leaf's name in a message; an array that is an argument by itself has none."""
    return repr(name) if name else "an array by itself"


def by_name(tree: Any, patterns: Patterns, placement: Placement, host: Sequence[Pattern] = ()) -> Any:
    """Shards the leaves of a tree by the first pattern that matches their names.

    Args:
      tree: a pytree of arrays, or of `jax.ShapeDtypeStruct`s.
      patterns: regular expressions, each with a spec. Axes that the placement's mesh lacks divide nothing; leaves with
        fewer dimensions than a spec stay as they are.
      placement: where the leaves live, or will.
      host: regular expressions; leaves whose names match one are put into host memory.

    Returns:
      The tree; leaves without a pattern, or with an `UnevenSpec`, stay as they are.

    Raises:
      PlacementError: axes do not divide a dimension evenly.
    """

    def add_spec(path: tuple[Any, ...], leaf: Any) -> Any:
        name = name_of(path)
        shape = np.shape(leaf)
        spec = first_match(patterns, name, shape)
        away = any(matches(pattern, name, shape) for pattern in host)
        if isinstance(spec, UnevenSpec) or not hasattr(leaf, "dtype"):
            return leaf
        target = leaf_sharding(shape, None, placement, Role.NAMED, spec=spec, host=away)
        if target is None:
            return leaf
        check_divides(name, shape, target)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target, weak_type=leaf.weak_type)
        if not isinstance(leaf, jax.Array):
            return jax.device_put(leaf, target)
        if leaf.sharding.is_equivalent_to(target, leaf.ndim):
            return rename_axes(leaf, target)
        if not has_device_order(leaf.sharding, placement.devices):
            leaf = to_placement(leaf, placement)
        if away:
            return jax.device_put(leaf, target)
        return resharding(target)(leaf)

    return jax.tree_util.tree_map_with_path(add_spec, tree)


def check_divides(name: str, shape: Sequence[int], target: NamedSharding) -> None:
    """Raises if a sharding, by a plan or by hand, does not divide a leaf evenly.

    Raises:
      PlacementError: it does not.
    """
    sizes = target.mesh.shape
    for length, entry in zip(shape, target.spec, strict=False):
        names = axes_of(PartitionSpec(entry))
        devices = math.prod(sizes[axis] for axis in names)
        if length % devices == 0:
            continue
        along, beside = names[0], devices // sizes[names[0]]
        fitting = [str(n) for n in range(1, sizes[along] + 1) if length % (n * beside) == 0]
        raise PlacementError(
            f"partition: {quoted(name)} of shape {tuple(shape)} cannot be divided as {target.spec}.",
            facts=[f"the mesh has {dict(sizes)}, and {devices} does not divide {length}"],
            remedies=[
                *([f"a mesh with {' or '.join(fitting)} along {along!r}"] if fitting else []),
                "divide another dimension",
                "give it a pattern of its own, listed earlier: PartitionSpec()",
                "if a plan divides it so, search a plan for this mesh",
            ],
        )


def check_matched(trees: Sequence[Any], patterns: Patterns) -> None:
    """Raises for patterns that match no leaf, or only leaves with too few dimensions.

    Args:
      trees: the arguments that are not split among nodes.
      patterns: the patterns.

    Raises:
      PlacementError: a pattern matches nothing.
    """
    paths = [each for tree in trees for each in jax.tree_util.tree_leaves_with_path(tree)]
    leaves = [(name_of(path), np.shape(leaf)) for path, leaf in paths]
    for pattern, spec in patterns:
        found = [leaf for leaf in leaves if matches(pattern, *leaf)]
        if not found:
            names = [name or f"'' ({quoted(name)})" for name in dict(leaves)]
            if isinstance(pattern, Exactly):
                raise PlacementError(
                    f"the plan was made for arguments with a leaf {pattern!r}; there is none.",
                    facts=[f"leaves are: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"],
                    remedies=["give the arguments that the plan was made for", "or search a plan for these"],
                )
            raise PlacementError(
                f"partition: {pattern!r} matches the name of no leaf.",
                facts=[f"names are: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"],
                remedies=["patterns are regular expressions, searched in these names"],
            )
        most = max(len(shape) for _, shape in found)
        if divided(spec) and most < rank(spec):
            raise PlacementError(
                f"partition: {pattern!r} divides dimension {divided(spec) - 1}, which no leaf has whose name it is "
                "found in."
                if most < divided(spec)
                else f"partition: {pattern!r} is {spec}, for leaves of at least {rank(spec)} dimensions, and no "
                "leaf has as many whose name it is found in.",
                facts=[f"{name}: {several(len(shape), 'dimension')}" for name, shape in found[:12]],
                remedies=["name another dimension; the first is 0", "write no more entries than a leaf has"],
            )
        earlier = {name: next(p for p, _ in patterns if matches(p, name, shape)) for name, shape in found}
        if pattern not in earlier.values():
            raise PlacementError(
                f"partition: {pattern!r} is never used: every leaf that it matches has an earlier pattern.",
                facts=[f"{name}: {first!r}" for name, first in [*earlier.items()][:12]],
                remedies=["the first pattern that matches counts: list special patterns first"],
            )


def rank(spec: PartitionSpec | UnevenSpec) -> int:
    """The fewest dimensions of a leaf to which a spec applies.

    >>> rank(PartitionSpec("model", None)), rank(UnevenSpec(1, "model", (2, 1)))
    (2, 2)
    """
    return spec.dim + 1 if isinstance(spec, UnevenSpec) else len(spec)


def divided(spec: PartitionSpec | UnevenSpec) -> int:
    """The fewest dimensions of a leaf that a spec can divide.

    >>> divided(PartitionSpec(None, "model")), divided(PartitionSpec("model", None)), divided(PartitionSpec())
    (2, 1, 0)
    """
    if isinstance(spec, UnevenSpec):
        return spec.dim + 1
    return max((i + 1 for i, entry in enumerate(spec) if entry is not None), default=0)
