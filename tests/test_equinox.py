"""Equinox and what is written with it, unchanged: numbers in modules, loops, errors, primitives of its own.

Knows Equinox's public and internal functions, and how a library makes a primitive. Must not know how a step is
emitted. Whole training steps are in `tests.zoo.repositories`.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching

import vnode
from tests import rounding
from vnode.placement.static_scalars import static_scalars

pytestmark = pytest.mark.quickly

BATCH = 6


class Inner(eqx.Module):
    weight: jax.Array
    rate: float
    options: list[Any]


@flax.struct.dataclass
class Counted:
    step: Any
    inner: Any


def test_python_scalars_of_equinox_modules_are_constants() -> None:
    """The nearest module decides; lists, tuples and dictionaries are no modules; NumPy's scalars are arrays."""
    inner = Inner(jnp.ones(2), 0.5, [1, True, 2j, np.float64(3.0), np.ones(2), {"x": (4.0, None)}])
    want = {
        ".weight": False,
        ".rate": True,
        ".options[0]": True,
        ".options[1]": True,
        ".options[2]": True,
        ".options[3]": False,
        ".options[4]": False,
        ".options[5]['x'][0]": True,
    }

    def found(tree: Any) -> dict[str, bool]:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
        return dict(zip(paths, static_scalars(tree), strict=True))

    assert found(inner) == want
    assert found({"a": [inner, 1], "b": 2.0}) == {f"['a'][0]{k}": v for k, v in want.items()} | {
        "['a'][1]": False,
        "['b']": False,
    }
    assert found(Counted(3, inner)) == {".step": False} | {f".inner{k}": v for k, v in want.items()}
    assert static_scalars(Inner(jnp.ones(2), 0.5, [Counted(1, 2.0)])) == [False, True, False, False]


class Model(eqx.Module):
    layers: list[eqx.nn.Linear]
    dropout: eqx.nn.Dropout
    depth: int
    scale: float
    activation: Callable[..., Any]

    def __init__(self) -> None:
        self.layers = [eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(3)]
        self.dropout = eqx.nn.Dropout(0.3)
        self.depth = 2
        self.scale = 0.7
        self.activation = jax.nn.relu

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        for i in range(self.depth):
            x = self.activation(self.layers[i](x))
            x = x * self.scale if self.scale > 0.5 else x
        return self.layers[-1](self.dropout(x, key=key))


TX = optax.adam(1e-2)


def train(state: tuple[Model, Any], x: jax.Array, key: jax.Array) -> Any:
    model, opt_state = state

    def loss_fn(model: Model) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x, jax.random.split(key, x.shape[0])) - x) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = TX.update(grads, opt_state)
    return (eqx.apply_updates(model, updates), opt_state), loss


def start() -> tuple[tuple[Model, Any], jax.Array, jax.Array]:
    model = Model()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, 4)), jnp.float32)
    return (model, TX.init(eqx.filter(model, eqx.is_inexact_array))), x, jax.random.key(1)


def assert_same(got: Any, step: Callable[..., Any], *args: Any) -> None:
    """Up to rounding; numbers that are no arrays stay of their type."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(step(*args)), strict=True):
        assert eqx.is_array(w) or type(g) is type(w)
    rounding.assert_same(got, step, *args)


@pytest.mark.parametrize("wrap", [lambda step: step, eqx.filter_jit], ids=["plain", "filter_jit"])
def test_numbers_stay_numbers_from_step_to_step(wrap: Callable[..., Any]) -> None:
    state, x, key = start()
    step = vnode.virtualize(wrap(train), virtual_nodes=3, in_axes=(None, 0, None)).on(jax.devices()[:2])
    step.prepare([jax.devices()[:2]], state, x, key).wait()

    def twice(step: Callable[..., Any], state: Any, x: jax.Array, key: jax.Array) -> Any:
        return step(step(state, x, key)[0], x, key)

    plain = functools.partial(twice, eqx.filter_jit(train))
    assert_same(twice(step, step.put(state), x, key), plain, state, x, key)


def test_another_number_is_another_program() -> None:
    state, x, key = start()
    step = vnode.virtualize(train, virtual_nodes=2, in_axes=(None, 0, None)).on(jax.devices()[:1])
    step(state, x, key)
    changed = (eqx.tree_at(lambda m: (m.depth, m.scale), state[0], (1, 0.2)), state[1])
    assert_same(step(changed, x, key), eqx.filter_jit(train), changed, x, key)


def test_checkpoints_hold_arrays_only(tmp_path: Path) -> None:
    state, x, key = start()
    step = vnode.virtualize(lambda state, x: train(state, x, key), virtual_nodes=2).on(jax.devices()[:1])
    first = vnode.elastic.run(step, state, lambda i: x, steps=2, checkpoint=tmp_path / "run", checkpoint_every=1)
    again = vnode.elastic.run(step, state, lambda i: x, steps=3, checkpoint=tmp_path / "run", checkpoint_every=1)
    assert_same(again.state, lambda state, x: step(state, x)[0], first.state, x)
    assert again.state[0].depth == 2 and type(again.state[0].depth) is int


# Loops and primitives


def solved(kind: str) -> Callable[..., Any]:
    """Each example takes as many turns as it needs; the gradient goes back through them."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def one(row: jax.Array, w: jax.Array) -> jax.Array:
            def going(carry: Any) -> jax.Array:
                return (carry[0] < 5) & (jnp.abs(carry[1]).sum() > 1.0)

            def turn(carry: Any) -> Any:
                return carry[0] + 1, jnp.tanh(carry[1] @ w)

            return eqx.internal.while_loop(going, turn, (0, row), max_steps=8, kind=kind)[1].sum()

        return jax.value_and_grad(lambda w: jax.vmap(one, in_axes=(0, None))(x, w).mean())(w)

    return step


