"""Arrays of single processes -> arrays of several processes: compared first, and sent to processes that lack them.

Knows processes, devices and placements. Must not know steps.

After `jax.distributed.initialize` every process runs the same program and has devices of its own. A placement's devices
may belong to several processes. A value that each process has (a NumPy array, an array on its own devices) is copied by
each to its own devices; nothing else is sent. That requires equal values, so checksums are compared first. This finds a
process that missed some steps and holds an older state, or one with other examples, before it becomes a diverging
replica.

Bits are sent as integers, by a sum in which all but one are zero: floating-point sums would lose negative zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vnode.errors import PlacementError, limit_lines
from vnode.placement.device_cache import device_cache
from vnode.placement.donated import check_not_donated
from vnode.placement.leaf_sharding import has_device_order, put_sharding
from vnode.placement.leaves import bytes_of, is_array, is_key
from vnode.placement.placement import Placement
from vnode.placement.process_barrier import block_until_ready, exchange_words, process_names
from vnode.placement.sharded import ShardedBatch
from vnode.placement.static_scalars import map_arrays
from vnode.placement.transfer import replicated, resharding, to_placement
from vnode.placement.world import in_world, is_local, is_shared, world, world_of
from vnode.show.units import several

NONE, COPY, SPREAD, HERE = range(4)
"""A process's part of an array: nothing; a copy of its own; a shard of it; its final place."""

ASYNCHRONOUS = 16 << 10
"""The least number of bytes sent. On CPUs jax runs programs of less than 1,000 operations in the calling thread,
which then could not notice another process's failure."""

Vote = tuple[int, int, int]
"""A process's vote on an array: checksum of its type, how it has the array, and checksum of its value or devices."""


def exchange_arrays(
    leaves: Sequence[Any], placement: Placement, names: Sequence[str], *, batch: bool = False
) -> list[Any]:
    """Puts arrays on a placement's devices, from wherever they are. All processes concerned must call it.

    Concerned are the processes of the placement's devices, and of the arrays' devices.

    Args:
      leaves: arrays of any kind, and Python numbers.
      placement: the target.
      names: names in messages.
      batch: whether the leaves are a batch, of which processes may be meant to have different rows.

    Returns:
      The arrays. A process's local value is assumed to be the same in all processes, and compared.

    Raises:
      PlacementError: processes have different arrays, or other target devices.
      ProcessError: a process did not come in time.
    """
    made = [leaf.whole() if isinstance(leaf, ShardedBatch) and leaf.placement != placement else leaf for leaf in leaves]
    moving = [i for i, leaf in enumerate(made) if not isinstance(leaf, ShardedBatch)]
    here = world_of(placement.devices)
    move = between_processes if is_shared(here) else to_placements
    with in_world(here):
        arrays = move([made[i] for i in moving], placement, [names[i] for i in moving], batch)
    for i, array in zip(moving, arrays, strict=True):
        made[i] = array
    return made


def to_placements(leaves: Sequence[Any], placement: Placement, names: Sequence[str] = (), batch: bool = False) -> list:
    """Puts arrays on a placement's devices, all of which belong to this process."""
    return [to_placement(leaf, placement) for leaf in leaves]


def between_processes(leaves: Sequence[Any], placement: Placement, names: Sequence[str], batch: bool) -> list[Any]:
    """`exchange_arrays` for arrays that are not in shares."""
    devices = {*placement.devices, *(device for leaf in leaves for device in devices_of(leaf))}
    processes = {device.process_index for device in devices}
    if not leaves or processes == {world().index}:
        return to_placements(leaves, placement)
    if world().index not in processes:
        return [move_agreed(leaf, placement, [NONE], devices, own=NONE) for leaf in leaves]
    what = "to compare a batch" if batch else "to compare a state that is put on devices"
    mine = np.array([vote(leaf, placement) for leaf in leaves], np.uint32)
    votes = np.broadcast_to(mine, (len(processes), *mine.shape))
    if not check_agreed(mine, names, placement, what, processes):
        votes = gather_rows(mine.reshape(-1), what, processes).reshape(votes.shape)
    compare(votes, names, leaves, placement, sorted(processes), batch=batch)
    ways = [[int(kind) for kind in votes[:, i, 1]] for i in range(len(leaves))]
    return [move_agreed(leaf, placement, ways[i], devices, own=int(mine[i][1])) for i, leaf in enumerate(leaves)]


def put(tree: Any, placement: Placement) -> Any:
    """Puts a state on a placement's devices; as `exchange_arrays`, of any pytree, whose other leaves stay.

    Raises:
      VnodeError: some of its arrays are deleted.
    """
    check_not_donated({"argument 0": tree})
    arrays: list[Any] = []
    map_arrays(arrays.append, tree)
    paths = [jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(tree) if is_array(leaf)]
    names = paths if len(paths) == len(arrays) else [f"array {i}" for i in range(len(arrays))]
    placed = iter(exchange_arrays(arrays, placement, names))
    return map_arrays(lambda leaf: next(placed), tree)


