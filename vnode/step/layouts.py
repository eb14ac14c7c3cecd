"""What the layout of a step's results follows: a state comes back in the shards that it came in.

Knows pytrees and shardings. Must not know jaxprs or nodes.

A result is taken for the successor of an argument if it stands at the same path, counted from the end, and has the same
shape and dtype: ``state.params["w"]`` of what is returned, and ``params["w"]`` of the second argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from vnode.placement.context import is_typed
from vnode.placement.patterns import axes_of
from vnode.placement.placement import Placement
from vnode.placement.sharded import is_sharded_batch
from vnode.placement.transfer import named_so, short, target_sharding
from vnode.runtime.away import is_away

Specs = tuple[PartitionSpec | None, ...]


class Surroundings(NamedTuple):
    """What a program depends on besides its arguments' types.

    Attributes:
      mesh: the mesh context in which the step is traced; None: that of the program around it, if any.
      specs: what `specs_of` says of the arguments.
    """

    mesh: Mesh | None = None
    specs: Specs = ()


def specs_of(args: Sequence[Any], wholes: Sequence[int], placement: Placement) -> Specs:
    """How the leaves of arguments are laid out over the placement's mesh.

    Args:
      args: arrays or `jax.ShapeDtypeStruct`s in pytrees.
      wholes: the positions of the arguments of which nothing is split.
      placement: where they are.

    Returns:
      A spec for every leaf of all arguments; None where it is split, or says nothing. Empty if the mesh has no axes
      besides that of the nodes, and nothing is sharded over that.
    """
    specs: list[PartitionSpec | None] = []
    for i, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg, is_leaf=is_sharded_batch):
            says = i in wholes and isinstance(getattr(leaf, "sharding", None), NamedSharding)
            specs.append(short(target_sharding(leaf, placement).spec) if says else None)
    return tuple(specs) if len(placement.devices) > placement.size or any(specs) else ()


def types_of(args: Sequence[Any], wholes: Sequence[int]) -> Specs:
    """The same of arguments within a program, as far as a mesh with explicit axes is part of their types."""
    return tuple(
        jax.typeof(leaf).sharding.spec if i in wholes and is_typed(leaf) else None
        for i, arg in enumerate(args)
        for leaf in jax.tree.leaves(arg, is_leaf=is_sharded_batch)
    )


def laid_out(results: Any, args: Sequence[Any], specs: Specs, mesh: Mesh | AbstractMesh) -> Any:
    """Results in the layouts of the arguments that they succeed, and in the memory, the host's or that of devices.

    Args:
      results: a pytree of arrays.
      args: the arguments of the step.
      specs: what `specs_of` or `types_of` says of them.
      mesh: that which specs speak of.

    Returns:
      The same pytree.
    """
    given = jax.tree.leaves(tuple(args), is_leaf=is_sharded_batch)
    away = [not is_sharded_batch(leaf) and is_away(leaf) for leaf in given]
    if not specs and not any(away):
        return results
    lay: Any = reshard if AxisType.Explicit in mesh.axis_types else lax.with_sharding_constraint
    leaves, treedef = jax.tree.flatten(results)
    said = specs or (None,) * len(given)
    before = successors(results, args, [spec is not None or there for spec, there in zip(said, away, strict=True)])

    def place(leaf: Any, i: int) -> Any:
        if said[i] is not None:
            leaf = lay(leaf, NamedSharding(mesh, cast(PartitionSpec, said[i])))
        return jax.device_put(leaf, jax.memory.Space.Host) if away[i] else leaf

    placed = [leaf if i is None else place(leaf, i) for leaf, i in zip(leaves, before, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def named_again(results: Any, args: Sequence[Any], specs: Specs, mesh: Mesh) -> Any:
    """Results that name the axes that the arguments name which they succeed; XLA does not, if there is one device.

    Args:
      results: arrays in a pytree.
      args: the arguments of the step.
      specs: what `specs_of` says of them.
      mesh: that which specs speak of.

    Returns:
      The same pytree, of the same buffers.
    """
    if not any(mesh.shape[name] == 1 for spec in specs if spec is not None for name in axes_of(spec)):
        return results
    leaves, treedef = jax.tree.flatten(results)

    def named(leaf: Any, spec: PartitionSpec | None) -> Any:
        if spec is None:
            return leaf
        target = NamedSharding(mesh, spec, memory_kind=leaf.sharding.memory_kind)
        return named_so(leaf, target) if leaf.sharding.is_equivalent_to(target, leaf.ndim) else leaf

    return jax.tree.unflatten(treedef, map(named, leaves, specs_after(results, args, specs)))


def specs_after(results: Any, args: Sequence[Any], specs: Specs) -> list[PartitionSpec | None]:
    """For each leaf of a step's results how it will be laid out, as `laid_out` has it; None where nobody says."""
    before = successors(results, args, [spec is not None for spec in specs])
    return [None if i is None else specs[i] for i in before]


def successors(results: Any, args: Sequence[Any], counting: Sequence[bool]) -> list[int | None]:
    """For each leaf of a step's results, the number of the arguments' leaf that it succeeds; None for most.

    Args:
      results: a pytree of arrays, or of what stands for them.
      args: the arguments of the step, likewise.
      counting: whether a leaf of the arguments can have a successor.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args), is_leaf=is_sharded_batch)
    given = {
        (path[1:], leaf.shape, leaf.dtype): i
        for i, ((path, leaf), counts) in enumerate(zip(leaves, counting, strict=True))
        if counts
    }

    def before(path: Any, leaf: Any) -> int | None:
        for start in range(len(path) + 1):
            found = given.get((path[start:], leaf.shape, leaf.dtype)) if path[start:] or start < 2 else None
            if found is not None:
                return found
        return None

    return [before(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(results)]
