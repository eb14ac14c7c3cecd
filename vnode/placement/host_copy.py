"""State on devices -> copy in host memory -> the same state, leaf by leaf.

Knows arrays, random keys and shardings. Must not know steps, nor where copies are kept.

A state is any pytree. Leaves that are not arrays (functions in a `TrainState`, names) pass through. The next step must
be the same program with the same bits. So a copy keeps values, dtypes, the implementation of typed random keys, and
weak types (of Python numbers in a state), which decide the dtype of ``bfloat16 * leaf``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vnode.placement.leaf_sharding import fitting_sharding, partition
from vnode.placement.leaves import is_array, is_key, shape_of
from vnode.placement.placement import Placement
from vnode.placement.process_arrays import exchange_arrays, global_array, replicate_in_processes
from vnode.placement.world import is_shared


def abstract(leaf: Any) -> Any:
    """Shape, dtype and sharding of an array leaf; any other leaf unchanged."""
    return shape_of(leaf, sharding="keep") if is_array(leaf) else leaf


def is_weak(leaf: Any) -> bool:
    """Whether an array is weakly typed, as Python numbers are."""
    return getattr(leaf, "weak_type", False)


def to_numpy(leaf: Any) -> Any:
    """Converts an array to NumPy; keys and other leaves stay. (`jax.device_get` takes ten times as long.)

    An array of several processes must be whole in this one (`vnode.placement.process_arrays.replicate_in_processes`).
    """
    return np.array(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf


def with_weak_type(value: Any, sharding: NamedSharding) -> jax.Array:
    """A weakly typed array of given values; only Python's types can be weak."""
    if not sharding.is_fully_addressable:
        there = not isinstance(value, jax.Array) or value.sharding.addressable_devices
        whole = np.asarray(value) if there else np.zeros(value.shape, value.dtype)
        return global_array(whole, sharding, weak=True)
    numbers = [jax.device_put(number) for number in np.asarray(value).reshape(-1).tolist()]
    array = jnp.stack(numbers).reshape(np.shape(value)) if np.shape(value) else numbers[0]
    return jax.device_put(array if array.dtype == value.dtype else value, sharding)


@dataclasses.dataclass(frozen=True)
class HostParts:
    """This process's shards of an array of several processes, in host memory."""

    shape: tuple[int, ...]
    sharding: Any
    dtype: Any
    parts: dict[str, np.ndarray]
    key: Any
    weak: bool

    @classmethod
    def copy(cls, leaf: jax.Array) -> HostParts:
        """Copies this process's shards of a leaf; waits for them."""
        weak = is_weak(leaf)
        leaf = replicate_in_processes(leaf) if weak else leaf  # only whole arrays are weakly typed
        key = jax.random.key_impl(leaf) if is_key(leaf) else None
        data = leaf if key is None else jax.random.key_data(leaf)
        parts = {}
        for shard in data.addressable_shards:
            if str(shard.index) not in parts:
                parts[str(shard.index)] = np.array(shard.data, copy=True)
        return cls(data.shape, data.sharding, data.dtype, parts, key, weak)

    def rebuild(self) -> jax.Array:
        """The original array with its sharding. All processes that have a shard must call it."""
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
    """One array in host memory, with its type and sharding."""

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
        # on a CPU the array may share the copy's memory; XLA does not overwrite it if it is donated
        array = jax.device_put(self.bits, sharding)
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A state in host memory; no device is needed to keep it."""

    leaves: tuple[Any, ...]
    treedef: Any

    @classmethod
    def from_state(cls, state: Any) -> HostCopy:
        """Copies a state, after waiting for it, so that a failed computation is not copied.

        With several processes, each copies its shards.
        """
        leaves, treedef = jax.tree.flatten(state)
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and not is_key(leaf) and leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        kind = HostParts if is_shared() else HostLeaf
        return cls(tuple(kind.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves), treedef)

    def place_on(self, placement: Placement) -> Any:
        """Places the state on a placement's devices. All processes concerned must call it."""
        leaves = [leaf.place_on(placement) if isinstance(leaf, HostLeaf) else leaf for leaf in self.leaves]
        parted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, HostParts)]
        arrays = [self.leaves[i].rebuild() for i in parted]
        for i, array in zip(
            parted, exchange_arrays(arrays, placement, [f"array {i} of the copy" for i in parted]), strict=True
        ):
            leaves[i] = array
        return jax.tree.unflatten(self.treedef, leaves)
