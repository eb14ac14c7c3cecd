"""Every way to cut an equation, on equations drawn at random, against the equation itself.

Knows jax's functions that windows slide in, that move elements, that look them up, and that run along a dimension.
`brute_force` cuts into two and three parts. Must not know how a description says it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from tests.budget import examples
from tests.operators.brute_force import check, instances
from tests.operators.examples import array, weighted

pytestmark = pytest.mark.quickly

drawn, few = settings(max_examples=examples(20)), settings(max_examples=examples(8))
"""Each example is a program of some ten copies to compile; those of convolutions take long."""


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def check_all(fun: Callable[..., Any], *args: Any, of: set[str]) -> None:
    """Holds all equations of some primitives against their descriptions; there has to be one."""
    found = {instance.signature: instance for instance in instances(fun, *args, of=frozenset(of))}
    assert found
    for instance in found.values():
        check(instance)


@st.composite
def values(draw: Any, shape: tuple[int, ...], *, ties: bool = False) -> np.ndarray:
    """Numbers of a normal distribution; with `ties`, few different ones."""
    made = array(*shape, 1, seed=draw(st.integers(0, 9)))[..., 0]
    return np.round(made) if ties else made


# Windows -------------------------------------------------------------------------------------------------------------


@st.composite
def along(draw: Any, *, plain: bool = False) -> dict[str, Any]:
    """A window along one dimension, with at least one place to stand; `plain` ones are not dilated, nor cropped."""
    size, window = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    stride = draw(st.integers(1, 3))
    base, dilation = (1, 1) if plain else (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    reach, room = (window - 1) * dilation + 1, (size - 1) * base + 1
    padding = draw(st.sampled_from(["same", "valid", "any"]))
    if padding == "same":
        total = max((-(-room // stride) - 1) * stride + reach - room, 0)
        low, high = total // 2, total - total // 2
    elif padding == "valid":
        low, high = 0, 0
    else:
        low, high = draw(st.integers(0 if plain else -2, 4)), draw(st.integers(0 if plain else -2, 4))
    assume(room + low >= 0 and room + high >= 0 and room + low + high >= reach)
    return {"size": size, "window": window, "stride": stride, "pad": (low, high), "base": base, "dilation": dilation}


def of_all(spaces: list[dict[str, Any]], key: str) -> tuple[Any, ...]:
    return tuple(space[key] for space in spaces)


@st.composite
def convolutions(draw: Any) -> tuple[Callable[..., Any], np.ndarray, np.ndarray]:
    """A convolution of one or two spatial dimensions, arranged in any order."""
    spaces = draw(st.lists(along(), min_size=1, max_size=2))
    rank = len(spaces)
    groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1)]))
    batch, inner, outer = (draw(st.integers(1, 3)) for _ in range(3))
    lhs = (batch * groups[1], inner * groups[0], *of_all(spaces, "size"))
    rhs = (outer * groups[0] * groups[1], inner, *of_all(spaces, "window"))
    orders = [tuple(draw(st.permutations(range(rank + 2)))) for _ in range(3)]

    def placed(shape: tuple[int, ...], spec: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[spec.index(d)] for d in range(len(shape)))

    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=of_all(spaces, "stride"),
        padding=of_all(spaces, "pad"),
        lhs_dilation=of_all(spaces, "base"),
        rhs_dilation=of_all(spaces, "dilation"),
        dimension_numbers=lax.ConvDimensionNumbers(*orders),
        feature_group_count=groups[0],
        batch_group_count=groups[1],
    )
    return convolve, draw(values(placed(lhs, orders[0]))), draw(values(placed(rhs, orders[1])))


@few
@given(convolutions())
def test_convolutions(case):
    convolve, x, w = case
    check_all(convolve, x, w, of={"conv_general_dilated"})


@few
@given(convolutions())
def test_gradients_of_convolutions(case):
    """They are convolutions, dilated where the forward one was strided and padded by less than nothing."""
    convolve, x, w = case
    check_all(weighted(convolve, (0, 1)), x, w, of={"conv_general_dilated"})


POOLS = {
    "reduce_window_max": (lax.max, -np.inf),
    "reduce_window_min": (lax.min, np.inf),
    "reduce_window_sum": (lax.add, 0.0),
    "reduce_window": (lax.mul, 1.0),
}


@st.composite
def pools(draw: Any, names: tuple[str, ...], *, plain: bool = False) -> tuple[Callable[..., Any], np.ndarray, str]:
    spaces = draw(st.lists(along(plain=plain), min_size=1, max_size=2))
    name = draw(st.sampled_from(names))
    computation, initial = POOLS[name]
    before = draw(st.integers(0, 1))  # dimensions of examples
    ones = (1,) * before

    def pool(x: Any) -> Any:
        return lax.reduce_window(
            x,
            np.array(initial, x.dtype),
            computation,
            (*ones, *of_all(spaces, "window")),
            (*ones, *of_all(spaces, "stride")),
            (*((0, 0),) * before, *of_all(spaces, "pad")),
            (*ones, *of_all(spaces, "base")),
            (*ones, *of_all(spaces, "dilation")),
        )

    x = draw(values((*(2,) * before, *of_all(spaces, "size")), ties=draw(st.booleans())))
    return pool, x, name


@drawn
@given(pools(tuple(POOLS)))
def test_pools(case):
    pool, x, name = case
    check_all(pool, x, of={name})


@drawn
@given(pools(("reduce_window_max", "reduce_window_min"), plain=True))
def test_derivatives_of_extreme_pools(case):
    """Also of ties, of which one element has it all. jax has none of dilated windows, nor of cropped operands."""
    pool, x, _ = case
    check_all(weighted(pool), x, of={"select_and_scatter_add"})
    check_all(lambda x: jax.jvp(pool, (x,), (jnp.cos(x) + 1,)), x, of={"select_and_gather_add"})


@drawn
@given(pools(("reduce_window_sum",)))
def test_gradients_of_sums(case):
    pool, x, _ = case
    check_all(weighted(pool), x, of={"reduce_window_sum"})


# Moves ---------------------------------------------------------------------------------------------------------------


@st.composite
def slices(draw: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Slices between blocks, and between any elements, with strides."""
    shape, starts, limits, strides = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        block, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        start = draw(st.integers(0, count - 1))
        stop = draw(st.integers(start + 1, count))
        shape.append(block * count)
        starts.append(block * start)
        limits.append(block * stop)
        strides.append(draw(st.integers(1, 3)))
    plain = draw(st.booleans())
    params = {"start_indices": starts, "limit_indices": limits, "strides": None if plain else strides}
    return draw(values(tuple(shape))), params


