"""A virtualized step inside other JAX transformations, where whole steps of the zoo do not show what could go wrong.

Knows jit, scan, vmap, derivatives and checkify applied to a virtual step. Must not know how derivatives are taken of an
emitted step. The reference is the same transformation of the step as written; where a rule of the user's own must
survive, the expected number is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import vnode
from tests.rounding import assert_close, assert_same, eighths

pytestmark = pytest.mark.quickly

BATCH = 8
PLACES = {"even": [2, 2], "uneven": [3, 1]}


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(eighths(np.random.default_rng(shape).standard_normal(shape)))


def virtual(step: Callable[..., Any], counts: list[int] = PLACES["even"], **options: Any) -> vnode.VirtualStep:
    placement = vnode.Placement(sum(counts), jax.devices()[: len(counts)], counts=counts)
    return vnode.virtualize(step, virtual_nodes=sum(counts), placement=placement, **options)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sin(x @ w) ** 2)


def with_aux(w: jax.Array, x: jax.Array) -> Any:
    y = x @ w
    return jnp.sum(y**2), {"positive": (y > 0).sum(), "each": jnp.tanh(y), "x": x}


# Derivatives from outside

DERIVATIVES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (jnp.cos(w), jnp.sin(x))),
    "grad of both": lambda f: jax.grad(f, argnums=(0, 1)),
    "vjp twice": lambda f: lambda w, x: [jax.vjp(f, w, x)[1](c) for c in (1.0, 2.0)],
    "linearize": lambda f: lambda w, x: jax.linearize(lambda w: f(w, x), w)[1](jnp.cos(w)),
    "forward over reverse": lambda f: lambda w, x: jax.jvp(jax.grad(lambda w: f(w, x)), (w,), (jnp.cos(w),)),
    "reverse over reverse": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2)),
    "under checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "under vmap": lambda f: lambda w, x: jax.vmap(lambda s: jax.grad(f)(s * w, x))(jnp.arange(1.0, 3.0)),
    "in a scan": lambda f: lambda w, x: lax.scan(lambda w, _: (w - jax.grad(f)(w, x), None), w, None, length=2)[0],
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative(name: str, counts: list[int]) -> None:
    args = normal(3), normal(BATCH, 3)
    derive = DERIVATIVES[name]
    assert_same(jax.jit(derive(virtual(loss, counts)))(*args), derive(loss), *args)


@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
def test_gradient_beside_integers_and_outputs_per_example(counts: list[int]) -> None:
    args = normal(3), normal(BATCH, 3)
    got = jax.value_and_grad(virtual(with_aux, counts), has_aux=True)(*args)
    assert_same(got, jax.value_and_grad(with_aux, has_aux=True), *args)


@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
def test_gradient_with_integer_arguments(counts: list[int]) -> None:
    def step(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.sum(w[batch["i"]] * batch["x"])

    args = normal(4), {"i": jnp.arange(BATCH) % 4, "x": normal(BATCH)}
    assert_close(jax.grad(virtual(step, counts))(*args), jax.grad(step)(*args))


def test_gradient_through_several_passes() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.sum(jnp.tanh(y - y.mean()) ** 3)

    args = normal(3), normal(BATCH, 3)
    for counts in PLACES.values():
        got = jax.grad(virtual(step, counts, recompute_budget=10.0))(*args)
        assert_same(got, jax.grad(step), *args)


# Rules of the user's own


@jax.custom_jvp
def straight_through(x: jax.Array) -> jax.Array:
    """Rounds; its derivative is one, that of rounding zero."""
    return jnp.round(x)


straight_through.defjvp(lambda primals, tangents: (jnp.round(*primals), *tangents))


@jax.custom_vjp
def reversed_gradient(x: jax.Array) -> jax.Array:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
def test_straight_through_estimator_keeps_its_derivative(counts: list[int]) -> None:
    """The sum of ``round(x w)`` over the batch has the derivative of the sum of ``x w``: the sum of x."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return straight_through(x @ w).sum()

    w, x = normal(3), normal(BATCH, 3)
    assert_close(virtual(step, counts)(w, x), np.round(np.asarray(x) @ np.asarray(w)).sum())
    for derivative in (jax.grad(virtual(step, counts))(w, x), jax.jacfwd(virtual(step, counts))(w, x)):
        assert_close(derivative, x.sum(0))


