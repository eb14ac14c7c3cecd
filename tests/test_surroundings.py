"""What a program does around a step: types of results, leak checks, objects that the step changes, steps in steps.

Knows steps as users write them. Must not know how they are traced or emitted. The reference is `jax.jit` of the step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import vnode
from tests.rounding import assert_same, eighths

pytestmark = pytest.mark.quickly

X = eighths(np.random.default_rng(0).normal(size=(6, 3)))


def avals(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (jax.typeof(leaf).str_short(), jax.typeof(leaf).weak_type), tree)


def literals(state: Any, x: Any) -> Any:
    return state, {"one": 1.0, "three": 3, "sum": x.sum(), "mixed": 2 * state}


def carried(state: Any, x: Any) -> Any:
    total, _ = jax.lax.scan(lambda c, row: (c + 1, row.sum()), state, x)
    return total, {"while": jax.lax.while_loop(lambda c: c < 10, lambda c: c * 2, state)}


def narrow(state: Any, x: Any) -> Any:
    return state * 0.5, {"low": (x.astype(jnp.bfloat16) * state).sum(), "max": x.max() * state, "rows": x * state}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("state", [1, 2.5, np.float32(1.5), np.float64(1.5), True], ids=repr)
@pytest.mark.parametrize("step", [literals, carried, narrow], ids=lambda f: f.__name__)
def test_results_have_the_types_of_the_plain_step(step: Callable[..., Any], state: Any) -> None:
    """Also after two steps: a weak type decides what is computed of a result."""
    if step is carried and isinstance(state, bool):
        state = np.int32(1)  # a carry keeps its type
    plain, virtual = jax.jit(step), vnode.virtualize(step, virtual_nodes=4).on(jax.devices()[:2])
    expected, found = plain(state, X), virtual(state, X)
    assert avals(found) == avals(expected)
    assert avals(virtual(found[0], X)) == avals(plain(expected[0], X))
    shapes = jax.eval_shape(virtual, state, X)
    assert jax.tree.map(lambda s: s.weak_type, shapes) == jax.tree.map(
        lambda s: s.weak_type, jax.eval_shape(step, state, X)
    )


def loss_of(params: Any, x: Any) -> Any:
    return jnp.mean(jax.nn.relu(x @ params["w"]) ** 2)


def train(state: TrainState, x: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state.params, x)
    return state.apply_gradients(grads=grads), loss


def test_a_train_state_compiles_once() -> None:
    """Its step number is a Python integer at first, and an array afterwards."""
    traces = []

    def step(state: TrainState, x: Any) -> Any:
        traces.append(1)
        return train(state, x)

    virtual = vnode.virtualize(step, virtual_nodes=3).on(jax.devices()[:2])
    state = TrainState.create(apply_fn=loss_of, params={"w": jnp.ones(3)}, tx=optax.adam(0.1))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    state, _ = virtual(state, X)
    jax.block_until_ready(state)
    traced, programs = len(traces), len(compiled)
    for _ in range(2):
        state, _ = virtual(state, X)
    assert (len(traces), len(compiled)) == (traced, programs)
    assert int(state.step) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("reduction", ["invariant", pytest.param("fast", marks=pytest.mark.thorough)])
def test_nothing_leaks(reduction: str) -> None:
    step = vnode.virtualize(train, virtual_nodes=3, reduction=reduction).on(jax.devices()[:2])
    state = TrainState.create(apply_fn=loss_of, params={"w": jnp.ones(3)}, tx=optax.adam(0.1))
    gc.collect()
    gc.freeze()  # the checker collects garbage for each trace, and other tests have left much that is none
    try:
        with jax.checking_leaks():
            found, _ = step(state, X)
            gradient = jax.jit(
                jax.grad(lambda w: vnode.virtualize(lambda s, x: loss_of(s, x), virtual_nodes=2)({"w": w}, X))
            )
            assert_same(gradient(jnp.ones(3)), lambda x: jax.grad(loss_of)({"w": jnp.ones(3)}, x)["w"], X)
    finally:
        gc.unfreeze()
    assert_same(found.params, lambda x: jax.jit(train)(state, x)[0].params, X)


def objects() -> tuple[nnx.Linear, nnx.Optimizer]:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def update(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def virtual(step: Callable[..., Any]) -> Any:
    return vnode.virtualize(step, virtual_nodes=2, in_axes=(None, None, 0))


@pytest.mark.parametrize(
    "wrap",
    [virtual, lambda step: virtual(nnx.jit(step)), lambda step: nnx.jit(virtual(step))],
    ids=["alone", "around nnx.jit", "inside nnx.jit"],
)
def test_objects_that_the_step_changes_are_refused(wrap: Callable[..., Any]) -> None:
    model, optimizer = objects()
    with pytest.raises(vnode.VnodeError, match=r"(?s)in place.*model\.bias.*Param.*vnode\.nnx\.virtualize"):
        wrap(update)(model, optimizer, X)


def test_objects_that_stay_or_are_returned_are_allowed() -> None:
    model, optimizer = objects()
    alone = vnode.virtualize(lambda m, x: jnp.mean(m(x) ** 2), virtual_nodes=2)
    assert_same(alone(model, X), lambda x: jnp.mean(model(x) ** 2), X)

    def returns(model: Any, optimizer: Any, x: Any) -> Any:
        loss = update(model, optimizer, x)
        return model, optimizer, loss

    def expected(x: Any) -> Any:
        model, optimizer = objects()
        loss = update(model, optimizer, x)
        return loss, model.kernel[...]

    changed, _, loss = virtual(returns)(model, optimizer, X)
    assert_same((loss, changed.kernel[...]), expected, X)


def test_scratch_in_dictionaries_is_allowed() -> None:
    def step(state: Any, batch: dict[str, Any]) -> Any:
        batch["x"] = batch["x"] * 2
        return state + batch["x"].sum()

    np.testing.assert_array_equal(vnode.virtualize(step, virtual_nodes=2)(1.0, {"x": X}), step(1.0, {"x": X}))


def test_a_mutable_array_from_outside() -> None:
    """It works where the step runs, and is refused elsewhere: it cannot be moved under whoever holds it."""

    def step(ref: Any, x: Any) -> Any:
        ref[...] += x.sum(0)
        return (x * ref[...]).sum()

    virtual = vnode.virtualize(step, virtual_nodes=2).on(jax.devices()[:2])
    found, expected = jax.new_ref(virtual.put(jnp.zeros(3))), jax.new_ref(jnp.zeros(3))
    for _ in range(2):
        np.testing.assert_array_equal(virtual(found, X), jax.jit(step)(expected, X))
    np.testing.assert_array_equal(found[...], expected[...])
    with pytest.raises(vnode.PlacementError, match=r"(?s)mutable array.*jax\.new_ref\(step\.put\(x\)\)"):
        virtual.on(jax.devices()[:1])(found, X)


def test_a_step_in_a_step() -> None:
    inner = vnode.virtualize(lambda s, x: (jnp.tanh(x) * s).sum(), virtual_nodes=3)
    outer = vnode.virtualize(lambda s, x: inner(s, x) + x.mean(), virtual_nodes=2)

    def expected(x: Any) -> Any:
        return (jnp.tanh(x) * 2).sum() + x.mean()

    assert_same(outer(2.0, X), expected, X)
    inner(2.0, X)  # alone it runs on all devices, which nobody asked for
    on_two = vnode.virtualize(lambda s, x: inner(s, x) + x.mean(), virtual_nodes=2).on(jax.devices()[:2])
    assert_same(on_two(2.0, X), expected, X)
    with pytest.raises(vnode.PlacementError, match="inside another one, on other devices"):
        vnode.virtualize(lambda s, x: inner.on(jax.devices()[:1])(s, x), virtual_nodes=2)(2.0, X)
    local = vnode.virtualize(lambda s, x: (x * s).sum(), virtual_nodes=3, coupling="local")
    with pytest.raises(vnode.PlacementError, match="coupling='local' would not count"):
        vnode.virtualize(lambda s, x: local(s, x), virtual_nodes=2)(2.0, X)
