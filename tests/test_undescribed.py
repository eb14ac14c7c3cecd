"""Primitives that no description covers: given the whole batch, run once, exactly; refused only by budget or effects.

Knows custom primitives, FFI calls, exported functions, host code and places in a step where they may stand. Must not
know how a step is emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec

import vnode
from tests.opaque import opaque
from tests.rounding import assert_same, eighths

pytestmark = pytest.mark.quickly

BATCH, WIDTH, NODES = 10, 4, 4
"""Four nodes of three examples: the last has two places of padding."""


def arguments() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    draw = rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal((BATCH, WIDTH))
    return jnp.asarray(eighths(draw[0])), jnp.asarray(eighths(draw[1]))


def virtualized(step: Callable[..., Any], **options: Any) -> Any:
    options = {"recompute_budget": 10.0, **options}
    return vnode.virtualize(step, virtual_nodes=NODES, **options)


def trained(network: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (network(w, x) ** 2).sum())(w)
        return w - 0.125 * gradient, loss

    return step


def layer(w: jax.Array, h: jax.Array) -> jax.Array:
    difference, total = opaque(jnp.tanh(h @ w))
    return difference + total


def in_layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda h, _: (layer(w, h), None), x, None, length=2)[0]


def in_remat(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.checkpoint(in_layers)(w, x)


def in_branch(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.cond(w[0, 0] > -5.0, layer, lambda w, x: x, w, x)


def in_while(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, h: lax.stop_gradient(layer(w, h)), x) @ w


def of_sums_and_examples(w: jax.Array, x: jax.Array) -> jax.Array:
    """Of a completed sum, of examples along another dimension, and of its own result."""
    features = opaque(x.T, axis=1)[0].T
    return opaque(features)[0] @ w + opaque(x.sum(0))[0]


NETWORKS = [layer, in_layers, in_remat, in_branch, in_while, of_sums_and_examples]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_forward_and_backward_at_any_place(network: Callable[..., Any]) -> None:
    """The result is the plain step's, and has the same bits on any devices."""
    step, (w, x) = trained(network), arguments()
    virtual = virtualized(step)
    results = [virtual.on(jax.devices()[:count])(w, x) for count in (1, 2, 3)]
    assert_same(results[0], jax.jit(step), w, x)
    for other in results[1:]:
        for got, want in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_array_equal(got, want)


def test_explain_says_what_is_collected_where_and_what_helps() -> None:
    report = virtualized(trained(layer)).explain(*arguments())
    (line,) = report.undescribed
    assert line.what == "opaque(f32[10,4]) -> f32[10,4], f32[4]" and "opaque.py" in line.where
    assert line.bytes == BATCH * WIDTH * 4
    assert "Without a description" in str(report) and "docs/registering-a-primitive.md" in str(report)


def test_examples_one_by_one_need_no_others() -> None:
    """In a loop over the examples each node runs it on its own."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return lax.map(lambda row: opaque(w * row)[0].sum(0), x)

    virtual = virtualized(step, coupling="error")
    assert not virtual.explain(*arguments()).undescribed
    assert_same(virtual(*arguments()), jax.jit(step), *arguments())


def test_refused_by_budget_and_where_couplings_are_errors() -> None:
    step = trained(layer)
    for options, what in (
        ({"recompute_budget": 0.0}, r"recompute_budget=0\.0"),
        ({"coupling": "error"}, "coupling='error' forbids"),
    ):
        said = rf"(?s){what}.*opaque has no description.*opaque\.py.*vnode\.operators\.register"
        with pytest.raises(vnode.CouplingError, match=said):
            virtualized(step, **options)(*arguments())


def test_local_estimates_do_not_reach_it() -> None:
    """It is given the sums of the whole batch, as whoever needs the whole batch is."""

    def host(h: Any, mean: Any) -> np.ndarray:
        return np.asarray(h) - np.flip(h, 0) * np.asarray(mean)

    def step(w: jax.Array, x: jax.Array) -> Any:
        h = x @ w
        mixed = jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h, h.mean(0))
        return mixed, (mixed * h).sum(0)

    assert_same(virtualized(step, coupling="local")(*arguments()), jax.jit(step), *arguments())


def test_over_another_axis_of_the_mesh() -> None:
    """Sharded parameters are gathered for it."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step, (w, x) = trained(layer), arguments()
    virtual = vnode.virtualize(
        step,
        virtual_nodes=NODES,
        placement=vnode.Placement(NODES, mesh=mesh, axis="data"),
        recompute_budget=10.0,
        partition={"": PartitionSpec("model")},
    )
    assert_same(virtual(w, x), jax.jit(step), w, x)


# Calls that leave XLA's hands


def factors(x: jax.Array) -> jax.Array:
    """LU factors of all matrices at once, by a kernel that comes with jaxlib."""
    shapes = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape[:2], jnp.int32),
        jax.ShapeDtypeStruct(x.shape[:1], jnp.int32),
    )
    return jax.ffi.ffi_call("lapack_sgetrf_ffi", shapes, input_output_aliases={0: 0})(x)[0]


def exported(x: jax.Array) -> jax.Array:
    """A function that was exported for one size of the batch."""
    return export.export(jax.jit(lambda x: jnp.sort(x, axis=0) * x))(jax.ShapeDtypeStruct(x.shape, x.dtype)).call(x)


def by_host(x: jax.Array) -> jax.Array:
    """Host code that sees the whole array."""
    return jax.pure_callback(lambda x: np.sort(np.asarray(x), axis=0), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


CALLS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "ffi_call": lambda x: factors(x[:, :, None] * x[:, None, :] + jnp.eye(WIDTH)).sum(-1),
    "call_exported": exported,
    "pure_callback": by_host,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_given_the_whole_batch(name: str) -> None:
    call = CALLS[name]
    jax.jit(lax.linalg.lu).lower(jnp.eye(2))  # registers the kernels that come with jaxlib

    def step(w: jax.Array, x: jax.Array) -> Any:
        h = call(jnp.tanh(x @ w))
        return w - 0.125 * x.T @ h, h

    virtual, (w, x) = virtualized(step), arguments()
    assert_same(virtual.on(jax.devices()[:1])(w, x), jax.jit(step), w, x)
    assert_same(virtual.on(jax.devices()[:3])(w, x), jax.jit(step), w, x)
    (line,) = virtual.explain(w, x).undescribed
    assert line.what.startswith(name)


def test_a_call_with_an_effect_is_refused() -> None:
    """Nothing says whether it is wanted once, or once per node."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call("some_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=True)
        return call(x) @ w

    with pytest.raises(vnode.UnsupportedPrimitiveError, match=r"(?s)'ffi_call'.*has an effect.*test_undescribed\.py"):
        virtualized(step).explain(*arguments())
