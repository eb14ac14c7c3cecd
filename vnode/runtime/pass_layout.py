"""Pass and layouts of its values -> one device's inputs, and the inputs of one of its nodes.

    PassLayout of a pass:  x sharded over nodes, w replicated      (decided before anything of the pass is emitted)
    DeviceInputs:          this device's shard of x, and w
    DeviceInputs.take(2):  number of the device's third node, its part of x

Knows passes, layouts, and how shards are stored. Must not know schedules, nor how a node's computation is evaluated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from vnode.analysis.forms import Slice
from vnode.analysis.passes import Pass
from vnode.runtime.device_reductions import ReductionPlan
from vnode.runtime.input_packing import Packing
from vnode.runtime.mesh_function import MeshFunction
from vnode.runtime.node_loops import Sum
from vnode.spmd.layout import Layout


@dataclasses.dataclass(frozen=True)
class BatchedInput:
    """A batched value that a pass reads.

    Attributes:
      form: its form.
      value: the value, laid out so that each shard holds its device's nodes.
      dim: the dimension that is sharded over nodes.
      in_slots: whether that dimension counts nodes; otherwise it counts their elements.
      elements: the number of a node's elements along the dimension.
      shape: the shape of one node's part.
    """

    form: Slice
    value: Any
    dim: int
    in_slots: bool
    elements: int
    shape: tuple[int, ...]

    def node_part(self, shard: Any, index: jax.Array) -> Any:
        """One node's part of a device's shard, by the node's position on the device."""
        if self.in_slots:
            return lax.dynamic_index_in_dim(shard, index, self.dim, keepdims=False)
        form, n = self.form, self.elements
        part = lax.dynamic_slice_in_dim(shard, index * n, n, self.dim)
        return part.reshape(*part.shape[: form.dim], form.outer * n, *part.shape[self.dim + 1 :])

    def node_parts(self, shard: Any, waves: int) -> Any:
        """A device's shard as its nodes' parts, ``[waves, *part]``."""
        if not self.in_slots:
            shape = shard.shape
            shard = shard.reshape(*shape[: self.dim], waves, self.elements, *shape[self.dim + 1 :])
        return jnp.moveaxis(shard, self.dim, 0).reshape(waves, *self.shape)


@dataclasses.dataclass(frozen=True)
class PassLayout:
    """The layouts of a pass's values on the devices.

    Attributes:
      node_pass: the pass.
      batched: the batched values that it reads.
      divided: a node's computation, if devices compute a node together.
      inputs: the layouts in which a node reads its number, the batched values and the whole values.
      given: the present layouts of the whole values.
      sums: the sums; per-device parts of them if the node's computation is divided.
      made: the layouts of the contributions to them.
      ends: the layouts of the totals.
      parts: for each sum the dimension along which its total is divided among devices, or None.
      kept: the layouts of the values that are kept of each node; None if they are whole.
      order: the order of additions.
      awaited: the values that the pass waits for.
      packing: the packing of batched values.
      barriers: whether barriers keep compilers from fusing a node's computation with other operations.
    """

    node_pass: Pass
    batched: Sequence[BatchedInput]
    divided: MeshFunction | None
    inputs: Sequence[Layout]
    given: Sequence[Layout]
    sums: Sequence[Sum]
    made: Sequence[Layout]
    ends: Sequence[Layout]
    parts: Sequence[int | None]
    kept: Sequence[Layout] | None
    order: ReductionPlan
    awaited: Sequence[Var]
    packing: Packing
    barriers: bool

    @property
    def wanted(self) -> Sequence[Layout]:
        """The layouts in which nodes read the whole values."""
        return self.inputs[1 + len(self.batched) :]

    def pack(self, shards: Sequence[Any], waves: int) -> list[Any]:
        """The packed arrays of a device's shards."""
        return self.packing.pack(lambda i: self.batched[i].node_parts(shards[i], waves))


@dataclasses.dataclass(frozen=True)
class DeviceInputs:
    """The inputs of a device's nodes in a pass.

    Attributes:
      layout: the layouts of the pass.
      first: the number of the device's first node.
      shards: the device's shards of the batched values.
      packed: the packed arrays of them (`PassLayout.pack`).
      whole: the whole values, as nodes read them.
      evaluate: a node's computation, from its number, its parts of batched values, and whole values.
    """

    layout: PassLayout
    first: jax.Array
    shards: Sequence[Any]
    packed: Sequence[Any]
    whole: Sequence[Any]
    evaluate: Callable[[Sequence[Any]], list[Any]]

    def take(self, index: jax.Array) -> list[Any]:
        """A node's number, its parts of unpacked values, and its entries of packed arrays.

        Args:
          index: the node's position on the device.
        """
        number, packing = self.first + index, self.layout.packing
        alone = [self.layout.batched[i].node_part(self.shards[i], index) for i in packing.unpacked]
        return [number, *alone, *packing.select_node(self.packed, index)]

    def compute(self, taken: list[Any]) -> tuple[list[Any], list[Any]]:
        """A node's contributions to the sums, and the values that are kept of it.

        Args:
          taken: the result of `take`.
        """
        packing, sums = self.layout.packing, len(self.layout.sums)
        number, alone = taken[0].reshape(1), 1 + len(packing.unpacked)
        values = self.evaluate([number, *packing.unpack(taken[1:alone], taken[alone:]), *self.whole])
        return values[:sums], values[sums:]
