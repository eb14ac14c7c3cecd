"""Sliding windows and running sums along a dimension.

Knows how a window's parameters tie a dimension of the operand to one of the result. Windows that overlap, have gaps
inside, or reach into padding can only be taken whole; windows that tile the dimension are a reshape of it. Also used
by the convolutions. Must not know what is split.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.extend.core import JaxprEqn

from vnode.operators.description import Dim, Dims, Factors, Monoid, OperatorDescription, Sizes, rule


@dataclasses.dataclass(frozen=True)
class Window:
    """One spatial dimension of a windowed equation.

    Attributes:
      operand: factors of the operand's dimension.
      result: factors of the result's dimension.
      window: factors of the window's extent, as far as an array has it.
      whole: factors that must be whole.
      reduced: factors that are reduced over the window.
      stride: the factor whose size is the stride, if the windows tile the operand.
    """

    operand: Dim
    result: Dim
    window: Dim
    whole: frozenset[int] = frozenset()
    reduced: frozenset[int] = frozenset()
    stride: int | None = None


def window_dim(
    f: Factors,
    operand: int,
    result: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    base_dilation: int,
    window_dilation: int,
    *,
    kernel: bool,
) -> Window:
    """Describes one dimension that a window slides along.

    Args:
      f: where new factors come from.
      operand: size of the operand's dimension.
      result: size of the result's dimension.
      window: extent of the window, in elements.
      stride: how far it moves.
      padding: added before and after.
      base_dilation: distance of the operand's elements.
      window_dilation: distance of the window's elements.
      kernel: the window's extent is a dimension of an operand.
    """
    reach = (window - 1) * window_dilation + 1
    plain = tuple(padding) == (0, 0) and base_dilation == 1
    if plain and window == 1 and stride == 1:
        position = f.new(result)
        return Window((position,), (position,), ())
    if plain and reach == window and window == operand and result == 1:  # one window covers everything
        inside = f.new(window)
        return Window((inside,), (), (inside,), reduced=frozenset({inside}), stride=inside)
    if plain and reach <= stride and operand == result * stride:
        position, inside = f.new(result), f.new(stride)
        if reach == window == stride:
            return Window((position, inside), (position,), (inside,), reduced=frozenset({inside}), stride=inside)
        extent: Dim = (f.new(window),) if kernel else ()
        return Window((position, inside), (position,), extent, whole=frozenset({inside, *extent}))
    before, after = f.new(operand), f.new(result)
    extent = (f.new(window),) if kernel else ()
    return Window((before,), (after,), extent, whole=frozenset({before, after, *extent}))


def window_dims(f: Factors, operand: tuple[int, ...], result: tuple[int, ...], params: dict[str, Any]) -> list[Window]:
    """The windows of a ``reduce_window``-like equation, one for every dimension."""
    ones = (1,) * len(operand)
    return [
        window_dim(f, *each, kernel=False)
        for each in zip(
            operand,
            result,
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params.get("base_dilation") or ones,
            params.get("window_dilation") or ones,
            strict=True,
        )
    ]


def uncounted(windows: list[Window]) -> frozenset[int]:
    """Factors of the operand that are no part of ``result x window``, which is what windows cost."""
    return frozenset(f for w in windows for f in w.operand if f not in w.result and f not in w.window)


def work(windows: list[Window], params: dict[str, Any]) -> int:
    """Operations for each index of the counted factors: the extents of the windows that have no factor."""
    return math.prod(n for w, n in zip(windows, params["window_dimensions"], strict=True) if not w.window)


def windowed(eqn: JaxprEqn, operands: int, monoid: Monoid | None) -> OperatorDescription:
    """A reduction over windows of the first `operands` operands; those that follow are scalars."""
    f = Factors()
    windows = window_dims(f, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params)
    dims: Dims = tuple(w.operand for w in windows)
    inside = frozenset().union(*(w.reduced for w in windows))

    def resize(d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
        window, strides = list(e.params["window_dimensions"]), list(e.params["window_strides"])
        for i, w in enumerate(windows):
            if w.stride is not None:
                window[i] = strides[i] = sizes[w.stride]
        return {**e.params, "window_dimensions": tuple(window), "window_strides": tuple(strides)}

    return OperatorDescription(
        sizes=f.sizes,
        operands=(dims,) * operands + ((),) * (len(eqn.invars) - operands),
        results=(tuple(w.result for w in windows),) * len(eqn.outvars),
        reduced={} if monoid is None else dict.fromkeys(inside, monoid),
        whole=frozenset().union(*(w.whole for w in windows), inside if monoid is None else ()),
        linear=(frozenset({0}),) if monoid is Monoid.SUM else (),
        uncounted=uncounted(windows),
        work=work(windows, eqn.params),
        resize=resize,
    )


WINDOW_MONOIDS = {
    "reduce_window_sum": Monoid.SUM,
    "reduce_window_max": Monoid.MAX,
    "reduce_window_min": Monoid.MIN,
}


@rule(*WINDOW_MONOIDS)
def reduce_window_monoid(eqn: JaxprEqn) -> OperatorDescription:
    return windowed(eqn, 1, WINDOW_MONOIDS[eqn.primitive.name])


@rule("reduce_window")
def reduce_window(eqn: JaxprEqn) -> OperatorDescription:
    """Any computation; its initial values are scalar operands."""
    return windowed(eqn, len(eqn.outvars), None)


@rule("select_and_gather_add")
def select_and_gather_add(eqn: JaxprEqn) -> OperatorDescription:
    """From each window the tangent at the place where the second operand is extreme."""
    description = windowed(eqn, 2, None)
    return dataclasses.replace(description, linear=(frozenset({0}),))


@rule("select_and_scatter_add")
def select_and_scatter_add(eqn: JaxprEqn) -> OperatorDescription:
    """Adds each element of the first operand to the place of its window where the second operand is extreme."""
    f = Factors()
    windows = window_dims(f, eqn.invars[1].aval.shape, eqn.invars[0].aval.shape, eqn.params)
    operand = tuple(w.operand for w in windows)
    return OperatorDescription(
        sizes=f.sizes,
        operands=(tuple(w.result for w in windows), operand),
        results=(operand,),
        whole=frozenset().union(*(w.whole | w.reduced for w in windows)),
        linear=(frozenset({0}),),
        uncounted=uncounted(windows),
        work=work(windows, eqn.params),
    )


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    return OperatorDescription(
        sizes=f.sizes,
        operands=(dims,),
        results=(dims,),
        whole=frozenset(dims[eqn.params["axis"]]),
        linear=(frozenset({0}),) if eqn.primitive.name == "cumsum" else (),
    )
