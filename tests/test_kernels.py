"""Kernels of others that are split at the node's size: by a sharding rule, by what jax says of them, by `jax.vmap`.

Knows cuDNN's attention, custom partitioning and sparse arrays as users call them. Must not know how a step is emitted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import sparse
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vnode
from tests.cudnn import BACKWARD, FORWARD, cudnn, with_cudnn  # noqa: F401
from tests.opaque import opaque
from tests.operators.brute_force import check, instances
from tests.rounding import assert_same, eighths

pytestmark = pytest.mark.quickly

BATCH, NODES = 10, 4
"""Four nodes of three examples: the last has two places of padding."""


def draw(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(eighths(np.random.default_rng(seed).standard_normal(shape)), dtype)


def sparse_batch(*shape: int) -> sparse.BCOO:
    """A batch of sparse arrays, each with its own places."""
    x = np.array(draw(*shape))
    x[np.random.default_rng(1).random(shape) < 0.5] = 0.0
    return sparse.BCOO.fromdense(jnp.asarray(x), n_batch=1)


def virtualized(step: Callable[..., Any], **options: Any) -> Any:
    options = {"coupling": "error", **options}
    return vnode.virtualize(step, virtual_nodes=NODES, **options)


def assert_alike_on_devices(virtual: Any, step: Callable[..., Any], *args: Any) -> None:
    """The plain step's result, and the same bits on one, two and three devices."""
    results = [virtual.on(jax.devices()[:count])(*args) for count in (1, 2, 3)]
    assert_same(results[0], jax.jit(step), *args)
    for other in results[1:]:
        for got, want in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_array_equal(got, want)


# cuDNN's attention

SEQUENCE, HEADS, WIDTH = 6, 4, 8

ATTENTION: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": lambda bias, lengths: {},
    "causal": lambda bias, lengths: {"is_causal": True},
    "lengths": lambda bias, lengths: {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths},
    "mask": lambda bias, lengths: {"mask": jnp.tril(jnp.ones((1, 1, SEQUENCE, SEQUENCE), bool))},
    "bias": lambda bias, lengths: {"bias": bias},
}


def attention_step(how: str) -> Callable[..., Any]:
    """Gradients of a layer of attention with as many heads of keys as of queries, or half as many."""

    def step(state: Any, x: jax.Array, lengths: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            weights, bias = state
            query, key, value = ((x @ w).reshape(*x.shape[:2], -1, WIDTH) for w in weights)
            options = ATTENTION[how](bias, lengths)
            out = jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss)(state)

    return step


def attention_arguments(dtype: Any) -> Any:
    heads = (HEADS, HEADS // 2, HEADS // 2)
    weights = [draw(HEADS * WIDTH, n * WIDTH, seed=i, dtype=dtype) / 16 for i, n in enumerate(heads)]
    lengths = jnp.asarray(np.random.default_rng(0).integers(1, SEQUENCE, (BATCH,)), jnp.int32)
    bias = draw(1, HEADS, SEQUENCE, SEQUENCE, dtype=dtype)
    return (weights, bias), draw(BATCH, SEQUENCE, HEADS * WIDTH, seed=5, dtype=dtype), lengths


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ATTENTION)
@pytest.mark.usefixtures("with_cudnn")
def test_attention_of_nodes_is_that_of_the_batch(how: str) -> None:
    step, args = attention_step(how), attention_arguments(jnp.bfloat16)
    virtual = virtualized(step, in_axes=(None, 0, 0))
    results = [virtual.on(jax.devices()[:count])(*args) for count in (1, 3)]
    for got, again, want in zip(*map(jax.tree.leaves, (*results, jax.jit(step)(*args))), strict=True):
        scale = float(jnp.abs(want).max()) or 1.0
        np.testing.assert_allclose(np.float32(got) / scale, np.float32(want) / scale, atol=2**-5)
        np.testing.assert_array_equal(np.float32(got), np.float32(again))


@pytest.mark.usefixtures("with_cudnn")
def test_attention_takes_the_whole_batch_where_pieces_of_a_sum_would_overflow() -> None:
    """The gradient of a bias in float16: the kernel knows no wider type."""
    step, args = attention_step("bias"), attention_arguments(jnp.float16)
    virtual = virtualized(step, in_axes=(None, 0, 0), coupling="exact", recompute_budget=10.0)
    assert any("bwd_wrapper needs the whole batch" in line.what for line in virtual.explain(*args).couplings)
    assert not virtualized(attention_step("plain"), in_axes=(None, 0, 0)).explain(*args).couplings