def check_agreed(mine: np.ndarray, names: Sequence[str], placement: Placement, what: str, processes: set[int]) -> bool:
    """Checks that votes agree in number; otherwise processes would wait for more votes of each other.

    Args:
      mine: this process's votes.
      names: names of the arrays.
      placement: the target.
      what: the purpose, as for `meet`.
      processes: all that are concerned.

    Raises:
      PlacementError: they have other arrays or targets.
    """
    where = (placement.counts, placement.axis, [device.id for device in placement.devices])
    facts = [len(names), *(zlib.crc32(repr(fact).encode()) for fact in (list(names), where))]
    digests = gather_rows(np.array([*facts, zlib.crc32(mine.tobytes())], np.uint32), what, processes)
    same = (digests == digests[0]).all(axis=0)
    if not same[:3].all():
        raise PlacementError(
            f"{len(digests)} processes must put the same arrays on the same devices, and each puts others.",
            facts=[
                f"this one: {several(len(names), 'array')}, {', '.join(names[:8])}, on {placement}",
                f"numbers of arrays, by process: {', '.join(map(str, digests[:, 0].tolist()))}",
            ],
            remedies=[
                "make the same states and placements in every process",
                "call put and the step in every process, with the last call's results",
            ],
        )
    return bool(same[3])


def devices_of(leaf: Any) -> set[Any]:
    """The devices of an array that all processes know of: those of a mesh, also if all are this process's.

    An array of another world is this process's own copy, which the other processes need not know of.
    """
    known = isinstance(leaf, jax.Array) and (isinstance(leaf.sharding, NamedSharding) or not leaf.is_fully_addressable)
    devices = leaf.sharding.device_set if known else set()
    return devices if world_of([*devices]) is world() else set()


def vote(leaf: Any, placement: Placement) -> Vote:
    """This process's vote on an array."""
    aval = jax.typeof(leaf)
    kind = zlib.crc32(f"{aval.dtype}{aval.shape}{getattr(aval, 'weak_type', False)}".encode())
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        devices = leaf.sharding.device_set
        numbers = zlib.crc32(repr(sorted(device.id for device in devices)).encode())
        if devices == set(placement.devices):
            return kind, HERE, numbers
        if not leaf.is_fully_replicated and len({device.process_index for device in devices}) > 1:
            return kind, SPREAD, numbers
        if not leaf.sharding.addressable_devices:
            return kind, NONE, 0
    return kind, COPY, zlib.crc32(bytes_of(own_copy(leaf)))


def own_copy(leaf: Any) -> np.ndarray:
    """This process's copy of a whole array; for typed keys, of their data."""
    if isinstance(leaf, jax.Array):
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        block_until_ready(data, "an array to be put on other devices")
        return np.asarray(data if data.is_fully_addressable else data.addressable_data(0))
    return np.asarray(leaf, jax.typeof(leaf).dtype)


def compare(
    votes: np.ndarray,
    names: Sequence[str],
    leaves: Sequence[Any],
    placement: Placement,
    processes: Sequence[int],
    *,
    batch: bool,
) -> None:
    """Raises if arrays are not the same in all processes.

    Args:
      votes: ``uint32[processes, arrays, 3]``.
      names: names of the arrays.
      leaves: this process's arrays.
      placement: the target.
      processes: the processes of the votes.
      batch: whether the arrays are a batch.

    Raises:
      PlacementError: some differ.
    """
    differing = []
    for i, name in enumerate(names):
        kinds, ways, values = votes[:, i].T
        known = ways != NONE
        if (kinds != kinds[0]).any() or len(set(ways[known].tolist())) > 1 or len(set(values[known].tolist())) > 1:
            odd = [process for process, row in zip(processes, votes[:, i], strict=True) if differs(row, votes[0, i])]
            differing.append(f"{name}: {jax.typeof(leaves[i])}, another one in {process_names(odd)}")
        elif not known.any():
            differing.append(f"{name}: no process has it")
    if differing:
        raise PlacementError(
            f"{len(votes)} processes must put the same arrays on {placement}, and have different ones.",
            facts=limit_lines(differing),
            remedies=[
                "give all processes the same batch",
                "or each its own rows: vnode.data.local_batch, or vnode.data.Batches",
            ]
            if batch
            else [
                "call put and the step in every process, with the last call's results, also in processes whose "
                "devices the step does not use",
                "make the first state from the same seed, or restore it from one checkpoint",
            ],
        )


