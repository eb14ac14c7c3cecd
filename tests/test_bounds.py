"""Slices that begin out of bounds, of which vnode cuts out what a node or a device has: they are moved into bounds.

Knows steps of plain jax and a fault of XLA (`tests/spmd/test_places.py` shows it): of a slice of a slice it makes one,
and moves only that into bounds. Must not know how vnode moves them before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import vnode
from vnode.analysis.tracing import trace

pytestmark = pytest.mark.quickly

EXAMPLES, ROWS = 8, 12


def once(body: Callable[[Any], Any], value: Any) -> Any:
    """In a loop of one turn, which XLA opens."""
    return lax.scan(lambda carry, _: (body(value), None), jnp.zeros_like(body(value)), None, length=1)[0]


SLICES: dict[str, Callable[[Any, Any], Any]] = {
    "slice": lambda table, i: lax.dynamic_slice_in_dim(table, i, EXAMPLES),
    "both dimensions": lambda table, i: lax.dynamic_slice(table, (i, i), (EXAMPLES, 2)).sum(1, keepdims=True),
    "widened": lambda table, i: jnp.broadcast_to(lax.dynamic_slice_in_dim(table[:, 0], i, EXAMPLES)[:, None], (8, 3)),
    "of a slice": lambda table, i: lax.dynamic_slice_in_dim(table[1:], i, EXAMPLES),
    "in a call": lambda table, i: jax.jit(lambda t: lax.dynamic_slice_in_dim(t, i, EXAMPLES))(table),
    "recomputed": lambda table, i: jax.checkpoint(lambda t: lax.dynamic_slice_in_dim(t, i, EXAMPLES))(table),
    "in a loop": lambda table, i: once(lambda t: lax.dynamic_slice_in_dim(t, i, EXAMPLES), table),
    "in a branch": lambda table, i: lax.cond(
        i > -100, lambda t: lax.dynamic_slice_in_dim(t, i, EXAMPLES), lambda t: t[:EXAMPLES], table
    ),
    "gathered": lambda table, i: table.at[i + jnp.arange(EXAMPLES)].get(mode="clip"),
    "one window": lambda table, i: lax.gather(
        table,
        i[None],
        lax.GatherDimensionNumbers((0, 1), (), (0,)),
        (EXAMPLES, table.shape[1]),
        mode=lax.GatherScatterMode.CLIP,
    ),
    "a window of both dimensions": lambda table, i: lax.gather(
        table,
        jnp.stack([i, i]),
        lax.GatherDimensionNumbers((0, 1), (), (0, 1)),
        (EXAMPLES, 2),
        mode=lax.GatherScatterMode.CLIP,
    ).sum(1, keepdims=True),
    "a byte": lambda table, i: lax.dynamic_slice_in_dim(table, i.astype(jnp.int8), EXAMPLES),
}
STARTS = (-ROWS - 1, -3, 0, 2, ROWS - EXAMPLES, ROWS - EXAMPLES + 1, ROWS, 100)


def step_of(cut: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A train step that gives every example a row of a table, from a place on that is given."""

    def step(table: Any, start: Any, x: Any) -> Any:
        def loss(table: Any) -> tuple[Any, Any]:
            seen = cut(table, start) * x
            return jnp.mean(jnp.sin(seen)), seen

        gradient, seen = jax.grad(loss, has_aux=True)(table)
        return {"table": table - gradient, "seen": seen}

    return step


def values() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 4)).astype(np.float32), rng.normal(size=(EXAMPLES, 1)).astype(np.float32)


def assert_alike(virtual: Callable[[Any], Any], step: Callable[[Any], Any]) -> None:
    """For all starts; the step runs operation by operation, so that XLA merges nothing of it."""
    for start in map(np.int32, STARTS):
        found = virtual(start)
        for name, value in step(start).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name}, {start}")


@pytest.mark.sampled(8, thorough=20)
@pytest.mark.parametrize("reduction", ["fast", "invariant"])
@pytest.mark.parametrize(("nodes", "devices"), [(4, 4), (2, 2), (8, 2), (3, 2), (4, 1)])
@pytest.mark.parametrize("name", SLICES)
def test_examples_are_cut_out_of_a_slice(name: str, nodes: int, devices: int, reduction: str) -> None:
    step = step_of(SLICES[name])
    virtual = vnode.virtualize(step, virtual_nodes=nodes, in_axes=(None, None, 0), reduction=reduction)
    on = virtual.on(jax.devices()[:devices])
    table, x = values()
    assert_alike(lambda start: on(table, start, x), lambda start: step(table, start, x))


@pytest.mark.sampled(5, thorough=12)
@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P()], ids=str)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", SLICES)
def test_devices_cut_out_of_a_slice(name: str, devices: int, spec: P) -> None:
    """What it is multiplied by is divided over the devices of a node, so that the slice is."""

    def step(state: Any, start: Any, x: Any) -> Any:
        def loss(state: Any) -> tuple[Any, Any]:
            seen = SLICES[name](state["table"], start) * state["scale"][:, None]
            return jnp.mean(jnp.sin(seen) * x[..., None]), seen

        gradient, seen = jax.grad(loss, has_aux=True)(state)
        return {**jax.tree.map(jnp.subtract, state, gradient), "seen": seen}

    mesh = Mesh(np.array(jax.devices()[: 2 * devices]).reshape(2, devices), ("vnode", "model"))
    specs = {"table": spec, "scale": P("model")}
    virtual = vnode.virtualize(step, virtual_nodes=2, in_axes=(None, None, 0), partition=specs).on(mesh)
    table, x = values()
    state = {"table": table, "scale": x[:, 0] + 2}
    placed = virtual.put(state)
    assert_alike(lambda start: virtual(placed, start, x), lambda start: step(state, start, x))


@pytest.mark.parametrize("start", STARTS)
def test_a_slice_in_bounds_stays_what_it_is(start: int) -> None:
    """Of starts that are known no equation is made."""
    program = trace(lambda table: lax.dynamic_slice(table, (start, 7), (EXAMPLES, 4)), values()[0]).program
    (eqn,) = program.equations
    wanted = min(max(start + ROWS * (start < 0), 0), ROWS - EXAMPLES)
    assert [atom.val for atom in eqn.invars[1:]] == [wanted, 0]
