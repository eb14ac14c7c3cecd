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

import functools
import hashlib
import json
import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from vnode.compat import carry_settings
from vnode.placement.device_cache import device_cache
from vnode.placement.leaves import is_key, shape_of
from vnode.placement.process_arrays import gather_from_all
from vnode.placement.process_barrier import block_until_ready
from vnode.placement.world import world
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
    begun = {name: [shard_sums(shard, data.shape) for shard in owned_shards(data)] for name, data in datas.items()}
    parts = jax.device_get(block_until_ready(begun, "the checksums of a state"))
    sums = np.zeros((len(parts), 2), np.uint32)
    for i, name in enumerate(parts):
        for two in parts[name]:
            sums[i] += two
    if not all(data.is_fully_addressable for data in datas.values()):
        everyones = gather_from_all(sums.reshape(-1).tolist(), "to add up the checksums of a state")
        sums = everyones.sum(0, dtype=np.uint32).reshape(sums.shape)
    return {name: f"{first:08x}{second:08x}" for name, (first, second) in zip(parts, sums, strict=True)}


def owned_shards(array: jax.Array) -> list[Any]:
    """The shards of an array that this process adds up: each part of the array is in one shard of one process."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0 and shard.data.size]


def shard_sums(shard: Any, shape: tuple[int, ...]) -> jax.Array:
    """The two sums of one shard, as its part of the checksum of an array of some shape."""
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
    if jax.typeof(data).memory_space == jax.memory.Space.Host:  # of one device only, types say so
        data = jax.device_put(data, jax.memory.Space.Device)
    position = jnp.zeros(data.shape, jnp.uint32)
    for axis in range(data.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, data.shape, axis)
        position += (index + places[0, axis]) * places[1, axis]
    sums = jnp.zeros(2, jnp.uint32)
    for number, word in enumerate(to_words(data)):
        salt = mix_bits(position * np.uint32(0x9E3779B9) + np.uint32(number + 1))
        first = mix_bits(word ^ salt)
        second = mix_bits((first ^ position) * np.uint32(0x85EBCA77) + salt)
        sums += jnp.stack([first.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)])
    return sums


def to_words(data: jax.Array) -> list[jax.Array]:
    """The bits of an array's elements as arrays of 32-bit words: two for elements of 64 bits, four for those of 128."""
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        return [*to_words(data.real), *to_words(data.imag)]
    if data.dtype == jnp.bool_:
        return [data.astype(jnp.uint32)]
    bits = jnp.iinfo(data.dtype).bits if jnp.issubdtype(data.dtype, jnp.integer) else jnp.finfo(data.dtype).bits
    if bits == 64:
        pair = jax.lax.bitcast_convert_type(data, jnp.uint32)
        return [pair[..., 0], pair[..., 1]]
    return [jax.lax.bitcast_convert_type(data, f"uint{bits}").astype(jnp.uint32)]


def mix_bits(words: jax.Array) -> jax.Array:
    """Mixes the bits of each 32-bit word; the map is a bijection."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


class OwnCopy:
    """Checksums of this process's own copies of a state, computed behind the steps under way.

    An array that is not divided over all devices has copies: a replicated one in each process, one that is divided over
    an axis of the mesh in those that have the same parts. Nothing in a step compares them. Arrays are told apart by who
    has the same parts; each such group of arrays has a checksum. A sum takes one look at each byte.

    Args:
      state: a state like those to come, arrays on devices. `prepare` compiles for it.

    Attributes:
      holders: for each group of arrays, by process: the lowest process that has the same parts.
    """

    def __init__(self, state: Any) -> None:
        self.holders, parts = copied_parts(state)
        self.places = {device: [place for place, _ in here] for device, here in parts.items()}
        self.shapes = {device: [shape_of(part, sharding="keep") for _, part in here] for device, here in parts.items()}
        self.programs: dict[Any, Any] | None = None
        self.thread: threading.Thread | None = None

    @property
    def unchecked(self) -> list[int]:
        """The number of a state that was not looked at, and its checksums."""
        return unchecked(len(self.holders))

    def prepare(self) -> threading.Thread:
        """Begins to compile the programs, unless that was begun before; returns the thread."""
        self.thread = self.thread or background(carry_settings(self.compile), "vnode-checksums")
        return self.thread

    def compile(self) -> None:
        """Compiles the programs, beside the first steps."""
        try:
            self.programs = {
                device: jax.jit(functools.partial(sums_by_group, self.places[device], len(self.holders)))
                .lower(shapes)
                .compile()
                for device, shapes in self.shapes.items()
            }
        except Exception:
            if threading.main_thread().is_alive():  # else the process ends, and JAX has forgotten what is traced here
                raise

    def begin(self, state: Any) -> list[jax.Array] | None:
        """Begins to add up a state.

        Args:
          state: the state, as it was said to be.

        Returns:
          ``uint32[groups, 2]`` of each device, for `vote_words`; None if there is none: nothing has copies, the state
          lies elsewhere by now, or the programs are not compiled yet.
        """
        holders, parts = copied_parts(state)
        places = {device: [place for place, _ in here] for device, here in parts.items()}
        if not self.programs or (holders, places) != (self.holders, self.places):
            return None
        try:
            return [self.programs[device]([part for _, part in here]) for device, here in parts.items()]
        except (TypeError, ValueError):  # other shapes, or another layout
            return None


def unchecked(groups: int) -> list[int]:
    """The words of a vote for a state that was not looked at: step 0, and zeros as each group's checksum."""
    return [0] * (1 + 2 * groups)