def differs(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two votes contradict each other; a process without the array agrees with any."""
    return bool(one[0] != other[0] or (NONE not in (one[1], other[1]) and (one[1:] != other[1:]).any()))


def move_agreed(leaf: Any, placement: Placement, ways: list[int], devices: set[Any], own: int) -> Any:
    """Puts an array that all processes agree on onto the placement's devices.

    Args:
      leaf: this process's array.
      placement: the target.
      ways: how each process has it, in the order of processes.
      devices: the devices of all processes concerned.
      own: how this process has it.
    """
    target = put_sharding(leaf, placement)
    if isinstance(leaf, jax.Array) and has_device_order(leaf.sharding, placement.devices):
        return leaf if leaf.sharding == target else resharding(target)(leaf)
    key = jax.random.key_impl(leaf) if is_key(leaf) else None
    if SPREAD in ways:
        leaf = replicated(leaf)
        here = bool(leaf.sharding.addressable_devices)
        processes = sorted({device.process_index for device in devices})
        holders = {device.process_index for device in leaf.sharding.device_set}
        ways = [COPY if process in holders else NONE for process in processes]
        own = COPY if here else NONE
    aval = jax.eval_shape(jax.random.key_data, leaf) if key is not None else jax.typeof(leaf)
    value = own_copy(leaf) if own == COPY else np.zeros(aval.shape, aval.dtype)
    if NONE in ways and COPY in ways:
        value = broadcast_bits(value, ways.index(COPY), devices)
    made = global_array(value, target, weak=bool(getattr(aval, "weak_type", False)))
    return made if key is None else jax.random.wrap_key_data(made, impl=key)


def global_array(value: np.ndarray, sharding: NamedSharding, *, weak: bool) -> jax.Array:
    """Makes an array to which each process contributes its own devices' shards.

    Args:
      value: the whole array; in a process without any of the devices, only its shape and dtype matter.
      sharding: its sharding.
      weak: whether it is weakly typed, as Python numbers are.
    """
    if weak and value.size:
        return weak_array_program(sharding, value.shape)(value.reshape(-1).tolist())
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


@device_cache(maxsize=16)
def weak_array_program(sharding: NamedSharding, shape: tuple[int, ...]) -> Callable[[list[Any]], jax.Array]:
    """A program that makes a weakly typed array from Python numbers; nothing else can."""
    return jax.jit(lambda numbers: jnp.stack(numbers).reshape(shape), out_shardings=sharding)


def replicate_in_processes(tree: Any) -> Any:
    """Replicates a tree's arrays in each process that has a shard of them; all of these must call it.

    The last program of these processes must be one that computed the arrays (`vnode.placement.succession`).
    """

    def replicate_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        from vnode.placement.succession import record_last, smallest  # only for several processes

        made = replicated(leaf)
        record_last([made], smallest([made]))
        return made

    return jax.tree.map(replicate_leaf, tree)


def device_by_process(devices: Sequence[Any] | set[Any]) -> list[Any]:
    """One device of each process among `devices`, by process."""
    first: dict[int, Any] = {}
    for device in sorted(devices, key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    return [first[process] for process in sorted(first)]


def stack_by_process(mine: np.ndarray, devices: Sequence[Any] | set[Any]) -> jax.Array:
    """An array of one row per process, ``[processes, ...]``, sharded by process."""
    there = device_by_process(devices)
    sharding = NamedSharding(Mesh(np.array(there), ("process",)), PartitionSpec("process"))
    shape = (len(there), *mine.shape)
    return jax.make_array_from_callback(shape, sharding, lambda index: mine[None], dtype=mine.dtype)


def gather_rows(mine: np.ndarray, what: str, processes: set[int] | None = None) -> np.ndarray:
    """Gathers rows of different lengths from some processes; all of them must call it.

    Args:
      mine: this process's row, 32-bit integers, ``[n]``; n may differ.
      what: as for `vnode.placement.process_barrier.meet`.
      processes: the processes; all by default.

    Returns:
      ``uint32[processes, n]``, by process.
    """
    words = exchange_words(what, np.asarray(mine, np.uint32).tobytes().hex() or "-", processes)
    return np.array([np.frombuffer(bytes.fromhex(words[process].strip("-")), np.uint32) for process in sorted(words)])


def gather_from_all(mine: Sequence[int], what: str) -> np.ndarray:
    """Gathers rows from all processes; all must call it.

    Args:
      mine: this process's row, 32-bit integers, of the same length in all processes.
      what: as for `vnode.placement.process_barrier.meet`.

    Returns:
      ``uint32[processes, n]``.
    """
    row = np.array(mine, np.uint32)
    return gather_rows(row, what) if is_shared() else row[None]


def broadcast_bits(value: np.ndarray, holder: int, devices: Sequence[Any] | set[Any]) -> np.ndarray:
    """Broadcasts one process's value, bit by bit; all processes of these devices must call it.

    Args:
      value: the value, in the process that has it; elsewhere of the same shape and dtype.
      holder: that process's position among them.
      devices: any devices of these processes.
    """
    there = device_by_process(devices)
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    words = np.pad(data, (0, max(-data.size % 4, ASYNCHRONOUS - data.size))).view(np.uint32)
    if not is_local(there[holder]):
        words = np.zeros_like(words)
    row = stack_by_process(words, devices)
    total = block_until_ready(
        sum_program(NamedSharding(row.sharding.mesh, PartitionSpec()))(row), "a state of another process"
    )
    return np.asarray(total.addressable_data(0)).view(np.uint8)[: data.size].view(value.dtype).reshape(value.shape)


@device_cache(maxsize=128)
def sum_program(target: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A program that sums rows."""
    return jax.jit(lambda row: row.sum(0, dtype=row.dtype), out_shardings=target)
