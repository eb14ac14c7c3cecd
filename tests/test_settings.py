"""jax's settings and contexts, changed around and between the calls of one step.

Knows steps, groups of devices and settings. The reference is the step as the user wrote it, under the same settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import vnode

W = np.linspace(-1, 1, 4).astype(np.float32)
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

SETTINGS: dict[str, Callable[[], Any]] = {
    "as they were": contextlib.nullcontext,
    "threefry": lambda: jax.threefry_partitionable(False),
    "x64": lambda: jax.enable_x64(True),
    "as they were again": contextlib.nullcontext,
}


def noisy(w: Any, x: Any, rate: Any) -> Any:
    """Draws by a key of its own; a number without an array's type; integers of the default type."""
    noise = jax.random.normal(jax.random.PRNGKey(0), x.shape)
    return w - rate * jnp.mean(x * noise, 0), jnp.sin(rate), jnp.arange(3)


@pytest.mark.newest
@pytest.mark.parametrize("groups", [False, True])
def test_a_step_follows_settings_that_change_between_calls(groups: bool) -> None:
    """Each setting has a program of its own, and a number that is passed again has the type of its call."""
    some = jax.devices()
    placement = vnode.Placement(4, groups=[some[:1], some[1:2]]) if groups else vnode.Placement(4, some[:2])
    step, rate = vnode.virtualize(noisy, virtual_nodes=4, placement=placement), 0.1
    for setting in SETTINGS.values():
        with setting():
            wanted = jax.jit(noisy)(W, X, rate)
            for _ in range(2):
                for mine, plain in zip(step(W, X, rate), wanted, strict=True):
                    assert mine.dtype == plain.dtype
                    np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.newest
def test_arrays_whose_dimensions_are_in_another_order_in_memory() -> None:
    """A batch and weights, on one device or sharded. XLA's partitioner of jax 0.10 reads such arguments wrongly."""
    order = Layout((1, 0))
    here = SingleDeviceSharding(jax.devices()[0])
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    sharded = jax.device_put(X, Format(order, NamedSharding(mesh, PartitionSpec("d"))))
    weights, batch = (jax.jit(lambda a: a, out_shardings=Format(order, here))(a) for a in (X[:4], X))

    def train(w: Any, x: Any) -> Any:
        return w - jnp.mean(x, 0), x * 2

    step = vnode.virtualize(train, virtual_nodes=4)
    for count in (2, 4):
        for x in (batch, sharded):
            for mine, plain in zip(step.on(jax.devices()[:count])(weights, x), train(X[:4], X), strict=True):
                np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(step.on(jax.devices()[:count]).put(batch), X)


def test_a_flag_is_the_first_value_under_strict_promotion() -> None:
    def train(state: Any, x: Any) -> Any:
        slope = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        w = jax.lax.cond(state["go"], lambda w: w - np.float32(0.1) * slope, lambda w: w, state["w"])
        return {"go": state["go"], "w": w}

    state = {"go": np.bool_(True), "w": W}
    with jax.numpy_dtype_promotion("strict"):
        found = vnode.virtualize(train, virtual_nodes=4).on(jax.devices()[:2])(state, X)
    np.testing.assert_allclose(found["w"], train(state, X)["w"], rtol=1e-5)


@pytest.mark.newest
@pytest.mark.parametrize("jitted", [False, True])
def test_a_gradient_within_an_explicit_mesh_that_the_arguments_are_not_on(jitted: bool) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((x @ w) ** 2)

    wanted = jax.grad(loss)(W, X)
    slope = jax.grad(vnode.virtualize(loss, virtual_nodes=4).on(jax.devices()[:2]))
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Explicit,))):
        found = (jax.jit(slope) if jitted else slope)(W, X)
        alone = vnode.virtualize(jax.grad(loss), virtual_nodes=4).on(jax.devices()[:1])(W, X)  # not on that mesh
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(alone, wanted, rtol=1e-5)


def test_integers_of_two_bits_are_refused_on_several_cpu_devices() -> None:
    """Their collectives are wrong there; on one device they are right."""
    x = np.random.default_rng(1).integers(0, 4, (16, 4)).astype(ml_dtypes.uint2)
    step = vnode.virtualize(lambda w, x: w + x.astype(jnp.float32).sum(), virtual_nodes=4)
    assert float(step.on(jax.devices()[:1])(np.float32(0), x)) == x.astype(np.float32).sum()
    with pytest.raises(vnode.PlacementError, match=r"(?s)integers of 2 bits .* 2 CPU devices.*int8"):
        step.on(jax.devices()[:2])(np.float32(0), x)


def test_sums_of_64_bits_need_x64_in_the_call_too() -> None:
    """jax would make them float32 with a warning."""
    with jax.enable_x64(True):
        step = vnode.virtualize(lambda w, x: w - jnp.mean(x, 0), virtual_nodes=4, accumulate_dtype="float64")
        assert step(W, X).dtype == np.float32
    with pytest.raises(ValueError, match="accumulate_dtype='float64' needs jax_enable_x64 in each call"):
        step.on(jax.devices()[:1])(W, X)


def drawn(step: int) -> Any:
    """A batch of numbers that jax draws, and of integers that need 64 bits where there are any."""
    high = 40 if jax.config.jax_enable_x64 else 20
    return {"x": jax.random.normal(jax.random.key(step), (16, 4)), "n": np.arange(16) + 2**high}


@pytest.mark.newest
def test_batches_are_loaded_ahead_under_the_settings_of_the_run() -> None:
    """They are loaded in a thread, and jax keeps settings by thread."""

    def train(w: Any, batch: Any) -> Any:
        return w + batch["x"].mean(0), {name: value.sum() for name, value in batch.items()}

    step = vnode.virtualize(train, virtual_nodes=4)
    for setting in (lambda: jax.enable_x64(True), lambda: jax.default_prng_impl("rbg")):
        with setting():
            wanted, past = jnp.zeros(4), []
            for t in range(4):
                wanted, metrics = jax.jit(train)(wanted, drawn(t))
                past.append(metrics)
            run = vnode.elastic.run(step, jnp.zeros(4), drawn, steps=4, devices=2, progress=False)
        np.testing.assert_allclose(run.state, wanted, rtol=1e-4)
        for (_, found), metrics in zip(run.history, past, strict=True):
            assert int(found["n"]) == int(metrics["n"])
            np.testing.assert_allclose(found["x"], metrics["x"], rtol=1e-4)


def test_a_program_that_is_prepared_under_a_setting_is_that_settings() -> None:
    step = vnode.virtualize(noisy, virtual_nodes=4).on(jax.devices()[:1])
    for prepared, called in (("threefry", "as they were"), ("as they were", "threefry"), ("x64", "x64")):
        with SETTINGS[prepared]():
            step.prepare(jax.devices()[:2], W, X, 0.1).wait()
        with SETTINGS[called]():
            for mine, plain in zip(step.on(jax.devices()[:2])(W, X, 0.1), jax.jit(noisy)(W, X, 0.1), strict=True):
                assert mine.dtype == plain.dtype
                np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)
