"""Turns the shards that a worker holds of a state into boxes of bytes, and boxes into the shards of another worker.

Knows arrays, shardings and placements. Must not know workers, sockets, nor steps.

An array of several processes lies in boxes: ranges of its dimensions, of which each process has some, and several may
have the same. A worker that needs a box takes it from its own memory if it can, and else from a holder. The
boxes of one array do not overlap unless they are equal, since they are the shards of one sharding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vnode.errors import VnodeError, layout_message
from vnode.placement.host_copy import is_weak, with_weak_type
from vnode.placement.leaf_sharding import fitting_sharding, partition
from vnode.placement.leaves import is_array, is_key
from vnode.placement.placement import Placement

Box = tuple[tuple[int, int], ...]
"""A range ``(start, stop)`` for each dimension of an array."""

PIECE = 16 << 20
"""Bytes above which a box is fetched in pieces, so that several workers send it."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The type of one array of a state, and how it lies; fit for JSON.

    Attributes:
      path: where it is in the state.
      shape: of its data; of typed keys, of their words.
      dtype: of its data.
      spec: over which mesh axes each dimension is divided: a list of names for each, empty for none.
      key: the implementation of typed keys; empty for other arrays.
      weak: whether it is weakly typed.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    key: str = ""
    weak: bool = False

    def to_json(self) -> list[Any]:
        """As lists."""
        return [self.path, list(self.shape), self.dtype, [list(names) for names in self.spec], self.key, self.weak]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Leaf:
        """The reverse of `to_json`."""
        path, shape, dtype, spec, key, weak = said
        return cls(path, tuple(shape), dtype, tuple(tuple(names) for names in spec), key, weak)

    def sharding(self, placement: Placement) -> NamedSharding:
        """The array's sharding on a placement's devices."""
        entries = [None if not names else names[0] if len(names) == 1 else names for names in self.spec]
        return fitting_sharding(placement, self.shape, PartitionSpec(*entries))


@dataclasses.dataclass(frozen=True)
class HeldState:
    """The parts of a state that a worker has.

    Attributes:
      step: how many steps the state has behind it.
      leaves: the state's arrays, in the order of its leaves.
      parts: for each array, the boxes of it that the worker has, in the host's memory.
    """

    step: int
    leaves: tuple[Leaf, ...]
    parts: tuple[Mapping[Box, np.ndarray], ...]

    @classmethod
    def from_state(cls, step: int, state: Any, *, copy: bool = False) -> HeldState:
        """The parts that this process holds of a computed state.

        Args:
          step: how many steps it has behind it.
          state: a pytree of arrays on devices, and other leaves, which are left out.
          copy: whether to copy; otherwise CPUs' arrays are shown as they are, and are not donated in place meanwhile.
        """
        arrays = [leaf for leaf in jax.tree.leaves(state) if is_array(leaf)]
        data = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in arrays]
        return cls(step, types_of(state), tuple(boxes_of(each, copy) for each in data))

    def on_host(self) -> HeldState:
        """The same parts in memory of the host's own, so that no device holds them."""
        parts = tuple({box: np.array(part) for box, part in boxes.items()} for boxes in self.parts)
        return HeldState(self.step, self.leaves, parts)


def types_of(state: Any) -> tuple[Leaf, ...]:
    """The arrays of a state on devices."""
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(state):
        if is_array(leaf):
            leaf = leaf if hasattr(leaf, "shape") else jnp.asarray(leaf)  # a Python number
            key = str(jax.random.key_impl(leaf)) if is_key(leaf) else ""
            data = jax.eval_shape(jax.random.key_data, leaf) if key else leaf
            spec = tuple(names_of(entry) for entry in partition(leaf))
            name = jax.tree_util.keystr(path)
            leaves.append(Leaf(name, tuple(data.shape), str(data.dtype), spec, key, bool(is_weak(leaf))))
    return tuple(leaves)


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def boxes_of(data: Any, copy: bool) -> dict[Box, np.ndarray]:
    """The boxes of an array that this process has."""
    if not isinstance(data, jax.Array):
        return {box_of((slice(None),) * np.ndim(data), np.shape(data)): np.array(data)}
    found: dict[Box, np.ndarray] = {}
    for shard in data.addressable_shards:
        box = box_of(shard.index, data.shape)
        if box not in found:
            found[box] = np.array(shard.data) if copy else np.asarray(shard.data)
    return found


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that slices of an array take.

    >>> box_of((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(cut.indices(length)[:2] for cut, length in zip(index, shape, strict=True))


def intersection(one: Box, other: Box) -> Box | None:
    """The box that two boxes have in common; None if there is none.

    >>> intersection(((0, 4), (0, 8)), ((2, 6), (0, 4))), intersection(((0, 2),), ((2, 4),)), intersection((), ())
    (((2, 4), (0, 4)), None, ())
    """
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in found) else found


def relative_slices(box: Box, of: Box) -> tuple[slice, ...]:
    """The slices that take a box out of the array that another box holds.

    >>> relative_slices(((2, 4),), ((2, 6),))
    (slice(0, 2, None),)
    """
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, of, strict=True))


