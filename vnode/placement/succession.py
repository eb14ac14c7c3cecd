"""Programs of several processes -> programs that run only where the one before has succeeded.

    leaves = order_after_last(leaves, smallest(leaves))       # arguments of a program, before it is launched
    record_last(results, smallest(results))                  # what it returns, after

Knows worlds, and arrays on devices. Must not know what programs compute.

Gloo, with which jax's CPUs communicate, distinguishes messages of two programs by their order alone. Say a process
dies. Its neighbour fails in a program, and begins the next one. A third process takes the neighbour's first message for
the one missing in the earlier program: it computes wrong bits, without an error. So no program of several processes
begins in a process where an earlier one has failed: one of its arguments depends on a result of the earlier one, and is
not available if that failed. The wait is on the devices, not in the launching thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from vnode.placement.leaves import is_key
from vnode.placement.process_barrier import block_until_ready
from vnode.placement.world import world


def order_after_last(leaves: Sequence[Any], number: int | None) -> list[Any]:
    """Makes one argument of a program depend on the last program of this world.

    Args:
      leaves: the arguments.
      number: the number of that argument; None if no argument can depend on it.

    Returns:
      The arguments, that one replaced by a copy.
    """
    leaves, last = list(leaves), world().last_result
    if number is not None and last:
        leaves[number] = copy_after(leaves[number], last)
    return leaves


def record_last(results: Sequence[Any], number: int | None) -> None:
    """Records a launched program, on which the next program of this world then depends.

    Args:
      results: its results.
      number: the number of the result to depend on; None if none can be.
    """
    if number is not None:
        here, own = world(), results[number].addressable_shards
        here.last_result = {
            **dict.fromkeys(here.last_result, own[0].data),
            **{shard.device: shard.data for shard in own},
        }


def wait_for_last(what: str) -> None:
    """Waits for the last program of this world.

    Args:
      what: the purpose, such as "a checkpoint".

    Raises:
      ProcessError: another process has failed.
    """
    block_until_ready([array for array in world().last_result.values() if not array.is_deleted()], what)


def smallest(leaves: Sequence[Any], among: Iterable[int] | None = None) -> int | None:
    """The number of the smallest array of several processes on CPUs; None if there is none.

    Args:
      leaves: arrays and other values.
      among: the numbers of the candidates; all by default.
    """
    numbers = range(len(leaves)) if among is None else among
    return min((i for i in numbers if can_wait(leaves[i])), key=lambda i: leaves[i].size, default=None)


def can_wait(leaf: Any) -> bool:
    """Whether a value is an array of several processes, including this one, in the usual memory of CPUs.

    Typed keys and weakly typed arrays are not: they cannot be assembled from devices' shards.
    """
    if not isinstance(leaf, jax.Array) or is_key(leaf) or getattr(leaf, "weak_type", False):
        return False
    if leaf.is_fully_addressable or not leaf.size or not leaf.addressable_shards:
        return False
    device = leaf.addressable_shards[0].device
    return device.platform == "cpu" and leaf.sharding.memory_kind in (None, device.default_memory().kind)


def copy_after(array: jax.Array, last: Mapping[Any, jax.Array]) -> jax.Array:
    """A copy of an array that is ready once others are, on each of this process's devices."""
    parts = []
    for shard in array.addressable_shards:
        other = last.get(shard.device, next(iter(last.values())))
        if other.is_deleted():  # its new owner has waited for it
            parts.append(shard.data)
            continue
        if other.devices() != {shard.device}:
            other = jax.device_put(other, shard.device)
        parts.append(copy_ordered(shard.data, other))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts, dtype=array.dtype)


@jax.jit
def copy_ordered(array: jax.Array, other: jax.Array) -> jax.Array:
    """A copy of an array, ordered after another one."""
    return jax.lax.optimization_barrier((array, other))[0]