def kept_apart(w: jax.Array, x: jax.Array) -> Any:
    """A function that jax is asked to compile on its own, with its derivative."""

    @eqx.internal.noinline
    def layer(w: jax.Array, row: jax.Array) -> jax.Array:
        return jnp.tanh(row @ w)

    return jax.value_and_grad(lambda w: jax.vmap(layer, in_axes=(None, 0))(w, x).mean())(w)


def checked(w: jax.Array, x: jax.Array) -> Any:
    """Errors in the middle, of one example, and of what all share."""

    def loss_fn(w: jax.Array) -> jax.Array:
        def one(row: jax.Array) -> jax.Array:
            row = eqx.error_if(row, jnp.isnan(row), "an input is not a number")
            return jnp.tanh(row @ w).sum()

        loss = jax.vmap(one)(x).mean()
        return eqx.error_if(loss, loss > 100.0, "the loss is too large")

    return jax.value_and_grad(loss_fn)(w)


STEPS = {"bounded": solved("bounded"), "noinline": kept_apart, "error_if": checked}
if os.environ.get("VNODE_TEST_ALL") == "1":
    STEPS["checkpointed"] = solved("checkpointed")


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_internal_primitives(step: Callable[..., Any]) -> None:
    rng = np.random.default_rng(1)
    w, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 4), (BATCH, 4)))
    virtual = vnode.virtualize(step, virtual_nodes=3, recompute_budget=10.0).on(jax.devices()[:2])
    assert_same(virtual(w, x), jax.jit(step), w, x)


def test_errors_of_single_examples_reach_all() -> None:
    """Where errors are to become NaN rather than an exception, one example's does so to the whole batch."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: eqx.error_if(row, row[0] > 1.0, "too large", on_error="nan"))(x) + w

    for largest in (0.5, 2.0):
        w, x = jnp.ones(4), jnp.zeros((BATCH, 4)).at[4, 0].set(largest)
        virtual = vnode.virtualize(step, virtual_nodes=3, recompute_budget=10.0).on(jax.devices()[:2])
        assert bool(jnp.isnan(virtual(w, x)).all()) == (largest > 1.0)
        assert_same(virtual(w, x), jax.jit(step), w, x)


def primitive(name: str, implementation: Callable[..., Any]) -> Primitive:
    made = Primitive(name)
    made.def_impl(implementation)
    made.def_abstract_eval(lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype))
    batching.primitive_batchers[made] = lambda args, dims, **params: (made.bind(*args, **params), dims[0])
    return made


def test_primitives_written_in_jax_are_what_they_do() -> None:
    """Of a library nobody knows; one whose implementation is no JAX code is given the whole batch."""
    centred = primitive("centred", lambda x, *, scale: scale * (x - x.mean(0)))
    rounded = primitive("rounded", lambda x: np.round(np.asarray(x)))

    def step(made: Primitive, w: jax.Array, x: jax.Array, **params: Any) -> Any:
        return made.bind(x, **params) * w

    w, x = jnp.arange(3.0), jnp.asarray(np.random.default_rng(2).standard_normal((BATCH, 3)), jnp.float32)
    virtual = vnode.virtualize(functools.partial(step, centred, scale=2.0), virtual_nodes=3, recompute_budget=10.0)
    assert_same(virtual.on(jax.devices()[:2])(w, x), lambda w, x: 2.0 * (x - x.mean(0)) * w, w, x)
    (line,) = vnode.virtualize(functools.partial(step, rounded), virtual_nodes=3).explain(w, x).undescribed
    assert line.what.startswith("rounded(")


@pytest.mark.thorough
def test_what_a_primitive_does_is_what_it_does_now() -> None:
    """The same primitive after a setting was changed, and with a parameter that Python takes to be equal."""

    def shifted(x: jax.Array, *, by: float) -> jax.Array:
        return x * jax.random.uniform(jax.random.key(1), (3,)) + jnp.copysign(0.25, by)

    noisy = primitive("noisy", shifted)
    w, x = jnp.arange(3.0), jnp.asarray(np.random.default_rng(2).standard_normal((BATCH, 3)), jnp.float32)

    def step(by: float, outer: bool, w: jax.Array, x: jax.Array) -> Any:
        with jax.threefry_partitionable(outer):
            return noisy.bind(x, by=by) * w

    for draws, around, by in itertools.product((True, False, True), (True, False), (0.0, -0.0)):
        with jax.threefry_partitionable(around):
            virtual = vnode.virtualize(functools.partial(step, by, draws), virtual_nodes=3).on(jax.devices()[:2])
            found = virtual(w, x)
        with jax.threefry_partitionable(draws):
            assert_same(found, lambda w, x, by=by: shifted(x, by=by) * w, w, x)
