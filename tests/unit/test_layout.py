"""Layouts: blocks make up a dimension, equal cuts are equal, and what specs mean.

The reference is NumPy's indexing (`tests.spmd.reference`), and jax's own sharding for what a `PartitionSpec` means.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.spmd.reference import MESHES, block_of, devices_of, held, mesh_of, random_cut, random_layout
from vnode.spmd.layout import Layout, from_spec, replicated

AXES = {"x": 2, "y": 4, "z": 3}
"""Sizes for which no devices are needed."""

factor_lists = st.lists(st.integers(0, 9), min_size=1, max_size=3)
names = st.lists(st.sampled_from(list(AXES)), min_size=1, unique=True)


@st.composite
def cuts(draw, factors):
    return random_cut(draw(names), factors, draw(st.integers(0, len(factors) - 1)), AXES)


@given(factor_lists, st.data())
def test_blocks_hold_every_index_once(factors, data):
    cut, n = data.draw(cuts(factors)), math.prod(factors)
    idle = math.prod(size for name, size in AXES.items() if name not in cut.axes)
    indices = np.concatenate([held(cut, n, device, AXES) for device in devices_of(AXES)])
    assert sorted(indices[indices >= 0]) == sorted(list(range(n)) * idle)


@given(factor_lists, st.data())
def test_local_is_the_shape_of_what_a_device_holds(factors, data):
    cut, n = data.draw(cuts(factors)), math.prod(factors)
    for device in devices_of(AXES):
        assert Layout((cut,)).local_shape((n,), AXES) == held(cut, n, device, AXES).shape


@given(factor_lists, st.data())
def test_cuts_are_equal_if_they_hold_the_same(factors, data):
    n = math.prod(factors)
    first = data.draw(cuts(factors))
    others = st.permutations(factors) | factor_lists.filter(lambda several: math.prod(several) == n)
    several = data.draw(others | st.sampled_from([[n], [1, n], [n, 1]]))
    second = random_cut(first.axes, several, data.draw(st.integers(0, len(several) - 1)), AXES)
    same = all(
        np.array_equal(held(first, n, device, AXES), held(second, n, device, AXES)) for device in devices_of(AXES)
    )
    assert (first == second) == same


@given(st.sampled_from(list(MESHES)), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_specs_mean_what_they_mean_to_jax(shape, multiples, data):
    mesh = mesh_of(MESHES[shape])
    axes = dict(mesh.shape)
    entries: list[list[str]] = [[] for _ in multiples]
    for name in data.draw(st.permutations(list(axes))):
        d = data.draw(st.integers(-1, len(multiples) - 1))
        if d >= 0:
            entries[d].append(name)
    whole = tuple(m * math.prod(axes[name] for name in several) for m, several in zip(multiples, entries, strict=True))
    spec = PartitionSpec(*(tuple(several) if several else None for several in entries))
    layout = from_spec(spec, whole, axes)
    places = np.arange(math.prod(whole)).reshape(whole)
    where = NamedSharding(mesh, spec).devices_indices_map(whole)
    for device, of_mesh in zip(devices_of(axes), mesh.devices.flat, strict=True):
        assert np.array_equal(block_of(places, layout, device, axes, -1), places[where[of_mesh]])


def test_axes_of_one_device_do_not_cut():
    assert from_spec(PartitionSpec("x", ("y", "z")), (4, 6), {"x": 1, "y": 1, "z": 2}) == from_spec(
        PartitionSpec(None, "z"), (4, 6), {"z": 2}
    )


@given(st.integers(0, 1000))
def test_whole_layouts(seed):
    layout = random_layout([[4], [3, 2]], AXES, np.random.default_rng(seed))
    assert layout.is_whole == (layout == replicated(2))
    assert set(layout.cut_axes) == {name for cut in layout.dims if cut is not None for name in cut.axes}
