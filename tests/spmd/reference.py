"""Layouts carried out with NumPy: what every device of a mesh holds of a value.

Knows what a layout says, and nothing of how one is reached. Also draws layouts at random, and finds the collectives in
what jax traced. Must not know exchange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec

from vnode.operators import Monoid
from vnode.spmd.factor_blocks import InBlocks
from vnode.spmd.layout import Cut, Layout, cut_of, from_spec, replicated

MESHES: Mapping[str, Mapping[str, int]] = {
    "4": {"x": 4},
    "2x4": {"x": 2, "y": 4},
    "2x2x2": {"x": 2, "y": 2, "z": 2},
}

Device = Mapping[str, int]
"""A device, by its index along each axis."""


def mesh_of(axes: Mapping[str, int]) -> Mesh:
    """The first devices as a mesh."""
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def layouts_of(split: InBlocks, axes: Mapping[str, int], specs: Mapping[int, PartitionSpec]) -> list[Layout]:
    """Inputs in blocks lie along the share's axes, others as they are asked to."""
    found = []
    for number, (var, dim) in enumerate(zip(split.program.inputs, split.inputs, strict=True)):
        layout = from_spec(specs.get(number, PartitionSpec()), var.aval.shape, axes)
        if dim is not None:
            cut = split.share.cut(var.aval.shape[dim], axes)
            layout = Layout((*layout.dims[:dim], cut, *layout.dims[dim + 1 :]))
        found.append(layout)
    return found


def devices_of(axes: Mapping[str, int]) -> Iterator[Device]:
    """The devices of a mesh, in order."""
    for index in itertools.product(*(range(n) for n in axes.values())):
        yield dict(zip(axes, index, strict=True))


def held(cut: Cut | None, n: int, device: Device, axes: Mapping[str, int]) -> np.ndarray:
    """The indices of a dimension of `n` that a device holds, -1 where it holds anything."""
    if cut is None:
        return np.arange(n)
    whole = np.arange(n).reshape(cut.outer, cut.size, n // (cut.outer * cut.size))
    part, parts = 0, 1
    for name in cut.axes:
        part, parts = part * axes[name] + device[name], parts * axes[name]
    block = math.ceil(cut.size / parts)
    longer = np.full((cut.outer, block * parts, whole.shape[2]), -1)
    longer[:, : cut.size] = whole
    return longer[:, part * block : (part + 1) * block].reshape(-1)


def block_of(whole: np.ndarray, layout: Layout, device: Device, axes: Mapping[str, int], garbage: Any) -> np.ndarray:
    """What a device holds of a value; `garbage` where it holds anything."""
    for d, cut in enumerate(layout.dims):
        index = held(cut, whole.shape[d], device, axes)
        shape = [-1 if k == d else 1 for k in range(whole.ndim)]
        whole = np.where((index >= 0).reshape(shape), np.take(whole, index, axis=d), np.asarray(garbage, whole.dtype))
    return whole


def promised(whole: np.ndarray, layout: Layout, device: Device, axes: Mapping[str, int]) -> np.ndarray:
    """Which elements of what a device holds are the value's."""
    return block_of(np.ones(whole.shape, bool), layout, device, axes, False)


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays are equal to the last bit, signs of zero included; any NaN equals any other."""
    if a.dtype.kind in "biu":
        return a == b
    parts = [(a.real, b.real), (a.imag, b.imag)] if a.dtype.kind == "c" else [(a, b)]
    return np.logical_and.reduce(
        [(np.isnan(p) & np.isnan(q)) | ((p == q) & (np.signbit(p) == np.signbit(q))) for p, q in parts]
    )


def random_cut(names: Sequence[str], factors: Sequence[int], which: int, axes: Mapping[str, int]) -> Cut:
    """A dimension made of several factors, cut along one of them."""
    outer = math.prod(factors[:which])
    return cut_of(tuple(names), outer, factors[which], math.prod(factors), axes)


def random_layout(shape: Sequence[Sequence[int]], axes: Mapping[str, int], generator: np.random.Generator) -> Layout:
    """Some layout of an array whose dimensions are made of factors: axes on dimensions at random, idle ones too."""
    names: list[list[str]] = [[] for _ in shape]
    for name in generator.permutation(list(axes)):
        d = int(generator.integers(-1, len(shape))) if shape else -1
        if d >= 0:
            names[d].append(str(name))
    return Layout(
        tuple(
            random_cut(several, factors, int(generator.integers(len(factors))), axes) if several else None
            for several, factors in zip(names, shape, strict=True)
        )
    )


def layout_of(shape: Sequence[int], axes: Mapping[str, int], generator: np.random.Generator) -> Layout:
    """Some layout of a value: every third is whole on every device."""
    if generator.random() < 0.3:
        return replicated(len(shape))
    layout = random_layout([(n,) for n in shape], axes, generator)
    return Layout(tuple(cut if n > 1 else None for cut, n in zip(layout.dims, shape, strict=True)))


COMBINE = {
    Monoid.SUM: np.add,
    Monoid.PROD: np.multiply,
    Monoid.MAX: np.maximum,
    Monoid.MIN: np.minimum,
    Monoid.AND: np.bitwise_and,
    Monoid.OR: np.bitwise_or,
    Monoid.XOR: np.bitwise_xor,
}


COLLECTIVES = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_to_all", "reduce_scatter", "ppermute"}


def collectives(jaxpr: Jaxpr) -> Iterator[str]:
    """The collectives of a program, by name."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in COLLECTIVES:
            yield eqn.primitive.name.removesuffix("_invariant")
        for inner in jaxprs_in_params(eqn.params):
            yield from collectives(inner)