@drawn
@given(slices())
def test_slices(case):
    x, params = case
    check_all(functools.partial(lax.slice, **params), x, of={"slice"})


@st.composite
def paddings(draw: Any) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
    config = []
    for n in shape:
        low, high, interior = draw(st.integers(-3, 3)), draw(st.integers(-3, 3)), draw(st.integers(0, 2))
        room = max((n - 1) * (interior + 1) + 1, 0) if n else 0
        assume(room + low >= 0 and room + high >= 0 and room + low + high >= 0)
        config.append((low, high, interior))
    return draw(values(tuple(shape))), config


@drawn
@given(paddings())
def test_paddings(case):
    x, config = case
    check_all(lambda x, y: lax.pad(x, y, config), x, np.float64(7), of={"pad"})


@st.composite
def joined(draw: Any) -> tuple[list[np.ndarray], int]:
    """Arrays that differ in one dimension, by whole blocks."""
    shape, block = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), draw(st.integers(1, 4))
    axis = draw(st.integers(0, len(shape) - 1))
    counts = draw(st.lists(st.integers(0, 3), min_size=2, max_size=4))
    return [
        draw(values(tuple(block * count if d == axis else n for d, n in enumerate(shape)))) for count in counts
    ], axis


@drawn
@given(joined())
def test_concatenations_and_splits(case):
    arrays, axis = case
    check_all(lambda *arrays: lax.concatenate(arrays, axis), *arrays, of={"concatenate"})
    sizes = [x.shape[axis] for x in arrays]
    check_all(lambda x: lax.split(x, sizes, axis), np.concatenate(arrays, axis), of={"split"})


@drawn
@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.data())
def test_reversals_and_rolls(shape, data):
    x = data.draw(values(tuple(shape)))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    check_all(lambda x: lax.rev(x, sorted(axes)), x, of={"rev"})
    assume(x.size)
    axis = min(axes)
    shift = data.draw(st.integers(1, max(shape[axis] - 1, 1)))
    check_all(lambda x: jnp.roll(x, shift, axis), x, of={"slice", "concatenate"})
    check_all(lambda x, k: jnp.roll(x, k, axis), x, np.int32(shift), of={"concatenate", "dynamic_slice"})


# Indices -------------------------------------------------------------------------------------------------------------

MODES = ("fill", "clip", "promise_in_bounds")
TYPES = (np.int32, np.int64, np.int8, np.uint8, np.uint32)

FAR = {dtype: [np.iinfo(dtype).min, np.iinfo(dtype).max] for dtype in TYPES} | {np.int64: [-(2**31), 2**31 - 1]}
"""Far from all places. jax (0.10) forgets what an index in 64 bits has beyond 32 where a gather fills."""


