"""Results and arguments of a step -> results in the shardings of the arguments that they succeed.

Knows pytrees and shardings. Must not know jaxprs or nodes.

A result succeeds an argument's leaf if it has the same path, counted from the end, and the same shape and dtype:
``state.params["w"]`` of the result, and ``params["w"]`` of the second argument. Arguments that are returned whole are
matched first. Equal arguments (parameters and their momentum) are matched in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from vnode.placement.leaf_sharding import put_sharding, trim_spec
from vnode.placement.placement import Placement
from vnode.placement.sharded import is_sharded_batch
from vnode.placement.trace_context import is_typed
from vnode.placement.transfer import resharding
from vnode.runtime.host_prefetch import is_on_host

Specs = tuple[PartitionSpec | None, ...]


class ProgramContext(NamedTuple):
    """The context that a program depends on, besides its arguments' types.

    Attributes:
      mesh: the mesh context in which the step is traced; None for that of the surrounding program, if any.
      specs: the arguments' specs (`specs_of`).
      in_place: whether arguments are on the placement's devices, as specs say, rather than within another program.
    """

    mesh: Mesh | None = None
    specs: Specs = ()
    in_place: bool = False


def specs_of(args: Sequence[Any], wholes: Sequence[int], placement: Placement) -> Specs:
    """The specs of arguments' leaves over the placement's mesh.

    Args:
      args: arrays or `jax.ShapeDtypeStruct`s in pytrees.
      wholes: the positions of the unsplit arguments.
      placement: where they are.

    Returns:
      A spec for every leaf of all arguments; None for a split leaf, and for one without a `NamedSharding`. Empty if the
      mesh has no axes besides that of the nodes, and no leaf is sharded over that.
    """
    specs: list[PartitionSpec | None] = []
    for i, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg, is_leaf=is_sharded_batch):
            has_spec = i in wholes and isinstance(getattr(leaf, "sharding", None), NamedSharding)
            specs.append(trim_spec(put_sharding(leaf, placement).spec) if has_spec else None)
    return tuple(specs) if len(placement.devices) > placement.size or any(specs) else ()


def typed_specs(args: Sequence[Any], wholes: Sequence[int]) -> Specs:
    """The specs of arguments within a program, from types with explicit mesh axes."""
    return tuple(
        jax.typeof(leaf).sharding.spec if i in wholes and is_typed(leaf) else None
        for i, arg in enumerate(args)
        for leaf in jax.tree.leaves(arg, is_leaf=is_sharded_batch)
    )


def constrain_results(results: Any, args: Sequence[Any], specs: Specs, mesh: Mesh | AbstractMesh) -> Any:
    """Constrains results to the shardings and the memory (host or device) of the arguments that they succeed.

    Args:
      results: a pytree of arrays.
      args: the arguments of the step.
      specs: of the arguments (`specs_of` or `typed_specs`).
      mesh: the mesh of the specs.

    Returns:
      The same pytree.
    """
    given = jax.tree.leaves(tuple(args), is_leaf=is_sharded_batch)
    on_host = [not is_sharded_batch(leaf) and is_on_host(leaf) for leaf in given]
    if not specs and not any(on_host):
        return results
    constrain: Any = reshard if AxisType.Explicit in mesh.axis_types else lax.with_sharding_constraint
    leaves, treedef = jax.tree.flatten(results)
    leaf_specs = specs or (None,) * len(given)
    counting = [spec is not None or host for spec, host in zip(leaf_specs, on_host, strict=True)]
    before = successors(results, args, counting)

    def constrain_leaf(leaf: Any, i: int) -> Any:
        if leaf_specs[i] is not None:
            leaf = constrain(leaf, NamedSharding(mesh, cast(PartitionSpec, leaf_specs[i])))
        return jax.device_put(leaf, jax.memory.Space.Host) if on_host[i] else leaf

    placed = [leaf if i is None else constrain_leaf(leaf, i) for leaf, i in zip(leaves, before, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def replicated_specs(args: Sequence[Any], wholes: Sequence[int]) -> Specs:
    """The specs that `specs_of` omits where nothing is sharded: unsplit arguments are replicated."""
    return tuple(
        PartitionSpec() if i in wholes else None
        for i, arg in enumerate(args)
        for _ in jax.tree.leaves(arg, is_leaf=is_sharded_batch)
    )


class ShardingRestorer:
    """Gives results exactly the shardings of the arguments that they succeed.

    After `constrain_results` they are equivalent, but XLA drops unsharded dimensions at a spec's end, axes of size one,
    and the sharding of empty arrays. A state must keep its sharding for the user, and for the cache of programs.
    """

    def __init__(self) -> None:
        self._pairs: dict[Any, list[tuple[int, int]]] = {}

    def __call__(self, results: Any, args: Sequence[Any], wholes: Sequence[int]) -> Any:
        """Renames shardings, without a copy.

        Args:
          results: arrays in a pytree.
          args: the arguments of the step, as it was called with them.
          wholes: the positions of the unsplit arguments.

        Returns:
          The same pytree.
        """
        given, before = jax.tree.flatten(tuple(args), is_leaf=is_sharded_batch)
        leaves, after = jax.tree.flatten(results)
        key = (before, after, tuple((leaf.shape, leaf.dtype) for leaf in (*given, *leaves)))
        if key not in self._pairs:
            counting = [i in wholes for i, arg in enumerate(args) for _ in leaves_of(arg)]
            found = enumerate(successors(results, args, counting))
            self._pairs[key] = [(k, i) for k, i in found if i is not None]
        renamed: list[int] = []
        targets: list[Any] = []
        for k, i in self._pairs[key]:
            now, target = leaves[k].sharding, given[i].sharding
            if now == target or not isinstance(target, NamedSharding):
                continue
            if leaves[k].size == 0 and not leaves[k].is_fully_addressable:
                leaves[k] = empty_array(leaves[k], target)
            elif leaves[k].size == 0 or now.is_equivalent_to(target, leaves[k].ndim):
                renamed.append(k)
                targets.append(target)
            else:
                leaves[k] = resharding(target)(leaves[k])
        if renamed:
            for k, leaf in zip(renamed, jax.device_put([leaves[k] for k in renamed], targets), strict=True):
                leaves[k] = leaf
        return jax.tree.unflatten(after, leaves)

    def clear(self) -> None:
        """Forgets which results succeed which arguments."""
        self._pairs.clear()


def empty_array(leaf: jax.Array, target: NamedSharding) -> jax.Array:
    """An empty array on devices of several processes, each of which makes its own shards."""
    part = target.shard_shape(leaf.shape)
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.make_array_from_callback(leaf.shape, target, lambda _: np.zeros(part, leaf.dtype))
    return jax.device_put(leaf, target)


def leaves_of(arg: Any) -> list[Any]:
    """The leaves of an argument; a sharded batch is one."""
    return jax.tree.leaves(arg, is_leaf=is_sharded_batch)


def result_specs(results: Any, args: Sequence[Any], specs: Specs) -> list[PartitionSpec | None]:
    """The spec of each leaf of a step's results after `constrain_results`; None where it is unknown."""
    before = successors(results, args, [spec is not None for spec in specs])
    return [None if i is None else specs[i] for i in before]


