"""What a search asks of whoever knows what things take.

Knows equations, layouts and machines by their figures. Must not know which strategies there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

from jax.extend.core import JaxprEqn

from vnode.operators import Algebra
from vnode.partition.machine import Machine
from vnode.spmd.choice import Choice, itemsize
from vnode.spmd.layout import Axes, Layout, count
from vnode.spmd.route import Move, route


class CostModel(Protocol):
    """What equations and moves take on one device of a mesh."""

    def compute_time(self, eqn: JaxprEqn, choice: Choice) -> float:
        """Seconds of a device's copy of an equation."""
        ...

    def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
        """Seconds of bringing a value from one layout to another."""
        ...

    def bytes(self, layout: Layout, shape: Sequence[int], dtype: Any) -> float:
        """What one device holds of a value."""
        ...


class Estimate:
    """A cost model from a machine's data sheet: rates of arithmetic, bandwidths of memory and links.

    Args:
      machine: whose slowest device counts.
      axes: of the mesh over all its devices, those longer than one.

    Example:
      >>> from vnode.spmd.layout import Cut, replicated
      >>> model = Estimate(Machine.tpu("v5e:2x4"), {"x": 2, "y": 4})
      >>> model.bytes(Layout((Cut(("y",), 1, 8), None)), (8, 3), "float32")
      24.0
      >>> rows = Layout((Cut(("y",), 1, 8), None))
      >>> model.move_time(replicated(2), rows, (8, 3), "float32")  # cutting what one has takes nothing
      0.0
    """

    def __init__(self, machine: Machine, axes: Axes) -> None:
        self.machine, self.axes = machine, axes
        self._mesh = machine.mesh(axes)
        self._collective = functools.cache(self._ask)
        kinds = machine.kinds
        self._rate = functools.cache(lambda dtype: min(kind.rate(dtype) for kind in kinds))
        self._vector = min(kind.vector for kind in kinds)
        self._bandwidth = min(kind.bandwidth for kind in kinds)

    def compute_time(self, eqn: JaxprEqn, choice: Choice) -> float:
        """Arithmetic or memory traffic, whichever takes longer; what passes element by element is only written.

        Source: the roofline of Williams, Waterman, Patterson (Communications of the ACM 52, 2009); that a compiler
        fuses element-wise equations with those that they read from is assumed.
        """
        description = choice.description
        divided = count([name for way in choice.ways for name in way.axes], self.axes)
        operations = description.flops / divided
        written = sum(
            self.bytes(layout, getattr(var.aval, "shape", ()), var.aval.dtype)
            for var, layout in zip(eqn.outvars, choice.results, strict=True)
        )
        if description.has(Algebra.CONTRACTS):
            read = sum(
                self.bytes(layout, getattr(atom.aval, "shape", ()), atom.aval.dtype)
                for atom, layout in zip(eqn.invars, choice.operands, strict=True)
            )
            dtype = str(getattr(eqn.invars[0].aval, "dtype", "float32"))
            return max(operations / self._rate(dtype), (read + written) / self._bandwidth)
        return max(operations / self._vector, written / self._bandwidth)

    def move_time(self, start: Layout, end: Layout, shape: Sequence[int], dtype: Any) -> float:
        """The collectives of the route, one after another."""
        kind = _dtype(dtype)
        moves = route(start, end, shape, self.axes, kind)
        return sum(self._move(move, move.elements * itemsize(kind)) for move in moves)

    def _move(self, move: Move, held: float) -> float:
        if move.kind == "cut":
            return 0.0
        cost = self._collective(move.kind.replace("-", "_"), move.axes)
        return cost.seconds(held * count(move.axes, self.axes) if move.kind == "all-gather" else held)

    def _ask(self, name: str, axes: tuple[str, ...]) -> Any:
        return self.machine.collective(name, self._mesh.groups(*axes))

    def bytes(self, layout: Layout, shape: Sequence[int], dtype: Any) -> float:
        """The elements of a device's array, times their size."""
        return float(math.prod(layout.local(shape, self.axes)) * itemsize(_dtype(dtype)))


def _dtype(dtype: Any) -> Any:
    import numpy as np

    return np.dtype(dtype) if isinstance(dtype, str) else dtype