@st.composite
def indexing(draw: Any) -> dict[str, Any]:
    """An operand, how its dimensions are indexed, and indices, most of them in bounds.

    Each dimension is taken whole, looked up in, partly covered by a window, or of size one and not asked for.
    """
    ways = draw(st.lists(st.sampled_from(["whole", "one", "one", "window", "unasked"]), min_size=1, max_size=3))
    assume("one" in ways)
    shape = tuple(1 if way == "unasked" else draw(st.integers(2, 5)) for way in ways)
    slices = [
        n if way == "whole" else draw(st.integers(1, n)) if way == "window" else 1
        for n, way in zip(shape, ways, strict=True)
    ]
    asked = draw(st.permutations([d for d, way in enumerate(ways) if way in ("one", "window")]))
    if draw(st.booleans()):  # a dimension that is covered fully may be indexed, too
        asked = [*asked, *(d for d, way in enumerate(ways) if way == "whole")]
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    dtype = draw(st.sampled_from(TYPES))
    mode = draw(st.sampled_from(MODES))
    columns = []
    for d in asked:
        last = shape[d] - slices[d]
        low, high = (0, last) if mode == "promise_in_bounds" else (-2, last + 2)
        far = [] if mode == "promise_in_bounds" else FAR[dtype]
        place = st.one_of(st.integers(max(low, np.iinfo(dtype).min), high), st.sampled_from(far or [0]))
        many = math.prod(batch)
        columns.append(np.array(draw(st.lists(place, min_size=many, max_size=many)), dtype).reshape(batch))
    windows = [d for d, way in enumerate(ways) if way in ("whole", "window")]
    order = sorted(draw(st.permutations(range(len(batch) + len(windows))))[: len(windows)])
    return {
        "operand": draw(values(shape)),
        "indices": np.stack(columns, -1),
        "asked": tuple(asked),
        "single": tuple(d for d, way in enumerate(ways) if way in ("one", "unasked")),
        "offsets": tuple(order),
        "slices": tuple(slices),
        "mode": mode,
        "batch": batch,
    }


@drawn
@given(indexing(), st.sampled_from([None, 0.0, -3.0]))
def test_gathers(case, fill):
    numbers = lax.GatherDimensionNumbers(case["offsets"], case["single"], case["asked"])

    def gather(x: Any, i: Any) -> Any:
        return lax.gather(x, i, numbers, case["slices"], mode=case["mode"], fill_value=fill)

    check_all(gather, case["operand"], case["indices"], of={"gather"})


SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


@drawn
@given(indexing(), st.sampled_from(sorted(SCATTERS)), st.data())
def test_scatters(case, name, data):
    numbers = lax.ScatterDimensionNumbers(case["offsets"], case["single"], case["asked"])
    windows = iter(n for d, n in enumerate(case["slices"]) if d not in case["single"])
    batch = iter(case["batch"])
    rank = len(case["offsets"]) + len(case["batch"])
    shape = tuple(next(windows) if d in case["offsets"] else next(batch) for d in range(rank))

    def scatter(x: Any, i: Any, y: Any) -> Any:
        return SCATTERS[name](x, i, y, numbers, mode=case["mode"])

    check_all(scatter, case["operand"], case["indices"], data.draw(values(shape)), of={name})


@drawn
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3), st.data())
def test_dynamic_slices(extents, data):
    """Starts out of range are moved into it."""
    shape = tuple(m + rest for m, rest in extents)
    sizes = tuple(m for m, _ in extents)
    dtype = data.draw(st.sampled_from(TYPES))
    info = np.iinfo(dtype)
    far = st.sampled_from(FAR[dtype])
    starts = [np.array(data.draw(st.one_of(st.integers(max(-2, info.min), n + 2), far)), dtype) for n in shape]
    x, y = data.draw(values(shape)), data.draw(values(sizes))
    check_all(lambda x, *starts: lax.dynamic_slice(x, starts, sizes), x, *starts, of={"dynamic_slice"})
    check_all(lambda x, y, *at: lax.dynamic_update_slice(x, y, at), x, y, *starts, of={"dynamic_update_slice"})


# Running reductions --------------------------------------------------------------------------------------------------

RUNNING = {
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
}


@drawn
@given(
    st.sampled_from(sorted(RUNNING)),
    st.lists(st.integers(1, 7), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([np.float64, np.float32, np.int32]),
    st.data(),
)
def test_running_reductions(name, shape, reverse, dtype, data):
    assume(not (name == "cumlogsumexp" and dtype == np.int32))
    x = (data.draw(values(tuple(shape))) * 2).astype(dtype)
    axis = data.draw(st.integers(0, len(shape) - 1))
    check_all(lambda x: RUNNING[name](x, axis, reverse), x, of={name})
