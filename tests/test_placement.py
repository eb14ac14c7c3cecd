"""Which nodes live on which device, and that the results do not show it.

Knows `Placement` and steps on it. Must not know how nodes are run. The reference of a placement is a list of nodes per
device made by hand or by counting; that of a step is the step as written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vnode
from tests.rounding import assert_same


@pytest.mark.parametrize(
    ("nodes", "devices", "counts"),
    [
        (8, 8, [1] * 8),
        (8, 2, [4, 4]),
        (8, 3, [3, 3, 2]),
        (7, 4, [2, 2, 2, 1]),
        (1, 1, [1]),
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_as_even_as_possible(nodes: int, devices: int, counts: list[int]) -> None:
    placement = vnode.Placement(nodes, jax.devices()[:devices])
    assert list(placement.counts) == counts
    assert placement.size == devices
    assert placement.waves == max(counts)
    assert placement.even == (len(set(counts)) == 1)
    assert placement.devices == jax.devices()[:devices]


@hypothesis.given(st.integers(1, 200), st.integers(1, 8))
def test_ranges_are_contiguous_and_differ_by_one_at_most(nodes: int, devices: int) -> None:
    placement = vnode.Placement(nodes, jax.devices()[:devices])
    homes = [device for device, count in enumerate(placement.counts) for _ in range(count)]
    assert len(homes) == nodes
    assert homes == sorted(homes)
    sizes = [homes.count(device) for device in range(devices)]
    assert max(sizes) - min(sizes) <= 1
    for device in range(devices):
        if sizes[device]:
            assert placement.starts[device] == homes.index(device)


def test_counts_on_request() -> None:
    placement = vnode.Placement(8, jax.devices()[:3], counts=[1, 5, 2])
    assert placement.counts == (1, 5, 2)
    assert placement.starts == (0, 1, 6)
    assert placement.waves == 5 and not placement.even


def test_all_devices_by_default() -> None:
    assert vnode.Placement(16).devices == jax.devices()


@pytest.mark.parametrize("devices", ["cpu", jax.devices()[0], [0, 1]], ids=["a name", "one device", "numbers"])
def test_devices_are_a_sequence_of_devices(devices: Any) -> None:
    with pytest.raises(vnode.PlacementError, match=r"jax\.devices\(\)"):
        vnode.Placement(4, devices)


def test_the_order_of_devices_is_kept() -> None:
    devices = [jax.devices()[i] for i in (5, 0, 3)]
    assert vnode.Placement(3, devices).devices == devices


def test_one_axis_of_a_mesh() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    placement = vnode.Placement(6, mesh=mesh, axis="data")
    assert placement.counts == (2, 2, 1, 1)
    assert placement.size == 4 and len(placement.devices) == 8
    assert vnode.Placement(6, mesh=mesh, axis="model").counts == (3, 3)


def test_equal_placements() -> None:
    devices = jax.devices()
    one = vnode.Placement(4, devices[:2])
    assert one == vnode.Placement(4, devices[:2], counts=[2, 2])
    assert hash(one) == hash(vnode.Placement(4, devices[:2], counts=[2, 2]))
    different = [
        vnode.Placement(4, devices[:2], counts=[1, 3]),
        vnode.Placement(4, devices[1:3]),
        vnode.Placement(4, devices[:2][::-1]),
        vnode.Placement(4, devices[:2], axis="data"),
        vnode.Placement(5, devices[:2]),
    ]
    assert all(one != other for other in different)
    assert one != (2, 2)


def test_what_is_printed() -> None:
    assert str(vnode.Placement(5, jax.devices()[:2])) == "Placement(5 nodes on 2 x cpu: [3, 2])"


# Steps


def step(w: jax.Array, x: jax.Array) -> Any:
    """Two passes (a mean that examples read), sums, a maximum, an output per example, all in one."""
    y = x @ w
    centred = y - y.mean()
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, {"loss": loss, "greatest": jnp.max(y)}, centred, (x > 0).sum(0)


def arguments(batch: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(batch)
    return jnp.asarray(rng.standard_normal(3), jnp.float32), jnp.asarray(rng.standard_normal((batch, 3)), jnp.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("batch", "nodes", "counts"),
    [
        (12, 6, [2, 2, 2]),  # even
        (12, 6, [1, 5]),
        (12, 6, [0, 6]),  # the first device has none
        (12, 6, [3, 0, 3]),
        (12, 4, [1, 1, 1, 1, 0, 0, 0, 0]),  # more devices than nodes
        (12, 12, [7, 5]),
        (11, 4, [3, 1]),  # the last node is not full
        (5, 4, [2, 1, 1]),  # a node of nothing but padding
        (3, 8, [1] * 8),  # more nodes than examples
        (3, 7, [2, 2, 3]),
        (1, 3, [1, 1, 1]),
    ],
)
def test_results_do_not_depend_on_the_placement(batch: int, nodes: int, counts: list[int]) -> None:
    virtual = vnode.virtualize(step, virtual_nodes=nodes, recompute_budget=10.0)
    placement = vnode.Placement(nodes, jax.devices()[: len(counts)], counts=counts)
    args = arguments(batch)
    got = virtual.on(placement)(*args)
    assert_same(got, jax.jit(step), *args)
    if batch > 1:
        assert all(g.devices() == set(placement.devices) for g in jax.tree.leaves(got))


@pytest.mark.parametrize("counts", [[2, 2], [3, 1], [1, 0, 3]])
def test_each_node_runs_once(counts: list[int]) -> None:
    """Host callbacks tell which examples were run together."""
    seen: list[tuple[float, ...]] = []

    def logging(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda rows: seen.append(tuple(np.asarray(rows).tolist())), x)
        return 2.0 * x

    placement = vnode.Placement(4, jax.devices()[: len(counts)], counts=counts)
    x = jnp.arange(8.0)
    out = vnode.virtualize(logging, virtual_nodes=4, placement=placement)(0.0, x)
    jax.effects_barrier()
    assert sorted(seen) == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]
    np.testing.assert_array_equal(out, 2.0 * np.arange(8.0))


def test_results_per_example_stay_where_they_were_made() -> None:
    x = jnp.arange(16.0)
    out = vnode.virtualize(lambda w, x: w * x, virtual_nodes=8).on(jax.devices()[:4])(2.0, x)
    parts = {shard.device: shard.data for shard in out.addressable_shards}
    assert set(parts) == set(jax.devices()[:4])
    for d, device in enumerate(jax.devices()[:4]):
        np.testing.assert_array_equal(parts[device], 2.0 * np.arange(4 * d, 4 * d + 4))


def test_resizing_in_the_middle_of_training() -> None:
    """Ten steps on ever other devices, against ten steps as written."""
    virtual = vnode.virtualize(step, virtual_nodes=4, recompute_budget=10.0)
    places = [
        virtual.on(jax.devices()[:1]),
        virtual.on(jax.devices()[:3], counts=[2, 0, 2]),
        virtual.on(jax.devices()[4:6]),
    ]
    plain = jax.jit(step)
    w, x = arguments(10)

    def ten_steps(of: Callable[[int], Callable[..., Any]], w: jax.Array, x: jax.Array) -> Any:
        losses = []
        for i in range(10):
            w, metrics, *_ = of(i)(w, x)
            losses.append(metrics["loss"])
        return w, losses

    assert_same(ten_steps(lambda i: places[i % 3], w, x), partial(ten_steps, lambda i: plain), w, x)


def test_devices_that_compute_a_node_together_are_drawn_as_a_row() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("vnode", "model"))
    page = vnode.Placement(6, mesh=mesh).page()
    assert page.subtitle == "6 nodes on 2 rows of 4 devices with 3 each, 3 waves"
    assert vnode.Placement(6, jax.devices()[:2]).page().subtitle == "6 nodes on 2 devices with 3 each, 3 waves"


def test_a_program_compiled_ahead_takes_a_leaf_of_another_mesh_from_the_memory_where_a_call_leaves_it() -> None:
    """On the host; the mesh has the same devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    away = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"), memory_kind="pinned_host")
    state, batch = {"w": jax.device_put(np.ones(4, np.float32), away)}, np.ones((8, 3), np.float32)
    step = vnode.virtualize(lambda state, x: (state, x.sum()), virtual_nodes=4)
    executor = step.on(jax.devices()[:2]).executor
    ahead = executor.lower_for((state, batch), {}).compile().input_shardings[0][0]["w"]
    called = executor.arguments((state, batch), {})[0][0]["w"].sharding
    assert ahead == called and called.memory_kind == "pinned_host"
