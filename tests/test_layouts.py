"""A state comes back as it was given: the very spec and memory of every leaf, so that no step compiles twice."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vnode

pytestmark = pytest.mark.quickly

MESHES = {
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"model": 2, "data": 2, "more": 2},
    "4x1x2": {"data": 4, "model": 1, "more": 2},
}


def step(params: Any, momentum: Any, x: Any) -> Any:
    """Two arguments with leaves of the same names and shapes; of the gradients, some are of nothing."""

    def loss(params: Any) -> jax.Array:
        hidden = jnp.tanh(x @ params["w"]) + params["scale"]
        return jnp.mean(hidden**2) + sum(jnp.sum(leaf) for leaf in params.values())

    grads = jax.grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in grads.values()))
    momentum, key, *_ = momentum
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g / norm, momentum, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    return params, (momentum, jax.random.fold_in(key, 1), jnp.tanh(x @ params["w"]), jnp.zeros((8, 8))), norm


def state_of() -> tuple[Any, Any]:
    """Parameters, and momentum with a key, what the examples of a step leave behind, and zeros."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 8), "scale": (8,), "cube": (8, 4, 8), "none": (0, 8), "nothing": (8, 0, 8)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    seen = np.zeros((16, 8), np.float32)
    return params, (jax.tree.map(np.zeros_like, params), jax.random.key(0), seen, np.zeros((8, 8), np.float32))


def random_spec(shape: tuple[int, ...], mesh: jax.sharding.Mesh, rng: random.Random) -> PartitionSpec:
    """Axes in any order on any dimensions that they divide, with and without dimensions that nothing divides."""
    entries: list[list[str]] = [[] for _ in shape]
    names = list(mesh.axis_names)
    rng.shuffle(names)
    for name in names:
        dims = [
            d
            for d, n in enumerate(shape)
            if n % (mesh.shape[name] * np.prod([mesh.shape[other] for other in entries[d]], dtype=int)) == 0
        ]
        if dims and rng.random() < 0.7:
            entries[rng.choice(dims)].append(name)
    while entries and not entries[-1] and rng.random() < 0.5:
        entries.pop()
    return PartitionSpec(*[tuple(entry) or None for entry in entries])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sizes", MESHES)
def test_states_come_back_as_they_were_given(sizes: str, seed: int) -> None:
    axes, rng = MESHES[sizes], random.Random(f"{sizes} {seed}")
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    def placed(leaf: Any) -> jax.Array:
        kind = rng.choice(["device", "device", "pinned_host"]) if np.size(leaf) > 8 else None
        return jax.device_put(leaf, NamedSharding(mesh, random_spec(leaf.shape, mesh, rng), memory_kind=kind))

    placement = vnode.Placement(8, mesh=mesh, axis="data")
    virtual = vnode.virtualize(
        step, virtual_nodes=8, placement=placement, in_axes=(None, None, 0), reduction=("invariant", "fast")[seed]
    )
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    state, plain = list(jax.tree.map(placed, state_of())), list(state_of())
    given = [(leaf.sharding, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(state)]
    for number in range(3):
        with CompilationsCounted() as counted:
            *state, norm = virtual(state[0], state[1], x)
        assert number == 0 or not counted.number
        assert [(leaf.sharding, leaf.sharding.memory_kind) for leaf in jax.tree.leaves(state)] == given
        *plain, expected = jax.jit(step)(plain[0], plain[1], x)
        np.testing.assert_allclose(norm, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_whole_states_come_back_whole() -> None:
    """Also what the examples of a step leave behind, which devices have in parts."""
    params, momentum = state_of()
    virtual = vnode.virtualize(step, virtual_nodes=8, in_axes=(None, None, 0))
    x = np.ones((16, 8), np.float32)
    params, momentum = virtual.put((params, momentum))
    params, momentum, _ = virtual(params, momentum, x)
    with CompilationsCounted() as counted:
        virtual(params, momentum, x)
    assert not counted.number
    assert all(leaf.sharding == virtual.placement.sharding() for leaf in jax.tree.leaves((params, momentum)))


@pytest.mark.parametrize("reduction", ["fast", "invariant"])
def test_norm_of_nothing(reduction: str) -> None:
    """XLA takes arrays without elements for constants, and knows no program of devices that has no other operand."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def norm(state: Any, x: Any) -> Any:
        total = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in state.values() if leaf.dtype == jnp.float32))
        return jax.tree.map(lambda leaf: leaf * total if leaf.dtype == jnp.float32 else leaf, state), total + x.sum()

    state = {"a": jnp.zeros((0, 8)), "b": jnp.zeros((8, 0)), "keys": jax.random.split(jax.random.key(0), 8)[:0]}
    state = {k: jax.device_put(v, NamedSharding(mesh, PartitionSpec("model"))) for k, v in state.items()}
    virtual = vnode.virtualize(
        norm, virtual_nodes=4, reduction=reduction, placement=vnode.Placement(4, mesh=mesh, axis="data")
    )
    state, total = virtual(state, np.ones((8, 2), np.float32))
    assert total == 16 and state["b"].shape == (8, 0)


class CompilationsCounted:
    """Counts the programs that XLA compiles within its context."""

    def __enter__(self) -> CompilationsCounted:
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self.count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self.count)

    def count(self, event: str, duration_secs: float, **_: Any) -> None:
        self.number += event.endswith("backend_compile_duration")