def split_box(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in pieces of at most `PIECE` bytes each, as far as its first dimension allows."""
    if not box or math.prod(stop - start for start, stop in box) * itemsize <= PIECE:
        yield box
        return
    (start, stop), rest = box[0], box[1:]
    row = math.prod(b - a for a, b in rest) * itemsize
    rows = max(1, PIECE // max(row, 1))
    for first in range(start, stop, rows):
        yield ((first, min(first + rows, stop)), *rest)


def needed_boxes(leaf: Leaf, placement: Placement) -> set[Box]:
    """The boxes of an array that this process needs on a placement's devices."""
    if leaf.weak:  # is made as a whole
        return {box_of((slice(None),) * len(leaf.shape), leaf.shape)}
    indices = leaf.sharding(placement).addressable_devices_indices_map(leaf.shape)
    return {box_of(index, leaf.shape) for index in indices.values() if index is not None}


Request = tuple[int, Box]
"""An array's number, and a box of it."""


def plan_fetches(
    leaves: Sequence[Leaf], own: HeldState | None, others: Mapping[Any, Sequence[Sequence[Box]]], placement: Placement
) -> dict[Any, list[Request]]:
    """Plans which boxes this worker fetches from which holder, so that all send about as much.

    Args:
      leaves: of the state.
      own: the parts that this worker holds itself.
      others: for each other worker, the boxes of each array that it holds.
      placement: where the state is to be.

    Returns:
      For each of the others, the boxes to fetch from it.

    Raises:
      IncompleteState: nobody holds some box.
    """
    asked: dict[Any, list[Request]] = {name: [] for name in others}
    load = dict.fromkeys(others, 0)
    for i, leaf in enumerate(leaves):
        size = jnp.dtype(leaf.dtype).itemsize
        mine = set() if own is None else set(own.parts[i])
        holders: dict[Box, list[Any]] = {}
        for name, boxes in others.items():
            for box in boxes[i]:
                holders.setdefault(box, []).append(name)
        for need in sorted(needed_boxes(leaf, placement)):
            volume = sum(
                math.prod(b - a for a, b in part) for box in mine if (part := intersection(need, box)) is not None
            )
            for box, names in sorted(holders.items()):
                part = intersection(need, box)
                if part is None or box in mine:
                    continue
                volume += math.prod(stop - start for start, stop in part)
                for piece in split_box(part, size):
                    name = min(names, key=lambda name: load[name])
                    load[name] += math.prod(stop - start for start, stop in piece) * size
                    if (i, piece) not in asked[name]:
                        asked[name].append((i, piece))
            if volume < math.prod(stop - start for start, stop in need):
                raise IncompleteState(leaf.path)
    return {name: requests for name, requests in asked.items() if requests}


def is_complete(leaves: Sequence[Leaf], holders: Sequence[Sequence[Iterable[Box]]], *, needed: bool = False) -> bool:
    """Whether some workers together hold all of a state.

    Args:
      leaves: of the state.
      holders: for each of the workers, the boxes of each array that it has, which do not overlap, but that one may be
        within another.
      needed: whether it is an error if they do not.

    Raises:
      IncompleteState: they do not.
    """
    for i, leaf in enumerate(leaves):
        boxes = {tuple(box) for parts in holders for box in parts[i]}
        whole = [box for box in boxes if not any(box != other and intersection(box, other) == box for other in boxes)]
        if sum(map(volume_of, whole)) < math.prod(leaf.shape):
            if needed:
                raise IncompleteState(leaf.path)
            return False
    return True


def volume_of(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


class IncompleteState(VnodeError):
    """No worker that is left holds a part of the state."""

    def __init__(self, path: str) -> None:
        super().__init__(
            layout_message(
                f"no remaining worker holds all of state{path}: it was divided over workers, and one is lost.",
                remedies=["give checkpoint=...: a run whose state is divided over workers needs one to go back to"],
            )
        )


def build_state(
    like: Any,
    leaves: Sequence[Leaf],
    own: HeldState | None,
    fetched: Mapping[Request, np.ndarray],
    placement: Placement,
) -> Any:
    """Builds a state on a placement's devices from held and fetched boxes; all workers must call it.

    Args:
      like: a state of the same structure, whose leaves that are no arrays are taken.
      leaves: the state's arrays.
      own: the parts that this worker holds itself.
      fetched: the fetched boxes, as `plan_fetches` asked for them.
      placement: where the state is to be.
    """
    by_leaf: dict[int, dict[Box, np.ndarray]] = {}
    for (i, box), value in fetched.items():
        by_leaf.setdefault(i, {})[box] = value
    arrays = []
    for i, leaf in enumerate(leaves):
        sources = {**({} if own is None else own.parts[i]), **by_leaf.get(i, {})}
        arrays.append(build_array(leaf, leaf.sharding(placement), part_reader(leaf, sources)))
    rest = iter(arrays)
    return jax.tree.map(lambda each: next(rest) if is_array(each) else each, like)


def part_of(sources: Mapping[Box, np.ndarray], need: Box) -> np.ndarray | None:
    """A box of an array, out of one that holds all of it; None if none does."""
    for box, value in sources.items():
        if intersection(need, box) == need:
            return value[relative_slices(need, box)]
    return None


def part_reader(leaf: Leaf, sources: Mapping[Box, np.ndarray]) -> Callable[[Sequence[slice]], np.ndarray]:
    """A function that reads any part of an array from the boxes that are there."""

    def fill(index: Sequence[slice]) -> np.ndarray:
        need = box_of(index, leaf.shape)
        there = part_of(sources, need)
        if there is not None:
            return there
        out = np.empty([stop - start for start, stop in need], jnp.dtype(leaf.dtype))
        for box, value in sources.items():
            part = intersection(need, box)
            if part is not None:
                out[relative_slices(part, need)] = value[relative_slices(part, box)]
        return out

    return fill


def build_array(leaf: Leaf, sharding: NamedSharding, fill: Callable[[Sequence[slice]], np.ndarray]) -> Any:
    """Builds an array of a sharding; `fill` returns the data of each shard."""
    if leaf.weak and not leaf.key:
        return with_weak_type(fill((slice(None),) * len(leaf.shape)), sharding)
    data = jax.make_array_from_callback(leaf.shape, sharding, cast(Any, fill), dtype=jnp.dtype(leaf.dtype))
    return jax.random.wrap_key_data(data, impl=leaf.key) if leaf.key else data