@pytest.mark.usefixtures("with_cudnn")
def test_attention_over_heads_of_a_mesh() -> None:
    """Heads are divided over another axis, and the gradient of a bias that heads share is summed over it."""

    def step(state: Any, x: jax.Array, lengths: jax.Array) -> Any:
        weights, bias = state
        return attention_step("bias")((weights, bias[:, :1]), x, lengths)

    (weights, bias), x, lengths = attention_arguments(jnp.bfloat16)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharded = [jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, "model"))) for w in weights]
    placement = vnode.Placement(NODES, mesh=mesh, axis="data")
    virtual = virtualized(step, in_axes=(None, 0, 0), placement=placement)
    got = virtual((sharded, jax.device_put(bias, NamedSharding(mesh, PartitionSpec()))), x, lengths)
    for g, want in zip(*map(jax.tree.leaves, (got, jax.jit(step)((weights, bias), x, lengths))), strict=True):
        scale = float(jnp.abs(want).max()) or 1.0
        np.testing.assert_allclose(np.float32(g) / scale, np.float32(want) / scale, atol=2**-5)
    text = virtual.lower((sharded, bias), x, lengths).as_text()
    assert "tensor<3x6x2x8xbf16>" in text  # two of four heads, of a node's examples


@pytest.mark.usefixtures("with_cudnn")
def test_kernels_for_gpus_are_those_of_a_node() -> None:
    """Compiled ahead of time: forward and backward calls in the loop over nodes, of three examples each."""
    step, args = attention_step("bias"), attention_arguments(jnp.bfloat16)
    virtual = virtualized(step, in_axes=(None, 0, 0)).on(jax.devices()[:1])
    text = jax.jit(virtual).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @__cudnn$fmha" in line]
    assert len(calls) == 2
    assert all(f": (tensor<3x{SEQUENCE}x{HEADS}x{WIDTH}xbf16>" in line for line in calls)


LATER = inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters
"""With parameters of the kernels that not every supported version of jax has."""


def kernel_parameters(**changes: Any) -> dict[str, Any]:
    return {
        "scale": 0.5,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (True, True),
        "mask_type": cudnn.MaskType.PADDING,
        "layout": 0,
        "sliding_window_length": None,
        **({"score_mod": None} if "score_mod" in LATER else {}),
    } | changes


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [0, 1], ids=["heads last", "heads first"])
@pytest.mark.parametrize("groups", [2, 4])
def test_attention_is_split_over_examples_and_heads(layout: int, groups: int) -> None:
    """Forward and backward, with a bias that examples share and one that they do not."""
    batch, length, keys, heads, width, depth = 3, 2, 5, 4, 2, 3
    order = (0, 2, 1, 3) if layout else (0, 1, 2, 3)
    rng = np.random.default_rng(0)
    query, key, value, out = (
        rng.standard_normal((batch, t, n, h)).transpose(order)
        for t, n, h in ((length, heads, width), (keys, groups, width), (keys, groups, depth), (length, heads, depth))
    )
    lengths = np.full((batch,), keys - 1, np.int32)
    unused = [np.zeros((0,))] * 4
    params = kernel_parameters(layout=layout)
    for shape in ((1, heads, length, keys), (batch, 1, length, keys)):

        def both(query: Any, key: Any, value: Any, bias: Any, cotangent: Any) -> Any:
            given = (query, key, value, bias, lengths, lengths, *unused)
            made, scores = FORWARD.bind(*given, is_training=True, **params)
            return BACKWARD.bind(*given, scores, made, cotangent, **params)

        names = frozenset({FORWARD.name, BACKWARD.name})
        with jax.enable_x64(True):
            found = instances(both, query, key, value, rng.standard_normal(shape), out, of=names)
            descriptions = [check(each) for each in found]
        split = [sorted(n for f, n in enumerate(d.sizes) if f not in d.whole) for d in descriptions]
        assert split == [sorted((batch, groups, *([heads // groups] if groups < heads else [])))] * 2


# Custom partitioning

SHAPES: list[tuple[int, ...]] = []
"""Of the first operand, each time that the function of a shard is traced."""


def shard(x: jax.Array, w: jax.Array) -> jax.Array:
    """A kernel that nothing is known of, of rows ``[b, i, j]``."""
    SHAPES.append(x.shape)
    return opaque(jnp.einsum("bij,jk->bik", x, w), axis=1)[0]


def partition(mesh: Any, operands: Any, results: Any) -> Any:
    """Shards over the first dimension only."""
    rows = operands[0].sharding.spec[0]
    several = NamedSharding(mesh, PartitionSpec(rows, None, None))
    # a function of its own, so that it is traced each time
    return mesh, lambda x, w: shard(x, w), several, (several, NamedSharding(mesh, PartitionSpec(None, None)))


def crossing(mesh: Any, operands: Any, results: Any) -> Any:
    """Wants what was asked for, and adds something up over the shards."""
    (axis,) = mesh.axis_names

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum(shard(x, w), axis)

    return mesh, fun, results.sharding, tuple(operand.sharding for operand in operands)


def ruled(mesh: Any, operands: Any, results: Any) -> Any:
    """A rule that is found for types."""
    (rank,) = {operands[0].rank}
    assert rank == 3
    return "b i j, j k -> b i k", {"need_replication_factors": ("i", "k")}


RULES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "string": ("b i j, j k -> b i k", {"reduction_factors": ("j",), "need_replication_factors": ("i",)}, partition),
    "ellipsis": ("... i j, j k -> ... i k", {"permutation_factors": ("i",)}, partition),
    "object": (
        SdyShardingRule(
            (ArrayMapping("b", "i", "j"), ArrayMapping("j", "k")),
            (ArrayMapping("b", "i", "k"),),
            reduction_factors=("j",),
        ),
        {},
        partition,
    ),
    "function": (ruled, {}, partition),
}
UNRULED: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "none": (None, {}, partition),
    "replicated": ("b i j, j k -> b i k", {"need_replication_factors": ("b",)}, partition),
    "exchange": ("b i j, j k -> b i k", {}, crossing),
    "failing": (lambda *_: 1 / 0, {}, partition),
}


def partitioned_step(rule: Any, options: Any, partition: Any) -> Callable[..., Any]:
    kernel = custom_partitioning(lambda x, w: shard(x, w))
    kernel.def_partition(partition, sharding_rule=rule, **options)

    def step(w: jax.Array, x: jax.Array) -> Any:
        out = kernel(jnp.tanh(x), w)
        return w - 0.125 * jnp.einsum("bij,bik->jk", x, out), out

    return step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RULES)
def test_custom_partitioning_is_split_by_its_rule(name: str) -> None:
    """The user's function of a shard is given a node's examples; the bits are the same on any devices."""
    step, (w, x) = partitioned_step(*RULES[name]), (draw(3, 4), draw(BATCH, 2, 3, seed=1))
    SHAPES.clear()
    virtual = virtualized(step)
    assert_alike_on_devices(virtual, step, w, x)
    assert (3, 2, 3) in SHAPES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNRULED)
def test_custom_partitioning_is_its_body_where_no_rule_splits_it(name: str) -> None:
    """Of which a primitive that nothing is known of is given the whole batch, and the product is not."""
    step, (w, x) = partitioned_step(*UNRULED[name]), (draw(3, 4), draw(BATCH, 2, 3, seed=1))
    virtual = virtualized(step, coupling="exact", recompute_budget=10.0)
    assert_alike_on_devices(virtual, step, w, x)
    (line,) = virtual.explain(w, x).undescribed
    assert line.what.startswith("opaque(")


# Sparse arrays

SPARSE: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "product": (lambda w, x: jnp.tanh(x @ w), lambda: sparse_batch(BATCH, 4, 6)),
    "rows": (lambda w, x: sparse.BCSR.from_bcoo(x) @ w, lambda: sparse_batch(BATCH, 4, 6)),
    "elements": (lambda w, x: (x.sort_indices() * w.sum(1)).sum(2).todense(), lambda: sparse_batch(BATCH, 4, 6)),
    "of dense": (lambda w, x: sparse.bcoo_fromdense(x, n_batch=1, nse=6) @ w, lambda: draw(BATCH, 6)),
}


