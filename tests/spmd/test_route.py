"""Routes between layouts: what they send, beside gathering and slicing, and beside XLA's own resharding.

The references are arithmetic on layouts, `jax.device_put`, and the collectives in what XLA compiles of an identity
whose argument and result are sharded so. What each device holds after a route is checked in `test_exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests import ahead
from tests.budget import examples
from tests.spmd.reference import mesh_of
from vnode.operators import Monoid
from vnode.partition.hlo import find_collectives, parse
from vnode.spmd.axis_parts import device_groups, join_names, parts_of, split_axes, split_names
from vnode.spmd.layout import Layout, from_spec
from vnode.spmd.resharding import plan_resharding
from vnode.spmd.resharding_collectives import convert

P = PartitionSpec
MESHES = {"8": {"x": 8}, "2x4": {"x": 2, "y": 4}, "2x2x2": {"x": 2, "y": 2, "z": 2}}
SHAPE = (16, 32)


@st.composite
def specs(draw: st.DrawFn, axes: Mapping[str, int]) -> PartitionSpec:
    names = draw(st.permutations(list(axes)))[: draw(st.integers(0, len(axes)))]
    first = draw(st.integers(0, len(names)))
    return P(tuple(names[:first]) or None, tuple(names[first:]) or None)


def layout_of(spec: PartitionSpec, axes: Mapping[str, int]) -> Layout:
    return from_spec(spec, SHAPE, axes)


def sent(start: Layout, end: Layout, axes: Mapping[str, int], allow_permutes: bool = True) -> float:
    return sum(move.elements_sent(axes) for move in plan_resharding(start, end, SHAPE, axes, "float32", allow_permutes))


def gathered_and_cut(start: Layout, end: Layout, axes: Mapping[str, int]) -> float:
    """Elements that a device sends if each dimension is put together as far as it lies otherwise, and then cut."""
    parts = 1
    for before, after in zip(start.dims, end.dims, strict=True):
        names, wanted = (cut.axes if cut is not None else () for cut in (before, after))
        same = 0
        while names[: same + 1] == wanted[: same + 1] and same < min(len(names), len(wanted)):
            same += 1
        parts *= math.prod(axes[name] for name in names[same:])
    return math.prod(start.local_shape(SHAPE, axes)) * (parts - 1)


def resharded(start: PartitionSpec, end: PartitionSpec, axes: Mapping[str, int]) -> float:
    """Elements that a device sends where XLA brings an array from one sharding to the other."""
    before, after = (NamedSharding(mesh_of(axes), spec) for spec in (start, end))
    compiled = jax.jit(lambda x: x, in_shardings=before, out_shardings=after).lower(
        jax.ShapeDtypeStruct(SHAPE, np.float32)
    )
    total = 0.0
    for each in find_collectives(parse(compiled.compile().as_text())):
        rest = (each.devices - 1) / each.devices if each.devices else 1.0
        total += each.bytes / 4 * rest * (2 if each.kind == "all-reduce" else 1)
    return total


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.sampled_from([2, 4]))
def test_how_pieces_are_combined_does_not_depend_on_other_axes(data: st.DataObject, size: int) -> None:
    """A collective may add in another order if it is another one, or if arrays are longer or shorter."""
    names = {"x": size, "y": 2, "z": 2}
    start, end = data.draw(specs({"z": 2})), data.draw(specs(names))
    combined = []
    for longer in (1, 2):
        axes = {**names, "y": 2 * longer}
        lies, wanted = (from_spec(spec, (32, 32), axes) for spec in (start, end))
        moves = plan_resharding(Layout(lies.dims, (("x", Monoid.SUM),)), wanted, (32, 32), axes, "float32")
        combined.append([(m.kind, m.axes, m.elements, m.dim) for m in moves if m.monoid is not None])
    assert combined[0] == combined[1]


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_never_more_than_gathering_and_slicing(mesh: str, data: st.DataObject) -> None:
    axes = MESHES[mesh]
    start, end = (layout_of(data.draw(specs(axes)), axes) for _ in range(2))
    found = sent(start, end, axes)
    assert found <= sent(start, end, axes, allow_permutes=False) <= gathered_and_cut(start, end, axes)


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_never_more_than_xla(mesh: str, data: st.DataObject) -> None:
    axes = MESHES[mesh]
    start, end = (data.draw(specs(axes)) for _ in range(2))
    assert sent(*(layout_of(spec, axes) for spec in (start, end)), axes) <= resharded(start, end, axes) + 1e-9


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_values_are_those_of_device_put(mesh: str, data: st.DataObject) -> None:
    axes = MESHES[mesh]
    start, end = (data.draw(specs(axes)) for _ in range(2))
    before, after = (NamedSharding(mesh_of(axes), spec) for spec in (start, end))
    value = jax.device_put(np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE), before)
    moved = jax.jit(
        jax.shard_map(
            lambda x: convert(x, layout_of(start, axes), layout_of(end, axes), SHAPE, axes),
            mesh=mesh_of(axes),
            in_specs=start,
            out_specs=end,
            check_vma=False,
        )
    )(value)
    wanted = jax.device_put(value, after)
    for one, other in zip(moved.addressable_shards, wanted.addressable_shards, strict=True):
        assert one.device == other.device and np.array_equal(one.data, other.data)


SHARD = math.prod(SHAPE) // 8

EXPECTED = {
    "another order": ("2x4", P(("x", "y")), P(("y", "x")), [("permute", SHARD)]),
    "two dimensions exchange axes": ("2x2x2", P("x", "y"), P("y", "x"), [("permute", 2 * SHARD)]),
    "another axis": ("2x2x2", P("x"), P("z"), [("permute", 4 * SHARD)]),
    "another axis, shorter blocks": ("2x4", P("x"), P("y"), [("permute", 2 * SHARD)]),
    "both": ("2x4", P(("x", "y")), P("y", "x"), [("permute", SHARD), ("all-to-all", SHARD / 2)]),
    "axes of other sizes": ("2x4", P("x", "y"), P("y", "x"), [("permute", SHARD), ("all-to-all", SHARD / 2)]),
    "cut before it is gathered": ("2x4", P("x"), P(None, "y"), [("all-gather", SHARD)]),
}
"""A mesh, from where to where, and what each device sends."""


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_sent(name: str) -> None:
    mesh, start, end, wanted = EXPECTED[name]
    axes = MESHES[mesh]
    moves = plan_resharding(layout_of(start, axes), layout_of(end, axes), SHAPE, axes, "float32")
    assert [(move.kind, move.elements_sent(axes)) for move in moves if move.kind != "cut"] == wanted


def test_pieces_are_scattered_where_they_can_be_sent_on() -> None:
    """A quarter of the array is what each of four devices adds up; it goes where it belongs in one piece."""
    axes = {"x": 4, "y": 4}
    start, end = (layout_of(spec, axes) for spec in (P(None, "y"), P("x", "y")))
    moves = plan_resharding(Layout(start.dims, (("x", Monoid.SUM),)), end, SHAPE, axes, "float32")
    assert [move.kind for move in moves] == ["reduce-scatter"]
    start, end = (layout_of(spec, axes) for spec in (P("y"), P(("x", "y"))))
    moves = plan_resharding(Layout(start.dims, (("x", Monoid.SUM),)), end, SHAPE, axes, "float32")
    assert [move.kind for move in moves] == ["reduce-scatter", "permute"]


def test_devices_that_may_not_send_to_single_others_gather() -> None:
    axes = MESHES["2x4"]
    start, end = (layout_of(spec, axes) for spec in (P(("x", "y")), P(("y", "x"))))
    moves = plan_resharding(start, end, SHAPE, axes, "float32", allow_permutes=False)
    assert [move.kind for move in moves] == ["all-gather", "cut"]


def test_parts_of_axes() -> None:
    axes = {"x": 2, "y": 8}
    assert {name: part.size for name, part in parts_of(axes).items()} == {"y[0]": 2, "y[1]": 4}
    assert split_names(("y", "x"), axes) == ("y[0]", "y[1]", "x") and join_names(("y[0]", "y[1]", "x"), axes) == (
        "y",
        "x",
    )
    assert dict(split_axes(axes, whole=("y",))) == axes
    assert device_groups(("y[0]",), axes) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert device_groups(("y[1]",), axes) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert not parts_of({"x": 4, "y": 4}) and not parts_of({"a": 2, "b": 4, "c": 8})  # alike, and too many


@pytest.mark.tpu
def test_on_tpus() -> None:
    """The compiler carries out just these."""
    shard = 1024 * 2048 * 4 // 8
    both = [["collective-permute", shard], ["all-to-all", shard]]
    assert ahead.said("resharding_on_tpus", hasty=True) == [
        [["collective-permute", shard]],
        [["collective-permute", 2 * shard]],
        both,
        both,
    ]
