"""Checksums: whether what is read back is what was saved.

Knows arrays and JSON. Must not know files, nor states.

An array's checksum is computed by the devices that it is on, before it is copied anywhere and after it is back, so that
it covers all of the way in between: the copy to the host, the file, the copy to the devices. It is a sum modulo 2^32 of
one number for each element, mixed from its bits and its position in the whole array (by the finalizer of MurmurHash3,
Appleby 2011, public domain). Integers add up to the same number in any order, hence however the array is sharded: each
shard is added up where it is, and each process adds up its own. One changed element always changes the sum, since the
mixing is a bijection; other damage escapes both of two such sums with a probability of about 2^-64. It protects
against accidents, not against someone who also computes the checksum anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from vnode.placement.exchange import everywhere
from vnode.placement.leaves import is_key, shape_of
from vnode.threads import background

K = TypeVar("K", bound=Hashable)


def checksums(arrays: Mapping[K, jax.Array]) -> dict[K, str]:
    """The checksum of each array; in several processes all must ask for the same arrays.

    Args:
      arrays: arrays of any dtypes, typed keys included, on any devices.

    Returns:
      For each, 16 hexadecimal digits.

    Example:
      >>> import jax.numpy as jnp
      >>> sums = checksums({"a": jnp.arange(3), "b": jnp.array([0, 2, 1]), "c": jnp.arange(3)})
      >>> len(sums["a"]), sums["a"] == sums["b"], sums["a"] == sums["c"]
      (16, False, True)
    """
    datas = {name: jax.random.key_data(array) if is_key(array) else array for name, array in arrays.items()}
    parts = jax.device_get({name: [part(shard, data.shape) for shard in own(data)] for name, data in datas.items()})
    sums = np.zeros((len(parts), 2), np.uint32)
    for i, name in enumerate(parts):
        for two in parts[name]:
            sums[i] += two
    if not all(data.is_fully_addressable for data in datas.values()):
        everyones = everywhere(sums.reshape(-1).tolist(), "to add up the checksums of a state")
        sums = everyones.sum(0, dtype=np.uint32).reshape(sums.shape)
    return {name: f"{first:08x}{second:08x}" for name, (first, second) in zip(parts, sums, strict=True)}


def own(array: jax.Array) -> list[Any]:
    """The shards of an array that this process is to add up: each part of the array is in one such shard of one."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0 and shard.data.size]


def part(shard: Any, shape: tuple[int, ...]) -> jax.Array:
    """What a shard of an array of some shape adds to its two sums."""
    starts = [index.start or 0 for index in shard.index]
    strides = [int(np.prod(shape[axis + 1 :], dtype=object)) % 2**32 for axis in range(len(shape))]
    places = jax.device_put(np.array([starts, strides], np.uint32).reshape(2, -1), shard.device)
    if jax.sharding.get_abstract_mesh().empty:
        return sums_of(shard.data, places)
    with jax.set_mesh(jax.sharding.Mesh(np.array([shard.device]), ("shard",))):  # not the caller's (`jax.set_mesh`)
        return sums_of(shard.data, places)


@jax.jit
def sums_of(data: jax.Array, places: jax.Array) -> jax.Array:
    """Two sums over the elements of a block.

    Args:
      data: the block.
      places: ``uint32[2, data.ndim]``, where the block begins in the array, and how far apart elements are there.

    Returns:
      ``uint32[2]``.
    """
    position = jnp.zeros(data.shape, jnp.uint32)
    for axis in range(data.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, data.shape, axis)
        position += (index + places[0, axis]) * places[1, axis]
    sums = jnp.zeros(2, jnp.uint32)
    for number, word in enumerate(words(data)):
        salt = mixed(position * np.uint32(0x9E3779B9) + np.uint32(number + 1))
        first = mixed(word ^ salt)
        second = mixed((first ^ position) * np.uint32(0x85EBCA77) + salt)
        sums += jnp.stack([first.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)])
    return sums


def words(data: jax.Array) -> list[jax.Array]:
    """The bits of an array's elements as arrays of 32-bit words: two for elements of 64 bits, four for those of 128."""
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        return [*words(data.real), *words(data.imag)]
    if data.dtype == jnp.bool_:
        return [data.astype(jnp.uint32)]
    bits = jnp.iinfo(data.dtype).bits if jnp.issubdtype(data.dtype, jnp.integer) else jnp.finfo(data.dtype).bits
    if bits == 64:
        pair = jax.lax.bitcast_convert_type(data, jnp.uint32)
        return [pair[..., 0], pair[..., 1]]
    return [jax.lax.bitcast_convert_type(data, f"uint{bits}").astype(jnp.uint32)]


def mixed(words: jax.Array) -> jax.Array:
    """Each 32-bit word spread over all bits of another; no two become the same."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


class OwnCopy:
    """Checksums of this process's own copy of a state, computed behind the steps under way.

    What the processes hold together in one piece (a replicated state) each has for itself; nothing in a step compares
    these copies. A sum takes one look at each byte.

    Args:
      state: a state like those to come, arrays on devices.
    """

    def __init__(self, state: Any) -> None:
        copies = self.copies(state, 0)
        shapes = [shape_of(copy, sharding="keep") for copy in copies]
        self.device = copies[0].devices() if copies else None
        self.program: Any = None
        if copies:
            self.lowered = jax.jit(sum_of_all).lower(shapes)
            self.thread = background(self.compile, "vnode-checksums")

    def compile(self) -> None:
        """Compiles the program, beside the first steps."""
        self.program = self.lowered.compile()

    def begin(self, state: Any, wait: bool = False) -> jax.Array | None:
        """Begins to add up a state.

        Args:
          state: the state, as it was said to be.
          wait: whether to wait for the program.

        Returns:
          ``uint32[2]``, on a device; None if it cannot be had: nothing is replicated, or the state lies elsewhere by
          now, or the program is not compiled yet.
        """
        if self.device is not None and wait:
            self.thread.join()
        copies = self.copies(state, 0)
        if self.program is None or not copies or copies[0].devices() != self.device:
            return None
        try:
            return self.program(copies)
        except (TypeError, ValueError):  # other shapes, or another layout
            return None

    @staticmethod
    def copies(state: Any, device: int) -> list[jax.Array]:
        """The arrays of a state that each process has whole, as this one has them on one of its devices."""
        datas = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(state)]
        shared = [data for data in datas if isinstance(data, jax.Array) and data.is_fully_replicated and data.size]
        return [data.addressable_data(device) for data in shared if data.sharding.addressable_devices]


def sum_of_all(arrays: list[jax.Array]) -> jax.Array:
    """One checksum of several arrays, ``uint32[2]``."""
    total = jnp.zeros(2, jnp.uint32)
    for number, data in enumerate(arrays):
        strides = [int(np.prod(data.shape[axis + 1 :], dtype=object)) % 2**32 for axis in range(data.ndim)]
        places = np.array([[0] * data.ndim, strides], np.uint32).reshape(2, -1)
        total += mixed(sums_of(data, places) ^ np.uint32(number))
    return total


def digest(value: Any) -> str:
    """The checksum of something fit for JSON.

    Example:
      >>> digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1})
      True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
