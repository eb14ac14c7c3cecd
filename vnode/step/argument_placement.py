"""The arguments of a call -> the same arguments on the devices, and in the shardings, of a placement's programs.

    ArgumentPlacer(spec, placement)((state on one device, batch of NumPy), {})
        -> (state on all devices of the placement, the batch as it is: jax.jit divides it), {}

A step's own results are known to be in place; their leaves are not visited. An array that successive calls pass from
elsewhere is transferred once. All other leaves are transferred in each call, the uncommitted ones together.

Knows where arrays lie, and which arguments of a step are not split. Must not know programs.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding

from vnode.placement.donated import donated_leaves, is_array_class
from vnode.placement.leaf_sharding import (
    Role,
    committed_sharding,
    has_device_order,
    is_explicit,
    leaf_sharding,
    memory_kind,
    partition,
)
from vnode.placement.leaves import is_number
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import exchange_arrays
from vnode.placement.sharded import ShardedBatch, is_sharded_batch
from vnode.placement.transfer import tracing, transfer
from vnode.placement.world import is_shared, world_of
from vnode.step.argument_checks import check_arguments, check_donated_once, has_repeated_array
from vnode.step.call import is_static, wrap
from vnode.step.spec import StepSpec
from vnode.step.uneven_state import check_known, put_by_name


class ArgumentPlacer:
    """Places arguments for the programs of a placement.

    Args:
      spec: the step.
      placement: where its nodes live.

    Attributes:
      in_place: arguments that are known to be in place.
      sharded: whether unsplit arguments may be sharded: the mesh has further axes, or one was sharded before.
      several: whether the placement has several devices.
      across: whether the placement's devices belong to several processes.
      wholes: gives the positions of the unsplit arguments, for a number of positional arguments.
    """

    def __init__(self, spec: StepSpec, placement: Placement) -> None:
        self.spec = spec
        self.placement = placement
        self.wholes = functools.cache(spec.unsplit_positions)
        self.several = len(placement.devices) > 1
        self.across = is_shared(world_of(placement.devices))
        self.sharded = len(placement.devices) > placement.size
        self.in_place = PlacedArguments(self.several)
        self._given_again = RepeatedArguments()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as programs take them: leaves that are no arrays as structure, unsplit arguments in place.

        Without that, the first call with a state would use one program, and the call with its result another.

        Raises:
          VnodeError: an array is deleted, or donated and passed in a second place.
          PlacementError: it is unknown whether a traced array is stored in uneven blocks.
        """
        args, kwargs = self.spec.with_static(args, kwargs)
        unsplit = self.wholes(len(args))
        if tracing():
            check_known(args, unsplit, self.spec.options.patterns)
            return wrap(args, 0, names=self.spec.positional), wrap(kwargs, 1)
        moving = {i: arg for i, arg in enumerate(args) if not is_static(arg) and arg not in self.in_place}
        check_arguments(moving, kwargs, self.spec.donate_argnums, self.spec.positional)
        placed = tuple(self._place_in_order(args, unsplit, moving))
        if kwargs:
            kwargs = self._transfer_tree(
                kwargs, False, self._mesh_known(dict(enumerate(placed)), unsplit, moving), (1,)
            )
        donated = self.spec.donate_argnums if self.several else ()
        if donated and (not moving.keys().isdisjoint(donated) or has_repeated_array((placed, kwargs))):
            check_donated_once(placed, kwargs, donated, self.spec.positional)
        return placed, kwargs

    def are_placed(self, tree: Any) -> bool:
        """Whether all arrays of an argument are on the placement's devices."""
        leaves = jax.tree.leaves(tree, is_leaf=is_sharded_batch)
        return all(
            leaf.placement == self.placement
            if isinstance(leaf, ShardedBatch)
            else isinstance(leaf, jax.Array)
            and leaf.committed
            and has_device_order(leaf.sharding, self.placement.devices)
            for leaf in leaves
        )

    def role(self, present: Sharding | None, whole: bool) -> Role:
        """The role of an argument's leaf. Several processes exchange leaves that are not on the placement's devices.

        Args:
          present: its sharding; None if it is not committed to devices.
          whole: whether its argument is not split.
        """
        if self.across:
            there = present is not None and has_device_order(present, self.placement.devices)
            if not there or is_explicit(present):
                return Role.PUT
        return Role.UNSPLIT if whole else Role.SPLIT

    def clear(self) -> None:
        """Forgets all arguments."""
        self.in_place.clear()
        self._given_again.clear()

    def _place_in_order(self, args: Sequence[Any], unsplit: Sequence[int], moving: Mapping[int, Any]) -> Iterator[Any]:
        """Places arguments one by one.

        Args:
          args: positional arguments.
          unsplit: positions of the unsplit arguments.
          moving: arguments that are not known to be in place, by position.
        """
        mesh_known = False
        for i, arg in enumerate(args):
            if i in moving:
                placed = self._place_argument(arg, i in unsplit, mesh_known, i)
            else:
                placed = arg
                self._given_again.forget(i)
            mesh_known = mesh_known or self._mesh_known({i: placed}, unsplit, moving)
            yield placed

    @staticmethod
    def _mesh_known(placed: Mapping[int, Any], unsplit: Sequence[int], moving: Mapping[int, Any]) -> bool:
        """Whether one of some placed arguments is on the placement's mesh, so that jax knows the mesh."""
        there = ((i, arg) for i, arg in placed.items() if i in unsplit and not is_static(arg))
        return any(i not in moving or first_leaf(arg) is not None for i, arg in there)

    def _place_argument(self, arg: Any, whole: bool, mesh_known: bool, number: int) -> Any:
        """Places the argument at a position, or reuses the copy of the last call."""
        bring = functools.partial(self._transfer_tree, whole=whole, mesh_known=mesh_known, place=(0, number))
        if not whole or self.across or number in self.spec.donate_argnums:
            return bring(arg)  # batches change with each call, and donated arrays are deleted
        return self._given_again(number, arg, bring)

    def _transfer_tree(self, tree: Any, whole: bool, mesh_known: bool, place: tuple[int, ...]) -> Any:
        """Places an argument.

        Args:
          tree: the argument, or all keyword arguments.
          whole: whether it is not split.
          mesh_known: whether an earlier argument is on the placement's mesh, so that jax knows the mesh.
          place: its path in ``(args, kwargs)``; for messages.
        """
        wrapped = wrap(tree, *place, names=self.spec.positional)
        patterns, host = self.spec.options.patterns, self.spec.plan.host
        if whole and (patterns or host):
            wrapped = put_by_name(wrapped, patterns, self.placement, host)
        leaves, treedef = jax.tree.flatten(wrapped, is_leaf=is_sharded_batch)
        if self.across:
            placed = self._exchange(wrapped, leaves, whole, mesh_known)
        elif whole:
            placed = self._replicate(leaves)
        else:
            placed = [transfer(leaf, self.placement, Role.SPLIT, mesh_known=mesh_known) for leaf in leaves]
        if whole and not self.sharded:
            self.sharded = any(partition(leaf) != PartitionSpec() for leaf in placed)
        same = all(a is b for a, b in zip(leaves, placed, strict=True))
        return wrapped if same else jax.tree.unflatten(treedef, placed)

    def _replicate(self, leaves: Sequence[Any]) -> list[Any]:
        """Places unsplit arrays on all devices; transfers uncommitted ones together."""
        placed = list(leaves)
        target = leaf_sharding((), None, self.placement, Role.UNSPLIT)
        assert target is not None
        together = [k for k, leaf in enumerate(leaves) if is_uncommitted(leaf, memory_kind(target))]
        for k in set(range(len(placed))).difference(together):
            placed[k] = transfer(placed[k], self.placement, Role.UNSPLIT)
        if together:
            brought = jax.device_put([leaves[k] for k in together], target)
            for k, leaf in zip(together, brought, strict=True):
                placed[k] = leaf
        return placed

    def _exchange(self, tree: Any, leaves: list[Any], whole: bool, mesh_known: bool) -> list[Any]:
        """Places arrays for a program of several processes; compares those that each process passes whole."""
        elsewhere, placed = list[int](), list(leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, ShardedBatch):
                if leaf.placement == self.placement:
                    continue
                placed[i] = leaf = leaf.whole()
            role = self.role(committed_sharding(leaf), whole)
            if role is Role.PUT:
                elsewhere.append(i)
            else:
                placed[i] = transfer(leaf, self.placement, role, mesh_known=mesh_known)
        if elsewhere:
            paths = [path for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_sharded_batch)]
            names = [jax.tree_util.keystr(paths[i]) or "an argument" for i in elsewhere]
            arrived = exchange_arrays([placed[i] for i in elsewhere], self.placement, names, batch=not whole)
            for i, leaf in zip(elsewhere, arrived, strict=True):
                placed[i] = leaf
        return placed


