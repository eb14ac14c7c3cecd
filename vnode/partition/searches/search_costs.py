"""An equation or a move between layouts -> its seconds and bytes on one device, for searches.

Knows equations, layouts and a machine's figures. Must not know which strategies there are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from vnode.operators import Prefix, kind
from vnode.operators.cost import Cost, described_cost
from vnode.partition.cost.collective_cost import Transfer, transfers_of_route
from vnode.partition.cost.time_sources import Roofline, Times
from vnode.partition.cost.timed_pieces import copy_of
from vnode.partition.machine import Machine, MachineMesh
from vnode.partition.searches.flattened_program import has_own_strategy
from vnode.spmd.layout import Axes, Cut, Layout, count
from vnode.spmd.op_sharding import OpSharding, itemsize
from vnode.spmd.resharding import plan_resharding
from vnode.spmd.resharding_collectives import needed_neighbours


class Estimate:
    """A cost model of a machine.

    Times are those of the slowest kind of device, since all devices wait for it. Bytes of collectives cross the busiest
    link of the mesh (`Machine.collective`). An equation that compilers fuse with its neighbours takes the time of its
    operations or of writing its results, whichever is longer.

    Args:
      machine: the machine.
      mesh: its devices with named axes; or only the axes, which `Machine.mesh` lays out.
      times: the times of fused ops, for example measured ones; by default the roofline (Williams, Waterman, Patterson,
        Communications of the ACM 52, 2009).
      platform: the platform that is compiled for, where `times` needs it.

    Example:
      >>> from vnode.spmd.layout import Cut, replicated
      >>> model = Estimate(Machine.tpu("v5e:2x4"), {"x": 2, "y": 4})
      >>> model.bytes(Layout((Cut(("y",), 1, 8), None)), (8, 3), np.dtype("float32"))
      24.0
      >>> rows = Layout((Cut(("y",), 1, 8), None))
      >>> model.move_time(replicated(2), rows, (8, 3), np.dtype("float32"))  # a device cuts its own copy in no time
      0.0
    """

    def __init__(
        self, machine: Machine, mesh: MachineMesh | Mapping[str, int], times: Times | None = None, platform: str = ""
    ) -> None:
        self.machine = machine
        self.mesh = mesh if isinstance(mesh, MachineMesh) else machine.mesh(mesh)
        self.axes: Axes = {name: n for name, n in self.mesh.shape.items() if n > 1}
        self.times, self.platform = times or Times(), platform
        self._roofline = self.times.is_roofline
        self._slowest: dict[Any, float] = {}
        self._costs = functools.cache(lambda transfer: transfer.cost(self.machine, self.mesh))

    def compute_time(self, eqn: JaxprEqn, choice: OpSharding) -> float:
        """Seconds of a device's copy of an equation, including fetching its neighbours' parts of operands."""
        return self._kernel(eqn, choice) + sum(map(self.seconds, fetched(eqn, choice, self.axes)))

    def _kernel(self, eqn: JaxprEqn, choice: OpSharding) -> float:
        cost = copy_cost(eqn, choice)
        if not has_own_strategy(choice.description):
            fused = dataclasses.replace(cost, read=0)
            return max(Roofline(launch=0).seconds(fused, each) for each in self.machine.kinds)
        if self._roofline:
            source = next((s for s in self.times.sources if isinstance(s, Roofline)), Roofline())
            return max(source.seconds(cost, each) for each in self.machine.kinds)
        own = kind(eqn)
        key = (id(eqn) if own is None else own, choice.ways, choice.operands)
        if key not in self._slowest:
            piece = copy_of(eqn, choice, self.platform)
            self._slowest[key] = self.times.slowest(piece, self.machine.kinds).seconds
        return self._slowest[key]

    def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
        """Seconds of bringing a value from one layout to another: the route's collectives, one after another."""
        return sum(map(self.seconds, self.transfers(start, end, shape, dtype)), 0.0)

    def transfers(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> tuple[Transfer, ...]:
        """The collectives that bring a value from one layout to another."""
        return transfers_of_route(plan_resharding(start, end, shape, self.axes, dtype), itemsize(dtype), self.axes)

    def seconds(self, transfer: Transfer) -> float:
        """Seconds of a collective."""
        return self._costs(dataclasses.replace(transfer, bytes=0)).seconds(transfer.bytes)

    def bytes(self, layout: Layout, shape: Sequence[int], dtype: Any) -> float:
        """The elements of a device's array, times their size."""
        return float(local_bytes(layout, jax.ShapeDtypeStruct(shape, dtype), self.axes))


def local_bytes(layout: Layout, aval: Any, axes: Axes) -> int:
    """Bytes of a device's array, in a layout of a whole value of some type."""
    return math.prod(layout.local_shape(tuple(getattr(aval, "shape", ())), axes)) * itemsize(aval.dtype)


def copy_cost(eqn: JaxprEqn, choice: OpSharding) -> Cost:
    """The cost of one device's copy of an equation: its share of the operations, padding included, and its bytes."""
    description = choice.description
    share = 1.0
    for way in choice.ways:
        share *= max(choice.parts[f][0][0].length / max(description.sizes[f], 1) for f in way.lead)
    return described_cost(eqn, description, choice.sizes(), share)


def fetched(eqn: JaxprEqn, choice: OpSharding, axes: Axes) -> list[Transfer]:
    """The data that a device's copy of an equation fetches from neighbours: halos of windows, running sums."""
    d, sent = choice.description, list[Transfer]()
    for atom, dims, lies in zip(eqn.invars, d.operands, choice.operands, strict=True):
        if not isinstance(atom, Var):
            continue
        shape = list(lies.local_shape(atom.aval.shape, axes))
        for k, dim in enumerate(dims):
            for f in dim:
                if f not in choice.parts or lies.dims[k] is None or f in choice.parts[f][1].lead:
                    continue
                intervals, way = choice.parts[f]
                cut = Cut(way.axes, math.prod(d.sizes[g] for g in dim[: dim.index(f)]), d.sizes[f])
                row = math.prod(shape) // max(shape[k], 1) * (shape[k] // max(cut.block(axes), 1))
                for interval in intervals:
                    index = np.stack([interval.indices(p, cut.size) for p in range(len(interval.starts))])
                    needed, pairs = needed_neighbours(index, cut.block(axes))
                    for distance, who in pairs.items():
                        if distance:
                            low = needed[distance][0] if distance == min(needed) else 0
                            high = needed[distance][1] if distance == max(needed) else cut.block(axes) - 1
                            size = (high - low + 1) * row * itemsize(atom.aval.dtype)
                            ends = tuple(sorted(who))
                            sent.append(Transfer("permute", way.axes, size, count(way.axes, axes), ends))
                shape[k] = shape[k] // max(cut.block(axes), 1) * sum(each.length for each in intervals)
    for way in choice.ways:
        if isinstance(way.split, Prefix):
            for var, dims, lies in zip(eqn.outvars, d.results, choice.results, strict=True):
                k = next(k for k, dim in enumerate(dims) if way.lead[0] in dim)
                shape = lies.local_shape(var.aval.shape, axes)
                ends = math.prod(shape) // max(shape[k], 1) * itemsize(var.aval.dtype)
                devices = count(way.axes, axes)
                sent.append(Transfer("all-gather", way.axes, ends * devices, devices))
    return sent
