"""How often the callbacks of a virtualized step are called, and with what.

Knows callbacks and prints inside a step. Must not know how the step is emitted. An invariant or a reduced value is
reported once, a batched one once per node; what is ordered stays in order, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import vnode
from tests.rounding import eighths

pytestmark = pytest.mark.quickly

NODES = 4
DEVICES = (1, 2, 3)


class Log:
    """Collects what callbacks are called with."""

    def __init__(self) -> None:
        self.calls: list[np.ndarray] = []

    def __call__(self, value: Any) -> None:
        self.calls.append(np.array(value))


def run(step: Callable[..., Any], devices: int, *args: Any, **options: Any) -> Any:
    """Runs a step on so many devices and waits for its callbacks."""
    out = vnode.virtualize(step, virtual_nodes=NODES, **options).on(jax.devices()[:devices])(*args)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out


def inputs() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(eighths(rng.standard_normal(3))), jnp.asarray(eighths(rng.standard_normal((16, 3))))


@pytest.mark.parametrize("devices", DEVICES)
def test_invariant_value_is_reported_once(devices: int) -> None:
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(log, w * 2.0)
        return (x @ w).mean()

    run(step, devices, w, x)
    assert len(log.calls) == 1
    np.testing.assert_array_equal(log.calls[0], np.asarray(w) * 2.0)


@pytest.mark.parametrize("devices", DEVICES)
def test_reduced_value_is_reported_once(devices: int) -> None:
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        jax.debug.callback(log, loss)
        return w - grads

    run(step, devices, w, x)
    assert len(log.calls) == 1
    np.testing.assert_array_equal(log.calls[0], np.mean((np.asarray(x) @ np.asarray(w)) ** 2))


@pytest.mark.parametrize("devices", DEVICES)
def test_batched_value_is_reported_once_per_node(devices: int) -> None:
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(log, x)
        return (x @ w).mean()

    run(step, devices, w, x)
    assert [call.shape for call in log.calls] == [(4, 3)] * NODES
    in_order = sorted(map(tuple, np.concatenate(log.calls).tolist()))
    assert in_order == sorted(map(tuple, np.asarray(x).tolist()))


@pytest.mark.parametrize("devices", DEVICES)
def test_batched_value_is_reported_once_even_with_several_passes(devices: int) -> None:
    """The model runs again for the second pass; its callback does not."""
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        jax.debug.callback(log, y)
        y = (y - y.mean()) / (y.std() + 1e-3)
        return jnp.mean(y**3)

    run(step, devices, w, x, recompute_budget=10.0)
    assert len(log.calls) == NODES


@pytest.mark.parametrize("devices", DEVICES)
def test_callback_in_a_loop_is_called_in_every_iteration(devices: int) -> None:
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            jax.debug.callback(log, w.sum())
            return 0.5 * w, None

        w, _ = jax.lax.scan(body, w, None, length=3)
        return (x @ w).mean()

    run(step, devices, w, x)
    assert len(log.calls) == 3


@pytest.mark.parametrize("devices", DEVICES)
def test_callback_in_the_branch_that_is_not_taken_is_not_called(devices: int) -> None:
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        loss = (x @ w).mean()
        jax.lax.cond(loss > 1e6, lambda: jax.debug.callback(log, loss), lambda: None)
        return loss

    run(step, devices, w, x)
    assert log.calls == []


def test_printed_text(capsys: pytest.CaptureFixture[str]) -> None:
    w, x = inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        loss = jnp.mean((x @ w) ** 2)
        jax.debug.print("the loss is {loss:.3f}", loss=loss)
        return loss

    loss = run(step, 2, w, x)
    assert capsys.readouterr().out == f"the loss is {float(loss):.3f}\n"


@pytest.mark.parametrize("devices", DEVICES)
def test_ordered_callbacks_of_reduced_values_stay_in_order(devices: int) -> None:
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        loss = (x @ w).mean()
        for i in range(4):
            io_callback(log, None, loss * 0 + i, ordered=True)
        return loss

    run(step, devices, w, x)
    assert [int(call) for call in log.calls] == [0, 1, 2, 3]


def test_ordered_callback_of_batched_value_is_refused() -> None:
    log, (w, x) = Log(), inputs()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        io_callback(log, None, x, ordered=True)
        return (x @ w).mean()

    with pytest.raises(vnode.VnodeError, match=r"(?s)ordered.*test_callbacks\.py:\d+"):
        run(step, 1, w, x)
    assert log.calls == []


@pytest.mark.parametrize("devices", DEVICES)
def test_result_of_io_callback_of_reduced_value_is_used(devices: int) -> None:
    w, x = inputs()
    calls: list[float] = []

    def host(loss: Any) -> np.ndarray:
        calls.append(float(np.asarray(loss)))
        return np.asarray(len(calls), np.int32)

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss = (x @ w).mean()
        return loss, io_callback(host, jax.ShapeDtypeStruct((), jnp.int32), loss)

    _, count = run(step, devices, w, x)
    assert int(count) == 1 and len(calls) == 1