def successors(results: Any, args: Sequence[Any], counting: Sequence[bool]) -> list[int | None]:
    """For each leaf of a step's results, the number of the arguments' leaf that it succeeds; None if there is none.

    Args:
      results: a pytree of arrays, or of shapes.
      args: the arguments of the step, likewise.
      counting: whether a leaf of the arguments can have a successor.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args), is_leaf=is_sharded_batch)
    after = jax.tree_util.tree_leaves_with_path(results)
    found = whole_successors(after, leaves, counting)
    given: dict[Any, list[int]] = {}
    for i, ((path, leaf), counts) in enumerate(zip(leaves, counting, strict=True)):
        if counts:
            given.setdefault((path[1:], leaf.shape, leaf.dtype), []).append(i)

    def predecessor(path: Any, leaf: Any) -> int | None:
        for start in range(len(path) + 1):
            several = given.get((path[start:], leaf.shape, leaf.dtype)) if path[start:] or start < 2 else None
            if several is not None:
                return next((i for i in several if i not in found.values()), several[0])
        return None

    return [
        (found[k] if counting[found[k]] else None) if k in found else predecessor(path, leaf)
        for k, (path, leaf) in enumerate(after)
    ]


def whole_successors(
    results: Sequence[tuple[Any, Any]], given: Sequence[tuple[Any, Any]], counting: Sequence[bool]
) -> dict[int, int]:
    """Matches arguments that are returned whole: numbers of results' leaves -> numbers of arguments' leaves.

    The largest argument comes first, so that a copy of the parameters does not match those of a state.

    Args:
      results: the leaves of a step's results, with their paths.
      given: the same of its arguments.
      counting: whether a leaf of the arguments can have a successor.
    """
    several: dict[Any, list[int]] = {}
    for i, (path, _) in enumerate(given):
        several.setdefault(path[0], []).append(i)
    found: dict[int, int] = {}
    for numbers in sorted(several.values(), key=len, reverse=True):
        if not any(counting[i] for i in numbers):
            continue
        inner = [given[i][0][1:] for i in numbers]
        kinds = [(given[i][1].shape, given[i][1].dtype) for i in numbers]
        for k in range(len(results) - len(numbers) + 1):
            there = results[k : k + len(numbers)]
            prefix = there[0][0][: len(there[0][0]) - len(inner[0])]
            if (
                all(path == (*prefix, *own) for (path, _), own in zip(there, inner, strict=True))
                and all((leaf.shape, leaf.dtype) == kind for (_, leaf), kind in zip(there, kinds, strict=True))
                and (inner[0] or len(prefix) < 2)
                and found.keys().isdisjoint(range(k, k + len(numbers)))
            ):
                found.update(zip(range(k, k + len(numbers)), numbers, strict=True))
                break
    return found
