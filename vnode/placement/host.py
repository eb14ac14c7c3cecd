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

from vnode.errors import PlacementError, layout_message
from vnode.placement.leaves import is_array, shape_of
from vnode.placement.placement import Placement
from vnode.placement.transfer import fitting, partition


def abstract(leaf: Any) -> Any:
    """Shape, dtype and sharding of a leaf that is an array; any other leaf as it is."""
    return shape_of(leaf, sharding="keep") if is_array(leaf) else leaf


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys (`jax.random.key`)."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_weak(leaf: Any) -> bool:
    """Whether an array is weakly typed, as Python numbers are."""
    return getattr(leaf, "weak_type", False)


def on_host(leaf: Any) -> Any:
    """An array as NumPy has it; keys and other leaves as they are. (`jax.device_get` takes ten times as long.)"""
    return np.array(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf


def with_weak_type(value: Any, sharding: NamedSharding) -> jax.Array:
    """A weakly typed array of these values; there are such of Python's types only."""
    numbers = [jax.device_put(number) for number in np.asarray(value).reshape(-1).tolist()]
    array = jnp.stack(numbers).reshape(np.shape(value)) if np.shape(value) else numbers[0]
    return jax.device_put(array if array.dtype == value.dtype else value, sharding)


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

    def on(self, placement: Placement) -> jax.Array:
        """The array on a placement's devices."""
        sharding = fitting(placement, self.bits.shape, self.spec)
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
    def of(cls, state: Any) -> HostCopy:
        """Copies a state. Waits until it is computed, so what is copied is known to be good.

        Raises:
          PlacementError: parts of it live in other processes.
        """
        leaves, treedef = jax.tree.flatten(state)
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                if not leaf.is_fully_addressable:
                    raise PlacementError(
                        layout_message(
                            "a state whose parts live in other processes cannot be copied to this host.",
                            facts=[f"a leaf has shape {leaf.shape} and sharding {leaf.sharding}"],
                            remedies=["keep_every=None, with checkpoint=... to fall back to"],
                        )
                    )
                if not is_key(leaf):
                    leaf.copy_to_host_async()
        return cls(tuple(HostLeaf.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves), treedef)

    def on(self, placement: Placement) -> Any:
        """The state on a placement's devices."""
        leaves = [leaf.on(placement) if isinstance(leaf, HostLeaf) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)
