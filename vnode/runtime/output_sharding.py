"""Sums over nodes, and the layouts in which they are read next -> the sums' output shardings.

Knows layouts and sums. Must not know passes, placements, nor who reads the sums.

A parameter sharded over the nodes' axis has a gradient that is read in shards (ZeRO, Rajbhandari et al. 2020, section
5). So the gradient is reduce-scattered, and no device holds all of it.
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
"""Maps a variable to the layout in which it lies."""

ReadLayouts = Callable[[Lying, Axes, Collection[str]], Mapping[Var, Sequence[Layout]]]
"""The layouts in which variables are read, given their layouts over some axes, and those that must not change bits."""


def choose_output_layouts(
    combined: Mapping[Var, Layout],
    layout_of: Lying,
    read_layouts: ReadLayouts,
    inner: Axes,
    axes: Axes,
    exact: Set[str],
) -> dict[Var, Layout]:
    """Chooses the layouts of totals: the first layouts in which they are read that slice `combined` further.

    Args:
      combined: for each total the layout of a device's sum, combined over the other axes.
      layout_of: gives the layouts of all other values that are read with them.
      read_layouts: gives the layouts in which variables are read.
      inner: the axes besides the nodes' axis.
      axes: the axes that may divide totals.
      exact: the axes among them whose size must not change bits of results.
    """
    # their layout over the other axes must not depend on the size of the nodes' axis
    ends = refine_over_axes(combined, layout_of, read_layouts, inner, frozenset()) if exact else dict(combined)
    return refine_over_axes(ends, layout_of, read_layouts, axes, exact)


def refine_over_axes(
    combined: Mapping[Var, Layout], layout_of: Lying, read_layouts: ReadLayouts, axes: Axes, exact: Set[str]
) -> dict[Var, Layout]:
    """Refines layouts over some axes; `read_layouts`, which takes long, is called only if a total is large."""
    if all(is_small(layout, var, axes) for var, layout in combined.items()):
        return dict(combined)
    found = read_layouts(
        lambda var: combined[var] if var in combined else restrict_to_axes(axes, layout_of(var), var.aval.shape),
        axes,
        exact,
    )
    return {var: first_finer(layout, found.get(var, ()), var, axes, exact) for var, layout in combined.items()}


def first_finer(layout: Layout, candidates: Iterable[Layout], var: Var, axes: Axes, exact: Set[str]) -> Layout:
    """The first of some layouts that slices a given one further; over `exact` axes only, if there are any.

    Small totals go to all devices, and stay whole: a user of a part slices it, and a user of all needs no all-gather.
    """
    others = {name: size for name, size in axes.items() if name not in exact}
    shape = var.aval.shape
    if is_small(layout, var, axes):
        return layout
    for each in candidates:
        finer = each != layout and is_local(layout, each, shape, axes, var.aval.dtype)
        if (
            finer
            and as_spec_layout(each, axes) == each
            and (not exact or restrict_to_axes(others, each, shape) == layout)
        ):
            return each
    return layout


def is_small(layout: Layout, var: Var, axes: Axes) -> bool:
    """Whether a device's part of a total is so small that all devices get all of it."""
    return math.prod(layout.local_shape(var.aval.shape, axes)) * itemsize(var.aval.dtype) <= SMALL


@dataclasses.dataclass(frozen=True)
class SummingDevices:
    """The devices along the nodes' axis that add totals.

    Attributes:
      axis: the nodes' axis.
      axes: the axes that partition once-computed tasks.
      exact: whether the number of devices must not change bits.
    """

    axis: str
    axes: Axes
    exact: bool

    def divided_dim(self, s: Sum, layout: Layout, end: Layout) -> int | None:
        """The dimension along which a total is divided among these devices by their addition; None if it is not.

        Args:
          s: the sum.
          layout: the layout of each device's addend.
          end: the layout in which the total is handed on.
        """
        dim = end.cut_axes.get(self.axis)
        if dim is None or s.monoid is not Monoid.SUM or s.nbytes <= SMALL:
            return None
        if self.exact and layout.partial:  # shorter partial values over other axes may be added in another order
            return None
        before, cut = layout.dims[dim], end.dims[dim]
        assert cut is not None
        minor = extends(before, cut, self.axes)
        return dim if minor is not None and minor[:1] == (self.axis,) else None

    def divide_dim(self, layout: Layout, dim: int | None, shape: Sequence[int]) -> Layout:
        """A layout of which one dimension is also divided among these devices."""
        if dim is None:
            return layout
        cut, n = layout.dims[dim], shape[dim]
        names, outer, size = (cut.axes, cut.outer, cut.size) if cut is not None else ((), 1, n)
        more = cut_of((*names, self.axis), outer, size, n, self.axes)
        return Layout((*layout.dims[:dim], more, *layout.dims[dim + 1 :]), layout.partial)
