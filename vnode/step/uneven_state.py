"""A state with an uneven partition -> leaves stored in padded blocks on unequal devices, and back.

Knows pytrees, patterns, and how blocks are stored. Must not know jaxprs, nor how a step computes with them.

    w: [6, 3], counts (4, 2)   ->   stored: [8, 3], 4 rows on each of two devices, of which the second uses 2

A stored leaf is recognized by two signs: its dimension has the stored length, and it is sharded along the axis. Whether
it is stored with the same counts is asked of `vnode.step.stored_blocks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vnode.errors import PlacementError
from vnode.placement.leaf_sharding import Role, leaf_sharding
from vnode.placement.leaves import shape_of
from vnode.placement.patterns import Pattern, Patterns, by_name, first_match, name_of, quoted
from vnode.placement.placement import Placement
from vnode.placement.sharded import is_sharded_batch
from vnode.placement.uneven_dimension import UnevenSpec
from vnode.runtime.host_prefetch import is_on_host
from vnode.spmd.sharded_program import long_axes
from vnode.spmd.uneven_blocks import Share, restore_program, store
from vnode.step.call import Call, OutputTree
from vnode.step.result_layouts import successors
from vnode.step.stored_blocks import known_share, remember, stored_otherwise


def share_of(patterns: Patterns) -> Share | None:
    """The blocks of all unevenly partitioned leaves; None if there are none.

    Raises:
      ValueError: two patterns have different proportions.
    """
    found = {Share((spec.axis,), spec.blocks): spec for _, spec in patterns if isinstance(spec, UnevenSpec)}
    if len(found) > 1:
        shown = ", ".join(sorted(f"{spec.counts} along {spec.axis!r}" for spec in found.values()))
        raise ValueError(f"partition: all uneven dimensions must use the same proportions, not {shown}")
    return next(iter(found), None)


def spec_of(path: tuple[Any, ...], leaf: Any, patterns: Patterns) -> UnevenSpec | None:
    """The uneven spec of a leaf; None if it has none."""
    spec = first_match(patterns, name_of(path), np.shape(leaf))
    return spec if isinstance(spec, UnevenSpec) else None


def stored_dim(path: tuple[Any, ...], leaf: Any, patterns: Patterns) -> int | None:
    """The dimension along which a leaf is stored in blocks; None if it has its own shape.

    Raises:
      PlacementError: its shape is neither its own nor the stored one.
    """
    spec = spec_of(path, leaf, patterns)
    shape = np.shape(leaf)
    if spec is None or spec.dim >= len(shape):
        return None
    if shape[spec.dim] == spec.room:
        return spec.dim
    if shape[spec.dim] != spec.size:
        raise PlacementError(
            f"partition: {quoted(name_of(path))} of shape {tuple(shape)} has {shape[spec.dim]} indices along "
            f"dimension {spec.dim}, where {spec.size} are divided as {spec.counts}.",
            facts=[f"the stored array has {spec.room}"],
            remedies=["give counts that add up to the dimension", "or list a pattern of its own earlier"],
        )
    return None


def own_shape(leaf: Any, dim: int | None, share: Share | None) -> Any:
    """The shape and dtype of a leaf without the padding of stored blocks."""
    if dim is None or share is None:
        return leaf
    kind = shape_of(leaf)
    shape = list(kind.shape)
    shape[dim] = shape[dim] // (share.max_blocks * len(share.counts)) * share.blocks
    return jax.ShapeDtypeStruct(tuple(shape), kind.dtype, weak_type=kind.weak_type)


def put_by_name(tree: Any, patterns: Patterns, placement: Placement, host: Sequence[Pattern] = ()) -> Any:
    """Places a tree's leaves by patterns of their names; see `vnode.placement.patterns.by_name`.

    Raises:
      PlacementError: counts do not fit a dimension, or axes do not divide one.
      PartitionError: counts do not fit the mesh.
    """
    share = share_of(patterns)
    if share is None or not has_uneven_axis(placement, share):
        return by_name(restore_for_placement(tree, patterns, placement), patterns, placement, host)
    if len(placement.groups) > 1:
        raise PlacementError("an unevenly sharded state needs devices of one program, not groups")
    share.check(long_axes(placement.mesh), next(spec.counts for _, spec in patterns if isinstance(spec, UnevenSpec)))
    if placement.axis in share.axes:
        raise PlacementError(f"the axis {placement.axis!r} divides the nodes: shard a state along another")
    kept: list[tuple[tuple[Any, ...], Any, UnevenSpec]] = []

    def place_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        spec = spec_of(path, leaf, patterns)
        if spec is None or not hasattr(leaf, "dtype") or spec.dim >= len(np.shape(leaf)):
            return leaf
        is_stored = stored_dim(path, leaf, patterns) is not None and is_known_stored(path, leaf, spec)
        along = PartitionSpec(*[None] * spec.dim, spec.axis)
        sharding = leaf_sharding(np.shape(leaf), None, placement, Role.NAMED, spec=along)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = list(leaf.shape)
            shape[spec.dim] = spec.room
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)
        if is_on_host(leaf):
            raise PlacementError(f"partition: {quoted(name_of(path))} is sharded unevenly, and cannot be on the host")
        if is_stored:
            kept.append((path, leaf, spec))
            return leaf
        stored = jax.device_put(store(leaf, spec.dim, share), sharding)
        remember([stored], share)
        return stored

    placed = jax.tree_util.tree_map_with_path(place_leaf, tree, is_leaf=is_sharded_batch)
    check_stored(kept, share)
    return by_name(placed, patterns, placement, host)


def has_uneven_axis(placement: Placement, share: Share) -> bool:
    """Whether a placement's mesh has the uneven axis; without it, no leaf is stored in blocks."""
    return any(name in long_axes(placement.mesh) for name in share.axes)


