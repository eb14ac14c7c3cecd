"""How sums over nodes are handed on: to each device whole, or its part only, as who reads them next wants them.

Knows layouts and sums. Must not know passes, placements, nor what reads the sums.

A gradient of what is sharded over the nodes' axis is read in shards (ZeRO, Rajbhandari et al. 2020, section 5): so it
is added by a reduce-scatter, and no device has all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from jax.extend.core import Var

from vnode.operators import Monoid
from vnode.runtime.device_reductions import SMALL
from vnode.runtime.node_loops import Sum
from vnode.spmd.layout import Axes, Layout, cut_of, restrict_to_axes
from vnode.spmd.op_sharding import itemsize
from vnode.spmd.resharding import extends, is_local
from vnode.spmd.sharded_program import as_spec_layout

Lying = Callable[[Var], Layout]
"""How each variable lies."""

Wanted = Callable[[Lying, Axes, Collection[str]], Mapping[Var, Sequence[Layout]]]
"""In which layouts variables are read, if they lie in some way over some axes, of which some must not show in bits."""


def choose_output_layouts(
    lies: Mapping[Var, Layout], lying: Lying, wanted: Wanted, inner: Axes, axes: Axes, exact: Set[str]
) -> dict[Var, Layout]:
    """How totals are handed on, of which all that `lies` says could be handed on.

    Args:
      lies: how pieces of them lie, combined over the nodes' axis.
      lying: how everything else lies that is read with them.
      wanted: says how they are read.
      inner: the axes besides the nodes'.
      axes: those over which they may be divided.
      exact: of these, those whose size must not show in the bits of results.
    """
    # How they lie over the other axes must not depend on how long the nodes' is.
    ends = refine_over_axes(lies, lying, wanted, inner, frozenset()) if exact else dict(lies)
    return refine_over_axes(ends, lying, wanted, axes, exact)


def refine_over_axes(
    lies: Mapping[Var, Layout], lying: Lying, wanted: Wanted, axes: Axes, exact: Set[str]
) -> dict[Var, Layout]:
    """The same over some axes."""
    found = wanted(
        lambda var: lies[var] if var in lies else restrict_to_axes(axes, lying(var), var.aval.shape),
        axes,
        exact,
    )
    return {var: first_finer(layout, found.get(var, ()), var, axes, exact) for var, layout in lies.items()}


def first_finer(layout: Layout, wanted: Iterable[Layout], var: Var, axes: Axes, exact: Set[str]) -> Layout:
    """The first of some layouts of which devices have it all in a given one, and more; over `exact` axes if any.

    Small totals go to all devices, and stay whole there: who reads a part takes it, and who reads all need not ask.
    """
    others = {name: size for name, size in axes.items() if name not in exact}
    shape = var.aval.shape
    if math.prod(layout.local_shape(shape, axes)) * itemsize(var.aval.dtype) <= SMALL:
        return layout
    for each in wanted:
        finer = each != layout and is_local(layout, each, shape, axes, var.aval.dtype)
        if (
            finer
            and as_spec_layout(each, axes) == each
            and (not exact or restrict_to_axes(others, each, shape) == layout)
        ):
            return each
    return layout


@dataclasses.dataclass(frozen=True)
class SummingDevices:
    """Devices along the nodes' axis that add totals.

    Attributes:
      axis: the nodes'.
      axes: over which what is computed once is divided.
      exact: whether the number of devices must not show in bits.
    """

    axis: str
    axes: Axes
    exact: bool

    def divided_dim(self, s: Sum, layout: Layout, end: Layout) -> int | None:
        """Along which dimension a total is divided among these devices when they add it; None if it is not.

        Args:
          s: what each device has.
          layout: how that lies.
          end: how the total is handed on.
        """
        dim = end.cut_axes.get(self.axis)
        if dim is None or s.monoid is not Monoid.SUM or s.nbytes <= SMALL:
            return None
        if self.exact and layout.partial:  # pieces over other axes may be added in another order if they are shorter
            return None
        before, cut = layout.dims[dim], end.dims[dim]
        assert cut is not None
        minor = extends(before, cut, self.axes)
        return dim if minor is not None and minor[:1] == (self.axis,) else None

    def divide_dim(self, layout: Layout, dim: int | None, shape: Sequence[int]) -> Layout:
        """A layout of which one dimension is divided among these devices as well."""
        if dim is None:
            return layout
        cut, n = layout.dims[dim], shape[dim]
        names, outer, size = (cut.axes, cut.outer, cut.size) if cut is not None else ((), 1, n)
        more = cut_of((*names, self.axis), outer, size, n, self.axes)
        return Layout((*layout.dims[:dim], more, *layout.dims[dim + 1 :]), layout.partial)
