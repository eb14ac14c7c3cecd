"""The hardware does not show in the result: the same bits on any number of devices.

Knows the zoo and `reduction="invariant"`. Bits are compared with those of the same step on one device; that this one is
right is what `test_zoo` says. Programs are compiled as users compile them, in float32.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import vnode
from tests import zoo
from tests.zoo import compare
from tests.zoo.compare import digest
from vnode.operators import Monoid
from vnode.placement.sharded import whole_batches
from vnode.runtime import node_loops

ALL = os.environ.get("VNODE_TEST_ALL") == "1"

DEVICES = tuple(range(1, 9)) if ALL else (1, 3, 8)
"""One device, some with different numbers of nodes, and some with one node each."""

STEPS = 20

TRAINED = {
    "linen_clip_by_global_norm": 8,
    "equinox_adamw": 8,
    "vit_with_reshaped_patches": 8,
    "lm_grouped_query_attention_tied_embeddings": 8,
    "haiku_dropout_and_layer_norm": 8,
    "loss_masked_mean": 12,
    "lstm_batch_major": 8,
    "batch_norm_exact": 8,
    "batch_norm_local": 8,
    "contrastive_clip": 8,
    "experts_with_capacity": 8,
    "private_gradients": 16,
    "gan": 8,
    "bfloat16_compute": 8,
    "loss_scaling_skipping": 8,
    "training_on_a_batch_that_is_no_multiple": 5,
}
"""Steps that are run for a while, with numbers of nodes: equal to the most devices, more, less, and no power of two."""

RARELY = {"haiku_dropout_and_layer_norm", "batch_norm_local", "vit_with_reshaped_patches", "lstm_batch_major", "gan"}
"""Those that are left out of the usual run, which has much of what they have."""


def named(name: str) -> zoo.Case:
    return next(case for case in zoo.cases() if case.name == name)


def virtual(program: zoo.Program, nodes: int, **options: Any) -> Any:
    return vnode.virtualize(program.step, virtual_nodes=nodes, **{**program.options, **options})


def trained(step: Any, program: zoo.Program, devices: Sequence[int]) -> str:
    """The digest of state and metrics after as many steps as `devices` has entries, each on so many devices."""
    state, *rest = program.args
    metrics: Any = None
    for count in devices:
        state, *metrics = step.on(jax.devices()[:count])(state, *rest)
    return digest((state, metrics))


def trained_names() -> list[str]:
    """Most of them, or all."""
    return list(TRAINED) if ALL else [n for n in TRAINED if n not in RARELY]


@pytest.mark.sampled(1, thorough=6)
@pytest.mark.parametrize("name", trained_names())
def test_twenty_steps_on_any_number_of_devices(name: str) -> None:
    with compare.running_in("float32"):
        program = compare.build(named(name), "float32")
        step = virtual(program, TRAINED[name])
        digests = {d: trained(step, program, [d] * STEPS) for d in DEVICES}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4 if ALL else 1))
def test_resizing_at_any_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with compare.running_in("float32"):
        program = compare.build(named("linen_clip_by_global_norm"), "float32")
        step = virtual(program, 8)
        never = trained(step, program, [1] * STEPS)
        assert trained(step, program, rng.integers(1, 9, STEPS).tolist()) == never


def test_uneven_counts() -> None:
    with compare.running_in("float32"):
        program = compare.build(named("loss_masked_mean"), "float32")
        step = virtual(program, 8)
        want = digest(step.on(jax.devices()[:1])(*program.args))
        for counts in ([7, 1], [1, 0, 6, 1], [2, 3, 3], *([[1, 7], [3, 5]] if ALL else [])):
            got = step.on(jax.devices()[: len(counts)], counts=counts)(*program.args)
            assert digest(got) == want, counts


def test_nodes_of_one_example_or_none() -> None:
    """Which node it is decides about padding, and must not be known to the compiler on one device only."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2) + 0.1 * jnp.mean(x @ w)

    step = vnode.virtualize(jax.value_and_grad(loss), virtual_nodes=8)
    w = jnp.asarray([1, -0.5, 0.2])
    for seed in range(8):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=(7, 3)), jnp.float32)
        one, several = (step.on(jax.devices()[:n])(w, x) for n in (1, 3))
        assert digest(one) == digest(several), seed