def restore_for_placement(tree: Any, patterns: Patterns, placement: Placement) -> Any:
    """A tree for a placement: with leaves in their own shapes, if its mesh lacks the uneven axis."""
    share = share_of(patterns)
    return tree if share is None or has_uneven_axis(placement, share) else restore_shapes(tree, patterns)


def lies_along(spec: UnevenSpec, leaf: Any) -> bool:
    """Whether an array is sharded along the axis of an uneven spec, on any devices."""
    names = axes_by_dimension(leaf)
    return len(names) > spec.dim and names[spec.dim] in (spec.axis, (spec.axis,))


def axes_by_dimension(leaf: Any) -> tuple[Any, ...]:
    """The mesh axes along which an array is sharded, as its `PartitionSpec` has them; none if it has no mesh."""
    sharding = getattr(leaf, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def is_known_stored(path: tuple[Any, ...], leaf: Any, spec: UnevenSpec) -> bool:
    """Whether an array of the stored length is stored in blocks, by its sharding.

    Raises:
      PlacementError: it is not sharded so, and the lengths differ: the length may be a mistake.
    """
    if lies_along(spec, leaf) or spec.room == spec.size:
        return lies_along(spec, leaf)
    raise PlacementError(
        f"partition: {quoted(name_of(path))} of shape {tuple(np.shape(leaf))} has the stored length for "
        f"{spec.counts}, but is not known to be sharded along {spec.axis!r}.",
        facts=[f"the dimension itself has {spec.size} indices"],
        remedies=[
            "give leaves in their own shapes, as `get` returns them",
            "or correct the counts",
            "or call the step outside of jax.jit and the like, where the sharding of arrays is known",
        ],
    )


def check_stored(stored: Sequence[tuple[tuple[Any, ...], Any, UnevenSpec]], share: Share) -> None:
    """Checks that leaves in blocks are stored with the counts of their patterns.

    Args:
      stored: paths, leaves on devices, and uneven specs.
      share: the blocks of the patterns.

    Raises:
      PlacementError: one is stored with others.
    """
    wrong = stored_otherwise([leaf for _, leaf, _ in stored], [spec.dim for *_, spec in stored], share)
    if not wrong:
        return
    path, leaf, spec = stored[wrong[0]]
    known = known_share(leaf)
    raise PlacementError(
        f"partition: {quoted(name_of(path))} of shape {tuple(np.shape(leaf))} is not stored with the counts "
        f"{spec.counts}.",
        facts=[
            f"it was stored in blocks of {known.counts}, and {spec.counts} are blocks of {share.counts}"
            if known is not None
            else "its padding is not zeros: it was stored with other counts, or computed outside of a step"
        ],
        remedies=[
            "give the state in its own shapes, as `get` of the step that stored it returns it",
            "to compute with a state outside of steps: step.put(change(step.get(state)))",
            "or call a step with the counts that it was stored with",
        ],
    )


def remember_results(results: Any, share: Share) -> None:
    """Remembers the counts with which a step has stored its results."""
    remember((leaf for leaf in jax.tree.leaves(results) if is_sharded_along(leaf, share)), share)


def is_sharded_along(leaf: Any, share: Share) -> bool:
    """Whether an array is sharded along the axes of a share."""
    names = axes_by_dimension(leaf)
    return share.axes in names or (len(share.axes) == 1 and share.axes[0] in names)


def check_known(args: Sequence[Any], wholes: Sequence[int], patterns: Patterns) -> None:
    """Checks, for arguments within another program, that it is known whether they are stored in blocks.

    Raises:
      PlacementError: it is unknown for one of them.
    """
    if share_of(patterns) is not None:
        for i in wholes:
            for path, leaf in jax.tree_util.tree_leaves_with_path(args[i], is_leaf=is_sharded_batch):
                spec = spec_of(path, leaf, patterns)
                if spec is not None and stored_dim(path, leaf, patterns) is not None:
                    is_known_stored(path, leaf, spec)


def restore_shapes(tree: Any, patterns: Patterns) -> Any:
    """A tree with leaves in their own shapes, or their types: undoes `put_by_name`."""
    share = share_of(patterns)
    if share is None:
        return tree
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sharded_batch)
    stored: list[tuple[tuple[Any, ...], Any, UnevenSpec]] = []
    leaves, several = [leaf for _, leaf in paths], dict[NamedSharding, dict[int, int]]()
    for i, (path, leaf) in enumerate(paths):
        spec = spec_of(path, leaf, patterns)
        length = np.shape(leaf)[spec.dim : spec.dim + 1] if spec is not None else ()
        if spec is None or length != (spec.room,) or not is_known_stored(path, leaf, spec):
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaves[i] = own_shape(leaf, spec.dim, share)
        else:
            several.setdefault(NamedSharding(leaf.sharding.mesh, PartitionSpec()), {})[i] = spec.dim
            stored += [] if is_on_host(leaf) else [(path, leaf, spec)]
    check_stored(stored, share)
    for sharding, dims in several.items():
        values = restore_program(tuple(dims.values()), share, sharding)([leaves[i] for i in dims])
        for i, value in zip(dims, values, strict=True):
            leaves[i] = value
    return jax.tree.unflatten(treedef, leaves)


