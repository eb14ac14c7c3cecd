"""Moving a step and its state to other devices between two calls.

Knows placements, compilations and transfers. That the bits stay is what test_invariance says.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import vnode
from tests.rounding import assert_same
from tests.test_virtual_step import compilations

pytestmark = pytest.mark.quickly

NODES = 8
ADAM = optax.adamw(0.1)


def train(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    updates, slots = ADAM.update(jax.grad(loss)(state["w"]), state["slots"], state["w"])
    key, _ = jax.random.split(state["key"])
    return {**state, "w": optax.apply_updates(state["w"], updates), "slots": slots, "key": key}


def start() -> dict[str, Any]:
    w = jnp.asarray(np.random.default_rng(0).normal(size=(24, 8)), jnp.float32)
    return {"w": w, "slots": ADAM.init(w), "key": jax.random.key(1), "sin": jnp.sin}


def batch(i: int) -> np.ndarray:
    return np.random.default_rng(i).normal(size=(16, 24)).astype(np.float32)


def leaves(state: Any) -> list[np.ndarray]:
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return [
        np.asarray(jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a) for a in arrays
    ]


def virtual(**options: Any) -> Any:
    return vnode.virtualize(train, virtual_nodes=NODES, **options).on(jax.devices())


def test_resize_is_the_same_nodes_elsewhere() -> None:
    placement = vnode.Placement(NODES, jax.devices())
    smaller = placement.resize(jax.devices()[2:5], [4, 0, 4])
    assert (smaller.virtual_nodes, smaller.counts, smaller.devices) == (NODES, (4, 0, 4), jax.devices()[2:5])
    grid = Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "vnode"))
    assert placement.resize(grid).counts == (2, 2, 2, 2)
    with pytest.raises(vnode.PlacementError, match="add up to 8 nodes"):
        placement.resize(jax.devices()[:2], [4, 3])


def test_nothing_of_the_state_passes_through_the_host() -> None:
    step, state = virtual(), start()
    state = step(state, batch(0))
    for devices in (3, 5, 1, 8):
        there = step.on(jax.devices()[:devices])
        guards = jax.transfer_guard_device_to_host, jax.transfer_guard_host_to_device
        with guards[0]("disallow_explicit"), guards[1]("disallow_explicit"):
            state = there.put(state)
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        assert all(leaf.sharding.device_set == set(jax.devices()[:devices]) for leaf in arrays)
        state = there(state, batch(devices))


@pytest.mark.parametrize(("size", "spec"), [(4, PartitionSpec("vnode")), (5, PartitionSpec())])
def test_a_sharded_state_stays_sharded_where_that_divides_it(size: int, spec: PartitionSpec) -> None:
    step, state = virtual(), start()
    state["w"] = jax.device_put(state["w"], step.placement.sharding("vnode"))
    smaller = step.on(jax.devices()[:size])
    guards = jax.transfer_guard_device_to_host, jax.transfer_guard_host_to_device
    with guards[0]("disallow_explicit"), guards[1]("disallow_explicit"):
        there = smaller.put(state)
    assert there["w"].sharding == smaller.placement.sharding(*spec)
    assert_same(smaller(state, batch(0)), train, start(), batch(0))  # not put before


def test_a_state_keeps_the_axes_of_a_mesh() -> None:
    def mesh(nodes: int) -> Mesh:
        return Mesh(
            np.array(jax.devices()[: 2 * nodes]).reshape(nodes, 2), ("vnode", "model"), axis_types=(AxisType.Auto,) * 2
        )

    step, state = virtual().on(mesh(4)), start()
    state["w"] = jax.device_put(state["w"], NamedSharding(mesh(4), PartitionSpec(None, "model")))
    smaller = step.on(mesh(3))
    assert smaller.put(state)["w"].sharding.spec == PartitionSpec(None, "model")
    assert smaller(state, batch(0))["w"].sharding.device_set == set(jax.devices()[:6])


def test_coming_back_compiles_nothing() -> None:
    step, state = virtual(), start()
    for devices in (8, 3):
        state = step.on(jax.devices()[:devices])(state, batch(0))
    with compilations("train") as compiled:
        for devices in (8, 3, 8):
            state = step.on(jax.devices()[:devices])(state, batch(0))
        jax.block_until_ready(state["w"])
    assert not compiled


@pytest.mark.parametrize("given", ["nothing", "arrays", "shapes"])
def test_what_is_prepared_is_not_compiled_again(given: str) -> None:
    step, state = virtual(donate_argnums=0), start()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "dtype") else a, state)
    placements = [jax.devices()[:3], step.placement.resize(jax.devices()[:2], [6, 2])]
    if given == "nothing":
        state = step(state, batch(0))
        preparation = step.prepare(placements)
    elif given == "arrays":
        preparation = step.prepare(placements, step.put(state), batch(0))
    else:
        preparation = step.prepare(placements, shapes, jax.ShapeDtypeStruct((16, 24), jnp.float32))
    assert preparation.wait().done()
    assert [seconds > 0 for seconds in preparation.seconds.values()] == [True, True]
    assert [each.placement.size for each in step.steps_on(np.int64(3))] == [3], "NumPy's numbers are numbers"
    with compilations("train") as compiled:
        for placement in placements:
            state = step.on(placement)(state, batch(1))
        jax.block_until_ready(state["w"])
    assert not compiled


def same(a: Any, b: Any) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("donated", [(), 0])
def test_what_is_warmed_up_is_not_compiled_again_and_leaves_no_trace(donated: Any) -> None:
    never = [virtual()(start(), batch(0))]
    for i in range(3):
        never.append(virtual()(never[-1], batch(i)))
    step = virtual(donate_argnums=donated)
    state = step.put(start())
    placements = [jax.devices()[:3], step.placement.resize(jax.devices()[:2], [6, 2]), step.placement]
    warm_up_once = step.warm_up(placements, state, batch(0))
    state = step(state, batch(0))  # which may donate it while it is warmed up with
    assert warm_up_once.wait().done()
    assert same(state, never[0])
    with compilations("train") as compiled:
        for i, placement in enumerate(placements):
            state = step.on(placement)(state, batch(i))
            assert same(state, never[i + 1])
    assert not compiled


def test_warming_up_on_groups() -> None:
    step, state = virtual(), start()
    groups = vnode.Placement(NODES, groups=[jax.devices()[:1], jax.devices()[1:3]])
    step.warm_up(groups, state, batch(0)).wait()
    (program, *_) = next(iter(step.on(groups).executor._groups.values()))
    compiled = [run._cache_size() for run in program._programs.values()]
    state = step.on(groups)(state, batch(0))
    assert compiled == [run._cache_size() for run in program._programs.values()]
    assert same(state, step(start(), batch(0)))


def test_warming_up_what_mutates_objects() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def fresh() -> Any:
        model = nnx.Linear(24, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)

    step = vnode.nnx.virtualize(train, virtual_nodes=NODES, in_axes=(None, None, 0)).on(jax.devices())
    never, warmed = fresh(), fresh()
    step.warm_up([jax.devices()[:3]], *warmed, batch(0)).wait()
    with compilations("train") as compiled:
        loss = step.on(jax.devices()[:3])(*warmed, batch(0))
    assert not compiled
    assert float(loss) == float(step(*never, batch(0)))
    np.testing.assert_array_equal(warmed[0].kernel[...], never[0].kernel[...])


def test_warming_up_takes_arrays() -> None:
    for args in ((), (jax.ShapeDtypeStruct((3,), jnp.float32), batch(0))):
        with pytest.raises(vnode.BatchError, match="needs arrays"):
            virtual().warm_up(jax.devices()[:2], *args)


def test_a_call_waits_for_what_is_being_compiled() -> None:
    step = virtual()
    state = step(start(), batch(0))
    with compilations("train") as compiled:
        step.prepare(jax.devices()[:5])
        state = step.on(jax.devices()[:5])(state, batch(1))
        jax.block_until_ready(state["w"])
    assert len(compiled) == 1


def test_preparing_what_cannot_be_prepared() -> None:
    with pytest.raises(vnode.BatchError, match="call the step once first"):
        virtual().prepare(jax.devices()[:2])
    step = virtual()
    state = start()
    preparation = step.prepare([jax.devices()[:2]], state, jax.ShapeDtypeStruct((16, 23), jnp.float32))
    with pytest.raises(TypeError, match="dot_general"):
        preparation.wait()
    assert preparation.done()
    assert not preparation.seconds
    state = step.on(jax.devices()[:2])(state, batch(0))  # with other shapes, it works
    assert np.isfinite(np.asarray(state["w"])).all()


def test_a_step_that_reads_what_changes_is_told_when_it_is_traced_again() -> None:
    """Silent for host code that counts its calls, and where another kind of arguments makes another program."""
    rate, calls = {"rate": 0.1}, []

    def plain(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = jax.pure_callback(lambda a: calls.append(a) or np.asarray(a), jax.ShapeDtypeStruct((), w.dtype), w.sum())
        return w - rate["rate"] * x.sum(0), seen

    def noisy(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w + np.random.normal(size=3).astype(np.float32), x.sum()

    w, x = jnp.ones(3), jnp.ones((8, 3))
    step = vnode.virtualize(plain, virtual_nodes=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.on(1)(w, x)
        step.on(2)(w, x)
        rate["rate"] = 0.2
        step.on(2)(w, x)  # is not traced again
        step.on(2)(w, jnp.ones((12, 3)))
        step.on(2)(jnp.full(3, 0.5), jnp.ones((12, 3)))  # weakly typed
    with pytest.warns(vnode.VnodeWarning, match=r"'plain' was traced again(.|\n)*now: +mul\((.|\n)*0.2") as told:
        step.on(4)(w, x)
    assert told[0].filename == __file__
    step = vnode.virtualize(noisy, virtual_nodes=4)
    step.on(1)(w, x)
    with pytest.warns(vnode.VnodeWarning, match=r"constant float32\[3\]"):
        step.on(2)(w, x)
