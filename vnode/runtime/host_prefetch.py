"""Host-memory values -> device memory, copied one after another before the tasks that read them.

    m' = f(m, g1);  n' = f(n, g2)                       m, n in host memory, g1, g2 known

    m = copy(m, after g2);    m' = f(m, g1)
    n = copy(n, after m');    n' = f(n, g2)

Knows memory spaces, and orders of tasks. Must not know steps, nor who decided where a value lies.

Compilers start a transfer as soon as they can, and barriers do not delay it (libtpu 0.0.42). All slots of an optimizer
would be copied at once, and stay live beside the gradients until they are read. A loop that copies a value in pieces
into a buffer made from an earlier result cannot begin before that result. Short loops are unrolled, so the start of
each piece is computed from that result as well. Once-computed tasks are ordered by output; outputs that need most
offloaded values come first. So a parameter's slots are fetched when the update of the parameter before is done.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from vnode.operators.memory_spaces import DEVICE
from vnode.operators.memory_spaces import is_on_host as is_host_type
from vnode.runtime.node_loops import opaque_zero

PIECE = 16 << 20
"""Bytes copied at a time, roughly: as many rows as fit."""

SMALL = 1 << 20
"""Bytes up to which a value is copied in one piece; larger values take two or more, since one may be copied early."""


def is_on_host(value: Any) -> bool:
    """Whether a value lies in the host's memory.

    >>> is_on_host(jnp.ones(3))
    False
    """
    return is_host_type(jax.typeof(value))


def has_barrier_element(value: Any) -> bool:
    """Whether a barrier can wait for an element of the value: it has elements, and they are real numbers.

    >>> has_barrier_element(jnp.ones(3)), has_barrier_element(jnp.ones(0)), has_barrier_element(jax.random.key(0))
    (True, False, False)
    """
    real = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.number) and not jnp.iscomplexobj(value)
    return real and value.size > 0


def fetch_to_device(value: Any, after: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """Copies a value to device memory.

    Args:
      value: an array in the host's memory, any shape and dtype.
      after: a result before which the copy does not begin (`has_barrier_element`); None for any time.
      spec: the value's sharding.
      mesh: the mesh of `spec`.

    Returns:
      The array in device memory, with the same sharding.
    """
    whole = PartitionSpec()
    run = jax.shard_map(copy_in_pieces, mesh=mesh, in_specs=(spec, whole), out_specs=spec, check_vma=False)
    return run(value, None if after is None else first_element(after))


def first_element(value: Any) -> Any:
    """The first element of an array."""
    return lax.slice(value, (0,) * jnp.ndim(value), (1,) * jnp.ndim(value)).reshape(())


def copy_in_pieces(value: Any, after: Any) -> Any:
    """Copies one device's array to device memory, in pieces."""
    if after is None or not jnp.issubdtype(value.dtype, jnp.number):
        return jax.device_put(value, DEVICE)
    first = first_element(after)
    least = 1 if value.size * value.dtype.itemsize <= SMALL else 2
    dim, pieces = split_for_copy(value.shape, value.dtype.itemsize, least=least)
    if pieces == 1:
        return jax.device_put(lax.optimization_barrier((value, first))[0], DEVICE)
    rows, start = value.shape[dim] // pieces, opaque_zero(first)

    def body(i: jax.Array, buffer: jax.Array) -> jax.Array:
        piece = jax.device_put(lax.dynamic_slice_in_dim(value, start + i * rows, rows, dim), DEVICE)
        return lax.dynamic_update_slice_in_dim(buffer, piece, i * rows, dim)

    return lax.fori_loop(0, pieces, body, jnp.broadcast_to(first.astype(value.dtype), value.shape))


def split_for_copy(shape: Sequence[int], itemsize: int, piece: int = PIECE, least: int = 1) -> tuple[int, int]:
    """The dimension along which to copy an array in pieces of at most `piece` bytes if rows allow, and their number.

    >>> split_for_copy((24, 4096, 1024), 4), split_for_copy((1, 1000, 40000), 4), split_for_copy((100,), 4)
    ((0, 24), (1, 10), (0, 1))
    >>> split_for_copy((100,), 4, least=2)
    (0, 2)
    """
    dim = next((d for d, n in enumerate(shape) if n > 1), 0)
    least = max(least, -(-math.prod(shape) * itemsize // piece))
    if least < 2 or shape[dim] < 2:
        return dim, 1
    return dim, next(k for k in range(min(least, shape[dim]), shape[dim] + 1) if shape[dim] % k == 0)


class Task(NamedTuple):
    """A task that reads variables and defines variables.

    Attributes:
      reads: the variables that it reads.
      makes: the variables that it defines.
    """

    reads: Sequence[Any]
    makes: Sequence[Any]


def order_by_output(tasks: Sequence[Task], outputs: Sequence[Any], offloaded: Collection[Any]) -> list[int]:
    """Orders tasks output by output; outputs that need most of the offloaded values come first.

    Args:
      tasks: tasks in a valid order.
      outputs: the results of the program, variables and others.
      offloaded: the offloaded values.

    Returns:
      The tasks' numbers; tasks that no output needs come last.

    >>> slots, tasks = ["m", "n"], [Task("m", "M"), Task("n", "N"), Task("M", "p"), Task("N", "q")]
    >>> order_by_output(tasks, ["M", "N", "p", "q"], slots)
    [0, 2, 1, 3]
    """
    made = {var: k for k, task in enumerate(tasks) for var in task.makes}
    needs = offloaded_needs(tasks, offloaded)
    ends = [made[atom] for atom in outputs if isinstance(atom, Hashable) and atom in made]
    order: dict[int, None] = {}
    # An update that reads a parameter's slots comes before the new slots that it defines.
    for end in sorted(ends, key=lambda k: (-needs[k].bit_count(), needs[k])):
        stack = [end]
        while stack:
            k = stack[-1]
            before = [made[var] for var in tasks[k].reads if var in made and made[var] not in order]
            if k in order or not before:
                order[stack.pop()] = None
            else:
                stack += reversed(before)
    return [*order, *(k for k in range(len(tasks)) if k not in order)]


def deferrable(tasks: Sequence[Task], wanted: Collection[Any], offloaded: Collection[Any]) -> set[int]:
    """Tasks that read offloaded values and that no early result needs.

    Args:
      tasks: tasks in a valid order.
      wanted: the results that are needed early.
      offloaded: the offloaded values.

    >>> tasks = [Task("m", "M"), Task("n", "N"), Task("x", "y"), Task("M", "P")]
    >>> deferrable(tasks, wanted=["N", "y"], offloaded=["m", "n"])
    {0, 3}
    """
    needs, early, found = offloaded_needs(tasks, offloaded), set(wanted), set[int]()
    for k in range(len(tasks) - 1, -1, -1):
        if needs[k] and early.isdisjoint(tasks[k].makes):
            found.add(k)
        else:
            early.update(tasks[k].reads)
    return found


def offloaded_needs(tasks: Sequence[Task], offloaded: Collection[Any]) -> list[int]:
    """For each task, as a bit set, the offloaded values that it needs, directly or through other tasks."""
    bits = {var: 1 << i for i, var in enumerate(offloaded)}
    needs = []
    for task in tasks:
        needs.append(functools.reduce(operator.or_, (bits.get(var, 0) for var in task.reads), 0))
        bits.update(dict.fromkeys(task.makes, needs[-1]))
    return needs