@dataclasses.dataclass(frozen=True)
class UnevenState:
    """The arrays of a call that are stored in blocks.

    Attributes:
      share: the number of blocks of each device.
      inputs: for each array of the call, the stored dimension, or None.
      outputs: maps the results' own shapes to the same for results. A result that succeeds a stored array is stored so.
    """

    share: Share
    inputs: Sequence[int | None]
    outputs: Callable[[Sequence[Any]], list[int | None]]

    def own_shapes(self, leaves: Sequence[Any]) -> list[Any]:
        """The shapes of arrays without padding."""
        return [own_shape(leaf, dim, self.share) for leaf, dim in zip(leaves, self.inputs, strict=True)]


def find_uneven_state(
    call: Call, output: OutputTree, patterns: Patterns, wholes: Callable[[int], Sequence[int]]
) -> UnevenState | None:
    """Finds the arrays of a call that are stored in blocks; None if there are none.

    Args:
      call: the call.
      output: the structure of the step's result, once it was traced.
      patterns: of names.
      wholes: gives the positions of the unsplit arguments, for a number of arguments.
    """
    share = share_of(patterns)
    if share is None:
        return None
    args, _ = jax.tree.unflatten(call.treedef, call.leaves)
    split = wholes(len(args))
    dims: list[int | None] = []
    for i, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg, is_leaf=is_sharded_batch):
            dims.append(stored_dim(path, leaf, patterns) if i in split else None)
    count = len(dims)
    dims += [None] * (len(call.leaves) - count)
    if not any(dim is not None for dim in dims):
        return None

    def outputs(types: Sequence[Any]) -> list[int | None]:
        own = [own_shape(leaf, dim, share) for leaf, dim in zip(call.leaves, dims, strict=True)]
        given = jax.tree.unflatten(call.treedef, own)[0]
        before = successors(output.unflatten(types), given, [dim is not None for dim in dims[:count]])
        return [None if i is None else dims[i] for i in before]

    return UnevenState(share, dims, outputs)
