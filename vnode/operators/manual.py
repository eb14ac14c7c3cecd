"""Per-shard program (`jax.shard_map`) -> program on whole values.

Knows the parameters of ``shard_map``, and that `jax.vmap` gives collectives over its named axis the same meaning. Must
not know batches, nodes or devices: only the sizes of the mesh's axes count.

A shard is an index of named axes of `jax.vmap`. An operand is split along the dimensions that its spec names, and a
result is joined along those of its own. Along axes that it does not name, the first shard's result is taken, as on
devices.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import psum_p

NAME = "shard_map"

CASTS = {"pvary", "pcast", "vary_unreduced_cast_p", "preduced"}
"""Identities that change only the type of a shard's value: over which axes it varies."""


def replicates(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of `jax.pmap`, which has no primitive of its own, but a stack frame."""
    traceback = eqn.source_info.traceback
    inside = itertools.takewhile(lambda frame: LIBRARY in frame.file_name, traceback.frames if traceback else ())
    return any(os.path.basename(frame.file_name) == "pmap.py" for frame in inside)


LIBRARY = os.path.join(os.path.dirname(jax.__file__), "")


def without_varying_types(eqn: JaxprEqn) -> JaxprEqn:
    """Removes from an equation of a per-shard program the varying axes of its results' types."""
    if eqn.primitive.name != "psum_invariant":
        return eqn
    return eqn.replace(primitive=psum_p, params={"axis_index_groups": None, **eqn.params})


def call_on_whole_values(eqn: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    """Rewrites a ``shard_map`` as a call of a program on whole values.

    Args:
      eqn: the ``shard_map``.
      body: its body, typed for no mesh.

    Returns:
      An equation with the same operands and results.
    """
    operands = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    whole = jax.make_jaxpr(per_shard(eqn, body))(*operands)  # with its constants, which jax.jit would make operands

    def alike(*_: Any) -> list[Any]:
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in whole.jaxpr.outvars]

    (call,) = jax.make_jaxpr(jax.jit(alike))(*operands).jaxpr.eqns
    params = {**call.params, "jaxpr": whole}
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info, params=params)


def per_shard(eqn: JaxprEqn, body: Jaxpr) -> Callable[..., list[Any]]:
    """A function of the operands of a ``shard_map`` that gives its results."""
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    sizes = {name: mesh.shape[name] for name in mesh.axis_names if name in manual}
    shard = jaxpr_as_fun(ClosedJaxpr(body, ()))
    given = [named_dims(spec, atom.aval.ndim) for spec, atom in zip(eqn.params["in_specs"], eqn.invars, strict=True)]
    made = [named_dims(spec, atom.aval.ndim) for spec, atom in zip(eqn.params["out_specs"], eqn.outvars, strict=True)]

    def over_shards(agreed: bool) -> Callable[..., list[Any]]:
        """The body over all shards; `agreed`: results are the same along axes that they do not name."""
        run = shard
        for name, size in reversed(sizes.items()):
            into = [0 if name in flatten_axes(dims) else None for dims in given]
            out = [0 if name in flatten_axes(dims) or not agreed else None for dims in made]
            run = jax.vmap(run, tuple(into), out, axis_name=name, axis_size=size)
        return run

    def on_whole(*operands: Any) -> list[Any]:
        parts = [split_into_shards(value, dims, sizes) for value, dims in zip(operands, given, strict=True)]
        try:
            results = over_shards(True)(*parts)
        except ValueError:  # or, with check_vma=False, results differ that are declared equal
            results = [first_shards(v, dims, sizes) for v, dims in zip(over_shards(False)(*parts), made, strict=True)]
        return [join_shards(value, dims, sizes) for value, dims in zip(results, made, strict=True)]

    return on_whole


def named_dims(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    """The axes that a spec names for each dimension."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in entries]


def flatten_axes(dims: Sequence[tuple[str, ...]]) -> list[str]:
    return [name for names in dims for name in names]


def split_into_shards(value: Any, dims: Sequence[tuple[str, ...]], sizes: dict[str, int]) -> Any:
    """Splits a whole value into shards, ``[axes that it names, in the order of the mesh, ..., local dimensions]``."""
    shape: list[int] = []
    at: dict[str, int] = {}
    local: list[int] = []
    for n, names in zip(value.shape, dims, strict=True):
        for name in names:
            at[name] = len(shape)
            shape.append(sizes[name])
        local.append(len(shape))
        shape.append(n // math.prod(sizes[name] for name in names))
    if not at:
        return value
    return value.reshape(shape).transpose([*(at[name] for name in sizes if name in at), *local])


def join_shards(value: Any, dims: Sequence[tuple[str, ...]], sizes: dict[str, int]) -> Any:
    """Joins shards to a whole value; undoes `split_into_shards`."""
    named = [name for name in sizes if name in flatten_axes(dims)]
    if not named:
        return value
    order: list[int] = []
    shape: list[int] = []
    for d, names in enumerate(dims):
        n = value.shape[len(named) + d]
        order += [*(named.index(name) for name in names), len(named) + d]
        shape.append(n * math.prod(sizes[name] for name in names))
    return value.transpose(order).reshape(shape)


def first_shards(value: Any, dims: Sequence[tuple[str, ...]], sizes: dict[str, int]) -> Any:
    """Takes the first of shards ``[all axes, ..., local dimensions]`` along the axes that are not named."""
    named = flatten_axes(dims)
    return value[tuple(slice(None) if name in named else 0 for name in sizes)]
