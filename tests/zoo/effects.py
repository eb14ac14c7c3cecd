"""Item 14 of the zoo: effects in the step, and transformations from outside.

Knows ``jax.debug``, callbacks, ``checkify``, and what jit, scan, vmap and grad do to a function. Must not know vnode.
`tests.test_callbacks` has what is printed, and other places of a callback; here lines are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify, io_callback

from . import Program, case, kit

WIDTH = 4


def _batch(batch: int = 16) -> dict[str, jax.Array]:
    return {"x": kit.normal(batch, WIDTH), "y": kit.normal(batch, seed=1)}


def _step(params: Any, batch: dict[str, jax.Array]) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((kit.mlp(params, batch["x"])[:, 0] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return kit.sgd(params, grads), loss


def _params() -> Any:
    return kit.dense(WIDTH, 5, 1)


@case(item=14, lines=lambda nodes: 1 + nodes + 1)
def debug_print_of_invariant_reduced_and_batched() -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        jax.debug.print("bias {}", params[0]["b"][0])
        jax.debug.print("positive {}", (batch["x"][:, 0] > 0).astype(int))
        params, loss = _step(params, batch)
        jax.debug.print("loss {:.3f}", loss)
        return params, loss

    return Program(step, (_params(), _batch()))


@case(item=14, batch=12, lines=lambda nodes: 3)
def debug_callback_in_a_loop() -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def body(x: jax.Array, i: jax.Array) -> Any:
            jax.debug.callback(print, i, x.sum())
            return jnp.tanh(x), x.mean()

        x, means = lax.scan(body, batch["x"], jnp.arange(3))
        return kit.mlp(params, x), means

    return Program(step, (_params(), _batch(12)))


@case(item=14)
def pure_callback_per_example() -> Program:
    """Host code under vmap, element by element."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def host(y: np.ndarray) -> np.ndarray:
            return np.round(np.asarray(y) * 2.0)

        def one(y: jax.Array) -> jax.Array:
            return jax.pure_callback(host, jax.ShapeDtypeStruct(y.shape, y.dtype), y, vmap_method="expand_dims")

        rounded = jax.vmap(one)(batch["y"])
        params, loss = _step(params, {**batch, "y": rounded})
        return params, loss, rounded

    return Program(step, (_params(), _batch()))


@case(item=14)
def pure_callback_for_one_example_after_another() -> Program:
    """Host code that takes single examples: vmap makes a loop of it."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def host(x: np.ndarray, rate: np.ndarray) -> np.ndarray:
            return np.sort(np.asarray(x)) * rate

        def one(x: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(host, shape, x, params["rate"], vmap_method="sequential")

        x = jax.vmap(one)(batch["x"])
        new, loss = _step(params["model"], {**batch, "x": x})
        return {**params, "model": new}, loss, x

    return Program(step, ({"model": _params(), "rate": kit.normal(1)}, _batch()))


@case(item=14, batch=12)
def pure_callback_of_reduced_value() -> Program:
    """Host code decides on the rate from the loss of the batch."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def host(loss: np.ndarray) -> np.ndarray:
            loss = np.asarray(loss)
            return np.asarray(0.1 if loss < 10.0 else 0.01, loss.dtype)

        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((kit.mlp(params, batch["x"])[:, 0] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        rate = jax.pure_callback(host, jax.ShapeDtypeStruct((), loss.dtype), loss)
        return kit.sgd(params, grads, rate), loss, rate

    return Program(step, (_params(), _batch(12)))


@case(item=14, expect=("VnodeError", r"(?s)effects\.py:\d+"))
def ordered_effect_of_batched_value_is_refused() -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        io_callback(lambda *_: None, None, batch["x"], ordered=True)
        return _step(params, batch)

    return Program(step, (_params(), _batch()))


@case(item=14, expect=("VnodeError", r"(?s)effects\.py:\d+"))
def ordered_print_of_batched_value_is_refused() -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        jax.debug.print("{}", batch["y"], ordered=True)
        return _step(params, batch)

    return Program(step, (_params(), _batch()))


def _error_as_value(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        error, out = step(*args)
        return error.get(), out

    return run


def _checked(params: Any, batch: dict[str, jax.Array]) -> Any:
    checkify.check(jnp.all(batch["x"] < 50.0), "the greatest input is {}", batch["x"].max())
    params, loss = _step(params, batch)
    checkify.check(loss < 100.0, "the loss is {}", loss)
    return params, loss


@case(item=14)
def checkify_passing() -> Program:
    return Program(checkify.checkify(_checked), (_params(), _batch()), outer=_error_as_value)


@case(item=14, batch=12)
def checkify_failing() -> Program:
    batch = _batch(12)
    batch = {**batch, "x": batch["x"].at[7, 2].set(60.0)}
    return Program(checkify.checkify(_checked), (_params(), batch), outer=_error_as_value)


@case(item=14)
def checkify_of_nan_per_example() -> Program:
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        return jnp.log(batch["y"] + 10.0).sum() + kit.mlp(params, batch["x"]).sum()

    checked = checkify.checkify(step, errors=checkify.nan_checks)
    return Program(checked, (_params(), _batch()), outer=_error_as_value)


@case(item=14)
def inside_jit() -> Program:
    """Between code that knows nothing of nodes, and called twice."""

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        @jax.jit
        def run(params: Any, batch: dict[str, jax.Array]) -> Any:
            batch = {**batch, "x": batch["x"] * 2.0}
            params, first = step(params, batch)
            params, second = step(params, batch)
            return jax.tree.map(lambda p: p + 1.0, params), first - second

        return run

    return Program(_step, (_params(), _batch()), outer=outer)


@case(item=14, batch=12)
def inside_scan() -> Program:
    """A scan over batches."""

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda params, batches: lax.scan(step, params, batches))

    batches = {"x": kit.normal(3, 12, WIDTH), "y": kit.normal(3, 12)}
    return Program(_step, (_params(), batches), outer=outer)


@case(item=14)
def inside_while_loop_and_cond() -> Program:
    """Training until the loss is small; an evaluation only sometimes."""

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        @jax.jit
        def run(params: Any, batch: dict[str, jax.Array]) -> Any:
            def body(state: Any) -> Any:
                params, _, i = state
                params, loss = step(params, batch)
                return params, loss, i + 1

            state = (params, jnp.asarray(1e3, kit.real()), 0)
            params, loss, count = lax.while_loop(lambda s: (s[1] > 0.5) & (s[2] < 4), body, state)
            return lax.cond(count > 2, lambda: step(params, batch)[1], lambda: loss), count

        return run

    return Program(_step, (_params(), _batch()), outer=outer)


@case(item=14, batch=12)
def inside_vmap() -> Program:
    """A population of states on the same batch."""

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.vmap(step, in_axes=(0, None)))

    population = jax.tree.map(lambda *p: jnp.stack(p), *[kit.dense(WIDTH, 5, 1, seed=i) for i in range(3)])
    return Program(_step, (population, _batch(12)), outer=outer)


@case(item=14)
def inside_eval_shape() -> Program:
    """The shapes alone."""

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return jax.tree.map(lambda s: (s.shape, str(s.dtype)), jax.eval_shape(step, *args))

        return run

    return Program(_step, (_params(), _batch()), outer=outer)


def _loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((kit.mlp(params, batch["x"])[:, 0] - batch["y"]) ** 2)


def _gradient(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(step))


@case(item=14)
def under_grad() -> Program:
    """Only the loss is virtualized; the user differentiates it from outside."""
    return Program(_loss, (_params(), _batch()), outer=_gradient)


@case(item=14, batch=12)
def under_grad_of_masked_mean() -> Program:
    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        losses = jnp.abs(kit.mlp(params, batch["x"])[:, 0] - batch["y"])
        keep = batch["y"] > 0
        return jnp.sum(losses * keep) / jnp.sum(keep)

    return Program(loss, (_params(), _batch(12)), outer=_gradient)


@case(item=14)
def under_grad_by_the_inputs() -> Program:
    """Cotangents of batched arguments."""
    return Program(_loss, (_params(), _batch()), outer=lambda f: jax.jit(jax.grad(f, argnums=(0, 1))))


@case(item=14, batch=12)
def under_jvp_and_hessian() -> Program:
    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(w: jax.Array, x: jax.Array) -> Any:
            return jax.jvp(lambda w: step(w, x), (w,), (jnp.ones_like(w),)), jax.hessian(step)(w, x)

        return run

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(x @ w) ** 2)

    return Program(loss, (kit.normal(WIDTH), kit.normal(12, WIDTH)), outer=outer)


