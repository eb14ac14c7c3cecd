"""Batched values and copies in groups of devices: a group's part, parts joined, and replicas in every group.

Knows forms, groups and arrays. Must not know schedules, nor the computation of a group.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from vnode.analysis.forms import Slice
from vnode.analysis.states import Flow
from vnode.placement.placement import Placement
from vnode.placement.transfer import replicated


def batch_part(value: Any, form: Slice, flow: Flow, group: Placement) -> Any:
    """The part of a batched value that a group's nodes hold; at least one element, perhaps padding."""
    n = flow.node_elements(form)
    if isinstance(value, jax.Array):
        value = replicated(value)  # picking from a sharded one could change the sign of a zero
    start = min(group.first * n, form.units - 1)
    stop = min(max(start + 1, (group.first + group.nodes) * n), form.units)
    if form.outer == 1:
        value = value[(slice(None),) * form.dim + (slice(start, stop),)]
    else:
        shape = value.shape
        runs = value.reshape(*shape[: form.dim], form.outer, form.units, *shape[form.dim + 1 :])
        runs = runs[(slice(None),) * (form.dim + 1) + (slice(start, stop),)]
        value = runs.reshape(*shape[: form.dim], form.outer * (stop - start), *shape[form.dim + 1 :])
    fits = form.outer == 1 and group.even and stop - start == group.nodes * n
    return jax.device_put(value, group.sharding(*[None] * form.dim, group.axis) if fits else group.sharding())


@functools.lru_cache
def join_program(dim: int, outer: int) -> Callable[[Sequence[Any]], Any]:
    """Makes a program that concatenates parts of a batched value, run by run."""

    def join(parts: Sequence[Any]) -> Any:
        before, after = parts[0].shape[:dim], parts[0].shape[dim + 1 :]  # of which one may be 0, so that there is no -1
        runs = [part.reshape(*before, outer, part.shape[dim] // outer, *after) for part in parts]
        whole = lax.concatenate(runs, dim + 1)
        return whole.reshape(*before, outer * whole.shape[dim + 1], *after)

    return jax.jit(join)


class Replicas:
    """Replicas of arrays in groups, kept as long as the array: a state that comes back has replicas everywhere."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Sequence[Any]]] = {}

    def keep(self, values: Sequence[Any]) -> None:
        """Remembers replicas of one array; the first one identifies them."""
        number = id(values[0])
        self._copies[number] = (weakref.ref(values[0], lambda _: self._copies.pop(number, None)), tuple(values[1:]))

    def copy_in_group(self, value: Any, g: int, group: Placement) -> Any:
        """An array's replica in a group."""
        reference, copies = self._copies.get(id(value), (None, ()))
        if g and reference is not None and reference() is value:
            return copies[g - 1]
        return jax.device_put(value, group.sharding())
