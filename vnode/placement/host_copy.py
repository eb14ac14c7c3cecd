"""A state between two steps: copied to the host and back, told apart leaf by leaf.

Knows arrays, random keys and shardings. Must not know steps, nor where copies are kept.

A state is any pytree. Leaves that are no arrays (functions in a `TrainState`, names) are passed through. What must
survive a copy for the next step to be the same program with the same bits: values, dtypes, the implementation of
typed random keys, and weak types (those of a state's Python numbers), which decide what ``bfloat16 * leaf`` is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vnode.placement.leaves import is_array, is_key, shape_of
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import exchange_arrays, global_array, replicate_in_processes
from vnode.placement.transfer import fitting_sharding, partition
from vnode.placement.world import is_shared


def abstract(leaf: Any) -> Any:
    """Shape, dtype and sharding of a leaf that is an array; any other leaf as it is."""
    return shape_of(leaf, sharding="keep") if is_array(leaf) else leaf


def is_weak(leaf: Any) -> bool:
    """Whether an array is weakly typed, as Python numbers are."""
    return getattr(leaf, "weak_type", False)


def to_numpy(leaf: Any) -> Any:
    """An array as NumPy has it; keys and other leaves as they are. (`jax.device_get` takes ten times as long.)

    An array of several processes must be whole in this one (`vnode.placement.process_arrays.replicate_in_processes`).
    """
    return np.array(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf


def with_weak_type(value: Any, sharding: NamedSharding) -> jax.Array:
    """A weakly typed array of these values; there are such of Python's types only."""
    if not sharding.is_fully_addressable:
        there = not isinstance(value, jax.Array) or value.sharding.addressable_devices
        whole = np.asarray(value) if there else np.zeros(value.shape, value.dtype)
        return global_array(whole, sharding, weak=True)
    numbers = [jax.device_put(number) for number in np.asarray(value).reshape(-1).tolist()]
    array = jnp.stack(numbers).reshape(np.shape(value)) if np.shape(value) else numbers[0]
    return jax.device_put(array if array.dtype == value.dtype else value, sharding)


@dataclasses.dataclass(frozen=True)
class HostParts:
    """What this process has of an array of several processes, in the host's memory."""

    shape: tuple[int, ...]
    sharding: Any
    dtype: Any
    parts: dict[str, np.ndarray]
    key: Any
    weak: bool

    @classmethod
    def copy(cls, leaf: jax.Array) -> HostParts:
        """Copies this process's parts of a leaf; waits for them."""
        weak = is_weak(leaf)
        leaf = replicate_in_processes(leaf) if weak else leaf  # there are weak types of whole arrays only
        key = jax.random.key_impl(leaf) if is_key(leaf) else None
        data = leaf if key is None else jax.random.key_data(leaf)
        parts = {}
        for shard in data.addressable_shards:
            if str(shard.index) not in parts:
                parts[str(shard.index)] = np.array(shard.data, copy=True)
        return cls(data.shape, data.sharding, data.dtype, parts, key, weak)

    def rebuild(self) -> jax.Array:
        """The array as it was, where it was. All processes that have a part must call it."""
        if self.weak:
            whole = next(iter(self.parts.values()), np.zeros(self.shape, self.dtype))
            array = with_weak_type(whole, self.sharding)
        else:
            array = jax.make_array_from_callback(
                self.shape, self.sharding, lambda index: self.parts[str(index)], dtype=self.dtype
            )
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


@dataclasses.dataclass(frozen=True)
class HostLeaf:
    """One array in the host's memory: its bits, and what else makes it the array it was."""

    bits: np.ndarray
    spec: PartitionSpec
    key: Any
    weak: bool

    @classmethod
    def copy(cls, leaf: jax.Array) -> HostLeaf:
        """Copies a leaf; waits for its value."""
        spec, key = partition(leaf), jax.random.key_impl(leaf) if is_key(leaf) else None
        data = leaf if key is None else jax.random.key_data(leaf)
        return cls(np.array(data, copy=True), spec, key, is_weak(leaf))  # a view would keep a donated buffer alive

    def place_on(self, placement: Placement) -> jax.Array:
        """The array on a placement's devices."""
        sharding = fitting_sharding(placement, self.bits.shape, self.spec)
        if self.weak and self.bits.size:
            return with_weak_type(self.bits, sharding)
        # On a CPU the array may share the copy's memory; if it is donated, XLA does not overwrite what is not its own.
        array = jax.device_put(self.bits, sharding)
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A state in the host's memory; no device is needed to keep it."""

    leaves: tuple[Any, ...]
    treedef: Any

    @classmethod
    def from_state(cls, state: Any) -> HostCopy:
        """Copies a state. Waits until it is computed, so what is copied is known to be good.

        In several processes each copies its parts.
        """
        leaves, treedef = jax.tree.flatten(state)
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and not is_key(leaf) and leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        kind = HostParts if is_shared() else HostLeaf
        return cls(tuple(kind.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves), treedef)

    def place_on(self, placement: Placement) -> Any:
        """The state on a placement's devices. All processes concerned must call it."""
        leaves = [leaf.place_on(placement) if isinstance(leaf, HostLeaf) else leaf for leaf in self.leaves]
        parted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, HostParts)]
        arrays = [self.leaves[i].rebuild() for i in parted]
        for i, array in zip(
            parted, exchange_arrays(arrays, placement, [f"array {i} of the copy" for i in parted]), strict=True
        ):
            leaves[i] = array
        return jax.tree.unflatten(self.treedef, leaves)