@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
def test_straight_through_estimator_of_weights_keeps_its_derivative(counts: list[int]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ straight_through(w)).sum()

    assert_close(jax.grad(virtual(step, counts))(normal(3), normal(BATCH, 3)), normal(BATCH, 3).sum(0))


@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("of", ["examples", "weights"])
def test_reverse_mode_rule_is_refused_from_outside(of: str, counts: list[int]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return (reversed_gradient(x @ w) if of == "examples" else x @ reversed_gradient(w)).sum()

    step_on_nodes = virtual(step, counts)
    w, x = normal(3), normal(BATCH, 3)
    assert_close(step_on_nodes(w, x), (x @ w).sum())  # without a derivative there is nothing to lose
    with pytest.raises(vnode.VnodeError) as caught:
        jax.grad(step_on_nodes)(w, x)
    for words in ("custom_vjp", "gradient inside the step", "custom_jvp"):
        assert words in str(caught.value)


def test_reverse_mode_rule_within_the_step_is_kept() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: reversed_gradient(x @ w).sum())(w)

    assert_close(virtual(step)(normal(3), normal(BATCH, 3)), -normal(BATCH, 3).sum(0))


# jit, loops, vmap


def test_closure_over_values_of_an_outer_jit() -> None:
    """The step reads a traced value, and a large constant, that are not among its arguments."""
    table = normal(50, 3)

    @jax.jit
    def outer(scale: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        doubled = 2.0 * scale

        def step(w: jax.Array, x: jax.Array) -> Any:
            return w * doubled + (x @ table.T).mean(0).max(), doubled * x

        return virtual(step)(w, x)

    scale, w, x = jnp.float32(1.5), normal(3), normal(BATCH, 3)
    assert_close(outer(scale, w, x), (w * 3.0 + (x @ table.T).mean(0).max(), 3.0 * x))


def test_one_trace_within_a_loop_of_steps() -> None:
    traces = []

    def step(w: jax.Array, x: jax.Array) -> Any:
        traces.append(None)
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - grad, value

    batches = normal(5, BATCH, 3)
    w, losses = jax.jit(lambda w: lax.scan(virtual(step), w, batches))(normal(3))
    assert len(traces) == 1

    def one_by_one(w: jax.Array, batches: jax.Array) -> Any:
        expected = []
        for batch in batches:
            w, value = step(w, batch)
            expected.append(value)
        return w, jnp.stack(expected)

    assert_same((w, losses), one_by_one, normal(3), batches)


@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (None, 2)], ids=str)
def test_vmap(axes: Any, counts: list[int]) -> None:
    w = normal(2, 3) if axes[0] == 0 else normal(3)
    x = {None: normal(BATCH, 3), 0: normal(2, BATCH, 3), 2: normal(BATCH, 3, 2)}[axes[1]]
    got = jax.vmap(virtual(with_aux, counts), in_axes=axes)(w, x)
    assert_same(got, jax.vmap(with_aux, in_axes=axes), w, x)