def identity_or_mean(x: jax.Array) -> jax.Array:
    """One branch returns what it is given, the other what it computes once."""
    return jax.lax.cond(x[0, 0] > 0, lambda x: x, lambda x: jnp.broadcast_to(x.mean(), x.shape), x)


def each_until_small(x: jax.Array) -> jax.Array:
    """A loop for each column, which stops when all examples are small in that column."""

    def column(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.5, lambda x: x / 2, x)

    return jax.vmap(column, in_axes=1, out_axes=1)(x)


def centred_by(x: jax.Array) -> jax.Array:
    """A loop that is called with a number."""

    def centred(x: jax.Array, rate: Any) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x - rate * x.mean(0), None), x, None, length=2)[0]

    return jax.jit(centred)(x, 0.5)


@pytest.mark.parametrize("step", [identity_or_mean, each_until_small, centred_by])
def test_loops_and_branches_around_passes_on_uneven_counts(step: Any) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-64, 64, (13, 3)) / 8, jnp.float32)
    virtual = vnode.virtualize(step, virtual_nodes=5, in_axes=0, recompute_budget=10.0)
    for given in (x, -x):
        want = jax.jit(step)(given)
        one = virtual.on(jax.devices()[:1])(given)
        np.testing.assert_allclose(one, want, rtol=1e-6)
        np.testing.assert_array_equal(virtual.on(jax.devices()[:3], counts=(4, 0, 1))(given), one)


def combine(monoids: Sequence[Any]) -> Any:
    """A step that combines 24 examples by monoids, in a way in which order shows."""
    return vnode.virtualize(lambda scale, x: [monoid(scale * x, axis=0) for monoid in monoids], virtual_nodes=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("complex64", marks=pytest.mark.sweep)])
def test_every_monoid(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(24, 5)), dtype) * (1j + 1 if dtype == "complex64" else 1)
    scale = jnp.asarray(1.25, x.dtype)
    monoids = [jnp.sum, jnp.max, jnp.min, jnp.prod]
    if dtype == "complex64":  # a product is two sums of two products, which compilers contract
        assert "not of products of complex numbers" in str(combine([monoids.pop()]).explain(scale, x))
    step = combine(monoids)
    assert len({digest(step.on(jax.devices()[:d])(scale, x)) for d in DEVICES}) == 1


def test_sums_without_elements() -> None:
    step = vnode.virtualize(lambda w, x: (x[:, :0].sum(0), x.sum(), x[:, 3:].sum(0)), virtual_nodes=4)
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    for devices in (1, 2, 3, 8):
        empty, total, other = step.on(jax.devices()[:devices])(jnp.float32(1), x)
        assert (empty.shape, total, other.shape) == ((0,), x.sum(), (0,))


def test_the_order_is_that_of_the_tree() -> None:
    """Of eight numbers, one per node: (((0+1)+(2+3))+(4+5))+(6+7), which is not their sum in order."""
    rng = np.random.default_rng(11)
    x = (rng.normal(size=8) * 10.0 ** rng.integers(-4, 5, 8)).astype(np.float32)
    want = (((x[0] + x[1]) + (x[2] + x[3])) + (x[4] + x[5])) + (x[6] + x[7])
    assert np.add.accumulate(x)[-1] != want  # or the test could not fail
    step = vnode.virtualize(lambda w, x: w * x.sum(), virtual_nodes=8)
    for devices in DEVICES:
        assert step.on(jax.devices()[:devices])(jnp.float32(1), x) == want


BRANCHES = {8: (2, 4), 12: (2, 3, 2), 16: (2, 4, 2)}
"""Of the tree over so many nodes, the lowest level first."""


def in_tree_order(pieces: list[np.ndarray]) -> np.ndarray:
    """Of one node's piece after another, in NumPy: two neighbours, then as many of such sums, and so on."""
    for branches in BRANCHES[len(pieces)]:
        pieces = [functools.reduce(np.add, pieces[i : i + branches]) for i in range(0, len(pieces), branches)]
    (total,) = pieces
    return total


SIZES = [(), (3,), (129, 64), (70, 90), (257, 129), (64, 512), (3, 5, 7), (512, 100), (11,)]
"""Of sums that travel between devices in every way: with others and alone, by chunks of a dimension and of all."""