class PlacedArguments:
    """A record of arguments whose leaves are all arrays on the placement's devices.

    It holds an argument's id and a weak reference to one of its arrays. While the array is alive, so is most likely the
    argument.

    Args:
      several: whether there are several devices, on which jaxlib 0.10 crashes with deleted arrays.
    """

    def __init__(self, several: bool) -> None:
        self._several = several
        self._known: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, tree: Any) -> bool:
        known = self._known.get(id(tree))
        array = None if known is None else known()
        if array is None or array.is_deleted():
            return False
        return not (self._several and donated_leaves(tree, ""))

    def renew(self, trees: Iterable[Any]) -> None:
        """Forgets all trees but these."""
        known: dict[int, weakref.ref[Any]] = {}
        for tree in trees:
            array = self._known.get(id(tree))
            array = None if array is None or array() is None else array
            if array is None and (first := first_leaf(tree)) is not None:
                array = weakref.ref(first)
            if array is not None:
                known[id(tree)] = array
        self._known = known

    def clear(self) -> None:
        """Forgets all trees."""
        self._known = {}


class RepeatedArguments:
    """A cache of placed copies of arguments that successive calls repeat.

    An evaluation passes the same parameters to each call, maybe from a single device. If the second call has the arrays
    of the first, their copies are kept for the third, until a call has others or an array is deleted. A state that is
    passed once, as a loop's first one, is held once.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Any, list[Callable[[], Any]], Any]] = {}

    def __call__(self, number: int, tree: Any, bring: Callable[[Any], Any]) -> Any:
        """Places an argument, or returns its cached copy.

        Args:
          number: position of the argument.
          tree: the argument.
          bring: places an argument.
        """
        leaves, treedef = jax.tree.flatten(tree)
        kind = treedef, jax.config.jax_enable_x64  # by which numbers have their types
        before, sources, placed = self._last.pop(number, (None, [], None))
        same = before is not None and kind == before
        same = same and all(map(operator.is_, (source() for source in sources), leaves))
        if not same or placed is None or donated_leaves(placed, ""):
            del placed  # free its memory first
            placed = bring(tree)
        if placed is tree:
            return tree
        if not same:
            if not all(is_array_class(type(leaf)) or is_number(leaf) for leaf in leaves):  # the others may change
                return placed
            sources = [self._source(leaf, number) for leaf in leaves]
        self._last[number] = kind, sources, placed if same else None
        return placed

    def _source(self, leaf: Any, number: int) -> Callable[[], Any]:
        """A reference to a leaf: a weak one to an array."""
        return (lambda: leaf) if is_number(leaf) else weakref.ref(leaf, lambda _: self.forget(number))

    def forget(self, number: int) -> None:
        """Drops the copy of an argument."""
        self._last.pop(number, None)

    def clear(self) -> None:
        """Drops all copies."""
        self._last.clear()


def is_uncommitted(leaf: Any, memory: str) -> bool:
    """Whether a leaf is uncommitted: a number, an array of NumPy, or an uncommitted one of jax.

    Args:
      leaf: an array or a number.
      memory: the memory kind that an array of jax must have.
    """
    if isinstance(leaf, jax.Array):
        there = isinstance(leaf.sharding, SingleDeviceSharding) and leaf.sharding.memory_kind in (None, memory)
        return there and not leaf.committed
    return isinstance(leaf, np.ndarray | np.generic) or is_number(leaf)


def first_leaf(tree: Any) -> jax.Array | None:
    """The first leaf of a pytree if that is a jax array, found without visiting the others."""
    levels = [iter((tree,))]
    while levels:
        for child in levels[-1]:
            if is_array_class(type(child)):
                return child
            if child is not None:
                level = jax.tree_util.default_registry.flatten_one_level(child)
                if level is None:  # another leaf
                    return None
                levels.append(iter(level[0]))
                break
        else:
            levels.pop()
    return None