def vote_words(sums: Sequence[jax.Array]) -> list[int]:
    """The words of a process's checksums, given those of its devices."""
    return sum(map(np.asarray, sums), np.uint32(0)).reshape(-1).tolist()  # modulo 2^32


class Place(NamedTuple):
    """Where a part of an array counts.

    Attributes:
      group: that of the array.
      array: the number of the array in the state.
      part: the number of the part, of those that the process has.
    """

    group: int
    array: int
    part: int


def copy_holders(leaf: Any) -> tuple[int, ...] | None:
    """Who has the same parts of an array, as `holders_of` says.

    Args:
      leaf: an array, or a `jax.ShapeDtypeStruct` with a sharding.

    Returns:
      None if each process has parts of its own, or nothing.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not math.prod(leaf.shape):
        return None
    holders = holders_of(sharding, leaf.shape)
    return None if len(set(holders)) == len(holders) or len(holders) < world().count else holders


def copied_parts(state: Any) -> tuple[list[tuple[int, ...]], dict[Any, list[tuple[Place, jax.Array]]]]:
    """The parts that this process has of arrays with copies in other processes.

    Args:
      state: a state, arrays on devices.

    Returns:
      For each group of arrays, who has the same parts (`holders_of`); and for each device of this process the parts on
      it, and where they count. A part on several of its devices is taken once.
    """
    groups: dict[tuple[int, ...], int] = {}
    found: dict[Any, list[tuple[Place, jax.Array]]] = {}
    for array, leaf in enumerate(jax.tree.leaves(state)):
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        if not isinstance(data, jax.Array):
            continue
        holders = copy_holders(data)
        if holders is None:
            continue
        group = groups.setdefault(holders, len(groups))
        taken = {str(shard.index): shard for shard in reversed(data.addressable_shards)}
        for part, (_, shard) in enumerate(sorted(taken.items())):
            found.setdefault(shard.device, []).append((Place(group, array, part), shard.data))
    return [*groups], found


@device_cache(maxsize=16)
def holders_of(sharding: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each process that has parts of an array, in order, the lowest one that has the same parts."""
    parts: dict[int, set[str]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        parts.setdefault(device.process_index, set()).add(str(index))
    first: dict[frozenset[str], int] = {}
    return tuple(first.setdefault(frozenset(parts[process]), process) for process in sorted(parts))


def sums_by_group(places: Sequence[Place], groups: int, arrays: Sequence[jax.Array]) -> jax.Array:
    """A checksum for each group of arrays, ``uint32[groups, 2]``.

    Args:
      places: where each array counts.
      groups: how many there are.
      arrays: parts of arrays.
    """
    totals = jnp.zeros((groups, 2), jnp.uint32)
    for place, data in zip(places, arrays, strict=True):
        strides = [int(np.prod(data.shape[axis + 1 :], dtype=object)) % 2**32 for axis in range(data.ndim)]
        starts = np.array([[0] * data.ndim, strides], np.uint32).reshape(2, -1)
        salt = np.uint32((place.array * 0x10001 + place.part) % 2**32)
        totals = totals.at[place.group].add(mix_bits(sums_of(data, starts) ^ salt))
    return totals


def digest(value: Any) -> str:
    """The checksum of something fit for JSON.

    Example:
      >>> digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1})
      True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