@pytest.mark.parametrize("nodes", [12, pytest.param(8, marks=pytest.mark.sweep)])
def test_sums_of_every_size(nodes: int) -> None:
    rng = np.random.default_rng(2)
    x = [(rng.normal(size=(nodes, *size)) * 10.0 ** rng.integers(-3, 4, (nodes, *size))) for size in SIZES]
    x = [value.astype(np.float32) for value in x]
    want = [in_tree_order(list(value)) for value in x]
    assert any((a != b.sum(0)).any() for a, b in zip(want, x, strict=True))  # or the test could not fail
    step = vnode.virtualize(lambda w, x: jax.tree.map(lambda value: value.sum(0), x), virtual_nodes=nodes)
    for devices in DEVICES:
        for a, b in zip(step.on(jax.devices()[:devices])(0.0, x), want, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.int32), b.view(np.int32))


@pytest.mark.sampled(0, thorough=2)
@pytest.mark.parametrize(("nodes", "lanes"), [(16, None), (16, 1), (12, 3)])
def test_what_is_in_memory_before_does_not_show(monkeypatch: pytest.MonkeyPatch, nodes: int, lanes: int | None) -> None:
    """Of memory that sums are written to, CPUs have zeros, TPUs and GPUs what was there: NaN, say."""
    rng = np.random.default_rng(5)
    x = [rng.normal(size=(nodes, *size)).astype(np.float32) for size in SIZES]
    want = [value.sum(0, dtype=np.float64) for value in x]
    poisoned = []

    def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        poisoned.append(shape)
        return jax.lax.full(shape, np.nan, dtype)

    monkeypatch.setattr(jax.lax, "empty", empty)
    step = vnode.virtualize(lambda w, x: [value.sum(0) for value in x], virtual_nodes=nodes, lanes=lanes)
    for devices in (1, 2, 3, 8):  # of one lane, or of three, some devices have nothing
        for a, b in zip(step.on(jax.devices()[:devices])(0.0, x), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert poisoned


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("width", "dtype"), [(1, "float32"), (32, "float32"), (128, "float32"), (32, "complex64"), (32, "float16")]
)
def test_a_sum_of_zeros_is_positive_and_nan_is_kept(width: int, dtype: str) -> None:
    """Of products, which no compiler adds to a zero first; their sums travel with others, packed, and alone."""
    step = vnode.virtualize(lambda w, x, y: x.T @ y, virtual_nodes=8)
    x = np.full((8, 300), -0.0, dtype)
    x[5, 7] = np.nan
    for devices in DEVICES:
        out = np.asarray(step.on(jax.devices()[:devices])(0.0, x, np.ones((8, width), dtype)))
        assert np.isnan(out[7]).all()
        zeros = np.delete(out, 7, 0)
        assert (zeros == 0).all()
        assert not np.signbit(zeros.real).any()
        assert not np.signbit(zeros.imag).any()


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_what_a_single_node_contributes_is_as_if_added_to_zero(dtype: str) -> None:
    parts = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf]
    several = parts if dtype == "float32" else [complex(a, b) for a in parts for b in parts]
    x = np.array(several, dtype)
    made = np.asarray(node_loops.Sum(Monoid.SUM, x.shape, x.dtype).from_zero(jnp.asarray(x)))
    assert made.tobytes() == (np.zeros((), dtype) + x).tobytes()


