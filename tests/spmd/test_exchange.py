"""Moves between layouts: every device has afterwards what the new layout says, whatever the old one was.

The reference is NumPy (`tests.spmd.reference`). Arrays on devices hold garbage wherever a layout promises nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from tests.budget import examples
from tests.spmd.reference import (
    COMBINE,
    MESHES,
    Device,
    block_of,
    collectives,
    devices_of,
    held,
    mesh_of,
    promised,
    random_cut,
    random_layout,
    same_bits,
)
from vnode.operators import Monoid
from vnode.operators.splits import Interval, blocks
from vnode.spmd.axis_parts import with_parts
from vnode.spmd.layout import Cut, Layout
from vnode.spmd.resharding import plan_resharding
from vnode.spmd.resharding_collectives import convert, fetch

pytestmark = pytest.mark.quickly

KINDS: Mapping[str, tuple[Monoid, ...]] = {
    "float32": (Monoid.SUM, Monoid.PROD, Monoid.MAX, Monoid.MIN),
    "bfloat16": (Monoid.MAX, Monoid.MIN),
    "float64": (Monoid.SUM, Monoid.MAX),
    "complex64": (Monoid.SUM, Monoid.PROD),
    "int32": (Monoid.SUM, Monoid.PROD, Monoid.MAX, Monoid.MIN, Monoid.AND, Monoid.OR, Monoid.XOR),
    "uint8": (Monoid.SUM, Monoid.MAX, Monoid.AND, Monoid.OR, Monoid.XOR),
    "bool": (Monoid.AND, Monoid.OR, Monoid.MAX, Monoid.MIN),
}
"""The monoids by which values of a type are partial."""

TOGETHER = 12
"""Conversions that are compiled as one program."""


@pytest.fixture(autouse=True)
def wide_numbers() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def values_of(shape: Sequence[int], dtype: str, generator: np.random.Generator) -> np.ndarray:
    """Small numbers, whose sums and products are exact, and what is easily lost: NaN, infinities, minus zero."""
    if dtype == "bool":
        return generator.random(shape) > 0.5
    numbers = generator.integers(0 if dtype == "uint8" else -4, 5, shape)
    if dtype in ("int32", "uint8"):
        return numbers.astype(dtype)
    if dtype == "complex64":
        return (numbers / 4 + 1j * np.flip(numbers) / 4).astype(dtype)
    special = generator.choice([np.nan, -0.0, np.inf, -np.inf, 0.0], shape)
    return np.where(generator.random(shape) < 0.3, special, numbers / 4).astype(jnp.dtype(dtype))


def garbage_of(dtype: Any) -> Any:
    """What stands where nothing is promised."""
    return 99 if dtype.kind in "biu" else np.nan


@dataclasses.dataclass(frozen=True)
class Case:
    """A value, and from which layout it goes to which.

    Attributes:
      shape: the factors of every dimension.
      dtype: of its elements.
      start: how it lies.
      end: how it shall lie.
      seed: of its elements.
    """

    shape: tuple[tuple[int, ...], ...]
    dtype: str
    start: Layout
    end: Layout
    seed: int

    @classmethod
    def random(cls, axes: Mapping[str, int], seed: int) -> Case:
        """Layouts of all kinds; pieces along some of the axes that cut nothing, of which some stay pieces."""
        generator = np.random.default_rng(seed)
        sizes = [1, 2, 3, 4, 5, 8] if generator.random() < 0.95 else [0, 1, 4]
        shape = tuple(
            tuple(int(n) for n in generator.choice(sizes, int(generator.integers(1, 3))))
            for _ in range(int(generator.integers(0, 4)))
        )
        dtype = str(generator.choice(list(KINDS)))
        start = random_layout(shape, axes, generator)
        end = start if generator.random() < 0.2 else random_layout(shape, axes, generator)
        if generator.random() < 0.5:
            free = [name for name in axes if name not in start.cut_axes and generator.random() < 0.8]
            one = KINDS[dtype][int(generator.integers(len(KINDS[dtype])))]
            several = [KINDS[dtype][int(i)] for i in generator.integers(len(KINDS[dtype]), size=len(free))]
            monoids = several if generator.random() < 0.2 else [one] * len(free)
            partial = tuple(zip(free, monoids, strict=True))
            stays = [p for p in partial if p[0] not in end.cut_axes and generator.random() < 0.3]
            if stays != list(partial) and len(set(monoids)) > 1:
                stays = []
            start, end = Layout(start.dims, partial), Layout(end.dims, tuple(stays))
        return cls(shape, dtype, start, end, seed)

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(math.prod(factors) for factors in self.shape)


def pieces_of(case: Case, axes: Mapping[str, int]) -> tuple[np.ndarray, dict[tuple[int, ...], np.ndarray]]:
    """The value of a case, and for each index along the axes over which it is partial a piece of it."""
    generator = np.random.default_rng(case.seed)
    counts = [axes[name] for name, _ in case.start.partial]
    pieces = {index: values_of(case.whole, case.dtype, generator) for index in np.ndindex(*counts)}
    return combined(pieces, [monoid for _, monoid in case.start.partial]), pieces


def combined(pieces: Mapping[tuple[int, ...], np.ndarray], monoids: Sequence[Monoid]) -> np.ndarray:
    """Pieces, numbered along as many axes as there are monoids, as one: along the first axis first."""
    for monoid in monoids:
        together: dict[tuple[int, ...], np.ndarray] = {}
        for index, piece in pieces.items():
            rest = index[1:]
            with np.errstate(invalid="ignore"):
                both = piece if rest not in together else COMBINE[monoid](together[rest], piece)
            together[rest] = np.asarray(both).astype(piece.dtype)
        pieces = together
    (whole,) = pieces.values()
    return whole


def run_on(mesh: Mesh, function: Any, given: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Evaluates a function on each device, given that device's arrays; gives each device's results."""
    names, sizes = mesh.axis_names, tuple(mesh.shape.values())
    spec = PartitionSpec(*names)
    stacked = [np.stack(several).reshape(*sizes, *several[0].shape) for several in zip(*given, strict=True)]

    def on_each_device(*values: Any) -> list[Any]:
        results = function([value.reshape(value.shape[len(sizes) :]) for value in values])
        return [result.reshape(*[1] * len(sizes), *result.shape) for result in results]

    made = jax.jit(jax.shard_map(on_each_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*stacked)
    flat = [np.asarray(value).reshape(math.prod(sizes), *value.shape[len(sizes) :]) for value in made]
    return [list(several) for several in zip(*flat, strict=True)]


def check(cases: Sequence[Case], axes: Mapping[str, int]) -> None:
    """Carries out cases in one program; every device must have what it should."""
    devices = list(devices_of(axes))
    values = [pieces_of(case, axes) for case in cases]

    def of(case: Case, pieces: Mapping[tuple[int, ...], np.ndarray], device: Device) -> np.ndarray:
        piece = pieces[tuple(device[name] for name, _ in case.start.partial)]
        return block_of(piece, case.start, device, axes, garbage_of(piece.dtype))

    given = [[of(case, pieces, device) for case, (_, pieces) in zip(cases, values, strict=True)] for device in devices]

    def convert_all(arrays: Sequence[Any]) -> list[Any]:
        return [
            convert(value, case.start, case.end, case.whole, axes) for value, case in zip(arrays, cases, strict=True)
        ]

    made = run_on(mesh_of(axes), convert_all, given)
    for k, (case, (whole, _)) in enumerate(zip(cases, values, strict=True)):
        monoids = [monoid for _, monoid in case.end.partial]
        groups: dict[tuple[Any, ...], dict[tuple[int, ...], np.ndarray]] = {}
        pieced = {name for name, _ in case.end.partial}
        for device, arrays in zip(devices, made, strict=True):
            group = tuple(device[name] for name in axes if name not in pieced)
            groups.setdefault(group, {})[tuple(device[name] for name, _ in case.end.partial)] = arrays[k]
        for device in devices:
            got = combined(groups[tuple(device[name] for name in axes if name not in pieced)], monoids)
            there = promised(whole, case.end, device, axes)
            want = block_of(whole, case.end, device, axes, 0)
            about = f"{case.dtype}{case.shape} from {case.start} to {case.end} on {device}: {case}"
            assert got.shape == want.shape, about
            if case.start.partial:  # neither is zero greater than minus zero, nor do machines add minus zeros alike
                got, want = (np.where(x == 0, 0, x).astype(x.dtype) for x in (got, want))
            assert same_bits(got, want)[there].all(), about


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=examples(6))
@given(seed=st.integers(0, 10**6))
def test_any_layout_to_any_other(mesh: str, seed: int) -> None:
    check([Case.random(MESHES[mesh], seed * TOGETHER + k) for k in range(TOGETHER)], MESHES[mesh])


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=100)
@given(seed=st.integers(0, 10**6))
def test_any_layout_to_any_other_many(mesh: str, seed: int) -> None:
    check([Case.random(MESHES[mesh], seed * TOGETHER + k) for k in range(TOGETHER)], MESHES[mesh])


