"""Sliding windows and running reductions along a dimension.

Knows how a window's parameters tie a dimension of the operand to one of the result: windows that tile the dimension are
a reshape of it, others need their neighbours (`Windowed`). Also used by the convolutions. Must not know what is split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from vnode.operators.description import Dim, Dims, Factors, OperatorDescription, Positions, Sizes, Work
from vnode.operators.monoid import Monoid
from vnode.operators.registry import rule
from vnode.operators.splits import WHOLE, Prefix, Reduced, Windowed


@dataclasses.dataclass(frozen=True)
class Window:
    """One spatial dimension of a windowed equation.

    Attributes:
      operand: factors of the operand's dimension.
      result: factors of the result's dimension.
      window: factors of the window's extent, as far as an array has it.
      window_factor: the factor of the places in a window, if the windows tile the operand; its size is the stride.
      tie: the split of the factors, if the windows overlap, have gaps, or reach into padding.
      repeats: operations per index that no factor counts.
    """

    operand: Dim
    result: Dim
    window: Dim
    window_factor: int | None = None
    tie: Windowed | None = None
    repeats: int = 1


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
    monoid: Monoid | None,
    around: tuple[Monoid, ...] | None = (),
    back: bool = False,
) -> Window:
    """Describes one dimension that a window slides along.

    Args:
      f: makes new factors.
      operand: size of the operand's dimension.
      result: size of the result's dimension.
      window: extent of the window, in elements.
      stride: distance between windows.
      padding: added before and after.
      base_dilation: distance of the operand's elements.
      window_dilation: distance of the window's elements.
      kernel: the window's extent is a dimension of an operand.
      monoid: reduces a window; None if no monoid does.
      around: padding of each operand, as in `Windowed`; None if no value is neutral.
      back: whether a result has the operand's places, as in `Windowed`; perhaps by factors of its own.
    """
    reach = (window - 1) * window_dilation + 1
    plain = tuple(padding) == (0, 0) and base_dilation == 1
    vanishing = WHOLE if monoid is None else Reduced(monoid)
    if plain and window == 1 and stride == 1:
        position = f.new(result)
        return Window((position,), (position,), ())
    if plain and reach == window and window == operand and result == 1:  # one window covers everything
        inside = f.new(window, vanishing)
        return Window((inside,), (), (inside,), inside)
    if plain and reach <= stride and operand == result * stride:
        position = f.new(result)
        if reach == window == stride:
            inside = f.new(stride, vanishing)
            return Window((position, inside), (position,), (inside,), inside)
        inside = f.new(stride, WHOLE, counted=False)
        extent: Dim = (f.new(window, WHOLE),) if kernel else ()
        return Window((position, inside), (position,), extent, repeats=1 if kernel else window)
    before, after = f.new(operand), f.new(result)
    element = f.new(window) if kernel else None
    there = f.new(operand) if back else None
    size = window, stride, *padding, base_dilation, window_dilation
    tied = [factor for factor in (before, after, element, there) if factor is not None]
    if around is None and not plain:
        f.change(*tied, split=WHOLE)
        f.change(before, counted=False)
        return Window((before,), (after,), (), repeats=window)
    tie = Windowed(before, after, element, *size, monoid, around or (), there)
    f.change(*tied, split=tie)
    return Window((before,), (after,), () if element is None else (element,), tie=tie)


def window_dims(
    f: Factors, operand: tuple[int, ...], result: tuple[int, ...], params: dict[str, Any], **options: Any
) -> list[Window]:
    """The windows of a ``reduce_window``-like equation, one for every dimension."""
    ones = (1,) * len(operand)
    return [
        window_dim(f, *each, kernel=False, **options)
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


def resize_windows(windows: Sequence[Window], d: OperatorDescription, e: JaxprEqn, sizes: Sizes) -> dict[str, Any]:
    """The parameters that describe windows, for a copy with factor sizes `sizes`."""
    extent, stride = list(e.params.get("window_dimensions", ())), list(e.params["window_strides"])
    padding = list(e.params["padding"])
    for i, w in enumerate(windows):
        if w.window_factor is not None:
            stride[i] = sizes[w.window_factor]
            if extent:
                extent[i] = sizes[w.window_factor]
        if w.tie is not None:
            padding[i] = w.tie.padding(sizes, d.sizes)
    of_windows = {"window_strides": tuple(stride), "padding": tuple(padding)}
    return {**e.params, **of_windows, **({"window_dimensions": tuple(extent)} if extent else {})}


def windowed(
    eqn: JaxprEqn, operands: int, monoid: Monoid | None, around: tuple[Monoid, ...] | None
) -> OperatorDescription:
    """A reduction over windows of the first `operands` operands; those that follow are scalars."""
    f = Factors()
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    windows = window_dims(f, *shapes, eqn.params, monoid=monoid, around=around)
    dims: Dims = tuple(w.operand for w in windows)
    return OperatorDescription(
        factors=f.all,
        operands=(dims,) * operands + ((),) * (len(eqn.invars) - operands),
        results=(tuple(w.result for w in windows),) * len(eqn.outvars),
        linear=(frozenset({0}),) if monoid is Monoid.SUM else (),
        work=Work(math.prod(w.repeats for w in windows)),
        resize=lambda d, e, sizes: resize_windows(windows, d, e, sizes),
    )


WINDOW_MONOIDS = {
    "reduce_window_sum": Monoid.SUM,
    "reduce_window_max": Monoid.MAX,
    "reduce_window_min": Monoid.MIN,
}


@rule(*WINDOW_MONOIDS)
def reduce_window_monoid(eqn: JaxprEqn) -> OperatorDescription:
    monoid = WINDOW_MONOIDS[eqn.primitive.name]
    return windowed(eqn, 1, monoid, (monoid,))


@rule("reduce_window")
def reduce_window(eqn: JaxprEqn) -> OperatorDescription:
    """Any computation, from initial values that are scalar operands, and need not be neutral."""
    return windowed(eqn, len(eqn.outvars), None, None)


def extreme_monoid(eqn: JaxprEqn) -> Monoid:
    """The monoid whose identity a comparison never selects."""
    return Monoid.MAX if eqn.params["select_prim"].name == "ge" else Monoid.MIN


@rule("select_and_gather_add")
def select_and_gather_add(eqn: JaxprEqn) -> OperatorDescription:
    """From each window the tangent at the place where the second operand is extreme."""
    description = windowed(eqn, 2, None, (Monoid.SUM, extreme_monoid(eqn)))
    return dataclasses.replace(description, linear=(frozenset({0}),))


@rule("select_and_scatter_add")
def select_and_scatter_add(eqn: JaxprEqn) -> OperatorDescription:
    """Adds each element of the first operand to the place of its window where the second operand is extreme."""
    f = Factors()
    shapes = eqn.invars[1].aval.shape, eqn.invars[0].aval.shape
    around = (Monoid.SUM, extreme_monoid(eqn))
    windows = window_dims(f, *shapes, eqn.params, monoid=None, around=around, back=True)
    places = tuple(w.operand if w.tie is None or w.tie.back is None else (w.tie.back,) for w in windows)
    f.change(*(w.tie.back for w in windows if w.tie is not None and w.tie.back is not None), counted=False)

    def emit(
        d: OperatorDescription, e: JaxprEqn, operands: Sequence[Any], sizes: Sizes, positions: Positions
    ) -> list[Any]:
        """A copy collects from all windows over its places, and returns its own places."""
        made = e.primitive.bind(*operands, **resize_windows(windows, d, e, sizes))
        for i, w in enumerate(windows):
            if w.tie is not None and w.tie.back is not None and w.tie.back in positions:
                made = lax.slice_in_dim(made, w.tie.before, w.tie.before + sizes[w.tie.back], axis=i)
        return [made]

    return OperatorDescription(
        factors=f.all,
        operands=(tuple(w.result for w in windows), tuple(w.operand for w in windows)),
        results=(places,),
        linear=(frozenset({0}),),
        work=Work(math.prod(w.repeats for w in windows)),
        emit=emit,
    )


PREFIXES = {
    "cumsum": (jnp.add, Monoid.SUM),
    "cumprod": (jnp.multiply, Monoid.PROD),
    "cummax": (jnp.maximum, Monoid.MAX),
    "cummin": (jnp.minimum, Monoid.MIN),
    "cumlogsumexp": (jnp.logaddexp, Monoid.MAX),
}
"""The function that combines running values, and the monoid whose identity is neutral."""


@rule(*PREFIXES)
def cumulative(eqn: JaxprEqn) -> OperatorDescription:
    f = Factors()
    dims = f.dims(eqn.invars[0].aval.shape)
    name = eqn.primitive.name
    f.change(*dims[eqn.params["axis"]], split=Prefix(*PREFIXES[name], eqn.params["reverse"]))
    return OperatorDescription(
        factors=f.all,
        operands=(dims,),
        results=(dims,),
        linear=(frozenset({0}),) if name == "cumsum" else (),
        work=Work(1, 1) if name == "cumlogsumexp" else None,
    )