@pytest.mark.parametrize(
    ("nodes", "lanes"),
    [(12, 5), pytest.param(8, 1, marks=pytest.mark.thorough), pytest.param(16, 4, marks=pytest.mark.sweep)],
)
def test_lanes(nodes: int, lanes: int) -> None:
    with compare.running_in("float32"):
        program = compare.build(named("linen_clip_by_global_norm"), "float32")
        step = virtual(program, nodes, lanes=lanes)
        digests = {d: trained(step, program, [d] * 3) for d in {1, (lanes + 1) // 2, lanes}}
    assert len(set(digests.values())) == 1, digests


def test_lanes_are_not_divided() -> None:
    step = vnode.virtualize(lambda w, x: w + x.sum(0), virtual_nodes=8, lanes=2)
    assert step.on(jax.devices()[:3]).placement.counts == (4, 4, 0)
    with pytest.raises(vnode.PlacementError, match=r"whole lanes of 4 nodes(.|\n)*counts=\[4, 4, 0\]"):
        step.on(vnode.Placement(8, jax.devices()[:3]))


def test_pieces_are_rounded_before_they_are_added() -> None:
    """Products, which a compiler would contract with an addition in the same loop, on devices where they are first.

    Of 16 nodes on 3 devices, the third begins with the second of two.
    """
    rng = np.random.default_rng(3)
    x, y = (rng.normal(size=(16, 150, 120)).astype(np.float32) for _ in range(2))
    want = in_tree_order(list(x * y))
    step = vnode.virtualize(lambda w, x, y: (x * y).sum(0), virtual_nodes=16, in_axes=(None, 0, 0))
    for devices in (1, 3, 8):
        total = step.on(jax.devices()[:devices])(0.0, x, y)
        np.testing.assert_array_equal(np.asarray(total).view(np.int32), want.view(np.int32))


def test_a_small_sum_that_a_node_flattens_itself() -> None:
    """A node's gradient is flattened for a product of its own, and to be stored beside other small sums.

    If both reshapes were one, XLA would add the product over 8 x 3 elements on one device, and over 24 on several.
    """

    def step(state: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return jnp.vdot(gradient, state["sum"] / state["scale"]), 0.1 * gradient * gradient

    rng = np.random.default_rng(0)
    state = {name: jnp.asarray(rng.normal(size=(8, 3)), jnp.float32) for name in ("w", "sum", "scale")}
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    virtual = vnode.virtualize(step, virtual_nodes=4)
    assert len({digest(virtual.on(jax.devices()[:n])(state, x)) for n in (1, 2, 3)}) == 1


NOTATIONS: dict[str, tuple[Any, Any]] = {
    "power": (lambda q, w: q * q, lambda q, w: q**2),
    "order": (lambda q, w: abs(q * (q + 1)), lambda q, w: abs((q + 1) * q)),
    "dot": (lambda q, w: abs(q @ w), lambda q, w: abs(jax.lax.dot(q, w))),
    "part": (lambda q, w: abs(q[:, :3]), lambda q, w: abs(jnp.split(q, 2, 1)[0])),
    "squeeze": (lambda q, w: abs(jnp.squeeze(q[:, :1], 1)), lambda q, w: abs(q[:, :1].reshape(-1))),
}
"""Values that compilers take for the same, each in two notations."""


def test_roots_of_one_value_in_two_notations() -> None:
    """XLA replaces a division by a root that nothing else reads, and finds two roots to be one earlier or later."""

    def step(w: Any, x: Any) -> Any:
        results = {}
        for number, (name, notations) in enumerate(NOTATIONS.items()):
            first, second = (jnp.sqrt(1 + value(x[number], w[number])) for value in notations)
            results[name] = jnp.sin(x[number])[:, : first[0].size].reshape(first.shape) * first / second
        return results

    rng = np.random.default_rng(0)
    w, x = ([jnp.asarray(rng.normal(size=(n, 6)), jnp.float32) for _ in NOTATIONS] for n in (6, 16))
    virtual = vnode.virtualize(step, virtual_nodes=4)
    one, *others = (jax.device_get(virtual.on(jax.devices()[:n])(w, x)) for n in (1, 2, 3))
    for other in others:
        assert [name for name in NOTATIONS if one[name].tobytes() != other[name].tobytes()] == []


def equal_norms(a: Any) -> Any:
    return jnp.sqrt((a * a).sum(-1)), jnp.sqrt((a**2).sum(-1))


def over_equal_norms(w: Any, x: Any) -> Any:
    a, b = x @ w, x @ w.T
    first, second = equal_norms(a)
    return a / first[:, None], b / second[:, None]


def over_roots_of_broadcast_values(w: Any, x: Any) -> Any:
    a, b = x @ w, x @ w.T
    first, second = (jnp.broadcast_to(n[:, None], a.shape) for n in equal_norms(a))
    return a / jnp.sqrt(first), b / jnp.sqrt(second), a / (first + 1.0), b / (second + 1.0)


def over_equal_scalars(w: Any, x: Any) -> Any:
    first, second = equal_norms(w.reshape(-1))
    return x @ w / first, x @ w.T / second


def over_equal_norms_in_a_loop(w: Any, x: Any) -> Any:
    def body(h: Any, _: Any) -> Any:
        first, second = equal_norms(h)
        return x @ w / first[:, None] + x @ w.T / second[:, None], None

    return jax.lax.scan(body, x @ w, None, length=3)[0]


def over_equal_norms_of_each(w: Any, x: Any) -> Any:
    def one(x: Any) -> Any:
        first, second = equal_norms(x @ w)
        return x @ w / first, x @ w.T / second

    return jax.lax.map(one, x)


def over_equal_local_estimates(w: Any, x: Any) -> Any:
    weight, z = jnp.where(x[:, 0] > 0, 1.0, 2.0), x @ w
    mean = (z * weight[:, None]).sum(0) / weight.sum()
    square = (z * z * weight[:, None]).sum(0) / weight.sum()
    return z - mean, z * square


EQUAL_DIVISORS = [
    (over_equal_norms, "exact"),
    (over_roots_of_broadcast_values, "exact"),
    (over_equal_scalars, "exact"),
    (over_equal_norms_in_a_loop, "exact"),
    (over_equal_norms_of_each, "exact"),
    (over_equal_local_estimates, "local"),
]


@pytest.mark.sampled(3, thorough=3)
@pytest.mark.parametrize(("step", "coupling"), EQUAL_DIVISORS, ids=lambda value: getattr(value, "__name__", value))
def test_divisors_that_the_compiler_finds_to_be_equal(step: Any, coupling: str) -> None:
    """XLA multiplies by the reciprocal of a divisor that two quotients share; when it knows depends on the devices."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=(n, 5)), jnp.float32) for n in (5, 16))
    virtual = vnode.virtualize(step, virtual_nodes=4, coupling=coupling, recompute_budget=9.0)
    placements = [vnode.Placement(4, jax.devices()[:n]) for n in (1, 2, 4)]
    placements.append(vnode.Placement(4, jax.devices()[:2], counts=(3, 1)))
    assert len({digest(virtual.on(placement)(w, x)) for placement in placements}) == 1


@pytest.mark.parametrize("lanes", [0, 9, True, 2.0])
def test_numbers_of_lanes_that_make_no_sense(lanes: Any) -> None:
    with pytest.raises(ValueError, match="lanes must be an integer from 1 to virtual_nodes=8"):
        vnode.virtualize(lambda w, x: w, virtual_nodes=8, lanes=lanes)


@pytest.mark.sampled(1, thorough=4)
@pytest.mark.parametrize("batch", [8, 13, pytest.param(16, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("place", ["even", "uneven", "idle", "mesh", "groups"])
def test_the_sign_of_zero(place: str, batch: int) -> None:
    """Zeros keep their sign wherever examples are picked from what devices hold; 1 / -0.0 is not 1 / 0.0."""
    d = jax.devices()
    placement = {
        "even": lambda: vnode.Placement(8, d[:4]),
        "uneven": lambda: vnode.Placement(8, d[:3], counts=(1, 5, 2)),
        "idle": lambda: vnode.Placement(8, d[:3], counts=(8, 0, 0)),
        "mesh": lambda: vnode.Placement(8, mesh=Mesh(np.array(d[:6]).reshape(2, 3), ("model", "vnode"))),
        "groups": lambda: vnode.Placement(8, groups=[d[:2], d[2:3]], counts=(2, 3, 3)),
    }[place]()

    def step(w: Any, x: Any) -> Any:
        mean = x.mean(0)
        behind = jnp.where(x.sum(1, keepdims=True) > mean.sum() - 99.0, x, mean)
        return w + mean, {"each": -x, "behind": behind, "reversed": x[::-1], "first": x[0], "moved": x.T}

    x = np.where(np.arange(3 * batch).reshape(batch, 3) % 2, 0.0, -0.0).astype(np.float32)
    w = np.full(3, -0.0, np.float32)
    virtual = vnode.virtualize(step, virtual_nodes=8, recompute_budget=9.0).on(placement)
    expected = jax.tree.map(np.signbit, jax.jit(step)(w, x)[1])
    spread = jax.sharding.NamedSharding(
        Mesh(np.array(d[: 8 if batch % 8 == 0 else 1]), ("data",)), PartitionSpec("data")
    )
    for given in (x, jax.device_put(x, spread), vnode.data.Batches(x, batch, shuffle=False).load(0, placement)):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.signbit, virtual(w, given)[1]), expected)
        np.testing.assert_array_equal(np.signbit(whole_batches(given)), np.signbit(x))