@pytest.mark.parametrize("mesh", MESHES)
@given(seed=st.integers(0, 10**6))
def test_routes_end_where_they_should_and_send_what_is_missing(mesh: str, seed: int) -> None:
    """The bound below: on average, devices are sent at least those elements of their blocks that they lack."""
    axes = MESHES[mesh]
    case = Case.random(axes, seed)
    moves = plan_resharding(case.start, case.end, case.whole, axes, case.dtype)
    layouts = [case.start, *(move.after for move in moves)]
    assert layouts[-1] == case.end
    for move, before in zip(moves, layouts, strict=False):
        sent = move.after if move.kind == "permute" else before
        assert move.elements == math.prod(sent.local_shape(case.whole, with_parts(axes)))
        assert (move.kind == "cut") == (move.elements_sent(axes) == 0) or not move.elements
    missing = []
    for device in devices_of(axes):
        has, gets = (
            [set(held(cut, n, device, axes)) - {-1} for cut, n in zip(layout.dims, case.whole, strict=True)]
            for layout in (case.start, case.end)
        )
        both = [a & b for a, b in zip(has, gets, strict=True)]
        missing.append(math.prod(map(len, gets)) - math.prod(map(len, both)))
    assert sum(move.elements_sent(axes) for move in moves) >= np.mean(missing) - 1e-9