@jax.custom_vjp
def _straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


_straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_jvp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1.0, 1.0)


@_clipped.defjvp
def _clipped_rule(primals: Any, tangents: Any) -> Any:
    return _clipped(primals[0]), 3.0 * tangents[0]


@case(item=14)
def custom_vjp_inside_the_step() -> Program:
    """A straight-through estimator whose gradient is taken inside: the rule has been applied when vnode looks."""

    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            hidden = _straight_through(4.0 * kit.mlp(params, batch["x"])) / 4.0
            return jnp.mean((_clipped(hidden)[:, 0] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return kit.sgd(params, grads), loss

    return Program(step, (_params(), _batch()))


@case(item=14, expect=("VnodeError", "jax.custom_vjp cannot be differentiated from outside"))
def custom_vjp_under_grad() -> Program:
    """A straight-through estimator: the derivative of the code itself would be zero."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((_straight_through(4.0 * kit.mlp(params, batch["x"]))[:, 0] - batch["y"]) ** 2)

    return Program(loss, (_params(), _batch()), outer=_gradient)


@case(item=14, batch=12)
def custom_jvp_under_grad() -> Program:
    """A rule that is not the derivative of the code."""

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((_clipped(kit.mlp(params, batch["x"]))[:, 0] - batch["y"]) ** 2)

    return Program(loss, (_params(), _batch(12)), outer=_gradient)


@case(item=14, batch=12, expect=("VnodeError", "jax.custom_vjp cannot be differentiated from outside"))
def custom_vjp_of_invariants_under_grad() -> Program:
    """The rule is on parameters, away from the batch."""

    def loss(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((batch["x"] @ (_straight_through(w * 3.0) / 3.0) - batch["y"]) ** 2)

    return Program(loss, (kit.normal(WIDTH), _batch(12)), outer=_gradient)


@case(item=14)
def two_virtual_steps_in_one_program() -> Program:
    """A step and its own result again, in one jit, with something in between that mixes the examples."""

    def outer(step: Callable[..., Any]) -> Callable[..., Any]:
        @jax.jit
        def run(params: Any, batch: dict[str, jax.Array]) -> Any:
            out = step(params, batch)
            return step(params, {**batch, "x": jnp.concatenate([out, out, out, out], axis=1)[::-1]})

        return run

    return Program(lambda params, batch: kit.mlp(params, batch["x"]), (_params(), _batch()), outer=outer)