def test_vmap_of_draws_whose_position_depends_on_the_batch_alone() -> None:
    """Under a branch that vmap turns into both, the key is one for all and the node's number is not."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def turn(carry: Any, row: jax.Array) -> Any:
            key, now = jax.random.split(carry[1])
            return (carry[0] + row * jax.random.uniform(now, (2, BATCH)), key), None

        def drawn() -> jax.Array:
            return lax.scan(turn, (jnp.zeros((2, BATCH)), jax.random.key(6)), x.T.reshape(3, 1, BATCH))[0][0].mean()

        return lax.cond(w.sum() > 0, lambda: jnp.float32(1), drawn)

    w, x = jnp.asarray([[-1.0, 0, 0], [1.0, 0, 0]]), normal(2, BATCH, 3)
    assert_same(jax.vmap(virtual(step, [4]))(w, x), jax.vmap(step), w, x)


def test_eval_shape_runs_and_compiles_nothing() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        return {"w": state["w"] + x.sum(0)}, (x > 0).sum(), x.astype(jnp.bfloat16)

    shapes = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, jax.ShapeDtypeStruct((1_000_000, 3), jnp.float32)
    assert jax.eval_shape(virtual(step), *shapes) == jax.eval_shape(step, *shapes)


def test_the_same_step_under_different_precisions() -> None:
    step = virtual(lambda w, x: (x * w).sum(0))
    narrow = step(normal(3), normal(BATCH, 3))
    with jax.enable_x64(True):
        w, x = (np.asarray(v, np.float64) / 3.0 for v in (normal(3), normal(BATCH, 3)))
        wide = step(w, x)
        assert wide.dtype == jnp.float64
        assert_same(wide, lambda w, x: (x * w).sum(0), jnp.asarray(w), jnp.asarray(x))
    assert_close(step(normal(3), normal(BATCH, 3)), narrow)


# checkify


def checked(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    checkify.check(jnp.all(y < 100.0), "too large: {y}", y=y.max())
    return y.mean()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_checks_of_the_user(where: str) -> None:
    run = virtual(checkify.checkify(checked)) if where == "inside" else checkify.checkify(virtual(checked))
    plain = jax.jit(checkify.checkify(checked))
    w, x = normal(3), normal(BATCH, 3)
    for inputs in (x, x.at[5].set(1000.0 * jnp.sign(w))):
        error, out = run(w, inputs)
        want_error, want = plain(w, inputs)
        assert error.get() == want_error.get()
        assert_close(out, want)
    assert "too large" in str(run(w, x.at[5].set(1000.0 * jnp.sign(w)))[0].get())


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_checks_for_nan(where: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.log(x @ w).sum()

    kinds = checkify.nan_checks
    run = virtual(checkify.checkify(step, kinds)) if where == "inside" else checkify.checkify(virtual(step), kinds)
    assert run(normal(3), jnp.ones((BATCH, 3)) * jnp.sign(normal(3)))[0].get() is None
    assert "nan generated by primitive: log" in str(
        run(normal(3), -jnp.ones((BATCH, 3)) * jnp.sign(normal(3)))[0].get()
    )


def test_a_check_outside_checkify_is_the_users_own_mistake() -> None:
    with pytest.raises(ValueError, match="not functionalized"):
        virtual(checked)(normal(3), normal(BATCH, 3))


@pytest.mark.newest
@pytest.mark.parametrize("outer", ["jit", "scan", "vmap", "grad"])
def test_arrays_that_an_outer_transform_does_not_see(outer: str) -> None:
    """A step called with arrays that are there, while jax is tracing what is around it, moves none of them."""
    weights, batch = jnp.arange(3.0), jnp.arange(24.0).reshape(8, 3) / 8

    def fun(w: Any, x: Any) -> Any:
        return jnp.sin(x @ w).mean() + jax.random.normal(jax.random.key(1))

    step = vnode.virtualize(fun, virtual_nodes=4).on(jax.devices()[:2])

    def run(f: Callable[..., Any]) -> Any:
        match outer:
            case "jit":
                return jax.jit(lambda: f(weights, batch))()
            case "scan":
                return jax.lax.scan(lambda c, x: (c + x, f(weights, batch)), 0.0, jnp.arange(2.0))
            case "vmap":
                return jax.vmap(lambda s: s * f(weights, batch))(jnp.arange(2.0))
            case _:
                return jax.grad(lambda s: s * f(weights, batch))(2.0)

    assert_close(run(step), run(fun))


@pytest.mark.parametrize("reduction", ["fast", "invariant"])
@pytest.mark.parametrize("counts", PLACES.values(), ids=PLACES)
def test_gradients_of_all_parameters_go_through_sums_over_nodes(counts: list[int], reduction: str) -> None:
    def total(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.sin(x @ params["in"] + params["bias"])
        return jnp.mean((hidden @ params["out"]) ** 2) + jnp.sum(params["out"] ** 2)

    params = {"in": normal(3, 4), "bias": normal(4), "out": normal(4, 2)}
    step = virtual(total, counts, reduction=reduction)
    x = normal(BATCH, 3)
    got = jax.grad(step)(params, x)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(got))
    assert_same(got, jax.grad(total), params, x)