EMITTED = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}


@pytest.mark.parametrize("mesh", MESHES)
@given(seed=st.integers(0, 10**6))
def test_what_is_planned_is_carried_out(mesh: str, seed: int) -> None:
    """One collective for each move that sends anything, and no other, whatever combines pieces of whatever type."""
    axes, case = MESHES[mesh], Case.random(MESHES[mesh], seed)
    traced = jax.make_jaxpr(
        lambda value: convert(value, case.start, case.end, case.whole, axes), axis_env=list(axes.items())
    )(jax.ShapeDtypeStruct(case.start.local_shape(case.whole, axes), jnp.dtype(case.dtype)))
    moves = plan_resharding(case.start, case.end, case.whole, axes, case.dtype)
    assert [EMITTED[name] for name in collectives(traced.jaxpr)] == [m.kind for m in moves if m.kind != "cut"]


@dataclasses.dataclass(frozen=True)
class Need:
    """What every device needs along a dimension made of ``outer x size x inner``.

    Attributes:
      names: the axes that number the parts.
      dim: ``outer, size, inner``.
      lies_cut: whether the dimension is cut over them beforehand.
      intervals: the indices that each part needs.
      fill: what stands where there is none, or None for anything.
    """

    names: tuple[str, ...]
    dim: tuple[int, int, int]
    lies_cut: bool
    intervals: tuple[Interval, ...]
    fill: float | None

    @classmethod
    def random(cls, axes: Mapping[str, int], seed: int) -> Need:
        generator = np.random.default_rng(seed)
        names = tuple(str(name) for name in generator.permutation(list(axes)))[: int(generator.integers(1, 3))]
        parts, (outer, size, inner) = math.prod(axes[name] for name in names), generator.integers(1, (3, 14, 3))

        def interval() -> Interval:
            length = int(generator.integers(1, 7))
            start, apart = int(generator.integers(-4, size)), int(generator.integers(-2, size // parts + 3))
            stride, spread = (int(n) for n in generator.choice([1, 1, 2, 3, -1], 2))
            return Interval(tuple(start + apart * i for i in range(parts)), length, stride, abs(spread))

        of_blocks = generator.random() < 0.3  # a halo around a block
        halo = int(generator.integers(0, 3))
        block = blocks(int(size), parts)
        around = Interval(tuple(start - halo for start in block.starts), block.length + 2 * halo)
        intervals = (around,) if of_blocks else tuple(interval() for _ in range(int(generator.integers(1, 3))))
        fill = None if generator.random() < 0.3 else float(generator.choice([0.0, -np.inf]))
        return cls(names, (int(outer), int(size), int(inner)), bool(generator.random() < 0.8), intervals, fill)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=examples(6))
@given(seed=st.integers(0, 10**6))
def test_indices_are_fetched_wherever_they_lie(mesh: str, seed: int) -> None:
    axes = MESHES[mesh]
    needs = [Need.random(axes, seed * TOGETHER + k) for k in range(TOGETHER)]
    wholes = [1.0 + np.arange(2 * math.prod(need.dim)).reshape(math.prod(need.dim), 2) for need in needs]
    devices = list(devices_of(axes))

    def lies(need: Need, whole: np.ndarray, device: Device) -> np.ndarray:
        cut = random_cut(need.names, need.dim, 1, axes) if need.lies_cut else None
        return block_of(whole, Layout((cut, None)), device, axes, np.nan)

    def fetch_all(arrays: Sequence[Any]) -> list[Any]:
        return [
            fetch(
                value,
                0,
                Cut(need.names, *need.dim[:2]),
                need.lies_cut,
                math.prod(need.dim),
                need.intervals,
                need.fill,
                axes,
            )
            for value, need in zip(arrays, needs, strict=True)
        ]

    given = [[lies(need, whole, device) for need, whole in zip(needs, wholes, strict=True)] for device in devices]
    for device, arrays in zip(devices, run_on(mesh_of(axes), fetch_all, given), strict=True):
        for need, whole, got in zip(needs, wholes, arrays, strict=True):
            part = 0
            for name in need.names:
                part = part * axes[name] + device[name]
            index = np.concatenate([each.indices(part, need.dim[1]) for each in need.intervals])
            want = whole.reshape(*need.dim, 2)[:, index]
            there = np.broadcast_to((index >= 0)[:, None, None], want.shape)
            got = got.reshape(want.shape)
            assert np.array_equal(got[there], want[there]), f"{need} on {device}"
            assert need.fill is None or (got[~there] == need.fill).all(), f"{need} on {device}"