@pytest.mark.sampled(1, thorough=2)
@pytest.mark.parametrize("name", SPARSE)
def test_batches_of_sparse_arrays(name: str) -> None:
    """Forward and backward, without a value of all examples."""
    network, make = SPARSE[name]

    def step(w: jax.Array, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (network(w, x) ** 2).sum())(w)
        return w - 0.125 * gradient, loss

    virtual, w, x = virtualized(step), draw(6, 3), make()
    assert_alike_on_devices(virtual, step, w, x)
    report = virtual.explain(w, x)
    assert len(report.passes) == 1 and not report.gathered


def test_sparse_weights() -> None:
    """A batch of dense examples; the gradient of the stored elements."""
    x = np.array(draw(5, 6))
    x[x < 0] = 0.0
    weights = sparse.BCOO.fromdense(jnp.asarray(x))

    def step(data: jax.Array, x: jax.Array) -> Any:
        def loss(data: jax.Array) -> jax.Array:
            return (jnp.tanh(x @ sparse.BCOO((data, weights.indices), shape=weights.shape)) ** 2).sum()

        return jax.value_and_grad(loss)(data)

    virtual, examples = virtualized(step), draw(BATCH, 5)
    assert_alike_on_devices(virtual, step, weights.data, examples)
    assert not virtual.explain(weights.data, examples).gathered


# Exported functions


@pytest.mark.parametrize("least", [1, 8])
def test_exported_functions_of_any_batch(least: int) -> None:
    """Called at the node's size, unless they ask for more examples than that; forward, and for the operand backward."""
    (rows,) = export.symbolic_shape("b", constraints=[f"b >= {least}"] if least > 1 else ())
    matrix = draw(3, 3, seed=2)
    teacher = export.export(jax.jit(lambda x: jax.nn.softmax(jnp.tanh(x @ matrix))))(
        jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    )

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return ((teacher.call(x @ w) - teacher.call(x)) ** 2).sum()

        return jax.value_and_grad(loss)(w)

    virtual, w, x = virtualized(step, coupling="exact", recompute_budget=10.0), draw(3, 3), draw(BATCH, 3, seed=1)
    assert_alike_on_devices(virtual, step, w, x)
    whole = {line.what for line in virtual.explain(w, x).undescribed}
    assert bool(whole) == (least > 1) and all(what.startswith("call_exported(f32[10,3]") for what in whole)
