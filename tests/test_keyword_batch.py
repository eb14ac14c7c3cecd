"""Batches by keyword, and of several sizes: whatever a batch by position can be asked, in a call or around it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vnode

pytestmark = pytest.mark.quickly

W = np.arange(3, dtype=np.float32)
X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


def loss(w: Any, x: Any, rate: Any = 0.1) -> tuple[jax.Array, jax.Array]:
    value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    return w - rate * grad, value


def by_position(state: Any, batch: Any, rate: Any = 0.1) -> tuple[jax.Array, jax.Array]:
    return loss(state, batch["x"], rate)


def by_keyword(state: Any, *, batch: Any, rate: Any = 0.1) -> tuple[jax.Array, jax.Array]:
    return loss(state, batch["x"], rate)


EXPECTED = loss(jnp.asarray(W), jnp.asarray(X))


def check(results: Any) -> None:
    for one, other in zip(results, EXPECTED, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@functools.cache
def step_of(fun: Any, *, named: bool = True) -> Any:
    return vnode.virtualize(fun, virtual_nodes=4, in_axes={"batch": 0} if named else (None, 0))


def test_one_program_however_the_batch_is_given() -> None:
    """And `in_axes` by position means the argument that has the name."""
    for named in (True, False):
        step = step_of(by_position, named=named)
        for args, kwargs in (((W, {"x": X}), {}), ((W,), {"batch": {"x": X}}), ((), {"state": W, "batch": {"x": X}})):
            check(step(*args, **kwargs))
        assert step.executor._jit._cache_size() == 1
        assert step.explain(W, batch={"x": X}).batch == 10


def test_batch_that_is_given_by_keyword_only() -> None:
    step = step_of(by_keyword)
    shapes = {"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}
    assert step.explain(W, batch=shapes).virtual_nodes == 4 and step.lower(W, batch=shapes)
    check(step(step.put(W), batch={"x": X}))
    check(step(W, batch={"x": X}, rate=0.1))
    check(jax.jit(lambda w, x: step(w, batch={"x": x}))(W, X))
    fewer = step.on(jax.devices()[:3])
    assert step.prepare(fewer.placement).wait().done()
    batches = vnode.data.Batches({"x": X}, batch_size=10, shuffle=False)
    check(fewer(W, batch=batches.load(0, fewer.placement)))
    with pytest.raises(vnode.BatchError, match="empty"):
        step(W, batch={"x": X[:0]})
    with pytest.raises(TypeError, match="batch"):
        step(W)


def test_in_a_run() -> None:
    """The loop gives a state and a batch; a step that takes the batch by keyword is given it so."""
    batches = vnode.data.Batches({"x": X}, batch_size=10, shuffle=False)
    result = vnode.elastic.run(step_of(by_keyword), jnp.asarray(W), batches, steps=1)
    np.testing.assert_allclose(result.state, EXPECTED[0], rtol=1e-5)


def test_of_objects() -> None:
    def step(model: nnx.Linear, *, batch: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch) - 1) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return value

    plain, given = (nnx.Linear(3, 1, rngs=nnx.Rngs(0)) for _ in range(2))
    expected = step(plain, batch=jnp.asarray(X))
    virtual = vnode.nnx.virtualize(step, virtual_nodes=4, in_axes={"batch": 0})
    np.testing.assert_allclose(virtual(given, batch=X), expected, rtol=1e-5)
    np.testing.assert_allclose(given.kernel.get_value(), plain.kernel.get_value(), rtol=1e-5)
    step(plain, batch=jnp.asarray(X))
    vnode.elastic.run(virtual, given, vnode.data.Batches(X, batch_size=10, shuffle=False), steps=1)
    np.testing.assert_allclose(given.kernel.get_value(), plain.kernel.get_value(), rtol=1e-5)


def test_names_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="no argument 'bach'"):
        vnode.virtualize(by_keyword, virtual_nodes=4, in_axes={"bach": 0})
    any_names = vnode.virtualize(lambda state, **rest: state, virtual_nodes=4, in_axes={"batch": 0})
    with pytest.raises(vnode.BatchError, match="names 'batch', which the call does not have"):
        any_names(W, other=X)
    with pytest.raises(vnode.BatchError, match=r"in_axes\['batch'\] does not fit batch"):
        vnode.virtualize(by_keyword, virtual_nodes=4, in_axes={"batch": {"y": 0}})(W, batch={"x": X})


def test_batches_of_several_sizes_are_explained() -> None:
    def step(state: Any, labelled: Any, unlabelled: Any) -> Any:
        return loss(state, jnp.concatenate([labelled, unlabelled]))

    virtual = vnode.virtualize(step, virtual_nodes=4, in_axes={"labelled": 0, "unlabelled": 0})
    few, many = np.ones((12, 3), np.float32), np.zeros((36, 3), np.float32)
    report = virtual.explain(W, few, unlabelled=many)
    assert report.batches == ((12, 3), (36, 9)) and report.batch == 12 and len(report.passes) == 1
    assert "12 and 36 examples on 4 virtual nodes of 3 and 9" in str(report)
    apart = virtual.explain(W, few[:10], many[:33])
    assert apart.batches == ((10, 3), (33, 9)) and apart.passes
    with pytest.raises(vnode.BatchError, match="empty"):
        virtual(W, few, many[:0])
